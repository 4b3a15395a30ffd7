"""Deliver the batches of a step: the loader, the micro-batch, accumulation, and halving when memory runs out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from hfgolf.data.batches import (
    MicroBatches,
    Segments,
    build_loader,
    device_prefetch,
    num_blocks,
    stream_positions,
)
from hfgolf.data.mixture import MixedStream, Turns
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_MAX_LOADER_STEPS = 10**9  # for a run that only train.max_minutes limits


def start_batches(run: Run) -> None:
    """Start the loader after the blocks read so far: at the start, after a rollback, and for a new micro-batch size."""
    config, accelerator = run.config, run.accelerator
    loader = build_loader(
        run.tokens.train,
        sequence_length=config.batch.sequence_length,
        micro_batch_size=run.micro_batch_size,
        accumulation=run.accumulation_steps,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        seed=config.order_seed,
        segments=segments(run),
        num_steps=int(min(run.step_limit, _MAX_LOADER_STEPS)) - run.state.step,
        blocks_read=run.state.blocks,
        excluded=run.state.excluded_blocks,
        num_workers=config.data.num_workers,
        device=accelerator.device,
    )
    run.batches = iter(device_prefetch(loader, accelerator.device))


def segments(run: Run) -> Segments | None:
    """Return how the first blocks of the training are read as segments; None: they are not."""
    batch = run.config.batch
    if batch.segment_length is None or not batch.is_segmented:
        return None
    tokens = batch.segmented_tokens
    return Segments(batch.segment_length, None if tokens is None else math.ceil(tokens / batch.sequence_length))


def starts_of(run: Run, positions: np.ndarray) -> list[int]:
    """Return where the blocks at these positions of the data start, or their segments, as places of training tokens."""
    batch, seed = run.config.batch, run.config.order_seed
    starts = MicroBatches(run.tokens.train, batch.sequence_length, seed, segments(run)).starts(positions)
    return [int(start) for start in starts]


def blocks_per_epoch(run: Run) -> int:
    """Return the number of blocks in the training data."""
    return num_blocks(len(run.tokens.train), run.config.batch.sequence_length)


def epoch(run: Run) -> float:
    """Return the epochs read so far, as a fraction; excluded blocks count as read."""
    return run.state.next_position / blocks_per_epoch(run)


def read_of_each(run: Run, steps: float | None = None) -> dict[str, tuple[int, float]]:
    """Return {name: (tokens, epochs)} that a mixture has read of each of its texts; {} if there is only one text.

    steps: those until which it reads; None: those so far. Excluded blocks count as read.
    """
    stream, batch = run.tokens.train, run.config.batch
    if not isinstance(stream, MixedStream):
        return {}
    more = 0 if steps is None else (steps - run.state.step) * batch.sequences_per_step
    position = stream_positions(run.state.blocks + int(more), 1, run.state.excluded_blocks)
    read = Turns(stream.stages, batch.sequence_length).counts(position)[0]
    return {
        name: (int(blocks) * batch.sequence_length, int(blocks) / num_blocks(len(part), batch.sequence_length))
        for name, part, blocks in zip(stream.names, stream.parts, read, strict=True)
    }


def halve_until_it_fits(run: Run, work: Callable[[], Result]) -> Result:
    """Return work(); each time it runs out of memory, halve the micro-batch and repeat. tokens_per_step is unchanged.

    work: forward and backward passes that can be repeated. Raises UserError if even one sequence does not fit, or if
    other processes wait in the middle of the step.
    """
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = one_line(error)[:120]
        # outside the except block: the error keeps the frames alive, and the frames keep the activations
        run.raw_model.zero_grad(set_to_none=True)
        clear_device_cache(garbage_collection=True)
        halve_micro_batch(run, reason)


def halve_micro_batch(run: Run, reason: str) -> None:
    """Take the largest possible micro-batch up to half of this one. Raises UserError if there is none."""
    accelerator, before = run.accelerator, run.micro_batch_size
    sizes = run.config.batch.micro_batch_sizes(accelerator.num_processes)
    size = max((size for size in sizes if size <= before // 2), default=None)
    if size is None or (accelerator.num_processes > 1 and run.is_stepping):
        smaller = "use a smaller model or a shorter batch.sequence_length"
        advice = f"continue with --batch.micro_batch_size {size} --train.resume auto" if size else smaller
        message = f"train: out of memory with a micro-batch of {before} ({reason}); {advice}"
        logger.warning("%s", message)  # on this process, because rank 0, which prints errors, may not be the one
        raise UserError(f"{message}.")
    run.micro_batch_size = size
    accelerator.gradient_accumulation_steps = run.config.batch.accumulation_steps(size, accelerator.num_processes)
    accelerator.step = 0  # counts micro-batches; those of the failed step do not count
    start_batches(run)
    run.event("out_of_memory", micro_batch_size=[before, size], reason=reason)
    logger.warning(
        f"out of memory at step {run.state.step + 1} with a micro-batch of {before}; continuing with {size} and"
        f" {run.accumulation_steps} accumulation steps (same tokens per step)"
    )


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory. On a CPU, torch raises no dedicated exception."""
    is_onednn_workspace = str(error) == "could not create a primitive"  # oneDNN could not allocate its workspace
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or should_reduce_batch_size(error)
        or is_onednn_workspace
    )
