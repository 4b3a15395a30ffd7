"""The table of a quantized model: where its bytes are, what rounding costs, and what to change.

Owns the figures of each matrix, their text and their findings. Does not know how the integers came about.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfgolf.golf.artifact import TensorBytes
from hfgolf.golf.curvature import Curvature
from hfgolf.golf.grid import Quantized, entropy_bits
from hfgolf.golf.quantize import Curvatures, Grids, Weights
from hfgolf.system.wording import aligned

HIGH_KURTOSIS = 10.0
FEW_LEVELS = 5
EXTRA_BITS = 1.0

Row = dict[str, Any]
"""The figures of one matrix, by their keys: its name, its side_bytes (steps and classes, a part of bytes), and those of
COLUMNS."""


class Column(NamedTuple):
    """A figure of a matrix: its key, what it is called for people, its format, and how those of several become one."""

    key: str
    header: str
    format: str
    fold: Callable[[Sequence[float]], float] | None
    """None: the mean over all weights."""


COLUMNS = (
    Column("weights", "weights", ",", sum),
    Column("bytes", "bytes", ",.0f", sum),  # in the artifact
    Column("share_of_bytes", "share", ".1%", sum),
    Column("coded_bits", "bits", ".2f", None),  # per weight, without side_bytes
    Column("entropy_bits", "entropy", ".2f", None),  # per weight, of order 0
    Column("levels", "levels", ",", max),  # different integers used
    Column("step", "step", ".3f", None),  # the median, in units of a row's RMS
    Column("relative_error", "error", ".1e", None),  # |E|**2 / |W|**2
    Column("output_error", "of outputs", ".1e", None),  # the same for the layer's outputs
    Column("predicted_loss", "predicted", ".5f", sum),  # nats per token if this matrix alone is rounded
    Column("nats_per_kilobyte", "nats/kB", ".6f", None),  # what the next 1,000 bytes spent here are predicted to save
    Column("kurtosis", "kurtosis", ".1f", max),
)


def table(weights: Weights, tensors: Grids, curvature: Curvatures, coded: Mapping[str, TensorBytes]) -> list[Row]:
    """Return one row per matrix. The first one is where bytes are best spent, the last where they are best taken.

    weights: before rounding. coded: the real bytes of each matrix.
    """
    rows = [_row(name, weights[name], one, curvature[name], coded[name]) for name, one in tensors.items()]
    total = sum(row["bytes"] for row in rows) or 1.0
    return _sorted([row | {"share_of_bytes": row["bytes"] / total} for row in rows])


def findings(rows: Sequence[Row]) -> list[str]:
    """Return what stands out, one sentence each."""
    result = []
    for row in rows:
        usual = median(other["entropy_bits"] for other in rows if _kind(other["name"]) == _kind(row["name"]))
        if row["kurtosis"] > HIGH_KURTOSIS:
            result.append(
                f"{row['name']} has outliers (kurtosis {row['kurtosis']:.0f}, a Gaussian has 3): they take bits and"
                " levels. More weight decay makes it smaller."
            )
        if row["entropy_bits"] > usual + EXTRA_BITS:
            result.append(
                f"{row['name']} takes {row['entropy_bits']:.1f} bits per weight, but the same matrix takes"
                f" {usual:.1f} in the median layer: the loss is more sensitive to this one, or it has outliers."
            )
        if row["levels"] < FEW_LEVELS:
            result.append(
                f"{row['name']} uses only {row['levels']} level{'s' if row['levels'] != 1 else ''}: rounding leaves"
                " little of it. A larger budget, or a model without it, is worth a try."
            )
    return result


def table_data(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table, its totals and its findings as plain JSON."""
    return {"tensors": list(rows), "total": _folded("total", rows) if rows else {}, "findings": findings(rows)}


def table_text(rows: Sequence[Row]) -> str:
    """Return the table for a terminal: a line for each kind of matrix, layer numbers as *, and one of totals."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kinds[_kind(row["name"])].append(row)
    folded = _sorted([_folded(kind, members) for kind, members in kinds.items()])
    lines = [["matrix", *(column.header for column in COLUMNS)]]
    for row in [*folded, _folded("total", rows)]:
        name = row["name"].removeprefix("model.").removesuffix(".weight")
        lines.append([name, *(format(row[column.key], column.format) for column in COLUMNS)])
    return aligned(lines, "l" + "r" * len(COLUMNS))


def _row(name: str, weight: NDArray[np.float32], one: Quantized, curvature: Curvature, coded: TensorBytes) -> Row:
    exact = weight.astype(np.float64)
    error = one.dequantized() - exact
    rms = np.sqrt(np.square(exact).mean(axis=1, keepdims=True))
    steps = one.steps()[rms > 0] / rms[rms > 0]
    loss = curvature.loss_increase(error)
    return {
        "name": name,
        "shape": list(exact.shape),
        "weights": exact.size,
        "bytes": coded.weights + coded.side,
        "side_bytes": coded.side,
        "coded_bits": 8 * coded.weights / exact.size,
        "entropy_bits": entropy_bits(one.integers),
        "levels": len(np.unique(one.integers)),
        "step": float(np.median(steps)) if steps.size else 0.0,
        "relative_error": _ratio(np.square(error).sum(), np.square(exact).sum()),
        "output_error": _ratio(
            ((error @ curvature.hessian) * error).sum(), ((exact @ curvature.hessian) * exact).sum()
        ),
        "predicted_loss": loss,
        # one bit more per weight halves the steps and quarters the loss
        "nats_per_kilobyte": 0.75 * max(loss, 0.0) / (exact.size / 8 / 1000),
        "kurtosis": _ratio(exact.size * (exact**4).sum(), np.square(np.square(exact).sum())),
    }


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _sorted(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row["nats_per_kilobyte"])


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _folded(name: str, rows: Sequence[Row]) -> Row:
    """Return several rows as one."""
    weights = [row["weights"] for row in rows]
    result: Row = {"name": name, "side_bytes": sum(row["side_bytes"] for row in rows)}
    for column in COLUMNS:
        values = [row[column.key] for row in rows]
        result[column.key] = column.fold(values) if column.fold else float(np.average(values, weights=weights))
    return result
