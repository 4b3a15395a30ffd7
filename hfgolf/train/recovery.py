"""Handle bad steps: nonfinite gradients, and spikes and divergence of the loss, by the doctor's definitions.

Owns the bounded retries; each logs one line and writes one event to metrics.jsonl. Does not know how a step works
(loop.py) or what happens when memory runs out (feed.py).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import nn

from hfgolf.checkpoint.state import TrainState, rolled_back
from hfgolf.checkpoint.store import choose_checkpoint, newest_first, set_aside, step_of
from hfgolf.data.batches import as_ranges, stream_positions
from hfgolf.optim.shards import local_shards, on_any_rank
from hfgolf.run.loss_levels import (
    LEVEL_STEPS,
    MIN_RISE,
    RISE,
    RISE_FROM_START,
    SIGMAS,
    SPIKE_SHARE,
    robust_sigma,
)
from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words
from hfgolf.train.feed import start_batches, starts_of
from hfgolf.train.meter import StepResult
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)


def first_nonfinite_gradient(model: nn.Module) -> str:
    """Return the name of the first parameter to get a nonfinite gradient; the backward pass starts at the end.

    Call it before clipping: a nonfinite norm would turn all gradients into NaN. If gradients are sharded, all ranks
    call it.
    """
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is None:
            continue
        (shard,) = local_shards([parameter.grad])
        if on_any_rank(~shard.isfinite().all(), [parameter.grad]):
            return name
    return "no single parameter (the sum of the squares overflows)"


class Recovery:
    """Counts a run's consecutive bad steps, and rolls back to the last good checkpoint if there are too many.

    What it remembers is in run.state.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        symptoms = set(run.config.train.rollback_on) - {"nonfinite"}
        self._watch = LossWatch(symptoms, run.state) if symptoms else None

    def review(self, result: StepResult) -> bool:
        """Record the last step. If it was one bad step too many, roll the run back to an earlier step and return True.

        Raises UserError, with a diagnosis, if train.max_rollbacks is reached or a rollback is not possible.
        """
        if result.nonfinite_parameter is not None:
            return self._review_nonfinite(result)
        if self._watch is not None and math.isfinite(loss := self._mean_loss(result)):
            return self._review_loss(self._watch, loss)
        self._note_good_step()
        return False

    def _note_good_step(self) -> None:
        self._run.state.bad_steps, self._run.state.suspect_step = [], None

    def _review_nonfinite(self, result: StepResult) -> bool:
        run, train = self._run, self._run.config.train
        run.state.skipped_steps += 1
        scaler = run.accelerator.scaler
        if scaler is not None and scaler.get_scale() > 1:
            self._report_overflow(result, scaler.get_scale())  # finding the right scale needs no rollback
            return False
        positions, in_a_row = self._count_bad_step()
        blocks = starts_of(run, positions)
        diagnosis = (
            f"step {run.state.step}: the gradient is not finite (norm {result.grad_norm}, loss {result.loss:.4g}), "
            f"first in {result.nonfinite_parameter}, blocks from tokens {join_words(blocks, maximum=6)}"
        )
        run.event(
            "skipped_step",
            first_parameter=result.nonfinite_parameter,
            train_loss=result.loss,
            grad_norm=result.grad_norm,
            block_starts=blocks,
        )
        logger.info("%s; update skipped (%d of %d in a row)", diagnosis, in_a_row, train.max_skipped_steps)
        if in_a_row < train.max_skipped_steps:
            return False
        self._roll_back("nonfinite", diagnosis, good_until=run.state.step)  # skipped steps left weights alone
        return True

    def _report_overflow(self, result: StepResult, scale: float) -> None:
        """Report a step that overflowed under fp16's loss scale. scale: the scaler's new, lower scale."""
        run, first = self._run, result.nonfinite_parameter
        run.event("fp16_overflow", first_parameter=first, loss_scale=scale)
        where = f"step {run.state.step}: fp16 overflow, first in {first}"
        logger.info(f"{where}; update skipped, loss scale lowered to {scale:,.0f}")

    def _mean_loss(self, result: StepResult) -> float:
        """Return the mean loss over all processes, so that they all decide alike."""
        accelerator = self._run.accelerator
        return accelerator.reduce(torch.tensor(result.loss, device=accelerator.device), "mean").item()

    def _review_loss(self, watch: LossWatch, loss: float) -> bool:
        step = self._run.state.step
        verdict, evidence = watch.verdict(step, loss)
        if verdict is None:
            self._note_good_step()
            return False
        _, in_a_row = self._count_bad_step()
        if verdict == "spike" and in_a_row < self._run.config.train.max_skipped_steps:
            return False
        diagnosis = f"step {step}: {evidence}"
        logger.info("%s (%s)", diagnosis, verdict)
        good_until = step - in_a_row if verdict == "spike" else self._run.state.lowest_level_step
        self._roll_back(verdict, diagnosis, good_until)
        return True

    def _roll_back(self, cause: str, diagnosis: str, good_until: int) -> None:
        with self._run.stopwatch.charge("checkpoint"):
            self._restore(cause, diagnosis, good_until)
        self._run.meter.restart()  # the steps since the last row are undone

    def _restore(self, cause: str, diagnosis: str, good_until: int) -> None:
        """Load the newest checkpoint up to step good_until that is not suspect, or else the oldest one."""
        run, train = self._run, self._run.config.train
        run.checkpoints.wait()
        advice = (
            f"lower optim.learning_rate (now {run.config.optim.learning_rate:g}) or inspect these blocks of the data"
        )
        if cause not in train.rollback_on:
            raise UserError(f"train: {diagnosis}; train.rollback_on does not include {cause}; {advice}.")
        if run.state.rollbacks >= train.max_rollbacks:
            raise UserError(f"train: {diagnosis}; {run.state.rollbacks} rollbacks did not help; {advice}.")
        if run.accelerator.is_main_process:
            self._set_suspects_aside(good_until)
        checkpoint = choose_checkpoint(run.folder.checkpoints, "auto")
        if checkpoint is None:
            raise UserError(f"train: {diagnosis}; there is no checkpoint to roll back to; {advice}.")
        current = dataclasses.replace(run.state)
        run.checkpoints.load(checkpoint)
        state = rolled_back(run.state, current)
        run.state.load_state_dict(state.state_dict())
        start_batches(run)
        run.restart_hooks()
        run.event(
            "rollback",
            cause=cause,
            from_step=current.step,
            excluded_blocks=state.excluded_blocks,
            learning_rate_scale=state.learning_rate_scale,
        )
        num_excluded = sum(end - start for start, end in state.excluded_blocks)
        logger.info(
            f"rollback {state.rollbacks} of {train.max_rollbacks}: from step {current.step} to {checkpoint.name};"
            f" learning rates times {state.learning_rate_scale:g}, {num_excluded} blocks excluded"
        )

    def _set_suspects_aside(self, good_until: int) -> None:
        """Set aside every checkpoint that is suspect or later than step good_until, except the oldest."""
        for checkpoint in newest_first(self._run.folder.checkpoints)[:-1]:
            if step_of(checkpoint) == self._run.state.suspect_step:
                logger.info("no good step followed %s; going further back", checkpoint.name)
                set_aside(checkpoint)
            elif step_of(checkpoint) > good_until:
                logger.info("%s was saved after the problem began; going further back", checkpoint.name)
                set_aside(checkpoint)

    def _count_bad_step(self) -> tuple[np.ndarray, int]:
        """Record that the last step was bad. Return the positions of its blocks, and how many are bad in a row."""
        state, count = self._run.state, self._run.config.batch.sequences_per_step
        positions = stream_positions(state.blocks - count, count, state.excluded_blocks)
        state.bad_steps = [*state.bad_steps, as_ranges(positions)]
        return positions, len(state.bad_steps)


