"""Send trackers a copy of all that metrics.jsonl gets, through accelerate and under grouped names.

accelerate's classes do the sending, each inside a Guard: a tracker that fails or hangs is dropped with one warning. It
never stops a run, and all together delay its start by START_SECONDS at most. tracker_kinds.py has what each tracker
needs beyond accelerate.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from hfgolf.hooks.tracker_kinds import alert, attach_file, end_wandb, send, start_tracker, store_config
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact, redact_values
from hfgolf.system.wording import one_line
from hfgolf.train.hooks import Hook
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)

START_SECONDS = 90  # for a tracker to start
FINISH_SECONDS = 20  # for a tracker to process its pending calls
MAX_WAITING_CALLS = 1000


class Trackers(Hook):
    """Fills `run.accelerator.trackers` with those of track.trackers, on the main process.

    Hooks after it can use them: `run.accelerator.log({"mine": 1.0}, step=run.state.step)`, or
    `run.accelerator.get_tracker("wandb")`. Raises UserError for a tracker that does not exist.
    """

    def __init__(self, names: Sequence[str]) -> None:
        available = sorted(tracker.value for tracker in get_available_trackers())
        for name in names:
            if name not in available:
                known = name in LOGGER_TYPE_TO_CLASS
                problem = f"is not installed; run `pip install {name}`" if known else "is not a tracker"
                raise UserError(f"track.trackers: {name} {problem}; available here: {', '.join(available)}.")
        self._run_id = uuid.uuid4().hex[:8]

    def start(self, run: Run) -> None:
        accelerator, config, folder = run.accelerator, run.resolved.config, run.folder.path
        if accelerator.trackers or not accelerator.is_main_process:
            return  # a rollback
        resumes = run.state.step > 0
        accelerator.log_with = [
            Guard(str(kind), partial(start_tracker, str(kind), config, folder, self._run_id, resumes=resumes))
            for kind in accelerator.log_with
        ]
        accelerator.init_trackers(config.track.project, config.flat())

    def logged(self, run: Run, line: Mapping[str, Any]) -> None:
        for step, values in by_step(line):
            run.accelerator.log(values, step=step)
        if line.get("event") == "finding":
            text = f"{line['saw']}; most likely {line['causes'][0]}"
            for tracker in run.accelerator.trackers:
                if isinstance(tracker, Guard):
                    tracker.alert(f"doctor: {line['symptom']}", text, line["step"])

    def end(self, run: Run, summary: dict[str, Any] | None) -> None:
        """Upload the report. `Accelerator.end_training` closes the trackers, but shows a failed run by not doing so."""
        for tracker in run.accelerator.trackers:
            if isinstance(tracker, Guard) and run.folder.report.is_file():
                tracker.attach(run.folder.report, "report")

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._run_id = state.get("id") or self._run_id


class Guard(GeneralTracker):
    """One of accelerate's trackers, called by a thread of its own, so that a call that never returns blocks nothing.

    The same thread starts it, at once, because mlflow has an active run per thread. Values and config are redacted.
    start: a function that starts and returns accelerate's tracker.
    """

    requires_logging_directory = False

    def __init__(self, name: str, start: Callable[[], GeneralTracker]) -> None:
        super().__init__(_blank=True)
        self.name = name
        self._start = start
        self._tracker: GeneralTracker | None = None
        self._is_dropped = False
        self._calls: queue.Queue[Callable[[Any], Any] | None] = queue.Queue(MAX_WAITING_CALLS)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._make_calls, daemon=True, name=f"tracker {name}")
        self._starts_by = time.monotonic() + START_SECONDS
        self._thread.start()

    @property
    def tracker(self) -> Any:
        """The object of the tracker's own package, such as wandb's run; None if it did not start."""
        return None if self._tracker is None else self._tracker.tracker

    def start(self) -> None:
        left = max(0.0, self._starts_by - time.monotonic())
        if not self._started.wait(left):  # wait: a fork of a loader worker amid an import can deadlock
            self._drop(f"not started within {START_SECONDS} s")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._call(partial(store_config, values=redact_values(values)))

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self._call(partial(send, values=redact_values(values), step=step, **options))

    def alert(self, title: str, text: str, step: int) -> None:
        """Show a warning, if the tracker has a place for those."""
        self._call(partial(alert, title=redact(title), text=redact(text), step=step))

    def attach(self, file: Path, kind: str) -> None:
        """Upload a file of the run, if the tracker stores files."""
        self._call(partial(attach_file, file=file, kind=kind))

    def finish(self) -> None:
        """Close the tracker, within FINISH_SECONDS."""
        self._call(lambda tracker: tracker.finish())
        self._call(None)
        if not self._is_dropped:
            self._thread.join(FINISH_SECONDS)
            if self._thread.is_alive():
                self._drop(f"no answer for {FINISH_SECONDS} s")

    def __getattr__(self, name: str) -> Any:
        """Return a method that only some kinds have, such as log_images, called like the others."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: self._call(lambda of: getattr(of, name)(*arguments, **options))

    def _call(self, call: Callable[[Any], Any] | None) -> None:
        """Queue a call for the thread; None ends it."""
        try:
            if not self._is_dropped:
                self._calls.put_nowait(call)
        except queue.Full:
            self._drop(f"no answer with {MAX_WAITING_CALLS} calls waiting")

    def _make_calls(self) -> None:
        """Start the tracker and make the queued calls: what the thread does."""
        try:
            self._tracker = self._start()
            self._started.set()
            while not self._is_dropped and (call := self._calls.get()):
                call(self._tracker)
        except (Exception, SystemExit) as error:  # wandb exits if its process has died
            self._drop(one_line(error))
        finally:
            self._started.set()

    def _drop(self, reason: str) -> None:
        if not self._is_dropped:
            self._is_dropped = True
            logger.warning("tracker %s dropped, metrics.jsonl continues: %s", self.name, reason)
            if self.name == "wandb":
                end_wandb()


def by_step(line: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, values for the trackers) of a line: of each step of a row, with the row's own at its last; the text
    and evaluation of an event."""
    if "event" in line:
        details = {key: value for key, value in line.items() if key not in ("step", "event", "elapsed_seconds")}
        text = details["text"] if details.keys() == {"text"} else json.dumps(details)
        evaluated = {grouped(key): value for key, value in details.items() if key.startswith(("val_", "old_val_"))}
        yield line["step"], {f"event/{line['event']}": text} | evaluated
        return
    names = {"train_losses": "train/loss_of_step", "grad_norms": "train/grad_norm_of_step"}
    lists = {name: line[key] for key, name in names.items() if key in line}
    first = line["step"] + 1 - max(map(len, lists.values()), default=1)
    for step in range(first, line["step"]):
        yield step, {name: values[step - first] for name, values in lists.items()}
    numbers = {grouped(key): value for key, value in line.items() if isinstance(value, int | float)}
    yield line["step"], numbers | {name: values[-1] for name, values in lists.items() if values}


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
