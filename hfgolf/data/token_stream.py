"""The tokens of one split: an Arrow file viewed as one array without a copy.

Owns the file format, the view, and the check that every id read is in the vocabulary. Does not know where the tokens
come from or who reads them.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hfgolf.data.manifest import note_damage
from hfgolf.durable import file_sha256


class StreamPart(NamedTuple):
    """Some pieces of text as the tokens of a stream: ids, each piece's tokens and raw UTF-8 bytes, and the mask."""

    ids: np.ndarray
    piece_tokens: np.ndarray
    piece_bytes: np.ndarray
    is_target: np.ndarray | None = None
    """As in TokenStream."""


@dataclass(frozen=True, eq=False)  # == on arrays is not a single bool
class TokenStream:
    """The tokens of a split.

    tokens: (num_tokens,) uint16, or uint32 for a vocabulary above 65,536. A read-only view of `content`.
    piece_tokens, piece_bytes: (num_pieces,) number of tokens and raw UTF-8 bytes of each piece of text, in order.
    content: the Arrow file of the tokens, memory-mapped or copied into memory.
    vocab_size: ids must be below this.
    is_target: (num_tokens,) uint8, 1 where the loss counts a token as a target: the assistant's tokens in
        conversations, whose `piece_bytes` are those of the assistant's text. None if it counts all.
    """

    tokens: np.ndarray
    piece_tokens: np.ndarray
    piece_bytes: np.ndarray
    path: Path
    content: mmap.mmap | bytes = field(repr=False)
    pieces_content: bytes = field(repr=False)
    vocab_size: int
    is_target: np.ndarray | None = None

    @property
    def is_in_memory(self) -> bool:
        return isinstance(self.content, bytes)

    @property
    def num_bytes(self) -> int:
        """Raw UTF-8 bytes of the text that the loss counts. End-of-text tokens count zero bytes."""
        return int(self.piece_bytes.sum(dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens at `indices`, an array of any shape. Indices past the end wrap around.

        Raises DamagedCacheError for an id outside the vocabulary (an embedding would fail with an obscure error), and
        for a truncated file (a read past its end would kill the process).
        """
        if isinstance(self.content, mmap.mmap) and self.content.size() != len(self.content):
            raise note_damage(self.path.parent, f"{self.path.name} was truncated while it was being read")
        ids = self.tokens.take(indices, mode="wrap")
        if (largest := ids.max(initial=0)) >= self.vocab_size:
            reason = f"{self.path.name} contains id {largest}, but the vocabulary has {self.vocab_size} entries"
            raise note_damage(self.path.parent, reason)
        return ids

    def hashes(self) -> Iterator[tuple[str, str]]:
        """Yield (name, SHA-256) of each file, as training reads it: from memory if it was copied there."""
        pieces = pieces_path(self.path)
        yield pieces.name, hashlib.sha256(self.pieces_content).hexdigest()
        in_memory = isinstance(self.content, bytes)
        # Hash the file, not the map: if the file is truncated meanwhile, reading the map would kill the process.
        yield self.path.name, hashlib.sha256(self.content).hexdigest() if in_memory else file_sha256(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned DataLoader worker maps the file again instead of receiving every token through a pipe.
        return open_stream, (self.path, self.is_in_memory, self.vocab_size)


def open_stream(path: Path, is_in_memory: bool = False, vocab_size: int = 2**32) -> TokenStream:
    """Memory-map the tokens of a split from its Arrow file, or copy them into memory.

    Raises ValueError, with the reason, if the files are too damaged to open, or OSError if they cannot be read.
    """
    content: mmap.mmap | bytes
    if is_in_memory:
        content = path.read_bytes()
    else:
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pieces_content = pieces_path(path).read_bytes()
    try:
        columns = _read_arrow(content)
        tokens = np.from_dlpack(columns["input_ids"])  # to_numpy would import pandas
        is_target = np.from_dlpack(columns["is_target"]) if "is_target" in columns.schema.names else None
        pieces = _read_arrow(pieces_content)
        piece_tokens, piece_bytes = (np.from_dlpack(pieces[name]) for name in ("num_tokens", "num_bytes"))
    except (pa.ArrowException, OSError, KeyError, TypeError, BufferError, StopIteration) as error:
        raise ValueError(f"{path.name} or {pieces_path(path).name} is not a valid Arrow file ({error})") from error
    if piece_tokens.sum(dtype=np.int64) != len(tokens):
        raise ValueError(f"{path.name} and {pieces_path(path).name} do not belong together")
    return TokenStream(tokens, piece_tokens, piece_bytes, path, content, pieces_content, vocab_size, is_target)


def write_arrow(path: Path, columns: dict[str, Any]) -> None:
    """Write columns of equal length as one record batch, which `datasets` and `open_stream` can map."""
    batch = pa.record_batch(columns)
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)  # more than 2**31 tokens
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)


def _read_arrow(content: mmap.mmap | bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(pa.py_buffer(content)).read_next_batch()


def pieces_path(path: Path) -> Path:
    """Return the path of the piece counts that belong to the stream at `path`."""
    return path.with_name(f"{path.stem}-pieces.arrow")
