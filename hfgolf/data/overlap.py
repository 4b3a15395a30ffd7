"""Which validation documents also train, word for word: told with the figures that they flatter.

Owns the comparison. It reads the tokens of a cache, whatever they were made from, so two documents are the same if all
their tokens are; a near duplicate is another document. A document is what a separator begins: a text file, a row, a
conversation, or one of the two parts that data.split contiguous cuts a document into. Shards are not compared.

Memory: 17 bytes per validation document, and some megabytes. Most training documents are dismissed by their length and
four of their tokens; only the others are hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from hfgolf.data.token_stream import TokenStream

_PIECES, _TOKENS = 2**16, 2**20  # at once
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, with well mixed bits: 2**64 divided by the golden ratio


class _Documents(NamedTuple):
    """Documents in a row: the token that each starts at, the token after its last, and its bytes; (n,) int64."""

    starts: np.ndarray
    ends: np.ndarray
    num_bytes: np.ndarray


def count_overlap(train: TokenStream, val: TokenStream, separator: int) -> dict[str, Any]:
    """Return columns of a summary: how many validation documents there are, how many train, and their share of bytes.

    separator: the token that begins each document, and nothing else.
    """
    sketches, hashes, num_bytes = [], [], []
    for documents in _documents(val, separator):
        sketches.append(_sketches(val, documents))
        hashes.append(_hashes(val, documents))
        num_bytes.append(documents.num_bytes)
    known, wanted, places = np.unique(np.concatenate(sketches)), *np.unique(np.concatenate(hashes), return_inverse=True)
    trains = np.zeros(len(wanted), bool)
    for documents in _documents(train, separator):
        is_like_one = _find(known, _sketches(train, documents))[1]
        found, is_same = _find(wanted, _hashes(train, _Documents(*(part[is_like_one] for part in documents))))
        trains[found[is_same]] = True
    is_trained, all_bytes = trains[places], np.concatenate(num_bytes)
    share = float(all_bytes[is_trained].sum() / max(1, all_bytes.sum()))
    return {
        "val_documents": len(is_trained),
        "val_documents_in_train": int(is_trained.sum()),
        "val_share_in_train": share,
    }


def _documents(stream: TokenStream, separator: int) -> Iterator[_Documents]:
    """Yield all documents of a stream, some at a time."""
    token = num_bytes = 0
    last = np.zeros((2, 0), np.int64)  # the start of a document whose end is not known yet: its token, and the bytes
    for begin in range(0, len(stream.piece_tokens), _PIECES):
        counts, sizes = (
            array[begin : begin + _PIECES].astype(np.int64) for array in (stream.piece_tokens, stream.piece_bytes)
        )
        starts = token + np.cumsum(counts) - counts
        is_start = counts > 0  # the tokenizer may drop all of a piece
        is_start[is_start] = stream.read(starts[is_start]) == separator
        places = np.stack([starts, num_bytes + np.cumsum(sizes) - sizes])[:, is_start]
        token, num_bytes = token + int(counts.sum()), num_bytes + int(sizes.sum())
        bounds, sums = np.hstack([last, places])
        last = places[:, -1:] if places.size else last
        yield _Documents(bounds[:-1], bounds[1:], np.diff(sums))
    bounds, sums = np.hstack([last, [[token], [num_bytes]]])
    yield _Documents(bounds[:-1], bounds[1:], np.diff(sums))


def _sketches(stream: TokenStream, documents: _Documents) -> np.ndarray:
    """Return a number for each document that is equal for equal documents, (n,) uint64: of its length and 4 tokens."""
    starts, ends, _ = documents
    sketches = (ends - starts).astype(np.uint64)
    for quarter in (1, 2, 3, 4):
        sketches = sketches * _MULTIPLIER + stream.read(starts + (ends - starts - 1) * quarter // 4)
    return sketches


def _hashes(stream: TokenStream, documents: _Documents) -> np.ndarray:
    """Return the first 64 bits of the SHA-256 of each document's tokens, (n,) uint64."""
    digests = b""
    for start, end in zip(documents.starts.tolist(), documents.ends.tolist(), strict=True):
        digest = hashlib.sha256()
        for place in range(start, end, _TOKENS):
            digest.update(stream.read(np.arange(place, min(end, place + _TOKENS))).data)
        digests += digest.digest()[:8]
    return np.frombuffer(digests, np.uint64)


def _find(known: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each value is in a sorted array, and whether it is there."""
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return places, known[places] == values
