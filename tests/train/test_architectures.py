"""Runs of architectures other than Golf: from the config to an exported model, and the errors on the way."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from architectures import tiny_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hfgolf.config.parse import load_config
from hfgolf.config.sections import GolfSection, ModelSection, RunConfig
from hfgolf.run.metrics import read_rows
from hfgolf.system.errors import UserError
from hfgolf.train.build import check_golf, other_config
from hfgolf.train.setup import set_up


def fields_of(name: str, overrides: dict | None = None, **section: object) -> dict:
    config = tiny_config(name, overrides, **section)
    return other_config(config, 61, bos_token_id=1, eos_token_id=2, pad_token_id=2).to_dict()


def test_shape_of_the_section_reaches_each_config_by_its_own_names():
    llama = fields_of("llama", num_key_value_heads=1, tie_word_embeddings=False, attention_dropout=0.2)
    expected = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "tie_word_embeddings": False,
        "attention_dropout": 0.2,
        "vocab_size": 61,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
    }
    assert expected.items() <= llama.items()
    gpt2 = fields_of("gpt2", intermediate_size=48, dropout=0.1)
    expected = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 48, "n_positions": 16}
    expected |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
    assert expected.items() <= gpt2.items()
    assert {"ffn_dim": 128, "word_embed_proj_dim": 32, "dropout": 0.0}.items() <= fields_of("opt").items()
    biogpt = fields_of("biogpt", dropout=0.2)  # whose own default is 0.1
    assert {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.0}.items() <= biogpt.items()


@pytest.mark.parametrize(("name", "key"), [("llama", "dropout"), ("mamba", "attention_dropout"), ("gpt2", None)])
def test_a_dropout_that_an_architecture_does_not_have_is_refused_before_data_is_read(name, key, tiny_run):
    arguments = tiny_run(model__architecture=name, model__dropout=0.1, data__files="[nowhere.txt]")
    arguments += ["--model.attention_dropout=0.1", "--model.dropout=0"] if key == "attention_dropout" else []
    message = rf"^model\.{key}: {name} has none; set it to 0\.$" if key else "nowhere.txt"
    with pytest.raises(UserError, match=message):
        set_up(load_config(arguments))


def test_overrides_win_by_either_name():
    assert fields_of("gpt2", {"n_embd": 64})["n_embd"] == fields_of("gpt2", {"hidden_size": 64})["n_embd"] == 64
    assert fields_of("llama", {"rms_norm_eps": 0.5})["rms_norm_eps"] == 0.5
    assert fields_of("opt")["pad_token_id"] is None  # or that token would keep its first embedding


def test_folder_has_the_shape_and_the_run_has_the_rest(tmp_path):
    base = LlamaConfig(hidden_size=48, num_attention_heads=3, num_hidden_layers=1, vocab_size=7, rms_norm_eps=0.1)
    base.auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    base.save_pretrained(tmp_path)
    fields = fields_of(str(tmp_path), {"num_hidden_layers": 3})
    expected = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 3, "rms_norm_eps": 0.1}
    assert (expected | {"vocab_size": 61, "max_position_embeddings": 16}).items() <= fields.items()
    assert "auto_map" not in fields


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("lama", {}, r"model\.architecture: lama is not an architecture of transformers; did you mean llama\?"),
        ("a/b", {}, r"model\.architecture: cannot load a/b: .+"),
        ("bart", {}, r"model\.architecture: bart is an encoder and a decoder; choose a decoder alone\."),
        ("llama", {"rms_norm_epss": 1.0}, r"rms_norm_epss is not a field of llama; did you mean rms_norm_eps\?"),
        ("llama", {"hidden_size": "wide"}, r"model\.architecture: llama rejects this shape \(.+\)\."),
    ],
)
def test_mistake_is_one_line(name, overrides, message):
    with pytest.raises(UserError, match=message) as error:
        fields_of(name, overrides)
    assert "\n" not in str(error.value)


def test_options_of_golf_are_refused():
    with pytest.raises(UserError, match=r"^model\.norm: it is an option of architecture golf, and .* is llama"):
        ModelSection(architecture="llama", norm="layernorm")
    with pytest.raises(UserError, match=r"^golf\.forecast_every_steps: it needs model\.architecture golf, not llama"):
        RunConfig(model=ModelSection(architecture="llama"), golf=GolfSection(forecast_every_steps=1))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"overrides": {"head_gat": 8}}, "model.overrides.head_gat: golf has no such field; did you mean head_gate?"),
        ({"overrides": {"hidden_size": 8}}, "model.overrides.hidden_size: the key is model.hidden_size; set that."),
        ({"overrides": {"lanes": "yes"}}, "model.overrides.lanes: 'yes' is not allowed; allowed: true or false."),
        ({"overrides": {"loop": "1"}}, "model.overrides.loop: '1' is not allowed; allowed: null, or [first,"),
        ({"overrides": {"soft_cap_form": "poly5"}}, "model.overrides.logit_soft_cap: null is not allowed; allowed: a"),
        ({"activation": "swish"}, "model.activation: 'swish' is not allowed; allowed: one of relu2, "),
        (
            {"hidden_size": 36},
            "model.hidden_size: 36 is not allowed; allowed: an even number per head (of 4) for rope.",
        ),
    ],
    ids=str,
)
def test_mistake_in_a_golf_model_is_one_line(section, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        check_golf(RunConfig(model=ModelSection(**section)))
    assert str(error.value).startswith("model.") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"model__architecture": "lama"}, r"did you mean llama\?"),
        ({"model__overrides": "{head_gat: 8}"}, r"did you mean head_gate\?"),
        ({"model__activation": "swish"}, r"^model\.activation: 'swish'"),
    ],
)
def test_mistake_is_found_before_any_data_is_read(run, tiny_run, mistake, message):
    with pytest.raises(UserError, match=message):
        run(tiny_run(**mistake, data__files="/nowhere"))


@pytest.mark.slow
def test_run_learns_and_its_model_loads_without_code(run, hfgolf, tiny_run, reset_accelerate, caplog):
    folder = run(tiny_run(model__architecture="gpt2", train__max_steps=30, train__eval_every_steps=30))
    assert "trust_remote_code" not in caplog.text
    losses = [loss for row in read_rows(folder / "metrics.jsonl") for loss in row["train_losses"]]
    assert losses[-1] < losses[0] - 1
    summary = json.loads((folder / "summary.json").read_text())
    card = (folder / "model" / "README.md").read_text()
    assert summary["architecture"] in card and "trust_remote_code" not in card and "Golf model" not in card
    assert "Prompt and output together can have at most 32 tokens" in card
    assert not list((folder / "model").glob("*.py"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert type(model).__name__ == summary["architecture"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = torch.tensor([tokenizer("one and two make", add_special_tokens=False)["input_ids"]])
    assert model(ids).logits.isfinite().all()
    exported = folder.parent / "exported"
    said = hfgolf("export", "--run", folder, "--output", exported)
    assert said.status == 0, said.err
    for key, weight in load_file(folder / "model" / "model.safetensors").items():
        assert torch.equal(load_file(exported / "model.safetensors")[key], weight)
    text = folder.parent / "text.txt"
    text.write_text("one and two make three. " * 40)
    reset_accelerate()
    said = hfgolf("evaluate", "--model", folder / "model", "--files", text)
    assert said.status == 0 and "bits per byte" in said.out, said.err
    said = hfgolf("generate", "--model", folder / "model", "--max_new_tokens", "4")
    assert said.status == 0, said.err


@pytest.mark.slow
def test_weights_of_another_architecture_continue_in_a_new_run(run, tiny_run):
    first = run(tiny_run(model__architecture="gpt2", run__name="first", train__max_steps=20))
    with pytest.raises(UserError, match=r"^model\.init_from: .*first is a gpt2, but model\.architecture is llama"):
        run(tiny_run(model__architecture="llama", model__init_from=first, run__name="other"))
    with pytest.raises(UserError, match=r"^model\.overrides: the weights have another shape \(.*\)\.$"):
        wider = {"model__overrides": "{n_inner: 48}", "run__name": "wider"}
        run(without_tokenizer(tiny_run(model__architecture="gpt2", model__init_from=first, **wider)))
    options = {"model__architecture": "gpt2", "model__init_from": first, "run__name": "second"}
    second = run(without_tokenizer(tiny_run(**options, train__max_steps=4)))
    before, after = (read_rows(folder / "metrics.jsonl") for folder in (first, second))
    assert after[0]["train_losses"][0] < before[-1]["train_losses"][-1] + 0.5
    shutil.rmtree(first)  # a resumed run has all of it in its checkpoint
    run(without_tokenizer(tiny_run(**options, train__max_steps=6, train__resume="latest")))
    assert [row["step"] for row in read_rows(second / "metrics.jsonl")] == list(range(1, 7))


def without_tokenizer(arguments: list[str]) -> list[str]:
    """Return the arguments without those that say which tokenizer: it is that of the weights."""
    return [argument for argument in arguments if not argument.startswith("--tokenizer")]
