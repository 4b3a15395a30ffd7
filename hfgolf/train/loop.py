"""The training loop: the page to read first.

train() takes a run from its first step to its model; train_step() is one optimizer update. setup.py builds what they
use, feed.py delivers the batches, recovery.py deals with steps that go wrong, finish.py ends the run. You need none of
them to follow what happens here.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from hfgolf.checkpoint.store import saved_step
from hfgolf.command_line import ResolvedConfig
from hfgolf.data.batches import explain_worker
from hfgolf.data.manifest import DamagedCacheError
from hfgolf.optim.schedule import apply_schedule
from hfgolf.run.folder import FolderTakenError
from hfgolf.train.clock import Clock, Interrupted
from hfgolf.train.console import Console
from hfgolf.train.feed import epoch, halve_until_it_fits
from hfgolf.train.finish import conclude, push_in_training, report_run
from hfgolf.train.meter import StepResult
from hfgolf.train.recovery import Next, Recovery, first_nonfinite_gradient
from hfgolf.train.run import Run
from hfgolf.train.setup import set_up, write_description
from hfgolf.train.signals import Signals
from hfgolf.train.validation import should_stop_early, validate, write_sample

logger = logging.getLogger(__name__)


def train(resolved: ResolvedConfig, signals: Signals | None = None) -> dict[str, Any]:
    """Train as the config says and return the summary: losses, bits per byte, speed, the folder of the model.

    signals: entered by the caller before its imports; None: handled from here on, until the end of this call.
    Raises UserError for what a person can fix, SystemExit(128 + signal) if SIGTERM, SIGINT or SIGHUP ended it after a
    save. Call it in every process that `accelerate launch` started.
    """
    with signals or Signals() as signals:
        run = set_up(resolved)
        accelerator = run.accelerator
        clock = Clock(
            run.config.train,
            run.state,
            run.stopwatch,
            signals,
            run.step_limit,
            accelerator.num_processes,
            accelerator.is_main_process,
        )
        with signals.noted():
            try:
                run_steps(run, clock)
            except FolderTakenError:
                raise  # the files there now belong to another run
            except BaseException as error:
                raise report_failure(run, error)  # noqa: B904 - most often the same error
            flush(run)
            if clock.stop_signal:
                exit_after_signal(run, clock.stop_signal)
            signals.where = "after the last step; the same command with --train.resume auto finishes what is left"
        return conclude(run)


def run_steps(run: Run, clock: Clock) -> None:
    """Make the steps that the run has left; log, evaluate and save when due."""
    every, hub = run.config.train, run.config.hub
    console = Console(run.state.step, run.step_limit, run.accelerator.is_main_process)
    recovery = Recovery(run)
    run.model.train()
    run.is_stepping = True
    run.stopwatch.switch("train")
    if run.state.unfinished_row is not None:
        with run.stopwatch.of("other"):
            report_step(run, clock, console, run.state.unfinished_row, evaluating=True, saving=False)
    while not (clock.is_over() or clock.stop_signal or should_stop_early(run)):
        result = train_step(run, clock.expected_steps())
        run.state.count_step(run.config.batch)
        run.meter.add(result)
        clock.synchronize()
        if recovery.review(result) is Next.REPEAT:
            continue
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


def train_step(run: Run, expected_steps: float) -> StepResult:
    """Make one optimizer update; if the gradient is not finite, leave weights and optimizer as they are."""
    accelerator, optimizer, state, config = run.accelerator, run.optimizer, run.state, run.config
    loss, sample_hash = halve_until_it_fits(run, lambda: accumulate_gradients(run))
    accelerator.unscale_gradients()
    norm = gradient_norm(run.model.parameters())
    loss_value, grad_norm = to_host(loss, norm)
    nonfinite = None if math.isfinite(grad_norm) else first_nonfinite_gradient(run.raw_model)
    apply_schedule(optimizer, state.step, expected_steps, config.optim, config.schedule, state.learning_rate_scale)
    if nonfinite is None and config.train.max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), config.train.max_grad_norm, norm)
    if nonfinite is None or accelerator.scaler is not None:  # the scaler skips by itself, and learns from it
        optimizer.step()
    if nonfinite is None and run.ema is not None:
        run.ema.update(state.step + 1)
    optimizer.zero_grad()
    return StepResult(loss_value, grad_norm, nonfinite, sample_hash)


def accumulate_gradients(run: Run) -> tuple[Tensor, Tensor]:
    """Run forward and backward passes over the micro-batches of a step.

    Returns the loss (mean nats per token on this process) and the hash of the samples, both scalars on the device.
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


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the global norm of the gradients, a scalar on the device, equal on all ranks; changes nothing."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor if FSDP2 shards the gradients


def to_host(*scalars: Tensor) -> list[float]:
    """Return numbers from the device: the one moment in a step that waits for it (benchmarks/saving.py measures it)."""
    return torch.stack(scalars).tolist()


def due(step: int, every_steps: int | None, last: bool) -> bool:
    """Say whether something that happens every so many steps, and at the end, happens now."""
    return last or (every_steps is not None and step % every_steps == 0)


def report_step(run: Run, clock: Clock, console: Console, row: dict[str, Any], evaluating: bool, saving: bool) -> None:
    """Evaluate if due, write and show the row of a step, and save if due."""
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
        console.show(row, clock.expected_steps())
    except Interrupted:
        logger.info("the evaluation at step %d is left to the run that continues this one", run.state.step)
        saving = not is_saved
    report_findings(run)
    if saving or run.state.best_step == run.state.step or should_stop_early(run):
        save(run)
        clock.note_save()
    report_failed_saves(run)


def describe(run: Run) -> dict[str, Any]:
    """Return the row of metrics.jsonl for the steps since the last one."""
    return {
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


def save(run: Run) -> None:
    """Start writing a checkpoint, in the background."""
    with suppress(OSError):  # the save meets the same disk, and says so
        if not run.folder.config.exists():  # somebody deleted the folder under the run
            write_description(run)
    run.state.seconds = run.stopwatch.seconds()
    with run.stopwatch.of("checkpoint"):
        run.checkpoints.save(is_best=run.state.best_step == run.state.step, before_commit=run.tracker.sync)


def report_findings(run: Run) -> None:
    """Log what the doctor finds in the rows since the last time."""
    for finding in run.monitor.new_findings() if run.accelerator.is_main_process else []:
        logger.warning("doctor: %s", finding)
        run.tracker.event("finding", run.state, **asdict(finding))


def report_failed_saves(run: Run) -> None:
    """Say once, for each checkpoint that could not be written, why, and which one there is."""
    for failure in run.checkpoints.failures():
        step = saved_step(run.folder.checkpoints)
        logger.warning("%s; %s", failure, "there is none" if step is None else f"the newest is of step {step}")
        run.tracker.event("save_failed", run.state, reason=failure)


def flush(run: Run) -> None:
    """Wait for the pending save and log its outcome, however the loop ended."""
    run.stopwatch.switch("other")
    with run.stopwatch.of("checkpoint"):
        run.checkpoints.wait()
    report_findings(run)
    report_failed_saves(run)


def report_failure(run: Run, raised: BaseException) -> BaseException:
    """Leave a run that died as complete as it can be; return what ended it, explained if a loader worker did."""
    error = explain_worker(raised)
    if isinstance(error, DamagedCacheError):
        run.tracker.event("damaged_cache", run.state, reason=str(error))
    flush(run)
    report_run(run)
    return error


def exit_after_signal(run: Run, signal_number: int) -> None:
    """End the process after a signal, once the save has ended; say how to continue."""
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
