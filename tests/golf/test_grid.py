"""The grid: exact steps, bit-equal weights, and entropies against draws."""

from __future__ import annotations

import numpy as np
import pytest

from hfgolf.golf.grid import (
    GAUSSIAN_BITS,
    MANTISSAS,
    MAX_INTEGER,
    Quantized,
    entropy_bits,
    gaussian_bits,
    round_nearest,
    row_codes_of,
    steps_of,
)


def test_mantissas_are_eighths_of_an_octave_rounded_once():
    exact = np.exp2(np.arange(8, dtype=np.longdouble) / 8)
    assert np.finfo(np.longdouble).nmant >= 60
    np.testing.assert_array_equal(MANTISSAS, exact.astype(np.float32))


def test_steps_are_mantissas_times_exact_powers_of_two():
    codes = np.arange(-128, 255 + 127 + 1)  # every sum of a row code and a column code
    steps = steps_of(codes)
    assert steps.dtype == np.float32
    for code, step in zip(codes.tolist(), steps, strict=True):
        assert float(step) == float(MANTISSAS[code % 8]) * 2.0 ** (code // 8 - 24)
    assert (np.diff(steps) > 0).all()


def test_codes_and_steps_are_inverse():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(row_codes_of(steps_of(codes)), codes)
    np.testing.assert_array_equal(row_codes_of(steps_of(codes) * 2 ** (0.45 / 8)), codes)
    np.testing.assert_array_equal(row_codes_of(np.array([0.0, 1e-30, 1e30])), [0, 0, 255])


def test_dequantizing_is_one_fp32_product():
    generator = np.random.default_rng(0)
    rows = generator.integers(60, 180, 17).astype(np.uint8)
    matrix = Quantized(generator.integers(-MAX_INTEGER, MAX_INTEGER + 1, (17, 33)).astype(np.int32), rows)
    weights = matrix.dequantized()
    assert weights.dtype == np.float32
    for row, column in np.ndindex(17, 33):
        assert weights[row, column] == np.float32(matrix.integers[row, column]) * steps_of(np.array(rows[row]))
    back = round_nearest(weights, rows)
    np.testing.assert_array_equal(back.integers, matrix.integers)


def test_nearest_rounding_is_within_half_a_step_and_the_alphabet_and_keeps_zero():
    weight = np.random.default_rng(1).standard_normal((8, 50)).astype(np.float32)
    weight[3] = 0
    codes = row_codes_of(np.full(8, 0.3))
    matrix = round_nearest(weight, codes)
    assert (np.abs(matrix.dequantized() - weight) <= matrix.steps() / 2 * (1 + 1e-6)).all()
    assert not matrix.integers[3].any()
    beyond = round_nearest(np.array([[1e6, -1e6]]), np.array([0], dtype=np.uint8))
    assert beyond.integers.tolist() == [[MAX_INTEGER, -MAX_INTEGER]]


def test_entropy_of_known_distributions():
    assert entropy_bits(np.zeros(10, dtype=np.int32)) == 0
    assert entropy_bits(np.array([], dtype=np.int32)) == 0
    assert entropy_bits(np.tile(np.arange(-4, 4), 7)) == pytest.approx(3)
    assert entropy_bits(np.array([0, 0, 0, 100000])) == pytest.approx(2 - 0.75 * np.log2(3))


@pytest.mark.parametrize("step", [0.024, 0.1, 0.4145, 1.0, 1.5, 2.5, 4.0])
def test_gaussian_entropy_matches_draws(step):
    draws = np.random.default_rng(2).standard_normal(400_000)
    measured = entropy_bits(np.rint(draws / step).astype(np.int32))
    assert float(gaussian_bits(step)) == pytest.approx(measured, abs=0.006)


def test_gaussian_entropy_follows_the_closed_form_for_small_steps():
    golf_step = 12.85 / 31  # k = 12.85 at 6 bits, in standard deviations
    assert float(gaussian_bits(golf_step)) == pytest.approx(3.318 + golf_step**2 / 16.6, abs=0.001)
    below, above = gaussian_bits(np.array([1 / 32.01, 1 / 31.99]))  # where the table begins
    assert below == pytest.approx(GAUSSIAN_BITS + 5, abs=0.001)
    assert above == pytest.approx(below, abs=0.001)
    assert (np.diff(gaussian_bits(np.geomspace(0.01, 20, 100))) < 0).all()  # size is monotone in the step
    assert float(gaussian_bits(1e9)) < 1e-9
