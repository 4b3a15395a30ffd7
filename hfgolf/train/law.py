"""What a model learns: bits per byte as a function of the text, the model's shape and the tokens of its training.

Pure arithmetic. The constants are fitted to the runs of benchmarks/law (python benchmarks/law/fit.py);
docs/experiments.md says how well they predict runs that they have not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """What the law has to know of a training text."""

    num_bytes: float
    density: float
    """Bits per byte when compressed with LZMA."""
    tokens_per_byte: dict[int, float]
    """{entries of a vocabulary: tokens per byte}, for each vocabulary that the text supports."""


@dataclass(frozen=True)
class Shape:
    """The shape of a Golf model with tied embeddings and an MLP of 4 x its width."""

    width: int
    layers: int
    vocabulary: int
    dropout: float = 0.0

    @property
    def body_parameters(self) -> int:
        """Return the weights in the matrices of the blocks."""
        return 12 * self.layers * self.width**2

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the FLOPs of a token's forward and backward pass, as measure/flops.py counts them."""
        head = self.vocabulary * self.width
        return 6.0 * (self.body_parameters + head + self.width * sequence_length * self.layers)


def layers_of(width: int) -> int:
    """Return the number of layers that goes with a width: 2 with 64, 5 with 256, 9 with 512."""
    return 1 + width // 64


def heads_of(width: int) -> int:
    """Return the attention heads that go with a width: of 64 dimensions, and of 32 below a width of 256."""
    return max(1, width // (64 if width >= 256 else 32))


def rates_of(width: int) -> tuple[float, float]:
    """Return the learning rates of Muon and of AdamW that go with a width.

    Measured at widths 64, 128 and 256 (benchmarks/law): the best of Muon's fell from 0.04 to 0.02, and the best of
    AdamW's, which the embedding has, from 0.04 to 0.01.
    """
    return 0.02 * math.sqrt(256 / width), 0.01 * 256 / width


def tokens_per_step_of(tokens: float) -> int:
    """Return the tokens of a step that go with the tokens of a training: a power of two, from 2,048 on."""
    return int(min(2**19, max(2**11, 2 ** round(math.log2(2.6 * math.sqrt(max(tokens, 1.0)))))))


def bits_per_byte(text: Text, shape: Shape, tokens: float, tokens_per_step: int) -> float:
    """Return the expected bits per byte of held-out text like it, after a training on so many tokens."""
    ratio = text.tokens_per_byte[shape.vocabulary]
    unique = text.num_bytes * ratio
    epochs = tokens / unique
    repeated = unique * (1 + 15 * (1 - math.exp(-max(0, epochs - 1) / 15))) if epochs > 1 else tokens
    return text.density * (0.3 + 4 / shape.body_parameters**0.2 + 15 / repeated**0.3)
