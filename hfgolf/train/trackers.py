"""What a run writes about itself: metrics.jsonl first, the lines on the terminal, then copies to trackers.

metrics.jsonl is the truth; trackers get all that is in it, under names in groups, and one that fails or doesn't answer
is dropped with one line and never stops a run or holds it up. The only file that knows wandb.
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

from hfgolf.command_line import one_line
from hfgolf.errors import UserError
from hfgolf.redact import redact_values
from hfgolf.run.metrics import MetricsFile

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hfgolf.checkpoint.state import TrainState
    from hfgolf.config import RunConfig

logger = logging.getLogger(__name__)

WANDB_TIMEOUT_SECONDS = 20  # wandb itself would keep a run without network waiting for 90
_FINISH_SECONDS = 20  # for the trackers to take what was sent to them
_MAX_WAITING_CALLS = 1000


class Tracker:
    """Writes the rows of a run; on ranks other than the main one it does nothing."""

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
            self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_WAITING_CALLS)
            # trackers are called from a thread of their own, a daemon: one that does not return keeps nobody waiting
            self._caller = threading.Thread(target=self._call_trackers, daemon=True, name="trackers")
            self._caller.start()

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl and send its numbers to the trackers, by its step."""
        if not self._active:
            return
        self._metrics.append(row)
        for step, numbers in by_step(row):
            self._send(numbers, step)

    def event(self, name: str, state: TrainState, **details: Any) -> None:
        """Append a row about something that happened: {"step", "event", "elapsed_seconds", ...}; it goes on as text."""
        if self._active:
            details = redact_values(details)
            self._metrics.append(
                {"step": state.step, "event": name, "elapsed_seconds": state.elapsed_seconds, **details}
            )
            text = details["text"] if details.keys() == {"text"} else json.dumps(details)
            self._send({f"event/{name}": text}, state.step)

    def attach(self, file: Path, kind: str) -> None:
        """Give a file of the run to those trackers that keep files."""
        for tracker in self._accelerator.trackers if self._active and self._tracking else []:
            if tracker.name == "wandb":
                self._call(partial(tracker.tracker.log_artifact, str(file), f"{kind}-{tracker.tracker.id}", kind))

    def rewind(self, step: int) -> None:
        """Forget the rows after `step`, which will be written again; events are not forgotten."""
        if self._active:
            self._metrics.rewind(step)

    def sync(self) -> None:
        """Have the rows so far on the disk."""
        self._metrics.sync()

    def _send(self, values: dict[str, Any], step: int) -> None:
        for tracker in self._accelerator.trackers if self._tracking else []:
            if tracker.name == "wandb":  # whose own steps never go back, as a rollback does
                self._call(partial(tracker.log, values | {"step": step}))
            else:
                self._call(partial(tracker.log, values, step=step))

    def finish(self) -> None:
        """Close the trackers, and the group of processes with them; the last thing that all ranks do together."""
        self._metrics.close()
        self._accelerator.wait_for_everyone()
        if self._active and self._tracking:
            for tracker in self._accelerator.trackers:
                self._call(tracker.finish)
            self._call(None)
            self._caller.join(_FINISH_SECONDS)
            if self._caller.is_alive():
                self._drop(f"no answer for {_FINISH_SECONDS} s", is_stuck=True)
        self._accelerator.trackers = []  # they have ended
        self._never_stop(self._accelerator.end_training)

    def _call(self, call: Callable[[], None] | None) -> None:
        """Have a tracker called, after the calls before; None is the last one."""
        if not self._tracking:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._drop(f"no answer while {_MAX_WAITING_CALLS} calls wait", is_stuck=True)

    def _call_trackers(self) -> None:
        while self._tracking and (call := self._calls.get()):
            self._never_stop(call)

    def _drop(self, reason: str, is_stuck: bool = False) -> None:
        if self._tracking:
            self._tracking = False
            logger.warning("tracker dropped, metrics.jsonl goes on: %s", reason)
            if is_stuck and "wandb" in sys.modules:
                _end_wandb()

    def _never_stop(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a tracker raises, the run goes on
            self._drop(one_line(error))


def by_step(row: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the steps of a row, each with the numbers that trackers get for it; those of the row go with its last."""
    names = {"train_losses": "train/loss_of_step", "grad_norms": "train/grad_norm_of_step"}
    lists = {name: row[key] for key, name in names.items() if key in row}
    first = row["step"] + 1 - max(map(len, lists.values()), default=1)
    for step in range(first, row["step"]):
        yield step, {name: values[step - first] for name, values in lists.items()}
    of_row = {grouped(key): value for key, value in row.items() if isinstance(value, int | float)}
    yield row["step"], of_row | {name: values[-1] for name, values in lists.items() if values}


def grouped(key: str) -> str:
    """Return the name that trackers know a column by: below train/, val/, time/ or memory/."""
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
    # x_disable_meta, disable_git: wandb would upload the command line and a diff as they are, secrets included
    settings = wandb.Settings(
        init_timeout=WANDB_TIMEOUT_SECONDS, silent=mode == "offline", x_disable_meta=True, disable_git=True
    )
    return {"mode": mode, "dir": str(folder), "id": state.wandb_id, "resume": "allow", "settings": settings}


def _end_wandb() -> None:
    """End wandb's processes, for which it would wait at exit; what they have not written is in metrics.jsonl."""
    import wandb

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name().startswith("wandb"):
                process.kill()
    with suppress(Exception, SystemExit):  # it finds them gone, and wants to exit with their status
        wandb.teardown()


def _wandb_obstacle() -> str | None:
    """Say why a run cannot be sent to wandb now, None if it can."""
    import wandb

    try:
        return None if wandb.login(prompt=False) else "nobody is logged in (`wandb login`)"
    except Exception as error:  # it checks the key over the network, and each way to fail has its own exception
        return f"it could not be reached: {one_line(error)}"
