"""The table of a quantized model: where its bytes are, what rounding costs, and what to change.

Owns the figures of each matrix, their text and their findings. Does not know how the integers came about.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hfgolf.golf.allocate import SIDE_BYTES_PER_COLUMN, SIDE_BYTES_PER_ROW
from hfgolf.golf.artifact import TensorBytes
from hfgolf.golf.curvature import Curvature
from hfgolf.golf.grid import Quantized, entropy_bits

HIGH_KURTOSIS = 10.0
FEW_LEVELS = 5
EXTRA_BITS = 1.0


@dataclass(frozen=True)
class MatrixFigures:
    """The figures of one matrix, or of the same matrix in all layers.

    step, finest_step, coarsest_step: in units of a row's RMS; the median, the smallest and the largest. levels:
    different integers used. entropy_bits, coded_bits: per weight, order 0 and in the artifact. bytes: in the artifact,
    of which side_bytes are steps and classes. relative_error: |E|**2 / |W|**2. output_error: the same for the layer's
    outputs, so weighted by the input hessian. predicted_loss, measured_loss: nats per token if this matrix alone is
    rounded. nats_per_kilobyte: what the next 1,000 bytes spent here are predicted to save.
    """

    name: str
    shape: tuple[int, int]
    weights: int
    step: float
    finest_step: float
    coarsest_step: float
    levels: int
    entropy_bits: float
    coded_bits: float
    bytes: float
    side_bytes: float
    share_of_bytes: float
    relative_error: float
    output_error: float
    predicted_loss: float
    measured_loss: float | None
    nats_per_kilobyte: float
    kurtosis: float


def table(
    weights: Mapping[str, NDArray[np.float32]],
    tensors: Mapping[str, Quantized],
    curvature: Mapping[str, Curvature],
    coded: Mapping[str, TensorBytes] | None = None,
    measured: Mapping[str, float] | None = None,
) -> list[MatrixFigures]:
    """Return one row per matrix. The first one is where bytes are best spent, the last where they are best taken.

    weights: before rounding. coded: the real bytes of each matrix; None: estimated by its entropy. measured: from
    `measure_each`.
    """
    rows = [
        _row(
            name,
            weights[name],
            one,
            curvature[name],
            None if coded is None else coded[name],
            None if measured is None else measured[name],
        )
        for name, one in tensors.items()
    ]
    return _sorted(rows)


def folded(rows: list[MatrixFigures]) -> list[MatrixFigures]:
    """Return the table with one row for each kind of matrix: layer numbers become *."""
    kinds: dict[str, list[MatrixFigures]] = defaultdict(list)
    for row in rows:
        kinds[_kind(row.name)].append(row)
    return _sorted([_folded(kind, members) for kind, members in kinds.items()])


def findings(rows: list[MatrixFigures]) -> list[str]:
    """Return what stands out in a table that is not folded, one sentence each."""
    bits: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        bits[_kind(row.name)].append(row.entropy_bits)
    result = []
    for row in rows:
        usual = median(bits[_kind(row.name)])
        if row.kurtosis > HIGH_KURTOSIS:
            result.append(
                f"{row.name} has outliers (kurtosis {row.kurtosis:.0f}, a Gaussian has 3): they take bits and levels."
                " More weight decay, or `--column_steps` if they share a column, makes it smaller."
            )
        if row.entropy_bits > usual + EXTRA_BITS:
            result.append(
                f"{row.name} takes {row.entropy_bits:.1f} bits per weight, but the same matrix takes {usual:.1f} in the"
                " median layer: the loss is more sensitive to this one, or it has outliers."
            )
        if row.levels < FEW_LEVELS:
            result.append(
                f"{row.name} uses only {row.levels} level{'s' if row.levels != 1 else ''}: rounding leaves little of"
                " it. A larger budget, or a model without it, is worth a try."
            )
    return result


def table_data(rows: list[MatrixFigures]) -> dict[str, Any]:
    """Return the table, its totals and its findings as plain JSON."""
    total = _folded("total", rows) if rows else None
    totals = {
        key: getattr(total, key)
        for key in ("weights", "entropy_bits", "coded_bits", "bytes", "side_bytes", "predicted_loss", "measured_loss")
        if total is not None
    }
    return {"tensors": [asdict(row) for row in rows], "total": totals, "findings": findings(rows)}


def table_text(rows: list[MatrixFigures]) -> str:
    """Return the table for a terminal, with a line of totals.

    bits: per weight in the artifact; entropy: of order 0. step: the median, in units of a row's RMS. error: relative
    and squared, of weights and of the layer's outputs. predicted, measured: rise of the loss in nats per token.
    """
    lines = [_HEADER, *(_cells(row) for row in rows), _cells(_folded("total", rows))]
    if all(row.measured_loss is None for row in rows):
        dropped = _HEADER.index("measured")
        lines = [line[:dropped] + line[dropped + 1 :] for line in lines]
    return aligned(lines, "l" + "r" * (len(lines[0]) - 1))


def aligned(lines: list[list[str]], sides: str) -> str:
    """Return columns of text. sides: l or r for each column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(line, widths, sides, strict=True)
        ).rstrip()
        for line in lines
    )


