"""Write the tokens of a corpus: text, rows of ids or conversations, by `Dataset.map` to a dataset per split.

A split is one stream of tokens: for each document, what begins it (`tokenizer.document_start`) and then its ids. A row
is a piece of a document: its `input_ids` (these included) and `num_bytes`, its raw UTF-8 bytes.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from hfgolf.data.case_operators import has_case_operators
from hfgolf.data.chat import ConversationEncoder
from hfgolf.data.corpus import SPLITS, Corpus
from hfgolf.data.documents import is_learned
from hfgolf.data.pieces import ROWS_PER_BATCH, evenly_sampled, texts
from hfgolf.data.tokenizer import (
    Encoder,
    build_encoder,
    decode_texts,
    document_start,
    embedding_rows,
    find_tokenizer_loss,
)
from hfgolf.system.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

_log = logging.getLogger(__name__)
_Outcome = TypeVar("_Outcome")
_PROGRESS_SECONDS = 10
_PATIENCE_SECONDS = 60  # with at most 2 MB of text, which take a second or two
_ROUND_TRIP_BYTES = 2**18  # evenly sampled validation text to encode and decode once, in about a fifth of a second


def write_streams(
    corpus: Corpus,
    kind: str,
    tokenizer: PreTrainedTokenizerFast,
    pieces: Callable[[], dict[str, Dataset]],
    folder: Path,
    scratch: Path,
    fingerprint: str,
) -> str | None:
    """Save the tokens of both splits to `folder`. Return why the tokenizer is not lossless, or None if it is.

    kind: config.tokenizer.kind. pieces: returns the text of each split (Corpus.write_pieces); called only for text.
    scratch: a folder for what is needed only for a while. fingerprint: that of the datasets, which names the tokens.

    Raises UserError if a row does not fit the tokenizer, or if a split is empty.
    """
    from datasets import DatasetDict, Features, List, Value

    encode = partial(_encode_patiently, build_encoder(tokenizer, kind))
    is_chat, is_ids = corpus.data.messages_column is not None, corpus.data.ids_column is not None
    rows = corpus.write_rows(scratch / "rows") if is_chat or is_ids else pieces()
    size = embedding_rows(tokenizer)
    dtype = "uint16" if size <= 2**16 else "uint32"
    encode_rows: Callable[[Any], dict[str, Any]] = partial(_encode_texts, tokenizer, encode, dtype)
    features = {"input_ids": List(Value(dtype)), "num_bytes": Value("uint32")}
    if is_chat:
        encode_rows = partial(_encode_conversations, ConversationEncoder(tokenizer), dtype)
        features["is_target"] = List(Value("uint8"))
    elif is_ids:
        encode_rows = partial(_begin_ids, tokenizer, size, dtype)
    tokens: dict[str, Dataset] = {}
    for split in SPLITS:
        options = {"cache_file_name": str(scratch / f"{split}-tokens.arrow"), "new_fingerprint": fingerprint}
        tokens[split] = _map(f"tokenizing {split}", rows[split], encode_rows, features=Features(features), **options)
        corpus.require_text(split, len(tokens[split]))
        if is_chat and (num_skipped := len(rows[split]) - len(tokens[split])):
            counts = split, num_skipped, len(rows[split])
            _log.info("%s: skipped %d of %d conversations without an assistant's turn to learn", *counts)
    with _progress_bars(False):
        DatasetDict(tokens).save_to_disk(folder, num_shards=dict.fromkeys(SPLITS, 1))
    if is_ids:
        return _find_other_encoding(rows["val"], tokenizer, size, encode, corpus.data.ids_column)
    if is_chat:
        sample = [message["content"] for row in rows["val"][:ROWS_PER_BATCH]["content"] for message in json.loads(row)]
    else:
        sample = list(texts(rows["val"].select(evenly_sampled(rows["val"], _ROUND_TRIP_BYTES))))
    return find_tokenizer_loss(tokenizer, sample, encode(sample))


def _map(name: str, rows: Dataset, encode_rows: Callable[[Any], dict[str, Any]], **options: Any) -> Dataset:
    """Return the tokens of rows. The tokenizers library uses all cores, so one process reads and writes."""
    is_terminal = sys.stderr.isatty()
    started_at = logged_at = time.perf_counter()
    num_done = 0

    def columns(batch: Any) -> dict[str, Any]:
        nonlocal num_done, logged_at
        found = encode_rows(batch)
        num_done += len(batch[rows.column_names[0]])
        if (now := time.perf_counter()) - logged_at >= _PROGRESS_SECONDS and not is_terminal:  # there is a bar
            left_seconds = (now - started_at) * (len(rows) / num_done - 1)
            _log.info("%s: %.0f %%, %.0f s left", name, 100 * num_done / len(rows), left_seconds)
            logged_at = now
        return found

    options |= {"batched": True, "batch_size": ROWS_PER_BATCH, "remove_columns": rows.column_names, "desc": name}
    with _progress_bars(is_terminal):
        tokens = rows.map(columns, load_from_cache_file=False, **options)
    _log.debug("%s: %s rows in %.1f s", name, f"{len(rows):,}", time.perf_counter() - started_at)
    return tokens


@contextmanager
def _progress_bars(are_shown: bool) -> Iterator[None]:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _encode_texts(tokenizer: PreTrainedTokenizerFast, encode: Encoder, dtype: str, batch: Any) -> dict[str, Any]:
    """Return the tokens of some pieces of text. Raises UserError if case operators don't restore a piece."""
    ids, num_ids = encode(batch["text"])
    if has_case_operators(tokenizer.backend_tokenizer) and decode_texts(tokenizer, (ids, num_ids)) != batch["text"]:
        raise UserError("tokenizer.case_operators: true does not restore this text exactly; set it to false.")
    start, num_tokens, is_start = document_start(tokenizer), np.array(num_ids), np.array(batch["is_start"])
    places = (np.cumsum(num_tokens) - num_tokens)[is_start]
    ids = np.insert(ids, np.repeat(places, len(start)), np.tile(np.array(start, np.uint32), len(places)))
    return {
        "input_ids": np.split(ids.astype(dtype), np.cumsum(num_tokens + is_start * len(start))[:-1]),
        "num_bytes": [len(text.encode()) for text in batch["text"]],  # of the raw UTF-8 text, not of decoded tokens
    }


