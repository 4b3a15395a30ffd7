"""The score: bits per byte of raw UTF-8 text."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
