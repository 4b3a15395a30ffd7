"""What is done if a step goes wrong: a gradient that is not finite, a loss that spikes or no longer falls, no memory.

Owns the bounded retries, each with one line in the log and one row in metrics.jsonl. Does not know what a normal step
is (loop.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn

from hfgolf.checkpoint.store import newest_first, set_aside, step_of
from hfgolf.command_line import one_line
from hfgolf.data.batches import as_ranges, block_starts, stream_positions
from hfgolf.errors import UserError
from hfgolf.train.loss_watch import LossWatch
from hfgolf.train.meter import StepResult

if TYPE_CHECKING:
    from hfgolf.train.setup import Run

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the global norm of the gradients, a scalar on the device, equal on all ranks; changes nothing."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor where FSDP2 shards the gradients


def first_sick_gradient(model: nn.Module) -> str:
    """Return the parameter whose gradient was the first to lose its finiteness: a backward pass runs from the end.

    Clipping by a norm that is not finite would make all of them NaN, so it is asked before.
    """
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return name
    return "no single parameter: the sum of their squares overflows"


class Guard:
    """Counts a run's bad steps and takes it back to its last good checkpoint if there are too many in a row."""

    def __init__(self, run: Run) -> None:
        self._run = run
        looks_for = set(run.config.train.rollback_on) - {"nonfinite"}
        self._watch = LossWatch(looks_for) if looks_for else None
        self._in_a_row: list[np.ndarray] = []
        """Positions of the blocks of each step that was skipped or spiked since the last good one."""
        self._suspect: Path | None = None
        """The checkpoint of the last rollback, until a good step follows: its weights may be what is wrong."""

    def look_at(self, result: StepResult) -> bool:
        """Note the step just made; return True if it was one too many and the run is back at an earlier step.

        Raises UserError, with a diagnosis, if that has happened train.max_rollbacks times or cannot happen.
        """
        if result.sick_parameter is not None:
            return self._look_at_gradient(result)
        if self._watch is not None and math.isfinite(loss := self._mean_loss(result)):
            return self._look_at_loss(self._watch, loss)
        self._note_good_step()
        return False

    def _note_good_step(self) -> None:
        self._in_a_row.clear()
        self._suspect = None

    def _look_at_gradient(self, result: StepResult) -> bool:
        run, train = self._run, self._run.config.train
        run.state.skipped_steps += 1
        scaler = run.accelerator.scaler
        if scaler is not None and scaler.get_scale() > 1:
            self._tell_overflow(result, scaler.get_scale())  # the search for a scale rolls nothing back
            return False
        self._in_a_row.append(self._positions_read())
        blocks = self._block_starts(self._in_a_row[-1])
        diagnosis = (
            f"step {run.state.step}: the gradient is not finite (norm {result.grad_norm}, loss {result.loss:.4g}), "
            f"first in {result.sick_parameter}, blocks from tokens {_short(blocks)}"
        )
        run.tracker.event(
            "skipped_step",
            run.state,
            first_parameter=result.sick_parameter,
            train_loss=result.loss,
            grad_norm=result.grad_norm,
            block_starts=blocks,
        )
        in_a_row = len(self._in_a_row)
        logger.info("%s; update skipped (%d of %d in a row)", diagnosis, in_a_row, train.max_skipped_steps)
        if in_a_row < train.max_skipped_steps:
            return False
        self._roll_back("nonfinite", diagnosis, good_until=run.state.step)  # weights that no bad step has touched
        return True

    def _tell_overflow(self, result: StepResult, scale: float) -> None:
        """Tell of a step that fp16's loss scale made overflow; scale: what the scaler has lowered it to."""
        run, first = self._run, result.sick_parameter
        run.tracker.event("fp16_overflow", run.state, first_parameter=first, loss_scale=scale)
        logger.info(
            "step %d: fp16 overflow, first in %s; update skipped, the loss scale is %s now",
            run.state.step,
            first,
            f"{scale:,.0f}",
        )

    def _mean_loss(self, result: StepResult) -> float:
        """Return the loss over all processes, which must decide alike."""
        accelerator = self._run.accelerator
        if accelerator.num_processes == 1:
            return result.loss
        loss = torch.tensor(result.loss, device=accelerator.device)
        return float(accelerator.reduce(loss, "mean").item())

    def _look_at_loss(self, watch: LossWatch, loss: float) -> bool:
        step = self._run.state.step
        verdict = watch.verdict(step, loss)
        if verdict is None:
            self._note_good_step()
            return False
        self._in_a_row.append(self._positions_read())
        in_a_row = len(self._in_a_row)
        if verdict == "spike" and in_a_row < self._run.config.train.max_skipped_steps:
            return False
        diagnosis = f"step {step}: {watch.saw}"
        logger.info("%s (%s)", diagnosis, verdict)
        self._roll_back(verdict, diagnosis, step - in_a_row if verdict == "spike" else watch.lowest_step)
        watch.forget_recent()
        return True

    def _roll_back(self, cause: str, diagnosis: str, good_until: int) -> None:
        with self._run.stopwatch.of("checkpoint"):
            self._go_back(cause, diagnosis, good_until)
        self._run.meter.restart()  # the steps it holds did not happen

    def _go_back(self, cause: str, diagnosis: str, good_until: int) -> None:
        """Load the newest checkpoint that is neither later than step good_until nor suspect, or else the oldest."""
        run, train = self._run, self._run.config.train
        run.checkpoints.wait()
        advice = (
            f"lower optim.learning_rate (now {run.config.optim.learning_rate:g}) or look at these blocks of the data"
        )
        if cause not in train.rollback_on:
            raise UserError(f"train: {diagnosis}; train.rollback_on does not name {cause}: {advice}.")
        if run.state.rollbacks >= train.max_rollbacks:
            raise UserError(f"train: {diagnosis}; {run.state.rollbacks} rollbacks did not help: {advice}.")
        if run.accelerator.is_main_process:
            self._set_doubtful_aside(good_until)
        checkpoint = run.checkpoints.choose("auto")
        if checkpoint is None:
            raise UserError(f"train: {diagnosis}; there is no checkpoint to go back to: {advice}.")
        before = run.state.step
        skipped, rollbacks = run.state.skipped_steps, run.state.rollbacks + 1
        excluded = run.state.excluded_blocks
        scale = run.state.learning_rate_scale * train.rollback_learning_rate_factor
        run.checkpoints.load(checkpoint)
        # those before the checkpoint are behind it anyway: to exclude them would move good ones up, past it
        following = stream_positions(run.state.blocks, 1, excluded)[0]
        bad_positions = np.concatenate(self._in_a_row)
        excluded = sorted(excluded + as_ranges(bad_positions[bad_positions >= following]))
        run.state.skipped_steps, run.state.rollbacks = skipped, rollbacks
        run.state.excluded_blocks, run.state.learning_rate_scale = excluded, scale
        self._in_a_row.clear()
        self._suspect = checkpoint
        run.start_batches()
        run.tracker.rewind(run.state.step)
        details = {"cause": cause, "from_step": before, "excluded_blocks": excluded, "learning_rate_scale": scale}
        run.tracker.event("rollback", run.state, **details)
        logger.info(
            "rollback %d of %d: from step %d to %s; learning rates times %g, %d blocks excluded",
            rollbacks,
            train.max_rollbacks,
            before,
            checkpoint.name,
            scale,
            sum(end - start for start, end in excluded),
        )

    def _set_doubtful_aside(self, good_until: int) -> None:
        """Set the checkpoints aside that are later than a step or suspect, but for the oldest of all."""
        for checkpoint in newest_first(self._run.folder.checkpoints)[:-1]:
            if checkpoint == self._suspect:
                logger.info("no good step came of %s: going further back", checkpoint.name)
                set_aside(checkpoint)
            elif step_of(checkpoint) > good_until:
                logger.info("%s is of after the trouble began: going further back", checkpoint.name)
                set_aside(checkpoint)

    def _positions_read(self) -> np.ndarray:
        """Return the positions of the blocks that the last update read."""
        state, count = self._run.state, self._run.config.batch.sequences_per_step
        return stream_positions(state.blocks - count, count, state.excluded_blocks)

    def _block_starts(self, positions: np.ndarray) -> list[int]:
        """Return the tokens at which blocks begin."""
        config = self._run.config
        return block_starts(config.run.seed, positions, self._run.num_blocks, config.batch.sequence_length).tolist()


def is_out_of_memory(error: Exception) -> bool:
    """Say whether an error means that a smaller micro-batch might do; a CPU's allocator has no exception of its own."""
    is_of_onednn = str(error) == "could not create a primitive"  # what it says if it gets no memory for its workspace
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error) or is_of_onednn


def halve_until_it_fits(run: Run, work: Callable[[], Result]) -> Result:
    """Return work(), with ever smaller micro-batches as long as it runs out of memory; the tokens a step stay the same.

    work: forward and backward passes, which may be repeated. Raises UserError where one sequence is too much already,
    or where other processes wait for this one in the middle of the step.
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
        run.shrink_micro_batch(reason)


def should_stop_early(run: Run) -> bool:
    """Say whether train.patience_evals evaluations have gone by without an improvement."""
    patience = run.config.train.patience_evals
    return patience is not None and run.state.evals_without_improvement >= patience


def _short(starts: list[int]) -> str:
    shown = ", ".join(map(str, starts[:6]))
    return shown if len(starts) <= 6 else f"{shown} and {len(starts) - 6} more"
