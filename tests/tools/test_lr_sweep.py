"""Sweeps: rates in equal ratios, smoothing in closed form, a rule robust to noise and to training progress."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import pairwise

import pytest

from hfgolf.errors import UserError
from hfgolf.tools.lr_sweep import (
    DIVERGED_NATS,
    SMOOTHING,
    Sweep,
    has_diverged,
    smooth,
    smoothed_gains,
    suggest,
    sweep_rates,
)

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


def test_rates_grow_by_the_same_factor_from_the_lowest_to_the_highest():
    assert RATES[0] == 1e-4 and RATES[-1] == pytest.approx(1.0)
    assert [after / before for before, after in pairwise(RATES)] == pytest.approx([10 ** (1 / 20)] * 80)


@pytest.mark.parametrize("arguments", [(0.0, 1.0, 80), (1.0, 0.1, 80), (1e-4, math.inf, 80)])
def test_rates_that_make_no_sweep_are_refused(arguments):
    with pytest.raises(UserError, match=r"--lowest.*allowed: "):
        sweep_rates(*arguments)


def test_smoothing_is_the_average_whose_weights_fall_exponentially_into_the_past():
    losses = [7.0, 3.0, 4.0, 1.0]
    for steps in range(1, 5):
        weights = [SMOOTHING ** (steps - 1 - i) for i in range(steps)]
        mean = sum(w * loss for w, loss in zip(weights, losses, strict=False)) / sum(weights)
        assert smooth(losses)[steps - 1] == pytest.approx(mean)
    assert smooth([2.5] * 30) == pytest.approx([2.5] * 30)  # no bias towards 0 at the start


def test_gains_are_those_of_the_steps_that_were_made():
    assert smoothed_gains([4.0, 3.0], [5.0, 5.0, 9.0]) == smooth([1.0, 2.0])


def test_a_loss_diverges_where_it_is_far_above_that_at_rest():
    at_rest = [5.0] * 60
    for above, diverges in ((0.9 * DIVERGED_NATS, False), (1.1 * DIVERGED_NATS, True), (math.inf, True)):
        assert has_diverged([5.0 + above] * 50, at_rest) is diverges
    assert has_diverged([5.0] * 10 + [math.nan], at_rest)
    # one bad batch is none of the rate's, and neither is a loss that rises at rest too
    assert not has_diverged([4.5] * 20 + [6.5], at_rest)
    assert not has_diverged([5.0] * 20 + [9.0] * 20, [5.0] * 20 + [9.0] * 20)


@pytest.mark.parametrize("best", [0.002, 0.02, 0.1])
def test_the_suggestion_is_just_below_the_largest_gain(best):
    """This parabola reaches 95 % at 0.45 decades below its top, and smoothing lags by 4 steps (0.2 decades)."""
    assert suggest(sweep(best=best)) == pytest.approx(best * 10**-0.22, rel=0.15)  # 12 % from rate to rate


def test_of_many_rates_as_good_it_is_the_lowest():
    for bump in (65, 75):  # wherever on the plateau the largest gain happens to be
        gains = [min(1.0, rate / BEST) for rate in RATES]
        gains[bump] += 0.1
        flat = Sweep("learning_rate", RATES, [5 - gain for gain in gains], [5.0] * len(RATES), has_diverged=False)
        assert flat.gains.index(max(flat.gains)) == bump
        assert BEST < suggest(flat) < 4 * BEST < RATES[bump] / 2


@pytest.mark.parametrize("seed", range(5))
def test_neither_batches_nor_progress_move_the_suggestion(seed):
    """The raw loss would mislead in both cases: its minimum is far above."""
    harder = sweep(noise=0.3, progress=0.02, seed=seed)
    smoothed = harder.smoothed_losses
    assert RATES[smoothed.index(min(smoothed))] > 3 * BEST
    assert suggest(harder) == suggest(sweep())


def test_the_suggestion_has_two_digits_and_scales_with_the_rates():
    plain = sweep()
    tenfold = dataclasses.replace(plain, learning_rates=[10 * rate for rate in RATES])
    assert suggest(tenfold) == pytest.approx(10 * suggest(plain))
    assert float(f"{suggest(plain):.1e}") == suggest(plain)


def test_a_sweep_that_never_gains_is_refused():
    falling = sweep(size=-0.5)
    worse = [loss + 0.01 * step for step, loss in enumerate(falling.losses_at_rest)]
    for losses in (worse, falling.losses_at_rest):
        with pytest.raises(UserError, match=r"optim.learning_rate: no learning rate .* --lowest") as error:
            suggest(dataclasses.replace(falling, losses=losses))
        assert "\n" not in str(error.value)


def test_a_sweep_that_ends_too_early_is_refused_unless_it_diverged():
    rising = sweep(best=1.0)
    with pytest.raises(UserError, match=r"the highest learning rate, 1, is the best; raise --highest"):
        suggest(dataclasses.replace(rising, losses=[rest - i for i, rest in enumerate(rising.losses_at_rest)]))
    abrupt = dataclasses.replace(
        rising, losses=[rest - i for i, rest in enumerate(rising.losses_at_rest)], has_diverged=True
    )
    assert 0.5 < suggest(abrupt) < 1
