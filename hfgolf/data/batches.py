"""From a token stream to batches: the data order, a pure function of seed and blocks read; the loader; the device.

B batch, T time (sequence_length). A block is T + 1 tokens: T inputs and their T targets. Each epoch cuts the stream
into consecutive blocks, so each token is a target once, except a few at the end that do not fill a block.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hfgolf.config.mixture import of_text
from hfgolf.data.mixture import MixedStream, Turns, as_mixture
from hfgolf.data.token_stream import Stream
from hfgolf.system.errors import UserError
from hfgolf.system.wording import count_of

Batch = dict[str, torch.Tensor]
Ranges = Sequence[Sequence[int]]
"""Positions in the stream as [start, end) ranges."""
IGNORED = -100  # the label of a position that the loss does not count, as F.cross_entropy has it
_HAS_SHM = Path("/dev/shm").is_dir()  # workers pass their batches through it
_WORKER_TIMEOUT_SECONDS = 120  # per batch; the first one includes the start of the workers


def num_blocks(num_tokens: int, sequence_length: int) -> int:
    """Return the number of full blocks in a stream. Raises UserError if there are none."""
    if num_tokens <= sequence_length:
        shorter = 1 << (num_tokens - 1).bit_length() - 1 if num_tokens > 2 else 0  # allowed: 2 or more
        raise UserError(
            f"data: the training text has {count_of(num_tokens, 'token')}, but a sequence takes {sequence_length:,} and"
            f" the one after; add text{f', or set batch.sequence_length {shorter} or less' if shorter else ''}."
        )
    return (num_tokens - 1) // sequence_length


@dataclass(frozen=True)
class Segments:
    """The first blocks of a training are read as sequences made of segments from different places of the text.

    A batch then has as many tokens as otherwise, but from more texts, which helps most when the model knows nothing
    yet. The segments are drawn from the whole epoch, none twice. An epoch that goes on with whole blocks reads some of
    its text both ways and some not at all; each other epoch reads each token once.
    """

    length: int
    """Tokens per segment, a divisor of T."""
    blocks: int | None
    """How many blocks of the training are segmented, from its start; None: all."""


def stream_positions(first: int, count: int, excluded: Ranges = ()) -> np.ndarray:
    """Return the positions of the next `count` blocks once `first` blocks have been read, (count,) int64.

    A position counts blocks from the start of the first epoch, across all epochs.
    excluded: ranges [start, end) of positions to skip, disjoint and in order; later blocks move up.
    """
    positions = first + np.arange(count)
    for start, end in excluded:
        positions[positions >= start] += end - start
    return positions


def as_ranges(positions: np.ndarray) -> list[list[int]]:
    """Return ascending positions as the fewest [start, end) ranges, in plain integers that JSON can store."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [[int(part[0]), int(part[-1]) + 1] for part in parts if len(part)]


def block_starts(seed: int | None, positions: np.ndarray, num_blocks: int, sequence_length: int) -> np.ndarray:
    """Return the token index at which each block in `positions` starts, (blocks,) int64.

    Each epoch is a new permutation of the `num_blocks` blocks, or, if seed is None, the blocks as they lie. The first
    starts at token 0, each later one at a random offset below T, so that repeated text is cut at other places. Its last
    block may wrap around the end of the stream, which starts with an end-of-text token as it should.
    """
    epochs, places_in_epoch = np.divmod(positions, num_blocks)
    starts = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        is_in_epoch = epochs == epoch
        starts[is_in_epoch] = _epochs(seed, num_blocks, sequence_length)(int(epoch))[places_in_epoch[is_in_epoch]]
    return starts


def part_starts(
    seed: int | None, positions: np.ndarray, num_blocks: int, sequence_length: int, segments: Segments | None
) -> tuple[np.ndarray, int]:
    """Return the token index at which each part of the blocks in `positions` starts, (parts,) int64, and its tokens.

    A part is a block or, with `segments`, a segment; T / segments.length of them in a row make a block.
    A pure function of its arguments. `segments` needs a seed.
    """
    if segments is None:
        return block_starts(seed, positions, num_blocks, sequence_length), sequence_length
    assert seed is not None, "a sequential order has no segments"
    offsets = np.arange(0, sequence_length, segments.length)
    starts = block_starts(seed, positions, num_blocks, sequence_length)[:, None] + offsets
    epochs, places_in_epoch = np.divmod(positions, num_blocks)
    for epoch in np.unique(epochs):
        left = num_blocks if segments.blocks is None else segments.blocks - int(epoch) * num_blocks
        num_segmented = min(num_blocks, left)
        is_segmented = (epochs == epoch) & (places_in_epoch < num_segmented)
        if is_segmented.any():
            drawn = _epoch_segments(seed, int(epoch), num_blocks, sequence_length, segments.length, num_segmented)
            starts[is_segmented] = drawn[places_in_epoch[is_segmented]]
    return starts.ravel(), segments.length


