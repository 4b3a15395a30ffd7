"""Round one matrix with error feedback (GPTQ: Frantar et al. 2022, arXiv:2210.17323), then by coordinate descent.

Columns are rounded one after the other. Each one's error is passed on to the columns that are still to come, along the
layer's input Hessian, so that the layer's outputs change least. With a Hessian of the outputs, too, it is also passed
on to the rows that are still to come, so that the loss changes least: what one output makes worse, others make up for
(YAQA: Tseng et al. 2025, arXiv:2505.22988).

Feedback corrects later columns only, so an early one is never reconsidered. Afterwards, coordinate descent changes one
integer at a time where that lowers the same loss further (QuantEase: Behdin et al. 2023, arXiv:2309.01885). The loss is
sum(E * (A E B)): E are the errors of the weights (rows, columns), A and B the damped Hessians of the outputs and the
inputs. Without a Hessian of the outputs, A is the identity: rows are independent.

Does not know which matrix it is, or which grid to use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfgolf.golf.grid import MAX_INTEGER, Quantized, steps_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int32]
Codes = NDArray[np.uint8]

_BLOCK = 128  # columns whose errors are passed on inside the block first, and to all later columns by one product
_ROWS = 64  # the same of rows
_SWEEPS = 3  # of coordinate descent over the columns
_LEAST_GAIN = 1e-6  # of a change in a column whose rows depend on each other, as a share of the mean loss per weight


@dataclass(frozen=True)
class Feedback:
    """How errors are passed on, and what they cost.

    order: (columns,) the columns as they are rounded, by descending diagonal of the hessian. upper: (columns, columns),
    in that order: the upper Cholesky factor U of the inverse of the damped hessian, which is U^T U. hessian: (columns,
    columns) as it was measured, in its own order. added: to its diagonal, by damping. rows: the same of rows; None:
    they get no errors of each other.
    """

    order: NDArray[np.intp]
    upper: Floats
    hessian: Floats
    added: float
    rows: Feedback | None = None

    def weights(self) -> Floats:
        """Return 1 / U[j, j]**2 by column: the curvature along a column when all later ones adapt to it."""
        weights = np.empty(len(self.order))
        weights[self.order] = np.diag(self.upper) ** -2.0
        return weights

    def diagonal(self) -> Floats:
        """Return the diagonal of the damped hessian, (columns,)."""
        return np.diag(self.hessian) + self.added

    def times(self, values: Floats) -> Floats:
        """Return the damped hessian times values (columns, any)."""
        product = self.hessian @ values
        product += self.added * values
        return product


def error_feedback(hessian: Floats, damping: float = 0.01) -> Feedback:
    """Return the Feedback of a hessian (columns, columns). damping: added to the diagonal, as a share of its mean.

    A column whose input is always zero has the damping alone, so it neither gives nor takes. Without any input, every
    column counts the same.
    """
    diagonal = np.diag(hessian)
    order = np.argsort(-diagonal, kind="stable")
    mean = float(diagonal.mean())
    added = damping * mean if mean > 0 else 1.0
    damped = (hessian + added * np.eye(len(hessian)))[np.ix_(order, order)]
    # inv(H) = U^T U means H = R R^T with R = inv(U), upper triangular: the Cholesky factor of H turned by 180 degrees.
    inverse_upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return Feedback(order, np.triu(np.linalg.inv(inverse_upper)), hessian, added)


def round_with_feedback(weight: NDArray[np.floating], row_codes: Codes, feedback: Feedback) -> Quantized:
    """Round a matrix (rows, columns) to its grid, in fp64: with feedback, then by coordinate descent."""
    if feedback.rows is None:
        grid = _round_columns(weight, row_codes, feedback)
    else:
        grid = _round_both_ways(weight, row_codes, feedback, feedback.rows)
    _descend(grid, weight, feedback)
    return grid


def _round_columns(weight: NDArray[np.floating], row_codes: Codes, feedback: Feedback) -> Quantized:
    """Round with feedback to later columns, in blocks of them."""
    order, upper = feedback.order, feedback.upper
    rows, columns = weight.shape
    grid = Quantized(np.empty((rows, columns), dtype=np.int32), row_codes)
    steps = steps_of(row_codes).astype(np.float64)
    left = np.ascontiguousarray(weight.T[order], dtype=np.float64)  # (columns, rows): a column is contiguous
    for start in range(0, columns, _BLOCK):
        block = slice(start, min(start + _BLOCK, columns))
        errors = np.empty((block.stop - start, rows))
        for j in range(start, block.stop):
            integers = np.clip(np.rint(left[j] / steps), -MAX_INTEGER, MAX_INTEGER)
            grid.integers[:, order[j]] = integers
            errors[j - start] = (left[j] - integers * steps) / upper[j, j]
            left[j + 1 : block.stop] -= np.outer(upper[j, j + 1 : block.stop], errors[j - start])
        left[block.stop :] -= upper[block, block.stop :].T @ errors
    return grid


def _round_both_ways(weight: NDArray[np.floating], row_codes: Codes, columns: Feedback, rows: Feedback) -> Quantized:
    """Round with feedback to later columns and rows, in blocks of both."""
    num_rows, num_columns = weight.shape
    grid = Quantized(np.empty((num_rows, num_columns), dtype=np.int32), row_codes)
    both = np.ix_(rows.order, columns.order)
    steps = steps_of(row_codes[rows.order]).astype(np.float64)
    left = weight[both].astype(np.float64)  # with the errors of earlier columns
    above = np.zeros_like(left)  # the errors of earlier rows
    integers = np.empty_like(left)
    to_columns, to_rows = (np.triu(side.upper / np.diag(side.upper)[:, None], 1) for side in (columns, rows))
    for start in range(0, num_rows, _ROWS):
        down = slice(start, min(start + _ROWS, num_rows))
        errors = np.empty((down.stop - start, num_columns))
        for begin in range(0, num_columns, _BLOCK):
            across = slice(begin, min(begin + _BLOCK, num_columns))
            block, inside = (down, across), (to_columns[across, across], to_rows[down, down])
            integers[block], errors[:, across], own = _round_block(left[block], above[block], steps[down], *inside)
            left[down, across.stop :] -= own @ to_columns[across, across.stop :]
        above[down.stop :] -= to_rows[down, down.stop :].T @ errors
    grid.integers[both] = integers
    return grid


def _round_block(
    left: Floats, above: Floats, steps: Floats, to_columns: Floats, to_rows: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the integers, the errors that go to later rows, and those that go to later columns. steps: (rows,).

    An entry waits for those before it in its row and in its column. So the entries on one antidiagonal are independent,
    and rounded at once: in memory, they are num_columns - 1 apart.
    """
    num_rows, num_columns = left.shape
    left, above = (np.array(each, order="C") for each in (left, above))
    integers = np.empty_like(left)
    in_memory = [each.ravel() for each in (left, above, integers)]
    for antidiagonal in range(num_rows + num_columns - 1):
        first, stop = max(0, antidiagonal - num_columns + 1), min(num_rows, antidiagonal + 1)
        entries = slice(first * (num_columns - 1) + antidiagonal, None, max(1, num_columns - 1))
        own, of_rows, rounded = (each[entries][: stop - first] for each in in_memory)
        np.rint((own + of_rows) / steps[first:stop], out=rounded)
        rounded.clip(-MAX_INTEGER, MAX_INTEGER, out=rounded)
        own_error = own - rounded * steps[first:stop]
        across = slice(antidiagonal - stop + 1, antidiagonal - first + 1)
        left[first:stop, across.start :] -= own_error[:, None] * to_columns[across, across.start :][::-1]
        above[first:, across] -= (to_rows[first:stop, first:].T * (own_error + of_rows))[:, ::-1]
    own_errors = left - integers * steps[:, None]  # an entry gets nothing more after it was rounded
    return integers, own_errors + above, own_errors


