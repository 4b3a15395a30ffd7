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

from hfgolf.golf.decoder import FREQUENCY_BITS, STATE_MINIMUM, Decoder

INTEGERS_PER_LANE = 2**16
"""A lane costs 4 bytes, and a lane's integers are coded one after the other: 64 lanes code 4 M integers in a second."""

Table = tuple[int, NDArray[np.integer]]
"""The lowest symbol, and the frequencies from it on, which sum to 2**14; empty if the context is not used."""


@dataclass(frozen=True)
class Coded:
    """Integers as bytes: what Decoder takes."""

    tables: list[Table]
    num_lanes: int
    stream: bytes
    raw: bytes

    def decoder(self) -> Decoder:
        return Decoder(self.tables, self.num_lanes, self.stream, self.raw)


class Encoder:
    """Collect integers with their contexts, in the order in which Decoder reads them, then code them all."""

    def __init__(self, num_contexts: int) -> None:
        self._num_contexts = num_contexts
        self._chunks: list[tuple[NDArray[np.int16], NDArray[np.int32]]] = []
        self._raw: list[NDArray[np.uint8]] = []

    def add(self, contexts: NDArray[np.integer] | int, integers: NDArray[np.integer]) -> None:
        """Add integers, (n,) of int32's range, with the context of each."""
        symbols, raw = split_integers(integers)
        self._chunks.append((np.broadcast_to(np.asarray(contexts, np.int16), symbols.shape), symbols))
        self._raw.append(raw)

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def chunk_bits(self, tables: list[Table]) -> list[float]:
        """Return the bits that each chunk takes, raw bits included, to fractions of a bit."""
        logs = [FREQUENCY_BITS - np.log2(np.maximum(frequencies, 1)) for _, frequencies in tables]
        offsets, bits = _offsets(tables), np.concatenate(logs)
        return [
            float(bits[offsets[contexts] + symbols].sum()) + len(raw)
            for (contexts, symbols), raw in zip(self._chunks, self._raw, strict=True)
        ]

    def encode(self, num_lanes: int | None = None) -> Coded:
        """Return the code. num_lanes: None: one for every 2**16 integers, to the next power of two."""
        total = sum(len(symbols) for _, symbols in self._chunks)
        if num_lanes is None:
            num_lanes = 1 << max(0, (total // INTEGERS_PER_LANE)).bit_length()
        tables = self.tables()
        stream = _encode(self._chunks, tables, num_lanes)
        raw = np.packbits(np.concatenate([np.empty(0, np.uint8), *self._raw]), bitorder="little")
        return Coded(tables, num_lanes, stream, raw.tobytes())

    def tables(self) -> list[Table]:
        """Return the table of each context."""
        lowest = min((int(symbols.min()) for _, symbols in self._chunks if len(symbols)), default=0)
        highest = max((int(symbols.max()) for _, symbols in self._chunks if len(symbols)), default=0)
        width = highest - lowest + 1
        counts = np.zeros(self._num_contexts * width, np.int64)
        for contexts, symbols in self._chunks:
            counts += np.bincount(contexts.astype(np.int64) * width + symbols - lowest, minlength=len(counts))
        return [_table(lowest, row) for row in counts.reshape(self._num_contexts, width)]


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


def _table(lowest: int, counts: NDArray[np.int64]) -> Table:
    (used,) = np.nonzero(counts)
    if not len(used):
        return 0, np.empty(0, np.int64)
    return lowest + int(used[0]), frequencies_of(counts[used[0] : used[-1] + 1])


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


def _offsets(tables: list[Table]) -> NDArray[np.int64]:
    """Return by context what to add to a symbol, for its place among the symbols of all tables."""
    ends = np.cumsum([len(frequencies) for _, frequencies in tables])
    return ends - np.array([lowest + len(frequencies) for lowest, frequencies in tables])


def _encode(chunks: list[tuple[NDArray[np.int16], NDArray[np.int32]]], tables: list[Table], num_lanes: int) -> bytes:
    """Return the final states and the words. Goes from the last integer to the first: rANS is a stack."""
    offsets = _offsets(tables)
    all_frequencies = np.concatenate([frequencies for _, frequencies in tables]).astype(np.uint64)
    all_starts = np.concatenate([np.cumsum(frequencies) - frequencies for _, frequencies in tables]).astype(np.uint64)
    states = np.full(num_lanes, STATE_MINIMUM, np.uint64)
    words: list[NDArray[np.uint64]] = []
    bits, word_bits, mask = np.uint64(FREQUENCY_BITS), np.uint64(16), np.uint64(0xFFFF)
    for contexts, symbols in reversed(chunks):
        places = offsets[contexts] + symbols
        frequencies, starts = all_frequencies[places], all_starts[places]
        limits = frequencies << np.uint64(32 - FREQUENCY_BITS)  # from here on, the new state would pass 2**32
        for first in range((len(symbols) - 1) // num_lanes * num_lanes, -1, -num_lanes):
            here = slice(first, first + num_lanes)
            frequency = frequencies[here]
            state = states[: len(frequency)]
            (high,) = np.nonzero(state >= limits[here])
            words.append(state[high] & mask)
            state[high] >>= word_bits
            quotient = state // frequency
            state += (quotient << bits) - quotient * frequency + starts[here]
    stream = np.concatenate([np.empty(0, np.uint64), *reversed(words)])
    return states.astype("<u4").tobytes() + stream.astype("<u2").tobytes()
