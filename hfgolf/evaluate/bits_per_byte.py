"""The score, bits per byte of raw UTF-8 text; and gzip's and xz's, which everyone knows, to put a model's beside."""

from __future__ import annotations

import gzip
import lzma
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from hfgolf.data.token_cache import TokenCache
from hfgolf.data.token_stream import Stream
from hfgolf.data.tokenizer import decode_texts, document_start

MAX_BYTES = 2**20  # xz takes about a second
_XZ_9E = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": MAX_BYTES}]  # else it takes 0.7 GB


@dataclass(frozen=True)
class Evaluation:
    """The total loss of a model on a text, with the number of tokens and bytes.

    nats: summed over the predicted tokens, including the separators between documents, which count 0 bytes (the
    Parameter Golf convention). num_tokens: predicted tokens, including separators. num_bytes: of the text itself. Of
    conversations, only the assistant's tokens and text count, and the tokens that end its turns count 0 bytes.
    """

    nats: float
    num_tokens: int
    num_bytes: int
    texts: dict[str, Evaluation] = field(default_factory=dict)
    """Of a mixture: that of each text, by its name. This one is their sum."""

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity if that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """(nats / ln 2) / bytes: comparable between tokenizers."""
        return bits_per_byte(self.nats, self.num_bytes)


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Return the bits per byte for a total loss of `nats` on a text of `num_bytes`; NaN if it has none."""
    return nats / math.log(2) / num_bytes if num_bytes else math.nan


def compressor_scores(tokens: TokenCache, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return columns of a summary: the bits per byte of gzip -9 and xz -9e on the start of the validation text.

    They see only this text, and a model has seen the training text before. Returns {} if the raw text does not come
    back from the tokens: of conversations, or with a tokenizer that loses or changes characters.
    """
    text = b"" if tokens.tokenizer_loss else _text(tokens.val, tokens.tokenizer, max_bytes)
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
