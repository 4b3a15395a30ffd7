"""The same loop on a CUDA GPU: make test-gpu. Skipped, with a reason, if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from faults import rows

from hfgolf.run.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in read_metrics(folder / "metrics.jsonl").events if event["event"] == kind]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_precision_learns(run, tiny_run, precision, compiled):
    table = rows(
        run(tiny_run(train__max_steps=40, train__mixed_precision=precision, train__compile=str(compiled).lower()))
    )
    assert table[-1]["train_loss"] < table[0]["train_loss"] - 1
    assert table[-1]["memory_bytes"] > 0
    assert table[-1]["data_seconds"] < table[-1]["compute_seconds"]


def test_gpu_matches_cpu_in_fp32(run, tiny_run, monkeypatch):
    on_gpu = [row["train_loss"] for row in rows(run(tiny_run(run__name="gpu")))]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    on_cpu = [row["train_loss"] for row in rows(run(tiny_run(run__name="cpu")))]
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


def test_resume_on_the_gpu_matches_a_straight_run(run, tiny_run):
    options = {"train__deterministic": "true", "model__dropout": 0.1, "schedule__name": "constant"}
    straight = rows(run(tiny_run(run__name="straight", **options, train__max_steps=8)))
    run(tiny_run(run__name="broken", **options, train__max_steps=5))
    resumed = rows(run(tiny_run(run__name="broken", **options, train__max_steps=8, train__resume="latest")))
    assert [row["train_losses"] for row in resumed] == [row["train_losses"] for row in straight]


def test_oversized_micro_batch_is_halved_until_it_fits(run, tiny_run):
    """The allocator is limited to 2 GiB on any GPU; half a million tokens at once need more."""
    limit_bytes = 2 * 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.mem_get_info()[1])
    try:
        folder = run(
            tiny_run(
                train__max_steps=3,
                batch__tokens_per_step=2**14 * 32,
                batch__micro_batch_size=2**14,
                train__eval_tokens=1000,
            )
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    told = events(folder, "out_of_memory")
    sizes = [row["micro_batch_size"] for row in told]
    assert sizes == [[2**14 >> i, 2**13 >> i] for i in range(len(sizes))] and sizes
    assert all("out of memory" in row["reason"] for row in told)
    table = rows(folder)
    assert [row["tokens"] for row in table] == [step * 2**14 * 32 for step in (1, 2, 3)]
    assert table[-1]["train_loss"] < table[0]["train_loss"]
    assert table[-1]["memory_bytes"] <= limit_bytes


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_nan_step_is_skipped_on_the_gpu(run, tiny_run, spoil_gradients, precision):
    spoil_gradients(lambda step: step == 2)
    folder = run(tiny_run(train__mixed_precision=precision))
    assert [event["step"] for event in events(folder, "skipped_step")] == [3]
    table = rows(folder)
    assert [row["grad_norm"] is None for row in table] == [False, False, True, False, False, False]
    assert table[-1]["train_loss"] < table[0]["train_loss"]
