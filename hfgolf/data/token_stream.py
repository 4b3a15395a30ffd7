"""The tokens of one split: a dataset that `datasets` wrote, read as one stream over its chunks without a copy.

Owns the view, and the check that every id read is in the vocabulary. Does not know where the tokens come from or who
reads them. Reads with pyarrow, because importing `datasets` would take longer than opening the tokens.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hfgolf.data.cache_folder import note_damage
from hfgolf.system.durable import file_sha256


class Stream:
    """Tokens in chunks that are read as one stream, and the pieces of text that they stand for."""

    chunks: tuple[np.ndarray, ...]
    piece_tokens: np.ndarray
    piece_bytes: np.ndarray
    is_target: np.ndarray | None

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens at `indices`, an array of any shape. Indices past the end wrap around."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Raw UTF-8 bytes of the text that the loss counts, end-of-text tokens none; 0 if nobody counted them."""
        return int(self.piece_bytes.sum(dtype=np.int64))

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return all tokens as one array, (num_tokens,): a copy if there are several chunks."""
        return _joined(self.chunks)

    @cached_property
    def ends(self) -> np.ndarray:
        """Return the number of tokens up to the end of each chunk, (num_chunks,) int64."""
        return np.cumsum([len(chunk) for chunk in self.chunks], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])


@dataclass(frozen=True, eq=False)  # == on arrays is not a single bool
class TokenStream(Stream):
    """The tokens of a split.

    chunks: the tokens in order, each uint16, or uint32 for a vocabulary above 65,536. Read-only views of `content`.
    piece_tokens, piece_bytes: (num_pieces,) number of tokens and raw UTF-8 bytes of each piece of text, in order.
    content: the Arrow file of the dataset, memory-mapped or copied into memory.
    vocab_size: ids must be below this.
    is_target: (num_tokens,) uint8, 1 where the loss counts a token as a target: the assistant's tokens in
        conversations, whose `piece_bytes` are those of the assistant's text. None if it counts all.
    """

    chunks: tuple[np.ndarray, ...]
    piece_tokens: np.ndarray
    piece_bytes: np.ndarray
    path: Path
    content: mmap.mmap | bytes = field(repr=False)
    vocab_size: int
    is_target: np.ndarray | None = None

    @property
    def is_in_memory(self) -> bool:
        return isinstance(self.content, bytes)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the file as one array, and how much further on each chunk is in the file than in the stream.

        So one vectorized read gathers tokens of any chunks.
        """
        dtype = self.chunks[0].dtype
        file = np.frombuffer(self.content, dtype, len(self.content) // dtype.itemsize)
        begins = [(_address(chunk) - _address(file)) // dtype.itemsize for chunk in self.chunks]
        return file, np.array(begins) - self.ends + [len(chunk) for chunk in self.chunks]

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens at `indices`, an array of any shape. Indices past the end wrap around.

        Raises DamagedCacheError for an id outside the vocabulary (an embedding would fail with an obscure error), and
        for a truncated file (a read past its end would kill the process).
        """
        if isinstance(self.content, mmap.mmap) and self.content.size() != len(self.content):
            raise note_damage(self.path.parents[1], f"{self.name} was truncated while it was being read")
        file, shifts = self._places
        indices = indices % len(self)
        ids = file.take(indices + shifts[np.searchsorted(self.ends, indices, side="right")])
        if (largest := ids.max(initial=0)) >= self.vocab_size:
            reason = f"{self.name} contains id {largest}, but the vocabulary has {self.vocab_size} entries"
            raise note_damage(self.path.parents[1], reason)
        return ids

    @property
    def name(self) -> str:
        """The file, from the folder of the cache."""
        return str(self.path.relative_to(self.path.parents[1]))

    def sha256(self) -> str:
        """Return the SHA-256 of the file, as training reads it: from memory if it was copied there."""
        # Hash the file, not the map: if the file is truncated meanwhile, reading the map would kill the process.
        return hashlib.sha256(self.content).hexdigest() if isinstance(self.content, bytes) else file_sha256(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned DataLoader worker maps the file again instead of receiving every token through a pipe.
        return open_stream, (self.path, self.is_in_memory, self.vocab_size)


def stream_path(folder: Path, split: str) -> Path:
    """Return the Arrow file of a split in the folder of a cache."""
    return folder / split / "data-00000-of-00001.arrow"


def open_stream(path: Path, is_in_memory: bool = False, vocab_size: int = 2**32) -> TokenStream:
    """Memory-map the tokens of a split from its Arrow file, or copy them into memory.

    Raises ValueError, with the reason, if the file is too damaged to open, or OSError if it cannot be read.
    """
    content: mmap.mmap | bytes
    if is_in_memory:
        content = path.read_bytes()
    else:
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        batches = list(pa.ipc.open_stream(pa.py_buffer(content)))
        for batch in batches:
            batch.validate()
        ids = [batch["input_ids"] for batch in batches]
        chunks = tuple(np.from_dlpack(one.values) for one in ids)  # to_numpy would import pandas
        piece_tokens = _joined([np.diff(np.from_dlpack(one.offsets)).astype(np.uint32) for one in ids])
        piece_bytes = _joined([np.from_dlpack(batch["num_bytes"]) for batch in batches])
        masks = [np.from_dlpack(batch["is_target"].values) for batch in batches if "is_target" in batch.schema.names]
    except (pa.ArrowException, OSError, KeyError, TypeError, BufferError, AttributeError, ValueError) as error:
        raise ValueError(f"{path.parent.name}/{path.name} is not a valid Arrow file of tokens ({error})") from error
    if piece_tokens.sum(dtype=np.int64) != sum(map(len, chunks)):
        raise ValueError(f"the pieces in {path.parent.name}/{path.name} do not add up to its tokens")
    return TokenStream(chunks, piece_tokens, piece_bytes, path, content, vocab_size, _joined(masks) if masks else None)


def _joined(chunks: Sequence[np.ndarray]) -> np.ndarray:
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
