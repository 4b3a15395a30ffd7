"""The artifact: a model's config and weights as one file of few bytes.

Owns the format and writes it. decoder.py reads it, and ships. Does not know which steps are good, files or scores.

All numbers are little-endian:

- 4 bytes magic "golf", 2 bytes version.
- Four sections, each after 4 bytes with its length: the header; the histograms (zlib); the stream of the coder; the low
  bits of integers from 64 on.
- 4 bytes CRC-32 of everything before them.

The header of a Golf model is its config, as JSON of what differs from the defaults. There are no names and no shapes
then: the tensors are in the order of the model's state dict, whose shapes follow from the config. Of any other model,
unpack.py describes the header. A matrix is its kind, its row codes (see grid.py), its row classes and column
classes, and its integers. The sum of a row's class and a column's class chooses the histogram of a weight, so the coder
knows which weights are small without being told the weights. Any other tensor is the bits of its values in fp16,
rounded to 8 significant bits. Everything goes through one coder, each kind of number with a histogram of its own.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hfgolf.golf.decoder import (
    CLASS_BASE,
    CLASS_STRIDE,
    COLUMN_CLASS,
    FIRST_CLASS,
    FREQUENCY_BITS,
    HAS_COLUMN_CLASSES,
    HAS_ROW_CLASSES,
    IS_MATRIX,
    KIND,
    MAGIC,
    REST,
    ROW_BASE,
    ROW_CLASS,
    ROW_CODE,
    STATE_MINIMUM,
    VERSION,
)
from hfgolf.golf.grid import Quantized, entropy_bits
from hfgolf.golf.quantize import Grids, stored
from hfgolf.golf.script import config_differences
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.system.errors import UserError

Tensor = Quantized | NDArray[np.floating]

INTEGERS_PER_LANE = 2**16
"""A lane costs 4 bytes, and a lane's integers are coded one after the other: 64 lanes code 4 M integers in a second."""
MAX_LANES = 2**14  # their number is stored in 16 bits, with sign

Table = tuple[int, NDArray[np.integer]]
"""The lowest symbol, and the frequencies from it on, which sum to 2**14; empty if the context is not used."""
CLASSES_PER_OCTAVE = 4
"""Of rows and columns. Finer ones cost as much side information as they save, at 1.6 to 3.3 bits per weight."""
_TABLE_BITS_PER_SYMBOL = 12  # of a histogram, after zlib
REST_DROPPED_BITS = 3  # of the 11 significant bits of fp16: norm weights need far fewer


@dataclass(frozen=True)
class TensorBytes:
    """The bytes of one tensor in the artifact. side: kind, steps and classes."""

    weights: float
    side: float


@dataclass(frozen=True)
class Encoded:
    """An artifact, and where its bytes are. parts: of everything that belongs to no tensor."""

    data: bytes
    tensors: dict[str, TensorBytes]
    parts: dict[str, float]


def model_encoder(model: GolfForCausalLM) -> Callable[[Grids], Encoded]:
    """Return a function that encodes a model, given its matrices on their grids. The rest is what it is now."""
    header = config_header(config_differences(model.config))
    # in the order of the state dict, a shared tensor once
    tensors = {name: stored(None, parameter) for name, parameter in model.named_parameters()}
    return lambda on_grids: encode(header, {**tensors, **on_grids})


