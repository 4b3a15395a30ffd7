"""An interrupted run equals a straight one, to the last bit. In test_fsdp.py, it changes its number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import column, differences, rows, same
from safetensors.torch import load_file
from tiny_export import exported_weights

from hfgolf.system.errors import UserError
from hfgolf.system.stopwatch import KINDS
from hfgolf.train import loop

pytestmark = pytest.mark.slow

TIMINGS = {
    *(f"seconds_{kind}" for kind in KINDS),
    "elapsed_seconds",
    "logged_at",
    "data_seconds",
    "compute_seconds",
    "tokens_per_second",
    "mfu",
    "memory_bytes",
    "process_memory_bytes",
    "gpu_memory_bytes",
    "gpu_utilization",
}
CONSTANT = {"schedule__name": "constant"}  # so that learning rates do not depend on the number of steps


class Interrupted(Exception):
    """The process dies here."""


def run_in_parts(run: Any, command: Any, stops: tuple[int, ...], monkeypatch: Any, **options: Any) -> Path:
    """Return the folder of a run that dies before the step after each of these, and is resumed each time."""
    real_step = loop.train_step
    for number, stop_at in enumerate(stops):

        def dying_step(run_: Any, total_steps: float, stop_at: int = stop_at) -> Any:
            if run_.state.step == stop_at:
                raise Interrupted
            return real_step(run_, total_steps)

        monkeypatch.setattr(loop, "train_step", dying_step)
        resume = {"train__resume": "auto"} if number else {}
        with pytest.raises(Interrupted):
            run(command(run__name="broken", **options, **resume))
    monkeypatch.setattr(loop, "train_step", real_step)
    broken: Path = run(command(run__name="broken", **options, train__resume="auto"))
    return broken


def without_timings(folder: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row.keys() - TIMINGS} for row in rows(folder)]


def latest(folder: Path) -> Path:
    return folder / "checkpoints" / "latest"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"train__mixed_precision": "fp16", "model__dropout": 0.1}, id="fp16"),
        pytest.param(
            {"optim__state_dtype": "bf16", "train__mixed_precision": "bf16", "data__num_workers": 1}, id="bf16-workers"
        ),
        pytest.param({"data__val_fraction": 0.9, "train__eval_tokens": 1000, "model__dropout": 0.1}, id="epochs"),
        pytest.param(
            {"model__architecture": "opt", "train__mixed_precision": "bf16", "optim__ema_decay": 0.9}, id="opt-own-loss"
        ),
    ],
)
def test_resumed_run_matches_a_straight_run_bitwise(run, tiny_run, monkeypatch, fp16_on_cpu, options):
    """Rows and last checkpoint are bitwise equal after a resume that repeats a step.

    test_all_state.py resumes three times in a row, with averages, loops, segments, rounding, accumulation and dropout.
    """
    if options.get("train__mixed_precision") == "fp16":
        fp16_on_cpu(2.0**18)  # overflows at first, then doubles gradually
    options = {"train__max_steps": 9, "train__save_every_steps": 2, "train__eval_every_steps": 4} | options
    if "data__val_fraction" in options:
        options["batch__tokens_per_step"] = 1024
    straight = run(tiny_run(run__name="straight", **options))
    if "data__val_fraction" in options:
        assert rows(straight)[-1]["epoch"] > 2

    broken = run_in_parts(run, tiny_run, (5,), monkeypatch, **options)
    assert len(column(straight, "train_losses")) == 9
    assert without_timings(broken) == without_timings(straight)
    assert differences(latest(broken), latest(straight)) == []
    assert same(*(load_file(folder / "model" / "model.safetensors") for folder in (broken, straight)))


def test_resume_with_another_micro_batch_size_matches(run, tiny_run, shared_run, copied_run):
    """After three micro-batches, two per step: accelerate's own counter would step too early."""
    straight = shared_run(**CONSTANT)
    copied_run(**CONSTANT, train__max_steps=3)
    other = run(tiny_run(**CONSTANT, batch__micro_batch_size=4, train__resume="latest"))
    assert column(other, "sample_hashes") == column(straight, "sample_hashes")
    assert column(other, "train_losses") == pytest.approx(column(straight, "train_losses"), rel=1e-5)
    assert column(other, "grad_norms") == pytest.approx(column(straight, "grad_norms"), rel=1e-4)


def test_averages_can_start_at_a_resume(run, tiny_run, copied_run, caplog):
    folder = copied_run(**CONSTANT)
    before = load_file(latest(folder) / "model.safetensors")
    run(tiny_run(**CONSTANT, train__resume="latest", train__max_steps=7, optim__ema_decay=0.3))
    assert caplog.messages.count("the checkpoint has no averaged weights; the average starts from its weights") == 1
    after = load_file(latest(folder) / "model.safetensors")
    for name, average in load_file(latest(folder) / "ema.safetensors").items():
        torch.testing.assert_close(average, 0.3 * before[name] + 0.7 * after[name])
    assert rows(folder)[-1]["val_loss_ema"] is not None


def test_averages_can_be_dropped_at_a_resume(run, tiny_run, shared_run, copied_run):
    straight = shared_run(**CONSTANT, train__max_steps=8)
    copied_run(**CONSTANT, optim__ema_decay=0.9)
    other = run(tiny_run(**CONSTANT, train__resume="latest", train__max_steps=8))
    assert column(other, "train_losses") == column(straight, "train_losses")
    assert same(*(load_file(latest(folder) / "model.safetensors") for folder in (other, straight)))
    assert not (latest(other) / "ema.safetensors").exists()
    assert "val_loss_ema" not in rows(other)[-1]


def test_early_stop_exports_the_best_weights_and_resumes_only_with_more_patience(
    run, tiny_run, validation_losses, monkeypatch
):
    def no_step(run_: Any, total_steps: float) -> Any:
        raise AssertionError("the run was over")

    options = {**CONSTANT, "train__max_steps": 12, "train__eval_every_steps": 2}
    validation_losses([3.0, 2.5, 2.6, 2.6, 2.5])
    folder = run(tiny_run(**options, train__patience_evals=2))
    assert [row["step"] for row in rows(folder)] == list(range(1, 9))
    best = load_file(folder / "checkpoints" / "step-000004" / "model.safetensors")
    exported = exported_weights(folder / "model")
    assert same({name: exported[name] for name in best}, best)
    card = (folder / "model" / "README.md").read_text()
    assert "the weights of step 4, the best by validation loss. The run took 8 steps" in card
    before = rows(folder)
    real_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", no_step)
    run(tiny_run(**options, train__patience_evals=2, train__resume="auto"))
    assert rows(folder) == before
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["step"], summary["steps"], summary["is_best"]) == (4, 8, True)
    monkeypatch.setattr(loop, "train_step", real_step)
    validation_losses([2.6, 2.6])
    run(tiny_run(**options, train__patience_evals=3, train__resume="latest"))
    assert [row["step"] for row in rows(folder)] == list(range(1, 11))


def test_resume_without_checkpoints_is_rejected(run, tiny_run):
    with pytest.raises(UserError, match=r"there is no checkpoint .*latest \(checkpoints in .*: none\)"):
        run(tiny_run(train__resume="latest"))
