"""Which steps: those of all matrices from one number, and the bytes that they are predicted to take.

Every allocation says what the steps are at D = 1; at another D all of them are D times as large. So the size is
monotone in D, and a byte budget has one D. Does not know how bytes are made.

- curvature: step[r, j] = D * U[j, j] / sqrt(row_weights[r]), with the curvature of the loss and the factor U that GPTQ
  passes errors on with. Rounding costs the loss about 1/24 of the sum of row_weights[r] * step[r, j]**2 / U[j, j]**2
  per token, and each octave of a step takes one bit. So at the optimum every weight costs the loss the same. Without
  column steps, U[j, j]**-2 is its mean over the columns. For nearest rounding, hessian[j, j] replaces U[j, j]**-2.
- sdclip: step[r] = D * RMS of row r, the same bits for every row (k standard deviations over the 31 levels of 6 bits
  are D = k / 31).
- uniform: step = D for all weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfgolf.golf.curvature import Curvature
from hfgolf.golf.gptq import Feedback
from hfgolf.golf.grid import CODES_PER_OCTAVE, MAX_INTEGER, gaussian_bits, row_codes_of, steps_of

FINEST_RELATIVE_STEP = 2.0**-9  # of a row's RMS: 11 bits per weight, the precision of fp16
COARSEST_RELATIVE_STEP = 16.0  # hardly anything is left
SIDE_BYTES_PER_ROW = 1.0  # a step's code, and a class for the coder
SIDE_BYTES_PER_COLUMN = 0.5  # a class for the coder
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class UnitSteps:
    """The steps of one matrix at D = 1, and what is needed of its weights to predict their size.

    row_steps, row_rms, row_max: (rows,) the step, the RMS and the largest absolute value of each row, the latter two
    after dividing each column by its step. column_codes: (columns,) int8, or None.
    """

    row_steps: NDArray[np.float64]
    column_codes: NDArray[np.int8] | None
    row_rms: NDArray[np.float64]
    row_max: NDArray[np.float64]
    columns: int

    def row_codes(self, scale: float) -> NDArray[np.uint8]:
        """Return the codes at D = scale, coarser where a row's largest weight would leave the alphabet."""
        within_alphabet = self.row_max * 2 ** (0.5 / CODES_PER_OCTAVE) / MAX_INTEGER  # codes round by half an eighth
        return row_codes_of(np.maximum(scale * self.row_steps, within_alphabet))

    def error_variances(self, scale: float) -> NDArray[np.float64]:
        """Return the mean square of a weight's error by row, (rows,), at D = scale.

        It is step**2 / 12, but never more than the weight's own square: the weight is 0 then.
        """
        return np.minimum(np.square(steps_of(self.row_codes(scale)).astype(np.float64)) / 12, self.row_rms**2)

    def predicted_bytes(self, scale: float) -> float:
        """Return the size at D = scale if rows are Gaussian: their entropy, and side information."""
        relative = steps_of(self.row_codes(scale)) / self.row_rms
        side = SIDE_BYTES_PER_ROW * len(relative) + SIDE_BYTES_PER_COLUMN * self.columns
        return float(gaussian_bits(relative).sum()) * self.columns / 8 + side


Allocation = dict[str, UnitSteps]


