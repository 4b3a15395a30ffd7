"""What is read from a finished run, and which runs form one arm."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from hfgolf.compare.outcome import group_by_arm, read_outcome
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_rows
from hfgolf.system.errors import UserError


def rows_of(folder: Path) -> list[dict]:
    return read_rows(folder / "metrics.jsonl")


def write_rows(folder: Path, rows: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_reads_a_finished_run(run, tiny_run):
    folder = run(tiny_run(train__max_steps=7, train__log_every_steps=2))
    rows = rows_of(folder)
    rows[3]["compute_seconds"] += 1000.0  # the machine stood still
    rows[0]["elapsed_seconds"] += 50.0  # compilation
    write_rows(folder, rows)
    outcome = read_outcome(RunFolder(folder))
    judged = [row for row in rows if row["val_loss"] is not None]
    assert [(point.step, point.loss) for point in outcome.curve] == [(row["step"], row["val_loss"]) for row in judged]
    assert [point.step for point in outcome.curve] == [3, 6, 7]
    step_seconds = statistics.median(
        (row["data_seconds"] + row["compute_seconds"]) / len(row["train_losses"]) for row in rows
    )
    compilation = rows[0]["elapsed_seconds"] - rows[0]["data_seconds"] - rows[0]["compute_seconds"]
    assert compilation == pytest.approx(50, abs=0.5)
    assert [point.seconds for point in outcome.curve] == pytest.approx(
        [compilation + steps * step_seconds for steps in (3, 6, 7)]
    )
    assert outcome.seed == 1337 and outcome.is_whole and outcome.evaluated_on[1] == judged[-1]["val_bytes"]
    assert not outcome.shared_the_machine

    rows[-1] |= {"val_loss": 9.0, "val_tokens": 500}  # worse than the one before, and on a part of the data
    write_rows(folder, rows)
    outcome = read_outcome(RunFolder(folder))
    assert outcome.curve[-1].loss == 9.0, "the last loss counts; the best one would be biased"
    assert not outcome.is_whole and outcome.evaluated_on[0] == 500

    rows[-1]["val_loss"] = None  # how a NaN is logged
    write_rows(folder, rows)
    with pytest.raises(UserError, match="tiny ended with a validation loss that is not finite"):
        read_outcome(RunFolder(folder))


def test_averaged_weights_are_compared_if_the_run_exports_them(run, tiny_run):
    folder = RunFolder(run(tiny_run(optim__ema_decay=0.9, optim__ema_export="true")))
    made = rows_of(folder.path)
    assert read_outcome(folder).curve[-1].loss == made[-1]["val_loss"] and "val_loss_ema" not in made[-1]
    made[-1]["val_loss_ema"] = 1.5  # of an earlier version, which evaluated both
    write_rows(folder.path, made)
    assert read_outcome(folder).curve[-1].loss == 1.5
    folder.summary.write_text(json.dumps(json.loads(folder.summary.read_text()) | {"weights": "raw"}))
    assert read_outcome(folder).curve[-1].loss == made[-1]["val_loss"] != 1.5


def test_runs_that_differ_only_in_the_seed_form_an_arm(outcome, tmp_path):
    def named(name, seed, **config):
        sources = {"batch.micro_batch_size": "auto"}
        run = outcome(seed, 2.0, config={f"{key.replace('__', '.')}": value for key, value in config.items()})
        return type(run)(**vars(run) | {"path": tmp_path / name, "metadata": run.metadata | {"sources": sources}})

    runs = [
        named("fast-seed1", 1, optim__eps=1, run__name="fast-seed1", run__seed=1, batch__micro_batch_size=4),
        named("slow-0.02", 1, optim__eps=2, run__name="slow", run__seed=1),
        named("fast-seed2", 2, optim__eps=1, run__name="fast-seed2", run__seed=2, batch__micro_batch_size=8),
        named("other/fast", 1, optim__eps=3, run__name="fast", run__seed=1),
    ]
    runs[1].config["batch.micro_batch_size"] = 8
    assert [*group_by_arm([dataclasses.replace(runs[0], path=Path("."))])] == [Path.cwd().name]
    expected = {"fast": [1, 2], "slow-0.02": [1], str(tmp_path / "other/fast"): [1]}
    assert {name: list(of_arm) for name, of_arm in group_by_arm(runs).items()} == expected
    # the same config and seed under another name: of another version of the code
    with pytest.raises(UserError, match=r"fast-seed1 and .*new-seed1 are the same config and seed; leave one out"):
        group_by_arm([*runs, named("new-seed1", 1, optim__eps=1)])
    arms = group_by_arm([*runs, named("new-seed1", 1, optim__eps=1)], by_name=True)
    assert {name: list(of_arm) for name, of_arm in arms.items()} == expected | {"new": [1]}
    with pytest.raises(UserError, match=r"fast-seed1 and .*fast are the same config and seed; leave one out"):
        group_by_arm([*runs, named("fast", 1, optim__eps=1)], by_name=True)
