"""Learning rate and momentum as pure functions of the step.

Owns the shapes of the schedules. Refuses to hold state or to be `prepare`d: a prepared scheduler steps once per
process, and a resume here is only another step number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hfgolf.config import OptimConfig, ScheduleConfig

MOMENTUM_AT_START = 0.85


def learning_rate_multiplier(step: int, total_steps: float, schedule: ScheduleConfig) -> float:
    """Return the share of the peak learning rate that the update after `step` updates uses, in (0, 1].

    total_steps: how many updates the run will make. A run that ends by the clock passes its estimate anew each step,
    `projected_steps(step, progress)`; infinity, as long as there is none, means that nothing falls yet.

    The warmup rises as (step + 1) / warmup_steps, so that the first update already moves and update number
    warmup_steps is at the peak. linear and cosine fall from the end of the warmup to the floor, wsd falls linearly
    over the last warmdown_fraction of the run. The floor is where update number total_steps + 1 would be: the last
    one is a step short of it, and not wasted where the floor is 0. Where a short run's warmup meets its fall, the
    lower of the two holds.
    """
    warmup = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    return min(warmup, schedule.floor + (1 - schedule.floor) * _fall(step, total_steps, schedule))


def _fall(step: int, total_steps: float, schedule: ScheduleConfig) -> float:
    """Return the part of the schedule after the warmup, from 1 to 0."""
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        remaining = max(0.0, 1 - step / total_steps)
        return min(1.0, remaining / schedule.warmdown_fraction) if schedule.warmdown_fraction else 1.0
    progress = (step - schedule.warmup_steps) / max(1.0, total_steps - schedule.warmup_steps)
    progress = min(1.0, max(0.0, progress))
    if schedule.name == "linear":
        return 1 - progress
    return 0.5 * (1 + math.cos(math.pi * progress))


def projected_steps(step: int, progress: float) -> float:
    """Return how many updates the run will make, when `step` of them took it to `progress` (0 to 1) of its budget.

    The budget may be minutes or tokens. Infinity at the start, when nothing is known.
    """
    return step / progress if step and progress else math.inf


def momentum(step: int, optim: OptimConfig) -> float:
    """Return Muon's momentum for the update after `step` updates: from 0.85 up to optim.momentum."""
    start = min(MOMENTUM_AT_START, optim.momentum)
    share = min(1.0, step / optim.momentum_warmup_steps) if optim.momentum_warmup_steps else 1.0
    return start + share * (optim.momentum - start)


def apply_schedule(
    optimizer: Optimizer,
    step: int,
    total_steps: float,
    optim: OptimConfig,
    schedule: ScheduleConfig,
    scale: float = 1.0,
) -> None:
    """Set the learning rate of every group, and Muon's momentum, for the update after `step` updates.

    scale: a factor on the learning rates, beside the schedule's.
    """
    multiplier = learning_rate_multiplier(step, total_steps, schedule) * scale
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * multiplier
        if group["rule"] == "muon":
            group["momentum"] = momentum(step, optim)