class LossWatch:
    """Judges each training loss. What it remembers is in the state, so a resumed run judges as a straight one.

    Equal losses give equal verdicts on all processes.
    """

    def __init__(self, symptoms: Collection[str], state: TrainState) -> None:
        self._symptoms, self._state = symptoms, state

    def verdict(self, step: int, loss: float) -> tuple[Literal["spike", "divergence"] | None, str]:
        """Return what is wrong with a step's loss, or None, and the evidence.

        loss: nats per token, over all processes.
        """
        state = self._state
        if state.first_loss is None:
            state.first_loss = loss
        if "spike" in self._symptoms and (evidence := self._spike(loss)):
            return "spike", evidence
        state.usual_losses = [*state.usual_losses, loss][-LEVEL_STEPS:]
        state.recent_losses = [*state.recent_losses, loss][-LEVEL_STEPS:]
        if "divergence" in self._symptoms and (evidence := self._divergence(step, state.first_loss)):
            return "divergence", evidence
        return None, ""

    def _spike(self, loss: float) -> str:
        """Return the evidence of a spike; "" if there is none."""
        losses = self._state.usual_losses
        if len(losses) < LEVEL_STEPS // 2:
            return ""
        usual = median(losses)
        is_spike = loss > usual + max(SPIKE_SHARE * usual, SIGMAS * robust_sigma(losses))
        return f"the training loss is {loss:.4g}, up from {usual:.4g} in the steps before" if is_spike else ""

    def _divergence(self, step: int, first_loss: float) -> str:
        """Return the evidence of a divergence; "" if there is none."""
        state = self._state
        if len(state.recent_losses) < LEVEL_STEPS // 2:
            return ""
        level, lowest = median(state.recent_losses), state.lowest_level
        if level < lowest:
            state.lowest_level, state.lowest_level_step = level, step
        high = min(max(RISE * lowest, lowest + MIN_RISE), RISE_FROM_START * first_loss)
        was, at = min((lowest, state.lowest_level_step), (first_loss, 1))
        return f"the median training loss is {level:.4g}, up from {was:.4g} at step {at}" if level > high else ""
