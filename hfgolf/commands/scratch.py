"""A temporary run for measurements: set up from a config, ready to step, with its files deleted afterwards."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hfgolf.config.parse import ResolvedConfig
from hfgolf.hooks import model_hooks
from hfgolf.system.ranks import together
from hfgolf.system.signals import Signals
from hfgolf.train.feed import start_batches
from hfgolf.train.hooks import Hooks
from hfgolf.train.process import processes
from hfgolf.train.run import Run
from hfgolf.train.setup import set_up


@contextmanager
def scratch_run(resolved: ResolvedConfig, source: str, **values: Any) -> Iterator[Run]:
    """Set up a run in a temporary folder, with each `section__key=value` set by `source`. Raises UserError like set_up.

    It has no trackers, no resume, no push and no last step. A stop signal ends the process with one line; the folder is
    deleted then, too.
    """
    with (
        Signals("before the end; nothing was written"),
        tempfile.TemporaryDirectory(prefix=f"{source}-", ignore_cleanup_errors=True) as folder,
        together(processes().num_processes),
    ):
        resolved = resolved.resolve(source, train__resume=None, track__trackers=[], hub__push=False, **values)
        run = set_up(resolved.resolve(source, run__output_dir=folder), Hooks(model_hooks(resolved.config)))
        run.checkpoints.wait()
        run.folder.path.mkdir(exist_ok=True)  # on other processes: only the main one has made its folder
        config = run.config.replace(run__output_dir=resolved.config.run.output_dir)  # for reports
        run.decisions = dataclasses.replace(run.decisions, config=config)
        run.step_limit, run.is_stepping = math.inf, True
        start_batches(run)
        run.model.train()
        yield run