def config_header(config: Mapping[str, Any]) -> bytes:
    """Return the header of a Golf model. config: what differs from the defaults."""
    return json.dumps(dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode(header: bytes, tensors: Mapping[str, Tensor]) -> Encoded:
    """Encode a model. Deterministic: the same model gives the same bytes.

    tensors: in the order in which they are decoded, each shared tensor once. Raises UserError if a tensor that is not
    a matrix has a value that fp16 does not have.
    """
    matrices = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Quantized)}
    classes = {name: _classes_of(np.abs(matrix.integers)) for name, matrix in matrices.items()}
    first, map_ = _merge_classes([(matrix, classes[name]) for name, matrix in matrices.items()])
    encoder = Encoder(FIRST_CLASS + int(map_.max()) + 1)
    spans = {}
    for name, tensor in tensors.items():
        start = len(encoder.chunks)
        if isinstance(tensor, Quantized):
            _add_matrix(encoder, tensor, classes[name], first, map_)
        else:
            encoder.add(KIND, np.zeros(1, np.int64))
            encoder.add(REST, _rest_integers(name, tensor))
        spans[name] = slice(start, len(encoder.chunks))
    coded = encoder.encode()
    numbers = [coded.num_lanes, REST_DROPPED_BITS, len(map_), *map_.tolist()]
    for lowest, frequencies in coded.tables:
        numbers += [lowest, len(frequencies), *frequencies.tolist()]
    sections = [header, zlib.compress(np.array(numbers, "<i2").tobytes(), 9), coded.stream, coded.raw]
    content = MAGIC + VERSION.to_bytes(2, "little")
    content += b"".join(len(section).to_bytes(4, "little") + section for section in sections)
    data = content + zlib.crc32(content).to_bytes(4, "little")
    num_bytes = [bits / 8 for bits in coded.chunk_bits]
    in_tensors = {name: TensorBytes(num_bytes[span][-1], sum(num_bytes[span][:-1])) for name, span in spans.items()}
    parts = {
        "header": len(header),
        "histograms": len(sections[1]),
        "lanes": len(coded.stream) + len(coded.raw) - sum(num_bytes),
        "frame": len(data) - sum(map(len, sections)),
    }
    return Encoded(data, in_tensors, parts)


@dataclass(frozen=True)
class _Classes:
    """The classes of a matrix. A weight's is base + CLASS_STRIDE * (its row's + its column's)."""

    base: int
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]

    def of_weights(self) -> NDArray[np.int64]:
        """Return the class of each weight, (rows, columns)."""
        return self.base + CLASS_STRIDE * (self.rows[:, None] + self.columns)


def _add_matrix(encoder: Encoder, tensor: Quantized, classes: _Classes, first: int, map_: NDArray[np.int64]) -> None:
    """Add a matrix in the order in which read_tensors reads it. What is all zeros is not added.

    first, map_: the lowest class of any weight, and the histogram of each class from it on.
    """
    base = int(np.median(tensor.row_codes))
    optional = {
        HAS_ROW_CLASSES: (ROW_CLASS, classes.rows if classes.rows.any() else None),
        HAS_COLUMN_CLASSES: (COLUMN_CLASS, classes.columns if classes.columns.any() else None),
    }
    kind = IS_MATRIX + sum(flag for flag, (_, values) in optional.items() if values is not None)
    numbers = {KIND: [kind], ROW_BASE: [base], CLASS_BASE: [classes.base - first]}
    for context, values in numbers.items():
        encoder.add(context, np.array(values))
    encoder.add(ROW_CODE, tensor.row_codes.astype(np.int64) - base)
    for context, side in optional.values():
        if side is not None:
            encoder.add(context, side.astype(np.int64))
    encoder.add(FIRST_CLASS + map_[classes.of_weights().ravel() - first], tensor.integers.ravel())


def _classes_of(sizes: NDArray[np.int32]) -> _Classes:
    """Return the classes of a matrix, given |integers|: of rows and columns as far as they save more than they cost."""
    octaves = [np.log2(scale) * CLASSES_PER_OCTAVE for scale in _scales(sizes)]
    sides = [np.rint(scale - np.median(scale)).astype(np.int64) for scale in octaves]
    choices = [_Classes(0, *pair) for pair in itertools.product(*([np.zeros_like(side), side] for side in sides))]
    best = min(choices, key=lambda choice: _estimated_bits(sizes, choice))
    fine = CLASSES_PER_OCTAVE * CLASS_STRIDE
    expected = 2.0 ** (best.rows / CLASSES_PER_OCTAVE)[:, None] * 2.0 ** (best.columns / CLASSES_PER_OCTAVE)
    base = np.log2(max(sizes.sum(), 0.5) / max(expected.sum(), 0.5))
    return _Classes(round(fine * base), best.rows, best.columns)


