"""Detect spikes and divergence of the training loss, for train.rollback_on.

Uses the doctor's definitions, but judges every step. What it remembers is in TrainState, so a resumed run judges as a
straight one. Does not know the run; recovery.py acts on the verdict.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median
from typing import Literal

from hfgolf.checkpoint.state import TrainState
from hfgolf.run.loss_levels import (
    LEVEL_STEPS,
    MIN_RISE,
    RISE,
    RISE_FROM_START,
    SIGMAS,
    SPIKE_SHARE,
    robust_sigma,
)


class LossWatch:
    """Judges one training loss after another. Equal losses give equal verdicts on all processes.

    state: what it remembers between two losses.
    """

    def __init__(self, symptoms: Collection[str], state: TrainState) -> None:
        self._symptoms, self._state = symptoms, state

    def verdict(self, step: int, loss: float) -> tuple[Literal["spike", "divergence"] | None, str]:
        """Return what is wrong with a step's loss, or None, and the evidence.

        loss: nats per token, over all processes.
        """
        state = self._state
        if state.first_loss is None:
            state.first_loss = loss
        if "spike" in self._symptoms and (evidence := self._spike(loss)):
            return "spike", evidence
        state.usual_losses = [*state.usual_losses, loss][-LEVEL_STEPS:]
        state.recent_losses = [*state.recent_losses, loss][-LEVEL_STEPS:]
        if "divergence" in self._symptoms and (evidence := self._divergence(step, state.first_loss)):
            return "divergence", evidence
        return None, ""

    def _spike(self, loss: float) -> str:
        """Return the evidence of a spike; "" if there is none."""
        losses = self._state.usual_losses
        if len(losses) < LEVEL_STEPS // 2:
            return ""
        usual = median(losses)
        is_spike = loss > usual + max(SPIKE_SHARE * usual, SIGMAS * robust_sigma(losses))
        return f"the training loss is {loss:.4g}, up from {usual:.4g} in the steps before" if is_spike else ""

    def _divergence(self, step: int, first_loss: float) -> str:
        """Return the evidence of a divergence; "" if there is none."""
        state = self._state
        if len(state.recent_losses) < LEVEL_STEPS // 2:
            return ""
        level, lowest = median(state.recent_losses), state.lowest_level
        if level < lowest:
            state.lowest_level, state.lowest_level_step = level, step
        high = min(max(RISE * lowest, lowest + MIN_RISE), RISE_FROM_START * first_loss)
        was, at = min((lowest, state.lowest_level_step), (first_loss, 1))
        return f"the median training loss is {level:.4g}, up from {was:.4g} at step {at}" if level > high else ""
