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


def review(run: Run, result: StepResult) -> bool:
    """Record the last step. If it was one bad step too many, roll the run back to an earlier step and return True.

    What it remembers is in run.state. Raises UserError, with a diagnosis, if train.max_rollbacks is reached or a
    rollback is not possible.
    """
    if result.nonfinite_parameter is not None:
        return _review_nonfinite(run, result)
    symptoms = set(run.config.train.rollback_on) - {"nonfinite"}
    if symptoms:
        loss = torch.tensor(result.loss, device=run.accelerator.device)
        mean_loss = run.accelerator.reduce(loss, "mean").item()  # over all processes, so that they all decide alike
        verdict, evidence = judge(mean_loss, run.state, symptoms) if math.isfinite(mean_loss) else (None, "")
        if verdict is not None:
            return _review_bad_loss(run, verdict, f"step {run.state.step}: {evidence}")
    run.state.bad_steps, run.state.suspect_step = [], None
    return False


def _review_nonfinite(run: Run, result: StepResult) -> bool:
    train, state, first = run.config.train, run.state, result.nonfinite_parameter
    state.skipped_steps += 1
    scaler = run.accelerator.scaler
    if scaler is not None and scaler.get_scale() > 1:  # finding the right scale needs no rollback
        scale = scaler.get_scale()
        run.event("fp16_overflow", first_parameter=first, loss_scale=scale)
        where = f"step {state.step}: fp16 overflow, first in {first}"
        logger.info(f"{where}; update skipped, loss scale lowered to {scale:,.0f}")
        return False
    positions, in_a_row = _count_bad_step(run)
    blocks = starts_of(run, positions)
    diagnosis = (
        f"step {state.step}: the gradient is not finite (norm {result.grad_norm}, loss {result.loss:.4g}), "
        f"first in {first}, blocks from tokens {join_words(blocks, maximum=6)}"
    )
    figures = {"train_loss": result.loss, "grad_norm": result.grad_norm}
    run.event("skipped_step", first_parameter=first, **figures, block_starts=blocks)
    logger.info("%s; update skipped (%d of %d in a row)", diagnosis, in_a_row, train.max_skipped_steps)
    if in_a_row < train.max_skipped_steps:
        return False
    _roll_back(run, "nonfinite", diagnosis, good_until=state.step)  # skipped steps left weights alone
    return True


def _review_bad_loss(run: Run, verdict: str, diagnosis: str) -> bool:
    _, in_a_row = _count_bad_step(run)
    if verdict == "spike" and in_a_row < run.config.train.max_skipped_steps:
        return False
    logger.info("%s (%s)", diagnosis, verdict)
    good_until = run.state.step - in_a_row if verdict == "spike" else run.state.lowest_level_step
    _roll_back(run, verdict, diagnosis, good_until)
    return True


def _count_bad_step(run: Run) -> tuple[np.ndarray, int]:
    """Record that the last step was bad. Return the positions of its blocks, and how many are bad in a row."""
    state, count = run.state, run.config.batch.sequences_per_step
    positions = stream_positions(state.blocks - count, count, state.excluded_blocks)
    state.bad_steps = [*state.bad_steps, as_ranges(positions)]
    return positions, len(state.bad_steps)


def _roll_back(run: Run, cause: str, diagnosis: str, good_until: int) -> None:
    with run.stopwatch.charge("checkpoint"):
        _restore(run, cause, diagnosis, good_until)
    run.meter.restart()  # the steps since the last row are undone


def _restore(run: Run, cause: str, diagnosis: str, good_until: int) -> None:
    """Load the newest checkpoint up to step good_until that is not suspect, or else the oldest one."""
    train = run.config.train
    run.checkpoints.wait()
    advice = f"lower optim.learning_rate (now {run.config.optim.learning_rate:g}) or inspect these blocks of the data"
    if cause not in train.rollback_on:
        raise UserError(f"train: {diagnosis}; train.rollback_on does not include {cause}; {advice}.")
    if run.state.rollbacks >= train.max_rollbacks:
        raise UserError(f"train: {diagnosis}; {run.state.rollbacks} rollbacks did not help; {advice}.")
    if run.accelerator.is_main_process:
        _set_suspects_aside(run, good_until)
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


def _set_suspects_aside(run: Run, good_until: int) -> None:
    """Set aside every checkpoint that is suspect or later than step good_until, except the oldest."""
    for checkpoint in newest_first(run.folder.checkpoints)[:-1]:
        if step_of(checkpoint) == run.state.suspect_step:
            logger.info("no good step followed %s; going further back", checkpoint.name)
            set_aside(checkpoint)
        elif step_of(checkpoint) > good_until:
            logger.info("%s was saved after the problem began; going further back", checkpoint.name)
            set_aside(checkpoint)


def judge(
    loss: float, state: TrainState, symptoms: Collection[str]
) -> tuple[Literal["spike", "divergence"] | None, str]:
    """Return what is wrong with the training loss of a step, or None, and the evidence.

    Equal losses give equal verdicts on all processes, and after a resume: what it remembers is in the state. loss: nats
    per token, over all processes.
    """
    if state.first_loss is None:
        state.first_loss = loss
    if "spike" in symptoms and (evidence := _spike(loss, state.usual_losses)):
        return "spike", evidence
    state.usual_losses = [*state.usual_losses, loss][-LEVEL_STEPS:]
    state.recent_losses = [*state.recent_losses, loss][-LEVEL_STEPS:]
    if "divergence" in symptoms and (evidence := _divergence(state, state.first_loss)):
        return "divergence", evidence
    return None, ""


def _spike(loss: float, usual_losses: list[float]) -> str:
    """Return the evidence of a spike; "" if there is none."""
    if len(usual_losses) < LEVEL_STEPS // 2:
        return ""
    usual = median(usual_losses)
    is_spike = loss > usual + max(SPIKE_SHARE * usual, SIGMAS * robust_sigma(usual_losses))
    return f"the training loss is {loss:.4g}, up from {usual:.4g} in the steps before" if is_spike else ""


def _divergence(state: TrainState, first_loss: float) -> str:
    """Return the evidence of a divergence; "" if there is none."""
    if len(state.recent_losses) < LEVEL_STEPS // 2:
        return ""
    level, lowest = median(state.recent_losses), state.lowest_level
    if level < lowest:
        state.lowest_level, state.lowest_level_step = level, state.step
    high = min(max(RISE * lowest, lowest + MIN_RISE), RISE_FROM_START * first_loss)
    was, at = min((lowest, state.lowest_level_step), (first_loss, 1))
    return f"the median training loss is {level:.4g}, up from {was:.4g} at step {at}" if level > high else ""
