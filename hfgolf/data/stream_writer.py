"""Write the tokens of a corpus: text, rows of ids or conversations as the streams of both splits.

Owns the encoding, several tables of text at a time, and the order of the tokens. Does not know where the files go.

A split is one stream of tokens: for each document, an end-of-text token, what the tokenizer itself puts in front of a
text (`document_start`), and then the document's ids. So end-of-text separates documents and gives each document's first
token a context. A second file stores each piece's number of tokens (including these) and raw UTF-8 bytes, so that an
evaluation on some of the pieces knows their exact bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerFast

from hfgolf.data.case_operators import has_case_operators
from hfgolf.data.chat import encoded_conversations, sample_texts
from hfgolf.data.corpus import SPLITS, Corpus
from hfgolf.data.pieces import ROWS_PER_BATCH, evenly_sampled, num_text_bytes, texts
from hfgolf.data.ready_ids import encoded_rows, find_other_encoding
from hfgolf.data.token_stream import StreamPart, open_stream, pieces_path, write_arrow
from hfgolf.data.tokenizer import (
    Encoded,
    Encoder,
    begin_texts,
    build_encoder,
    decode_texts,
    document_start,
    embedding_rows,
    find_tokenizer_loss,
)
from hfgolf.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

_log = logging.getLogger(__name__)
_PROGRESS_SECONDS = 10
_PATIENCE_SECONDS = 60  # with a table of at most 2 MB, which takes a second or two
_ROUND_TRIP_BYTES = 2**18  # evenly sampled validation text to decode once, in about a tenth of a second
MAX_TABLES_IN_FLIGHT = 2


def write_streams(
    corpus: Corpus,
    kind: str,
    tokenizer: PreTrainedTokenizerFast,
    pieces: Callable[[], dict[str, Dataset]],
    folder: Path,
    scratch: Path,
) -> str | None:
    """Write the tokens of both splits to `folder`. Return why the tokenizer is not lossless, or None if it is.

    kind: config.tokenizer.kind. pieces: returns the text of each split (Corpus.write_pieces); called only for text.
    scratch: a folder for files that must be decompressed first.
    """
    encode, size = build_encoder(tokenizer, kind), embedding_rows(tokenizer)
    if corpus.data.ids_column is not None:
        for split in SPLITS:
            write_stream(split, encoded_rows(corpus, split, tokenizer, scratch), size, folder)
        return find_other_encoding(corpus, tokenizer, encode, scratch)
    if corpus.data.messages_column is not None:
        for split in SPLITS:
            write_stream(split, encoded_conversations(corpus, split, tokenizer, scratch), size, folder)
        sample = sample_texts(corpus, scratch)
        return find_tokenizer_loss(tokenizer, sample, encode(sample))
    for split in SPLITS:
        write_stream(split, _encode(split, pieces()[split], tokenizer, encode), size, folder)
    return find_tokenizer_loss(tokenizer, *_read_back(pieces()["val"], folder / "val.arrow", tokenizer))


def write_stream(split: str, parts: Iterable[StreamPart], vocab_size: int, folder: Path) -> None:
    """Write the two Arrow files of a split, or none if it has no tokens.

    The ids and the mask first go to raw binary files. The Arrow file must be a single record batch, because only that
    maps to one contiguous array, and memory must stay bounded. vocab_size: all ids are below it.
    """
    path, raw, raw_mask = folder / f"{split}.arrow", folder / "ids.bin", folder / "mask.bin"
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    num_tokens, num_bytes = [], []
    with open(raw, "wb") as file, open(raw_mask, "wb") as mask_file:
        for part in parts:
            file.write(part.ids.astype(dtype).data)  # tofile does not report why a write failed
            if part.is_target is not None:
                mask_file.write(part.is_target.astype(np.uint8).data)
            num_tokens.append(part.piece_tokens)
            num_bytes.append(part.piece_bytes)
    if num_tokens:
        columns = {"input_ids": _mapped(raw, dtype)}
        if raw_mask.stat().st_size:
            columns["is_target"] = _mapped(raw_mask, np.dtype(np.uint8))
        write_arrow(path, columns)
        pieces = {"num_tokens": np.concatenate(num_tokens), "num_bytes": np.concatenate(num_bytes)}
        write_arrow(pieces_path(path), pieces)
    raw.unlink()
    raw_mask.unlink()


def _mapped(path: Path, dtype: np.dtype) -> pa.Array:
    values = np.memmap(path, dtype, "r")
    return pa.Array.from_buffers(pa.from_numpy_dtype(dtype), len(values), [None, pa.py_buffer(values)])


def _encode(split: str, pieces: Dataset, tokenizer: PreTrainedTokenizerFast, encode: Encoder) -> Iterator[StreamPart]:
    """Yield the tokens of the text, one table of pieces at a time.

    Raises UserError if case operators don't restore a piece.
    """
    is_transformed = has_case_operators(tokenizer.backend_tokenizer)
    start = np.array(document_start(tokenizer), np.uint32)
    progress = _Progress(f"tokenizing {split}", num_text_bytes(pieces))
    for table, (ids, num_ids) in encode_ahead(pieces, encode):
        if is_transformed and decode_texts(tokenizer, (ids, num_ids)) != table["text"].to_pylist():
            raise UserError("tokenizer.case_operators: true does not restore this text exactly; set it to false.")
        is_start = table["is_start"].to_numpy()
        num_tokens = np.array(num_ids, np.uint32)
        ends = np.cumsum(num_tokens, dtype=np.int64)
        ids = begin_texts(ids, (ends - num_tokens)[is_start], start)
        num_bytes = pc.binary_length(table["text"]).to_numpy()  # of the raw UTF-8 text, not of decoded tokens
        yield StreamPart(ids, num_tokens + is_start * np.uint32(len(start)), num_bytes.astype(np.uint32))
        progress.add(int(num_bytes.sum()))
    progress.end()


def _read_back(pieces: Dataset, path: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[list[str], Encoded]:
    """Return evenly sampled pieces and their ids, which are read from the stream at `path`."""
    stream, rows = open_stream(path), evenly_sampled(pieces, _ROUND_TRIP_BYTES)
    sample = pieces.select(rows)
    ends = np.cumsum(stream.piece_tokens, dtype=np.int64)[rows]
    num_ids = stream.piece_tokens[rows] - np.array(sample["is_start"][:]) * np.uint32(len(document_start(tokenizer)))
    ids = [stream.tokens[end - count : end] for end, count in zip(ends, num_ids, strict=True)]
    return list(texts(sample)), (np.concatenate(ids), num_ids.tolist())


def encode_ahead(pieces: Dataset, encode: Encoder) -> Iterator[tuple[pa.Table, Encoded]]:
    """Yield tables of pieces with their encodings, in order, while the next tables are being encoded."""
    waiting: deque[tuple[pa.Table, Future[Encoded]]] = deque()
    # Two at once: while one table keeps the cores busy, the ids of the other are extracted, which holds the GIL.
    may_run = threading.Semaphore(MAX_TABLES_IN_FLIGHT)
    for table in pieces.with_format("arrow").iter(batch_size=ROWS_PER_BATCH):
        waiting.append((table, _encode_in_thread(encode, table["text"].to_pylist(), may_run)))
        if len(waiting) > MAX_TABLES_IN_FLIGHT:  # bounds the memory
            yield _encoded(*waiting.popleft())
    for done, encoded in waiting:
        yield _encoded(done, encoded)


def _encode_in_thread(encode: Encoder, texts: list[str], may_run: threading.Semaphore) -> Future[Encoded]:
    """Start to encode texts in a thread that no process waits for when it ends, as it would for an executor's.

    A tokenizer's regular expression may never end.
    """
    future: Future[Encoded] = Future()

    def work() -> None:
        with may_run:
            try:
                future.set_result(encode(texts))
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=work, name="tokenize", daemon=True).start()
    return future


def _encoded(table: pa.Table, future: Future[Encoded]) -> tuple[pa.Table, Encoded]:
    """Return a table and its encoding. Warns if that takes very long."""
    done, _ = wait([future], _PATIENCE_SECONDS)
    if not done:
        _log.warning(
            "tokenizing: no progress for %s s in %s pieces of text, of which the first begins %s; the tokenizer's"
            " regular expressions may take forever on them. Ctrl-C ends this.",
            _PATIENCE_SECONDS,
            len(table),
            ascii(table["text"][0].as_py()[:40]),
        )
    return table, future.result()


class _Progress:
    """Log the progress of a long pass over text every few seconds, and its speed at the end."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self.name = name
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.started_at = self.logged_at = time.perf_counter()

    def add(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        now = time.perf_counter()
        if now - self.logged_at >= _PROGRESS_SECONDS:
            self.logged_at = now
            speed = self.done_bytes / (now - self.started_at)
            left_seconds = (self.total_bytes - self.done_bytes) / speed
            done, total = self.done_bytes / 1e6, self.total_bytes / 1e6
            _log.info("%s: %.0f of %.0f MB, %.1f MB/s, %.0f s left", self.name, done, total, speed / 1e6, left_seconds)

    def end(self) -> None:
        seconds = time.perf_counter() - self.started_at
        megabytes = self.done_bytes / 1e6
        _log.debug("%s: %.1f MB in %.1f s (%.1f MB/s)", self.name, megabytes, seconds, megabytes / seconds)
