"""From a token stream to batches: which block a step reads, the DataLoader, the copy to the device, evaluation windows.

Owns the order of the data: a pure function of the seed and of how many blocks have been read. Does not know text,
tokenizers or files.

B batch, T time (sequence_length). A block is T + 1 tokens: T inputs and their T targets. The blocks of an epoch lie end
to end, so that each token is a target once, but for the few that make no whole block. In the first epoch they begin at
the first token, in each later one at another of the first T, so that what is read again is not cut in the same places;
the last block may then go around the end of the stream, where the end of text that it begins with is in its place.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hfgolf.errors import UserError

Batch = dict[str, torch.Tensor]
IGNORE_INDEX = -100
Ranges = Sequence[Sequence[int]]
"""Positions in the stream as [start, end) ranges."""
_HAS_SHM = Path("/dev/shm").is_dir()  # through which workers hand over their batches
_WORKER_SECONDS = 120  # without a batch; the first also waits for the workers to start


class Stream(Protocol):
    """What batches need of a token stream (token_stream.TokenStream has it)."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def piece_tokens(self) -> np.ndarray: ...
    @property
    def piece_bytes(self) -> np.ndarray: ...
    def read(self, places: np.ndarray) -> np.ndarray: ...


def num_blocks(num_tokens: int, sequence_length: int) -> int:
    """Return the whole blocks in a stream. Raises UserError where there is none."""
    if num_tokens <= sequence_length:
        raise UserError(
            f"The train split has {num_tokens} tokens, less than one block of batch.sequence_length"
            f" {sequence_length} + 1; add text or shorten batch.sequence_length."
        )
    return (num_tokens - 1) // sequence_length


def stream_positions(first: int, count: int, excluded: Ranges = ()) -> np.ndarray:
    """Return the positions of the next `count` blocks after `first` have been read, (count,) int64.

    A position counts blocks from the start of the first epoch and never ends: the epochs lie end to end.
    excluded: positions [start, end) that nobody reads, disjoint and in order; what follows them moves up.
    """
    positions = first + np.arange(count)
    for start, end in excluded:
        positions[positions >= start] += end - start
    return positions


