"""Are two arms equivalent? Two one-sided t-tests, and how many seeds it takes.

A difference within noise proves nothing: with few seeds, large differences are, too. This test asks the reverse. It
takes for granted that the true difference is a margin or more, and shows otherwise if both of its one-sided tests
reject (TOST; Schuirmann 1987, Journal of Pharmacokinetics and Biopharmaceutics 15). It is at the level of 5 % exactly
if the 90 % confidence interval is within the margin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hfgolf.tools.student import student_quantile, student_tail

SIGNIFICANCE = 0.05
"""Of each one-sided test, and so of both together."""
POWER = 0.8
"""The probability with which `needed_seeds` are enough."""
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Equivalence:
    """Whether the mean of differences, paired by seed, is shown to be within a margin of 0."""

    margin: float
    p_value: float
    """Of both one-sided tests: the larger one."""
    interval: tuple[float, float]
    """The 90 % confidence interval of the mean."""
    needed_seeds: int | None
    """The fewest seeds that show it with a probability of 80 %, if the true mean and deviation are those of these
    differences; None if the mean itself is not within the margin, or more than 1,000 seeds are needed."""

    @property
    def is_shown(self) -> bool:
        """Return whether the arms are equivalent within the margin."""
        return self.p_value < SIGNIFICANCE

    @property
    def is_refuted(self) -> bool:
        """Return whether the true difference is shown to be beyond the margin."""
        low, high = self.interval
        return low > self.margin or high < -self.margin


def equivalence(differences: Sequence[float], margin: float) -> Equivalence | None:
    """Test whether the mean of differences is within a margin of 0; None for fewer than two differences."""
    if len(differences) < 2:
        return None
    mean, sd = statistics.mean(differences), statistics.stdev(differences)
    standard_error, degrees_of_freedom = sd / math.sqrt(len(differences)), len(differences) - 1
    lead = margin - abs(mean)
    half = student_quantile(SIGNIFICANCE, degrees_of_freedom) * standard_error
    return Equivalence(
        margin=margin,
        p_value=student_tail(lead / standard_error, degrees_of_freedom) if standard_error else float(lead <= 0),
        interval=(mean - half, mean + half),
        needed_seeds=_needed_seeds(mean, sd, margin),
    )


def power(mean: float, standard_error: float, margin: float, degrees_of_freedom: float) -> float:
    """Return the probability that the test shows equivalence, for this true mean and standard error.

    Phillips 1990 (Journal of Pharmacokinetics and Biopharmaceutics 18): the normal probability that the interval is
    within the margin, averaged over what the sample may show of the deviation.
    """
    t, half = student_quantile(SIGNIFICANCE, degrees_of_freedom), degrees_of_freedom / 2
    normal, constant = statistics.NormalDist(), math.log(2) + half * math.log(half) - math.lgamma(half)
    # u: the sample's deviation over the true one. Above the first bound no interval fits; the second is 12 sigma away
    largest = min(margin / (t * standard_error), 1 + 12 / math.sqrt(2 * degrees_of_freedom))

    def integrand(u: float) -> float:
        room = margin - t * u * standard_error
        if room <= 0:
            return 0.0
        fits = normal.cdf((room - mean) / standard_error) - normal.cdf((-room - mean) / standard_error)
        density = math.exp(constant + (degrees_of_freedom - 1) * math.log(u) - half * u * u) if u else 0.0
        return fits * density

    pieces = 1000  # the midpoint rule: an error of about 1e-7
    return math.fsum(integrand((piece + 0.5) * largest / pieces) for piece in range(pieces)) * largest / pieces


def _needed_seeds(mean: float, sd: float, margin: float) -> int | None:
    def suffices(seeds: int) -> bool:
        return sd == 0 or power(mean, sd / math.sqrt(seeds), margin, seeds - 1) >= POWER

    if abs(mean) >= margin or not suffices(MOST_SEEDS):
        return None
    low, high = 1, MOST_SEEDS  # high suffices, low does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
