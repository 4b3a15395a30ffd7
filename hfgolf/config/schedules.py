"""The shapes of learning rate schedules: their names, the values of schedule.name, and their formulas.

One entry is all that a new one takes. optim/schedule.py adds the warmup and says how far a run is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

Shape = Callable[[float, float, float], float]


def _linear(progress: float, warmdown: float, floor: float) -> float:
    return floor + (1 - floor) * (1 - progress)


def _cosine(progress: float, warmdown: float, floor: float) -> float:
    return floor + (1 - floor) * (0.5 * (1 + math.cos(math.pi * progress)))


def _wsd(progress: float, warmdown: float, floor: float) -> float:
    """Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", arXiv 2405.18392."""
    return floor + (1 - floor) * warmdown


SCHEDULES: dict[str, Shape] = {
    "constant": lambda progress, warmdown, floor: 1.0,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_warmdown": lambda progress, warmdown, floor: _cosine(progress, warmdown, floor) * warmdown,
    "wsd": _wsd,
}
"""{name: formula}. The formula returns the fraction of the peak rate, in [0, 1], from the progress from the warmup to
the end of the run, 0 to 1; what is left of the warmdown, 1 before it to 0 at the end; and schedule.floor."""

if TYPE_CHECKING:  # mypy can't read names off a table; the config refuses any other
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]
