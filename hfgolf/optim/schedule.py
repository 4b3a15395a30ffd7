"""Learning rate, momentum and weight decay as pure functions of the step.

Owns the shapes of the schedules. Holds no state, so a resume only needs the step number. Do not pass a schedule to
`accelerator.prepare`: a prepared scheduler steps once per process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hfgolf.config.sections import OptimSection, ScheduleSection


def learning_rate_multiplier(step: int, total_steps: float, schedule: ScheduleSection) -> float:
    """Return the fraction of the peak learning rate for the update after `step` completed updates, in (0, 1].

    total_steps: the updates that the run will make. A run limited by time passes a new estimate at each step,
    `projected_steps(step, progress)`. Infinity means that there is no estimate yet, so the decay has not started.

    - Warmup rises as (step + 1) / warmup_steps: the first update is not zero, and update number warmup_steps has the
      peak rate.
    - linear and cosine decay from the end of the warmup to the floor.
    - wsd decays linearly to the floor over the last warmdown_fraction of the run (Haegele et al., "Scaling Laws and
      Compute-Optimal Training Beyond Fixed Training Durations", arXiv 2405.18392).
    - cosine_warmdown is cosine times the wsd warmdown, so it ends at 0 whatever the floor.

    The decay ends at update number total_steps + 1, which is never made, so a decay to 0 does not waste the last
    update. If the warmup of a short run overlaps the decay, the lower of the two applies.
    """
    warmup = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    decay = schedule.floor + (1 - schedule.floor) * _decay(step, total_steps, schedule)
    if schedule.name == "cosine_warmdown":
        decay *= _warmdown(step, total_steps, schedule)
    return min(warmup, decay)


def _decay(step: int, total_steps: float, schedule: ScheduleSection) -> float:
    """Return the schedule after the warmup, without its floor: from 1 down to 0."""
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        return _warmdown(step, total_steps, schedule)
    progress = (step - schedule.warmup_steps) / max(1.0, total_steps - schedule.warmup_steps)
    progress = min(1.0, max(0.0, progress))
    match schedule.name:
        case "linear":
            return 1 - progress
        case "cosine" | "cosine_warmdown":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            assert_never(schedule.name)


def _warmdown(step: int, total_steps: float, schedule: ScheduleSection) -> float:
    """Return the remaining fraction of the warmdown: 1 before the last warmdown_fraction of the run, 0 at its end."""
    remaining = max(0.0, 1 - step / total_steps)
    return min(1.0, remaining / schedule.warmdown_fraction) if schedule.warmdown_fraction else 1.0


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
