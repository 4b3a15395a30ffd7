"""Every rung reads the same tokens and trains the same model, and the table compares them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from hfgolf.commands.scratch import scratch_run
from hfgolf.config.parse import load_config
from hfgolf.data.batches import MicroBatches
from hfgolf.data.token_cache import load_tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.ladder")


@pytest.mark.parametrize("options", [{}, {"tokenizer__kind": "bpe", "tokenizer__vocab_size": 300}])
def test_every_rung_reads_the_training_blocks(ladder, tiny_run, tmp_path, corpus_file, options):
    for number in range(3):  # several documents, each of several pieces
        text = corpus_file.read_text(encoding="utf-8")[number * 100 :]
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    config = load_config(tiny_run(data__files=f"{tmp_path}/*.txt", data__in_memory="false", **options)).config
    tokens = load_tokens(config.data, config.tokenizer)
    stream, length = tokens.train, 32
    num_blocks = (len(stream.tokens) - 1) // length
    blocks = np.random.default_rng(0).permutation(num_blocks)[:200] * length
    starts = np.cumsum(stream.piece_tokens) - stream.piece_tokens
    assert any(start // length * length in blocks for start in starts[1:].tolist())  # one of them spans two pieces
    texts = ladder.TextFiles(tokens, length, blocks, tmp_path)
    expected = ladder.vectorized(stream, length)(blocks)
    assert torch.equal(texts.read(blocks), expected)
    assert torch.equal(ladder.from_disk(stream.path, length)(blocks), expected)
    assert torch.equal(ladder.from_memory(stream.tokens, length)(blocks), expected)
    item = MicroBatches(stream, length, seed=7)[np.arange(4)]
    first = ladder.block_starts(7, np.arange(4), num_blocks, length)
    assert torch.equal(ladder.vectorized(stream, length)(first)[:, :-1], item["input_ids"])


@pytest.fixture
def rungs(ladder, tiny_run, tmp_path) -> Iterator[list[Any]]:
    """Return the rungs of a tiny, uncompiled bf16 run with accumulation and clipping."""
    arguments = tiny_run(train__mixed_precision="bf16", batch__micro_batch_size=4, train__max_grad_norm=0.1)
    with scratch_run(load_config(arguments), "test") as run:
        yield ladder.build_rungs(run, 6, tmp_path, may_compile=False)


def test_every_rung_has_the_same_losses(ladder, rungs):
    rows = ladder.climb(rungs, num_losses=5, repetitions=1)
    ladder.check_losses(rows)
    assert [row["rung"] for row in rows if "skipped" in row] == ["compiled"]
    losses = rows[0]["losses"]
    assert losses[-1] < losses[0] - 0.2  # the tolerances are small compared with this
    assert all(row["losses_off_by"] < (1e-5 if row["precision"] == "no" else 0.02) for row in rows if "losses" in row)


def test_rung_with_different_data_is_rejected(ladder, rungs):
    two = [rungs[3], ladder.Rung("shifted", "", lambda: rungs[2].step() + 2e-3)]
    rows = ladder.climb(two, num_losses=3, repetitions=1)
    with pytest.raises(ValueError, match=r"shifted: its losses .* differ from those of vectorized"):
        ladder.check_losses(rows)


# Of a step in fp32 that takes 1 s and is not faster in bf16: seconds of its products, FLOP/s of large ones, other load
WHY = {
    "other programs took 62% of the cores": ({"no": 0.9, "bf16": 0.4}, {"no": 1, "bf16": 2.5}, 0.62),
    "(AMX) multiplies large matrices 0.50x": ({"no": 0.9, "bf16": 1.8}, {"no": 1, "bf16": 0.5}, 0.02),
    "products are too small: 1.10x as fast in bf16, large ones 2.50x": (
        {"no": 0.88, "bf16": 0.8},
        {"no": 1, "bf16": 2.5},
        0.0,
    ),
    "products are only 20% of the step in fp32": ({"no": 0.2, "bf16": 0.1}, {"no": 1, "bf16": 2.5}, 0.0),
    "the rest of the step, casts included, takes 600 ms in bf16 and 200 ms in fp32": (
        {"no": 0.8, "bf16": 0.4},
        {"no": 1, "bf16": 2.5},
        0.0,
    ),
}


@pytest.mark.parametrize("reason", WHY)
def test_a_small_gain_of_bf16_is_explained_by_what_was_measured(ladder, reason):
    products, peak, others = WHY[reason]
    line = ladder.why_no_gain(ladder.Bf16Facts({"no": 1.0, "bf16": 1.0}, products, peak, "AMX", others))
    assert line.startswith("bf16 is only 1.00x as fast as fp32: ") and reason in line and "\n" not in line
    assert sum(other in line for other in WHY) == 1


def test_script_draws_every_rung(tiny_run, tmp_path, run_script):
    """SGD without clipping, because other rules hardly notice a wrong scale of accumulated gradients."""
    options = {"optim__name": "sgd", "optim__learning_rate": 0.5, "train__max_grad_norm": "null"}
    options |= {
        "schedule__warmup_steps": 4,
        "model__dropout": 0.1,
        "batch__micro_batch_size": 4,
        "batch__segment_length": 16,
        "train__compile": "false",
    }
    arguments = tiny_run(**options)
    output = tmp_path / "ladder"
    status, said, error = run_script("ladder.py", *arguments, "--output", output, "--repetitions", 1, "--losses", 3)
    assert status == 0, error
    rows = json.loads((output / "ladder.json").read_text())["rungs"]
    assert (output / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert all(row["rung"] in said for row in rows) and len(rows) == 8
    assert "skipped: train.compile is false" in said
    assert "skipped: train.mixed_precision is no (command line)" in said
    assert all(row["losses_off_by"] < 1e-5 for row in rows if "losses" in row)
