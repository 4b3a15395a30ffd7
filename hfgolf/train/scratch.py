"""A run to measure with: what a config describes, ready to step without an end, its files gone afterwards."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hfgolf.command_line import ResolvedConfig
from hfgolf.errors import UserError
from hfgolf.train.setup import Run, set_up


@contextmanager
def scratch_run(resolved: ResolvedConfig, source: str, **values: Any) -> Iterator[Run]:
    """Set up the run of a config, with each `section__key=value` decided by `source`; raises UserError as set_up does.

    It has its folder among the temporary ones, no trackers, nothing to resume, nothing to push and no last step.
    SIGINT and SIGTERM end the process with a line, and the folder goes then too. For the main thread.
    """
    handlers = {number: signal.signal(number, _leave) for number in (signal.SIGINT, signal.SIGTERM)}
    folder = tempfile.mkdtemp(prefix=f"{source}-")
    try:
        resolved = resolved.resolve(source, train__resume=None, track__trackers=[], hub__push=False, **values)
        run = set_up(resolved.resolve(source, run__output_dir=folder))
        run.checkpoints.wait()
        run.folder.path.mkdir(exist_ok=True)  # the main process has made its own
        stated = run.resolved.resolve(source, run__output_dir=resolved.config.run.output_dir)  # for who describes it
        run = dataclasses.replace(run, resolved=stated, most_steps=math.inf, has_begun=True)
        run.start_batches()
        run.model.train()
        yield run
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:  # nor a loader's worker
        print(f"error: stopped by {signal.Signals(number).name}; nothing was written.", file=sys.stderr)
    raise SystemExit(128 + number)


def writable_folder(path: Path) -> Path:
    """Make the folder that a script's --output names; UserError, before anything is measured, where it cannot."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise UserError(f"--output: cannot write to {path} ({error.strerror}); choose another folder.") from None
