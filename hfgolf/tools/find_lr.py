"""The learning-rate finder: run real steps at growing learning rates, then restore the run.

Owns the sweeps and restoring everything they change. lr_sweep.py chooses the rates and interprets the losses. The steps
are those of the training loop.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from hfgolf.checkpoint.contents import leaves
from hfgolf.command_line import ResolvedConfig
from hfgolf.config import OptimConfig
from hfgolf.errors import UserError
from hfgolf.tools.lr_sweep import Sweep, has_diverged, suggest
from hfgolf.tools.scratch import scratch_run
from hfgolf.train.feed import start_batches
from hfgolf.train.loop import train_step
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)

LEAD_IN_STEPS = 20


def find_lr(resolved: ResolvedConfig, rates: list[float]) -> list[Sweep]:
    """Sweep the learning rates of a config in a temporary run, and delete its files afterwards.

    rates: the learning rates to try, from `sweep_rates`. Call it in every process that `accelerate launch` starts; all
    return the same. Raises UserError like set_up and sweep_run.
    """
    # compiling does not pay for so few steps
    values = {} if "train.compile" in resolved.sources else {"train__compile": False}
    with scratch_run(resolved, "find_lr", **values) as run:
        return sweep_run(run, rates)


def sweep_run(run: Run, rates: list[float]) -> list[Sweep]:
    """Sweep the learning rates of the run's parameter groups, Muon and AdamW separately, and restore the run.

    All sweeps start from the same weights and read the same batches: the run's next ones, after LEAD_IN_STEPS if the
    run has just begun. While one group is swept, the others keep the learning rates of the config. Afterwards weights,
    optimizer, averages, data, random generators and the run's files are bitwise what they were before. Raises UserError
    if losses or gradients are not finite at the learning rates of the config.
    """
    sweeps = []
    keys = list(dict.fromkeys(_key(group, run.config.optim) for group in run.optimizer.param_groups))
    lead_in_steps = max(0, LEAD_IN_STEPS - run.state.step)
    logger.info("up to %d steps for %s", lead_in_steps + 2 * len(rates) * len(keys), " and ".join(keys))
    with restored(run):
        lead_in = _trial(run, run.state.step)
        # the initial drop (learning token frequencies) happens at any learning rate and says nothing about it
        _check(run, [_step(lead_in) for _ in range(lead_in_steps)])
        for key in keys:
            at_rest = _losses(run, lead_in.state.step, key, [0.0] * len(rates))
            _check(run, at_rest)
            losses = _losses(run, lead_in.state.step, key, rates, at_rest)
            sweep = Sweep(key, rates[: len(losses)], losses, at_rest[: len(losses)], len(losses) < len(rates))
            sweeps.append(sweep)
            end = "then the loss diverged" if sweep.has_diverged else "the highest"
            highest = rates[len(losses) - 1]
            logger.info("optim.%s: %d steps up to learning rate %.2g, %s", key, len(losses), highest, end)
    return sweeps


def suggested_values(sweeps: list[Sweep], optim: OptimConfig) -> dict[str, float]:
    """Return the suggested values, {"optim.key": learning rate}. Raises UserError if a sweep allows no suggestion.

    If the embeddings have their own learning rate, it keeps its ratio to that of their group, as in the sweep.
    """
    values = {f"optim.{sweep.key}": suggest(sweep) for sweep in sweeps}
    if optim.embedding_learning_rate is not None:
        key = sweeps[-1].key  # the sweep with the embeddings: Muon, which has none, comes first
        ratio = optim.embedding_learning_rate / getattr(optim, key)
        values["optim.embedding_learning_rate"] = float(f"{values[f'optim.{key}'] * ratio:.1e}")
    return values


def _key(group: dict[str, Any], optim: OptimConfig) -> str:
    """Return the key of optim that sets a group's rate: one for the main optimizer, one for AdamW next to Muon."""
    return "learning_rate" if group["rule"] == optim.name else "adamw_learning_rate"


def _check(run: Run, losses: list[float]) -> None:
    if not all(map(math.isfinite, losses)):
        raise UserError(
            "train: the loss or the gradient is not finite even at the learning rates of the config;"
            f" lower optim.learning_rate (now {run.config.optim.learning_rate:g})."
        )


def _losses(run: Run, step: int, key: str, rates: list[float], at_rest: list[float] | None = None) -> list[float]:
    """Return the losses of steps from `step` on, with these rates for the groups of a key; restore the run.

    at_rest: losses to compare with; the sweep stops before a loss that has diverged from them.
    """
    optim = run.config.optim
    losses: list[float] = []
    with restored(run):
        trial = _trial(run, step)
        swept = [group for group in run.optimizer.param_groups if _key(group, optim) == key]
        # relative to the key's peak in the config: embeddings may have their own peak
        ratios = [group["initial_lr"] / getattr(optim, key) for group in swept]
        is_hidden = not (run.accelerator.is_main_process and sys.stderr.isatty())
        description = f"optim.{key}" if at_rest else f"without optim.{key}"
        for rate in tqdm(rates, desc=description, unit="step", disable=is_hidden, leave=False):
            for group, ratio in zip(swept, ratios, strict=True):
                group["initial_lr"] = rate * ratio
            loss = _step(trial)
            if at_rest and has_diverged([*losses, loss], at_rest):
                break
            losses.append(loss)
    return losses


def _trial(run: Run, step: int) -> Run:
    """Return a copy of the run at `step`, without a step limit, whose events are not logged.

    The learning rates warm up over the lead-in, then stay.
    """
    trial = copy.copy(run)
    trial.resolved = run.resolved.resolve("find_lr", schedule__warmup_steps=LEAD_IN_STEPS)
    blocks = step * run.config.batch.sequences_per_step
    trial.state = dataclasses.replace(run.state, step=step, blocks=blocks, learning_rate_scale=1.0)
    trial.ema = trial.metrics = None
    trial.step_limit, trial.is_stepping = math.inf, True
    start_batches(trial)
    trial.model.train()
    return trial


def _step(trial: Run) -> float:
    """Run one step of the loop and return its mean loss over all processes; NaN if it made no update."""
    accelerator = trial.accelerator
    result = train_step(trial, math.inf)
    trial.state.count_step(trial.config.batch)
    # fp16's scaler skips steps while it adapts; these are not failures
    is_skipped = result.nonfinite_parameter is not None and accelerator.scaler is None
    loss = torch.tensor(math.nan if is_skipped else result.loss, device=accelerator.device)
    return accelerator.reduce(loss, "mean").item()


@contextmanager
def restored(run: Run) -> Iterator[None]:
    """Restore on exit what steps change: weights, optimizer, gradient scaler, accumulation, random generators."""
    accelerator, optimizer = run.accelerator, run.optimizer
    states = [leaf for _, leaf in leaves(optimizer.state_dict()["state"]) if isinstance(leaf, Tensor)]
    tensors = [*run.raw_model.parameters(), *run.raw_model.buffers(), *states]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]  # a GPU may have no memory left
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
    accumulation_steps, micro_batches = accelerator.gradient_accumulation_steps, accelerator.step
    is_training = run.model.training
    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        run.model.train(is_training)
        accelerator.gradient_accumulation_steps, accelerator.step = accumulation_steps, micro_batches
        if scaler is not None:
            accelerator.scaler.load_state_dict(scaler)
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            group.update(setting)
        run.raw_model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, before in zip(tensors, copies, strict=True):
                tensor.copy_(before)
