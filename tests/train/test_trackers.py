"""metrics.jsonl is the truth; trackers get copies, and no tracker stops a run."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import accelerate
import numpy as np
import pytest
from accelerate.tracking import GeneralTracker
from faults import lines

import hfgolf
from hfgolf.hooks import tracker_kinds, trackers
from hfgolf.run.metrics import read_rows
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[2]
STATE = "checkpoints/latest/train_state.json"


def test_tensorboard_gets_the_rows_of_metrics_jsonl(run, tiny_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run(tiny_run(track__trackers="[tensorboard]"))
    rows = read_rows(folder / "metrics.jsonl")
    events = EventAccumulator(str(folder / "hfgolf"))
    events.Reload()
    for column, name in {
        "train_loss": "train/loss",
        "learning_rate": "train/learning_rate",
        "val_loss": "val/loss",
        "seconds_train": "time/seconds_train",
        "memory_bytes": "memory/memory_bytes",
    }.items():
        expected = {row["step"]: row[column] for row in rows if row[column] is not None}
        written = {event.step: event.value for event in events.Scalars(name)}
        assert written == pytest.approx(expected, rel=1e-6) and written
    losses = [event.value for event in events.Scalars("train/loss_of_step")]
    assert losses == pytest.approx([loss for row in rows for loss in row["train_losses"]], rel=1e-6)
    assert [event.step for event in events.Scalars("train/grad_norm_of_step")] == list(range(1, len(losses) + 1))
    known = {trackers.grouped(key) for row in rows for key, value in row.items() if isinstance(value, int | float)}
    assert set(events.Tags()["scalars"]) == known | {"train/loss_of_step", "train/grad_norm_of_step"}


def wandb_records(folder: Path, sessions: int) -> list[Any]:
    """Return what wandb wrote about the sessions of a run; it keeps writing for a while after they end."""
    until = time.monotonic() + 30
    records: list[Any] = []
    while sum(record.WhichOneof("record_type") == "exit" for record in records) < sessions:
        assert time.monotonic() < until
        records = [record for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")) for record in read(path)]
    return records


def read(path: Path) -> Iterator[Any]:
    """Yield the records of a wandb file: a LevelDB log after a 7-byte header.

    Blocks of 32 KiB hold records, each with 4 bytes of checksum, 2 of length and a kind: whole, first, middle or last.
    """
    from wandb.proto import wandb_internal_pb2

    Record: Any = getattr(wandb_internal_pb2, "Record")  # noqa: B009 - made by protobuf as it is imported

    data, place, message = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # too little for a record: the next block
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if place + 7 + length > len(data):
            return  # it is being written
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(message)
            message = b""


@pytest.mark.slow
def test_wandb_gets_the_rows_of_metrics_jsonl_also_after_a_resume(run, tiny_run, monkeypatch, tmp_path):
    options = {"track__trackers": "[wandb]", "track__offline": "true", "schedule__name": "constant"}
    options |= {"train__eval_every_steps": 2, "optim__learning_rate": 0.0123, "train__sample_tokens": 4}
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb"))  # otherwise copies of artifacts go to the home folder
    run(tiny_run(**options, train__max_steps=4, train__save_every_steps=2))
    time.sleep(1)  # wandb names what it writes by the second
    folder = run(tiny_run(**options, train__max_steps=6, train__resume="latest"))
    records = wandb_records(folder, sessions=2)
    starts = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {start.run_id for start in starts} == {json.loads((folder / STATE).read_text())["hooks"]["Trackers"]["id"]}
    config = {item.key: json.loads(item.value_json) for start in starts for item in start.config.update}
    config |= {item.key: json.loads(item.value_json) for record in records for item in record.config.update}
    assert config["optim.learning_rate"] == 0.0123
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    for row in read_rows(folder / "metrics.jsonl"):
        (sent,) = [values for values in history if values["step"] == row["step"] and "train/loss" in values]
        numbers = {trackers.grouped(key): value for key, value in row.items() if isinstance(value, int | float)}
        assert sent.items() >= numbers.items() - {("train/step", row["step"])}
    assert [values["step"] for values in history if "train/loss_of_step" in values] == [1, 2, 3, 4, 5, 6]
    assert [values["step"] for values in history if "event/resumed" in values] == [4]
    samples = [line["text"] for line in lines(folder) if line.get("event") == "sample"]
    assert len(samples) == 3 == len({values["step"] for values in history if "event/sample" in values})
    assert [values["event/sample"] for values in history if "event/sample" in values] == samples
    artifacts = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    assert [artifact.type for artifact in artifacts] == ["report", "report"]
    (entry,) = artifacts[-1].manifest.contents
    assert entry.path == "report.html" and Path(entry.local_path).read_text() == (folder / "report.html").read_text()


@pytest.mark.slow
def test_wandb_goes_offline_without_an_account(run, tiny_run, monkeypatch, caplog):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    with caplog.at_level(logging.WARNING, "hfgolf"):
        folder = run(tiny_run(track__trackers="[wandb]"))
    assert len([line for line in caplog.messages if line.startswith("wandb: offline")]) == 1
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert (folder / "summary.json").is_file()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("fails", "the server is gone"),
        ("stuck in a call", "no answer with 5 calls waiting"),
        ("stuck for good", "no answer for 0.1 s"),
    ],
)
def test_tracker_that_fails_or_is_stuck_is_dropped(run, tiny_run, monkeypatch, caplog, fault, reason):
    from accelerate.tracking import TensorBoardTracker

    released = threading.Event()

    def log(*arguments: Any, **options: Any) -> None:
        if fault == "fails":
            raise ConnectionError("the server is gone")
        released.wait()

    monkeypatch.setattr(TensorBoardTracker, "log", log)
    monkeypatch.setattr(trackers, "MAX_WAITING_CALLS", 5 if fault == "stuck in a call" else 1000)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1 if fault == "stuck for good" else 20)
    try:
        with caplog.at_level(logging.WARNING, "hfgolf"):
            folder = run(tiny_run(track__trackers="[tensorboard]"))
    finally:
        released.set()
    assert [line for line in caplog.messages if "tracker" in line] == [
        f"tracker tensorboard dropped, metrics.jsonl continues: {reason}"
    ]
    assert len(read_rows(folder / "metrics.jsonl")) == 6
    assert (folder / "summary.json").is_file()


def test_wandb_exit_does_not_end_the_run(monkeypatch):
    import wandb

    def exit_with_its_process() -> None:
        raise SystemExit(-9)

    monkeypatch.setattr(wandb, "teardown", exit_with_its_process)
    tracker_kinds.end_wandb()


@pytest.mark.slow
def test_stopped_wandb_process_does_not_block_the_run(tiny_run, tmp_path):
    """wandb waits for its process in every call, and again at exit."""
    program = """
