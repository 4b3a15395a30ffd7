"""An interrupted run equals a straight one: bitwise on one process, up to rounding on another number of processes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import column, rows, train_on_two
from safetensors.torch import load_file
from tiny_export import exported_weights

from hfgolf.system.errors import UserError
from hfgolf.system.stopwatch import KINDS
from hfgolf.train import loop

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
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


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    """Assert that trees of dicts, lists and tensors are equal; name the first difference."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_bits(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same_bits(*pair, f"{where}/{i}")
    else:
        assert one == other, where


def saved(folder: Path) -> dict[str, Any]:
    """Return the content of the last checkpoint, without times."""
    latest = folder / "checkpoints" / "latest"
    contents: dict[str, Any] = {path.name: load_file(path) for path in latest.glob("*.safetensors")}
    contents |= {path.name: torch.load(path) for path in latest.glob("*.bin")}
    contents |= {path.name: torch.load(path) for path in latest.glob("scaler.pt")}
    contents["dropout"] = torch.load(latest / "random_states_0.pkl", weights_only=False)["torch_manual_seed"]
    state = json.loads((latest / "train_state.json").read_text())
    del state["elapsed_seconds"], state["seconds"]
    return contents | {"state": state}


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
    for one, other in zip(rows(broken), rows(straight), strict=True):
        assert_same_bits(*({key: row[key] for key in row.keys() - TIMINGS} for row in (one, other)))
    assert_same_bits(saved(broken), saved(straight))
    exported = [load_file(folder / "model" / "model.safetensors") for folder in (broken, straight)]
    assert_same_bits(*exported)


def test_resume_with_another_micro_batch_size_matches(run, tiny_run, shared_run, copied_run):
    """After three micro-batches, two per step: accelerate's own counter would step too early."""
    straight = shared_run(**CONSTANT)
    copied_run(**CONSTANT, train__max_steps=3)
    other = run(tiny_run(**CONSTANT, batch__micro_batch_size=4, train__resume="latest"))
    assert column(other, "sample_hashes") == column(straight, "sample_hashes")
    assert column(other, "train_losses") == pytest.approx(column(straight, "train_losses"), rel=1e-5)
    assert column(other, "grad_norms") == pytest.approx(column(straight, "grad_norms"), rel=1e-4)


@pytest.mark.distributed
def test_changing_the_number_of_processes_matches_a_straight_run(run, tiny_run, shared_run, copied_run, tmp_path):
    """Odd numbers of steps and micro-batches at each change."""
    # AdamW: Muon's bf16 products would turn a difference in the last bit into one in the third digit
    options = {**CONSTANT, "optim__name": "adamw", "optim__learning_rate": 0.003, "batch__micro_batch_size": 4}
    straight = shared_run(**options, train__max_steps=9)
    copied_run(**options, train__max_steps=3)
    train_on_two(tiny_run(**options, train__max_steps=6, train__resume="latest"), tmp_path / "output")
    said = (tmp_path / "output").read_text()
    assert "2 processes" in said and "at step 3" in said
    third = run(tiny_run(**options, train__max_steps=9, train__resume="latest"))
    assert [row["step"] for row in rows(third)] == list(range(1, 10))
    assert column(third, "sample_hashes") == column(straight, "sample_hashes")
    for name in ("train_losses", "grad_norms"):
        assert column(third, name) == pytest.approx(column(straight, name), rel=1e-5)
    val_losses = [[row["val_loss"] for row in rows(folder) if row["val_loss"]] for folder in (third, straight)]
    assert val_losses[0] == pytest.approx(val_losses[1], rel=1e-5)


def test_averages_can_start_at_a_resume(run, tiny_run, copied_run, caplog):
    folder = copied_run(**CONSTANT)
    before = saved(folder)["model.safetensors"]
    with caplog.at_level(logging.INFO, "hfgolf"):
        run(tiny_run(**CONSTANT, train__resume="latest", train__max_steps=7, optim__ema_decay=0.3))
    assert caplog.messages.count("the checkpoint has no averaged weights; the average starts from its weights") == 1
    after = saved(folder)
    for name, average in after["ema.safetensors"].items():
        torch.testing.assert_close(average, 0.3 * before[name] + 0.7 * after["model.safetensors"][name])
    assert rows(folder)[-1]["val_loss_ema"] is not None


def test_averages_can_be_dropped_at_a_resume(run, tiny_run, shared_run, copied_run):
    straight = shared_run(**CONSTANT, train__max_steps=8)
    copied_run(**CONSTANT, optim__ema_decay=0.9)
    other = run(tiny_run(**CONSTANT, train__resume="latest", train__max_steps=8))
    assert column(other, "train_losses") == column(straight, "train_losses")
    assert_same_bits(saved(other)["model.safetensors"], saved(straight)["model.safetensors"])
    assert "ema.safetensors" not in saved(other)
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
    assert_same_bits({name: exported[name] for name in best}, best)
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