def as_ranges(positions: np.ndarray) -> list[list[int]]:
    """Return ascending positions as the fewest [start, end) ranges; plain integers, so that they fit in JSON."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [[int(part[0]), int(part[-1]) + 1] for part in parts if len(part)]


def block_starts(seed: int, positions: np.ndarray, num_blocks: int, sequence_length: int) -> np.ndarray:
    """Return the tokens at which the blocks at `positions` begin, (blocks,) int64; a pure function of its arguments.

    Each epoch is a new permutation of the `num_blocks` blocks.
    """
    epochs, places = np.divmod(positions, num_blocks)
    starts = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        is_here = epochs == epoch
        starts[is_here] = _epoch(seed, int(epoch), num_blocks, sequence_length)[places[is_here]]
    return starts


def sample_hash(starts: np.ndarray) -> int:
    """Return a 64-bit sum over mixed starts: it is of the blocks alone, however ranks and micro-batches share them.

    The mixer is that of splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators").
    """
    x = (starts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((x ^ (x >> np.uint64(31))).sum().astype(np.int64))


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, num_blocks: int, sequence_length: int) -> np.ndarray:
    # PCG64 by name: default_rng may change its generator, and the order of the data must not change with numpy
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    order = generator.permutation(num_blocks) * sequence_length
    return order + (generator.integers(sequence_length) if epoch else 0)


class MicroBatches(Dataset[Batch]):
    """Micro-batches by the positions of their blocks: `dataset[positions]`, as `_Order` yields them.

    An item is {"input_ids": (B, T) int64, "shift_labels": (B, T) int64, "sample_hash": () int64}. The labels are one
    token ahead already; the hash is of the blocks.
    """

    def __init__(self, stream: Stream, sequence_length: int, seed: int) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        self.seed = seed
        self.num_blocks = num_blocks(len(stream.tokens), sequence_length)

    def __getitem__(self, positions: np.ndarray) -> Batch:
        starts = block_starts(self.seed, positions, self.num_blocks, self.sequence_length)
        block = gather(self.stream, starts, self.sequence_length)
        return {
            "input_ids": _copied(block[:, :-1]),
            "shift_labels": _copied(block[:, 1:]),
            "sample_hash": torch.tensor(sample_hash(starts)),
        }


def gather(stream: Stream, starts: np.ndarray, sequence_length: int) -> torch.Tensor:
    """Read (B, T + 1) int64 tokens, row i from starts[i] on, around the end of the stream, in one vectorised read."""
    places = starts[:, None] + np.arange(sequence_length + 1)
    return torch.from_numpy(stream.read(places).astype(np.int64))


@dataclass(frozen=True)
class _Order:
    """The positions of each micro-batch that one rank reads, in order, from the block after the first `blocks_read`.

    Over ranks and accumulation, the micro-batches of a step are its global batch: each block once.
    """

    blocks_read: int
    num_steps: int
    micro_batch_size: int
    accumulation: int
    rank: int
    world: int
    excluded: Ranges

    def __iter__(self) -> Iterator[np.ndarray]:
        shape = self.accumulation, self.world, self.micro_batch_size
        blocks_per_step = math.prod(shape)
        for step in range(self.num_steps):
            positions = stream_positions(self.blocks_read + step * blocks_per_step, blocks_per_step, self.excluded)
            yield from positions.reshape(shape)[:, self.rank]


def build_loader(
    stream: Stream,
    *,
    sequence_length: int,
    micro_batch_size: int,
    accumulation: int,
    rank: int,
    world: int,
    seed: int,
    num_steps: int,
    blocks_read: int = 0,
    excluded: Ranges = (),
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    device: torch.device | str = "cpu",
) -> DataLoader[Batch]:
    """Return the loader of this rank's micro-batches for `num_steps` steps, in order.

    blocks_read: blocks that earlier steps have read, over all ranks; the loader goes on from there.
    excluded: as for stream_positions. device: where the batches go; those for a GPU are pinned. The workers live as
    long as the iterator, over all epochs. Raises UserError if the stream is shorter than one block.
    """
    order = _Order(blocks_read, num_steps, micro_batch_size, accumulation, rank, world, excluded)
    # not a server that forks them, Linux's default from Python 3.14 on: it would outlive a killed run, and they with it
    context = "fork" if num_workers and sys.platform == "linux" else None
    return _Loader(
        MicroBatches(stream, sequence_length, seed),
        batch_size=None,  # an item is a batch already
        sampler=order,
        num_workers=num_workers,
        timeout=_WORKER_SECONDS if num_workers else 0,
        multiprocessing_context=context,
        worker_init_fn=_leave_signals_to_the_trainer,
        prefetch_factor=prefetch_factor,
        pin_memory=torch.device(device).type == "cuda",  # device_prefetch's copies overlap from pinned memory only
        generator=torch.Generator(),  # an iterator draws from it; from the global one, a resume would shift dropout
    )


class _Loader(DataLoader[Batch]):
    """A DataLoader whose workers end with the process: they ignore SIGTERM, for which Python would wait forever."""

    def __iter__(self) -> Any:
        others = set(multiprocessing.active_children())
        iterator = super().__iter__()
        for worker in set(multiprocessing.active_children()) - others:
            atexit.register(_kill_worker, worker)
        return iterator


def _kill_worker(worker: BaseProcess) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would call it an error
    worker.kill()


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Let a worker live on when a signal reaches the whole group of processes: the trainer finishes its step first."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def explain_worker(error: BaseException) -> BaseException:
    """Return the UserError for what a loader worker raised, or for its silent end; any other error is returned itself.

    A worker that is killed raises in the training process wherever that happens to be, not where it asks for a batch.
    """
    lines = str(error).splitlines()
    if isinstance(error, UserError) and len(lines) > 1:  # torch puts the worker's traceback before it
        return type(error)(lines[-1].partition("Error: ")[2])
    # it may end while it hands over a batch
    is_cut_off = isinstance(error, (ConnectionError, EOFError)) and any(
        "multiprocessing" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    if is_cut_off:
        lines = ["a DataLoader worker ended"]
    if is_cut_off or (isinstance(error, RuntimeError) and lines and lines[0].startswith("DataLoader ")):
        room = f"; /dev/shm has {shutil.disk_usage('/dev/shm').free / 1e6:,.0f} MB free" if _HAS_SHM else ""
        return UserError(
            f"data.num_workers: {lines[0].rstrip('. ')}{room}. Set data.num_workers 0, or give the workers more memory"
            " (docker run --shm-size); --train.resume auto continues from the last checkpoint."
        )
    return error


def device_prefetch(batches: Iterable[Batch], device: torch.device | str) -> Iterator[Batch]:
    """Yield the batches on `device`, the next one's copy under way before the current one is used."""
    if torch.device(device).type == "cpu":
        yield from batches
        return
    ahead: Batch | None = None
    for batch in batches:
        # non_blocking only overlaps from pinned memory; the copy is queued before the work on the current batch
        following = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if ahead is not None:
            yield ahead
        ahead = following
    if ahead is not None:
        yield ahead


def evaluation_extent(stream: Stream, budget_tokens: int | None = None) -> tuple[int, int]:
    """Return (target tokens, raw UTF-8 bytes) of the whole pieces within the budget; at least one piece, None is all.

    The first token, an end of text, is context only; the end-of-text tokens after it are targets and cost no bytes.
    """
    num_targets = np.cumsum(stream.piece_tokens, dtype=np.int64) - 1
    num_pieces = len(num_targets)
    if budget_tokens is not None:
        num_pieces = max(1, int(np.searchsorted(num_targets, budget_tokens, side="right")))
    return int(num_targets[num_pieces - 1]), int(stream.piece_bytes[:num_pieces].sum(dtype=np.int64))


def evaluation_windows(
    stream: Stream, sequence_length: int, budget_tokens: int | None, batch_size: int, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Yield {"input_ids", "shift_labels"}, (B, T) int64: each target of evaluation_extent once over all ranks.

    Every rank yields as many batches, all of one shape; places without a target have IGNORE_INDEX as label, so a batch
    may be all ignored (its mean loss is NaN: sum the losses instead).
    """
    num_targets, _ = evaluation_extent(stream, budget_tokens)
    windows_per_batch = batch_size * world
    num_windows = -(-num_targets // sequence_length)
    for first in range(rank * batch_size, -(-num_windows // windows_per_batch) * windows_per_batch, windows_per_batch):
        starts = np.arange(first, first + batch_size) * sequence_length
        places = starts[:, None] + np.arange(sequence_length + 1)
        block = torch.from_numpy(stream.read(np.minimum(places, num_targets)).astype(np.int64))
        labels = block[:, 1:].masked_fill(torch.from_numpy(places[:, 1:] > num_targets), IGNORE_INDEX)
        yield {"input_ids": _copied(block[:, :-1]), "shift_labels": labels}


def _copied(tokens: torch.Tensor) -> torch.Tensor:
    # contiguous() lets a single row keep the stride it was cut with, and torch would compile the model anew for it
    return tokens.clone(memory_format=torch.contiguous_format)
