"""The tokens of one split as an Arrow file, seen as one array without a copy.

Owns the file format, the view, and that no id is read that the vocabulary does not have. Does not know where tokens
come from nor who reads them.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hfgolf.data.manifest import note_damage
from hfgolf.durable import file_sha256


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth
class TokenStream:
    """The tokens of a split.

    tokens: (num_tokens,) uint16, or uint32 from 65,536 ids; read-only; a view of `content`.
    piece_tokens, piece_bytes: (num_pieces,) tokens and raw UTF-8 bytes of each piece of text, in order.
    content: the Arrow file of the tokens, memory-mapped or read into memory.
    vocab_size: ids from this on are not in the vocabulary.
    """

    tokens: np.ndarray
    piece_tokens: np.ndarray
    piece_bytes: np.ndarray
    path: Path
    content: mmap.mmap | bytes = field(repr=False)
    pieces_content: bytes = field(repr=False)
    vocab_size: int

    @property
    def is_in_memory(self) -> bool:
        return isinstance(self.content, bytes)

    @property
    def num_bytes(self) -> int:
        """Raw UTF-8 bytes of the text, end-of-text tokens not counted."""
        return int(self.piece_bytes.sum(dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens at `places`, an array of any shape; those past the end begin again at the start.

        Raises DamagedCacheError for an id that the vocabulary does not have (an embedding would fail without saying
        why) and for a file that has been cut short (a read past its end would kill the process).
        """
        if isinstance(self.content, mmap.mmap) and self.content.size() != len(self.content):
            raise note_damage(self.path.parent, f"{self.path.name} was cut short while it was read")
        ids = self.tokens.take(places, mode="wrap")
        if (largest := ids.max(initial=0)) >= self.vocab_size:
            reason = f"{self.path.name} holds id {largest}, but the vocabulary has {self.vocab_size} entries"
            raise note_damage(self.path.parent, reason)
        return ids

    def hashes(self) -> Iterator[tuple[str, str]]:
        """Yield (name, SHA-256) of each of its files, as they are read here: from memory if they were copied there."""
        pieces = pieces_path(self.path)
        yield pieces.name, hashlib.sha256(self.pieces_content).hexdigest()
        in_memory = isinstance(self.content, bytes)
        # the file, not its map: of one cut short meanwhile, a map would kill the process
        yield self.path.name, hashlib.sha256(self.content).hexdigest() if in_memory else file_sha256(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        # a DataLoader worker that is spawned maps the file again, instead of receiving every token through a pipe
        return open_stream, (self.path, self.is_in_memory, self.vocab_size)


def open_stream(path: Path, is_in_memory: bool = False, vocab_size: int = 2**32) -> TokenStream:
    """Map the tokens of a split from its Arrow file, or copy them into memory.

    Raises ValueError, with the reason, if its files are damaged so that they cannot be opened, else OSError.
    """
    content: mmap.mmap | bytes
    if is_in_memory:
        content = path.read_bytes()
    else:
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pieces_content = pieces_path(path).read_bytes()
    try:
        tokens = np.from_dlpack(_read_arrow(content)["input_ids"])  # to_numpy would import pandas
        pieces = _read_arrow(pieces_content)
        piece_tokens, piece_bytes = (np.from_dlpack(pieces[name]) for name in ("num_tokens", "num_bytes"))
    except (pa.ArrowException, OSError, KeyError, TypeError, BufferError, StopIteration) as error:
        raise ValueError(f"{path.name} or {pieces_path(path).name} is not Arrow ({error})") from error
    if piece_tokens.sum(dtype=np.int64) != len(tokens):
        raise ValueError(f"{path.name} and {pieces_path(path).name} do not belong together")
    return TokenStream(tokens, piece_tokens, piece_bytes, path, content, pieces_content, vocab_size)


def write_arrow(path: Path, columns: dict[str, Any]) -> None:
    """Write equally long columns as one record batch, which `datasets` and `open_stream` can map."""
    batch = pa.record_batch(columns)
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)  # more than 2**31 tokens
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)


def _read_arrow(content: mmap.mmap | bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(pa.py_buffer(content)).read_next_batch()


def pieces_path(path: Path) -> Path:
    """Return where the counts of the pieces are that belong to the stream at `path`."""
    return path.with_name(f"{path.stem}-pieces.arrow")
