"""Training with rounded weights: when it begins, what it logs, what it exports, and that a resume goes on exactly."""

from __future__ import annotations

import json
import shutil

import pytest
from faults import differences, losses, rows, train_on_two

from hfgolf.golf import hooks
from hfgolf.golf.qat import grid_of
from hfgolf.golf.quantize import matrices
from hfgolf.publish.load import load_exported
from hfgolf.system.errors import UserError

QAT = {"golf__budget_bytes": 22_000, "train__max_steps": 10, "train__save_every_steps": 1, "train__eval_every_steps": 2}


def checkpoint(folder, step):
    return folder / "checkpoints" / f"step-{step:06d}"


def grid_at(folder, step):
    """Return the grid that a checkpoint keeps; {} if nothing is rounded yet."""
    return json.loads((checkpoint(folder, step) / "train_state.json").read_text())["hooks"].get(
        "QuantizationAwareTraining", {}
    )


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
@pytest.mark.parametrize(
    ("step", "count"),
    [
        pytest.param(5, "challenge", id="to be renewed"),
        pytest.param(5, "everything", id="to be renewed, the config counts"),
        pytest.param(11, "challenge", id="frozen"),
    ],
)
def test_a_resumed_run_rounds_as_before(run, tiny_run, tmp_path, monkeypatch, step, count):
    monkeypatch.setattr(hooks, "GRIDS", 4)
    options = QAT | {"train__max_steps": 12, "golf__qat_fraction": 2 / 3, "train__keep_last": 20, "golf__count": count}
    whole = run(tiny_run(**options))
    grids = [grid_at(whole, at) for at in (4, 5, 8, 11)]
    assert [grid and (grid["step"], grid["frozen"]) for grid in grids] == [{}, (4, False), (6, False), (10, True)]
    shutil.copytree(whole, tmp_path / "parts" / "tiny", symlinks=True)
    (tmp_path / "parts" / "tiny" / "summary.json").unlink()
    resume_at = checkpoint(tmp_path / "parts" / "tiny", step)
    resumed = run(tiny_run(**options, run__output_dir=tmp_path / "parts", train__resume=str(resume_at)))
    assert differences(checkpoint(whole, 12), checkpoint(resumed, 12)) == []
    columns = ("step", "train_losses", "val_loss", "golf_rounded_matrices")
    assert [[row[name] for name in columns] for row in rows(resumed)] == [
        [row[name] for name in columns] for row in rows(whole)
    ]
    model, resumed_model = (folder / "model" / "model.safetensors" for folder in (whole, resumed))
    assert model.read_bytes() == resumed_model.read_bytes()


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
