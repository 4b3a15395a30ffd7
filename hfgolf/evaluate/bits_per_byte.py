"""The score: bits per byte of the raw UTF-8 text."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """What a model costs a text: the nats of all its tokens, and how many tokens and bytes they are.

    Predicting the separator between documents counts in the nats, with 0 bytes (the Parameter Golf convention);
    `num_tokens` are the predicted ones, separators included. `num_bytes` are counted from the text itself.
    """

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Mean nats a token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp of the loss; infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """(nats / ln 2) / bytes; does not depend on the tokenizer."""
        return bits_per_byte(self.nats, self.num_bytes)


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Return the bits per byte of a text of `num_bytes` that cost `nats` in all."""
    return nats / math.log(2) / num_bytes
