"""scripts/generate.py: as many texts as asked for, and one line for every mistake."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate.py"


@pytest.fixture
def generate(build_model, tokenizer, tmp_path, run_script):
    """Run the script on a model with learned positions; returns (exit status, what it printed, its error)."""
    build_model(position_embedding="learned").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return partial(run_script, "generate.py", "--model", tmp_path / "model")


def test_samples_are_numbered_by_seed(generate):
    status, printed, _ = generate("--prompt", "ab", "--num_samples", "2", "--seed", "3")
    assert status == 0 and printed.startswith("--- sample 1\nab")
    second = printed.split("--- sample 2\n")[1]
    assert generate("--prompt", "ab", "--seed", "4") == (0, second, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max_new_tokens", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "1e-300"),
        ("--seed", "-1"),
        ("--seed", str(2**70)),
        ("--prompt", "caf\udce9"),
        ("--top_k", "-1"),
        ("--top_p", "0"),
        ("--num_samples", "0"),
        ("--prompt", "x" * 16),
        ("--model", "nowhere"),
    ],
)
def test_a_mistake_is_one_line(generate, arguments):
    status, printed, error = generate(*arguments)
    assert status == 2 and not printed
    assert error.startswith("error: ") and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "lacks weights that its config.json asks for: model.norm"),
        (lambda weights: weights["model.norm.weight"].fill_(math.nan), "model.norm.weight of .* not finite"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(7)}),
            "lacks weights that its config.json asks for: model.norm|cannot load",
        ),
    ],
)
def test_a_model_that_is_not_whole_writes_nothing(generate, tmp_path, change, says):
    """transformers puts random weights in the place of missing ones, and goes on."""
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    status, printed, error = generate()
    assert (status, printed, error.count("\n")) == (2, "", 1) and re.search(says, error), error
