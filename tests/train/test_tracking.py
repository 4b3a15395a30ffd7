"""metrics.jsonl is the truth; trackers get copies, and none of them stops a run."""

from __future__ import annotations

import json
import logging
import math

import pytest

from hfgolf.errors import UserError
from hfgolf.train import tracking


def test_tensorboard_gets_what_the_file_gets(run, tiny_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run(tiny_run(track__trackers="[tensorboard]"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(folder / "hfgolf"))
    events.Reload()
    for column in ("train_loss", "grad_norm", "learning_rate"):
        written = [(event.step, event.value) for event in events.Scalars(column)]
        assert [step for step, _ in written] == [row["step"] for row in rows]
        assert [value for _, value in written] == pytest.approx([row[column] for row in rows], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["an account", "a network"])
def test_wandb_without_an_account_or_a_network_goes_offline_with_one_line(run, tiny_run, monkeypatch, caplog, lacking):
    import wandb

    def unreachable(**options: object) -> bool:
        raise wandb.errors.AuthenticationError("no such host")

    if lacking == "a network":
        monkeypatch.setattr(wandb, "login", unreachable)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    with caplog.at_level(logging.WARNING, "hfgolf"):
        folder = run(tiny_run(track__trackers="[wandb]"))
    assert len([line for line in caplog.messages if line.startswith("wandb: offline")]) == 1
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert (folder / "summary.json").is_file()


def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on(run, tiny_run, monkeypatch, caplog):
    from accelerate.tracking import TensorBoardTracker

    def fail(self: object, values: dict, step: int | None = None, **options: object) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(TensorBoardTracker, "log", fail)
    with caplog.at_level(logging.WARNING, "hfgolf"):
        folder = run(tiny_run(track__trackers="[tensorboard]"))
    assert caplog.messages.count("tracker dropped, metrics.jsonl goes on: the server is gone") == 1
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6


def test_an_unknown_tracker_is_named(run, tiny_run):
    with pytest.raises(UserError, match=r"track.trackers: wndb is not a tracker; available here: .*wandb"):
        run(tiny_run(track__trackers="[wndb]"))


def test_rows_after_the_resumed_step_and_broken_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "train_l')
    tracking._drop_rows_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_json_has_no_nan():
    assert json.dumps(tracking._json_number(math.nan)) == "null"
    assert tracking._json_number(1.5) == 1.5
