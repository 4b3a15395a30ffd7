"""Grids: integers times steps, and how many bits the integers take.

A weight is an integer times the step of its row. A step is stored as a code: its base-2 logarithm in eighths of an
octave. The grid is symmetric, has zero on it, no floor under the step and a wide alphabet: with an entropy coder,
values that hardly occur cost nothing.

Numpy only, so that a decoder can ship without torch. Knows nothing about models, or about which steps are good.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CODES_PER_OCTAVE = 8
OCTAVE_OFFSET = 24  # row code 0 is the step 2**-24, row code 255 almost 2**8
MAX_ROW_CODE = 255
MANTISSAS = np.array(  # 2**(k/8), each rounded to fp32 once: literals, because pow() may differ between machines
    [1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081], dtype=np.float32
)
MAX_INTEGER = 8191
"""Limit of |integer|. Every alphabet then fits the 2**14 slots of the coder, and int16."""

GAUSSIAN_BITS = 0.5 * math.log2(2 * math.pi * math.e)  # 2.047: differential entropy of a standard Gaussian


def steps_of(codes: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the steps of codes (any shape, any integers) in fp32: bit-equal on any machine."""
    octaves, eighths = np.divmod(np.asarray(codes, dtype=np.int32), CODES_PER_OCTAVE)
    return np.ldexp(MANTISSAS[eighths], octaves - OCTAVE_OFFSET)  # a power of two changes the exponent only


def row_codes_of(steps: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return the row codes whose steps are nearest in the logarithm. A step out of range gets the code at its end."""
    with np.errstate(divide="ignore"):  # a step of 0 becomes code 0, the finest
        codes = np.rint(CODES_PER_OCTAVE * (np.log2(np.asarray(steps, dtype=np.float64)) + OCTAVE_OFFSET))
    return np.clip(codes, 0, MAX_ROW_CODE).astype(np.uint8)


@dataclass(frozen=True)
class Quantized:
    """A matrix on its grid.

    integers: (rows, columns) int32, at most MAX_INTEGER in size. row_codes: (rows,) uint8.
    """

    integers: NDArray[np.int32]
    row_codes: NDArray[np.uint8]

    def steps(self) -> NDArray[np.float32]:
        """Return the step of each row, (rows, 1)."""
        return steps_of(self.row_codes)[:, None]

    def dequantized(self) -> NDArray[np.float32]:
        """Return the weights (rows, columns) in fp32: one multiplication each, so bit-equal on any machine."""
        return self.integers.astype(np.float32) * self.steps()  # integers below 2**24 are exact in fp32


def round_nearest(weight: NDArray[np.floating], row_codes: NDArray[np.uint8]) -> Quantized:
    """Round each weight (rows, columns) to the nearest point of its grid."""
    integers = np.rint(weight / steps_of(row_codes)[:, None].astype(np.float64))
    return Quantized(np.clip(integers, -MAX_INTEGER, MAX_INTEGER).astype(np.int32), row_codes)


def grid_of(weight: NDArray[np.float32]) -> Quantized | None:
    """Return a matrix (rows, columns) that is on a grid as integers and row codes; None if some row is on none.

    A row's grid is the coarsest whose points are its values, bit for bit. Weights that were never rounded are on none.
    """
    sizes = np.abs(weight)
    smallest = np.where(sizes > 0, sizes, np.inf).min(axis=1)
    codes = np.full(len(weight), MAX_ROW_CODE, dtype=np.uint8)  # any grid has a row of zeros
    left = np.flatnonzero(np.isfinite(smallest))
    for code in range(MAX_ROW_CODE, -1, -1):
        step = steps_of(np.array(code))
        quotients = np.rint(smallest[left] / step)
        fits = (quotients >= 1) & (quotients <= MAX_INTEGER) & (quotients * step == smallest[left])
        candidates = left[fits]
        if len(candidates):
            rounded = round_nearest(weight[candidates], np.full(len(candidates), code, dtype=np.uint8))
            found = candidates[(rounded.dequantized() == weight[candidates]).all(axis=1)]
            codes[found] = code
            left = np.setdiff1d(left, found, assume_unique=True)
    return None if len(left) else round_nearest(weight, codes)


def entropy_bits(integers: NDArray[np.integer]) -> float:
    """Return the order-0 entropy in bits per integer: what a coder with one static histogram reaches."""
    if integers.size == 0:
        return 0.0
    counts = np.bincount((integers.ravel() - integers.min()).astype(np.int64))
    shares = counts[counts > 0] / integers.size
    return float(-(shares * np.log2(shares)).sum())


def gaussian_bits(relative_steps: NDArray[np.floating] | float) -> NDArray[np.float64]:
    """Return the entropy in bits of a Gaussian rounded to steps given in standard deviations (any shape).

    For small steps this is 2.047 - log2(step), the formula people know. It falls short by step**2 / 16.6 bits (0.010
    at 0.41, the steps of int6 with k = 12.85) and turns negative in the end. This function has the exact values.
    """
    octaves = np.log2(np.clip(np.asarray(relative_steps, dtype=np.float64), 2.0**-60, 2.0**60))
    tabulated_octaves, tabulated_bits = _wide_step_bits()
    exact = np.interp(octaves, tabulated_octaves, tabulated_bits)
    return np.where(octaves < tabulated_octaves[0], GAUSSIAN_BITS - octaves, exact)


@lru_cache(maxsize=1)
def _wide_step_bits() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tabulate log2(step / standard deviation) from -5 to 5 and the entropy there, summed over the grid's cells."""
    octaves = np.linspace(-5, 5, 321)
    bits = []
    for step in 2.0**octaves:
        edges = (np.arange(math.ceil(9 / step) + 2) - 0.5) * step / math.sqrt(2)
        tails = np.array([0.5 * math.erfc(edge) for edge in edges])  # P(x > edge)
        shares = tails[:-1] - tails[1:]  # of 0, 1, 2, ...
        weights = np.where(np.arange(len(shares)) == 0, 1, 2)  # and of -1, -2, ...
        logs = np.log2(shares, where=shares > 0, out=np.zeros_like(shares))
        bits.append(-(weights * shares * logs).sum())
    return octaves, np.array(bits)
