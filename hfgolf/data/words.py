"""How many words a training has read: whitespace-separated ones, counted in the text that its tokens decode to.

Does not know why anybody asks (hooks/milestones.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from hfgolf.data.mixture import Turns, as_mixture
from hfgolf.data.token_cache import TokenCache
from hfgolf.data.token_stream import Stream
from hfgolf.data.tokenizer import decode_texts

MAX_COUNTED_TOKENS = 2**24  # of each text; decoding them takes a few seconds
_WINDOW_TOKENS = 2**14


@dataclass(frozen=True)
class Words:
    """The words in the first blocks of a training. per_token: of each text. turns: whose turn each block is."""

    per_token: tuple[float, ...]
    turns: Turns

    def read(self, blocks: int) -> float:
        """Return the words in the first `blocks` blocks, over all epochs."""
        of_each = self.turns.counts(np.array([blocks]))[0]
        return float(np.dot(of_each, self.per_token)) * self.turns.sequence_length


def count_words(tokens: TokenCache, sequence_length: int) -> Words:
    """Count the words of the training text, of a mixture in each of its texts."""
    mixture = as_mixture(tokens.train)
    per_token = tuple(words_per_token(part, tokens.tokenizer) for part in mixture.parts)
    return Words(per_token, Turns(mixture.stages, sequence_length))


def words_per_token(stream: Stream, tokenizer: PreTrainedTokenizerFast) -> float:
    """Return the words of a text divided by its tokens, of all of it or of evenly spaced windows, 2^24 tokens in all.

    Special tokens, which separate documents and turns, are no part of a word.
    """
    starts = range(0, len(stream), _WINDOW_TOKENS)
    most = MAX_COUNTED_TOKENS // _WINDOW_TOKENS
    places = starts if len(starts) <= most else (starts[number * len(starts) // most] for number in range(most))
    special = [token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token]
    num_words = num_tokens = 0
    for start in places:
        ids = stream.read(np.arange(start, min(start + _WINDOW_TOKENS, len(stream))))
        (text,) = decode_texts(tokenizer, (ids, [len(ids)]))
        for token in special:
            text = text.replace(token, " ")
        num_words, num_tokens = num_words + len(text.split()), num_tokens + len(ids)
    return num_words / num_tokens
