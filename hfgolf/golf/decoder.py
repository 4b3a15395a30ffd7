"""Decode an artifact: bytes to config and weights, in integers up to the one multiplication of each weight.

Ships inside score.py, so it imports numpy, the standard library and grid.py only, and stays small. artifact.py
describes the format and writes it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hfgolf.golf.grid import Quantized

MAGIC = b"golf"
VERSION = 2
FREQUENCY_BITS = 14
STATE_MINIMUM = 2**16  # states are in [2**16, 2**32); one 16-bit word brings a smaller one back
KIND, ROW_BASE, CLASS_BASE, ROW_CODE, ROW_CLASS, COLUMN_CLASS, REST, FIRST_CLASS = range(8)
"""Contexts of the coder: each has a histogram of its own. FIRST_CLASS and on: those of the weights."""
CLASS_STRIDE = 2
IS_MATRIX, HAS_ROW_CLASSES, HAS_COLUMN_CLASSES = 1, 2, 4


class Decoder:
    """Read integers back from interleaved rANS states (Duda 2013, arXiv:1311.2540).

    tables: (lowest symbol, frequencies that sum to 2**14) of each context; no frequencies: the context is unused.
    stream: the states of all lanes (uint32), then 16-bit words, little-endian. raw: the low bits of large integers.
    """

    def __init__(self, tables: Sequence[tuple[int, NDArray[np.integer]]], num_lanes: int, stream: bytes, raw: bytes):
        slots = 2**FREQUENCY_BITS
        self._symbols = np.zeros((len(tables), slots), np.int32)
        self._frequencies = np.zeros((len(tables), slots), np.uint32)
        self._offsets = np.zeros((len(tables), slots), np.uint32)
        for context, (lowest, frequencies) in enumerate(tables):
            if len(frequencies):
                self._symbols[context] = np.repeat(np.arange(len(frequencies)) + lowest, frequencies)
                self._frequencies[context] = np.repeat(frequencies, frequencies)
                starts = np.cumsum(frequencies) - frequencies
                self._offsets[context] = np.arange(slots) - np.repeat(starts, frequencies)
        self._states = np.frombuffer(stream[: 4 * num_lanes], "<u4").astype(np.uint32)
        self._words = np.frombuffer(stream[4 * num_lanes :], "<u2").astype(np.uint32)
        self._bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
        self._word = self._bit = 0

    def integers(self, contexts: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the next integers; contexts: (n,) the context of each."""
        symbols = self._symbols.ravel().take(self._entries(contexts))
        # a symbol is the sign, the exponent and the leading six bits; integers below 64 have no other bits
        sizes = np.abs(symbols).astype(np.int64)
        exponents = np.maximum(sizes // 32 - 1, 0)
        sizes = (sizes - 32 * exponents) << exponents
        ends = self._bit + np.cumsum(exponents)
        for bit in range(exponents.max(initial=0)):
            (has,) = np.nonzero(exponents > bit)
            sizes[has] += self._bits[(ends - exponents)[has] + bit].astype(np.int64) << bit
        self._bit += int(exponents.sum())
        return np.sign(symbols) * sizes

    def _entries(self, contexts: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return context * 2**14 + slot of each of the next symbols. Integer i is in lane i % n."""
        frequencies, offsets, mask = self._frequencies.ravel(), self._offsets.ravel(), 2**FREQUENCY_BITS - 1
        entries = contexts.astype(np.int64) << FREQUENCY_BITS
        num_lanes = len(self._states)
        for start in range(0, len(entries), num_lanes):
            entry = entries[start : start + num_lanes]
            state = self._states[: len(entry)]
            entry += state & mask
            state >>= FREQUENCY_BITS
            state *= frequencies.take(entry)
            state += offsets.take(entry)
            (low,) = np.nonzero(state < STATE_MINIMUM)
            state[low] = (state[low] << 16) | self._words[self._word : self._word + len(low)]
            self._word += len(low)
        return entries

    def is_at_end(self) -> bool:
        """Return whether everything was read, and the states are those that the encoder began with."""
        has_all = self._word == len(self._words) and (self._bit + 7) // 8 * 8 == len(self._bits)
        return has_all and bool((self._states == STATE_MINIMUM).all())


def read_sections(data: bytes) -> list[bytes]:
    """Return the sections of an artifact. Raises ValueError, one line, for anything but a whole and undamaged one."""
    if data[:4] != MAGIC or len(data) < 10:
        raise ValueError("it is not an artifact of hfgolf")
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ValueError("it is damaged: its bytes do not match their CRC-32")
    if (version := int.from_bytes(data[4:6], "little")) != VERSION:
        raise ValueError(f"its format has version {version}; this program reads version {VERSION}")
    sections, at, end = [], 6, len(data) - 4
    while at < end:
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        sections.append(data[start:at])
    if at != end or len(sections) != 4:
        raise ValueError("it is damaged: its sections do not add up")
    return sections


def read_config(data: bytes) -> dict[str, Any]:
    """Return the model config: what differs from the defaults. Raises ValueError as read_sections does."""
    config: dict[str, Any] = json.loads(read_sections(data)[0])
    return config


def read_tables(section: bytes) -> tuple[int, int, NDArray[np.integer], list[tuple[int, NDArray[np.integer]]]]:
    """Return the number of lanes, the shift of the rest, the histogram of each class, and the tables."""
    # what an artifact claims ends: 4 MiB, and no count leads back
    content = zlib.decompressobj().decompress(section, 2**22)
    numbers: NDArray[np.integer] = np.frombuffer(content, "<i2").astype(np.int64)
    num_lanes, shift, num_classes = (int(number) for number in numbers[:3])
    at = 3 + num_classes
    tables: list[tuple[int, NDArray[np.integer]]] = []
    while at < len(numbers):
        lowest, end = int(numbers[at]), at + 2 + abs(int(numbers[at + 1]))
        tables.append((lowest, numbers[at + 2 : end]))
        at = end
    return num_lanes, shift, numbers[3 : 3 + num_classes], tables


def read_tensors(data: bytes, shapes: Sequence[tuple[int, ...]]) -> list[Quantized | NDArray[np.float32]]:
    """Return the tensors: matrices as integers with their steps, the rest in fp32.

    shapes: of the tensors that the model's state dict has, in its order, each shared tensor once. Raises ValueError as
    read_sections does, or if the artifact holds other shapes. (What is certain, as zeros in a class of their own, takes
    no bits, so more or fewer of them are not noticed: the shapes must be those of the artifact's own header.)
    """
    _, table_section, stream, raw = read_sections(data)
    wrong = ValueError("it does not hold the weights of this model")

    def integers(context: int, count: int, is_there: int = 1) -> NDArray[np.int64]:
        return decoder.integers(np.full(count, context)) if is_there else np.zeros(count, np.int64)

    found: list[Quantized | NDArray[np.float32]] = []
    try:
        num_lanes, shift, class_map, tables = read_tables(table_section)
        decoder = Decoder(tables, num_lanes, stream, raw)
        for shape in shapes:
            (kind,) = integers(KIND, 1)
            if not kind:
                found.append(_rest(integers(REST, int(np.prod(shape))), shift).reshape(shape))
                continue
            rows, columns = shape
            row_base, class_base = (integers(context, 1) for context in (ROW_BASE, CLASS_BASE))
            row_codes = row_base + integers(ROW_CODE, rows)
            row_classes = integers(ROW_CLASS, rows, kind & HAS_ROW_CLASSES)
            column_classes = integers(COLUMN_CLASS, columns, kind & HAS_COLUMN_CLASSES)
            contexts = FIRST_CLASS + class_map[class_base + CLASS_STRIDE * (row_classes[:, None] + column_classes)]
            values = decoder.integers(contexts.ravel()).reshape(shape).astype(np.int32)
            found.append(Quantized(values, row_codes.astype(np.uint8)))
    except (IndexError, ValueError, zlib.error):
        raise wrong from None
    if not decoder.is_at_end():
        raise wrong
    return found


def _rest(integers: NDArray[np.int64], shift: int) -> NDArray[np.float32]:
    """Return fp32 from the bits of fp16 without their sign, shifted right by `shift`, times the sign."""
    sizes = (np.abs(integers) << shift).astype(np.uint16).view(np.float16).astype(np.float32)
    return np.where(integers < 0, -sizes, sizes)


def weights_of(tensors: Iterable[Quantized | NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Return each tensor in fp32."""
    return [tensor.dequantized() if isinstance(tensor, Quantized) else tensor for tensor in tensors]


def weights_sha256(weights: Iterable[NDArray[np.float32]]) -> str:
    """Return the SHA-256 of all weights in fp32, little-endian, one after the other."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(np.ascontiguousarray(weight, "<f4").tobytes())
    return digest.hexdigest()
