"""Symptoms in the forecasts of a run that has a budget of bytes."""

from __future__ import annotations

import math

import numpy as np

from hfgolf.doctor.finding import Finding
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
