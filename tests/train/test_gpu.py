"""The same loop on a CUDA GPU: make test-gpu. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_precision_learns(run, tiny_run, precision, compiled):
    table = rows(
        run(tiny_run(train__max_steps=40, train__mixed_precision=precision, train__compile=str(compiled).lower()))
    )
    assert table[-1]["train_loss"] < table[0]["train_loss"] - 1
    assert table[-1]["memory_bytes"] > 0
    assert table[-1]["data_seconds"] < table[-1]["compute_seconds"]


def test_fp32_on_the_gpu_is_fp32_on_the_cpu(run, tiny_run, monkeypatch):
    on_gpu = [row["train_loss"] for row in rows(run(tiny_run(run__name="gpu")))]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    on_cpu = [row["train_loss"] for row in rows(run(tiny_run(run__name="cpu")))]
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


def test_a_resume_on_the_gpu_is_the_run(run, tiny_run):
    options = {"train__deterministic": "true", "model__dropout": 0.1, "schedule__name": "constant"}
    straight = rows(run(tiny_run(run__name="straight", **options, train__max_steps=8)))
    run(tiny_run(run__name="broken", **options, train__max_steps=5))
    resumed = rows(run(tiny_run(run__name="broken", **options, train__max_steps=8, train__resume="latest")))
    assert [row["train_losses"] for row in resumed] == [row["train_losses"] for row in straight]