def _encode_conversations(encoder: ConversationEncoder, dtype: str, batch: Any) -> dict[str, Any]:
    rows = [(name, json.loads(content)) for name, content in zip(batch["name"], batch["content"], strict=True)]
    found = encoder.encode([(name, messages) for name, messages in rows if any(map(is_learned, messages))])
    return {
        "input_ids": [np.array(conversation.ids, dtype) for conversation in found],
        "num_bytes": [conversation.num_bytes for conversation in found],
        "is_target": [conversation.is_target.astype(np.uint8) for conversation in found],
    }


def _begin_ids(tokenizer: PreTrainedTokenizerFast, size: int, dtype: str, batch: Any) -> dict[str, Any]:
    """Return the documents of some rows of ids, each after what begins one.

    The bytes of a document are those of the text that its tokens decode to: nobody knows the text it was made from.
    """
    documents, start = _documents(tokenizer, size, batch), document_start(tokenizer)
    decoded = tokenizer.backend_tokenizer.decode_batch([ids.tolist() for ids in documents], skip_special_tokens=False)
    return {
        "input_ids": [np.append(start, ids).astype(dtype) for ids in documents],
        "num_bytes": [len(text.encode()) for text in decoded],
    }


def _documents(tokenizer: PreTrainedTokenizerFast, size: int, batch: Any) -> list[np.ndarray]:
    """Return the documents of some rows, without what begins them. A separator in a row, which may be packed, ends one.

    None is empty. Raises UserError for ids >= size.
    """
    separator, *front = document_start(tokenizer)
    documents: list[np.ndarray] = []
    for name, ids in zip(batch["name"], batch["content"], strict=True):
        row = np.array(ids, np.uint32)
        if row.max(initial=0) >= size:
            raise UserError(
                f"{name} contains id {row.max()}, but the tokenizer has {size} entries; name the tokenizer that the"
                " ids were made with."
            )
        parts = np.split(row, np.flatnonzero(row == separator))
        parts = [part[1:] if len(part) and part[0] == separator else part for part in parts]
        parts = [part[len(front) :] if front and part[: len(front)].tolist() == front else part for part in parts]
        documents += [part for part in parts if len(part)]
    return documents


def _find_other_encoding(
    rows: Dataset, tokenizer: PreTrainedTokenizerFast, size: int, encode: Encoder, column: str | None
) -> str | None:
    batches = (_documents(tokenizer, size, batch) for batch in rows.iter(batch_size=ROWS_PER_BATCH))
    documents = next(filter(None, batches))
    ids, num_ids = encode(decode_texts(tokenizer, (np.concatenate(documents), list(map(len, documents)))))
    again = np.split(ids, np.cumsum(num_ids)[:-1])
    differ = sum(not np.array_equal(a, b) for a, b in zip(documents, again, strict=True))
    if not differ:
        return None
    return (
        f"the tokenizer makes other ids of the text of {differ} of {len(documents)} documents in a sample than"
        f" data.ids_column {column} has; bits per byte is of the decoded text and not comparable"
    )


def _encode_patiently(encode: Encoder, texts: list[str]) -> Any:
    """Encode texts, and warn if that takes very long: a tokenizer's regular expression may never end."""
    future = in_daemon(lambda: encode(texts))
    done, _ = wait([future], _PATIENCE_SECONDS)
    if not done:
        _log.warning(
            "tokenizing: no progress for %s s in %s pieces of text, of which the first begins %s; the tokenizer's"
            " regular expressions may take forever on them. Ctrl-C ends this.",
            _PATIENCE_SECONDS,
            len(texts),
            ascii(texts[0][:40]),
        )
    return future.result()


def in_daemon(work: Callable[[], _Outcome]) -> Future[_Outcome]:
    """Do work in a thread that no process waits for when it ends, unlike those of an executor."""
    future: Future[_Outcome] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
