"""Interpret a learning-rate sweep: which rates to try, when to stop, and which rate to train with.

This is the range test of Smith, "Cyclical learning rates for training neural networks", arXiv 1506.01186, section 3.3,
with fastai's exponential growth and smoothing. In a plain range test, the loss also falls because training continues,
and it varies with the batches. So each sweep is compared with the same steps while the swept groups are frozen, which
has both effects. Pure functions of numbers; find_lr.py runs the steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from hfgolf.errors import UserError

SMOOTHING = 0.8
MEMORY_STEPS = 5  # 1 / (1 - SMOOTHING): a smoothed loss averages about this many steps
DIVERGED_NATS = 0.1
SHARE_OF_GAIN = 0.95
RULE = (
    f"the lowest learning rate with {SHARE_OF_GAIN:.0%} of the largest gain; the gain is how far the smoothed loss is"
    " below that of the same steps with the swept parameters frozen"
)


@dataclass(frozen=True)
class Sweep:
    """The losses of one sweep up to its end, in nats per token."""

    key: str
    """The swept key of the section optim: learning_rate or adamw_learning_rate."""
    learning_rates: list[float]
    losses: list[float]
    """Loss of the step at each learning rate, computed before the update."""
    losses_at_rest: list[float]
    """Losses on the same batches, from the same start, with the swept groups frozen."""
    has_diverged: bool
    """True if the sweep ended because the loss diverged, False if it reached the last rate."""

    @property
    def smoothed_losses(self) -> list[float]:
        return smooth(self.losses)

    @property
    def gains(self) -> list[float]:
        """How far each smoothed loss is below that at rest."""
        return smoothed_gains(self.losses, self.losses_at_rest)


def sweep_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Return `steps` learning rates from lowest to highest, spaced by a constant factor.

    steps: at least 4 * MEMORY_STEPS, to see the loss fall and rise. Raises UserError unless 0 < lowest < highest.
    """
    if not 0 < lowest < highest < float("inf"):
        raise UserError(f"--lowest {lowest:g}, --highest {highest:g}: allowed: 0 < lowest < highest.")
    return [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]


def smooth(losses: list[float]) -> list[float]:
    """Return the exponential moving averages of the losses, corrected for the bias toward the start at 0."""
    average, smoothed = 0.0, []
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed.append(average / (1 - SMOOTHING**step))
    return smoothed


def smoothed_gains(losses: list[float], losses_at_rest: list[float]) -> list[float]:
    """Return how far the smoothed losses are below those at rest. losses_at_rest may be longer."""
    return smooth([rest - loss for loss, rest in zip(losses, losses_at_rest, strict=False)])


def has_diverged(losses: list[float], losses_at_rest: list[float]) -> bool:
    """Return whether the smoothed loss is more than DIVERGED_NATS above that at rest, or is NaN."""
    return not smoothed_gains(losses, losses_at_rest)[-1] >= -DIVERGED_NATS


def suggest(sweep: Sweep) -> float:
    """Return the learning rate to train with, by RULE, rounded to two digits.

    Not the rate with the largest gain: if many rates are about equally good, chance decides which one that is.
    Raises UserError if no learning rate gained anything, or if the last one gained the most.
    """
    gains, rates = sweep.gains, sweep.learning_rates
    best_at = gains.index(max(gains))
    if best_at < MEMORY_STEPS:
        raise UserError(
            f"optim.{sweep.key}: no learning rate from {rates[0]:g} to {rates[-1]:.2g} lowers the loss; set a smaller"
            " --lowest, or check the config's other learning rates."
        )
    if best_at == len(gains) - 1 and not sweep.has_diverged:
        raise UserError(f"optim.{sweep.key}: the highest learning rate, {rates[-1]:g}, is the best; raise --highest.")
    enough_at = next(step for step, gain in enumerate(gains) if gain >= SHARE_OF_GAIN * gains[best_at])
    return float(f"{rates[enough_at]:.1e}")