import os, signal, sys
import psutil
import hfgolf
from hfgolf.train import loop
from hfgolf.hooks import tracker_kinds, trackers

trackers.FINISH_SECONDS = 1
tracker_kinds.WANDB_TIMEOUT_SECONDS = 600  # starting it is not tested here, and is slow on a busy machine
real = loop.train_step

def stop_wandb(run, total_steps):
    wandb = [process for process in psutil.Process().children(recursive=True) if process.name().startswith("wandb")]
    assert wandb
    for process in wandb:
        process.suspend()
    return real(run, total_steps)

loop.train_step = stop_wandb
print(hfgolf.train(hfgolf.load_config(sys.argv[1:]))["step"])
"""
    command = [sys.executable, "-c", program, *tiny_run(track__trackers="[wandb]", track__offline="true")]
    environment = os.environ | {"WANDB_X_SERVICE_WAIT": "600"}
    environment.pop("WANDB_SERVICE", None)  # set if a test before used wandb; the run would share its process
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )  # takes this long only if it hangs
    assert (done.returncode, done.stdout.split()[-1]) == (0, "6"), done.stderr
    # "no answer for 1 s", unless wandb gave up by itself before that
    dropped = [line for line in done.stderr.splitlines() if " dropped, metrics.jsonl continues: " in line]
    assert len(dropped) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "runs" / "tiny" / "summary.json").is_file()


class StandIn(GeneralTracker):
    """A tracker of accelerate's whose package is not installed: keeps what it is told."""

    name = "unnamed"
    requires_logging_directory = False
    told: ClassVar[list[Any]] = []

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self.run_id = options.get("run_id")
        self.told += [(self.name, project)]

    @property
    def tracker(self) -> Any:
        return MagicMock()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told += [(self.name, values["run.name"])]

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.told += [(self.name, step, name, value) for name, value in values.items()]

    def log_artifact(self, file: str, kind: str) -> None:
        self.told += [(self.name, kind)]

    def finish(self) -> None:
        self.told += [(self.name, "finished")]


