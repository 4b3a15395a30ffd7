"""The statistics of a comparison: means over seeds, differences paired by seed, how soon one arm is where another ends.

Knows arms and validation curves as numbers, and nothing of how they came about. An arm is a config, run over seeds.

The p-value is that of the paired t-test, two-sided, which takes the differences between seeds for normally distributed.
With 3 to 5 seeds nothing weaker can tell anything: a sign-flip test of n differences never falls below 2 / 2^n, which
is 0.25 at 3 seeds and 0.06 at 5.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NOISE_P_VALUE = 0.05
"""A difference whose p-value is not below this is called noise."""


class Point(NamedTuple):
    """One evaluation of a run."""

    step: float
    seconds: float
    loss: float


Curve = Sequence[Point]
"""The evaluations of a run, by step; the last is that of its last step."""
Arms = Mapping[str, Mapping[int, Curve]]
"""By arm and seed the curves of the runs that finished."""


@dataclass(frozen=True)
class Difference:
    """How far an arm's final losses lie from the baseline's, seed by seed: below 0 the arm is better."""

    by_seed: dict[int, float]
    mean: float
    sd: float | None
    p_value: float | None
    """None where a single seed leaves it open."""

    @property
    def is_noise(self) -> bool:
        """Say whether seeds alone could well have made this difference."""
        return self.p_value is None or self.p_value >= NOISE_P_VALUE


@dataclass(frozen=True)
class Reach:
    """When the runs of an arm first are at the mean final loss of the baseline; None for a run that never is."""

    steps: dict[int, float | None]
    seconds: dict[int, float | None]
    share_of_steps: float | None
    """Mean of the steps, of the runs that get there, by those of the baseline's whole runs; None where none does."""
    share_of_seconds: float | None


@dataclass(frozen=True)
class ArmResult:
    """What the finished runs of an arm came to; means over seeds are None where no run finished."""

    final_losses: dict[int, float]
    mean: float | None
    sd: float | None
    """Sample standard deviation over the seeds; None below two."""
    steps: float | None
    seconds: float | None
    difference: Difference | None
    """None for the baseline, and where no seed finished in both."""
    reach: Reach | None


@dataclass(frozen=True)
class GridBest:
    """The arm of a grid with the lowest mean final loss, and whether the grid shows it to be the lowest around."""

    arm: str
    is_bracketed: dict[str, bool]
    """By axis: is there a worse value on either side of the best one. Axes that are no numbers have no sides."""


def compare(arms: Arms, baseline: str) -> dict[str, ArmResult]:
    """Compare every arm with the baseline, by the final losses of the seeds that finished in both."""
    return {name: _arm_result(curves, None if name == baseline else arms[baseline]) for name, curves in arms.items()}


def paired_difference(losses: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Return how losses, by seed, differ from the baseline's; None where the two have no seed in common."""
    by_seed = {seed: loss - baseline[seed] for seed, loss in losses.items() if seed in baseline}
    if not by_seed:
        return None
    values = list(by_seed.values())
    return Difference(by_seed, statistics.mean(values), sample_sd(values), paired_p_value(values))


def paired_p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of the t-test that the mean difference is 0; None below two differences."""
    sd = sample_sd(differences)
    if sd is None:
        return None
    mean = statistics.mean(differences)
    if sd == 0:
        return float(mean == 0)
    return student_p_value(mean / (sd / math.sqrt(len(differences))), len(differences) - 1)


def student_p_value(t: float, degrees_of_freedom: int) -> float:
    """Return the probability that Student's t lies further from 0 than this (Abramowitz and Stegun, 26.7.3 and 4).

    Exact for whole degrees of freedom, to about 1e-15.
    """
    angle = math.atan2(abs(t), math.sqrt(degrees_of_freedom))
    is_odd = degrees_of_freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees_of_freedom > 1 else 0.0
    for k in range(3 if is_odd else 2, degrees_of_freedom, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    within = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + within) if is_odd else within))


def sample_sd(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (n - 1), None below two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def first_reach(curve: Curve, loss: float) -> tuple[float, float] | None:
    """Return steps and seconds after which a run is first at a loss, None where it never is.

    Linear between evaluations. Where the first one is there already: its steps and seconds, which is an upper bound.
    """
    before: Point | None = None
    for point in curve:
        if point.loss <= loss:
            share = 1.0 if before is None else (before.loss - loss) / (before.loss - point.loss)
            start = before or point
            return (
                start.step + share * (point.step - start.step),
                start.seconds + share * (point.seconds - start.seconds),
            )
        before = point
    return None


def best_of_grid(
    means: Mapping[str, float], settings: Mapping[str, Mapping[str, str]], axes: Mapping[str, Sequence[str]]
) -> GridBest | None:
    """Return the best arm of a grid, None where there is none.

    means: by arm of the grid its mean final loss; settings: by arm its values, as written; axes: by key the values of
    the grid. No key of a config takes a number below 0, so that a best value of 0 needs none below it.
    """
    if not means:
        return None
    best = min(means, key=lambda arm: means[arm])
    is_bracketed = {}
    for key, texts in axes.items():
        values = numbers(texts)
        if values:
            value = float(settings[best][key])
            is_bracketed[key] = value < max(values) and (value > min(values) or value == 0)
    return GridBest(best, is_bracketed)


def numbers(texts: Sequence[str]) -> list[float]:
    """Return the texts as numbers, nothing where one of them is none."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return []


def _arm_result(curves: Mapping[int, Curve], baseline: Mapping[int, Curve] | None) -> ArmResult:
    finals = {seed: curve[-1] for seed, curve in curves.items()}
    losses = {seed: final.loss for seed, final in finals.items()}
    difference = reach = None
    if baseline:
        difference = paired_difference(losses, {seed: curve[-1].loss for seed, curve in baseline.items()})
        reach = _reach(curves, [curve[-1] for curve in baseline.values()])
    return ArmResult(
        final_losses=losses,
        mean=_mean(losses.values()),
        sd=sample_sd(list(losses.values())),
        steps=_mean(final.step for final in finals.values()),
        seconds=_mean(final.seconds for final in finals.values()),
        difference=difference,
        reach=reach,
    )


def _reach(curves: Mapping[int, Curve], ends: Sequence[Point]) -> Reach:
    loss = statistics.mean(end.loss for end in ends)
    reached = {seed: first_reach(curve, loss) for seed, curve in curves.items()}
    steps, seconds = (_mean(point[i] for point in reached.values() if point) for i in (0, 1))
    return Reach(
        steps={seed: point and point[0] for seed, point in reached.items()},
        seconds={seed: point and point[1] for seed, point in reached.items()},
        share_of_steps=None if steps is None else steps / statistics.mean(end.step for end in ends),
        share_of_seconds=None if seconds is None else seconds / statistics.mean(end.seconds for end in ends),
    )


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.mean(values) if values else None
