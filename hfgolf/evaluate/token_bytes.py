"""How many bytes of text each token of a stream stands for, by the text and by Parameter Golf's rule.

The vocabulary says how many bytes an entry spells. The text decides: in each piece the sum must be the bytes of its raw
UTF-8 text, which the token cache counted from the text itself. A tokenizer that makes its text longer or shorter fails
here; for one that only replaces characters, such as capital letters, the token cache has a `tokenizer_loss`.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerFast

from hfgolf.data.sentencepiece_model import SPACE
from hfgolf.data.token_stream import Stream
from hfgolf.data.tokenizer import document_start, entry_bytes
from hfgolf.system.errors import UserError

_MAX_TOKEN_BYTES = 2**16 - 1


def bytes_per_token(stream: Stream, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return the bytes of text that each token of a stream stands for, (num_tokens,) uint16; separators have 0.

    Raises UserError if a token has more than 65,535 bytes, or if a piece's tokens do not add up to its text.
    """
    known = getattr(stream, "token_bytes", None)
    if known is not None:  # shards come with them
        return known
    tokens, ends = stream.tokens, np.cumsum(stream.piece_tokens, dtype=np.int64)
    starts = ends - stream.piece_tokens
    counts = entry_bytes(tokenizer)[tokens]
    if counts.max(initial=0) > _MAX_TOKEN_BYTES:
        place = int(counts.argmax())
        raise UserError(
            f"Token {place} (id {tokens[place]}) stands for {counts[place]} bytes, but bytes per token are stored in 16"
            f" bits, at most {_MAX_TOKEN_BYTES}; use a tokenizer without such an entry."
        )
    if adds_a_space(tokenizer):  # in front of each text that it encodes: of each piece
        firsts = starts[starts < ends]
        start = document_start(tokenizer)
        counts[firsts + len(start) * (tokens[firsts] == start[0])] -= 1
    total = np.concatenate([[0], np.cumsum(counts)])
    found = total[ends] - total[starts]
    differs = np.flatnonzero(found != stream.piece_bytes)
    if len(differs):
        piece = int(differs[0])
        raise UserError(
            f"The tokens of piece {piece} stand for {found[piece]} bytes, but its text has {stream.piece_bytes[piece]}"
            f" ({len(differs)} of {len(ends)} pieces differ): the tokenizer rewrites its text, so bits per byte cannot"
            " be counted token by token; use a lossless tokenizer."
        )
    return counts.astype(np.uint16)


def challenge_bytes(tokens: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> np.ndarray | None:
    """Return the bytes that Parameter Golf's rule counts for each token, (num_tokens,) int64.

    None for a vocabulary that is not SentencePiece's. An entry counts the UTF-8 bytes of its piece without a leading
    U+2581, plus one for that space unless the token before is special (or there is none). A byte entry counts one,
    special entries none. A space inside a piece, U+2581 too, counts three. Source: the challenge's train_gpt.py.
    """
    counts = entry_bytes(tokenizer)
    is_special = counts == 0
    is_spaced = np.zeros(len(counts), bool)
    for entry, number in tokenizer.get_vocab().items():
        if entry.startswith(SPACE) and not is_special[number]:
            is_spaced[number] = True
            counts[number] = len(entry.removeprefix(SPACE).encode())
    if not is_spaced.any():
        return None
    follows_text = np.append(False, ~is_special[tokens[:-1]])
    return counts[tokens] + (is_spaced[tokens] & follows_text)


def adds_a_space(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether the tokenizer puts a space in front of a text, and takes it away when decoding."""
    backend = tokenizer.backend_tokenizer
    ids = backend.encode("a", add_special_tokens=False).ids
    return bool(entry_bytes(tokenizer)[ids].sum() == 2 and backend.decode(ids) == "a")