def allocate(
    weights: Mapping[str, NDArray[np.float32]],
    allocation: str,
    curvature: Mapping[str, Curvature],
    feedback: Mapping[str, Feedback] | None,
    column_steps: bool = False,
) -> Allocation:
    """Return the steps of each matrix at D = 1.

    Args:
        weights: {name: (rows, columns)}.
        allocation: curvature, sdclip or uniform.
        curvature: of each matrix; sdclip and uniform do not read it.
        feedback: of each matrix, if errors are passed on; None: rounding to nearest.
        column_steps: with curvature, give each column a factor of its own.
    """
    result: Allocation = {}
    rows_before = 0
    for name, weight in weights.items():
        scaled = np.abs(weight.astype(np.float64))
        column_codes = None
        if allocation == "curvature":
            column_weights = np.diag(curvature[name].hessian)
            if feedback is not None:
                column_weights = feedback[name].column_weights()
            mean = float(column_weights.mean())
            if column_steps:
                column_codes = _column_codes(column_weights)
                scaled /= 2.0 ** (column_codes / CODES_PER_OCTAVE)
                mean = _log_mean(column_weights)
            with np.errstate(divide="ignore"):  # no gradient at all: the coarsest step
                row_steps = 1 / np.sqrt(curvature[name].row_weights * mean)
        row_rms = np.maximum(np.sqrt(np.square(scaled).mean(axis=1)), np.finfo(np.float32).tiny)
        if allocation == "sdclip":
            row_steps = row_rms
        elif allocation == "uniform":
            # codes are eighths of an octave: spread the rows evenly over one of them, so that the size is smooth in D
            spread = (rows_before + np.arange(len(weight))) * _GOLDEN % 1 - 0.5
            row_steps = 2.0 ** (spread / CODES_PER_OCTAVE)
        elif allocation != "curvature":
            raise ValueError(f"allocation is {allocation!r}; it must be curvature, sdclip or uniform")
        result[name] = UnitSteps(row_steps, column_codes, row_rms, scaled.max(axis=1), weight.shape[1])
        rows_before += len(weight)
    return result


def predicted_bytes(allocation: Allocation, scale: float) -> float:
    """Return the predicted size of all matrices at D = scale."""
    return sum(unit.predicted_bytes(scale) for unit in allocation.values())


def lost_share(allocation: Allocation, scale: float) -> float:
    """Return the predicted share of the weights' sum of squares that rounding to nearest at D = scale takes: 0 to 1."""
    lost = sum(float(unit.error_variances(scale).sum()) * unit.columns for unit in allocation.values())
    return lost / sum(float(np.square(unit.row_rms).sum()) * unit.columns for unit in allocation.values())


def mean_relative_step(allocation: Allocation) -> float:
    """Return the geometric mean over all weights of step / RMS of the row, at D = 1. Rows that are zero don't count."""
    octaves = count = 0.0
    for unit in allocation.values():
        is_counted = (unit.row_max > 0) & np.isfinite(unit.row_steps)
        octaves += float(np.log2(unit.row_steps[is_counted] / unit.row_rms[is_counted]).sum()) * unit.columns
        count += float(is_counted.sum()) * unit.columns
    return 2.0 ** (octaves / count) if count else 1.0


def scale_range(allocation: Allocation) -> tuple[float, float]:
    """Return the D of the finest and of the coarsest useful steps."""
    unit = mean_relative_step(allocation)
    return FINEST_RELATIVE_STEP / unit, COARSEST_RELATIVE_STEP / unit


def scale_for_bytes(allocation: Allocation, num_bytes: float, finest: float, coarsest: float) -> float:
    """Return the smallest D in [finest, coarsest] that is predicted to take at most num_bytes."""
    return smallest_scale(lambda scale: predicted_bytes(allocation, scale) <= num_bytes, finest, coarsest)


def smallest_scale(is_enough: Callable[[float], bool], finest: float, coarsest: float) -> float:
    """Return the smallest D in [finest, coarsest] that is enough, by bisection; coarsest if none is."""
    if is_enough(finest):
        return finest
    low, high = math.log2(finest), math.log2(coarsest)
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(2.0**middle) else (middle, high)
    return coarsest if high == math.log2(coarsest) else 2.0**high


def _column_codes(column_weights: NDArray[np.float64]) -> NDArray[np.int8]:
    weights = np.maximum(column_weights, 1e-12 * max(column_weights.max(), 1e-300))
    codes = -0.5 * CODES_PER_OCTAVE * np.log2(weights / _log_mean(weights))
    return np.clip(np.rint(codes), -64, 64).astype(np.int8)


def _log_mean(values: NDArray[np.float64]) -> float:
    return float(np.exp(np.log(np.maximum(values, 1e-300)).mean()))
