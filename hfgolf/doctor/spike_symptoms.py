"""Symptoms in single steps: losses and gradient norms that stand out from the steps before.

For the interface of a detector, see symptoms.py.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from hfgolf.doctor.finding import (
    FAR_ABOVE_USUAL,
    Finding,
    max_learning_rate_ratio,
    scaled_learning_rates,
)
from hfgolf.doctor.history import History, Step
from hfgolf.doctor.symptoms import BLOW_UP, IN_A_ROW
from hfgolf.run.loss_levels import LEVEL_STEPS, SIGMAS, SPIKE_SHARE, robust_sigma

SPIKE = "isolated loss spike"
SPIKE_BASE_STEPS = 50
MAX_SPIKE_STEPS = 20  # anything longer is not a spike


class Spikes:
    """A loss that jumps and recovers within a few steps. Reports spike number 1, 2, 4, 8 and so on."""

    def __init__(self) -> None:
        self._base: deque[float] = deque(maxlen=SPIKE_BASE_STEPS)
        self._spike: list[Step] = []
        self._count = 0

    def __call__(self, history: History) -> Finding | None:
        if history.latest is history.restore:
            self._base.clear()
            self._spike = []
        findings = [self._add(step, history) for step in history.new_steps if math.isfinite(step.loss)]
        return next((finding for finding in reversed(findings) if finding), None)

    def _add(self, step: Step, history: History) -> Finding | None:
        base = self._base
        if len(base) >= LEVEL_STEPS // 2 and step.loss > max(base):
            usual = float(np.median(base))
            if step.loss > usual + max(SPIKE_SHARE * usual, SIGMAS * robust_sigma(base)):
                self._spike.append(step)
                if len(self._spike) > MAX_SPIKE_STEPS:  # the higher loss is the new normal
                    base.clear()
                    base.extend(s.loss for s in self._spike)
                    self._spike = []
                return None
        spike, self._spike = self._spike, []
        finding = self._describe(spike, float(np.median(base)), history) if spike else None
        base.append(step.loss)
        return finding

    def _describe(self, spike: list[Step], usual: float, history: History) -> Finding | None:
        top = max(spike, key=lambda step: step.loss)
        if top.loss > BLOW_UP * history.first_loss:
            return None  # a divergence, which blow_up reports
        self._count += 1
        if self._count.bit_count() > 1:
            return None
        saw = (
            f"the training loss rose from {usual:.4g} to {top.loss:.4g} (gradient norm {top.grad_norm:.3g}) and was"
            f" back after {len(spike)} step{'s' if len(spike) > 1 else ''}; spike number {self._count}"
        )
        causes = ("an unusual batch, harmless if it is rare", "a learning rate at the edge of stability")
        if self._count < IN_A_ROW and max_learning_rate_ratio(history) <= FAR_ABOVE_USUAL:
            fix = {} if history.settings["train.max_grad_norm"] else {"train.max_grad_norm": 1.0}
            return Finding(SPIKE, top.step, saw, causes, fix)
        return Finding(SPIKE, top.step, saw, causes[::-1], scaled_learning_rates(history, 0.5))


NORM_SPIKE = "gradient norm spike"
NORM_SPIKE_RATIO = 4  # to the usual norm; healthy runs reached 2.5, runs with too high a learning rate 4.5 and 5
NORM_LEAD_STEPS = 2  # if the loss reacts to a norm spike, it does so within this many steps


class NormSpikes:
    """A gradient norm that spikes when the loss does not, or not yet. Reports at the same numbers as Spikes."""

    def __init__(self) -> None:
        self._base: deque[Step] = deque(maxlen=SPIKE_BASE_STEPS)
        self._was_spike = False
        self._count = 0

    def __call__(self, history: History) -> Finding | None:
        if history.latest is history.restore:
            self._base.clear()
        findings = [self._add(step, history) for step in history.new_steps if math.isfinite(step.grad_norm)]
        return next((finding for finding in reversed(findings) if finding), None)

    def _add(self, step: Step, history: History) -> Finding | None:
        norms, losses = [s.grad_norm for s in self._base], [s.loss for s in self._base]
        self._base.append(step)
        was_spike, self._was_spike = self._was_spike, False
        if len(norms) < LEVEL_STEPS // 2 or step.grad_norm < NORM_SPIKE_RATIO * float(np.median(norms)):
            return None
        self._was_spike = True
        usual = float(np.median(losses))
        high = usual + max(SPIKE_SHARE * usual, SIGMAS * robust_sigma(losses))
        if was_spike or not step.loss < high or usual > history.first_loss:
            return None  # the loss already shows it
        self._count += 1
        if self._count.bit_count() > 1:
            return None
        later = [s for s in history.new_steps if 0 < s.step - step.step <= NORM_LEAD_STEPS and s.loss > high]
        reaction = f"the loss rose to {later[0].loss:.4g} at step {later[0].step}" if later else "the loss held"
        saw = (
            f"the gradient norm rose from {np.median(norms):.3g} to {step.grad_norm:.3g}; {reaction};"
            f" spike number {self._count}"
        )
        causes = ("an unusual batch, which clipping makes harmless", "a learning rate at the edge of stability")
        if self._count >= IN_A_ROW or later or max_learning_rate_ratio(history) > FAR_ABOVE_USUAL:
            return Finding(NORM_SPIKE, step.step, saw, causes[::-1], scaled_learning_rates(history, 0.5))
        fix = {} if history.settings["train.max_grad_norm"] else {"train.max_grad_norm": 1.0}
        return Finding(NORM_SPIKE, step.step, saw, causes, fix)
