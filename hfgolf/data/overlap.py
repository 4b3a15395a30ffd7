"""Which validation documents also train, word for word: told with the figures that they flatter.

Owns the comparison. It reads the tokens of a cache, whatever they were made from, so two documents are the same if all
their tokens are; a near duplicate is another document. A document is what a separator begins: a text file, a row, a
conversation, or one of the two parts that data.split contiguous cuts a document into. Shards are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hfgolf.data.token_stream import TokenStream

_AT_ONCE = 2**16


def count_overlap(train: TokenStream, val: TokenStream, separator: int) -> dict[str, Any]:
    """Return columns of a summary: how many validation documents there are, how many train, and their share of bytes.

    separator: the token that begins each document, and nothing else.
    """
    documents = list(_documents(val, separator))
    trained = {digest for digest, _ in documents}.intersection(digest for digest, _ in _documents(train, separator))
    sizes = [size for digest, size in documents if digest in trained]
    return {
        "val_documents": len(documents),
        "val_documents_in_train": len(sizes),
        "val_share_in_train": sum(sizes) / max(1, sum(size for _, size in documents)),
    }


def _documents(stream: TokenStream, separator: int) -> Iterator[tuple[bytes, int]]:
    """Yield a 64-bit hash of the tokens of each document, and its raw UTF-8 bytes."""
    pieces = zip(_numbers(stream.piece_tokens), _numbers(stream.piece_bytes), strict=True)
    digest: Any = None
    document_bytes = 0
    for chunk in stream.chunks:  # each holds whole pieces
        end = 0
        while end < len(chunk):
            num_tokens, num_bytes = next(pieces)
            ids, end = chunk[end : end + num_tokens], end + num_tokens
            if num_tokens and ids[0] == separator:  # the tokenizer may drop all of a piece
                if digest is not None:
                    yield digest.digest(), document_bytes
                digest, document_bytes = hashlib.blake2b(digest_size=8), 0
            digest.update(ids.data)
            document_bytes += num_bytes
    yield digest.digest(), document_bytes + sum(num_bytes for _, num_bytes in pieces)


def _numbers(array: np.ndarray) -> Iterator[int]:
    """Yield the numbers in an array as Python's, which are faster, without a list of all."""
    for start in range(0, len(array), _AT_ONCE):
        yield from array[start : start + _AT_ONCE].tolist()
