"""The learning-rate finder: real steps of a run at growing learning rates, and the run as it was afterwards.

Owns the sweeps and putting back what they changed. Which rates are tried and what their losses say is in
optim/lr_finder.py; a step is that of the loop.
"""

from __future__ import annotations

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
from hfgolf.train.trackers import Tracker

logger = logging.getLogger(__name__)

LEAD_IN_STEPS = 20


def find_lr(resolved: ResolvedConfig, rates: list[float]) -> list[Sweep]:
    """Sweep the learning rates of the run that a config describes; what its set-up writes is removed again.

    rates: the learning rates to try, as `sweep_rates` makes them. Raises UserError as set_up and sweep_run do. Call it
    in every process that `accelerate launch` started; all return the same.
    """
    # so few steps do not earn the compilation back
    values = {} if "train.compile" in resolved.sources else {"train__compile": False}
    with scratch_run(resolved, "find_lr", **values) as run:
        return sweep_run(run, rates)


def sweep_run(run: Run, rates: list[float]) -> list[Sweep]:
    """Sweep the learning rates of the run's groups, the Muon and the AdamW groups apart; leave no trace in the run.

    All sweeps begin at the same weights and read the same batches: those that follow the run's step, or LEAD_IN_STEPS
    later in a run that has just begun. While some groups are swept the others keep the learning rates of the config.
    Weights, optimizer, averages, data, random generators and the run's files are afterwards what they were before, to
    the last bit. UserError where losses or gradients are not finite at the learning rates of the config.
    """
    sweeps = []
    keys = list(dict.fromkeys(_key(group, run.config.optim) for group in run.optimizer.param_groups))
    lead_in_steps = max(0, LEAD_IN_STEPS - run.state.step)
    logger.info("%d steps at most for %s", lead_in_steps + 2 * len(rates) * len(keys), " and ".join(keys))
    with restored(run):
        lead_in = _trial(run, run.state.step)
        # the first fall, to how frequent each token is, happens at any learning rate and says nothing about it
        _check(run, [_step(lead_in) for _ in range(lead_in_steps)])
        for key in keys:
            at_rest = _losses(run, lead_in.state.step, key, [0.0] * len(rates))
            _check(run, at_rest)
            losses = _losses(run, lead_in.state.step, key, rates, at_rest)
            sweep = Sweep(key, rates[: len(losses)], losses, at_rest[: len(losses)], len(losses) < len(rates))
            sweeps.append(sweep)
            where = "where the loss diverged" if sweep.has_diverged else "the last"
            logger.info(
                "optim.%s: %d steps, to learning rate %.2g, %s", key, len(losses), rates[len(losses) - 1], where
            )
    return sweeps


def suggested_values(sweeps: list[Sweep], optim: OptimConfig) -> dict[str, float]:
    """Return the suggestion as values of the config, by dotted key; UserError where a sweep allows none.

    Embeddings with a learning rate of their own keep its ratio to that of their groups, as in the sweep.
    """
    values = {f"optim.{sweep.key}": suggest(sweep) for sweep in sweeps}
    if optim.embedding_learning_rate is not None:
        key = sweeps[-1].key  # the embeddings' too: Muon, which has none, is swept first
        ratio = optim.embedding_learning_rate / getattr(optim, key)
        values["optim.embedding_learning_rate"] = float(f"{values[f'optim.{key}'] * ratio:.1e}")
    return values


def _key(group: dict[str, Any], optim: OptimConfig) -> str:
    """Return the key of optim that a group is swept with: the optimizer's own rule has one, AdamW beside it another."""
    return "learning_rate" if group["rule"] == optim.name else "adamw_learning_rate"


def _check(run: Run, losses: list[float]) -> None:
    if not all(map(math.isfinite, losses)):
        raise UserError(
            "train: loss or gradient are not finite at the learning rates of the config, before any of them grows;"
            f" state a smaller optim.learning_rate (now {run.config.optim.learning_rate:g})."
        )


def _losses(run: Run, step: int, key: str, rates: list[float], at_rest: list[float] | None = None) -> list[float]:
    """Return the losses of steps from `step` on in which the groups of a key have these rates; leave no trace.

    at_rest: the losses to compare with; it ends before the loss that has diverged from them.
    """
    optim = run.config.optim
    losses: list[float] = []
    with restored(run):
        trial = _trial(run, step)
        swept = [group for group in run.optimizer.param_groups if _key(group, optim) == key]
        # to the peak that the config gives the group: embeddings may have one of their own
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
    """Return the same run at `step`, without an end, at its peak learning rates after a warmup over the lead-in."""
    resolved = run.resolved.resolve("find_lr", schedule__warmup_steps=LEAD_IN_STEPS)
    blocks = step * run.config.batch.sequences_per_step
    state = dataclasses.replace(run.state, step=step, blocks=blocks, learning_rate_scale=1.0)
    trial = dataclasses.replace(
        run, resolved=resolved, state=state, ema=None, tracker=_Silent(), step_limit=math.inf, is_stepping=True
    )
    start_batches(trial)
    trial.model.train()
    return trial


def _step(trial: Run) -> float:
    """Make a step of the loop and return its loss, the mean over all processes; NaN where it made no update."""
    accelerator = trial.accelerator
    result = train_step(trial, math.inf)
    trial.state.count_step(trial.config.batch)
    is_skipped = result.nonfinite_parameter is not None and accelerator.scaler is None  # a scaler skips while it adapts
    loss = torch.tensor(math.nan if is_skipped else result.loss, device=accelerator.device)
    return accelerator.reduce(loss, "mean").item()


class _Silent(Tracker):
    """Writes nothing: what happens in a sweep, such as a lack of memory, did not happen to the run."""

    def __init__(self) -> None:
        self._active = False


@contextmanager
def restored(run: Run) -> Iterator[None]:
    """Put back afterwards what steps change: weights, optimizer, gradient scaler, accumulation, random generators."""
    accelerator, optimizer = run.accelerator, run.optimizer
    states = [leaf for _, leaf in leaves(optimizer.state_dict()["state"]) if isinstance(leaf, Tensor)]
    tensors = [*run.raw_model.parameters(), *run.raw_model.buffers(), *states]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]  # a GPU may have no room left
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
    accumulation_steps, micro_batches = accelerator.gradient_accumulation_steps, accelerator.step
    is_training = run.model.training
    of_python, of_numpy = random.getstate(), np.random.get_state()
    gpus = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
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