def _scales(sizes: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return factors of rows and columns whose product is about the mean size of each weight."""
    values = sizes.astype(np.float64)
    num_rows, num_columns = values.shape
    columns = np.ones(num_columns)
    for _ in range(4):  # converges quickly. Half a unit in all: a row or column without any weight
        rows = np.maximum(0.5, values @ (1 / columns)) / num_columns
        columns = np.maximum(0.5, (1 / rows) @ values) / num_rows
    return rows, columns


def _estimated_bits(sizes: NDArray[np.int32], classes: _Classes) -> float:
    """Estimate the bits of classes and weights, if each class has a histogram of its own."""
    places = classes.of_weights().ravel()
    width = int(sizes.max(initial=0)) + 1
    counts = np.bincount((places - places.min()) * width + sizes.ravel())
    counts = np.pad(counts, (0, -len(counts) % width)).reshape(-1, width)
    bits = sum(_histogram_bits(each) for each in counts if each.any())
    for side in (classes.rows, classes.columns):
        bits += entropy_bits(side) * len(side) + 16 * side.any()
    return bits


def _merge_classes(matrices: Sequence[tuple[Quantized, _Classes]]) -> tuple[int, NDArray[np.int64]]:
    """Return the lowest class, and the histogram of each class from it on.

    Neighbors share a histogram if one of their own would cost more than it saves: few weights, few histograms.
    """
    places = [classes.of_weights().ravel() for _, classes in matrices]
    symbols = [split_integers(matrix.integers.ravel())[0] for matrix, _ in matrices]
    first = min((int(place.min()) for place in places), default=0)
    num_classes = max((int(place.max()) for place in places), default=first) - first + 1
    lowest = min((int(symbol.min()) for symbol in symbols), default=0)
    width = max((int(symbol.max()) for symbol in symbols), default=lowest) - lowest + 1
    counts = np.zeros(num_classes * width, np.int64)
    for place, symbol in zip(places, symbols, strict=True):
        counts += np.bincount((place - first) * width + symbol - lowest, minlength=len(counts))
    groups = [(group, [number]) for number, group in enumerate(counts.reshape(num_classes, width))]
    bits = [_histogram_bits(group) for group, _ in groups]
    joint = [_histogram_bits(a + b) for (a, _), (b, _) in itertools.pairwise(groups)]
    while joint:
        savings = [bits[i] + bits[i + 1] - both for i, both in enumerate(joint)]
        best = int(np.argmax(savings))
        if savings[best] < 0:
            break
        (a, numbers), (b, more) = groups[best : best + 2]
        groups[best : best + 2] = [(a + b, numbers + more)]
        bits[best : best + 2] = [joint.pop(best)]
        for i in (best - 1, best):
            if 0 <= i < len(joint):
                joint[i] = _histogram_bits(groups[i][0] + groups[i + 1][0])
    map_ = np.empty(num_classes, np.int64)
    for number, (_, members) in enumerate(groups):
        map_[members] = number
    return first, map_


def _histogram_bits(counts: NDArray[np.int64]) -> float:
    """Return the bits of integers with these counts, plus those of their histogram, about."""
    used = counts[counts > 0]
    return float((used * np.log2(used.sum() / used)).sum()) + _TABLE_BITS_PER_SYMBOL * len(used)


def _rest_integers(name: str, values: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the bits of values in fp16 without their sign, rounded and shifted to the right, times the sign."""
    with np.errstate(over="ignore"):
        halves = np.asarray(values, np.float16).ravel()
    bits = (halves.view(np.uint16) & 0x7FFF).astype(np.int64)
    bits = (bits + 2 ** (REST_DROPPED_BITS - 1)) >> REST_DROPPED_BITS  # a carry into the exponent is right as well
    if (bits << REST_DROPPED_BITS).max(initial=0) >= 0x7C00:  # infinity or NaN
        raise UserError(f"model: {name} has a value that fp16 does not have; it must be finite and below 65,280.")
    return np.where(np.signbit(halves), -bits, bits)


@dataclass(frozen=True)
class Coded:
    """Integers as bytes: what Decoder takes. chunk_bits: of each chunk, raw bits included, to fractions of a bit."""

    tables: list[Table]
    num_lanes: int
    stream: bytes
    raw: bytes
    chunk_bits: list[float]


class Encoder:
    """Collect integers with their contexts, in the order in which Decoder reads them, then code them all.

    Order-0 rANS with a static histogram per context, in interleaved lanes. Frequencies have 14 bits, states 32, and the
    stream consists of 16-bit words (Duda 2013, arXiv:1311.2540; the lanes are those of Giesen 2014, arXiv:1402.3392).
    An integer is coded as a symbol of sign, exponent and leading six bits; its other bits, which only integers from 64
    have, are stored as they are. So any int32 fits a small alphabet.
    """

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
        """Return the code. num_lanes: None: one for every 2**16 integers, to the next power of two, 2**14 at most."""
        total = sum(len(symbols) for _, symbols in self.chunks)
        if num_lanes is None:
            num_lanes = min(MAX_LANES, 1 << (total // INTEGERS_PER_LANE).bit_length())
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
