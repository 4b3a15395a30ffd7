"""What a sweep of learning rates says: which rates it tries, when it is over, and which of them to train with.

The range test of Smith, "Cyclical learning rates for training neural networks", arXiv 1506.01186, section 3.3, with the
exponential growth and the smoothing that fastai gave it. Its loss also falls because training goes on, and goes up and
down with the batches; so it is compared with that of the same steps without the groups that are swept, which has both
in it. Pure functions of numbers: refuses to know what makes the steps (train/find_lr.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from hfgolf.errors import UserError

SMOOTHING = 0.8
MEMORY_STEPS = 5  # 1 / (1 - SMOOTHING): a smoothed loss is that of about so many steps
DIVERGED_NATS = 0.1
SHARE_OF_GAIN = 0.95
RULE = (
    f"the lowest learning rate with {SHARE_OF_GAIN:.0%} of the largest gain; the gain is how far the smoothed loss is"
    " below that of the same steps while the swept parameters were at rest"
)


@dataclass(frozen=True)
class Sweep:
    """The losses of one sweep, in nats a token, up to where it ended."""

    key: str
    """What was swept, in the section optim: learning_rate or adamw_learning_rate."""
    learning_rates: list[float]
    losses: list[float]
    """Of the steps at these learning rates; each is from before its learning rate was used."""
    losses_at_rest: list[float]
    """Of the same batches, from the same start, while the swept groups stayed as they were."""
    has_diverged: bool
    """It ended because the next loss would have been far above, and not because it had come to the last rate."""

    @property
    def smoothed_losses(self) -> list[float]:
        return smooth(self.losses)

    @property
    def gains(self) -> list[float]:
        """How far the smoothed loss is below that at rest."""
        return smoothed_gains(self.losses, self.losses_at_rest)


def sweep_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Return `steps` learning rates from lowest to highest, each the same factor above the one before.

    steps: at least 4 * MEMORY_STEPS, to see a loss fall and rise. UserError unless 0 < lowest < highest.
    """
    if not 0 < lowest < highest < float("inf"):
        raise UserError(f"--lowest {lowest:g}, --highest {highest:g}: allowed: 0 < lowest < highest.")
    return [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]


def smooth(losses: list[float]) -> list[float]:
    """Return the exponential moving averages of the losses, without the bias towards a start at 0."""
    average, smoothed = 0.0, []
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed.append(average / (1 - SMOOTHING**step))
    return smoothed


def smoothed_gains(losses: list[float], losses_at_rest: list[float]) -> list[float]:
    """Return how far the smoothed losses are below those of the same steps at rest; there may be more of these."""
    return smooth([rest - loss for loss, rest in zip(losses, losses_at_rest, strict=False)])


def has_diverged(losses: list[float], losses_at_rest: list[float]) -> bool:
    """Say whether the smoothed loss has come to lie DIVERGED_NATS above that at rest, or is not a number."""
    return not smoothed_gains(losses, losses_at_rest)[-1] >= -DIVERGED_NATS


def suggest(sweep: Sweep) -> float:
    """Return the learning rate to train with, by RULE, to two digits.

    Not that of the largest gain itself: where many rates are about as good, the batches decide which of them it is.
    UserError where no learning rate gained anything, or the gain was the largest at the last one.
    """
    gains, rates = sweep.gains, sweep.learning_rates
    best_at = gains.index(max(gains))
    if best_at < MEMORY_STEPS:
        raise UserError(
            f"optim.{sweep.key}: no learning rate from {rates[0]:g} to {rates[-1]:.2g} makes the loss fall below that"
            " at rest; begin at a smaller --lowest, or look at the config's other learning rates."
        )
    if best_at == len(gains) - 1 and not sweep.has_diverged:
        raise UserError(f"optim.{sweep.key}: the last learning rate, {rates[-1]:g}, is the best yet; raise --highest.")
    enough_at = next(step for step, gain in enumerate(gains) if gain >= SHARE_OF_GAIN * gains[best_at])
    return float(f"{rates[enough_at]:.1e}")
