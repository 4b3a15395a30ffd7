"""What a model learns: bits per byte as a function of the text, the model's shape and the tokens of its training.

Pure arithmetic. benchmarks/law/fit.py finds the constants for the runs of benchmarks/law/collect.py: 86 of 100 steps
and more, 0.3 to 18 million tokens, of seven texts, 96 to 256 wide, with 512 to 4,096 entries, without dropout. With a
scale and a floor of its own for each text, on which no choice depends, it is off by 0.6 % (median) for these, and by
0.9 % for runs that it has not seen; outside of them it is an extrapolation. It is about the best step of a run, whose
weights a run exports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

DENSITIES = (1.55, 2.8)  # of the texts that it was fitted to
MIN_BYTES = 150_000  # of a text, most of the shortest of them: 5 % of 0.2 MB and more validate
MEAN_AGE = 0.1  # of the weights in an average, as a share of the steps: the most that ema.py allows
LEAST_SHORTENING = 0.1
"""By which twice the entries made each of these texts shorter, in tokens: by 11 % and more."""


@dataclass(frozen=True)
class Text:
    """What the law has to know of a training text."""

    num_bytes: float
    density: float
    """Bits per byte when compressed with LZMA."""
    tokens_per_byte: dict[int, float]
    """{entries of a vocabulary: tokens per byte}, for each vocabulary that the text supports."""

    @property
    def strange(self) -> str:
        """How it differs from the texts that the law was fitted to: short, repetitive, dense; "" if it does not."""
        if self.num_bytes < MIN_BYTES:
            return "short"
        return "repetitive" if self.density < DENSITIES[0] else "dense" if self.density > DENSITIES[1] else ""

    def without_idle_entries(self) -> Text:
        """Return the text without the vocabularies that make a repetitive one hardly shorter than smaller ones do.

        What entries for whole phrases cost, the law can't tell. Of a CSV of measurements, 1.5 MB, 128 wide, 512 entries
        end at 0.94 bits per byte after 291 steps, and 1,024, with 5 % fewer tokens, at 1.18 after as long (279).
        """
        kept = dict[int, float]()
        for entries, ratio in sorted(self.tokens_per_byte.items()):
            if not kept or self.density >= DENSITIES[0] or ratio <= (1 - LEAST_SHORTENING) * min(kept.values()):
                kept[entries] = ratio
        return replace(self, tokens_per_byte=kept)


@dataclass(frozen=True)
class Shape:
    """The shape of a Golf model with tied embeddings and an MLP of 4 x its width."""

    width: int
    layers: int
    vocabulary: int

    @property
    def body_parameters(self) -> int:
        """Return the weights in the matrices of the blocks."""
        return 12 * self.layers * self.width**2

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the FLOPs of a token's forward and backward pass, as measure/flops.py counts them."""
        head = self.vocabulary * self.width
        return 6.0 * (self.body_parameters + head + self.width * sequence_length * self.layers)


