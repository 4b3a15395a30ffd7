"""A mixture: which text each block of a training is from, and the streams of all texts as one.

The order is a pure function of the position of a block and the stages: nothing is drawn, so the proportions hold at any
length. Does not know how a text is read, or in which order its own blocks are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from hfgolf.config.mixture import Stages
from hfgolf.data.token_stream import Stream

_FAR = 2**62  # a position that no training reaches


@dataclass(frozen=True)
class Turns:
    """Whose turn each block of a training is.

    stages: as `config.mixture.stages` has them. A stage begins with the first block after its tokens.
    """

    stages: Stages
    sequence_length: int

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each block, and its position among the blocks of that source, both (blocks,) int64."""
        stages, sources = np.searchsorted(self._begins, positions, side="right") - 1, np.empty_like(positions)
        for stage in np.unique(stages):
            turns, is_in_stage = _round(self.stages[stage][1])[0], stages == stage
            sources[is_in_stage] = turns[(positions[is_in_stage] - self._begins[stage]) % len(turns)]
        return sources, self.counts(positions)[np.arange(len(positions)), sources]

    def counts(self, positions: np.ndarray) -> np.ndarray:
        """Return how many blocks of each source are before each position, (positions, sources) int64."""
        counts = np.zeros((len(positions), len(self.stages[0][1])), np.int64)
        for (begin, end), (_, parts) in zip(itertools.pairwise([*self._begins, _FAR]), self.stages, strict=True):
            rounds, rest = np.divmod(np.clip(positions - begin, 0, end - begin), sum(parts))
            counts += rounds[:, None] * np.array(parts) + _round(parts)[1][rest]
        return counts

    @property
    def _begins(self) -> list[int]:
        """Return the position of the first block of each stage."""
        return [-(-start // self.sequence_length) for start, _ in self.stages]


@lru_cache(maxsize=64)
def _round(parts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources of a round, (R,) int64, and the blocks of each before each place of it, (R + 1, sources).

    parts: blocks of each source in a round of R = sum(parts). After any number of blocks, each source has its exact
    share, rounded up or down: its k-th block is due between k - 1 and k shares, and the one that is due first has its
    turn (Baruah et al. 1996, "Proportionate progress").
    """
    length, taken = sum(parts), [0] * len(parts)
    turns, before = np.empty(length, np.int64), np.zeros((length + 1, len(parts)), np.int64)
    for place in range(length):
        ready = (k for k, part in enumerate(parts) if taken[k] * length < (place + 1) * part)
        turn = min(ready, key=lambda k: -(-(taken[k] + 1) * length // parts[k]))
        taken[turn] += 1
        turns[place], before[place + 1] = turn, taken
    return turns, before


@dataclass(frozen=True, eq=False)
class MixedStream(Stream):
    """The streams of several texts, one after the other: they read as one, each wraps around by itself in a training.

    names: of the texts. stages: of the mixture.
    """

    parts: tuple[Stream, ...]
    names: tuple[str, ...]
    stages: Stages

    @cached_property
    def chunks(self) -> tuple[np.ndarray, ...]:  # type: ignore[override]
        return tuple(chunk for part in self.parts for chunk in part.chunks)

    @cached_property
    def piece_tokens(self) -> np.ndarray:  # type: ignore[override]
        return np.concatenate([part.piece_tokens for part in self.parts])

    @cached_property
    def piece_bytes(self) -> np.ndarray:  # type: ignore[override]
        return np.concatenate([part.piece_bytes for part in self.parts])

    @cached_property
    def is_target(self) -> np.ndarray | None:  # type: ignore[override]
        """The masks of conversations, which all of the texts are, or none."""
        masks = [part.is_target for part in self.parts if part.is_target is not None]
        return np.concatenate(masks) if masks else None

    @cached_property
    def begins(self) -> list[int]:
        """The index of the first token of each text."""
        return [0, *itertools.accumulate(map(len, self.parts[:-1]))]

    def read(self, indices: np.ndarray) -> np.ndarray:
        indices = indices % len(self)
        sources = np.searchsorted(self.begins, indices, side="right") - 1
        ids = np.empty(indices.shape, np.uint32)
        for source in np.unique(sources):
            is_here = sources == source
            ids[is_here] = self.parts[source].read(indices[is_here] - self.begins[source])
        return ids

    def budgets(self, budget_tokens: int | None) -> Sequence[int | None]:
        """Return the share of each text in a budget of targets, by their sizes; None: all."""
        if budget_tokens is None:
            return [None] * len(self.parts)
        sizes = [len(part) - 1 for part in self.parts]
        return [-(-budget_tokens * size // sum(sizes)) for size in sizes]


def as_mixture(stream: Stream) -> MixedStream:
    """Return a stream as a mixture; one text is a mixture of itself alone."""
    return stream if isinstance(stream, MixedStream) else MixedStream((stream,), ("",), [(0, (1,))])
