"""Write a run's metrics: to metrics.jsonl first, then copies to trackers.

metrics.jsonl is the truth. Trackers get everything in it, under grouped names. A tracker that fails or hangs is dropped
with one warning; it never stops or delays a run. tracker_kinds.py knows what each tracker needs.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfgolf.errors import UserError
from hfgolf.redact import redact_values
from hfgolf.run.metrics import MetricsFile
from hfgolf.train.tracker_kinds import attach_file, end_wandb, send_values, start_tracker
from hfgolf.wording import one_line

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    from hfgolf.checkpoint.state import TrainState
    from hfgolf.config import RunConfig

logger = logging.getLogger(__name__)

START_SECONDS = 90  # for all trackers to start
FINISH_SECONDS = 20  # for the trackers to process their pending calls
MAX_WAITING_CALLS = 1000


class Tracker:
    """Writes the rows of a run. Does nothing on ranks other than the main one.

    One daemon thread makes every call to a tracker, so that a call that never returns blocks nothing. It also starts
    them, because mlflow has an active run per thread.
    """

    def __init__(self, accelerator: Accelerator, config: RunConfig, folder: Path, state: TrainState) -> None:
        self._accelerator = accelerator
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._active = accelerator.is_main_process
        self._tracking = bool(config.track.trackers) and self._active
        self._trackers: list[GeneralTracker] = []
        if not self._active:
            return
        self.rewind(state.step)
        if self._tracking:
            state.wandb_id = state.wandb_id or uuid.uuid4().hex[:8]
            started = threading.Event()
            self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING_CALLS)
            self._call(partial(self._start, config, folder, state.wandb_id, state.step > 0))
            self._call(started.set)
            self._caller = threading.Thread(target=self._call_trackers, daemon=True, name="trackers")
            self._caller.start()
            if not started.wait(START_SECONDS):  # wait, because a fork of a loader worker amid an import can deadlock
                self._drop_all(f"not started within {START_SECONDS} s")

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl and send its numbers to the trackers."""
        if not self._active:
            return
        self._metrics.append(row)
        for step, numbers in by_step(row):
            self._send(numbers, step)

    def event(self, name: str, state: TrainState, /, **details: Any) -> None:
        """Append an event, {"step", "event", "elapsed_seconds", ...}, and send it to the trackers as text."""
        if self._active:
            details = redact_values(details)
            self._metrics.append(
                {"step": state.step, "event": name, "elapsed_seconds": state.elapsed_seconds, **details}
            )
            text = details["text"] if details.keys() == {"text"} else json.dumps(details)
            evaluated = {grouped(key): value for key, value in details.items() if key.startswith(("val_", "old_val_"))}
            self._send({f"event/{name}": text} | evaluated, state.step)

    def attach(self, file: Path, kind: str) -> None:
        """Upload a file of the run to the trackers that store files."""
        self._call(partial(self._each, partial(attach_file, file=file, kind=kind)))

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`, which will be written again; keep the events."""
        if self._active:
            self._metrics.rewind(step)

    def sync(self) -> None:
        """Force the rows so far to disk."""
        self._metrics.sync()

    def finish(self) -> None:
        """Close the trackers and the process group. This is the last thing that all ranks do together."""
        self._metrics.close()
        self._accelerator.wait_for_everyone()
        if self._tracking:
            self._call(partial(self._each, lambda tracker: tracker.finish()))
            self._call(None)
            self._caller.join(FINISH_SECONDS)
            if self._caller.is_alive():
                self._drop_all(f"no answer for {FINISH_SECONDS} s")
        self._accelerator.end_training()

    def _send(self, values: dict[str, Any], step: int) -> None:
        self._call(partial(self._each, partial(send_values, values=values, step=step)))

    def _call(self, call: Callable[[], None] | None) -> None:
        """Queue a call for the thread; None ends it."""
        if not self._tracking:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._drop_all(f"no answer with {MAX_WAITING_CALLS} calls waiting")

    def _drop_all(self, reason: str) -> None:
        if self._tracking:
            self._tracking = False
            logger.warning("trackers dropped, metrics.jsonl continues: %s", reason)
            if "wandb" in sys.modules:
                end_wandb()

    def _call_trackers(self) -> None:
        """Make the queued calls: what the thread does."""
        while self._tracking and (call := self._calls.get()):
            call()

    def _start(self, config: RunConfig, folder: Path, run_id: str, resumes: bool) -> None:
        for name in dict.fromkeys(config.track.trackers):
            with self._only_dropped(name):
                self._trackers.append(start_tracker(name, config, folder, run_id, resumes=resumes))

    def _each(self, action: Callable[[GeneralTracker], None]) -> None:
        kept = []
        for tracker in self._trackers:
            with self._only_dropped(tracker.name):
                action(tracker)
                kept.append(tracker)
        self._trackers = kept

    @contextmanager
    def _only_dropped(self, name: str) -> Iterator[None]:
        """Turn any error of a tracker into one line, none if all were dropped already: no error may stop the run."""
        try:
            yield
        except Exception as error:
            if self._tracking:
                logger.warning("tracker %s dropped, metrics.jsonl continues: %s", name, one_line(error))


def by_step(row: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, numbers for the trackers) for each step of a row; the row's own numbers go with its last step."""
    names = {"train_losses": "train/loss_of_step", "grad_norms": "train/grad_norm_of_step"}
    lists = {name: row[key] for key, name in names.items() if key in row}
    first = row["step"] + 1 - max(map(len, lists.values()), default=1)
    for step in range(first, row["step"]):
        yield step, {name: values[step - first] for name, values in lists.items()}
    numbers = {grouped(key): value for key, value in row.items() if isinstance(value, int | float)}
    yield row["step"], numbers | {name: values[-1] for name, values in lists.items() if values}


def grouped(key: str) -> str:
    """Return a column's name in the trackers, grouped under train/, val/, time/ or memory/."""
    if key.startswith("old_val_"):
        return f"val/old_{key.removeprefix('old_val_')}"
    if key.startswith("val_"):
        return f"val/{key.removeprefix('val_')}"
    if key.endswith("memory_bytes"):
        return f"memory/{key}"
    if "seconds" in key or key in ("tokens_per_second", "mfu", "gpu_utilization", "logged_at"):
        return f"time/{key}"
    return f"train/{key.removeprefix('train_')}"


def check_trackers(names: list[str]) -> None:
    """Raise UserError for a tracker that accelerate does not know or that is not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = sorted(tracker.value for tracker in get_available_trackers())
    for name in names:
        if name not in available:
            known = name in LOGGER_TYPE_TO_CLASS
            problem = f"is not installed; run `pip install {name}`" if known else "is not a tracker"
            raise UserError(f"track.trackers: {name} {problem}; available here: {', '.join(available)}.")
