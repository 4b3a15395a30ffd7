"""Symptoms in losses and gradients: one detector for each, which reports the evidence, the causes and a fix.

A detector is called with the run's history after each line of metrics.jsonl, and returns a Finding or None. Its
thresholds are above it, each with a reason. Detectors compare medians, so that one odd step raises no alarm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np

from hfgolf.doctor.finding import (
    FAR_ABOVE_USUAL,
    IN_A_ROW,
    Detector,
    Finding,
    max_learning_rate_ratio,
    scaled_learning_rates,
    two_digits,
)
from hfgolf.doctor.history import History, Step
from hfgolf.run.loss_levels import LEVEL_STEPS, MIN_RISE, RISE, RISE_FROM_START, SIGMAS, SPIKE_SHARE, robust_sigma
from hfgolf.system.wording import join_words

USUAL_WARMUP = 100
IMMEDIATE_STEPS = 50  # or the warmup if longer; a learning rate that is much too high shows by then


def nonfinite(history: History) -> Finding | None:
    """NaN or infinity in several steps in a row, from the start or in mid-run."""
    skips = history.skips[-1] if history.skips else []
    if len(skips) < IN_A_ROW:
        return None
    step = skips[0]["step"]
    parameter = next((f", first in {skip['first_parameter']}" for skip in skips if "first_parameter" in skip), "")
    before = history.losses(0, step - 1)
    last = f"; the last good loss was {before[-1]:.4g}" if before else ""
    saw = f"{len(skips)} steps in a row had a nonfinite gradient{parameter}{last}"
    warmup_steps = history.settings["schedule.warmup_steps"]
    if step > max(IMMEDIATE_STEPS, warmup_steps):
        overflow, precision = _fp16(history, "activations")
        causes = ("a learning rate that is too high for this phase", *overflow, "bad batches")
        return Finding("NaN in mid-run", step, saw, causes, scaled_learning_rates(history, 0.5) | precision)
    weights = () if before else ("nonfinite values in the initial weights",)
    causes = ("a learning rate that is much too high", *_short_warmup(history), *weights)
    fix = scaled_learning_rates(history, 0.1) | {"schedule.warmup_steps": max(USUAL_WARMUP, warmup_steps)}
    return Finding("immediate NaN", step, saw, causes, fix)


def _fp16(history: History, values: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the cause and the fix of values that fp16 cannot hold; bf16 has the range of fp32."""
    if history.settings["train.mixed_precision"] != "fp16":
        return (), {}
    return (f"{values} above 65,504, too large for fp16",), {"train.mixed_precision": "no"}


def _short_warmup(history: History) -> tuple[str, ...]:
    """Return the warmup as a cause of what goes wrong at once, if it is short."""
    steps = history.settings["schedule.warmup_steps"]
    if steps >= USUAL_WARMUP:
        return ()
    return (f"a warmup of only {steps} steps" if steps > 1 else "no warmup for the first updates",)


MAX_CHANCE_OVERLAPS = 0.05  # expected number of text ranges that randomly drawn batches would share


def nonfinite_on_tokens(history: History) -> Finding | None:
    """NaN in isolated steps: whenever a certain text is read, or always first in the same parameter."""
    isolated = [skips[0] for skips in history.skips if len(skips) == 1 and "block_starts" in skips[0]]
    isolated = [skip for skip in isolated if skip["step"] < history.step]
    if len(isolated) < 2:
        return None
    length = history.settings["batch.sequence_length"]
    length = min(length, history.settings.get("batch.segment_length") or length)
    shared = [(start, start + length) for start in sorted(isolated[0]["block_starts"])]  # [start, end) in the tokens
    for skip in isolated[1:]:
        overlaps = ((max(a, start), min(b, start + length)) for a, b in shared for start in skip["block_starts"])
        shared = [(a, b) for a, b in overlaps if a < b]
    # Each block overlaps two blocks of another epoch, because every epoch cuts the text at other places.
    chance_overlaps = len(isolated[0]["block_starts"]) * (2 * history.epochs_per_step) ** (len(isolated) - 1)
    parameters = {skip["first_parameter"] for skip in isolated}
    if shared and chance_overlaps < MAX_CHANCE_OVERLAPS:
        ranges = ", ".join(f"{start} to {end - 1}" for start, end in shared[:3])
        common = f"each of them read the train tokens {ranges}"
    elif len(isolated) >= IN_A_ROW and len(parameters) == 1:
        common = "they have no text in common"
    else:
        return None
    steps = ", ".join(str(skip["step"]) for skip in isolated[:6])
    saw = (
        f"{len(isolated)} steps ({steps}) had a nonfinite gradient, first in {' or '.join(sorted(parameters))},"
        f" but the steps between them were fine; {common}"
    )
    overflow, fix = _fp16(history, "activations of rare tokens")
    causes = (
        "tokens that the model cannot handle: ids outside its embedding, or a block without any target",
        "an attention mask that leaves a token nothing to attend to",
        *overflow,
    )
    return Finding("NaN on specific tokens", isolated[0]["step"], saw, causes, fix)


