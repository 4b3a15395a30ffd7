"""Send trackers a copy of all that metrics.jsonl gets, under grouped names.

A tracker that fails or hangs is dropped with one warning; it never stops or delays a run. tracker_kinds.py knows what
each tracker needs.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfgolf.hooks.tracker_kinds import attach_file, end_wandb, send_values, start_tracker
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line
from hfgolf.train.hooks import Hook

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from hfgolf.config.sections import RunConfig
    from hfgolf.train.run import Run

logger = logging.getLogger(__name__)

START_SECONDS = 90  # for all trackers to start
FINISH_SECONDS = 20  # for the trackers to process their pending calls
MAX_WAITING_CALLS = 1000


class Trackers(Hook):
    """The trackers of track.trackers; on the main process only.

    One daemon thread makes every call to a tracker, so that a call that never returns blocks nothing. It also starts
    them, because mlflow has an active run per thread. Raises UserError for a tracker that does not exist.
    """

    def __init__(self, names: Sequence[str]) -> None:
        check_trackers(names)
        self._run_id: str | None = None
        self._tracking = False
        self._trackers: list[GeneralTracker] = []
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING_CALLS)
        self._caller: threading.Thread | None = None

    def start(self, run: Run) -> None:
        if self._caller is not None or not run.accelerator.is_main_process:
            return  # a rollback
        self._tracking = True
        self._run_id = self._run_id or uuid.uuid4().hex[:8]
        started = threading.Event()
        self._call(partial(self._start, run.resolved.config, run.folder.path, self._run_id, run.state.step > 0))
        self._call(started.set)
        self._caller = threading.Thread(target=self._call_trackers, daemon=True, name="trackers")
        self._caller.start()
        if not started.wait(START_SECONDS):  # wait, because a fork of a loader worker amid an import can deadlock
            self._drop_all(f"not started within {START_SECONDS} s")

    def logged(self, run: Run, line: Mapping[str, Any]) -> None:
        if "event" not in line:
            for step, numbers in by_step(line):
                self._send(numbers, step)
            return
        details = {key: value for key, value in line.items() if key not in ("step", "event", "elapsed_seconds")}
        text = details["text"] if details.keys() == {"text"} else json.dumps(details)
        evaluated = {grouped(key): value for key, value in details.items() if key.startswith(("val_", "old_val_"))}
        self._send({f"event/{line['event']}": text} | evaluated, line["step"])

    def end(self, run: Run, summary: dict[str, Any] | None) -> None:
        """Upload the report, and close the trackers: within FINISH_SECONDS."""
        if not self._tracking:
            return
        if run.folder.report.is_file():
            self._call(partial(self._each, partial(attach_file, file=run.folder.report, kind="report")))
        if run.error is not None:  # unclosed, a tracker shows that the run has failed
            return
        self._call(partial(self._each, lambda tracker: tracker.finish()))
        self._call(None)
        if self._caller is not None:
            self._caller.join(FINISH_SECONDS)
            if self._caller.is_alive():
                self._drop_all(f"no answer for {FINISH_SECONDS} s")

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._run_id} if self._run_id else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._run_id = state.get("id") or self._run_id

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


def by_step(row: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
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


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that accelerate does not know or that is not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = sorted(tracker.value for tracker in get_available_trackers())
    for name in names:
        if name not in available:
            known = name in LOGGER_TYPE_TO_CLASS
            problem = f"is not installed; run `pip install {name}`" if known else "is not a tracker"
            raise UserError(f"track.trackers: {name} {problem}; available here: {', '.join(available)}.")