def layers_of(width: int) -> int:
    """Return the number of layers that goes with a width: 3 up to 128, 5 with 256, 9 with 512.

    As many weights in two, three, four or six layers learn alike: with 128 of width, after as many FLOPs, they end at
    1.19, 1.22, 1.27 and 1.31 bits per byte of Python, which the law foresees for 0.4 to 1.2 million weights in the
    blocks, and at 2.02, 2.01, 2.01 and 2.04 of Shakespeare. Induction heads need two.
    """
    return max(3, 1 + width // 64)


def heads_of(width: int, multiple: int = 1) -> int:
    """Return the attention heads that go with a width: of about 64 dimensions, and of 32 below a width of 256.

    multiple: of what there must be so many, as of the heads of keys and values.
    """
    most = max(1, width // (64 if width >= 256 else 32))
    possible = range(most // multiple * multiple, 0, -multiple)
    return next((heads for heads in possible if width % (2 * heads) == 0), multiple)


def rates_of(width: int, is_averaged: bool = False) -> tuple[float, float]:
    """Return the learning rates of Muon and of AdamW that go with a width.

    is_averaged: whether the model has the average of its weights, which evens out the noise of higher rates.

    They are the best, or not far from it, of grids at three widths (docs/experiments.md, "Find a learning rate"), after
    300 steps. With averages, 1.4 times as high ones are better ("Let the minutes decide").
    """
    factor = 1.4 if is_averaged else 1.0
    return factor * 0.02 * math.sqrt(256 / width), factor * 0.01 * 256 / width


def decay_of(steps: float) -> float:
    """Return the decay of an average of the weights whose mean age is MEAN_AGE of so many steps."""
    return round(1 - 1 / (1 + MEAN_AGE * steps), 5)


def tokens_per_step_of(tokens: float) -> int:
    """Return the tokens of a step that go with the tokens of a training: a power of two, from 2,048 on.

    Of 0.6 million, 128 wide, 1,024 and 2,048 per step end at 1.50 and 1.50 bits per byte of Python with 1,024 entries,
    at 1.55 and 1.49 with 2,048, and at 2.14 to 2.17 of Shakespeare. In as much time, larger steps see more tokens:
    20 MB of packages' source ends at 0.961 after 857 of 2,048, and at 0.921 after 549 of 4,096. Five times the root is
    too many: 1 MB that is read five times ends at 1.585 after 610 of 4,096, and at 1.611 after 361 of 8,192.
    """
    return int(min(2**19, max(2**11, 2 ** round(math.log2(2.5 * math.sqrt(max(tokens, 1.0)))))))


@dataclass(frozen=True)
class Law:
    """The constants of the law. Sizes are in millions, and losses in units of `scale`."""

    capacity: tuple[float, float, float] = (0.371, 0.192, 0.247)
    """Factor, and exponents of the weights and of bytes per token: what the model has no room for."""
    data: tuple[float, float, float] = (0.664, 0.299, 0.165)
    """Factor, and exponents of the effective tokens and of bytes per token: what it has not seen."""
    repeats: float = 5.14
    """Epochs that the repeated ones are worth at most, together."""
    critical_tokens: float = 58_000.0
    """Tokens per step at which half of a million tokens is lost; it grows as the square root of the tokens."""
    entries: tuple[float, float, float] = (0.677, 0.807, 0.645)
    """Factor, and exponents of entries per token of the text and of epochs: entries with too few examples."""
    memory: tuple[float, float, float] = (0.0101, 0.992, 1.37)
    """Factor, and exponents of the weights and of tens of epochs: what is learned by heart, per MB of text."""
    scale: tuple[float, float] = (1.7, -0.2)
    """Bits per byte of all of these: for a density of 0, and what 1 of density adds."""
    floor: tuple[float, float] = (-1.05, 0.802)
    """Bits per byte that no model learns: for a density of 0, and what 1 of density adds."""


def bits_per_byte(text: Text, shape: Shape, tokens: float, tokens_per_step: int, law: Law = Law()) -> float:
    """Return the expected bits per byte of held-out text like it, at the best step of a training on so many tokens.

    Repeated tokens count less, in the form of Muennighoff et al., "Scaling Data-Constrained Language Models", arXiv
    2305.16264, section 3.1; beyond them, a loss rises with the epochs, as what is learned by heart does harm.
    """
    density = min(max(text.density, DENSITIES[0]), DENSITIES[1])
    ratio = text.tokens_per_byte[shape.vocabulary]
    unique, epochs = text.num_bytes * ratio, tokens / (text.num_bytes * ratio)
    weights = (shape.body_parameters + shape.vocabulary * shape.width) / 1e6
    seen = tokens if epochs <= 1 else unique * (1 + law.repeats * (1 - math.exp(-(epochs - 1) / law.repeats)))
    seen /= 1e6 * (1 + tokens_per_step / law.critical_tokens / math.sqrt(tokens / 1e6))
    room = _power(law.capacity, 1 / weights, ratio)
    data = _power(law.data, 1 / seen, ratio)
    memory = _power(law.memory, weights, epochs / 10) * 1e6 / text.num_bytes
    rare = _power(law.entries, shape.vocabulary / unique, epochs)
    scale, floor = (constant + slope * density for constant, slope in (law.scale, law.floor))
    return floor + scale * (room + data + rare + memory)


def _power(constants: tuple[float, ...], *values: float) -> float:
    """Return a factor times each value to the power of its exponent."""
    factor, *exponents = constants
    return factor * math.prod(value**exponent for value, exponent in zip(values, exponents, strict=True))
