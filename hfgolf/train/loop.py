"""The training loop: the page to read first.

train() takes a run from its first step to the exported model; train_step() is one optimizer update. setup.py builds
the run, feed.py delivers batches, recovery.py handles bad steps, finish.py ends the run, and all else that takes part
is a hook (hooks.py). You can follow this page without reading any of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hfgolf.optim.schedule import apply_schedule
from hfgolf.train.clock import Interrupted
from hfgolf.train.console import console
from hfgolf.train.feed import blocks_per_epoch, epoch, halve_until_it_fits
from hfgolf.train.finish import conclude, exit_after_signal, report_failure
from hfgolf.train.hooks import Hook, Hooks
from hfgolf.train.meter import StepResult
from hfgolf.train.process import session
from hfgolf.train.recovery import first_nonfinite_gradient, review
from hfgolf.train.run import Run
from hfgolf.train.saving import flush, report_failed_saves, save
from hfgolf.train.setup import set_up
from hfgolf.train.validation import evaluation_steps, should_stop_early, validate, validate_start, write_sample

if TYPE_CHECKING:
    from hfgolf.config.parse import ResolvedConfig
    from hfgolf.system.signals import Signals

logger = logging.getLogger(__name__)


def train(
    resolved: ResolvedConfig, signals: Signals | None = None, hooks: Sequence[Hook] = (), may_teach: bool = False
) -> dict[str, Any]:
    """Train a model and return the summary: losses, bits per byte, speed and the model's folder.

    Call it in every process that `accelerate launch` starts. signals: already entered by the caller, before its slow
    imports; None: handle signals during this call only. hooks: the same in every process. may_teach: whether the caller
    lets the model teach another one in the minutes that it leaves (autopilot.py).
    Raises UserError for a problem that the user can fix, and SystemExit(128 + signal) if SIGTERM, SIGINT or SIGHUP
    ended the run after a save.
    """
    with session(resolved.config, signals) as (signals, stopwatch):
        run = set_up(resolved, Hooks(hooks), signals, stopwatch, may_teach)
        with signals.deferred():
            try:
                run_steps(run)
            except BaseException as error:
                raise report_failure(run, error)  # noqa: B904 - usually the same error
            flush(run)
            if run.clock.stop_signal:
                exit_after_signal(run)
            signals.stop_message = "after the last step; run the same command with --train.resume auto to finish"
        return conclude(run)


def run_steps(run: Run) -> None:
    """Run the remaining steps; log, evaluate and save when due."""
    every, clock = run.config.train, run.clock
    run.model.train()
    run.is_stepping = True
    run.stopwatch.switch("train")
    batch, evaluations = run.config.batch, partial(evaluation_steps, run)
    per_epoch = blocks_per_epoch(run) * batch.sequence_length
    console.begin(run.step_limit, clock.max_seconds, batch.tokens_per_step, per_epoch, evaluations)
    if run.init_from and run.state.step == 0:
        with run.stopwatch.charge("other"), suppress(Interrupted):
            validate_start(run, clock.raise_if_stopped)
    finish_row(run)
    while not (clock.is_over() or clock.stop_signal or should_stop_early(run)):
        result = train_step(run, clock.expected_steps())
        run.state.count_step(run.config.batch)
        run.meter.add(result)
        run.hooks.call("after_step", run, result)
        clock.synchronize()
        if review(run, result):  # the run was rolled back
            finish_row(run)
            continue
        step, last = run.state.step, clock.is_over()
        console.step(step, run.state.elapsed_seconds, run.state.best_val_loss, run.stopwatch.seconds()["evaluate"])
        evaluating = due(step, every.eval_every_steps, last)
        saving = clock.save_is_due or due(step, every.save_every_steps, last) or bool(clock.stop_signal)
        logging_is_due = due(step, every.log_every_steps, last or step == 1)
        if evaluating or saving or logging_is_due or any(run.hooks.call("wants_row", run, last)):
            with run.stopwatch.charge("other"):
                run.tokens.check()  # before saving: a damaged cache must not reach a checkpoint
                report_step(run, describe(run, last), evaluating, saving)
    if not clock.stop_signal:
        run.tokens.check(wait=True)


def train_step(run: Run, expected_steps: float) -> StepResult:
    """Run one optimizer update; if the gradient is not finite, leave the weights and the optimizer state unchanged."""
    accelerator, optimizer, state, config = run.accelerator, run.optimizer, run.state, run.config
    run.hooks.call("before_step", run, expected_steps)
    with run.hooks.weights(run):
        loss, sample_hash = halve_until_it_fits(run, lambda: accumulate_gradients(run))
    accelerator.unscale_gradients()
    norm = gradient_norm(run.model.parameters())
    loss_value, grad_norm = to_host(loss, norm)
    nonfinite = None if math.isfinite(grad_norm) else first_nonfinite_gradient(run.raw_model)
    apply_schedule(optimizer, state.step, expected_steps, config.optim, config.schedule, state.learning_rate_scale)
    if nonfinite is None and config.train.max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), config.train.max_grad_norm, norm)
    if nonfinite is None or accelerator.scaler is not None:  # the scaler skips nonfinite steps and lowers its scale
        optimizer.step()
    if nonfinite is None and run.ema is not None:
        run.ema.update(state.step + 1)
    optimizer.zero_grad()
    return StepResult(loss_value, grad_norm, nonfinite, sample_hash)


def accumulate_gradients(run: Run) -> tuple[Tensor, Tensor]:
    """Run the forward and backward passes of one step.

    Returns the loss (mean nats per token on this process) and the hash of the samples, both scalars on the device.
    """
    accelerator = run.accelerator
    loss_sum = torch.zeros((), device=accelerator.device)
    hash_sum = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    for _ in range(run.accumulation_steps):
        with run.stopwatch.charge("data"):
            batch = next(run.batches)
        hash_sum += batch.pop("sample_hash")
        with accelerator.accumulate(run.model):
            loss = run.model(**batch).loss
            accelerator.backward(loss)  # divides by accumulation_steps
            loss_sum += loss.detach()
    return loss_sum / run.accumulation_steps, hash_sum


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the global norm of the gradients: a scalar on the device, equal on all ranks. Does not clip."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 shards gradients: norm is a DTensor


def to_host(*scalars: Tensor) -> list[float]:
    """Copy scalars from the device: the only point of a step that waits for it (benchmarks/saving.py measures this)."""
    return torch.stack(scalars).tolist()


def due(step: int, every_steps: int | None, last: bool) -> bool:
    """Return whether an action that runs every `every_steps` steps, and at the last step, is due."""
    return last or (every_steps is not None and step % every_steps == 0)


def finish_row(run: Run) -> None:
    """Repeat the evaluation in which a signal stopped the run, if the checkpoint that was just loaded is of then."""
    if run.state.unfinished_row is not None:
        with run.stopwatch.charge("other"):
            report_step(run, run.state.unfinished_row, evaluating=True, saving=False)


def report_step(run: Run, row: dict[str, Any], evaluating: bool, saving: bool) -> None:
    """Evaluate if due, log the row of a step, and save if due."""
    clock = run.clock
    if run.accelerator.is_main_process:
        run.folder.hold()
    is_saved = run.state.unfinished_row is not None  # the previous session stopped in this evaluation and saved
    run.state.unfinished_row = row if evaluating else None
    try:
        if evaluating:
            row = row | validate(run, clock.raise_if_stopped)
            write_sample(run)
        run.state.unfinished_row = None
        console.show(row, clock.expected_steps())
        run.log(row | run.stopwatch.row())
        if evaluating:
            run.hooks.call("after_evaluate", run, row)
            clock.agree_on_end()
    except Interrupted:
        logger.info("evaluation at step %d interrupted; resuming the run repeats it", run.state.step)
        saving = not is_saved
    if saving or run.state.best_step == run.state.step or should_stop_early(run) or clock.is_over():
        save(run)
    report_failed_saves(run)


def describe(run: Run, is_last: bool) -> dict[str, Any]:
    """Return the row of metrics.jsonl for the steps since the last row."""
    row = {
        "step": run.state.step,
        "epoch": epoch(run),
        "tokens": run.state.tokens,
        **run.meter.row(run.accelerator.reduce),
        "val_loss": None,
        "val_bits_per_byte": None,
        "learning_rate": run.optimizer.param_groups[0]["lr"],
        "skipped_steps": run.state.skipped_steps,
        "elapsed_seconds": run.state.elapsed_seconds,
    }
    for columns in run.hooks.call("columns", run, is_last):
        row |= columns
    return row
