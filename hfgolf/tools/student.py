"""Student's t distribution, in plain Python: tail probabilities and quantiles for any number of degrees of freedom."""

from __future__ import annotations

import math


def student_tail(t: float, degrees_of_freedom: float) -> float:
    """Return the probability that Student's t is above t; relative error about 1e-13.

    Abramowitz and Stegun, 26.7.1: half of the incomplete beta function I_x(n/2, 1/2) at x = n / (n + t^2).
    """
    n = degrees_of_freedom
    if t == 0:
        return 0.5
    tail = incomplete_beta(n / (n + t * t), n / 2, 0.5) / 2
    return tail if t > 0 else 1 - tail


def student_quantile(tail: float, degrees_of_freedom: float) -> float:
    """Return the t above which Student's t is with probability `tail`, between 0 and 0.5, by bisection."""
    low, high = 0.0, 1.0
    while student_tail(high, degrees_of_freedom) > tail:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees_of_freedom) > tail else (low, middle)
    return (low + high) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by its continued fraction (26.5.8)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # it converges fast below the mean only
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # Lentz's method: convergents as products of ratios c and d, whose own recurrences start at 1 and 0
    c, d, fraction = 1.0, 1 / (1 - (a + b) * x / (a + 1)), 1 / (1 - (a + b) * x / (a + 1))
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = fraction
        for term in (even, odd):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            fraction *= c * d
        if abs(fraction - before) <= 1e-16 * abs(fraction):
            break
    return math.exp(front) * fraction / a
