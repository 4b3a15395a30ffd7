"""Detect spikes and divergence of the training loss, for train.rollback_on.

Uses the doctor's definitions, but judges every step. Does not know the run; recovery.py acts on the verdict.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median
from typing import Literal

from hfgolf.doctor.finding import robust_sigma
from hfgolf.doctor.history import LEVEL_STEPS
from hfgolf.doctor.spike_symptoms import SPIKE_SHARE
from hfgolf.doctor.symptoms import MIN_RISE, RISE, RISE_FROM_START, SIGMAS


class LossWatch:
    """Judges one training loss after another. Equal losses give equal verdicts on all processes."""

    def __init__(self, symptoms: Collection[str]) -> None:
        self._symptoms = symptoms
        self._usual: deque[float] = deque(maxlen=LEVEL_STEPS)
        """Recent losses without spikes."""
        self._recent: deque[float] = deque(maxlen=LEVEL_STEPS)
        self._first_loss = math.nan
        self._lowest_level = math.inf
        self.lowest_step = 0
        """Step at which the median of the recent losses was lowest; a divergence began after it."""
        self.saw = ""
        """The evidence for the last verdict."""

    def verdict(self, step: int, loss: float) -> Literal["spike", "divergence"] | None:
        """Return what is wrong with a step's loss (nats per token, over all processes); None if nothing is."""
        if math.isnan(self._first_loss):
            self._first_loss = loss
        if "spike" in self._symptoms and self._is_spike(loss):
            return "spike"
        self._usual.append(loss)
        self._recent.append(loss)
        return "divergence" if "divergence" in self._symptoms and self._has_diverged(step) else None

    def forget_recent(self) -> None:
        """Forget the steps that a rollback has undone, but keep the usual level."""
        self._recent.clear()

    def _is_spike(self, loss: float) -> bool:
        if len(self._usual) < LEVEL_STEPS // 2:
            return False
        usual = median(self._usual)
        self.saw = f"the training loss is {loss:.4g}, up from {usual:.4g} in the steps before"
        return loss > usual + max(SPIKE_SHARE * usual, SIGMAS * robust_sigma(self._usual))

    def _has_diverged(self, step: int) -> bool:
        if len(self._recent) < LEVEL_STEPS // 2:
            return False
        level, lowest = median(self._recent), self._lowest_level
        if level < lowest:
            self._lowest_level, self.lowest_step = level, step
        high = min(max(RISE * lowest, lowest + MIN_RISE), RISE_FROM_START * self._first_loss)
        was, at = min((lowest, self.lowest_step), (self._first_loss, 1))
        self.saw = f"the median training loss is {level:.4g}, up from {was:.4g} at step {at}"
        return level > high
