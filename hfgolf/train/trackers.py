"""Write a run's metrics: to metrics.jsonl first, then copies to trackers.

metrics.jsonl is the truth. Trackers get everything in it, under grouped names. A tracker that fails or hangs is dropped
with one warning; it never stops or delays a run. This is the only file that knows wandb.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hfgolf.errors import UserError
from hfgolf.redact import redact_values
from hfgolf.run.metrics import MetricsFile
from hfgolf.wording import one_line

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hfgolf.checkpoint.state import TrainState
    from hfgolf.config import RunConfig

logger = logging.getLogger(__name__)

WANDB_TIMEOUT_SECONDS = 20  # without a network, wandb's own default would block for 90
FINISH_SECONDS = 20  # for the trackers to process their pending calls
MAX_WAITING_CALLS = 1000


class Tracker:
    """Writes the rows of a run. Does nothing on ranks other than the main one."""

    def __init__(self, accelerator: Accelerator, config: RunConfig, folder: Path, state: TrainState) -> None:
        self._accelerator = accelerator
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._active = accelerator.is_main_process
        self._tracking = bool(config.track.trackers)
        if not self._active:
            return
        self.rewind(state.step)
        if self._tracking:
            self._never_stop(lambda: _start_trackers(accelerator, config, folder, state))
            self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING_CALLS)
            # a daemon thread calls the trackers, so that a call that never returns blocks nothing
            self._caller = threading.Thread(target=self._call_trackers, daemon=True, name="trackers")
            self._caller.start()

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
        for tracker in self._accelerator.trackers if self._active and self._tracking else []:
            if tracker.name == "wandb":
                self._call(partial(tracker.tracker.log_artifact, str(file), f"{kind}-{tracker.tracker.id}", kind))

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`, which will be written again; keep the events."""
        if self._active:
            self._metrics.rewind(step)

    def sync(self) -> None:
        """Force the rows so far to disk."""
        self._metrics.sync()

    def _send(self, values: dict[str, Any], step: int) -> None:
        for tracker in self._accelerator.trackers if self._tracking else []:
            if tracker.name == "wandb":  # wandb's own step cannot decrease, but a rollback does
                self._call(partial(tracker.log, values | {"step": step}))
            else:
                self._call(partial(tracker.log, values, step=step))

    def finish(self) -> None:
        """Close the trackers and the process group. This is the last thing that all ranks do together."""
        self._metrics.close()
        self._accelerator.wait_for_everyone()
        if self._active and self._tracking:
            for tracker in self._accelerator.trackers:
                self._call(tracker.finish)
            self._call(None)
            self._caller.join(FINISH_SECONDS)
            if self._caller.is_alive():
                self._drop(f"no answer for {FINISH_SECONDS} s", is_stuck=True)
        self._accelerator.trackers = []  # already finished: end_training must not finish them again
        self._never_stop(self._accelerator.end_training)

    def _call(self, call: Callable[[], None] | None) -> None:
        """Queue a call to a tracker; None ends the queue."""
        if not self._tracking:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._drop(f"no answer with {MAX_WAITING_CALLS} calls waiting", is_stuck=True)

    def _call_trackers(self) -> None:
        while self._tracking and (call := self._calls.get()):
            self._never_stop(call)

    def _drop(self, reason: str, is_stuck: bool = False) -> None:
        if self._tracking:
            self._tracking = False
            logger.warning("tracker dropped, metrics.jsonl continues: %s", reason)
            if is_stuck and "wandb" in sys.modules:
                end_wandb()

    def _never_stop(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # no error of a tracker may stop the run
            self._drop(one_line(error))


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


def _start_trackers(accelerator: Accelerator, config: RunConfig, folder: Path, state: TrainState) -> None:
    public = redact_values(config.flat())
    name, project = public["track.run_name"] or public["run.name"], public["track.project"]
    settings: dict[str, dict[str, Any]] = {}
    if "wandb" in config.track.trackers:
        settings["wandb"] = _wandb_settings(config, folder, state) | {"name": name}
    flat = {key: value if isinstance(value, int | float | str) else str(value) for key, value in public.items()}
    try:
        accelerator.init_trackers(project, config=flat, init_kwargs=settings)
    except Exception as error:
        if "wandb" not in settings or settings["wandb"]["mode"] == "offline":
            raise
        logger.warning("wandb: offline, because it could not be reached: %s", one_line(error))
        settings["wandb"]["mode"] = "offline"
        accelerator.init_trackers(project, config=flat, init_kwargs=settings)
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.tracker.define_metric("*", step_metric="step")


def _wandb_settings(config: RunConfig, folder: Path, state: TrainState) -> dict[str, Any]:
    import wandb

    mode = "offline" if config.track.offline else os.environ.get("WANDB_MODE", "online")
    obstacle = _wandb_obstacle() if mode == "online" else None
    if obstacle:
        logger.warning("wandb: offline, because %s; `wandb sync` uploads the run later", obstacle)
        mode = "offline"
    state.wandb_id = state.wandb_id or uuid.uuid4().hex[:8]
    # x_disable_meta, disable_git: otherwise wandb uploads the command line and a diff, including any secrets
    settings = wandb.Settings(
        init_timeout=WANDB_TIMEOUT_SECONDS, silent=mode == "offline", x_disable_meta=True, disable_git=True
    )
    return {"mode": mode, "dir": str(folder), "id": state.wandb_id, "resume": "allow", "settings": settings}


def end_wandb() -> None:
    """Kill wandb's processes, which would delay the exit; metrics.jsonl has what they did not upload."""
    import wandb

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name().startswith("wandb"):
                process.kill()
    with suppress(Exception, SystemExit):  # its processes are gone, and it wants to exit with their status
        wandb.teardown()


def _wandb_obstacle() -> str | None:
    """Return why a run cannot be sent to wandb now; None if it can."""
    import wandb

    try:
        return None if wandb.login(prompt=False) else "you are not logged in (`wandb login`)"
    except Exception as error:  # it checks the key over the network, and can fail with many exceptions
        return f"it could not be reached: {one_line(error)}"
