"""Training with rounded weights: when it begins, what it logs and exports. test_all_state.py resumes it exactly."""

from __future__ import annotations

import json

import pytest
from faults import losses, rows, train_on_two

from hfgolf.golf import hooks
from hfgolf.golf.grid import grid_of
from hfgolf.golf.quantize import matrices
from hfgolf.publish.load import load_exported
from hfgolf.system.errors import UserError

pytestmark = pytest.mark.slow

QAT = {
    "golf__budget_bytes": 22_000,
    "golf__qat_fraction": 0.5,
    "golf__calibration_tokens": 512,
    "train__max_steps": 6,
    "train__eval_every_steps": 2,
    # AdamW: Muon's bf16 products would turn a difference in the last bit into one in the third digit
    "optim__name": "adamw",
    "optim__learning_rate": 0.003,
    "batch__micro_batch_size": 4,
}


def two_grids() -> None:
    """Choose a grid for each half of the rounded part, because it takes as long as an export."""
    hooks.GRIDS = 2


@pytest.mark.distributed
def test_the_end_of_the_run_is_rounded_and_exported_on_its_grid_by_two_processes_as_by_one(
    run, tiny_run, tmp_path, monkeypatch
):
    monkeypatch.setattr(hooks, "GRIDS", 2)
    one = run(tiny_run(**QAT, run__name="one"))
    train_on_two(tiny_run(**QAT, run__name="two"), tmp_path / "output", two_grids)
    assert "2 processes" in (tmp_path / "output").read_text()
    grids = []
    for folder in (one, one.with_name("two")):
        model, _ = load_exported(str(folder / "model"))
        on_grid = {name: grid_of(weight) for name, weight in matrices(model).items()}
        assert all(grid is not None for grid in on_grid.values())
        counted = {row["step"]: row["golf_rounded_matrices"] for row in rows(folder)}
        assert counted == {step: 0 if step <= 3 else len(on_grid) for step in range(1, 7)}
        state = json.loads((folder / "checkpoints" / "latest" / "train_state.json").read_text())
        grids.append(state["hooks"]["QuantizationAwareTraining"])
        assert grids[-1]["frozen"] and grids[-1]["codes"].keys() == on_grid.keys()
        assert grids[-1]["bytes"] <= (1 - hooks.RESERVE) * QAT["golf__budget_bytes"]
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["step"] == 6, "the one evaluation on the frozen grid"
        assert summary["val_loss"] == pytest.approx(rows(folder)[-1]["val_loss"], abs=1e-6)
    assert grids[0] == grids[1]
    assert losses(folder) == pytest.approx(losses(one), rel=1e-5)
    val_losses = [[row["val_loss"] for row in rows(path) if row["val_loss"] is not None] for path in (one, folder)]
    assert val_losses[1] == pytest.approx(val_losses[0], rel=1e-5)


def test_a_budget_that_not_even_zeros_fit_ends_the_run_before_its_first_step(run, tiny_run):
    with pytest.raises(UserError, match=r"^budget_bytes: 5,000 is too small: with zeros in all matrices the files"):
        run(tiny_run(**QAT | {"golf__budget_bytes": 5_000}))


def test_a_budget_that_only_zeros_fit_ends_the_run_at_its_first_grid(run, tiny_run):
    with pytest.raises(UserError, match=r"^budget_bytes: 8,600 is too small: with the coarsest steps the model still"):
        run(tiny_run(**QAT | {"golf__budget_bytes": 8_600}))


def test_a_grid_compiles_nothing(run, tiny_run, graphs):
    """Passes that measure the curvature run uncompiled: torch would compile the layers again, up to its limit."""
    run(tiny_run(**QAT, train__compile="true"))
    of_warm_up, of_all = graphs()
    assert of_warm_up == of_all > 0
