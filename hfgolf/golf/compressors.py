"""What other compressors make of the same integers: for the table, never for the artifact.

Owns the list of compressors and how integers are given to them. Needs no package that is not installed anyway; brotli
and constriction take part if they are there.
"""

from __future__ import annotations

import bz2
import importlib
import importlib.util
import lzma
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfgolf.golf.grid import Quantized, entropy_bits

MATRIX_NAMES = ("as stored", "transposed")


@dataclass(frozen=True)
class Compressed:
    """What one compressor makes of all integers. num_bytes: None if it was skipped, and `note` says why.

    order: one of MATRIX_NAMES, the better of the two.
    """

    name: str
    num_bytes: int | None
    order: str = MATRIX_NAMES[0]
    seconds: float = 0.0
    note: str = ""


def compare(matrices: Iterable[Quantized], max_seconds: float = 60.0) -> list[Compressed]:
    """Compress the integers of all matrices with everything at hand, in one stream each, in fixed order.

    max_seconds: no compressor starts after these, and none that would probably end after them: the quick ones come
    first. Steps are not included.
    """
    integers = [matrix.integers for matrix in matrices]
    bits = sum(entropy_bits(matrix) * matrix.size for matrix in integers)
    results = [Compressed("order-0 entropy of each matrix", round(bits / 8))]
    orders = [_as_bytes(integers), _as_bytes([matrix.T for matrix in integers])]
    started_at = time.perf_counter()
    for name, compress, seconds_per_megabyte in _compressors():
        left = max_seconds - (time.perf_counter() - started_at)
        expected = 2 * seconds_per_megabyte * len(orders[0]) / 1e6
        if compress is None:
            results.append(Compressed(name, None, note="not installed"))
        elif expected > left:
            results.append(
                Compressed(name, None, note=f"skipped: takes about {expected:.0f} s, {max(0, left):.0f} left")
            )
        else:
            results.append(_best(name, compress, orders))
    results.append(_constriction(integers))
    return results


def _best(name: str, compress: Callable[[bytes], bytes], orders: Sequence[bytes]) -> Compressed:
    started_at = time.perf_counter()
    sizes = [len(compress(content)) for content in orders]
    best = int(np.argmin(sizes))
    return Compressed(name, sizes[best], MATRIX_NAMES[best], time.perf_counter() - started_at)


def _as_bytes(matrices: Sequence[NDArray[np.int32]]) -> bytes:
    """Return integers as bytes, one each; those that do not fit become -128, and follow at the end in four bytes."""
    joined = np.concatenate([np.empty(0, np.int32), *(matrix.ravel() for matrix in matrices)])
    is_wide = np.abs(joined) > 127
    return np.where(is_wide, -128, joined).astype(np.int8).tobytes() + joined[is_wide].astype("<i4").tobytes()


def _compressors() -> list[tuple[str, Callable[[bytes], bytes] | None, float]]:
    """Return (name, function or None if it is not installed, seconds for a million integers), the quickest first."""
    lzma_filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]

    def huffman_only(content: bytes) -> bytes:
        compressor = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)
        return compressor.compress(content) + compressor.flush()

    return [
        ("zlib 9, Huffman only", huffman_only, 0.05),
        ("bz2 9", lambda content: bz2.compress(content, 9), 0.3),
        ("zlib 9", lambda content: zlib.compress(content, 9), 0.4),
        ("zstd 22", _zstd(), 5.0),
        ("LZMA 9e, lc = lp = pb = 0", lambda content: lzma.compress(content, filters=lzma_filters), 5.0),
        ("LZMA 9e", lambda content: lzma.compress(content, preset=9 | lzma.PRESET_EXTREME), 5.0),
        ("brotli 11", _brotli(), 7.0),
    ]


def _zstd() -> Callable[[bytes], bytes] | None:
    if importlib.util.find_spec("zstandard") is None:
        return None
    compressor = importlib.import_module("zstandard").ZstdCompressor(level=22)
    return lambda content: bytes(compressor.compress(content))


def _brotli() -> Callable[[bytes], bytes] | None:
    if importlib.util.find_spec("brotli") is None:
        return None
    brotli = importlib.import_module("brotli")
    return lambda content: bytes(brotli.compress(content, quality=11, lgwin=24))


def _constriction(matrices: Sequence[NDArray[np.int32]]) -> Compressed:
    """Code each matrix with constriction's range coder and its own histogram, whose bytes are not counted."""
    name = "constriction, a histogram per matrix (not counted)"
    if importlib.util.find_spec("constriction") is None:
        return Compressed(name, None, note="not installed")
    stream = importlib.import_module("constriction").stream
    started_at, encoder = time.perf_counter(), stream.queue.RangeEncoder()
    for matrix in matrices:
        lowest, counts = int(matrix.min()), np.bincount((matrix - matrix.min()).ravel())
        model = stream.model.Categorical((counts / counts.sum()).astype(np.float32), perfect=False)
        encoder.encode((matrix.ravel() - lowest).astype(np.int32), model)
    return Compressed(name, 4 * len(encoder.get_compressed()), seconds=time.perf_counter() - started_at)
