"""When the layers of a loop (model.overrides.loop) run several times: from schedule.loop_start of the run on.

The flag is in the model's config, which each pass reads, so a compiled graph is compiled again and cannot fold it. It
is also in TrainState: a resume and a rollback continue as it was, and an exported model is the one that was trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hfgolf.measure.flops import training_flops_per_token
from hfgolf.train.hooks import Hook

if TYPE_CHECKING:
    from hfgolf.train.run import Run

logger = logging.getLogger(__name__)


class Recurrence(Hook):
    """Begins the loop when it is due, and records that as an event."""

    def before_step(self, run: Run, expected_steps: float) -> None:
        start = run.config.schedule.loop_start
        is_due = not start or run.state.step >= start * expected_steps
        if is_due == run.raw_model.config.loop_active:
            return
        run.raw_model.config.loop_active = run.state.loop_active = is_due
        run.meter.flops_per_token = training_flops_per_token(run.raw_model, run.config.batch.sequence_length)
        first, last, times = run.raw_model.config.loop
        count = f"{times} times" if is_due else "once"
        logger.info("loop: from step %d on, layers %d to %d run %s", run.state.step + 1, first, last, count)
        run.event("loop", active=is_due)


def each_loop_state(run: Run) -> Iterator[None]:
    """Put the model into each state that its loop will have in this run, the longer pass first; then back."""
    if run.config.model.overrides.get("loop") is None:
        yield
        return
    config = run.raw_model.config
    is_active = config.loop_active
    for state in [True, False] if run.config.schedule.loop_start else [is_active]:
        config.loop_active = state
        yield
    config.loop_active = is_active
