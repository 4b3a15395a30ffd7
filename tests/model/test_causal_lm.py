"""Models of transformers, called as Golf is: the loss and gradients are their own, in chunks if the head is plain."""

from __future__ import annotations

import pytest
import torch
from architectures import OVERRIDES, VOCABULARY, tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hfgolf.model import modeling_golf
from hfgolf.model.causal_lm import takes_shift_labels
from hfgolf.system.errors import UserError

NOT_PLAIN = {"gemma2": "a soft cap", "phi": "a bias", "opt": "no base model", "granite": "a factor on the logits"}


@pytest.fixture
def labels() -> torch.Tensor:
    """(B, T) shifted labels, some of them ignored."""
    targets = torch.randint(VOCABULARY, (3, 16))
    targets[1, 5:] = -100
    return targets


@pytest.mark.parametrize("name", OVERRIDES)
def test_loss_and_gradients_are_those_of_the_logits(name, labels, monkeypatch):
    monkeypatch.setattr(modeling_golf, "CHUNK_ELEMENTS_CPU", 5 * VOCABULARY)  # 48 rows in chunks of 5
    model = tiny_model(name).train()
    assert model.head_is_plain == (name not in NOT_PLAIN)
    ids = torch.randint(VOCABULARY, (3, 16))
    own = F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
    own.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    output = model(input_ids=ids, shift_labels=labels)
    output.loss.backward()
    assert output.logits is None
    torch.testing.assert_close(output.loss, own, rtol=1e-6, atol=1e-6)
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (key not in gradients)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_divisor_of_the_loss(name, labels):
    model = tiny_model(name)
    ids = torch.randint(VOCABULARY, (3, 16))
    mean = model(ids, shift_labels=labels).loss
    torch.testing.assert_close(model(ids, shift_labels=labels, num_items_in_batch=1).loss, mean * (labels >= 0).sum())
    assert model(ids, shift_labels=torch.full_like(labels, -100)).loss == 0


def test_without_labels_the_call_is_the_models_own():
    model = tiny_model("llama")
    theirs = AutoModelForCausalLM.from_config(model.config)
    theirs.load_state_dict(model.state_dict())
    assert takes_shift_labels(model) and not takes_shift_labels(theirs)
    ids = torch.randint(VOCABULARY, (1, 5))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), theirs.generate(ids, **options))
    assert model(ids, use_cache=True).past_key_values is not None


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(name, labels):
    ids, seen = torch.randint(VOCABULARY, (3, 16)), []
    for on in (False, True):
        torch.manual_seed(0)
        model = tiny_model(name, gradient_checkpointing=on, dropout=0.1, attention_dropout=0.1).train()
        torch.manual_seed(1)
        model(ids, shift_labels=labels).loss.backward()
        seen.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other)


def test_building_leaves_the_random_numbers_alone():
    """Two models built in a row differ as if nothing had run in between, and the weights are those of transformers."""
    torch.manual_seed(3)
    model = tiny_model("gpt2")
    drawn = torch.rand(3)
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(model.config)
    assert torch.equal(drawn, torch.rand(3))
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_model_that_sees_later_tokens_is_refused():
    with pytest.raises(UserError, match=r"cannot train bert: it is not causal: a token changes .* earlier ones\.$"):
        tiny_model("bert")
    assert tiny_model("bert", {"is_decoder": True}).head_is_plain is False  # its head has a bias


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_every_token_learns_its_embedding(name):
    """Also the end of text, and the id that an architecture takes for padding: neither is padding in training."""
    model = tiny_model(name, tie_word_embeddings=False)
    ids = torch.tensor([[0, 1, 2, 3]])
    model(ids, shift_labels=ids.flip(1)).loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    assert (gradient[:4].norm(dim=1) > 0).all()


@pytest.mark.slow
def test_compiled_loss_and_gradients_are_those_of_eager(labels):
    ids, seen, model = torch.randint(VOCABULARY, (3, 16)), [], tiny_model("llama").train()
    for is_compiled in (False, True):
        if is_compiled:
            model.compile(backend="aot_eager")
        model(input_ids=ids, shift_labels=labels).loss.backward()
        seen.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
