"""A native folder in the hands of transformers alone: no code, no question, the same logits and tokens."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_native import LAYERNORM, LEARNED
from tiny_export import build_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.convert import convert_folder
from hfgolf.publish.export import export_model
from hfgolf.publish.hub import push_model
from hfgolf.publish.load import load_exported

MODELS = {
    "Apertus": {},
    "Qwen3": {"activation": "swiglu"},
    "Llama": {"activation": "swiglu", "qk_norm": False},
    "Arcee": {"qk_norm": False},
    "Starcoder2": LAYERNORM | {"activation": "gelu_new"},
    "GPT2": LEARNED | {"activation": "gelu_new", "num_key_value_heads": 2},
}
USE = """
import json, sys
from pathlib import Path
sys.modules["hfgolf"] = None  # makes importing it fail, even if it is installed
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

root = Path(sys.argv[1])
ids = load_file(root / "ids.safetensors")["ids"]
said, tensors = {}, {}
for folder in sorted(root.glob("native-*")):
    name = folder.name.removeprefix("native-")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        tensors["logits-" + name] = model(ids).logits
    tensors["greedy-" + name] = model.generate(
        ids[:1, :5], max_new_tokens=8, do_sample=False, use_cache=True, eos_token_id=None
    )
    said[name] = [type(model).__name__, tokenizer("na\u00efve <|endoftext|>").input_ids, tokenizer.decode([97, 32, 98])]
    AutoModel.from_pretrained(folder)
    if name != "Apertus":  # for which transformers has no classifier
        AutoModelForSequenceClassification.from_pretrained(folder)
save_file(tensors, root / "tensors.safetensors")
print(json.dumps(said))
"""
SMOOTHED = """
import json, sys
sys.modules["hfgolf"] = None
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
rows = [tokenizer(f"{number} and {number}").input_ids for number in range(10, 18)]
data = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
arguments = TrainingArguments(sys.argv[2], max_steps=30, learning_rate=0.01, label_smoothing_factor=0.1,
    per_device_train_batch_size=8, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
ids = torch.tensor(rows)
with torch.no_grad():
    logits = model(ids).logits[:, :-1].flatten(0, 1)
before = trainer.evaluate()["eval_loss"]
trainer.train()
print(json.dumps({"expected": cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1).item(), "before": before,
    "after": trainer.evaluate()["eval_loss"], "plain": model(ids, labels=ids).loss.item()}))
