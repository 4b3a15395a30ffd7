"""Symptoms in single steps: losses and gradient norms that stand out from those before.

Detectors as in symptoms.py.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from hfgolf.doctor.finding import UNUSUAL, Finding, learning_rates, most_unusual, robust_sigma
from hfgolf.doctor.history import LEVEL_STEPS, History, Step
from hfgolf.doctor.symptoms import BLOW_UP, IN_A_ROW, SIGMAS

SPIKE = "isolated loss spike"
SPIKE_BASE_STEPS = 50
SPIKE_SHARE = 0.2  # of the usual loss, on top of it; in healthy runs a step reached 0.1
SPIKE_STEPS = 20  # what lasts longer is no spike


class Spikes:
    """Losses that stand out and are back after a few steps; told of the first, the second, the fourth and so on."""

    def __init__(self) -> None:
        self._base: deque[float] = deque(maxlen=SPIKE_BASE_STEPS)
        self._spike: list[Step] = []
        self._count = 0

    def __call__(self, history: History) -> Finding | None:
        if history.latest is history.restore:
            self._base.clear()
            self._spike = []
        findings = [self._look_at(step, history) for step in history.new_steps if math.isfinite(step.loss)]
        return next((finding for finding in reversed(findings) if finding), None)

    def _look_at(self, step: Step, history: History) -> Finding | None:
        base = self._base
        if len(base) >= LEVEL_STEPS // 2 and step.loss > max(base):
            usual = float(np.median(base))
            if step.loss > usual + max(SPIKE_SHARE * usual, SIGMAS * robust_sigma(base)):
                self._spike.append(step)
                if len(self._spike) > SPIKE_STEPS:  # the loss has come to stay
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
            return None  # a divergence, which blow_up tells
        self._count += 1
        if self._count.bit_count() > 1:
            return None
        saw = (
            f"a training loss of {top.loss:.4g} (gradient norm {top.grad_norm:.3g}), {usual:.4g} in the steps before,"
            f" back after {len(spike)} step{'s' if len(spike) > 1 else ''}; spike number {self._count}"
        )
        causes = ("an unusual batch, harmless while it is rare", "a learning rate at the edge of what is stable")
        if self._count < IN_A_ROW and most_unusual(history) <= UNUSUAL:
            fix = {} if history.settings["train.max_grad_norm"] else {"train.max_grad_norm": 1.0}
            return Finding(SPIKE, top.step, saw, causes, fix)
        return Finding(SPIKE, top.step, saw, causes[::-1], learning_rates(history, 0.5))


NORM_SPIKE = "gradient norm spike"
NORM_SPIKE_SHARE = 4  # of the usual norm; in healthy runs a step reached 2.5, in runs with too high a rate 4.5 and 5
NORM_LEAD_STEPS = 2  # within which the loss reacts, if it does


class NormSpikes:
    """Gradient norms that stand out while the loss does not, or not yet; told as Spikes tells."""

    def __init__(self) -> None:
        self._base: deque[Step] = deque(maxlen=SPIKE_BASE_STEPS)
        self._was_spike = False
        self._count = 0

    def __call__(self, history: History) -> Finding | None:
        if history.latest is history.restore:
            self._base.clear()
        findings = [self._look_at(step, history) for step in history.new_steps if math.isfinite(step.grad_norm)]
        return next((finding for finding in reversed(findings) if finding), None)

    def _look_at(self, step: Step, history: History) -> Finding | None:
        norms, losses = [s.grad_norm for s in self._base], [s.loss for s in self._base]
        self._base.append(step)
        was_spike, self._was_spike = self._was_spike, False
        if len(norms) < LEVEL_STEPS // 2 or step.grad_norm < NORM_SPIKE_SHARE * float(np.median(norms)):
            return None
        self._was_spike = True
        usual = float(np.median(losses))
        high = usual + max(SPIKE_SHARE * usual, SIGMAS * robust_sigma(losses))
        if was_spike or not step.loss < high or usual > history.first_loss:
            return None  # the loss tells of it already
        self._count += 1
        if self._count.bit_count() > 1:
            return None
        later = [s for s in history.new_steps if 0 < s.step - step.step <= NORM_LEAD_STEPS and s.loss > high]
        followed = f"the loss rose to {later[0].loss:.4g} at step {later[0].step}" if later else "the loss held"
        saw = (
            f"a gradient norm of {step.grad_norm:.3g}, {np.median(norms):.3g} in the steps before; {followed};"
            f" spike number {self._count}"
        )
        causes = ("an unusual batch, which a clip makes harmless", "a learning rate at the edge of what is stable")
        if self._count >= IN_A_ROW or later or most_unusual(history) > UNUSUAL:
            return Finding(NORM_SPIKE, step.step, saw, causes[::-1], learning_rates(history, 0.5))
        fix = {} if history.settings["train.max_grad_norm"] else {"train.max_grad_norm": 1.0}
        return Finding(NORM_SPIKE, step.step, saw, causes, fix)
