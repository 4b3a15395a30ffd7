"""The artifact: a model's config and weights as one file of few bytes.

Owns the format and writes it. decoder.py reads it, and ships. Does not know which steps are good, files or scores.

All numbers are little-endian:

- 4 bytes magic "golf", 2 bytes version.
- Four sections, each after 4 bytes with its length: the model config, as JSON of what differs from the defaults; the
  histograms (zlib); the stream of the coder; the low bits of integers from 64 on.
- 4 bytes CRC-32 of everything before them.

There are no names and no shapes: the tensors are in the order of the model's state dict, whose shapes follow from the
config. A matrix is its kind, its row codes and column codes (see grid.py), its row classes and column classes, and its
integers. The sum of a row's class and a column's class chooses the histogram of a weight, so the coder knows which
weights are small without being told the weights. Any other tensor is the bits of its values in fp16, rounded to 8
significant bits. Everything goes through one coder, each kind of number with a histogram of its own.
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
    COLUMN_CODE,
    FIRST_CLASS,
    HAS_COLUMN_CLASSES,
    HAS_COLUMN_CODES,
    HAS_ROW_CLASSES,
    IS_MATRIX,
    KIND,
    MAGIC,
    REST,
    ROW_BASE,
    ROW_CLASS,
    ROW_CODE,
    VERSION,
    read_config,
    read_tensors,
)
from hfgolf.golf.grid import Quantized, entropy_bits
from hfgolf.golf.quantize import has_grid
from hfgolf.golf.rans import Encoder, split_integers
from hfgolf.golf.script import config_differences
from hfgolf.model.modeling_golf import GolfForCausalLM

Tensor = Quantized | NDArray[np.floating]

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


def model_encoder(model: GolfForCausalLM) -> Callable[[Mapping[str, Quantized]], Encoded]:
    """Return a function that encodes a model, given its matrices on their grids. The rest is what it is now."""
    parameters = dict(model.named_parameters())  # in the order of the state dict, a shared tensor once
    rest = {
        name: parameter.detach().float().cpu().numpy()
        for name, parameter in parameters.items()
        if not has_grid(name, parameter)
    }
    config = config_differences(model.config)
    return lambda tensors: encode(config, {**rest, **tensors}, list(parameters))


def encode(config: Mapping[str, Any], tensors: Mapping[str, Tensor], order: Sequence[str]) -> Encoded:
    """Encode a model. Deterministic: the same model gives the same bytes.

    config: what differs from the defaults. order: the names of the state dict, in its order, each shared tensor once.
    Raises ValueError if a tensor that is not a matrix has a value that fp16 does not have.
    """
    matrices = {name: tensor for name in order if isinstance(tensor := tensors[name], Quantized)}
    classes = {name: _classes_of(np.abs(matrix.integers)) for name, matrix in matrices.items()}
    first, map_ = _merge_classes([(matrix, classes[name]) for name, matrix in matrices.items()])
    encoder = Encoder(FIRST_CLASS + int(map_.max()) + 1)
    spans = {}
    for name in order:
        start, tensor = len(encoder.chunks), tensors[name]
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
    settings = json.dumps(dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    sections = [settings, zlib.compress(np.array(numbers, "<i2").tobytes(), 9), coded.stream, coded.raw]
    content = MAGIC + VERSION.to_bytes(2, "little")
    content += b"".join(len(section).to_bytes(4, "little") + section for section in sections)
    data = content + zlib.crc32(content).to_bytes(4, "little")
    num_bytes = [bits / 8 for bits in coded.chunk_bits]
    in_tensors = {name: TensorBytes(num_bytes[span][-1], sum(num_bytes[span][:-1])) for name, span in spans.items()}
    parts = {
        "config": len(settings),
        "histograms": len(sections[1]),
        "lanes": len(coded.stream) + len(coded.raw) - sum(num_bytes),
        "frame": len(data) - sum(map(len, sections)),
    }
    return Encoded(data, in_tensors, parts)


def decode(data: bytes, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config, and the tensors by name.

    shapes: of the state dict, in its order. Raises ValueError, one line, if the artifact is damaged or holds another
    model.
    """
    return read_config(data), dict(zip(shapes, read_tensors(data, list(shapes.values())), strict=True))


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
    columns = tensor.column_codes
    optional = {
        HAS_COLUMN_CODES: (COLUMN_CODE, columns),
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
    """Estimate the bits of classes and weights, as if the integers of a class were two-sided geometric.

    Given the mean of their sizes, that is the most that their entropy can be.
    """
    places = classes.of_weights().ravel()
    places = places - places.min()
    counts = np.bincount(places)
    means = np.bincount(places, weights=sizes.ravel()) / np.maximum(counts, 1)
    means = np.maximum(means, 1e-6)
    ratios = means / (1 + np.sqrt(1 + means**2))  # p(n + 1) / p(n) from n = 0 on
    bits = float((counts * (np.log2((1 + ratios) / (1 - ratios)) - means * np.log2(ratios))).sum())
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
        raise ValueError(f"{name} has a value that fp16 does not have: it must be finite and below 65,280")
    return np.where(np.signbit(halves), -bits, bits)
