"""The curve of one measure of a run: each of its values, or of very many a point for those too close to tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 400
"""Of a curve: about what a chart is wide in pixels."""


@dataclass(frozen=True)
class Curve:
    """Points in the order of their steps; where one stands for several values, their mean and how far they reach."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    values_a_point: int = 1
    """The most values that one point stands for."""

    def __len__(self) -> int:
        return len(self.steps)


def read_curve(rows: Sequence[dict[str, Any]], key: str) -> Curve:
    """Return the curve of `key`, a number a row or a list with one a step; what is null or missing is left out.

    Of more than MAX_POINTS values as many means are left, each over an equal stretch of steps.
    """
    steps: list[int] = []
    numbers: list[float | None] = []
    for row in rows:
        value = row.get(key)
        of_row = value if isinstance(value, list) else [value]
        steps.extend(range(row["step"] - len(of_row) + 1, row["step"] + 1))
        numbers.extend(of_row)
    x, y = np.array(steps, dtype=np.float64), np.array(numbers, dtype=np.float64)  # None becomes NaN
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    order = np.argsort(x, kind="stable")
    return _thin(x[order], y[order])


def stretches(steps: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each step, ascending, the number of the stretch it is in, of MAX_POINTS equally long ones."""
    length = (steps[-1] - steps[0] + 1) / MAX_POINTS
    return ((steps - steps[0]) // length).astype(np.int64)


def _thin(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Curve:
    if len(steps) <= MAX_POINTS:
        return Curve(steps, values, values, values)
    starts = np.flatnonzero(np.diff(stretches(steps), prepend=-1))
    counts = np.diff(starts, append=len(steps))
    return Curve(
        np.add.reduceat(steps, starts) / counts,
        np.add.reduceat(values, starts) / counts,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
        int(counts.max()),
    )
