"""What a step reads: the loader, the micro-batch, the accumulation, and smaller micro-batches when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from hfgolf.command_line import one_line
from hfgolf.data.batches import build_loader, device_prefetch, num_blocks
from hfgolf.errors import UserError
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_MAX_LOADER_STEPS = 10**9  # of a run that only the clock ends


def start_batches(run: Run) -> None:
    """Read on from the blocks read so far: at the start, after a rollback, and for another micro-batch."""
    config, accelerator = run.config, run.accelerator
    loader = build_loader(
        run.tokens.train,
        sequence_length=config.batch.sequence_length,
        micro_batch_size=run.micro_batch_size,
        accumulation=run.accumulation_steps,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        seed=config.run.seed,
        num_steps=int(min(run.step_limit, _MAX_LOADER_STEPS)) - run.state.step,
        blocks_read=run.state.blocks,
        excluded=run.state.excluded_blocks,
        num_workers=config.data.num_workers,
        prefetch_factor=config.data.prefetch_factor,
        device=accelerator.device,
    )
    run.batches = iter(device_prefetch(loader, accelerator.device))


def blocks_per_epoch(run: Run) -> int:
    """Return the number of blocks of the training text."""
    return num_blocks(len(run.tokens.train), run.config.batch.sequence_length)


def epoch(run: Run) -> float:
    """Return the passes over the training blocks so far; excluded blocks count as passed."""
    return int(run.state.next_positions(1)[0]) / blocks_per_epoch(run)


def set_micro_batch(run: Run, size: int, source: str) -> None:
    """Let `size` sequences be the micro-batch, and accumulate as many of them as tokens_per_step needs."""
    run.decide(source, batch__micro_batch_size=size)
    batch, accelerator = run.config.batch, run.accelerator
    accelerator.gradient_accumulation_steps = batch.accumulation_steps(size, accelerator.num_processes)
    accelerator.step = 0  # counts micro-batches; those of a broken step do not count


def halve_until_it_fits(run: Run, work: Callable[[], Result]) -> Result:
    """Return work(), with ever smaller micro-batches while it runs out of memory; the tokens per step stay the same.

    work: forward and backward passes that may be repeated. Raises UserError if one sequence is already too much, or if
    other processes are waiting in the middle of the step.
    """
    while True:
        try:
            return work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = one_line(error)[:120]
        # outside of the except block: the error holds on to the frames, and these to the activations
        run.raw_model.zero_grad(set_to_none=True)
        clear_device_cache(garbage_collection=True)
        halve_micro_batch(run, reason)


def halve_micro_batch(run: Run, reason: str) -> None:
    """Halve the micro-batch and accumulate more of them; UserError if that is not possible."""
    accelerator, before = run.accelerator, run.micro_batch_size
    sizes = run.config.batch.micro_batch_sizes(accelerator.num_processes)
    size = max((size for size in sizes if size <= before // 2), default=None)
    if size is None or (accelerator.num_processes > 1 and run.is_stepping):
        advice = f"continue with --batch.micro_batch_size {size} --train.resume auto" if size else "make it smaller"
        message = f"train: out of memory with {before} sequences at once ({reason}); {advice}"
        logger.warning("%s", message)  # from every process, because another one may be the one that prints errors
        raise UserError(f"{message}.")
    set_micro_batch(run, size, "out of memory")
    start_batches(run)
    run.tracker.event("out_of_memory", run.state, micro_batch_size=[before, size], reason=reason)
    logger.warning(
        "out of memory at step %d with %d sequences at once: continuing with %d, %d accumulated; tokens per step stay"
        " the same",
        run.state.step + 1,
        before,
        size,
        run.accumulation_steps,
    )


def is_out_of_memory(error: Exception) -> bool:
    """Say whether an error means that a smaller micro-batch might do; a CPU's allocator has no exception of its own."""
    is_of_onednn = str(error) == "could not create a primitive"  # what it says if it gets no memory for its workspace
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error) or is_of_onednn
