"""Training with rounded weights: when it begins, what it logs, what it exports, and that a resume goes on exactly."""

from __future__ import annotations

import json

import pytest

from hfgolf.errors import UserError
from hfgolf.golf.qat import grid_of
from hfgolf.golf.quantize import matrices
from hfgolf.publish.load import load_exported
from hfgolf.run.metrics import read_rows
from hfgolf.train import rounding

QAT = {"golf__budget_bytes": 22_000, "train__max_steps": 10, "train__save_every_steps": 1, "train__eval_every_steps": 2}


def rows(folder):
    return read_rows(folder / "metrics.jsonl")


@pytest.mark.slow
def test_the_end_of_the_run_is_rounded_and_exported_on_its_grid(run, tiny_run, monkeypatch):
    monkeypatch.setattr(rounding, "RENEW_EVERY_STEPS", 2)
    folder = run(tiny_run(**QAT, golf__qat_fraction=0.5))
    counted = {row["step"]: row["golf_rounded_matrices"] for row in rows(folder)}
    model, _ = load_exported(str(folder / "model"))
    on_grid = {name: grid_of(weight) for name, weight in matrices(model).items()}
    assert all(one is not None for one in on_grid.values())
    assert counted == {step: 0 if step <= 5 else len(on_grid) for step in range(1, 11)}
    state = json.loads((folder / "checkpoints" / "step-000010" / "train_state.json").read_text())
    assert state["grid"]["frozen"] and state["grid"]["codes"].keys() == on_grid.keys()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step"] == 10  # the one evaluation on the frozen grid
    assert summary["val_loss"] == pytest.approx(rows(folder)[-1]["val_loss"], abs=1e-6)


@pytest.mark.slow
def test_a_resumed_run_rounds_as_before(run, tiny_run):
    whole = run(tiny_run(**QAT, golf__qat_fraction=0.6, run__name="whole"))
    options = QAT | {"golf__qat_fraction": 0.6, "run__name": "parts", "train__keep_last": 20}
    folder = run(tiny_run(**options))
    (folder / "summary.json").unlink()
    resumed = run(tiny_run(**options, train__resume=str(folder / "checkpoints" / "step-000007")))
    assert rows(resumed)[-1]["train_losses"] == rows(whole)[-1]["train_losses"]
    assert rows(resumed)[-1]["val_loss"] == rows(whole)[-1]["val_loss"]


@pytest.mark.slow
def test_a_budget_that_no_grid_fits_ends_the_run_with_one_line(run, tiny_run):
    with pytest.raises(UserError, match=r"golf.budget_bytes: 9,9\d\d is too small"):
        run(tiny_run(**(QAT | {"golf__budget_bytes": 10_000}), golf__qat_fraction=0.5))
