"""The curve of one column of metrics.jsonl, thinned to what a chart can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 400
"""Per curve: about the width of a chart in pixels."""


@dataclass(frozen=True)
class Curve:
    """Points in the order of their steps: each the mean, minimum and maximum of one or more values."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    values_per_point: int = 1
    """The largest number of values that one point represents."""

    def __len__(self) -> int:
        return len(self.steps)


def read_curve(rows: Sequence[dict[str, Any]], key: str) -> Curve:
    """Return the curve of the column `key`, which holds one number per row or a list with one number per step.

    Null and missing values are skipped. More than MAX_POINTS values are averaged over MAX_POINTS equal ranges of steps.
    """
    steps: list[int] = []
    numbers: list[float | None] = []
    for row in rows:
        value = row.get(key)
        row_values = value if isinstance(value, list) else [value]
        steps.extend(range(row["step"] - len(row_values) + 1, row["step"] + 1))
        numbers.extend(row_values)
    x, y = np.array(steps, dtype=np.float64), np.array(numbers, dtype=np.float64)  # None becomes NaN
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    order = np.argsort(x, kind="stable")
    return _thin(x[order], y[order])


def bin_numbers(steps: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bin of each step, for MAX_POINTS bins of equal width. steps: ascending."""
    length = (steps[-1] - steps[0] + 1) / MAX_POINTS
    return ((steps - steps[0]) // length).astype(np.int64)


def _thin(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Curve:
    if len(steps) <= MAX_POINTS:
        return Curve(steps, values, values, values)
    starts = np.flatnonzero(np.diff(bin_numbers(steps), prepend=-1))
    counts = np.diff(starts, append=len(steps))
    return Curve(
        np.add.reduceat(steps, starts) / counts,
        np.add.reduceat(values, starts) / counts,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
        int(counts.max()),
    )
