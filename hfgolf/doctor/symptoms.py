"""Symptoms in losses and gradients: a detector for each, which says what it saw, what causes it and what to change.

A detector is called after each line of metrics.jsonl with the history of the run, and returns a Finding or None. Its
thresholds stand above it, each with its reason. It compares medians, so that one odd step is no illness.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hfgolf.doctor.finding import (
    UNUSUAL,
    Finding,
    full_precision,
    learning_rates,
    most_unusual,
    robust_sigma,
    short,
)
from hfgolf.doctor.history import LEVEL_STEPS, History

SIGMAS = 6  # robust ones: in healthy runs the loss of a step stood out by up to 5.3
IN_A_ROW = 3  # the third is no chance any more

IMMEDIATE_STEPS = 50  # or the warmup; a learning rate that is much too high has shown by then


def not_finite(history: History) -> Finding | None:
    """NaN or infinity in step after step, from the beginning or in mid-run."""
    skips = history.skips[-1] if history.skips else []
    if len(skips) < IN_A_ROW:
        return None
    step = skips[0]["step"]
    parameter = next((f", first in {skip['first_parameter']}" for skip in skips if "first_parameter" in skip), "")
    before = history.losses(0, step - 1)
    last = f"; the loss was {before[-1]:.4g} before" if before else ""
    saw = f"{len(skips)} steps in a row had a gradient that is not finite{parameter}{last}"
    warmup_steps = history.settings["schedule.warmup_steps"]
    if step > max(IMMEDIATE_STEPS, warmup_steps):
        causes = ("a learning rate that is too high for this phase", "activations too large for 16 bits", "bad batches")
        return Finding("NaN in mid-run", step, saw, causes, learning_rates(history, 0.5) | full_precision(history))
    causes = (
        "a learning rate that is much too high",
        "first updates without a warmup",
        "weights or text that hold what is not finite",
    )
    fix = learning_rates(history, 0.1) | {"schedule.warmup_steps": max(100, warmup_steps)}
    return Finding("immediate NaN", step, saw, causes, fix)


BY_CHANCE = 0.05  # stretches of text that as many batches would share if each was drawn anew


def not_finite_on_tokens(history: History) -> Finding | None:
    """NaN in single steps between good ones: whenever some text is read, or always first in one place."""
    alone = [skips[0] for skips in history.skips if len(skips) == 1 and "block_starts" in skips[0]]
    alone = [skip for skip in alone if skip["step"] < history.step]
    if len(alone) < 2:
        return None
    length = history.settings["batch.sequence_length"]
    shared = _shared_text([skip["block_starts"] for skip in alone], length)
    # a block meets two of another epoch, which cuts the text elsewhere
    by_chance = len(alone[0]["block_starts"]) * (2 * history.epochs_per_step) ** (len(alone) - 1)
    parameters = {skip["first_parameter"] for skip in alone}
    if shared and by_chance < BY_CHANCE:
        stretches = ", ".join(f"{start} to {end - 1}" for start, end in shared[:3])
        common = f"each of them read the train tokens {stretches}"
    elif len(alone) >= IN_A_ROW and len(parameters) == 1:
        common = "they have no text in common"
    else:
        return None
    steps = ", ".join(str(skip["step"]) for skip in alone[:6])
    saw = (
        f"{len(alone)} steps ({steps}) had a gradient that is not finite, first in {' or '.join(sorted(parameters))},"
        f" while those between them were fine; {common}"
    )
    causes = (
        "tokens that the model cannot take: ids beyond its embedding, or a block without a single target",
        "an attention mask that leaves a token nothing to attend to",
        "values of rare tokens that are too large for 16 bits",
    )
    return Finding("NaN on specific tokens", alone[0]["step"], saw, causes, full_precision(history))


def _shared_text(batches: list[list[int]], length: int) -> list[tuple[int, int]]:
    """Return the stretches of tokens, [start, end), that each batch of blocks of a length reads."""
    shared = [(start, start + length) for start in sorted(batches[0])]
    for starts in batches[1:]:
        meetings = ((max(a, start), min(b, start + length)) for a, b in shared for start in starts)
        shared = [(a, b) for a, b in meetings if a < b]
    return shared


CLIP_STEPS = 50  # fewer may be a phase
CLIP_SHARE = 0.9  # of the steps: the norms of a run that learns fall below the clip
CLIP_EXCESS = 1.25  # below it, clipping takes less than a fifth off a step, and changes little


def constantly_clipped(history: History) -> Finding | None:
    """The gradient's norm above the clip in nearly every step of the last half of the run."""
    clip, step = history.settings["train.max_grad_norm"], history.step
    if clip is None or not history.new_steps or history.new_steps[-1].grad_norm < clip:
        return None
    after = max(step // 2, history.settings["schedule.warmup_steps"])
    norms = [s.grad_norm for s in history.steps if s.step > after and math.isfinite(s.grad_norm)]
    if len(norms) < CLIP_STEPS or np.quantile(norms, 1 - CLIP_SHARE) < CLIP_EXCESS * clip:
        return None
    median, share = float(np.median(norms)), sum(norm > clip for norm in norms) / len(norms)
    saw = (
        f"the gradient's norm was above train.max_grad_norm {clip:g} in {share:.0%} of the last {len(norms)} steps,"
        f" {median:.3g} in the median"
    )
    causes = ("a learning rate that is too high for this phase", f"a clip too tight for norms of {median:.2g}")
    lower, wider = learning_rates(history, 0.5), {"train.max_grad_norm": short(2 * median)}
    if clip < 1:  # which nearly every recipe has
        return Finding("gradient constantly clipped", step, saw, causes[::-1], wider)
    return Finding("gradient constantly clipped", step, saw, causes, lower)


BLOW_UP = 4  # of the first loss, ln(vocabulary); a batch of nothing but unlikely tokens reached 2.3


def blow_up(history: History) -> Finding | None:
    """A training loss of a step that is far above that of guessing."""
    high = [step for step in history.new_steps if step.loss > BLOW_UP * history.first_loss]
    if not high:
        return None
    step = high[0]
    saw = (
        f"the training loss was {step.loss:.4g}, {step.loss / history.first_loss:.3g} times that of the first step,"
        f" which guesses ({history.first_loss:.4g}); gradient norm {step.grad_norm:.3g}"
    )
    causes = ["a learning rate that is too high", "first updates without a warmup"]
    fix = learning_rates(history, 0.1)
    if history.settings["train.max_grad_norm"] is None:
        causes.insert(1, "gradients that are not clipped")
        fix["train.max_grad_norm"] = 1.0
    return Finding("divergence", step.step, saw, tuple(causes), fix)


RISE = 1.2  # of the lowest level so far
MIN_RISE = 0.1  # nats a token; of next to nothing a fifth is nothing
RISE_FROM_START = 1.1  # of the first loss: nothing does worse than guessing for long


class Divergence:
    """A training loss far above where it has been, and not for a few steps only."""

    def __init__(self) -> None:
        self._lowest, self._lowest_step = math.inf, 0

    def __call__(self, history: History) -> Finding | None:
        if history.latest is history.restore:  # what comes next is for diverged_after_restore
            self._lowest = math.inf
        restored_at = history.restore["step"] if history.restore else 0
        if not history.new_steps or history.step < restored_at + LEVEL_STEPS:
            return None
        if history.level < self._lowest:
            self._lowest, self._lowest_step = history.level, history.step
        start = math.inf if restored_at else history.first_loss
        high = max(RISE * self._lowest, self._lowest + MIN_RISE)
        if not history.level > min(high, RISE_FROM_START * start):
            return None
        was, at = min((self._lowest, self._lowest_step), (start, 1))
        saw = f"the training loss is {history.level:.4g} in the median now, and was {was:.4g} at step {at}"
        causes, fix = ["a learning rate that is too high", "text of another kind"], learning_rates(history, 0.5)
        if history.settings["train.max_grad_norm"] is None:
            causes.insert(1, "gradients that are not clipped")
            fix["train.max_grad_norm"] = 1.0
        return Finding("divergence", history.step, saw, tuple(causes), fix)


RESTORE_STEPS = 10  # after a restore; optimizer state that is wrong does its harm in the first updates
RESTORE_RISE = 0.1  # of the loss before: a resume that is exact goes on as if nothing had been


def diverged_after_restore(history: History) -> Finding | None:
    """A training loss that is higher after going back to a checkpoint than it was before its step."""
    if history.restore is None:
        return None
    event, step = history.restore["event"], history.restore["step"]
    before, after = history.losses(step - 2 * RESTORE_STEPS, step), history.losses(step, step + RESTORE_STEPS)
    if len(before) < RESTORE_STEPS // 2 or len(after) < RESTORE_STEPS:
        return None
    was, is_now = float(np.median(before)), float(np.median(after))
    if is_now <= was + max(RESTORE_RISE * was, SIGMAS * robust_sigma(before)):
        return None
    saw = (
        f"the training loss was {was:.4g} in the {len(before)} steps before the checkpoint and is {is_now:.4g} in the"
        f" {RESTORE_STEPS} after it ({event})"
    )
    causes = (
        "optimizer or gradient scaler state that is not that of the weights (scripts/verify_resume.py proves it)",
        "weights that are not those of the checkpoint's step",
        "a config, text or precision that was changed for the resume",
    )
    fix: dict[str, Any] = {"train.resume": "best"}
    if event == "rollback":
        fix = {"train.rollback_learning_rate_factor": 0.1} | learning_rates(history, 0.5)
    return Finding("divergence after a restore", step, saw, causes, fix)


PLATEAU_STEPS = 100  # and twice the warmup: until then even a good run may not have begun to learn
PLATEAU_GAIN = 0.005  # of the loss, from the third quarter of the steps to the fourth; in healthy runs at least 0.006
PLATEAU_NOISE = 1.05  # of the lowest level: what has been lower has not stopped, but got worse
PLATEAU_LEVEL = 0.6  # of the first loss, ln(vocabulary): to know which token follows which brings a run below
# The same where a learning rate is far above the usual. AdamW at 0.3 stays at 0.56 to 0.59 of the first loss for 200
# steps, just below what the frequencies of bytes give, and gains 0.013 to 0.017; Muon at 1 learns, and is at 0.45.
UNUSUAL_PLATEAU_LEVEL, UNUSUAL_PLATEAU_GAIN = 0.5, 0.02


def early_plateau(history: History) -> Finding | None:
    """A training loss that has stopped falling before more than the tokens' frequencies is learned."""
    step, warmup_steps = history.step, history.settings["schedule.warmup_steps"]
    unusual = most_unusual(history)
    level, gain = PLATEAU_LEVEL, PLATEAU_GAIN
    if unusual > UNUSUAL:
        level, gain = UNUSUAL_PLATEAU_LEVEL, UNUSUAL_PLATEAU_GAIN
    is_high = level * history.first_loss < history.level < PLATEAU_NOISE * history.lowest_level
    if not is_high or step < max(PLATEAU_STEPS, 2 * warmup_steps) or not history.new_steps:
        return None
    losses = history.losses(step // 2)
    before, now = (float(np.median(part)) for part in np.array_split(losses, 2))
    if len(losses) < PLATEAU_STEPS // 2 or before - now > gain * before:
        return None
    saw = (
        f"the training loss went from {before:.4g} to {now:.4g} over the last {len(losses)} steps and began at"
        f" {history.first_loss:.4g}; the learning rate is {history.latest.get('learning_rate', math.nan):.2g}"
    )
    too_low = ("a learning rate that is too low", "a schedule that has lowered it too early")
    too_high = "a learning rate so high that nothing finer can be learned"
    if unusual > UNUSUAL:
        return Finding("early plateau", step, saw, (too_high, *too_low[1:]), learning_rates(history, 0.1))
    raised = learning_rates(history, 10 if unusual < 1 / 3 else 3)
    return Finding("early plateau", step, saw, (*too_low, too_high), raised)


VALIDATION_RISE = 0.03  # of the lowest loss; in healthy runs the noise of an evaluation reached 0.017
VALIDATION_EVALS = 2  # in a row above the lowest


def validation_rises(history: History) -> Finding | None:
    """A validation loss that rises from evaluation to evaluation while the training loss falls."""
    if not history.evaluations or history.latest.get("val_loss") is None:
        return None
    now = history.evaluations[-1]
    alike = [evaluation for evaluation in history.evaluations if evaluation.val_tokens == now.val_tokens]
    best = min(alike, key=lambda evaluation: evaluation.val_loss)
    since = alike[alike.index(best) + 1 :]
    if len(since) < VALIDATION_EVALS or now.val_loss < (1 + VALIDATION_RISE) * best.val_loss:
        return None
    if since[-2].val_loss > now.val_loss or not now.train_level < best.train_level:
        return None
    saw = (
        f"the validation loss rose from {best.val_loss:.4g} at step {best.step} to {now.val_loss:.4g} at step"
        f" {now.step}, while the training loss fell from {best.train_level:.4g} to {now.train_level:.4g}"
        f" (epoch {history.epoch:.2g})"
    )
    causes = ("a text too small for this model and so many epochs", "too little regularisation")
    fix = {
        "train.patience_evals": history.settings["train.patience_evals"] or 3,
        "model.dropout": max(0.1, short(min(0.5, 2 * history.settings["model.dropout"]))),
        "optim.weight_decay": short(2 * history.settings["optim.weight_decay"]) or 0.1,
    }
    return Finding("validation loss rising", best.step, saw, causes, fix)


NEAR_ZERO = 0.1  # nats a token: for single bytes 0.14 bits each, and the best models of text need 0.6


def near_zero_loss(history: History) -> Finding | None:
    """A loss below what any text allows, on validation too; without an evaluation, before any text was read twice."""
    if not history.level < NEAR_ZERO or not history.new_steps:
        return None
    evaluation = history.evaluations[-1] if history.evaluations else None
    epoch = history.epoch
    if epoch > 1 if evaluation is None else evaluation.val_loss >= NEAR_ZERO:
        return None
    validation = f" and {evaluation.val_loss:.3g} on validation at step {evaluation.step}" if evaluation else ""
    saw = f"the loss is {history.level:.3g} nats a token on training{validation}, in epoch {epoch:.2g}"
    causes = (
        "targets that are the inputs: labels must be one token ahead of input_ids",
        "an attention that sees the token to be predicted",
        "text that repeats itself, in validation too",
    )
    return Finding("near-zero loss", history.step, saw, causes, {})
