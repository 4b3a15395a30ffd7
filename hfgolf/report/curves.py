"""The curve of one column of metrics.jsonl: smoothed, and thinned to what a chart can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 800
"""Per curve: about the width of a chart in pixels."""
_WINDOWS = 20  # the smoothing window is this part of a curve, up to the widest
_WIDEST = 1001


@dataclass(frozen=True)
class Curve:
    """Points in the order of their steps: each the mean, minimum and maximum of one or more values."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    smoothed: NDArray[np.float64]
    """The values smoothed over `window` around each, before thinning; NaN within half of that from either end."""
    window: int
    values_per_point: int = 1
    """The largest number of values that one point represents."""

    def __len__(self) -> int:
        return len(self.steps)


def read_curve(rows: Sequence[dict[str, Any]], key: str, max_points: int = MAX_POINTS) -> Curve:
    """Return the curve of the column `key`, which holds one number per row or a list with one number per step.

    Null and missing values are skipped. More than max_points values are averaged over max_points equal ranges of steps.
    """
    import pandas as pd

    steps: list[int] = []
    numbers: list[float | None] = []
    for row in rows:
        value = row.get(key)
        row_values = value if isinstance(value, list) else [value]
        steps.extend(range(row["step"] - len(row_values) + 1, row["step"] + 1))
        numbers.extend(row_values)
    values = pd.DataFrame({"step": steps, "value": numbers}, dtype=np.float64)  # None becomes NaN
    values = values[np.isfinite(values.value)].sort_values("step", kind="stable")
    window = min(_WIDEST, len(values) // _WINDOWS // 2 * 2 + 1)
    values["smoothed"] = smooth(values.value.to_numpy(), window)
    is_thinned = len(values) > max_points
    points = values.groupby(bin_numbers(values.step.to_numpy(), max_points) if is_thinned else np.arange(len(values)))
    means, each = points.mean().to_numpy(), points.value
    lowest, highest = each.min().to_numpy(), each.max().to_numpy()
    return Curve(means[:, 0], means[:, 1], lowest, highest, means[:, 2], window, max(points.size(), default=1))


def bin_numbers(steps: NDArray[np.float64], max_points: int = MAX_POINTS) -> NDArray[np.int64]:
    """Return the bin of each step, for max_points bins of equal width. steps: ascending."""
    length = (steps[-1] - steps[0] + 1) / max_points
    return ((steps - steps[0]) // length).astype(np.int64)


def smooth(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Return values smoothed over the `window` around each; NaN where there are fewer on either side.

    The mean of medians, each over half the window: spikes do not lift the line, and it has no steps. Values on one side
    only would delay it, and fewer of them near its ends would make its last steps noise. window: odd.
    """
    import pandas as pd

    half = window // 4 * 2 + 1
    medians = pd.Series(values).rolling(half, center=True).median()
    return medians.rolling(half, center=True).mean().to_numpy()
