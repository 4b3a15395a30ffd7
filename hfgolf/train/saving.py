"""Save checkpoints while the run continues, and say how that ended."""

from __future__ import annotations

import logging
from contextlib import suppress

from hfgolf.checkpoint.identity import saved_values
from hfgolf.checkpoint.store import saved_step, step_folder
from hfgolf.train.run import Run
from hfgolf.train.setup import write_description

logger = logging.getLogger(__name__)


def save(run: Run) -> None:
    """Start writing a checkpoint in the background."""
    with suppress(OSError):  # if the disk fails, the save fails too and reports it
        if not run.folder.config.exists():  # someone deleted the folder during the run
            write_description(run)
    run.state.seconds, run.state.hooks = run.stopwatch.seconds(), run.hooks.state_dict()
    with run.stopwatch.charge("checkpoint"):
        before_commit = run.metrics.sync if run.metrics is not None else lambda: None
        run.checkpoints.identity["config"] = saved_values(run.resolved.config)
        run.checkpoints.save(is_best=run.state.best_step == run.state.step, before_commit=before_commit)
    run.clock.note_save()
    if run.hooks.overriding("after_save"):
        run.checkpoints.wait()
        run.accelerator.wait_for_everyone()
        checkpoint = step_folder(run.folder.checkpoints, run.state.step)
        if checkpoint.is_dir():  # else the disk is full, which the run reports
            run.hooks.call("after_save", run, checkpoint)


def report_failed_saves(run: Run) -> None:
    """Warn once about each checkpoint that could not be written, and name the newest one on disk."""
    for failure in run.checkpoints.failures():
        step = saved_step(run.folder.checkpoints)
        logger.warning("%s; %s", failure, "no checkpoint exists" if step is None else f"the newest is of step {step}")
        run.event("save_failed", reason=failure)


def flush(run: Run) -> None:
    """Wait for the pending save and log its outcome, however the loop ended."""
    run.stopwatch.switch("other")
    with run.stopwatch.charge("checkpoint"):
        run.checkpoints.wait()
    report_failed_saves(run)
