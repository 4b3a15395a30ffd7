"""The learning-rate finder: run real steps at growing learning rates in a temporary run, and say what the losses mean.

This is the range test of Smith, "Cyclical learning rates for training neural networks", arXiv 1506.01186, section 3.3,
with fastai's exponential growth and smoothing. In a plain range test, the loss also falls because training continues,
and it varies with the batches. So each sweep is compared with the same steps while the swept groups are frozen, which
has both effects. The steps are those of the training loop.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from hfgolf.commands.scratch import scratch_run
from hfgolf.config.parse import ResolvedConfig
from hfgolf.config.sections import OptimSection
from hfgolf.system.errors import UserError
from hfgolf.train.feed import start_batches
from hfgolf.train.loop import train_step
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)

LEAD_IN_STEPS = 20
SMOOTHING = 0.8
MEMORY_STEPS = 5  # 1 / (1 - SMOOTHING): a smoothed loss averages about this many steps
DIVERGED_NATS = 0.1
SHARE_OF_GAIN = 0.95
RULE = (
    f"the lowest learning rate with {SHARE_OF_GAIN:.0%} of the largest gain; the gain is how far the smoothed loss is"
    " below that of the same steps with the swept parameters frozen"
)


@dataclass(frozen=True)
class Sweep:
    """The losses of one sweep up to its end, in nats per token."""

    key: str
    """The swept key of the section optim: learning_rate or adamw_learning_rate."""
    learning_rates: list[float]
    losses: list[float]
    """Loss of the step at each learning rate, computed before the update."""
    losses_at_rest: list[float]
    """Losses on the same batches, from the same start, with the swept groups frozen."""
    has_diverged: bool
    """True if the sweep ended because the loss diverged, False if it reached the last rate."""

    @property
    def gains(self) -> list[float]:
        """How far each smoothed loss is below that at rest."""
        return smoothed_gains(self.losses, self.losses_at_rest)


def find_lr(resolved: ResolvedConfig, rates: list[float]) -> list[Sweep]:
    """Sweep the learning rates of a config's parameter groups, Muon and AdamW separately, in a temporary run.

    rates: the learning rates to try, from `sweep_rates`. All sweeps start from the same weights and read the same
    batches, those after LEAD_IN_STEPS. While one group is swept, the others keep the learning rates of the config. Call
    it in every process that `accelerate launch` starts; all return the same. Raises UserError like set_up, and if
    losses or gradients are not finite at the learning rates of the config.
    """
    values: dict[str, Any] = {"schedule__warmup_steps": LEAD_IN_STEPS}
    if "train.compile" not in resolved.sources:  # compiling does not pay for so few steps
        values["train__compile"] = False
    sweeps = []
    with scratch_run(resolved, "find_lr", **values) as run:
        run.ema = None
        keys = list(dict.fromkeys(_key(group, run.config.optim) for group in run.optimizer.param_groups))
        logger.info("up to %d steps for %s", LEAD_IN_STEPS + 2 * len(rates) * len(keys), " and ".join(keys))
        # the initial drop (learning token frequencies) happens at any learning rate and says nothing about it
        _check(run, [_step(run) for _ in range(LEAD_IN_STEPS)])
        for key in keys:
            at_rest = _losses(run, key, [0.0] * len(rates))
            _check(run, at_rest)
            losses = _losses(run, key, rates, at_rest)
            sweep = Sweep(key, rates[: len(losses)], losses, at_rest[: len(losses)], len(losses) < len(rates))
            sweeps.append(sweep)
            end = "then the loss diverged" if sweep.has_diverged else "the highest"
            highest = rates[len(losses) - 1]
            logger.info("optim.%s: %d steps up to learning rate %.2g, %s", key, len(losses), highest, end)
    return sweeps


def suggested_values(sweeps: list[Sweep], optim: OptimSection) -> dict[str, float]:
    """Return the suggested values, {"optim.key": learning rate}. Raises UserError if a sweep allows no suggestion.

    If embeddings or vectors have their own learning rate, it keeps its ratio to that of their group, as in the sweep.
    """
    values = {f"optim.{sweep.key}": suggest(sweep) for sweep in sweeps}
    key = sweeps[-1].key  # the sweep with embeddings and vectors: Muon, which has none, comes first
    factor = values[f"optim.{key}"] / getattr(optim, key)
    for name in ("embedding_learning_rate", "vector_learning_rate"):
        if (rate := getattr(optim, name)) is not None:
            values[f"optim.{name}"] = float(f"{rate * factor:.1e}")
    return values


def _key(group: dict[str, Any], optim: OptimSection) -> str:
    """Return the key of optim that sets a group's rate: one for the main optimizer, one for AdamW next to Muon."""
    return "learning_rate" if group["rule"] == optim.name else "adamw_learning_rate"


