"""Code integers into bytes: order-0 rANS with a static histogram per context, in interleaved lanes.

Owns histograms and the encoder; decoder.py has the other half, because it ships. Does not know tensors.

Frequencies have 14 bits, states 32, and the stream consists of 16-bit words (Duda 2013, arXiv:1311.2540; the lanes are
those of Giesen 2014, arXiv:1402.3392). An integer is coded as a symbol of sign, exponent and leading six bits; its
other bits, which only integers from 64 have, are stored as they are. So any int32 fits a small alphabet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfgolf.golf.decoder import FREQUENCY_BITS, STATE_MINIMUM

INTEGERS_PER_LANE = 2**16
"""A lane costs 4 bytes, and a lane's integers are coded one after the other: 64 lanes code 4 M integers in a second."""

Table = tuple[int, NDArray[np.integer]]
"""The lowest symbol, and the frequencies from it on, which sum to 2**14; empty if the context is not used."""


@dataclass(frozen=True)
class Coded:
    """Integers as bytes: what Decoder takes. chunk_bits: of each chunk, raw bits included, to fractions of a bit."""

    tables: list[Table]
    num_lanes: int
    stream: bytes
    raw: bytes
    chunk_bits: list[float]


class Encoder:
    """Collect integers with their contexts, in the order in which Decoder reads them, then code them all."""

    def __init__(self, num_contexts: int) -> None:
        self.num_contexts = num_contexts
        self.chunks: list[tuple[NDArray[np.int16], NDArray[np.int32]]] = []
        self.raw: list[NDArray[np.uint8]] = []

    def add(self, contexts: NDArray[np.integer] | int, integers: NDArray[np.integer]) -> None:
        """Add integers, (n,) of int32's range, with the context of each."""
        symbols, raw = split_integers(integers)
        self.chunks.append((np.broadcast_to(np.asarray(contexts, np.int16), symbols.shape), symbols))
        self.raw.append(raw)

    def encode(self, num_lanes: int | None = None) -> Coded:
        """Return the code. num_lanes: None: one for every 2**16 integers, to the next power of two."""
        total = sum(len(symbols) for _, symbols in self.chunks)
        if num_lanes is None:
            num_lanes = 1 << max(0, (total // INTEGERS_PER_LANE)).bit_length()
        tables = self._tables()
        # by context: what to add to a symbol, for its place among the symbols of all tables
        ends = np.cumsum([len(frequencies) for _, frequencies in tables])
        offsets = ends - np.array([lowest + len(frequencies) for lowest, frequencies in tables])
        chunks = [(offsets[contexts] + symbols).astype(np.int32) for contexts, symbols in self.chunks]
        frequencies = np.concatenate([frequencies for _, frequencies in tables])
        bits = FREQUENCY_BITS - np.log2(np.maximum(frequencies, 1))
        starts = np.concatenate([np.cumsum(frequencies) - frequencies for _, frequencies in tables])
        return Coded(
            tables,
            num_lanes,
            _encode(chunks, frequencies.astype(np.uint64), starts.astype(np.uint64), num_lanes),
            np.packbits(np.concatenate([np.empty(0, np.uint8), *self.raw]), bitorder="little").tobytes(),
            [float(bits[places].sum()) + len(raw) for places, raw in zip(chunks, self.raw, strict=True)],
        )

    def _tables(self) -> list[Table]:
        """Return the table of each context."""
        lowest = min((int(symbols.min()) for _, symbols in self.chunks if len(symbols)), default=0)
        highest = max((int(symbols.max()) for _, symbols in self.chunks if len(symbols)), default=0)
        width = highest - lowest + 1
        counts = np.zeros(self.num_contexts * width, np.int64)
        for contexts, symbols in self.chunks:
            counts += np.bincount(contexts.astype(np.int64) * width + symbols - lowest, minlength=len(counts))
        tables: list[Table] = []
        for row in counts.reshape(self.num_contexts, width):
            (used,) = np.nonzero(row)
            frequencies = frequencies_of(row[used[0] : used[-1] + 1]) if len(used) else np.empty(0, np.int64)
            tables.append((lowest + int(used[0]) if len(used) else 0, frequencies))
        return tables


def split_integers(integers: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return the symbols of integers (n,), and their other bits, one a byte."""
    values = np.asarray(integers, np.int64)
    sizes = np.abs(values)
    _, lengths = np.frexp(sizes.astype(np.float64))  # of int32's range, so exact: the number of bits
    exponents = np.maximum(lengths - 6, 0)
    symbols = np.sign(values) * (32 * exponents + (sizes >> exponents))
    bits = np.empty(int(exponents.sum()), np.uint8)
    starts = np.cumsum(exponents) - exponents
    for bit in range(exponents.max(initial=0)):
        has = exponents > bit
        bits[starts[has] + bit] = (sizes[has] >> bit) & 1
    return symbols.astype(np.int32), bits


def frequencies_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the frequencies that code counts in the fewest bits: they sum to 2**14, and are 0 only for counts of 0."""
    slots = 2**FREQUENCY_BITS
    frequencies = np.where(counts > 0, np.maximum(1, np.rint(counts * (slots / counts.sum()))), 0).astype(np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):  # log(1 / 0): a symbol that occurs keeps its last slot
        while True:
            gains = np.where(counts > 0, counts * np.log((frequencies + 1) / frequencies), -np.inf)
            losses = np.where(counts > 0, counts * np.log(frequencies / (frequencies - 1)), np.inf)
            richest, poorest = losses.argmin(), gains.argmax()
            missing = slots - int(frequencies.sum())
            if missing == 0 and gains[poorest] <= losses[richest] * (1 + 1e-12):
                return frequencies
            frequencies[poorest] += missing >= 0
            frequencies[richest] -= missing <= 0


def _encode(
    chunks: list[NDArray[np.int32]], frequencies: NDArray[np.uint64], starts: NDArray[np.uint64], num_lanes: int
) -> bytes:
    """Return the final states and the words. Goes from the last integer to the first: rANS is a stack.

    chunks: the places of symbols in frequencies and starts, which are those of all tables.
    """
    states = np.full(num_lanes, STATE_MINIMUM, np.uint64)
    words: list[NDArray[np.uint64]] = []
    bits, word_bits, mask = np.uint64(FREQUENCY_BITS), np.uint64(16), np.uint64(0xFFFF)
    for places in reversed(chunks):
        each, begin = frequencies[places], starts[places]
        limits = each << np.uint64(32 - FREQUENCY_BITS)  # from here on, the new state would pass 2**32
        for first in range((len(places) - 1) // num_lanes * num_lanes, -1, -num_lanes):
            here = slice(first, first + num_lanes)
            frequency = each[here]
            state = states[: len(frequency)]
            (high,) = np.nonzero(state >= limits[here])
            words.append(state[high] & mask)
            state[high] >>= word_bits
            quotient = state // frequency
            state += (quotient << bits) - quotient * frequency + begin[here]
    stream = np.concatenate([np.empty(0, np.uint64), *reversed(words)])
    return states.astype("<u4").tobytes() + stream.astype("<u2").tobytes()