MIN_CLIPPED_STEPS = 50  # fewer may be a passing phase
CLIPPED_SHARE = 0.9  # of the steps; in a run that learns, norms fall below the limit
MIN_SHARE_NOW = 0.5  # of the steps of the latest row: a run that has just come off the limit needs no advice
FEW_SEQUENCES = 8  # per step
CLIP_EXCESS = 1.25  # times the limit; below it, clipping shrinks a gradient by less than a fifth


def constantly_clipped(history: History) -> Finding | None:
    """The gradient norm above the clipping limit in nearly every step of the last half of the run."""
    clip, step = history.settings["train.max_grad_norm"], history.step
    share_now = history.latest.get("clipped_share", 1.0)  # runs from before this column: the norms decide alone
    if clip is None or not history.new_steps or share_now is None or share_now < MIN_SHARE_NOW:
        return None
    after = max(step // 2, history.settings["schedule.warmup_steps"])
    norms = [s.grad_norm for s in history.steps if s.step > after and math.isfinite(s.grad_norm)]
    if len(norms) < MIN_CLIPPED_STEPS or np.quantile(norms, 1 - CLIPPED_SHARE) < CLIP_EXCESS * clip:
        return None
    if early_plateau(history):  # what has learned nothing keeps the gradient of its first weights
        return None
    median, share = float(np.median(norms)), sum(norm > clip for norm in norms) / len(norms)
    saw = (
        f"the gradient norm was above train.max_grad_norm {clip:g} in {share:.0%} of the last {len(norms)} steps;"
        f" its median was {median:.3g}"
    )
    causes: tuple[str, ...] = (
        "a learning rate that is too high for this phase",
        f"a limit too low for norms of {median:.2g}",
    )
    fix = scaled_learning_rates(history, 0.5)
    length = history.settings["batch.sequence_length"]
    if history.settings["batch.tokens_per_step"] < FEW_SEQUENCES * length:
        causes = (f"fewer than {FEW_SEQUENCES} sequences per step, whose gradient is mostly noise", *causes)
        fix = {"batch.tokens_per_step": 2 * FEW_SEQUENCES * length}
    elif clip < 1:  # nearly every recipe uses 1
        causes, fix = causes[::-1], {"train.max_grad_norm": two_digits(2 * median)}
    return Finding("gradient constantly clipped", step, saw, causes, fix)


BLOW_UP = 4  # times the first loss, ln(vocabulary); a batch of only unlikely tokens reached 2.3


class Divergence:
    """A training loss far above guessing in a single step, or far above its earlier level for more than a few."""

    def __init__(self) -> None:
        self._lowest, self._lowest_step = math.inf, 0

    def __call__(self, history: History) -> Finding | None:
        if history.latest is history.restore:  # diverged_after_restore judges the next steps
            self._lowest = math.inf
        high = next((step for step in history.new_steps if step.loss > BLOW_UP * history.first_loss), None)
        if high:
            guessing = " (random guessing)" if history.settings["model.init_from"] is None else ""
            saw = (
                f"the training loss was {high.loss:.4g}, {high.loss / history.first_loss:.3g} times the first step's"
                f" loss of {history.first_loss:.4g}{guessing}; gradient norm {high.grad_norm:.3g}"
            )
            is_early = high.step <= max(IMMEDIATE_STEPS, history.settings["schedule.warmup_steps"])
            return self._finding(history, high.step, saw, _short_warmup(history) if is_early else (), 0.1)
        restored_at = history.restore["step"] if history.restore else 0
        if not history.new_steps or history.step < restored_at + LEVEL_STEPS:
            return None
        if history.level < self._lowest:
            self._lowest, self._lowest_step = history.level, history.step
        start = math.inf if restored_at else history.first_loss
        limit = max(RISE * self._lowest, self._lowest + MIN_RISE)
        if not history.level > min(limit, RISE_FROM_START * start):
            return None
        before, step_before = min((self._lowest, self._lowest_step), (start, 1))
        saw = f"the median training loss is now {history.level:.4g}; it was {before:.4g} at step {step_before}"
        return self._finding(history, history.step, saw, ("a different kind of text",), 0.5)

    def _finding(self, history: History, step: int, saw: str, others: tuple[str, ...], rate_factor: float) -> Finding:
        causes = ("a learning rate that is too high", *others)
        fix = scaled_learning_rates(history, rate_factor)
        if history.settings["train.max_grad_norm"] is None:
            causes = (causes[0], "no gradient clipping", *others)
            fix["train.max_grad_norm"] = 1.0
        return Finding("divergence", step, saw, causes, fix)


SPIKE, NORM_SPIKE = "isolated loss spike", "gradient norm spike"
SPIKE_BASE_STEPS = 50
MAX_SPIKE_STEPS = 20  # anything longer is not a spike
NORM_SPIKE_RATIO = 4  # to the usual norm; healthy runs reached 2.5, runs with too high a learning rate 4.5 and 5
NORM_LEAD_STEPS = 2  # if the loss reacts to a norm spike, it does so within this many steps


class Spikes:
    """A loss that jumps and recovers within a few steps. Reports spike number 1, 2, 4, 8 and so on."""

    def __init__(self) -> None:
        self._base: deque[float] = deque(maxlen=SPIKE_BASE_STEPS)
        self._spike: list[Step] = []
        self._count = 0

    def __call__(self, history: History) -> Finding | None:
        if history.starts_over:
            self._base.clear()
            self._spike = []
        findings = [self._add(step, history) for step in history.new_steps if math.isfinite(step.loss)]
        return next((finding for finding in reversed(findings) if finding), None)

    def _add(self, step: Step, history: History) -> Finding | None:
        base = self._base
        if len(base) >= LEVEL_STEPS // 2 and step.loss > max(*base, _spike_limit(base)):
            self._spike.append(step)
            if len(self._spike) > MAX_SPIKE_STEPS:  # the higher loss is the new normal
                base.clear()
                base.extend(s.loss for s in self._spike)
                self._spike = []
            return None
        spike, self._spike = self._spike, []
        usual = float(np.median(base)) if base else math.nan
        base.append(step.loss)
        top = max(spike, key=lambda step: step.loss, default=step)
        if not spike or top.loss > BLOW_UP * history.first_loss:
            return None  # the second is a divergence
        self._count += 1
        saw = (
            f"the training loss rose from {usual:.4g} to {top.loss:.4g} (gradient norm {top.grad_norm:.3g}) and was"
            f" back after {len(spike)} step{'s' if len(spike) > 1 else ''}"
        )
        return _numbered(history, SPIKE, top.step, saw, self._count, "an unusual batch, harmless if it is rare")


class NormSpikes:
    """A gradient norm that spikes when the loss does not, or not yet. Reports at the same numbers as Spikes."""

    def __init__(self) -> None:
        self._base: deque[Step] = deque(maxlen=SPIKE_BASE_STEPS)
        self._was_spike = False
        self._count = 0

    def __call__(self, history: History) -> Finding | None:
        if history.starts_over:
            self._base.clear()
        findings = [self._add(step, history) for step in history.new_steps if math.isfinite(step.grad_norm)]
        return next((finding for finding in reversed(findings) if finding), None)

    def _add(self, step: Step, history: History) -> Finding | None:
        norms, losses = [s.grad_norm for s in self._base], [s.loss for s in self._base]
        self._base.append(step)
        was_spike, self._was_spike = self._was_spike, False
        if len(norms) < LEVEL_STEPS // 2 or step.grad_norm < NORM_SPIKE_RATIO * float(np.median(norms)):
            return None
        self._was_spike = True
        limit = _spike_limit(losses)
        if was_spike or not step.loss < limit or np.median(losses) > history.first_loss:
            return None  # the loss already shows it
        self._count += 1
        later = [s for s in history.new_steps if 0 < s.step - step.step <= NORM_LEAD_STEPS and s.loss > limit]
        reaction = f"the loss rose to {later[0].loss:.4g} at step {later[0].step}" if later else "the loss held"
        saw = f"the gradient norm rose from {np.median(norms):.3g} to {step.grad_norm:.3g}; {reaction}"
        is_clipped = history.settings["train.max_grad_norm"] is not None
        cause = "an unusual batch" + (", which clipping makes harmless" if is_clipped else "")
        return _numbered(history, NORM_SPIKE, step.step, saw, self._count, cause, is_serious=bool(later))


def _spike_limit(losses: Collection[float]) -> float:
    """Return the loss above which a step is a spike, given those before it."""
    usual = float(np.median(list(losses)))
    return usual + max(SPIKE_SHARE * usual, SIGMAS * robust_sigma(losses))


def _numbered(
    history: History, symptom: str, step: int, saw: str, count: int, cause: str, is_serious: bool = False
) -> Finding | None:
    """Return the finding of a spike if its number is one to report."""
    if count.bit_count() > 1:
        return None
    saw, causes = f"{saw}; spike number {count}", (cause, "a learning rate at the edge of stability")
    if is_serious or count >= IN_A_ROW or max_learning_rate_ratio(history) > FAR_ABOVE_USUAL:
        return Finding(symptom, step, saw, causes[::-1], scaled_learning_rates(history, 0.5))
    fix = {} if history.settings["train.max_grad_norm"] else {"train.max_grad_norm": 1.0}
    return Finding(symptom, step, saw, causes, fix)


RESTORE_STEPS = 10  # after a restore; wrong optimizer state does its damage in the first updates
RESTORE_RISE = 0.1  # of the loss before; an exact resume continues as if nothing had happened


def diverged_after_restore(history: History) -> Finding | None:
    """A training loss higher after going back to a checkpoint than in the steps before that checkpoint."""
    if history.restore is None:
        return None
    event, step = history.restore["event"], history.restore["step"]
    before, after = history.losses(step - 2 * RESTORE_STEPS, step), history.losses(step, step + RESTORE_STEPS)
    if len(before) < RESTORE_STEPS // 2 or len(after) < RESTORE_STEPS:
        return None
    loss_before, loss_after = float(np.median(before)), float(np.median(after))
    if loss_after <= loss_before + max(RESTORE_RISE * loss_before, SIGMAS * robust_sigma(before)):
        return None
    saw = (
        f"the training loss was {loss_before:.4g} in the {len(before)} steps before the checkpoint, but"
        f" {loss_after:.4g} in the {RESTORE_STEPS} steps after it ({event})"
    )
    changed = history.restore.get("changed")
    causes = (
        "optimizer or gradient scaler state that does not match the weights (hfgolf verify_resume checks this)",
        "weights from another step than the checkpoint's",
        *((f"what was changed for the resume: {join_words(changed, maximum=3)}",) if changed else ()),
    )
    fix: dict[str, Any] = {"train.resume": "best"}
    if event == "rollback":
        fix = scaled_learning_rates(history, 0.5)
    return Finding("divergence after a restore", step, saw, causes, fix)


PLATEAU_STEPS = 100  # or twice the warmup if longer; before that, even a good run may not have started to learn
PLATEAU_GAIN = 0.005  # of the loss, from the third to the fourth quarter of the steps; healthy runs gain at least 0.006
PLATEAU_NOISE = 1.05  # times the lowest level; a loss above that got worse instead of stalling
PLATEAU_LEVEL = 0.6  # of the first loss, ln(vocabulary); learning which token follows which is enough to get below
# The same for a learning rate far above the usual. AdamW at 0.3 stays at 0.56 to 0.59 of the first loss for 200 steps,
# just below what byte frequencies alone give, and gains 0.013 to 0.017. Muon at 1 learns, and reaches 0.45.
HIGH_RATE_PLATEAU_LEVEL, HIGH_RATE_PLATEAU_GAIN = 0.5, 0.02
LOWERED = 0.9  # of the peak; a rate above that has not been lowered yet


def early_plateau(history: History) -> Finding | None:
    """A training loss that stops falling before the model has learned more than token frequencies."""
    if history.settings["model.init_from"] is not None:
        return None  # its weights know more from the start
    step, warmup_steps = history.step, history.settings["schedule.warmup_steps"]
    rate_ratio = max_learning_rate_ratio(history)
    level, gain = PLATEAU_LEVEL, PLATEAU_GAIN
    if rate_ratio > FAR_ABOVE_USUAL:
        level, gain = HIGH_RATE_PLATEAU_LEVEL, HIGH_RATE_PLATEAU_GAIN
    is_high = level * history.first_loss < history.level < PLATEAU_NOISE * history.lowest_level
    if not is_high or step < max(PLATEAU_STEPS, 2 * warmup_steps) or not history.new_steps:
        return None
    losses = history.losses(step // 2)
    before, now = (float(np.median(part)) for part in np.array_split(losses, 2))
    if len(losses) < PLATEAU_STEPS // 2 or before - now > gain * before:
        return None
    saw = (
        f"the training loss only went from {before:.4g} to {now:.4g} over the last {len(losses)} steps, after starting"
        f" at {history.first_loss:.4g}; the learning rate is {history.latest.get('learning_rate', math.nan):.2g}"
    )
    rate = history.latest.get("learning_rate", 0.0)
    is_lowered = rate < LOWERED * history.settings["optim.learning_rate"]
    lowered = ("a schedule that lowered the learning rate too early",) if is_lowered else ()
    too_high = "a learning rate so high that the model cannot learn fine detail"
    if rate_ratio > FAR_ABOVE_USUAL:
        return Finding("early plateau", step, saw, (too_high, *lowered), scaled_learning_rates(history, 0.1))
    raised = scaled_learning_rates(history, 10 if rate_ratio < 1 / 3 else 3)
    return Finding("early plateau", step, saw, ("a learning rate that is too low", *lowered, too_high), raised)


VALIDATION_RISE = 0.03  # of the lowest loss; in healthy runs, evaluation noise reached 0.017
MIN_EVALS_SINCE_BEST = 2


def validation_rises(history: History) -> Finding | None:
    """A validation loss that keeps rising while the training loss falls."""
    if not history.evaluations or history.latest.get("val_loss") is None:
        return None
    now = history.evaluations[-1]
    comparable = [evaluation for evaluation in history.evaluations if evaluation.val_tokens == now.val_tokens]
    best = min(comparable, key=lambda evaluation: evaluation.val_loss)
    since = comparable[comparable.index(best) + 1 :]
    if len(since) < MIN_EVALS_SINCE_BEST or now.val_loss < (1 + VALIDATION_RISE) * best.val_loss:
        return None
    if since[-2].val_loss > now.val_loss or not now.train_level < best.train_level:
        return None
    saw = (
        f"the validation loss rose from {best.val_loss:.4g} at step {best.step} to {now.val_loss:.4g} at step"
        f" {now.step}, while the training loss fell from {best.train_level:.4g} to {now.train_level:.4g}"
        f" (epoch {history.epoch:.2g})"
    )
    patience: dict[str, Any] = {"train.patience_evals": history.settings["train.patience_evals"] or 3}
    if history.epoch <= 1:  # nothing was read twice
        causes = ("training text of another kind than the validation text", "training text that repeats itself")
        return Finding("validation loss rising", best.step, saw, causes, patience)
    causes = ("too little text for this model and this many epochs", "too little regularization")
    fix = patience | {
        "model.dropout": max(0.1, two_digits(min(0.5, 2 * history.settings["model.dropout"]))),
        "optim.weight_decay": two_digits(2 * history.settings["optim.weight_decay"]) or 0.1,
    }
    return Finding("validation loss rising", best.step, saw, causes, fix)


NEAR_ZERO = 0.1  # nats per token; with byte tokens that is 0.14 bits per byte, and the best models of text need 0.6


def near_zero_loss(history: History) -> Finding | None:
    """A loss lower than any text allows, on validation as well or, without an evaluation, in the first epoch.

    Answers in conversations may be that predictable.
    """
    if not history.level < NEAR_ZERO or not history.new_steps or history.settings.get("data.messages_column"):
        return None
    evaluation = history.evaluations[-1] if history.evaluations else None
    epoch = history.epoch
    if epoch > 1 if evaluation is None else evaluation.val_loss >= NEAR_ZERO:
        return None
    validation = f" and {evaluation.val_loss:.3g} on validation at step {evaluation.step}" if evaluation else ""
    saw = f"the loss is {history.level:.3g} nats per token on training{validation}, in epoch {epoch:.2g}"
    causes = (
        "labels equal to the inputs: they must be one token ahead of input_ids",
        "attention that sees the token to predict",
        "text that repeats itself, in validation as well",
    )
    return Finding("near-zero loss", history.step, saw, causes, {})


def detectors() -> list[Detector]:
    """Return the detectors of this file for a run."""
    return [
        nonfinite,
        nonfinite_on_tokens,
        constantly_clipped,
        Spikes(),
        NormSpikes(),
        Divergence(),
        diverged_after_restore,
        early_plateau,
        validation_rises,
        near_zero_loss,
    ]
