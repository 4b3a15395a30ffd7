"""The training loop: the page a newcomer reads first.

train() takes a run from its first step to its model; train_step() is one optimizer update. How things are built is in
setup.py, what happens when a step goes wrong in guard.py, how it ends in finish.py; none of them is needed to
follow what happens here.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from accelerate import DistributedType
from torch import Tensor

from hfgolf.checkpoint.store import saved_step
from hfgolf.command_line import ResolvedConfig
from hfgolf.data.batches import explain_worker
from hfgolf.data.manifest import DamagedCacheError
from hfgolf.optim.schedule import apply_schedule
from hfgolf.run.folder import FolderTakenError
from hfgolf.train.clock import Clock, Interrupted
from hfgolf.train.console import Console
from hfgolf.train.finish import conclude, push_in_training, report_run
from hfgolf.train.meter import StepResult
from hfgolf.train.recovery import Guard, first_sick_gradient, gradient_norm, halve_until_it_fits, should_stop_early
from hfgolf.train.setup import Run, set_up, write_description
from hfgolf.train.signals import Signals

logger = logging.getLogger(__name__)


def train(resolved: ResolvedConfig, signals: Signals | None = None) -> dict[str, Any]:
    """Train as the config says and return the summary: losses, bits per byte, speed, where the model lies.

    signals: entered by the caller before its imports; None: handlers are there from here on, and gone afterwards.
    Raises UserError for what a person can mend, SystemExit(128 + signal) if SIGTERM, SIGINT or SIGHUP ended it after a
    save. Call it in every process that `accelerate launch` started.
    """
    with signals or Signals() as signals:
        run = set_up(resolved)
        clock = Clock(run, signals)
        with signals.noted():
            try:
                run_steps(run, clock)
            except FolderTakenError:
                raise  # what is there now is another run's
            except BaseException as raised:
                error = explain_worker(raised)
                if isinstance(error, DamagedCacheError):
                    run.tracker.event("damaged_cache", run.state, reason=str(error))
                settle(run)
                report_run(run)
                if error is not raised:
                    raise error from None
                raise
            settle(run)
            if clock.stop_signal:
                leave(run, clock.stop_signal)
            signals.where = "after the last step; the same command with --train.resume auto finishes what is left"
        return conclude(run)


def settle(run: Run) -> None:
    """Bring to an end what the steps began, whatever ended them: what was to be saved is."""
    run.stopwatch.switch("other")
    with run.stopwatch.of("checkpoint"):
        run.checkpoints.wait()
    see_doctor(run)
    report_failed_saves(run)


def run_steps(run: Run, clock: Clock) -> None:
    """Make the steps that the run has left; log, evaluate and save when it is time to."""
    every, hub = run.config.train, run.config.hub
    console, guard = Console(run), Guard(run)
    run.model.train()
    run.has_begun = True
    run.stopwatch.switch("train")
    if run.state.unfinished_row is not None:
        with run.stopwatch.of("other"):
            report_step(run, clock, console, run.state.unfinished_row, evaluating=True, saving=False)
    while not (clock.is_over() or clock.stop_signal or should_stop_early(run)):
        result = train_step(run, clock.total_steps())
        run.state.count_step(run.config.batch)
        run.meter.add(result)
        clock.tick()
        if guard.look_at(result):
            continue  # back at an earlier step
        step, last = run.state.step, clock.is_over()
        evaluating = due(step, every.eval_every_steps, last)
        saving = clock.save_is_due() or due(step, every.save_every_steps, last) or bool(clock.stop_signal)
        pushing = hub.push and due(step, hub.every_steps, False)
        if evaluating or saving or pushing or due(step, every.log_every_steps, last or step == 1):
            with run.stopwatch.of("other"):
                run.tokens.check()  # before what was learned from them is saved
                report_step(run, clock, console, describe(run), evaluating, saving)
                if pushing and not clock.stop_signal:
                    push_in_training(run)
    console.close()
    if not clock.stop_signal:
        run.tokens.check(wait=True)


def report_step(run: Run, clock: Clock, console: Console, row: dict[str, Any], evaluating: bool, saving: bool) -> None:
    """Complete the row of a step by an evaluation, write and show it, and save; each if it is due."""
    if run.accelerator.is_main_process:
        run.folder.hold()
    is_saved = run.state.unfinished_row is not None  # by the session before, which was stopped here
    run.state.unfinished_row = row if evaluating else None
    try:
        if evaluating:
            row = row | validate(run, clock.interrupt)
            write_sample(run)
        run.state.unfinished_row = None
        run.tracker.log(row | run.stopwatch.row())
        console.show(row, clock.total_steps())
    except Interrupted:
        logger.info("the evaluation at step %d is left to the run that continues this one", run.state.step)
        saving = not is_saved
    see_doctor(run)
    if saving or run.state.best_step == run.state.step or should_stop_early(run):
        save(run)
        clock.note_save()
    report_failed_saves(run)


def train_step(run: Run, total_steps: float) -> StepResult:
    """Make one optimizer update; where the gradient is not finite, leave weights and optimizer as they are."""
    accelerator, optimizer, state, config = run.accelerator, run.optimizer, run.state, run.config
    loss, sample_hash = halve_until_it_fits(run, lambda: accumulate_gradients(run))
    accelerator.unscale_gradients()
    norm = gradient_norm(run.model.parameters())
    loss_value, grad_norm = read_off(loss, norm)
    sick_parameter = None if math.isfinite(grad_norm) else first_sick_gradient(run.raw_model)
    apply_schedule(optimizer, state.step, total_steps, config.optim, config.schedule, state.learning_rate_scale)
    if sick_parameter is None and config.train.max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), config.train.max_grad_norm, norm)
    if sick_parameter is None or accelerator.scaler is not None:  # the scaler skips by itself, and learns from it
        optimizer.step()
    if sick_parameter is None and run.ema is not None:
        run.ema.update(state.step + 1)
    optimizer.zero_grad()
    return StepResult(loss_value, grad_norm, sick_parameter, sample_hash)


def read_off(*scalars: Tensor) -> list[float]:
    """Return numbers from the device: the one moment in a step that waits for it (benchmarks/saving.py measures it)."""
    return torch.stack(scalars).tolist()


def accumulate_gradients(run: Run) -> tuple[Tensor, Tensor]:
    """Run forward and backward passes over the micro-batches of a step.

    Returns the loss (mean nats a token on this process) and the hash of the samples, both scalars on the device.
    """
    accelerator = run.accelerator
    loss_sum = torch.zeros((), device=accelerator.device)
    hash_sum = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    for _ in range(run.accumulation_steps):
        with run.stopwatch.of("data"):
            batch = next(run.batches)
        hash_sum += batch.pop("sample_hash")
        with accelerator.accumulate(run.model):
            loss = run.model(**batch).loss
            accelerator.backward(loss)  # divides by accumulation_steps
            loss_sum += loss.detach()
    return loss_sum / run.accumulation_steps, hash_sum


def due(step: int, every_steps: int | None, last: bool) -> bool:
    """Say whether something that happens every so many steps, and at the end, happens now."""
    return last or (every_steps is not None and step % every_steps == 0)


def describe(run: Run) -> dict[str, Any]:
    """Return the row of metrics.jsonl for the steps since the last one."""
    step = run.state.step
    return {
        "step": step,
        "epoch": run.epoch,
        "tokens": run.state.tokens,
        **run.meter.row(run.accelerator.reduce),
        "val_loss": None,
        "val_bits_per_byte": None,
        "learning_rate": run.optimizer.param_groups[0]["lr"],
        "skipped_steps": run.state.skipped_steps,
        "elapsed_seconds": run.state.elapsed_seconds,
    }


def validate(run: Run, before_batch: Callable[[], None]) -> dict[str, Any]:
    """Evaluate on train.eval_tokens of the validation part, the averaged weights too; returns columns of the row."""
    budget = run.config.train.eval_tokens
    evaluation = run.evaluate(budget, before_batch)
    row = {
        "val_loss": evaluation.loss,
        "val_bits_per_byte": evaluation.bits_per_byte,
        "val_tokens": evaluation.num_tokens,
        "val_bytes": evaluation.num_bytes,
    }
    if run.ema is not None:
        with run.ema.applied():
            averaged = run.evaluate(budget, before_batch)
        row |= {"val_loss_ema": averaged.loss, "val_bits_per_byte_ema": averaged.bits_per_byte}
        evaluation = averaged if run.config.optim.ema_export else evaluation
    if budget is None:
        run.whole_evaluations = {run.state.step: evaluation}
    run.state.judge(evaluation.loss, run.config.train.min_improvement)
    return row


def write_sample(run: Run) -> None:
    """Let the model write some text and keep it as an event."""
    tokens, accelerator = run.config.train.sample_tokens, run.accelerator
    if tokens is None or not accelerator.is_main_process or accelerator.distributed_type == DistributedType.FSDP:
        return  # sharded weights are on no process
    with run.exported_weights():
        text = run.sample(tokens)
    if text is not None:
        run.tracker.event("sample", run.state, text=text)


def see_doctor(run: Run) -> None:
    """Say and note what the doctor finds in what was logged since the last time."""
    for finding in run.rounds.visit() if run.accelerator.is_main_process else []:
        logger.warning("doctor: %s", finding)
        run.tracker.event("finding", run.state, **asdict(finding))


def save(run: Run) -> None:
    """Have a checkpoint written, which goes on in the background."""
    with suppress(OSError):  # the save meets the same disk, and says so
        if not run.folder.config.exists():  # somebody deleted the folder under the run
            write_description(run)
    run.state.seconds = run.stopwatch.seconds()
    with run.stopwatch.of("checkpoint"):
        run.checkpoints.save(is_best=run.state.best_step == run.state.step, before_commit=run.tracker.sync)


def report_failed_saves(run: Run) -> None:
    """Say once of each checkpoint that could not be written why, and what there is."""
    for failure in run.checkpoints.failures():
        step = saved_step(run.folder.checkpoints)
        logger.warning("%s; %s", failure, "there is none" if step is None else f"the newest is of step {step}")
        run.tracker.event("save_failed", run.state, reason=failure)


def leave(run: Run, signal_number: int) -> None:
    """End the process after a signal, once the save has ended; says how to continue."""
    name, step = signal.Signals(signal_number).name, saved_step(run.folder.checkpoints)
    if step is None:
        logger.info("stopped by %s at step %d; nothing is saved: a resume begins anew", name, run.state.step)
    else:
        text = "stopped by %s at step %d; saved up to step %d; the same command with --train.resume auto continues it"
        logger.info(text, name, run.state.step, step)
    run.tracker.event("stopped", run.state, signal=name)
    report_run(run)
    run.tracker.finish()
    raise SystemExit(128 + signal_number)
