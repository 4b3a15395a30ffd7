"""Pieces: documents cut to a bounded length, stored as rows of an Arrow file that `datasets` maps into memory.

Nothing downstream ever sees a longer text, however long the document. Does not know source files or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from datasets import Dataset

PIECE_CHARACTERS = 8192  # small enough that an evaluation budget of a few thousand tokens holds whole pieces
ROWS_PER_BATCH = 256  # at most 2 million characters
_SCHEMA = pa.schema({"text": pa.string(), "is_start": pa.bool_()})
# Cuts that do not change how GPT-2's pre-tokenizer splits the text: after a single newline, or else before a single
# space. (pattern, offset of the cut from the end of the match). The greedy start takes all of the text and gives back
# characters until the rest matches, so it finds the last cut first. After it comes the literal character, because `re`
# looks for that quickly, and much more slowly for a lookbehind.
_SAFE_CUTS = ((re.compile(r"(?s:.*)\n(?<=\S\n)(?=\S)"), 0), (re.compile(r"(?s:.*) (?<=\S )(?=\S)"), -1))


class RowWriter:
    """Write rows to an Arrow file, some at a time. Use it in a `with` block, which closes the file."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self._schema = schema
        self._sink = pa.OSFile(str(path), "wb")
        self._file = pa.ipc.new_stream(self._sink, schema)
        self._rows: list[tuple[Any, ...]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._write_rows()
        self._file.close()
        self._sink.close()

    def append(self, *row: Any) -> None:
        """Add a row: a value for each column."""
        self._rows.append(row)
        if len(self._rows) == ROWS_PER_BATCH:
            self._write_rows()

    def _write_rows(self) -> None:
        columns = [pa.array([row[i] for row in self._rows], kind) for i, kind in enumerate(self._schema.types)]
        self._file.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows = []


class PieceWriter(RowWriter):
    """Cut documents into pieces and write them as rows, {"text": str, "is_start": bool}.

    `is_start` marks the first piece of a document.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, _SCHEMA)
        self._text = ""  # the uncut rest of the current document
        self._is_start = True

    def add_document(self, blocks: Iterable[str]) -> None:
        """Write one document, given as consecutive blocks of its text."""
        for block in blocks:
            self.add(block)
        self.end_document()

    def add(self, text: str, max_rest: int = PIECE_CHARACTERS + 1) -> None:
        """Add the next text, of any length, to the current document. A cut depends on the character after it: + 1."""
        text, start = self._text + text, 0
        while len(text) - start > max_rest:
            end = _cut(text, start)
            self._append(text[start:end])
            start = end
        self._text = text[start:]

    def end_document(self) -> None:
        """Write the rest of the document. An empty document writes nothing."""
        self.add("", PIECE_CHARACTERS)
        if self._text:
            self._append(self._text)
        self._text, self._is_start = "", True

    def _append(self, piece: str) -> None:
        self.append(piece, self._is_start)
        self._is_start = False


def _cut(text: str, start: int) -> int:
    """Return the end of the piece that starts at `start`: the last safe cut in its second half, or else full length."""
    end = start + PIECE_CHARACTERS
    for pattern, offset in _SAFE_CUTS:
        if match := pattern.match(text, start + PIECE_CHARACTERS // 2, end + 1):
            return match.end() + offset
    return end


def evenly_sampled(pieces: Dataset, max_bytes: int) -> range:
    """Return the indices of every n-th piece, with the smallest n that keeps the text within about `max_bytes`."""
    return range(0, len(pieces), -(-num_text_bytes(pieces) // max_bytes))


def num_text_bytes(pieces: Dataset) -> int:
    """Return the total number of UTF-8 bytes in all pieces."""
    tables = pieces.with_format("arrow").iter(batch_size=ROWS_PER_BATCH)
    return sum(pc.sum(pc.binary_length(table["text"])).as_py() for table in tables)


def texts(pieces: Dataset) -> Iterator[str]:
    """Yield the text of each piece."""
    for batch in pieces.iter(batch_size=ROWS_PER_BATCH):
        yield from batch["text"]