def sample_hash(starts: np.ndarray) -> int:
    """Return a 64-bit hash of a set of blocks, independent of how they are divided over ranks and micro-batches.

    It is the sum of the hashed starts. The hash is splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number
    generators").
    """
    x = (starts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((x ^ (x >> np.uint64(31))).sum().astype(np.int64))


@lru_cache(maxsize=64)  # the texts of a mixture: each keeps the orders of two epochs
def _epochs(seed: int | None, num_blocks: int, sequence_length: int) -> Callable[[int], np.ndarray]:
    return lru_cache(maxsize=2)(partial(_epoch, seed, num_blocks, sequence_length))


def _epoch(seed: int | None, num_blocks: int, sequence_length: int, epoch: int) -> np.ndarray:
    if seed is None:
        return np.arange(num_blocks) * sequence_length
    # PCG64 by name: default_rng may change its generator, but the data order must not change with numpy's version
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    order = generator.permutation(num_blocks) * sequence_length
    return order + (generator.integers(sequence_length) if epoch else 0)


@lru_cache(maxsize=32)
def _epoch_segments(
    seed: int, epoch: int, num_blocks: int, sequence_length: int, length: int, num_segmented: int
) -> np.ndarray:
    """Return the starts of the segments that replace the first `num_segmented` blocks, (blocks, T / length) int64."""
    per_block = sequence_length // length
    offset = _epochs(seed, num_blocks, sequence_length)(epoch).min()
    generator = np.random.Generator(np.random.PCG64([seed, epoch, 1]))  # not the draws that ordered the blocks
    drawn = generator.choice(num_blocks * per_block, num_segmented * per_block, replace=False)
    return offset + drawn.reshape(num_segmented, per_block) * length


class MicroBatches(Dataset[Batch]):
    """Micro-batches of a stream, indexed by the positions of their blocks: `dataset[positions]`.

    An item is {"input_ids": (B, T) int64, "shift_labels": (B, T) int64, "sample_hash": () int64}. The labels are
    already shifted by one token, and IGNORED where the stream's mask is 0; sample_hash is the `sample_hash` of the
    starts of the blocks, or of their segments.

    If the stream has a mask, `dataset[positions, of_step]`, which knows the blocks of the whole step, also has
    "num_items_in_batch", () float32, the divisor of its summed loss: the targets of the step per micro-batch. So the
    mean over micro-batches and processes, which accelerate takes, is the mean over the targets of the step, however
    they are divided.

    In a mixture, each block is the next one of its text, which has an order and epochs of its own. Each text's
    `segments` last as long as those of the whole. Raises UserError if a text is shorter than one block.
    """

    def __init__(
        self, stream: Stream, sequence_length: int, seed: int | None, segments: Segments | None = None
    ) -> None:
        mixture = as_mixture(stream)
        self.sequence_length = sequence_length
        self.turns = Turns(mixture.stages, sequence_length)
        self.texts: list[_Text] = []
        for number, (name, part) in enumerate(zip(mixture.names, mixture.parts, strict=True)):
            own = segments
            if segments is not None and segments.blocks is not None:
                own = Segments(segments.length, int(self.turns.counts(np.array([segments.blocks]))[0, number]))
            own_seed = None if seed is None else seed + number  # texts of one size must not be shuffled alike
            with of_text(name) if isinstance(stream, MixedStream) else nullcontext():
                blocks = num_blocks(len(part), sequence_length)
            self.texts.append(_Text(part, mixture.begins[number], blocks, sequence_length, own_seed, own))

    def __getitem__(self, item: np.ndarray | tuple[np.ndarray, np.ndarray]) -> Batch:
        positions, of_step = item if isinstance(item, tuple) else (item, None)
        # Trap: a view of one row has another stride, and torch.compile would recompile the model. These are copies.
        inputs, labels = np.empty((2, len(positions), self.sequence_length), np.int64)
        starts = []
        for text, rows, own in self._each(positions):
            inputs[rows], labels[rows], begins = text.read(own)
            starts.append(begins)
        batch = {
            "input_ids": torch.from_numpy(inputs),
            "shift_labels": torch.from_numpy(labels),
            "sample_hash": torch.tensor(sample_hash(np.concatenate(starts))),
        }
        if of_step is not None and any(text.stream.is_target is not None for text in self.texts):
            num_targets = max(1, self.num_targets(of_step))  # without targets, the loss is 0
            batch["num_items_in_batch"] = torch.tensor(num_targets * len(positions) / len(of_step))
        return batch

    def starts(self, positions: np.ndarray) -> np.ndarray:
        """Return the index, in all texts, of the first token of each part of blocks: of themselves, or of segments."""
        return np.concatenate([text.parts(own)[0] + text.first for text, _, own in self._each(positions)])

    def num_targets(self, positions: np.ndarray) -> int:
        """Return how many targets the loss counts in the blocks at the given positions, of a stream with a mask."""
        return sum(text.num_targets(own) for text, _, own in self._each(positions))

    def _each(self, positions: np.ndarray) -> Iterator[tuple[_Text, np.ndarray, np.ndarray]]:
        """Yield (text, the places of its blocks among the positions, their positions in the text)."""
        sources, own = self.turns.at(positions)
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            yield self.texts[source], rows, own[rows]


@dataclass(frozen=True)
class _Text:
    """One text, and the order in which its blocks are read."""

    stream: Stream
    first: int
    """The index of its first token among those of all texts."""
    num_blocks: int
    sequence_length: int
    seed: int | None
    segments: Segments | None

    def parts(self, positions: np.ndarray) -> tuple[np.ndarray, int]:
        """Return (starts, tokens of each) of what the blocks consist of: themselves, or their segments in order."""
        return part_starts(self.seed, positions, self.num_blocks, self.sequence_length, self.segments)

    def read(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the inputs and the labels of blocks, each (B, T) int64, and where their parts start in all texts."""
        starts, length = self.parts(positions)
        tokens = gather(self.stream, starts, length).numpy()
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        if self.stream.is_target is not None:
            labels = np.where(self._targets(starts, length), labels, IGNORED)
        shape = -1, self.sequence_length
        return inputs.reshape(shape), labels.reshape(shape), starts + self.first

    def num_targets(self, positions: np.ndarray) -> int:
        return int(self._targets(*self.parts(positions)).sum())

    def _targets(self, starts: np.ndarray, length: int) -> np.ndarray:
        assert self.stream.is_target is not None
        return self.stream.is_target.take(starts[:, None] + np.arange(1, length + 1), mode="wrap")


def gather(stream: Stream, starts: np.ndarray, length: int) -> torch.Tensor:
    """Read (B, length + 1) int64 tokens in one vectorized read. Row i starts at starts[i] and wraps around."""
    indices = starts[:, None] + np.arange(length + 1)
    return torch.from_numpy(stream.read(indices).astype(np.int64))


@dataclass(frozen=True)
class _Order:
    """Yield (block positions, those of the whole step) of each micro-batch of one rank, after `blocks_read` blocks.

    Together, the micro-batches of a step over all ranks contain each block of the global batch once.
    """

    blocks_read: int
    num_steps: int
    micro_batch_size: int
    accumulation: int
    rank: int
    world: int
    excluded: Ranges

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        shape = self.accumulation, self.world, self.micro_batch_size
        blocks_per_step = math.prod(shape)
        for step in range(self.num_steps):
            positions = stream_positions(self.blocks_read + step * blocks_per_step, blocks_per_step, self.excluded)
            yield from ((own, positions) for own in positions.reshape(shape)[:, self.rank])


def build_loader(
    stream: Stream,
    *,
    sequence_length: int,
    micro_batch_size: int,
    accumulation: int,
    rank: int,
    world: int,
    seed: int | None,
    num_steps: int,
    segments: Segments | None = None,
    blocks_read: int = 0,
    excluded: Ranges = (),
    num_workers: int = 0,
    device: torch.device | str = "cpu",
) -> DataLoader[Batch]:
    """Build the loader of this rank's micro-batches for `num_steps` steps, in order.

    Args:
        segments: how the first blocks are read; None: whole. Needs a seed.
        blocks_read: blocks that earlier steps have read, over all ranks. The loader continues from there.
        excluded: as in `stream_positions`.
        device: where the batches will go. Batches for a GPU are pinned.

    The workers live as long as the iterator, across epochs.

    Raises:
        UserError: the stream is shorter than one block.
    """
    order = _Order(blocks_read, num_steps, micro_batch_size, accumulation, rank, world, excluded)
    # fork, not forkserver (Linux's default since Python 3.14): the server and its workers would outlive a killed run
    context = "fork" if num_workers and sys.platform == "linux" else None
    return _Loader(
        MicroBatches(stream, sequence_length, seed, segments),
        batch_size=None,  # an item is already a batch
        sampler=order,
        num_workers=num_workers,
        timeout=_WORKER_TIMEOUT_SECONDS if num_workers else 0,
        multiprocessing_context=context,
        worker_init_fn=_ignore_signals,
        pin_memory=torch.device(device).type == "cuda",  # device_prefetch only overlaps copies from pinned memory
        generator=torch.Generator(),  # iterators draw from it; with the global one, a resume would change dropout
    )


class _Loader(DataLoader[Batch]):
    """A DataLoader that kills its workers at exit. They ignore SIGTERM, so Python would wait for them forever."""

    def __iter__(self) -> Any:
        others = set(multiprocessing.active_children())
        iterator = super().__iter__()
        for worker in set(multiprocessing.active_children()) - others:
            atexit.register(_kill_worker, worker)
        return iterator


def _kill_worker(worker: BaseProcess) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report the kill as an error
    worker.kill()


def _ignore_signals(worker: int) -> None:
    """Keep a worker alive when the whole process group gets a signal: the trainer still has to finish its step."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def explain_worker(error: BaseException) -> BaseException:
    """Return a one-line UserError if a DataLoader worker failed or died, otherwise return `error` unchanged.

    The death of a worker can raise anywhere in the training process, not only where it asks for a batch.
    """
    lines = str(error).splitlines()
    if isinstance(error, UserError) and len(lines) > 1:  # torch prepends the worker's traceback
        return type(error)(lines[-1].partition("Error: ")[2])
    # the worker died while it passed a batch
    is_cut_off = isinstance(error, (ConnectionError, EOFError)) and any(
        "multiprocessing" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    if is_cut_off:
        lines = ["a DataLoader worker died"]
    if is_cut_off or (isinstance(error, RuntimeError) and lines and lines[0].startswith("DataLoader ")):
        free = f"; /dev/shm has {shutil.disk_usage('/dev/shm').free / 1e6:,.0f} MB free" if _HAS_SHM else ""
        return UserError(
            f"data.num_workers: {lines[0].rstrip('. ')}{free}. Set data.num_workers 0, or give the workers more memory"
            " (docker run --shm-size). To continue from the last checkpoint, add --train.resume auto."
        )
    return error


def device_prefetch(batches: Iterable[Batch], device: torch.device | str) -> Iterator[Batch]:
    """Yield the batches on `device`. The copy of the next batch starts before the current one is used.

    Unless the loader has workers, a thread reads and pins the batch after that one meanwhile: the host is then free to
    launch. The order is that of `batches`, whose errors are raised here.
    """
    if torch.device(device).type == "cpu":
        yield from batches
        return
    ahead: Batch | None = None
    for batch in batches if getattr(batches, "num_workers", 0) else _read_ahead(batches):
        # non_blocking only overlaps copies from pinned memory; this one is queued before work on the current batch
        following = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if ahead is not None:
            yield ahead
        ahead = following
    if ahead is not None:
        yield ahead


def _read_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    iterator = iter(batches)
    # the thread need not choose a GPU: pinning uses the one that this process has (pytorch#21081)
    with ThreadPoolExecutor(1, "batches") as thread:
        following = thread.submit(next, iterator, None)
        while (batch := following.result()) is not None:
            following = thread.submit(next, iterator, None)
            yield batch


def evaluation_extent(stream: Stream, budget_tokens: int | None = None) -> tuple[int, int]:
    """Return (target tokens, raw UTF-8 bytes) of the pieces that fit the budget whole: at least one, or all for None.

    The first token of the stream, an end-of-text token, is only context. Later ones are targets that count zero bytes.
    A stream with a mask counts fewer of these targets, and only their bytes. Each text of a mixture is a stream of its
    own, with its share of the budget.
    """
    if isinstance(stream, MixedStream):
        budgets = stream.budgets(budget_tokens)
        extents = [evaluation_extent(part, budget) for part, budget in zip(stream.parts, budgets, strict=True)]
        return sum(targets for targets, _ in extents), sum(num_bytes for _, num_bytes in extents)
    num_targets = np.cumsum(stream.piece_tokens, dtype=np.int64) - 1
    num_pieces = len(num_targets)
    if budget_tokens is not None:
        num_pieces = max(1, int(np.searchsorted(num_targets, budget_tokens, side="right")))
    return int(num_targets[num_pieces - 1]), int(stream.piece_bytes[:num_pieces].sum(dtype=np.int64))
