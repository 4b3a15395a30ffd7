"""Sweeps: rates in equal ratios, smoothing in closed form, a rule robust to noise and to training progress."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import pairwise

import pytest

from hfgolf.commands.find_lr import sweep_rates
from hfgolf.commands.lr_sweep import (
    DIVERGED_NATS,
    Sweep,
    has_diverged,
    moving_averages,
    suggest,
)
from hfgolf.system.errors import UserError

RATES = sweep_rates(1e-4, 1.0, 81)  # 20 a decade
BEST = 0.02


def sweep(noise: float = 0.0, progress: float = 0.0, size: float = 0.5, best: float = BEST, seed: int = 0) -> Sweep:
    """Return a sweep whose gain is a parabola over log rate, of `size` nats at `best` and 0 two decades away.

    noise: standard deviation of the batches' loss; progress: nats a step by which the other groups make it fall.
    """
    numbers = random.Random(seed)
    at_rest = [5.0 - progress * step + numbers.gauss(0, noise) for step in range(len(RATES))]
    gains = [size * (1 - (math.log10(rate / best) / 2) ** 2) for rate in RATES]
    losses = [rest - gain for rest, gain in zip(at_rest, gains, strict=True)]
    return Sweep("learning_rate", RATES, losses, at_rest, has_diverged=False)


def test_rates_are_spaced_geometrically():
    assert RATES[0] == 1e-4 and RATES[-1] == pytest.approx(1.0)
    assert [after / before for before, after in pairwise(RATES)] == pytest.approx([10 ** (1 / 20)] * 80)


@pytest.mark.parametrize("arguments", [(0.0, 1.0, 80), (1.0, 0.1, 80), (1e-4, math.inf, 80)])
def test_invalid_rates_are_rejected(arguments):
    with pytest.raises(UserError, match=r"--lowest.*allowed: "):
        sweep_rates(*arguments)


def test_loss_far_above_its_start_counts_as_diverged():
    at_rest = [5.0] * 60
    for above, diverges in ((0.9 * DIVERGED_NATS, False), (1.1 * DIVERGED_NATS, True), (math.inf, True)):
        assert has_diverged([5.0 + above] * 50, at_rest) is diverges
    assert has_diverged([5.0] * 10 + [math.nan], at_rest)
    # a single bad batch does not count, nor does a loss that also rises at rest
    assert not has_diverged([4.5] * 20 + [6.5], at_rest)
    assert not has_diverged([5.0] * 20 + [9.0] * 20, [5.0] * 20 + [9.0] * 20)


def test_suggestion_is_the_lowest_of_equally_good_rates():
    for bump in (65, 75):  # no matter where on the plateau the largest gain is
        gains = [min(1.0, rate / BEST) for rate in RATES]
        gains[bump] += 0.1
        flat = Sweep("learning_rate", RATES, [5 - gain for gain in gains], [5.0] * len(RATES), has_diverged=False)
        assert flat.gains.index(max(flat.gains)) == bump
        assert BEST < suggest(flat) < 4 * BEST < RATES[bump] / 2


@pytest.mark.parametrize("seed", range(5))
def test_suggestion_is_robust_to_batch_noise_and_progress(seed):
    """The raw loss would mislead in both cases: its minimum is far above."""
    harder = sweep(noise=0.3, progress=0.02, seed=seed)
    smoothed = moving_averages(harder.losses)
    assert RATES[smoothed.index(min(smoothed))] > 3 * BEST
    assert suggest(harder) == suggest(sweep())


def test_sweep_without_gain_is_rejected():
    falling = sweep(size=-0.5)
    worse = [loss + 0.01 * step for step, loss in enumerate(falling.losses_at_rest)]
    for losses in (worse, falling.losses_at_rest):
        with pytest.raises(UserError, match=r"optim.learning_rate: no learning rate .* --lowest") as error:
            suggest(dataclasses.replace(falling, losses=losses))
        assert "\n" not in str(error.value)


def test_short_sweep_is_rejected_unless_it_diverged():
    rising = sweep(best=1.0)
    with pytest.raises(UserError, match=r"the highest learning rate, 1, is the best; raise --highest"):
        suggest(dataclasses.replace(rising, losses=[rest - i for i, rest in enumerate(rising.losses_at_rest)]))
    abrupt = dataclasses.replace(
        rising, losses=[rest - i for i, rest in enumerate(rising.losses_at_rest)], has_diverged=True
    )
    assert 0.5 < suggest(abrupt) < 1