def measure_each(
    model: nn.Module,
    tensors: Mapping[str, Quantized],
    loss_of: Callable[[nn.Module], float],
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, float]:
    """Return by how much the loss rises if each matrix alone is rounded, in the units of loss_of.

    loss_of: evaluates the model, for instance on a part of the calibration text. The model is left as it was.
    progress: called with one line per matrix.
    """
    before = loss_of(model)
    rises = {}
    for number, (name, one) in enumerate(tensors.items(), start=1):
        parameter = model.get_parameter(name)
        kept = parameter.detach().clone()
        with torch.no_grad():
            try:
                parameter.copy_(torch.from_numpy(one.dequantized()))
                rises[name] = loss_of(model) - before
            finally:
                parameter.copy_(kept)
        progress(f"{number} of {len(tensors)}: {name} {rises[name]:+.5f}")
    return rises


def _row(
    name: str,
    weight: NDArray[np.float32],
    one: Quantized,
    curvature: Curvature,
    coded: TensorBytes | None,
    measured: float | None,
) -> MatrixFigures:
    exact = weight.astype(np.float64)
    error = one.dequantized() - exact
    rms = np.sqrt(np.square(exact).mean(axis=1, keepdims=True))
    relative_steps = (np.broadcast_to(one.steps(), exact.shape) / np.maximum(rms, 1e-30))[rms[:, 0] > 0]
    bits = entropy_bits(one.integers)
    side = SIDE_BYTES_PER_ROW * exact.shape[0] + SIDE_BYTES_PER_COLUMN * exact.shape[1]
    if coded is not None:
        side = coded.side
    in_weights = bits * exact.size / 8 if coded is None else coded.weights
    loss = curvature.loss_increase(error)
    return MatrixFigures(
        name=name,
        shape=(exact.shape[0], exact.shape[1]),
        weights=exact.size,
        step=float(np.median(relative_steps)) if relative_steps.size else 0.0,
        finest_step=float(relative_steps.min(initial=np.inf)) if relative_steps.size else 0.0,
        coarsest_step=float(relative_steps.max(initial=0)),
        levels=len(np.unique(one.integers)),
        entropy_bits=bits,
        coded_bits=8 * in_weights / exact.size,
        bytes=in_weights + side,
        side_bytes=side,
        share_of_bytes=1.0,
        relative_error=_ratio(np.square(error).sum(), np.square(exact).sum()),
        output_error=_ratio(((error @ curvature.hessian) * error).sum(), ((exact @ curvature.hessian) * exact).sum()),
        predicted_loss=loss,
        measured_loss=measured,
        nats_per_kilobyte=_gain(loss if measured is None else measured, exact.size),
        kurtosis=_ratio(exact.size * (exact**4).sum(), np.square(np.square(exact).sum())),
    )


def _gain(loss: float, weights: int) -> float:
    """Return the nats that 1,000 bytes more save: one bit more per weight halves the steps and quarters the loss."""
    return 0.75 * max(loss, 0.0) / (weights / 8 / 1000)


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _sorted(rows: list[MatrixFigures]) -> list[MatrixFigures]:
    total = sum(row.bytes for row in rows) or 1.0
    rows = [replace(row, share_of_bytes=row.bytes / total) for row in rows]
    return sorted(rows, key=lambda row: -row.nats_per_kilobyte)


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _folded(name: str, rows: list[MatrixFigures]) -> MatrixFigures:
    """Return several rows as one: sums, and means weighted by the number of weights."""
    if len(rows) == 1 and name != "total":
        return replace(rows[0], name=name)
    weights = sum(row.weights for row in rows)

    def mean(key: str) -> float:
        return sum(getattr(row, key) * row.weights for row in rows) / weights

    measured = [row.measured_loss for row in rows if row.measured_loss is not None]
    loss = sum(row.predicted_loss for row in rows)
    return MatrixFigures(
        name=name,
        shape=rows[0].shape,
        weights=weights,
        step=mean("step"),
        finest_step=min(row.finest_step for row in rows),
        coarsest_step=max(row.coarsest_step for row in rows),
        levels=max(row.levels for row in rows),
        entropy_bits=mean("entropy_bits"),
        coded_bits=mean("coded_bits"),
        bytes=sum(row.bytes for row in rows),
        side_bytes=sum(row.side_bytes for row in rows),
        share_of_bytes=sum(row.share_of_bytes for row in rows),
        relative_error=mean("relative_error"),
        output_error=mean("output_error"),
        predicted_loss=loss,
        measured_loss=sum(measured) if measured else None,
        nats_per_kilobyte=_gain(sum(measured) if measured else loss, weights),
        kurtosis=max(row.kurtosis for row in rows),
    )


_HEADER = [
    *("matrix", "weights", "bytes", "share", "bits", "entropy", "levels", "step", "error", "of outputs"),
    *("predicted", "measured", "nats/kB", "kurtosis"),
]


def _cells(row: MatrixFigures) -> list[str]:
    measured = "" if row.measured_loss is None else f"{row.measured_loss:.5f}"
    return [
        row.name.removeprefix("model.").removesuffix(".weight"),
        f"{row.weights:,}",
        f"{row.bytes:,.0f}",
        f"{row.share_of_bytes:.1%}",
        f"{row.coded_bits:.2f}",
        f"{row.entropy_bits:.2f}",
        f"{row.levels:,}",
        f"{row.step:.3f}",
        f"{row.relative_error:.1e}",
        f"{row.output_error:.1e}",
        f"{row.predicted_loss:.5f}",
        measured,
        f"{row.nats_per_kilobyte:.6f}",
        f"{row.kurtosis:.1f}",
    ]
