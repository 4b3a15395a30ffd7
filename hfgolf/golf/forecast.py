"""What an export would take, for weights that still change.

With steps by curvature every budget can be met, at a price in loss. So a forecast answers two questions: how many bytes
keep that price at TOLERATED_NATS, and what the price is at the budget. It rounds and codes three times, as an export
does, and goes the rest of the way by a rule: one bit per weight more is half the step and a quarter of the price. Knows
nothing about training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfgolf.config.sections import GolfSection
from hfgolf.golf.allocate import scale_for_bytes, scale_range
from hfgolf.golf.curvature import Curvature
from hfgolf.golf.grid import Quantized
from hfgolf.golf.quantize import plan_steps, rounded

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
    """Forecast an export of these weights. Arguments as in quantize_model; three real codings."""
    octave_bytes = sum(weight.size for weight in weights.values()) / 8  # of one bit per weight

    def attempt(num_bytes: float) -> tuple[float, int, float]:
        """Round to a size; return log2 of D, the real size, and log2 of the predicted price in nats per token."""
        plan, feedback = plan_steps(weights, curvature, num_bytes, golf.method, golf.allocation)
        scale = scale_for_bytes(plan, num_bytes, *scale_range(plan))
        tensors = rounded(weights, plan, scale, feedback, {})
        price = sum(curvature[name].loss_increase(one.dequantized() - weights[name]) for name, one in tensors.items())
        return math.log2(scale), size_of(tensors), math.log2(max(price, 1e-300))

    def bytes_tolerated(size: int, log_price: float) -> float:
        return max(size + (log_price - math.log2(TOLERATED_NATS)) / 2 * octave_bytes, 1.0)

    available = 3 * octave_bytes if golf.budget_bytes is None else golf.budget_bytes - overhead_bytes
    octave, first_size, log_price = attempt(available)
    tolerated = bytes_tolerated(first_size, log_price)
    for _ in range(2):
        tolerated = bytes_tolerated(*attempt(tolerated)[1:])
    scale = loss = None
    if golf.budget_bytes is not None:
        octaves = (first_size - available) / octave_bytes
        scale, loss = 2 ** (octave + octaves), 2 ** (log_price + 2 * octaves)
    return Forecast(overhead_bytes + round(tolerated), scale, loss)
