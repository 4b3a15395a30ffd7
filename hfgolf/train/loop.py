"""The training loop: the page a newcomer reads first.

train() takes a run from its first step to its model; train_step() is one optimizer update. How things are built is in
setup.py, how they end in conclusion.py; neither is needed to follow what happens here.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import Tensor

from hfgolf.command_line import ResolvedConfig
from hfgolf.errors import UserError
from hfgolf.evaluate.loss import evaluate_loss
from hfgolf.optim.schedule import apply_schedule, projected_steps
from hfgolf.train.checkpoint import point, retain, save_checkpoint
from hfgolf.train.conclusion import conclude, push_in_training
from hfgolf.train.console import Console
from hfgolf.train.setup import Run, set_up


def train(resolved: ResolvedConfig) -> dict[str, Any]:
    """Train as the config says and return the summary: losses, bits per byte, speed, where the model lies.

    Raises UserError for what a person can mend. Call it in every process that `accelerate launch` started.
    """
    run = set_up(resolved)
    every = run.config.train
    console = Console(run)
    clock = Clock(run)
    run.model.train()
    run.meter.restart()
    last = clock.is_over()
    while not last:
        loss, grad_norm, data_seconds = train_step(run, clock.total_steps())
        run.meter.add(loss, grad_norm, data_seconds)
        run.state.step += 1
        step, last = run.state.step, clock.is_over()
        evaluating = due(step, every.eval_every_steps, last)
        saving = due(step, every.save_every_steps, last) or clock.save_is_due()
        pushing = run.config.hub.push and due(step, run.config.hub.every_steps, False)
        if evaluating or saving or pushing or due(step, every.log_every_steps, last or step == 1):
            row = describe(run, clock)
            if evaluating:
                row |= validate(run)
            run.tracker.log(row)
            console.show(row, clock.total_steps())
            if saving or run.state.best_step == step:
                save(run)
            if pushing:
                push_in_training(run)
            run.meter.restart()
    console.close()
    return conclude(run)


def train_step(run: Run, total_steps: float) -> tuple[Tensor, Tensor, float]:
    """Make one optimizer update from accumulation_steps micro-batches.

    Returns the loss (mean nats a token on this process) and the gradient's norm before clipping, both scalars on the
    device, and the seconds spent waiting for data.
    """
    accelerator, optimizer = run.accelerator, run.optimizer
    loss_sum = torch.zeros((), device=accelerator.device)
    data_seconds = 0.0
    for _ in range(run.accumulation_steps):
        asked_at = time.perf_counter()
        batch = next(run.batches)
        data_seconds += time.perf_counter() - asked_at
        with accelerator.accumulate(run.model):
            loss = run.model(**batch).loss
            accelerator.backward(loss)  # divides by accumulation_steps
            loss_sum += loss.detach()
    max_norm = run.config.train.max_grad_norm
    grad_norm = accelerator.clip_grad_norm_(run.model.parameters(), math.inf if max_norm is None else max_norm)
    apply_schedule(optimizer, run.state.step, total_steps, run.config.optim, run.config.schedule)
    optimizer.step()  # under fp16 accelerate unscales before clipping and skips the step where a gradient overflowed
    optimizer.zero_grad()
    return loss_sum / run.accumulation_steps, torch.as_tensor(grad_norm), data_seconds


def due(step: int, every_steps: int | None, last: bool) -> bool:
    """Say whether something that happens every so many steps, and at the end, happens now."""
    return last or (every_steps is not None and step % every_steps == 0)


def describe(run: Run, clock: Clock) -> dict[str, Any]:
    """Return the row of metrics.jsonl for the steps since the last one; UserError where the loss is not finite."""
    step = run.state.step
    run.state.elapsed_seconds = clock.elapsed_seconds()
    row = {
        "step": step,
        "epoch": run.epoch,
        "tokens": step * run.config.batch.tokens_per_step,
        **run.meter.row(lambda losses: run.accelerator.reduce(losses, "mean")),
        "val_loss": None,
        "val_bits_per_byte": None,
        "learning_rate": run.optimizer.param_groups[0]["lr"],
        "elapsed_seconds": run.state.elapsed_seconds,
    }
    if not math.isfinite(row["train_loss"]):
        run.tracker.log(row)
        raise UserError(
            f"train: the loss is {row['train_loss']} at step {step}; nothing was saved after the last checkpoint."
            f" Lower optim.learning_rate (now {run.config.optim.learning_rate:g}), then start anew."
        )
    return row


def validate(run: Run) -> dict[str, Any]:
    """Evaluate on train.eval_tokens of the validation part and remember the best; returns columns of the row."""
    train = run.config.train
    started_at = time.perf_counter()
    evaluation = evaluate_loss(
        run.raw_model,
        run.tokens.val,
        run.accelerator,
        sequence_length=run.config.batch.sequence_length,
        batch_size=run.micro_batch_size,
        budget_tokens=train.eval_tokens,
    )
    if train.eval_tokens is None:
        run.whole_evaluations = {run.state.step: evaluation}
    if evaluation.loss < run.state.best_val_loss:
        run.state.best_val_loss, run.state.best_step = evaluation.loss, run.state.step
    return {
        "val_loss": evaluation.loss,
        "val_bits_per_byte": evaluation.bits_per_byte,
        "val_tokens": evaluation.num_tokens,
        "val_bytes": evaluation.num_bytes,
        "eval_seconds": time.perf_counter() - started_at,
    }


def save(run: Run) -> None:
    """Write a checkpoint, point `latest` (and `best`) at it, delete what retention lets go."""
    folder, step = run.folder.checkpoints, run.state.step
    checkpoint = save_checkpoint(run.accelerator, folder, step, run.raw_model.config)
    if run.accelerator.is_main_process:
        if run.state.best_step == step:
            point(folder / "best", checkpoint)
        retain(folder, run.config.train.keep_last)
    run.accelerator.wait_for_everyone()


class Clock:
    """Says how far the run is, by steps or by the minutes of the main process, which all processes follow."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._started_at = time.perf_counter() - run.state.elapsed_seconds - run.compile_seconds
        self._saved_at = time.perf_counter()
        self._most_seconds = 60 * (run.config.train.max_minutes or math.inf)

    def elapsed_seconds(self) -> float:
        """Seconds of training so far, earlier sessions and compilation included; equal on all processes."""
        seconds = time.perf_counter() - self._started_at
        if self._run.accelerator.num_processes == 1 or self._most_seconds == math.inf:
            return seconds
        shared = torch.tensor(seconds, dtype=torch.float32, device=self._run.accelerator.device)
        return broadcast(shared).item()

    def total_steps(self) -> float:
        """Return the steps the run will have made, as far as one can tell."""
        if self._most_seconds == math.inf:
            return self._run.most_steps
        projected = projected_steps(self._run.state.step, self.elapsed_seconds() / self._most_seconds)
        return min(self._run.most_steps, projected)

    def is_over(self) -> bool:
        """Say whether the run has reached its last step or minute."""
        if self._run.state.step >= self._run.most_steps:
            return True
        return self._most_seconds < math.inf and self.elapsed_seconds() >= self._most_seconds

    def save_is_due(self) -> bool:
        """Say whether train.save_every_minutes have passed since this last said so; equal on all processes."""
        minutes = self._run.config.train.save_every_minutes
        if minutes is None:
            return False
        passed = torch.tensor(time.perf_counter() - self._saved_at, device=self._run.accelerator.device)
        is_due = broadcast(passed).item() >= 60 * minutes
        if is_due:
            self._saved_at = time.perf_counter()
        return is_due
