"""The statistics of a comparison: differences paired by seed, equivalence, and when an arm reaches the baseline.

Works on validation curves as numbers. An arm is one config, run with several seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hfgolf.system.errors import UserError

try:
    from scipy import stats
except ImportError:
    raise UserError("Comparing runs needs scipy; run `pip install scipy`.") from None

NOISE_P_VALUE = 0.05
"""A difference with a p-value of this or more is called noise."""
SIGNIFICANCE = 0.05
"""Of each one-sided test for equivalence, and so of both together."""


class Point(NamedTuple):
    """One evaluation of a run."""

    step: float
    seconds: float
    loss: float
    loss_at_end: float | None = None
    """The loss on train.final_eval_tokens, at the end of a run; those between may read fewer (train.eval_tokens)."""

    @property
    def final_loss(self) -> float:
        return self.loss if self.loss_at_end is None else self.loss_at_end


Curve = Sequence[Point]
"""The evaluations of a run, sorted by step; the last one is at the last step."""
Arms = Mapping[str, Mapping[int, Curve]]
"""{arm: {seed: curve of a finished run}}"""


@dataclass(frozen=True)
class Difference:
    """The differences of an arm's final losses from the baseline's, paired by seed; below 0, the arm is better."""

    by_seed: dict[int, float]
    mean: float
    sd: float | None
    p_value: float | None
    """None with a single seed."""

    @property
    def is_noise(self) -> bool:
        """Whether this difference may be due to the seeds alone."""
        return self.p_value is None or self.p_value >= NOISE_P_VALUE


@dataclass(frozen=True)
class Equivalence:
    """Whether the mean of differences, paired by seed, is shown to be within a margin of 0."""

    margin: float
    p_value: float
    """Of both one-sided tests: the larger one."""
    interval: tuple[float, float]
    """The 90 % confidence interval of the mean."""

    @property
    def is_shown(self) -> bool:
        return self.p_value < SIGNIFICANCE

    @property
    def is_refuted(self) -> bool:
        """Whether the true difference is shown to be beyond the margin."""
        low, high = self.interval
        return low > self.margin or high < -self.margin


@dataclass(frozen=True)
class Reach:
    """When the runs of an arm first reach the baseline's mean final loss; None for a run that never does."""

    steps: dict[int, float | None]
    seconds: dict[int, float | None]
    share_of_steps: float | None
    """Mean steps of the runs that reach it, over the baseline's mean total steps; None if no run does."""
    share_of_seconds: float | None


@dataclass(frozen=True)
class ArmResult:
    """The results of an arm's finished runs; means over seeds are None if no run finished."""

    final_losses: dict[int, float]
    mean: float | None
    sd: float | None
    """Sample standard deviation over the seeds; None with fewer than two."""
    steps: float | None
    seconds: float | None
    difference: Difference | None
    """None for the baseline, and if no seed finished in both arms."""
    reach: Reach | None
    equivalence: Equivalence | None
    """With the baseline; None if it was not asked for, or fewer than two seeds finished in both arms."""


@dataclass(frozen=True)
class GridBest:
    """The arm of a grid with the lowest mean final loss, and whether the grid brackets it."""

    arm: str
    is_bracketed: dict[str, bool]
    """{key: whether the grid has worse values on both sides of the best}; only for numeric axes."""


def arm_results(arms: Arms, baseline: str, margin: float | None = None) -> dict[str, ArmResult]:
    """Compare every arm with the baseline by their final losses, for the seeds that finished in both.

    margin: test also whether they are equivalent within this many nats.
    """
    results, ends = {}, {seed: curve[-1] for seed, curve in arms[baseline].items()}
    for name, curves in arms.items():
        finals = {seed: curve[-1] for seed, curve in curves.items()}
        losses = {seed: final.final_loss for seed, final in finals.items()}
        difference = reach = None
        if ends and name != baseline:
            difference = paired_difference(losses, {seed: end.final_loss for seed, end in ends.items()})
            reach = _reach(curves, [*ends.values()])
        results[name] = ArmResult(
            final_losses=losses,
            mean=_mean(losses.values()),
            sd=_sample_sd([*losses.values()]),
            steps=_mean(final.step for final in finals.values()),
            seconds=_mean(final.seconds for final in finals.values()),
            difference=difference,
            reach=reach,
            equivalence=equivalence([*difference.by_seed.values()], margin) if difference and margin else None,
        )
    return results


def paired_difference(losses: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Return the differences of the losses from the baseline's, paired by seed; None if they share no seed.

    The p-value is that of the two-sided paired t-test, which assumes that the differences between seeds are normally
    distributed. With 3 to 5 seeds, a test with weaker assumptions cannot show anything: the p-value of a sign-flip test
    of n differences is never below 2 / 2^n, which is 0.25 for 3 seeds and 0.06 for 5.
    """
    by_seed = {seed: loss - baseline[seed] for seed, loss in losses.items() if seed in baseline}
    if not by_seed:
        return None
    values, p_value = [*by_seed.values()], None
    if len(values) > 1:
        is_constant = len(set(values)) == 1
        p_value = float(values[0] == 0) if is_constant else float(stats.ttest_1samp(values, 0.0).pvalue)
    return Difference(by_seed, statistics.mean(values), _sample_sd(values), p_value)


def equivalence(differences: Sequence[float], margin: float) -> Equivalence | None:
    """Test whether the mean of differences is within a margin of 0; None for fewer than two differences.

    A difference within noise proves nothing: with few seeds, large differences are, too. This test asks the reverse. It
    takes for granted that the true difference is a margin or more, and shows otherwise if both of its one-sided t-tests
    reject (TOST; Schuirmann 1987, Journal of Pharmacokinetics and Biopharmaceutics 15). It is at the level of 5 %
    exactly if the 90 % confidence interval is within the margin.
    """
    if len(differences) < 2:
        return None
    if len(set(differences)) == 1:  # no noise, and so no test
        return Equivalence(margin, float(abs(differences[0]) >= margin), (differences[0], differences[0]))
    above = stats.ttest_1samp(differences, -margin, alternative="greater")
    below = stats.ttest_1samp(differences, margin, alternative="less")
    low, high = stats.ttest_1samp(differences, 0.0).confidence_interval(1 - 2 * SIGNIFICANCE)
    return Equivalence(margin, float(max(above.pvalue, below.pvalue)), (float(low), float(high)))


def _sample_sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def first_reach(curve: Curve, loss: float) -> tuple[float, float] | None:
    """Return the steps and seconds after which a run first reaches a loss; None if it never does.

    Interpolates linearly between evaluations. If the first evaluation is already there, returns its steps and seconds,
    which are an upper bound.
    """
    before: Point | None = None
    for point in curve:
        if point.loss <= loss:
            share = 1.0 if before is None else (before.loss - loss) / (before.loss - point.loss)
            start = before or point
            seconds = start.seconds + share * (point.seconds - start.seconds)
            return start.step + share * (point.step - start.step), seconds
        before = point
    return None


def best_of_grid(
    means: Mapping[str, float], settings: Mapping[str, Mapping[str, str]], axes: Mapping[str, Sequence[str]]
) -> GridBest | None:
    """Return the best arm of a grid; None if it has no arms.

    means: {arm: mean final loss}; settings: {arm: {key: value as written}}; axes: {key: values of the grid}. No key
    of a config takes negative numbers, so a best value of 0 counts as bracketed from below.
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
    """Return the texts as numbers; [] if one of them is not a number."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return []


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
