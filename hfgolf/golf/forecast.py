"""What an export would take, for weights that still change.

With steps by curvature every budget can be met, at a price in loss. So a forecast answers two questions: how many bytes
keep that price at TOLERATED_NATS, and what the price is at the budget. Prices are predicted from the curvature on a
little text. Bytes are real: the matrices are rounded to nearest and coded. Knows nothing about training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfgolf.config import GolfSection
from hfgolf.golf.allocate import (
    Allocation,
    allocate,
    predicted_bytes,
    scale_for_bytes,
    scale_range,
    smallest_scale,
)
from hfgolf.golf.curvature import Curvature
from hfgolf.golf.gptq import Feedback, error_feedback
from hfgolf.golf.grid import CODES_PER_OCTAVE, Quantized, round_nearest
from hfgolf.golf.quantize import plan_steps

TOLERATED_NATS = 0.01
"""Per token. About the noise between seeds of a small model, and what the best published artifacts lose."""


@dataclass(frozen=True)
class Forecast:
    """What an export of the current weights would take.

    num_bytes: of everything, if rounding may cost TOLERATED_NATS per token. With a budget: scale is the D that it
    allows, and loss what rounding is predicted to cost there, in nats per token; None without one.
    """

    num_bytes: int
    scale: float | None
    loss: float | None


def forecast(
    weights: Mapping[str, NDArray[np.float32]],
    curvature: Mapping[str, Curvature],
    golf: GolfSection,
    *,
    overhead_bytes: int,
    size_of: Callable[[dict[str, Quantized]], int],
) -> Forecast:
    """Forecast an export of these weights. Arguments as in quantize_model; one real coding.

    GPTQ changes sizes by about 1 % at 3 bits per weight; the forecast does without it.
    """
    feedback = None
    if golf.method == "gptq":
        feedback = {name: error_feedback(curvature[name].hessian, golf.damping) for name in weights}
    plan = allocate(weights, golf.allocation, curvature, feedback, golf.column_steps)
    finest, coarsest = scale_range(plan)

    def loss_at(scale: float) -> float:
        return predicted_loss(plan, scale, curvature, feedback)

    tolerable = smallest_scale(lambda scale: loss_at(scale) >= TOLERATED_NATS, finest, coarsest)
    size = size_of(
        {
            name: round_nearest(weights[name], unit.row_codes(tolerable), unit.column_codes)
            for name, unit in plan.items()
        }
    )
    scale = loss = None
    if golf.budget_bytes is not None:
        available = (golf.budget_bytes - overhead_bytes) * predicted_bytes(plan, tolerable) / size
        loss = loss_at(scale_for_bytes(plan, available, finest, coarsest))
        exported, _ = plan_steps(
            weights, curvature, available, golf.method, golf.allocation, golf.column_steps, golf.damping
        )
        scale = scale_for_bytes(exported, available, *scale_range(exported))
    return Forecast(overhead_bytes + size, scale, loss)


def predicted_loss(
    plan: Allocation, scale: float, curvature: Mapping[str, Curvature], feedback: Mapping[str, Feedback] | None
) -> float:
    """Return what rounding at D = scale is predicted to cost, in nats per token."""
    total = 0.0
    for name, unit in plan.items():
        columns = np.diag(curvature[name].hessian) if feedback is None else feedback[name].column_weights()
        if unit.column_codes is not None:
            columns = columns * 4.0 ** (unit.column_codes / CODES_PER_OCTAVE)
        total += 0.5 * float(curvature[name].row_weights @ unit.error_variances(scale)) * float(columns.sum())
    return total
