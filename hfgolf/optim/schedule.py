"""Learning rate, momentum and weight decay as pure functions of the step.

Owns the shapes of the schedules. Refuses to hold state or to be `prepare`d: a prepared scheduler steps once per
process, and a resume here is only another step number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hfgolf.config import OptimConfig, ScheduleConfig


def learning_rate_multiplier(step: int, total_steps: float, schedule: ScheduleConfig) -> float:
    """Return the share of the peak learning rate that the update after `step` updates uses, in (0, 1].

    total_steps: how many updates the run will make. A run that ends by the clock passes its estimate anew each step,
    `projected_steps(step, progress)`; infinity, as long as there is none, means that nothing falls yet.

    The warmup rises as (step + 1) / warmup_steps, so that the first update already moves and update number
    warmup_steps is at the peak. linear and cosine fall from the end of the warmup to the floor. wsd falls to it over
    the last warmdown_fraction of the run: linearly, or as 1 - sqrt of the share of the warmdown that is done (Haegele
    et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", arXiv 2405.18392).
    cosine_warmdown is cosine times that warmdown, so that it ends at 0, whatever the floor. The end is where update
    number total_steps + 1 would be: the last update is a step short of it, and not wasted if it is at 0. If a short
    run's warmup meets its fall, the lower of the two holds.
    """
    warmup = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    falling = schedule.floor + (1 - schedule.floor) * _fall(step, total_steps, schedule)
    if schedule.name == "cosine_warmdown":
        falling *= _warmdown(step, total_steps, schedule)
    return min(warmup, falling)


def _fall(step: int, total_steps: float, schedule: ScheduleConfig) -> float:
    """Return the part of the schedule after the warmup, from 1 to 0."""
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        return _warmdown(step, total_steps, schedule)
    progress = (step - schedule.warmup_steps) / max(1.0, total_steps - schedule.warmup_steps)
    progress = min(1.0, max(0.0, progress))
    if schedule.name == "linear":
        return 1 - progress
    return 0.5 * (1 + math.cos(math.pi * progress))


def _warmdown(step: int, total_steps: float, schedule: ScheduleConfig) -> float:
    """Return 1 before the last warmdown_fraction of the run, and what falls to 0 over it."""
    left = _warmdown_left(step, total_steps, schedule)
    return left if schedule.warmdown_shape == "linear" else 1 - math.sqrt(1 - left)


def _warmdown_left(step: int, total_steps: float, schedule: ScheduleConfig) -> float:
    """Return the share of the last warmdown_fraction of the run that is still to come: 1 before it, 0 at the end."""
    remaining = max(0.0, 1 - step / total_steps)
    return min(1.0, remaining / schedule.warmdown_fraction) if schedule.warmdown_fraction else 1.0


def projected_steps(step: int, progress: float) -> float:
    """Return how many updates the run will make, when `step` of them took it to `progress` (0 to 1) of its minutes.

    Infinity at the start, when nothing is known. However uneven the steps are, what has once fallen does not rise:
    step / projected_steps is the progress itself, and (step - warmup) / (projected_steps - warmup) grows with both.
    """
    return step / progress if step and progress else math.inf


def momentum(step: int, total_steps: float, optim: OptimConfig, schedule: ScheduleConfig) -> float:
    """Return Muon's momentum for the update after `step` updates: up to optim.momentum, and on to momentum_end.

    total_steps: as in `learning_rate_multiplier`. In a short run the warmdown bends what the warmup still raises.
    """
    start = min(optim.momentum_start, optim.momentum)
    share = min(1.0, step / optim.momentum_warmup_steps) if optim.momentum_warmup_steps else 1.0
    warm = start + share * (optim.momentum - start)
    if optim.momentum_end is None:
        return warm
    return optim.momentum_end + _warmdown_left(step, total_steps, schedule) * (warm - optim.momentum_end)


def weight_decay_multiplier(step: int, total_steps: float, schedule: ScheduleConfig) -> float:
    """Return the share of a group's weight decay that the update after `step` updates uses, in [0, 1].

    total_steps: as in `learning_rate_multiplier`. The decay is multiplied by the learning rate once more, so that
    under learning_rate the shrinkage of a step goes with the square of that multiplier.
    """
    if schedule.weight_decay == "learning_rate":
        return learning_rate_multiplier(step, total_steps, schedule)
    return max(0.0, 1 - step / total_steps) if schedule.weight_decay == "linear" else 1.0


def apply_schedule(
    optimizer: Optimizer,
    step: int,
    total_steps: float,
    optim: OptimConfig,
    schedule: ScheduleConfig,
    scale: float = 1.0,
) -> None:
    """Set learning rate and weight decay of every group, and Muon's momentum, for the update after `step` updates.

    scale: a factor on the learning rates, beside the schedule's.
    """
    learning_rate = learning_rate_multiplier(step, total_steps, schedule) * scale
    weight_decay = weight_decay_multiplier(step, total_steps, schedule)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * learning_rate
        group["weight_decay"] = group["initial_weight_decay"] * weight_decay
        if group["rule"] == "muon":
            group["momentum"] = momentum(step, total_steps, optim, schedule)