def _descend(grid: Quantized, weight: NDArray[np.floating], feedback: Feedback) -> None:
    """Lower the loss (see the module) by changes of single integers, in place, in up to _SWEEPS over the columns."""
    steps = steps_of(grid.row_codes).astype(np.float64)
    for _ in range(_SWEEPS):
        errors = grid.integers * steps[:, None]
        errors -= weight
        slopes, loss = _slopes(errors, feedback)
        del errors  # of the size of slopes
        if not loss > 0 or not _sweep(grid.integers, steps, slopes, feedback, _LEAST_GAIN * loss / weight.size):
            break


def _slopes(errors: Floats, feedback: Feedback) -> tuple[Floats, float]:
    """Return half the slope of the loss along each weight, transposed, (columns, rows), and the loss.

    errors: (rows, columns). Half the slope is A E B.
    """
    by_output = errors if feedback.rows is None else feedback.rows.times(errors)
    slopes = feedback.times(by_output.T)
    return slopes, float(np.einsum("rc,cr->", errors, slopes))


def _sweep(integers: Integers, steps: Floats, slopes: Floats, feedback: Feedback, least_gain: float) -> bool:
    """Change integers (rows, columns), column after column, in place. Return whether any has changed.

    steps: (rows,). slopes: (columns, rows), from _slopes; those of a block's columns learn of changes in the block when
    their turn comes, those of later columns by one product, in place.
    """
    hessian, rows, diagonal = feedback.hessian, feedback.rows, feedback.diagonal()
    any_changed = False
    for start in range(0, len(slopes), _BLOCK):
        stop = min(start + _BLOCK, len(slopes))
        moves = np.zeros((stop - start, slopes.shape[1]))  # of the block's weights, times A
        for j in range(start, stop):
            slope = slopes[j] + hessian[j, start:j] @ moves[: j - start]
            if rows is None:
                changes = _best_changes(slope, steps, integers[:, j], diagonal[j])
            else:
                changes = _changes_in_turn(slope, steps, integers[:, j], diagonal[j], rows, least_gain)
            changed = np.flatnonzero(changes)
            if len(changed):
                any_changed = True
                integers[changed, j] += changes[changed].astype(np.int32)
                moved = changes * steps
                moves[j - start] = moved if rows is None else _sparse_times(rows, moved, changed)
        slopes[stop:] += hessian[stop:, start:stop] @ moves
    return any_changed