class Using(hfgolf.Hook):
    """Uses the trackers of the run, as its owner may."""

    def after_step(self, run: Any, result: Any) -> None:
        run.accelerator.log({"mine": result.loss, "text": f"password='{'x' * 9}'"}, step=run.state.step)
        run.accelerator.get_tracker("tensorboard").log_images({"picture": np.zeros((1, 3, 2, 2))}, step=run.state.step)


OTHERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio")


def test_hooks_use_all_kinds_of_trackers_through_the_accelerator(tiny_run, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(StandIn, "told", [])
    for kind in OTHERS:
        monkeypatch.setitem(sys.modules, kind, MagicMock())
        monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, kind, type(kind, (StandIn,), {"name": kind}))
    available = {*accelerate.tracking.get_available_trackers(), *map(accelerate.utils.LoggerType, OTHERS)}
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", list(available))
    config = hfgolf.load_config(tiny_run(track__trackers=f"[tensorboard,{','.join(OTHERS)}]"))
    hfgolf.train(config, hooks=[Using()])
    folder = Path(config.config.run.output_dir) / "tiny"
    rows = read_rows(folder / "metrics.jsonl")
    for kind in OTHERS:
        told = [line[1:] for line in StandIn.told if line[0] == kind]
        assert told[:2] == [("tiny" if kind == "aim" else "hfgolf",), ("tiny",)]  # aim has its experiment elsewhere
        for row in rows:
            assert {(row["step"], "train/loss", row["train_loss"]), (row["step"], "mine", row["train_loss"])} <= {*told}
        assert told[-1] == ("finished",)
    events = EventAccumulator(str(folder / "hfgolf"))
    events.Reload()
    assert [event.value for event in events.Scalars("mine")] == pytest.approx([row["train_loss"] for row in rows])
    assert events.Images("picture")
    text = events.Tensors("text/text_summary")[0].tensor_proto.string_val[0]
    assert text == b"password='[redacted]'"


def test_unknown_tracker_is_named(run, tiny_run):
    with pytest.raises(UserError, match=r"track.trackers: wndb is not a tracker; available here: .*wandb"):
        run(tiny_run(track__trackers="[wndb]"))


def test_findings_of_the_doctor_are_alerts_where_a_tracker_has_them():
    """trackio has; one without, or an old trackio, gets the event alone, and none is dropped for it."""
    told: list[dict[str, Any]] = []
    kinds = {
        "trackio": {"alert": lambda **alert: told.append(alert)},
        "old trackio": {},
        "wandb": {"alert": told.append},
    }
    guards = []
    for kind, methods in kinds.items():
        stand_in: Any = MagicMock()
        stand_in.name, stand_in.tracker = kind.split()[-1], types.SimpleNamespace(**methods)
        guards.append(trackers.Guard(kind, lambda stand_in=stand_in: stand_in))
    accelerator = types.SimpleNamespace(trackers=guards, log=lambda values, step: None)
    finding = {"step": 7, "event": "finding", "symptom": "a spike", "saw": f"password='{'x' * 9}'", "causes": ["one"]}
    hook = trackers.Trackers([])
    for line in (finding, finding | {"event": "stopped"}):
        hook.logged(types.SimpleNamespace(accelerator=accelerator), line)
    for guard in guards:
        guard.finish()
    assert told == [{"title": "doctor: a spike", "text": "password='[redacted]'; most likely one", "step": 7}]
    assert not any(guard._is_dropped for guard in guards)
