"""What gzip and xz make of the validation text: a score of bits per byte that everyone knows, to put a model's beside.

They see only this text, and a model has seen the training text before.
"""

from __future__ import annotations

import gzip
import lzma
from typing import TYPE_CHECKING, Any

import numpy as np

from hfgolf.data.tokenizer import decode_texts, document_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from hfgolf.data.batches import Stream

MAX_BYTES = 2**20  # xz takes about a second
_XZ_9E = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": MAX_BYTES}]  # else it takes 0.7 GB


def compressor_scores(stream: Stream, tokenizer: PreTrainedTokenizerFast, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return columns of a summary: the bits per byte of gzip -9 and xz -9e on the start of a stream's text.

    Returns {} if the raw text does not come back from the tokens: of conversations, or with a tokenizer that loses
    characters.
    """
    text = _text(stream, tokenizer, max_bytes)
    if not text:
        return {}
    sizes = {
        "gzip": len(gzip.compress(text, 9, mtime=0)),
        "xz": len(lzma.compress(text, lzma.FORMAT_XZ, filters=_XZ_9E)),
    }
    return {f"{name}_bits_per_byte": 8 * size / len(text) for name, size in sizes.items()} | {
        "compressed_bytes": len(text)
    }


def _text(stream: Stream, tokenizer: PreTrainedTokenizerFast, max_bytes: int) -> bytes:
    """Return the raw text of the first whole pieces with at most max_bytes together, b"" if it does not come back."""
    if stream.is_target is not None:
        return b""
    num_pieces = int(np.searchsorted(np.cumsum(stream.piece_bytes, dtype=np.int64), max_bytes, side="right"))
    if num_pieces == 0:
        return b""
    ends = np.cumsum(stream.piece_tokens[:num_pieces], dtype=np.int64)
    ids = np.split(stream.read(np.arange(ends[-1])), ends[:-1])
    start = document_start(tokenizer)
    pieces = [piece[~np.isin(piece, start)] for piece in ids]
    text = "".join(decode_texts(tokenizer, (np.concatenate(pieces), list(map(len, pieces))))).encode()
    return text if len(text) == stream.piece_bytes[:num_pieces].sum(dtype=np.int64) else b""