def _best_changes(slope: Floats, step: Floats, integers: Integers | Floats, curvature: Floats | float) -> Floats:
    """Return the whole change of each integer of a column (rows,) that lowers the loss most if no other changes.

    slope, step, integers: (rows,). curvature: of the loss along the weights, half of it like slope; (rows,) or of all.
    """
    changes = np.rint(-slope / (curvature * step))
    return np.clip(changes, -MAX_INTEGER - integers, MAX_INTEGER - integers)


def _changes_in_turn(
    slope: Floats, step: Floats, integers: Integers, of_column: float, rows: Feedback, least_gain: float
) -> Floats:
    """Return changes of a column's integers (rows,), made one after the other: the one that lowers the loss most first.

    slope, step, integers: (rows,). of_column: the diagonal of the columns' damped hessian there.
    """
    curvature = rows.diagonal() * of_column
    slope, current = slope.copy(), integers.astype(np.float64)
    while True:
        changes = _best_changes(slope, step, current, curvature)
        moved = changes * step
        gains = -moved * (2 * slope + moved * curvature)
        row = int(gains.argmax())
        if not gains[row] > least_gain:  # nor if it is not a number
            return current - integers
        current[row] += changes[row]
        slope += rows.hessian[row] * (moved[row] * of_column)
        slope[row] += rows.added * moved[row] * of_column


def _sparse_times(rows: Feedback, moved: Floats, changed: NDArray[np.intp]) -> Floats:
    """Return the damped hessian of rows times moved (rows,), which is zero but at changed."""
    product = moved[changed] @ rows.hessian[changed]
    product[changed] += rows.added * moved[changed]
    return product
