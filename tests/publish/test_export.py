"""The exported folder, used with only torch and transformers."""

from __future__ import annotations

import json
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_export import USE, build_tiny, contents
from transformers import AutoTokenizer

from hfgolf.evaluate.sample import generate_text
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import export_model
from hfgolf.publish.hub import exported_files, with_current_code
from hfgolf.publish.load import load_exported
from hfgolf.system.errors import UserError


@pytest.mark.slow
def test_exported_model_works_without_hfgolf(exported, hub, push, python, tmp_path):
    """Logits, tokenizer and pipeline equal ours, from the Hub after a push, byte for byte."""
    model, tokenizer = build_tiny()
    ids = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    assert push("--format", "golf").status == 0
    outcome = python("-I", "-c", USE, "user/name", tmp_path, endpoint=hub.endpoint)
    assert outcome.returncode == 0, outcome.stderr
    with torch.no_grad():
        torch.testing.assert_close(load_file(tmp_path / "logits.safetensors")["logits"], model(ids).logits)
    said = json.loads(outcome.stdout)  # it printed nothing else and asked nothing
    assert said["text"] == "é <|endoftext|>"
    prompt = tokenizer("naïve 🌍", return_tensors="pt").input_ids
    ours = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=256)
    assert said["greedy"] == tokenizer.decode(ours[0, prompt.shape[1] :], skip_special_tokens=True)
    assert said["num_default"] > 1
    downloaded = {path.name: path for path in (tmp_path / "home").rglob("snapshots/*/*")}
    assert set(downloaded) >= {"model.safetensors", "layers_golf.py", "modeling_golf.py", "tokenizer.json"}
    for file in downloaded.values():
        assert file.read_bytes() == (exported / file.name).read_bytes(), file.name


def test_exported_folder_is_complete_and_readable(exported):
    code = {"configuration_golf.py", "layers_golf.py", "modeling_golf.py"}
    files = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in exported.iterdir()} == {*files, *code, "tokenizer_config.json"}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in exported.iterdir()}
    assert len(modes) == 1, "safetensors alone would be readable by its owner only"
    generation = json.loads((exported / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"], generation["do_sample"]) == (256, 256, True)
    assert AutoTokenizer.from_pretrained(exported).model_max_length == 32


@pytest.mark.parametrize(
    "switches", [{}, {"smear_gate": 12}, {"bigram_buckets": 8}, {"attention_span": "document"}], ids=str
)
def test_an_exported_folder_writes_text_with_its_own_settings(tmp_path, switches):
    """generate() takes use_cache from generation_config.json alone; without it, some switches fail."""
    model, tokenizer = build_tiny(**switches)
    export_model(model, tokenizer, tmp_path / "model", "a card")
    loaded = GolfForCausalLM.from_pretrained(tmp_path / "model")
    ids, greedy = torch.tensor([[5]]), {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **greedy, use_cache=False, pad_token_id=256)
    assert torch.equal(loaded.generate(ids, **greedy), expected)
    assert loaded.generation_config.use_cache is (False if switches else None)


def test_second_export_replaces_the_whole_folder(exported):
    before = contents(exported)
    (exported / "stale.safetensors").write_bytes(b"of another export")
    export_model(*build_tiny(), exported, before["README.md"].decode())
    assert contents(exported) == before
    with pytest.raises(FileNotFoundError):  # nor does one that fails halfway leave anything
        export_model(*build_tiny(), exported, "a card", [exported / "no picture"])
    assert contents(exported) == before
    assert [path.name for path in exported.parent.iterdir()] == ["model"]


def test_own_loader_matches_transformers(exported, recwarn, caplog):
    model, tokenizer = build_tiny()
    loaded, loaded_tokenizer = load_exported(str(exported))
    assert type(loaded) is type(model) and not loaded.training
    for name, tensor in loaded.cpu().state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    greedy = generate_text(loaded, loaded_tokenizer, "a", max_new_tokens=8, temperature=0)
    assert greedy == generate_text(model, tokenizer, "a", max_new_tokens=8, temperature=0)
    assert not recwarn.list and not caplog.records, "the generation config must not make greedy decoding warn"


def test_old_code_in_a_folder_is_told_and_not_pushed(exported, caplog):
    """Code of before transformers 5.24 writes wrong text there, also if its layers were not yet a file of their own."""
    current = contents(exported)
    (exported / "modeling_golf.py").write_text("# an older file")
    (exported / "layers_golf.py").unlink()
    load_exported(str(exported))
    (message,) = caplog.messages
    assert message.startswith(f"{exported} holds code of an older hfgolf") and "\n" not in message
    pushed = with_current_code(exported_files(exported))
    assert {path.name: path.read_bytes() for path in pushed} == current


@pytest.mark.parametrize("model_type", ["golf", "gpt2", "stranger"])
def test_foreign_model_code_is_never_executed(model_type, exported, tmp_path, monkeypatch):
    trace = tmp_path / "executed"
    evil = f"open({str(trace)!r}, 'w')\nraise SystemExit('executed')\n"
    for name in ("configuration_golf.py", "layers_golf.py", "modeling_golf.py", "tokenization_golf.py"):
        (exported / name).write_text(evil)
    config = json.loads((exported / "config.json").read_text())
    config |= {"model_type": model_type, "initializer_range": 0.02, "n_embd": 32, "n_head": 2, "n_layer": 1}
    (exported / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((exported / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "tokenization_golf.Evil"]}
    (exported / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers may ask, and a user may answer yes
    if model_type == "golf":
        model, _ = load_exported(str(exported))
        assert type(model).__module__.startswith("hfgolf.")
    else:
        refusal = {"gpt2": "lacks weights that its config.json asks for", "stranger": "which hfgolf never executes"}
        with pytest.raises(UserError, match=refusal[model_type]):
            load_exported(str(exported))
    assert not trace.exists()
