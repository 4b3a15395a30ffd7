"""Datasets with a column of token ids: rows as documents of the token cache.

Owns what a row becomes, and what its bytes are. Tables and the Hub are read by corpus.

A separator in a row ends a document, so packed rows fall into their documents; a row itself starts one, too. The bytes
of a document are those of the text that its tokens decode to. Nobody knows the text it was made from, so the ids are
compared with those that the tokenizer makes of that text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from hfgolf.data.corpus import Corpus
from hfgolf.data.token_stream import StreamPart
from hfgolf.data.tokenizer import Encoded, Encoder, begin_texts, decode_texts, document_start, embedding_rows
from hfgolf.errors import UserError

_ROWS = 256  # at once


def encoded_rows(corpus: Corpus, split: str, tokenizer: PreTrainedTokenizerFast, scratch: Path) -> Iterator[StreamPart]:
    """Yield the documents of some rows at a time; each starts a separator, and what else begins documents.

    Raises UserError if an id is not in the vocabulary, or if the split is empty.
    """
    start = np.array(document_start(tokenizer), np.uint32)
    num_documents = 0
    for documents in _batches(corpus, split, tokenizer, scratch):
        num_documents += len(documents)
        num_ids = np.array([len(document) for document in documents], np.uint32)
        ids = np.concatenate(documents)
        num_bytes = [len(text.encode()) for text in decode_texts(tokenizer, (ids, num_ids.tolist()))]
        starts = np.cumsum(num_ids, dtype=np.int64) - num_ids
        piece_tokens = num_ids + np.uint32(len(start))
        yield StreamPart(begin_texts(ids, starts, start), piece_tokens, np.array(num_bytes, np.uint32))
    corpus.require_text(split, num_documents)


def find_other_encoding(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, encode: Encoder, scratch: Path
) -> str | None:
    """Return how many of the first validation documents the tokenizer encodes to other ids, as a message, or None."""
    documents = next(_batches(corpus, "val", tokenizer, scratch))
    encoded: Encoded = np.concatenate(documents), [len(document) for document in documents]
    ids, num_ids = encode(decode_texts(tokenizer, encoded))
    again = np.split(ids, np.cumsum(num_ids)[:-1])
    differ = sum(not np.array_equal(a, b) for a, b in zip(documents, again, strict=True))
    if not differ:
        return None
    return (
        f"the tokenizer makes other ids of the text of {differ} of {len(documents)} documents in a sample than"
        f" data.ids_column {corpus.data.ids_column} has; bits per byte is of the decoded text and not comparable"
    )


def _batches(
    corpus: Corpus, split: str, tokenizer: PreTrainedTokenizerFast, scratch: Path
) -> Iterator[list[np.ndarray]]:
    """Yield the documents of some rows at a time, without what begins them; none is empty."""
    rows, size, (separator, *front) = corpus.rows(split, scratch), embedding_rows(tokenizer), document_start(tokenizer)
    while batch := list(itertools.islice(rows, _ROWS)):
        documents: list[np.ndarray] = []
        for name, ids in batch:
            row = np.asarray(ids)
            if row.max(initial=0) >= size:
                raise UserError(
                    f"{name} contains id {row.max()}, but the tokenizer has {size} entries; name the"
                    " tokenizer that the ids were made with."
                )
            parts = np.split(row, np.flatnonzero(row == separator))
            parts = [part[1:] if len(part) and part[0] == separator else part for part in parts]
            parts = [part[len(front) :] if front and part[: len(front)].tolist() == front else part for part in parts]
            documents += [part.astype(np.uint32) for part in parts if len(part)]
        if documents:
            yield documents
