"""Symptoms in what a run spends: the bytes of its forecasts, the time of its evaluations."""

from __future__ import annotations

import math

import numpy as np

from hfgolf.config.sections import budgeted_eval_tokens
from hfgolf.doctor.finding import Finding, two_digits
from hfgolf.doctor.history import History

MIN_FORECASTS = 3
OVER_BUDGET = 1.05  # times the budget, at the end of the run


def over_budget(history: History) -> Finding | None:
    """An artifact that will not fit the budget at a small loss. Sizes grow like the logarithm of the step."""
    budget, points = history.settings["golf.budget_bytes"], list(history.forecasts)
    if budget is None or len(points) < MIN_FORECASTS or history.latest.get("golf_bytes") is None:
        return None
    now, last_step = points[-1], max(history.settings["train.max_steps"] or 0, history.step)
    recent = np.array([(math.log(point.step), point.golf_bytes) for point in points if 4 * point.step >= now.step])
    slope = float(np.polyfit(recent[:, 0], recent[:, 1], 1)[0]) if len(recent) > 1 else 0.0
    at_end = now.golf_bytes + slope * math.log(last_step / now.step)
    if at_end <= OVER_BUDGET * budget:
        return None
    saw = (
        f"at 0.01 nats per token lost, the artifact would take {now.golf_bytes:,.0f} bytes at step {now.step} and about"
        f" {at_end:,.0f} at step {last_step}; golf.budget_bytes is {budget:,}"
    )
    causes = ("a model with more weights than the budget has room for", "a budget that counts fewer bytes than meant")
    heads, width = history.settings["model.num_attention_heads"], history.settings["model.hidden_size"]
    narrower = int(width * math.sqrt(budget / at_end)) // (2 * heads) * 2 * heads  # rope needs an even head size
    layers = history.settings["model.num_hidden_layers"]
    fix = {"model.hidden_size": narrower} if narrower else {"model.num_hidden_layers": max(1, layers - 1)}
    return Finding("artifact over budget", now.step, saw, causes, fix)


USUAL_SHARE = 0.05  # of the time of the steps; train.eval_tokens auto aims at it
MAX_SHARE = 2 * USUAL_SHARE  # an evaluation is not compiled, and its samples are not counted in train.eval_tokens
MIN_SECONDS = 60.0  # less is not worth a change
MAX_LAST_SHARE = 0.25  # the evaluation on all tokens at the end happens once


class CostlyEvaluation:
    """Evaluations that take more than a tenth of the time of the steps, or at the end a quarter."""

    def __init__(self) -> None:
        self._seconds = 0.0
        """Of all evaluations up to the row before."""

    def __call__(self, history: History) -> Finding | None:
        row = history.latest
        if "event" in row or "seconds_evaluate" not in row:
            return None
        before, self._seconds = self._seconds, row["seconds_evaluate"]
        if row.get("val_loss") is None:
            return None
        steps = row["seconds_train"] + row["seconds_data"]
        if "subset_val_loss" in row:
            return _costly_end(history, self._seconds - before, steps)
        is_costly = self._seconds > max(MIN_SECONDS, MAX_SHARE * steps)
        return (
            _costly_evaluations(history, self._seconds, steps) if is_costly and len(history.evaluations) > 1 else None
        )


def _costly_evaluations(history: History, seconds: float, steps: float) -> Finding:
    tokens, every = history.latest["val_tokens"], history.settings["train.eval_every_steps"]
    saw = (
        f"evaluations took {seconds:,.0f} s and the steps {steps:,.0f} s ({seconds / steps:.0%}), with"
        f" {tokens:,} tokens every {every:,} steps"
    )
    budget = budgeted_eval_tokens(history.settings["batch.tokens_per_step"], every)
    rarer = {"train.eval_every_steps": math.ceil(two_digits(every * seconds / steps / USUAL_SHARE))}
    samples = "samples that are slow to write (train.sample_tokens)"
    if tokens > budget:
        causes = ("evaluations that read more tokens than they need", "evaluations that are too frequent")
        return Finding("costly evaluations", history.step, saw, causes, {"train.eval_tokens": "auto"})
    return Finding("costly evaluations", history.step, saw, ("evaluations that are too frequent", samples), rarer)


def _costly_end(history: History, seconds: float, steps: float) -> Finding | None:
    if seconds < max(MIN_SECONDS, MAX_LAST_SHARE * steps):
        return None
    tokens, fraction = history.latest["val_tokens"], history.settings["data.val_fraction"]
    saw = (
        f"the last evaluation, on all {tokens:,} validation tokens, took {seconds:,.0f} s and the steps {steps:,.0f} s"
        f" ({seconds / steps:.0%})"
    )
    causes = ("more validation text than so short a run needs", "a run shorter than meant")
    is_cut = not history.settings["data.val_files"]
    fix = {"data.val_fraction": two_digits(fraction * USUAL_SHARE * steps / seconds)} if is_cut else {}
    return Finding("costly evaluations", history.step, saw, causes, fix)