def _check(run: Run, losses: list[float]) -> None:
    if not all(map(math.isfinite, losses)):
        raise UserError(
            "train: the loss or the gradient is not finite even at the learning rates of the config;"
            f" lower optim.learning_rate (now {run.config.optim.learning_rate:g})."
        )


def _losses(run: Run, key: str, rates: list[float], at_rest: list[float] | None = None) -> list[float]:
    """Return the losses of steps after the lead-in, with these rates for the groups of a key; restore the run.

    at_rest: losses to compare with; the sweep stops before a loss that has diverged from them.
    """
    optim = run.config.optim
    losses: list[float] = []
    with _restored(run):
        start_batches(run)
        swept = [group for group in run.optimizer.param_groups if _key(group, optim) == key]
        # relative to the key's peak in the config: embeddings may have their own peak
        ratios = [group["initial_lr"] / getattr(optim, key) for group in swept]
        is_hidden = not (run.accelerator.is_main_process and sys.stderr.isatty())
        description = f"optim.{key}" if at_rest else f"without optim.{key}"
        for rate in tqdm(rates, desc=description, unit="step", disable=is_hidden, leave=False):
            for group, ratio in zip(swept, ratios, strict=True):
                group["initial_lr"] = rate * ratio
            loss = _step(run)
            if at_rest and has_diverged([*losses, loss], at_rest):
                break
            losses.append(loss)
    return losses


def _step(run: Run) -> float:
    """Run one step of the loop and return its mean loss over all processes; NaN if it made no update."""
    accelerator = run.accelerator
    result = train_step(run, math.inf)
    run.state.count_step(run.config.batch)
    # fp16's scaler skips steps while it adapts; these are not failures
    is_skipped = result.nonfinite_parameter is not None and accelerator.scaler is None
    loss = torch.tensor(math.nan if is_skipped else result.loss, device=accelerator.device)
    return accelerator.reduce(loss, "mean").item()


@contextmanager
def _restored(run: Run) -> Iterator[None]:
    """Restore on exit what steps change: weights, optimizer, gradient scaler, torch's random generators, the step."""
    scaler = run.accelerator.scaler
    stateful = [run.raw_model, run.optimizer, *([scaler] if scaler is not None else [])]
    states, state = copy.deepcopy([item.state_dict() for item in stateful]), dataclasses.replace(run.state)
    gpus = [run.accelerator.device] if run.accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        yield
    run.state = state
    for item, before in zip(stateful, states, strict=True):
        item.load_state_dict(before)


def moving_averages(losses: list[float]) -> list[float]:
    """Return the exponential moving averages of the losses, corrected for the bias toward the start at 0."""
    average, smoothed = 0.0, []
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed.append(average / (1 - SMOOTHING**step))
    return smoothed


def smoothed_gains(losses: list[float], losses_at_rest: list[float]) -> list[float]:
    """Return how far the smoothed losses are below those at rest. losses_at_rest may be longer."""
    return moving_averages([rest - loss for loss, rest in zip(losses, losses_at_rest, strict=False)])


def has_diverged(losses: list[float], losses_at_rest: list[float]) -> bool:
    """Return whether the smoothed loss is more than DIVERGED_NATS above that at rest, or is NaN."""
    return not smoothed_gains(losses, losses_at_rest)[-1] >= -DIVERGED_NATS


def suggest(sweep: Sweep) -> float:
    """Return the learning rate to train with, by RULE, rounded to two digits.

    Not the rate with the largest gain: if many rates are about equally good, chance decides which one that is.
    Raises UserError if no learning rate gained anything, or if the last one gained the most.
    """
    gains, rates = sweep.gains, sweep.learning_rates
    best_at = gains.index(max(gains))
    if best_at < MEMORY_STEPS:
        raise UserError(
            f"optim.{sweep.key}: no learning rate from {rates[0]:g} to {rates[-1]:.2g} lowers the loss; set a smaller"
            " --lowest, or check the config's other learning rates."
        )
    if best_at == len(gains) - 1 and not sweep.has_diverged:
        raise UserError(f"optim.{sweep.key}: the highest learning rate, {rates[-1]:g}, is the best; raise --highest.")
    enough_at = next(step for step, gain in enumerate(gains) if gain >= SHARE_OF_GAIN * gains[best_at])
    return float(f"{rates[enough_at]:.1e}")
