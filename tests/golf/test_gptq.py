"""Rounding with error feedback against a direct implementation, nearest rounding, and cases without feedback.

Coordinate descent against a plain implementation, brute force, and rounding without it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hfgolf.golf import gptq
from hfgolf.golf.gptq import error_feedback, round_with_feedback
from hfgolf.golf.grid import MAX_INTEGER, round_nearest, row_codes_of


@pytest.fixture
def sweeps(monkeypatch):
    """Set how often coordinate descent goes over the columns: feedback alone with 0."""
    return lambda number: monkeypatch.setattr(gptq, "_SWEEPS", number)


def correlated(generator, columns, samples=None):
    mixing = generator.standard_normal((columns, columns)) * np.geomspace(1, 0.05, columns)
    inputs = generator.standard_normal((samples or 4 * columns, columns)) @ mixing
    return inputs.T @ inputs / len(inputs)


def direct(weight, steps, hessian, damping):
    """Round column after column. After each one, solve for the later columns that make the outputs change least."""
    columns = weight.shape[1]
    damped = hessian + damping * np.diag(hessian).mean() * np.eye(columns)
    order = np.argsort(-np.diag(hessian), kind="stable")
    weight, integers = weight.astype(np.float64).copy(), np.zeros(weight.shape, dtype=np.int32)
    for place, j in enumerate(order):
        integers[:, j] = np.rint(weight[:, j] / steps[:, j])
        error = weight[:, j] - integers[:, j] * steps[:, j]
        later = order[place + 1 :]
        if len(later):
            weight[:, later] += np.outer(error, np.linalg.solve(damped[np.ix_(later, later)], damped[later, j]))
    return integers


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (16, 40), (8, 150)])
def test_gptq_equals_the_direct_implementation(rows, columns, sweeps):
    sweeps(0)
    generator = np.random.default_rng(columns)
    weight = generator.standard_normal((rows, columns)).astype(np.float32)
    hessian = correlated(generator, columns)
    row_codes = row_codes_of(generator.uniform(0.2, 0.6, rows))
    rounded = round_with_feedback(weight, row_codes, error_feedback(hessian, 0.01))
    expected = direct(weight, np.broadcast_to(rounded.steps(), weight.shape).astype(np.float64), hessian, 0.01)
    np.testing.assert_array_equal(rounded.integers, expected)


def test_uncorrelated_inputs_make_gptq_round_to_nearest():
    weight = np.random.default_rng(1).standard_normal((9, 200)).astype(np.float32)
    codes = row_codes_of(np.full(9, 0.3))
    nearest = round_nearest(weight, codes)
    for hessian in (np.eye(200), np.diag(np.linspace(3, 0, 200)), np.zeros((200, 200))):
        rounded = round_with_feedback(weight, codes, error_feedback(hessian))
        np.testing.assert_array_equal(rounded.integers, nearest.integers)


def test_column_weights_are_the_conditional_curvature():
    hessian = correlated(np.random.default_rng(3), 12)
    feedback = error_feedback(hessian, 0.0)
    weights = feedback.weights()
    for place, j in enumerate(feedback.order):  # what is left of H[j, j] once the later columns have adapted
        later = feedback.order[place + 1 :]
        schur = hessian[j, j]
        if len(later):
            schur -= hessian[j, later] @ np.linalg.solve(hessian[np.ix_(later, later)], hessian[later, j])
        assert weights[j] == pytest.approx(schur, rel=1e-6)


def direct_both_ways(weight, steps, columns, rows):
    """Round entry after entry, each corrected by the errors of all that are earlier in its row, its column, or both.

    columns, rows: Feedback. With H = L D L^T, L unit lower triangular, an error counts L - 1.
    """
    both = np.ix_(rows.order, columns.order)
    weight, steps = weight.astype(np.float64)[both], steps[both]
    of_columns, of_rows = (
        np.linalg.inv(side.upper / np.diag(side.upper)[:, None]) - np.eye(len(side.upper)) for side in (columns, rows)
    )
    errors, integers = np.zeros_like(weight), np.zeros(weight.shape)
    for j in range(weight.shape[1]):
        for i in range(weight.shape[0]):
            exact = weight[i, j] + errors[i] @ of_columns[:, j] + of_rows[:i, i] @ errors[:i, j]
            exact += of_rows[:i, i] @ errors[:i] @ of_columns[:, j]
            integers[i, j] = np.rint(exact / steps[i, j])
            errors[i, j] = weight[i, j] - integers[i, j] * steps[i, j]
    result = np.empty(weight.shape)
    result[both] = integers
    return result


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (70, 13), (70, 140), (150, 9), (1, 6), (6, 1)])
def test_feedback_both_ways_equals_the_direct_implementation(rows, columns, sweeps):
    sweeps(0)
    generator = np.random.default_rng(rows)
    weight = generator.standard_normal((rows, columns)).astype(np.float32)
    row_codes = row_codes_of(generator.uniform(0.2, 0.6, rows))
    of_rows = error_feedback(correlated(generator, rows), 0.5)
    feedback = replace(error_feedback(correlated(generator, columns), 0.01), rows=of_rows)
    rounded = round_with_feedback(weight, row_codes, feedback)
    steps = np.broadcast_to(rounded.steps(), weight.shape).astype(np.float64)
    np.testing.assert_array_equal(rounded.integers, direct_both_ways(weight, steps, feedback, of_rows))


@pytest.mark.parametrize("number", [0, 3])
def test_feedback_to_rows_lowers_the_loss_of_correlated_outputs(number, sweeps):
    sweeps(number)
    generator = np.random.default_rng(4)
    ratios = []
    for _ in range(50):
        hessian, of_outputs = correlated(generator, 24), correlated(generator, 12)
        weight, codes = generator.standard_normal((12, 24)).astype(np.float32), row_codes_of(np.full(12, 0.5))
        columns = error_feedback(hessian, 0.01)
        losses = []
        for feedback in (replace(columns, rows=error_feedback(of_outputs, 0.01)), columns):
            error = round_with_feedback(weight, codes, feedback).dequantized().astype(np.float64) - weight
            losses.append(np.trace(of_outputs @ error @ hessian @ error.T))
        ratios.append(losses[0] / losses[1])
    assert np.mean(ratios) < 0.6


@pytest.mark.parametrize("number", [0, 3])
def test_uncorrelated_outputs_get_no_feedback(number, sweeps):
    sweeps(number)
    generator = np.random.default_rng(5)
    weight, codes = generator.standard_normal((80, 30)).astype(np.float32), row_codes_of(np.full(80, 0.4))
    columns = error_feedback(correlated(generator, 30))
    expected = round_with_feedback(weight, codes, columns).integers
    for of_outputs in (np.eye(80), np.diag(np.linspace(3, 0, 80)), np.zeros((80, 80))):
        rounded = round_with_feedback(weight, codes, replace(columns, rows=error_feedback(of_outputs)))
        np.testing.assert_array_equal(rounded.integers, expected)


def case(seed, rows, columns, both_ways, step=0.5):
    """Return the arguments of round_with_feedback for a random matrix with correlated inputs, and outputs if wanted."""
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((rows, columns)).astype(np.float32)
    row_codes = row_codes_of(step * generator.uniform(0.5, 1.5, rows))
    of_rows = error_feedback(correlated(generator, rows), 0.1) if both_ways else None
    return weight, row_codes, replace(error_feedback(correlated(generator, columns), 0.05), rows=of_rows)


def damped_hessians(weight, feedback):
    """Return A (rows, rows) and B (columns, columns), recovered from the factors that errors are passed on with."""
    both = []
    for side in (feedback.rows, feedback):
        if side is None:
            both.append(np.eye(len(weight)))
            continue
        damped = np.empty_like(side.upper)
        damped[np.ix_(side.order, side.order)] = np.linalg.inv(side.upper.T @ side.upper)
        both.append(damped)
    return both


def loss_of(integers, steps, weight, feedback):
    of_rows, of_columns = damped_hessians(weight, feedback)
    error = integers * steps.astype(np.float64) - weight
    return float((error * (of_rows @ error @ of_columns)).sum())


@pytest.mark.parametrize("both_ways", [False, True])
def test_after_descent_no_single_change_lowers_the_loss(both_ways, sweeps):
    sweeps(50)
    for seed in range(10):
        arguments = case(seed, 6, 5, both_ways)
        rounded = round_with_feedback(*arguments)
        least = loss_of(rounded.integers, rounded.steps(), arguments[0], arguments[-1])
        for place in np.ndindex(6, 5):
            for change in (-1, 1):
                integers = rounded.integers.copy()
                integers[place] += change
                loss = loss_of(integers, rounded.steps(), arguments[0], arguments[-1])
                assert loss > least * (1 - 1e-6 / 30 - 1e-9)


def plain_descent(integers, steps, weight, feedback, sweeps):
    """Descend with the slopes of all weights computed anew after each change."""
    of_rows, of_columns = damped_hessians(weight, feedback)
    integers, steps = integers.copy(), np.broadcast_to(steps, weight.shape).astype(np.float64)

    def slopes():
        return of_rows @ (integers * steps - weight) @ of_columns

    for _ in range(sweeps):
        least_gain = 1e-6 * ((integers * steps - weight) * slopes()).mean()
        for j in range(weight.shape[1]):
            curvature = np.diag(of_rows) * of_columns[j, j]
            while True:
                slope = slopes()[:, j]
                changes = np.rint(-slope / (curvature * steps[:, j])).astype(np.int32)
                moved = changes * steps[:, j]
                gains = -moved * (2 * slope + moved * curvature)
                if feedback.rows is None:
                    integers[:, j] += changes
                    break
                if gains.max() <= least_gain:
                    break
                integers[gains.argmax(), j] += changes[gains.argmax()]
    return integers


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(10, 20), (30, 300), (150, 140), (1, 9), (9, 1)])
def test_descent_equals_the_plain_implementation(rows, columns, both_ways, sweeps):
    weight, row_codes, feedback = case(rows, rows, columns, both_ways)
    sweeps(0)
    before = round_with_feedback(weight, row_codes, feedback)
    sweeps(2)
    after = round_with_feedback(weight, row_codes, feedback)
    expected = plain_descent(before.integers, before.steps(), weight, feedback, 2)
    assert (expected != before.integers).any() or min(rows, columns) == 1
    np.testing.assert_array_equal(after.integers, expected)


@pytest.mark.parametrize("both_ways", [False, True])
def test_descent_stays_within_the_alphabet(both_ways, sweeps):
    weight, row_codes, feedback = case(8, 30, 40, both_ways, step=2.5 / MAX_INTEGER)
    integers = []
    for number in (0, 3):
        sweeps(number)
        integers.append(round_with_feedback(weight, row_codes, feedback).integers)
    assert (integers[0] != integers[1]).any()
    for each in integers:
        assert np.abs(each).max() == MAX_INTEGER


def test_descent_without_any_input_or_gradient_rounds_to_nearest():
    weight, codes = np.random.default_rng(9).standard_normal((7, 11)).astype(np.float32), row_codes_of(np.full(7, 0.3))
    columns, rows = error_feedback(np.zeros((11, 11))), error_feedback(np.zeros((7, 7)))
    nearest = round_nearest(weight, codes)
    for feedback in (columns, replace(columns, rows=rows)):
        np.testing.assert_array_equal(round_with_feedback(weight, codes, feedback).integers, nearest.integers)
    on_the_grid = nearest.dequantized()
    rounded = round_with_feedback(on_the_grid, codes, replace(columns, rows=rows))
    np.testing.assert_array_equal(rounded.integers, nearest.integers)
