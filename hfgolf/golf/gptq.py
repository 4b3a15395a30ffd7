"""Round one matrix with error feedback (GPTQ: Frantar et al. 2022, arXiv:2210.17323).

Columns are rounded one after the other. Each one's error is passed on to the columns that are still to come, along the
layer's input Hessian, so that the layer's outputs change least. Does not know which matrix it is, or which grid to use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfgolf.golf.grid import MAX_INTEGER, Quantized

_BLOCK = 128  # columns whose errors are passed on inside the block first, and to all later columns by one product


@dataclass(frozen=True)
class Feedback:
    """How errors are passed on.

    order: (columns,) the columns as they are rounded, by descending diagonal of the hessian. upper: (columns, columns),
    in that order: the upper Cholesky factor U of the inverse of the damped hessian, which is U^T U.
    """

    order: NDArray[np.intp]
    upper: NDArray[np.float64]

    def column_weights(self) -> NDArray[np.float64]:
        """Return 1 / U[j, j]**2 by column: the curvature along a column when all later ones adapt to it."""
        weights = np.empty(len(self.order))
        weights[self.order] = np.diag(self.upper) ** -2.0
        return weights


def error_feedback(hessian: NDArray[np.float64], damping: float = 0.01) -> Feedback:
    """Return the Feedback of a hessian (columns, columns). damping: added to the diagonal, as a share of its mean.

    A column whose input is always zero has the damping alone, so it neither gives nor takes. Without any input, every
    column counts the same.
    """
    diagonal = np.diag(hessian)
    order = np.argsort(-diagonal, kind="stable")
    mean = float(diagonal.mean())
    damped = hessian + damping * mean * np.eye(len(hessian)) if mean > 0 else np.eye(len(hessian))
    damped = damped[np.ix_(order, order)]
    # inv(H) = U^T U means H = R R^T with R = inv(U), upper triangular: the Cholesky factor of H turned by 180 degrees.
    inverse_upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return Feedback(order, np.triu(np.linalg.inv(inverse_upper)))


def round_with_feedback(
    weight: NDArray[np.floating],
    row_codes: NDArray[np.uint8],
    column_codes: NDArray[np.int8] | None,
    feedback: Feedback,
) -> Quantized:
    """Round a matrix (rows, columns) to its grid, in fp64, in blocks of columns."""
    order, upper = feedback.order, feedback.upper
    rows, columns = weight.shape
    grid = Quantized(np.empty((rows, columns), dtype=np.int32), row_codes, column_codes)
    steps = np.broadcast_to(grid.steps(), weight.shape).T[order].astype(np.float64)
    left = np.ascontiguousarray(weight.T[order], dtype=np.float64)  # (columns, rows): a column is contiguous
    for start in range(0, columns, _BLOCK):
        block = slice(start, min(start + _BLOCK, columns))
        errors = np.empty((block.stop - start, rows))
        for j in range(start, block.stop):
            integers = np.clip(np.rint(left[j] / steps[j]), -MAX_INTEGER, MAX_INTEGER)
            grid.integers[:, order[j]] = integers
            errors[j - start] = (left[j] - integers * steps[j]) / upper[j, j]
            left[j + 1 : block.stop] -= np.outer(upper[j, j + 1 : block.stop], errors[j - start])
        left[block.stop :] -= upper[block, block.stop :].T @ errors
    return grid
