"""Samples are repeatable, change no state, and never exceed the model's positions."""

from __future__ import annotations

import math

import pytest
import torch

from hfgolf.evaluate.sample import generate_text
from hfgolf.system.errors import UserError


def test_only_the_seed_decides_a_sample(build_model, tokenizer):
    model = build_model(dropout=0.5).train()
    torch.manual_seed(1)
    first = generate_text(model, tokenizer, "ab", max_new_tokens=10, seed=7)
    torch.manual_seed(2)
    assert generate_text(model, tokenizer, "ab", max_new_tokens=10, seed=7) == first
    assert generate_text(model, tokenizer, "ab", max_new_tokens=10, seed=8) != first


def test_sampling_restores_generator_and_mode(build_model, tokenizer):
    model = build_model().train()
    before = torch.get_rng_state()
    generate_text(model, tokenizer, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_temperature_0_takes_the_likeliest_token(build_model, tokenizer):
    model = build_model().eval()
    ids = [256, *b"ab"]
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    expected = tokenizer.decode(ids[1:], skip_special_tokens=True)
    assert generate_text(model, tokenizer, "ab", max_new_tokens=6, temperature=0) == expected
    assert generate_text(model, tokenizer, "ab", max_new_tokens=6, top_k=1) == expected


@pytest.mark.parametrize("setting", [{"temperature": -1}, {"top_p": 2}, {"top_k": -1}, {"max_new_tokens": 0}])
def test_a_setting_out_of_range_is_one_line(build_model, tokenizer, setting):
    with pytest.raises(UserError, match=r"^A setting is out of range; allowed: max_new_tokens from 1"):
        generate_text(build_model(), tokenizer, "ab", **setting)


def test_sampled_text_that_spells_a_special_token_is_text(build_model, tokenizer):
    prompt = "é<|endoftext|>"
    assert generate_text(build_model(), tokenizer, prompt, max_new_tokens=1).startswith(prompt)


def test_a_new_document_is_never_empty(build_model, tokenizer):
    def prefer_end(module, inputs, output):
        output.logits[..., tokenizer.eos_token_id] += 1000

    model = build_model()
    model.register_forward_hook(prefer_end)
    assert len(generate_text(model, tokenizer)) == 1
    assert generate_text(model, tokenizer, "ab") == "ab"


@pytest.mark.parametrize(("value", "temperature"), [(math.nan, 0), (math.inf, 1), (-math.inf, 1)])
def test_nonfinite_logits_are_one_line(build_model, tokenizer, value, temperature):
    model = build_model()
    model.lm_head.weight.data.fill_(value)
    with pytest.raises(UserError, match=r"^The model's logits are not finite, so it cannot generate text"):
        generate_text(model, tokenizer, "ab", max_new_tokens=4, temperature=temperature)


def test_sample_ends_at_the_last_learned_position(build_model, tokenizer):
    model = build_model(position_embedding="learned")
    text = generate_text(model, tokenizer, "x" * 14, max_new_tokens=100)
    assert len(tokenizer(text)["input_ids"]) <= 15 + 2  # an invalid byte decodes to a character of three bytes
    with pytest.raises(UserError, match="The prompt has 15 tokens, but this model takes at most 14"):
        generate_text(model, tokenizer, "x" * 15)


def test_rope_samples_beyond_the_training_length(build_model, tokenizer):
    prompt = "x" * 40
    assert generate_text(build_model(), tokenizer, prompt, max_new_tokens=4).startswith(prompt)
