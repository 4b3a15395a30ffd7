"""A run to measure with: what a config describes, ready to step without an end, its files gone afterwards."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hfgolf.command_line import ResolvedConfig
from hfgolf.train.feed import start_batches
from hfgolf.train.run import Run
from hfgolf.train.setup import set_up
from hfgolf.train.signals import Signals


@contextmanager
def scratch_run(resolved: ResolvedConfig, source: str, **values: Any) -> Iterator[Run]:
    """Set up the run of a config, with each `section__key=value` decided by `source`; raises UserError as set_up does.

    It has its folder among the temporary ones, no trackers, nothing to resume, nothing to push and no last step.
    A signal to stop ends the process with a line, and the folder goes then too.
    """
    with (
        Signals("before the end; nothing was written"),
        tempfile.TemporaryDirectory(prefix=f"{source}-", ignore_cleanup_errors=True) as folder,
    ):
        resolved = resolved.resolve(source, train__resume=None, track__trackers=[], hub__push=False, **values)
        run = set_up(resolved.resolve(source, run__output_dir=folder))
        run.checkpoints.wait()
        run.folder.path.mkdir(exist_ok=True)  # the main process has made its own
        stated = run.resolved.resolve(source, run__output_dir=resolved.config.run.output_dir)  # for who describes it
        run = dataclasses.replace(run, resolved=stated, step_limit=math.inf, is_stepping=True)
        start_batches(run)
        run.model.train()
        yield run
