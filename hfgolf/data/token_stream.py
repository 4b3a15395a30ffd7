"""The tokens of one split as an Arrow file, seen as one array without a copy.

Owns the file format and the view. Does not know where tokens come from nor who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth
class TokenStream:
    """The tokens of a split.

    tokens: (num_tokens,) uint16, or uint32 from 65,536 ids; read-only; a view of the memory-mapped file, or a copy.
    piece_tokens, piece_bytes: (num_pieces,) tokens and raw UTF-8 bytes of each piece of text, in order.
    """

    tokens: np.ndarray
    piece_tokens: np.ndarray
    piece_bytes: np.ndarray
    path: Path
    is_in_memory: bool = False

    @property
    def num_bytes(self) -> int:
        """Raw UTF-8 bytes of the text, end-of-text tokens not counted."""
        return int(self.piece_bytes.sum(dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        # a DataLoader worker that is spawned maps the file again, instead of receiving every token through a pipe
        return open_stream, (self.path, self.is_in_memory)


def open_stream(path: Path, is_in_memory: bool = False) -> TokenStream:
    """Map the tokens of a split from its Arrow file, or copy them into memory."""
    tokens = np.from_dlpack(_read_arrow(path)["input_ids"])  # to_numpy would import pandas
    if is_in_memory:
        tokens = tokens.copy()
        tokens.flags.writeable = False
    pieces = _read_arrow(pieces_path(path))
    piece_tokens, piece_bytes = (np.from_dlpack(pieces[name]) for name in ("num_tokens", "num_bytes"))
    return TokenStream(tokens, piece_tokens, piece_bytes, path, is_in_memory)


def write_arrow(path: Path, columns: dict[str, Any]) -> None:
    """Write equally long columns as one record batch, which `datasets` and `open_stream` can map."""
    batch = pa.record_batch(columns)
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)  # more than 2**31 tokens
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)


def _read_arrow(path: Path) -> pa.RecordBatch:
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_next_batch()


def pieces_path(path: Path) -> Path:
    """Return where the counts of the pieces lie that belong to the stream at `path`."""
    return path.with_name(f"{path.stem}-pieces.arrow")
