"""Training with rounded weights: when it begins, what it logs and exports. test_all_state.py resumes it exactly."""

from __future__ import annotations

import json

import pytest
from faults import losses, rows, train_on_two

from hfgolf.golf.grid import grid_of
from hfgolf.golf.quantize import matrices
from hfgolf.publish.load import load_exported
from hfgolf.system.errors import UserError

QAT = {"golf__budget_bytes": 22_000, "train__max_steps": 10, "train__save_every_steps": 1, "train__eval_every_steps": 2}


def grid_at(folder, step):
    """Return the grid that a checkpoint keeps; {} if nothing is rounded yet."""
    state = json.loads((folder / "checkpoints" / f"step-{step:06d}" / "train_state.json").read_text())
    return state["hooks"].get("QuantizationAwareTraining", {})


@pytest.mark.slow
def test_the_end_of_the_run_is_rounded_and_exported_on_its_grid(run, tiny_run):
    folder = run(tiny_run(**QAT, golf__qat_fraction=0.5))
    counted = {row["step"]: row["golf_rounded_matrices"] for row in rows(folder)}
    model, _ = load_exported(str(folder / "model"))
    on_grid = {name: grid_of(weight) for name, weight in matrices(model).items()}
    assert all(one is not None for one in on_grid.values())
    assert counted == {step: 0 if step <= 5 else len(on_grid) for step in range(1, 11)}
    grid = grid_at(folder, 10)
    assert grid["frozen"] and grid["codes"].keys() == on_grid.keys()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step"] == 10  # the one evaluation on the frozen grid
    assert summary["val_loss"] == pytest.approx(rows(folder)[-1]["val_loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_round_as_one(run, tiny_run, tmp_path):
    # AdamW: Muon's bf16 products would turn a difference in the last bit into one in the third digit
    options = QAT | {"golf__qat_fraction": 0.6, "optim__name": "adamw", "optim__learning_rate": 0.003}
    one = run(tiny_run(**options, run__name="one", batch__micro_batch_size=4))
    train_on_two(tiny_run(**options, run__name="two", batch__micro_batch_size=4), tmp_path / "output")
    assert "2 processes" in (tmp_path / "output").read_text()
    two = one.with_name("two")
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    for name in ("val_loss", "golf_rounded_matrices"):
        values = [[row[name] for row in rows(folder) if row[name] is not None] for folder in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert rows(two)[-1]["golf_rounded_matrices"] > 0
    grids = [grid_at(folder, 10) for folder in (one, two)]
    assert grids[0] == grids[1] and grids[0]["frozen"]
    model, _ = load_exported(str(two / "model"))
    assert all(grid_of(weight) is not None for weight in matrices(model).values())


@pytest.mark.slow
def test_a_budget_that_no_grid_fits_ends_the_run_with_one_line(run, tiny_run):
    with pytest.raises(UserError, match=r"golf.budget_bytes: 9,9\d\d is too small"):
        run(tiny_run(**(QAT | {"golf__budget_bytes": 10_000}), golf__qat_fraction=0.5))