"""


@pytest.mark.slow
def test_native_folders_need_only_transformers(python, tmp_path):
    """Each architecture: logits, greedy tokens through a KV cache, tokenizer, AutoModel and a classifier."""
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    golfs = {}
    for name, options in MODELS.items():
        golfs[name], tokenizer = build_tiny(**options)
        export_model(golfs[name], tokenizer, tmp_path / f"golf-{name}", "# A card")
        said = convert_folder(str(tmp_path / f"golf-{name}"), tmp_path / f"native-{name}", "native")
        assert said.startswith(name) and "logits within" in said
        assert not list((tmp_path / f"native-{name}").glob("*.py"))
    outcome = python("-I", "-c", USE, tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    said, tensors = json.loads(outcome.stdout), load_file(tmp_path / "tensors.safetensors")
    assert said.keys() == MODELS.keys()
    for name, golf in golfs.items():
        kind, read, written = said[name]
        assert kind.startswith(name) and read == [*"naïve ".encode(), 256] and written == "a b"
        with torch.no_grad():
            torch.testing.assert_close(tensors[f"logits-{name}"], golf(ids).logits, rtol=0, atol=1e-5)
        greedy = golf.generate(ids[:1, :5], max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert torch.equal(tensors[f"greedy-{name}"], greedy), name


@pytest.mark.slow
def test_label_smoothing_of_trainer_learns_the_next_token(exported, python):
    """Trainer shifts the labels of a class whose name it knows."""
    outcome = python("-I", "-c", SMOOTHED, exported, "trainer")
    assert outcome.returncode == 0, outcome.stderr
    said = json.loads(outcome.stdout.splitlines()[-1])
    assert said["before"] == pytest.approx(said["expected"], rel=1e-4)
    assert said["after"] < said["before"] - 1 and said["plain"] < 3, said


def test_a_native_folder_becomes_golf_again(exported, tmp_path):
    golf, _ = build_tiny()
    convert_folder(str(exported), tmp_path / "native", "native")
    assert convert_folder(str(tmp_path / "native"), tmp_path / "golf", "golf") == "GolfForCausalLM, as it was"
    back, tokenizer = load_exported(str(tmp_path / "golf"))
    assert isinstance(back, GolfForCausalLM) and back.config.eos_token_id == 256 and tokenizer.split_special_tokens
    for name, tensor in golf.state_dict().items():
        assert torch.equal(back.cpu().state_dict()[name], tensor), name
    card = (tmp_path / "golf" / "README.md").read_text()
    assert "trust_remote_code=True" in card and "qkv_proj" in card and f'"{tmp_path / "golf"}"' in card
    assert {path.name for path in (tmp_path / "golf").iterdir()} == {path.name for path in exported.iterdir()}


def test_an_edited_card_without_the_sections_stays_also_from_the_hub(exported, hub, python, tmp_path):
    mine = "---\nlicense: mit\n---\n\n# Mine\n\nNothing else.\n"
    (exported / "README.md").write_text(mine)
    (exported / "loss.png").write_bytes(b"a picture")
    convert_folder(str(exported), tmp_path / "native", "native")
    push_model(exported, "user/mine", private=False, message="m", format="golf")
    options = ("--model", "user/mine", "--to", "native", "--output", tmp_path / "from-hub")
    assert python("-m", "hfgolf", "export", *options, endpoint=hub.endpoint).returncode == 0
    for folder in (tmp_path / "native", tmp_path / "from-hub"):
        assert (folder / "README.md").read_text() == mine
        assert (folder / "loss.png").read_bytes() == b"a picture"


def test_the_end_of_a_text_is_trained_in_a_native_model(exported, tmp_path):
    convert_folder(str(exported), tmp_path / "native", "native")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    end = AutoTokenizer.from_pretrained(tmp_path / "native").eos_token_id
    ids = torch.tensor([[end, 5, 6, end, 7]])
    native(ids, labels=ids).loss.backward()
    gradient = native.get_input_embeddings().weight.grad
    assert gradient[end].norm() > 0.1 * gradient[5].norm()
    assert native.generation_config.pad_token_id == end


def test_export_script_converts_both_ways_and_refuses_in_one_line(exported, hfgolf, tmp_path):
    native = tmp_path / "native"
    said = hfgolf("export", exported, "--to", "native", "--output", native)
    assert said.status == 0 and said.out.startswith(f"exported {exported} to {native} as ApertusForCausalLM"), said.err
    config = json.loads((native / "config.json").read_text())
    assert config["hidden_act"] == "relu2"
    # its default is 3, a token like any other; of a token that is padding, an embedding trains nothing
    assert [name for name, value in config.items() if value is None] == ["pad_token_id"]
    assert hfgolf("export", "--model", native, "--to", "golf", "--output", tmp_path / "golf").status == 0
    for arguments, message in (
        (["--model", exported], "--model: say what to convert it to and where, with --to and --output."),
        (["--model", exported, "--checkpoint", "best"], "--checkpoint: only a run has checkpoints"),
        (["--model", exported, "--to", "native", "--output", native], f"--output: {native} already exists"),
        (["--model", exported, "--to", "gguf", "--output", "x"], "--output: x can't be written; allowed: a name that"),
        (["--model", exported, "--quantization", "f16"], "--quantization: only a GGUF file has it; add --to gguf."),
        ([], "one of the arguments RUN --run --model is required"),
    ):
        said = hfgolf("export", *arguments)
        assert said.status == 2 and said.err.startswith(f"error: {message}"), said.err
        assert said.err.count("\n") == 1
