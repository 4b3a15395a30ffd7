"""hfgolf generate: the requested number of texts, and one line for every mistake."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def generate(build_model, tokenizer, tmp_path, hfgolf):
    """Run the script on a model with learned positions and return (exit status, stdout, stderr)."""
    build_model(position_embedding="learned", num_hidden_layers=2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return partial(hfgolf, "generate", "--model", tmp_path / "model")


def test_samples_are_numbered_by_seed(generate):
    status, printed, _ = generate("--prompt", "ab", "--num_samples", "2", "--seed", "3")
    assert status == 0 and printed.startswith("--- sample 1\nab")
    second = printed.split("--- sample 2\n")[1]
    assert generate("--prompt", "ab", "--seed", "4") == (0, second, "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "lacks weights that its config.json asks for: model.norm"),
        (lambda weights: weights["model.norm.weight"].fill_(math.nan), "model.norm.weight of .* nonfinite"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(7)}),
            "lacks weights that its config.json asks for: model.norm|cannot load",
        ),
    ],
)
def test_incomplete_model_writes_nothing(generate, tmp_path, change, says):
    """transformers would replace missing weights with random ones and continue."""
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    status, printed, error = generate()
    assert (status, printed, error.count("\n")) == (2, "", 1) and re.search(says, error), error


def with_keys(name: str, **keys: object) -> Callable[[Path], None]:
    """Return a function that sets keys in a JSON file of a folder."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | keys))


def with_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text)


def with_special_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text())
    tokens["added_tokens"].append(tokens["added_tokens"][0] | {"id": 90_000, "content": "line", "special": False})
    path.write_text(json.dumps(tokens))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_text("config.json", "{not json"), "config.json is not a JSON object; copy or export the model again."),
        (with_text("config.json", "null"), "config.json is not a JSON object"),
        (with_keys("config.json", model_type="banana"), "it needs code from its repository|[Uu]nrecognized|banana"),
        (with_keys("config.json", model_type=["golf"]), "cannot load .*unhashable"),
        (with_keys("config.json", hidden_size=10**9), "cannot load"),
        (with_keys("config.json", hidden_size=64), "the shapes of its weights do not match its config.json"),
        (with_keys("config.json", vocab_size=10**12), "the shapes of its weights do not match its config.json"),
        (
            with_keys("config.json", num_hidden_layers=10**9),
            "num_hidden_layers: 1000000000 .* allowed: .* at most 1000",
        ),
        (
            with_keys("config.json", model_type="llama", auto_map={}, initializer_range=0.02, num_hidden_layers=10**9),
            "num_hidden_layers 1000000000 .* allowed: 1 to 1000",
        ),
        (with_keys("config.json", num_hidden_layers=1), "weights that its config.json does not use: model.layers.1"),
        (with_text("tokenizer.json", "[" * 100_000), "tokenizer.json is not a JSON object"),
        (with_text("tokenizer.json", "{}"), "cannot load the tokenizer of .*added_tokens"),
        (with_special_token, r"its tokenizer returned id \d+, but its embedding has only \d+ entries"),
        (with_text("tokenizer_config.json", "[]"), "tokenizer_config.json is not a JSON object"),
        (with_keys("tokenizer_config.json", tokenizer_class="BertTokenizer"), "cannot load the tokenizer of"),
        (with_keys("tokenizer_config.json", model_max_length="many"), "cannot load the tokenizer of"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "cannot load the tokenizer of"),
    ],
)
def test_malformed_model_file_is_one_line(generate, tmp_path, hfgolf, change, says):
    change(tmp_path / "model")
    (tmp_path / "text.txt").write_text("line 1\n" * 9)
    for status, printed, error in (
        generate("--prompt", "line"),
        hfgolf("evaluate", "--model", tmp_path / "model", "--files", tmp_path / "text.txt"),
    ):
        assert (status, printed, error.count("\n")) == (2, "", 1) and re.search(says, error), error
        assert len(error) < 600


def test_options_control_sampling(generate, tmp_path):
    """The generation config in a model's folder may ask for a million beams, or an endless text."""
    plain = generate("--prompt", "ab")
    with_keys("generation_config.json", num_beams=10**6, min_length=10**11, eos_token_id="x")(tmp_path / "model")
    assert generate("--prompt", "ab") == plain and plain.status == 0


def test_the_prompt_is_the_second_word_or_standard_input(generate, hfgolf, tmp_path, monkeypatch):
    named = generate("--prompt", "line\nab", "--seed", 3)
    assert named.status == 0 and named.out.startswith("line\nab")
    assert hfgolf("generate", tmp_path / "model", "--seed", 3, "line\nab") == named
    assert generate("line\nab", "--seed", 3) == named  # after --model
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"line\nab\n")))
    assert generate("-", "--seed", 3) == named
    status, out, error = generate("one", "two")
    assert (status, out) == (2, "")
    assert error == "error: two: a second prompt; put a prompt of several words in quotes.\n"


def test_a_text_cannot_control_the_terminal(generate, monkeypatch):
    monkeypatch.setattr("hfgolf.evaluate.sample.generate_text", lambda *_, **__: "a\x1b[2Jb\n")
    assert generate().out == "a\x1b[2Jb\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate().out == "a\\x1b[2Jb\n\n"
