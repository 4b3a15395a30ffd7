"""Learning rate, momentum and weight decay as pure functions of the step.

Owns the warmup and how far a run is; config/schedules.py has the shapes. Holds no state, so a resume only needs the
step number. Do not pass a schedule to `accelerator.prepare`: a prepared scheduler steps once per process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

from hfgolf.config.schedules import SCHEDULES

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hfgolf.config.sections import OptimSection, ScheduleSection


def learning_rate_multiplier(step: int, total_steps: float, schedule: ScheduleSection) -> float:
    """Return the fraction of the peak learning rate for the update after `step` completed updates, in (0, 1].

    total_steps: the updates that the run will make. A run limited by time passes a new estimate at each step,
    `projected_steps(step, progress)`. Infinity means that there is no estimate yet, so the decay has not started.

    Warmup rises as (step + 1) / warmup_steps: the first update is not zero, and update number warmup_steps has the peak
    rate. Then the shape decides (config/schedules.py). Its progress counts from the end of the warmup; its warmdown is
    the last warmdown_fraction of the run, in which it falls linearly.

    The decay ends at update number total_steps + 1, which is never made, so a decay to 0 does not waste the last
    update. If the warmup of a short run overlaps the decay, the lower of the two applies.
    """
    warmup = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    progress = min(1.0, max(0.0, (step - schedule.warmup_steps) / max(1.0, total_steps - schedule.warmup_steps)))
    warmdown = 1.0
    if schedule.warmdown_fraction:
        warmdown = min(1.0, max(0.0, 1 - step / total_steps) / schedule.warmdown_fraction)
    return min(warmup, SCHEDULES[schedule.name](progress, warmdown, schedule.floor))


def projected_steps(step: int, progress: float) -> float:
    """Estimate the total updates of a run with a time limit, given that `step` updates took `progress` (0 to 1) of it.

    Returns infinity at the start, when there is nothing to estimate from. Uneven step times never make a decayed
    learning rate rise again: step / projected_steps is the progress itself, and
    (step - warmup) / (projected_steps - warmup) increases with both step and progress.
    """
    return step / progress if step and progress else math.inf


def momentum(step: int, optim: OptimSection) -> float:
    """Return Muon's momentum for the update after `step` updates: it rises from optim.momentum_start."""
    start = min(optim.momentum_start, optim.momentum)
    share = min(1.0, step / optim.momentum_warmup_steps) if optim.momentum_warmup_steps else 1.0
    return start + share * (optim.momentum - start)


def weight_decay_multiplier(step: int, total_steps: float, schedule: ScheduleSection) -> float:
    """Return the fraction of a group's weight decay for the update after `step` updates, in [0, 1].

    total_steps: as in `learning_rate_multiplier`. The optimizer multiplies weight decay by the learning rate again, so
    under schedule.weight_decay learning_rate, weights shrink with the square of the learning rate multiplier.
    """
    if schedule.weight_decay == "learning_rate":
        return learning_rate_multiplier(step, total_steps, schedule)
    if schedule.weight_decay == "linear":
        return max(0.0, 1 - step / total_steps)
    return 1.0 if schedule.weight_decay == "constant" else assert_never(schedule.weight_decay)


def apply_schedule(
    optimizer: Optimizer,
    step: int,
    total_steps: float,
    optim: OptimSection,
    schedule: ScheduleSection,
    scale: float = 1.0,
) -> None:
    """Set each group's step, learning rate and weight decay, and Muon's momentum, for the update after `step` updates.

    scale: an extra factor on the learning rates.
    """
    learning_rate = learning_rate_multiplier(step, total_steps, schedule) * scale
    weight_decay = weight_decay_multiplier(step, total_steps, schedule)
    for group in optimizer.param_groups:
        group["step"] = step
        group["lr"] = group["initial_lr"] * learning_rate
        group["weight_decay"] = group["initial_weight_decay"] * weight_decay
        if group["rule"] == "muon":
            group["momentum"] = momentum(step, optim)
