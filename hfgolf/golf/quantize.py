"""From a model to integers that fit in a number of bytes.

Owns the search for the one number D that the budget allows. Does not know files: `size_of` says what integers take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hfgolf.golf.allocate import (
    Allocation,
    allocate,
    lost_share,
    mean_relative_step,
    predicted_bytes,
    scale_for_bytes,
    scale_range,
)
from hfgolf.golf.curvature import Curvature
from hfgolf.golf.gptq import Feedback, error_feedback, round_with_feedback
from hfgolf.golf.grid import Quantized, grid_of, round_nearest, steps_of
from hfgolf.optim.groups import parameter_kind
from hfgolf.system.errors import UserError

SDCLIP_LEVELS = 31  # of 6 bits, to either side
_AIM = 0.9985  # of the budget; a real size a little off is still in [_LOWEST, 1]
_LOWEST = 0.995
_DAMPING = 0.01  # of a matrix's input Hessian, as a share of the mean of its diagonal
_MAX_CODINGS = 12  # two to four as a rule; the size is nearly smooth in D


@dataclass(frozen=True)
class QuantizedModel:
    """The matrices of a model on their grids, and how they were chosen.

    scale: D, see allocate.py. sdclip_k: the k of SDClip at 6 bits that gives the same mean step relative to the rows.
    size_bytes: everything, overhead included. codings: (D, size_bytes) of each real coding, in order. findings: what
    the user should know, one sentence each.
    """

    tensors: dict[str, Quantized]
    scale: float
    sdclip_k: float
    size_bytes: int
    codings: list[tuple[float, int]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def matrices(model: nn.Module) -> dict[str, NDArray[np.float32]]:
    """Return the weights that go on a grid, {parameter name: fp32 copy}: every matrix, not the vectors that control.

    They are the parameters with two dimensions that the optimizer's table calls matrix, embedding or head.
    """
    return {
        name: parameter.detach().to("cpu", torch.float32, copy=True).numpy()
        for name, parameter in model.named_parameters()
        if has_grid(name, parameter)
    }


def has_grid(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix that goes on a grid; the rest of a model is stored as it is."""
    return parameter.ndim == 2 and parameter_kind(name) != "vector"


def quantize_model(
    model: nn.Module,
    curvature: Mapping[str, Curvature],
    *,
    budget_bytes: int,
    overhead_bytes: int,
    size_of: Callable[[dict[str, Quantized]], int],
    method: str = "gptq",
    allocation: str = "curvature",
    column_steps: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> QuantizedModel:
    """Round the matrices of a model so that they take 99.5 to 100 % of a budget.

    Args:
        curvature: from measure_curvature; nearest rounding with sdclip or uniform steps doesn't read it.
        budget_bytes: of everything. overhead_bytes: what everything but the matrices takes.
        size_of: the bytes of coded matrices. The search predicts sizes, codes really, and corrects the prediction by
            what it was off: two to four codings as a rule.
        method: gptq or nearest. allocation: curvature, sdclip or uniform, see allocate.py.
        progress: called with one line per coding.

    A model that was trained on a grid (golf.qat_fraction) and fits keeps it: nothing is rounded anew.
    A budget beyond the finest useful steps is not an error; the findings say what it leaves free.

    Raises UserError if the matrices do not fit even with the coarsest steps; it names the bytes that are needed.
    """
    weights = matrices(model)
    on_grid = _on_grid(weights)
    if on_grid is not None and (size := overhead_bytes + size_of(on_grid)) <= budget_bytes:
        return _kept(on_grid, size, budget_bytes - size)
    plan, feedback = plan_steps(weights, curvature, budget_bytes - overhead_bytes, method, allocation, column_steps)
    finest, coarsest = scale_range(plan)
    codings: list[tuple[float, int]] = []
    tensors: dict[str, Quantized] = {}
    best: QuantizedModel | None = None
    for coding in range(_MAX_CODINGS):
        scale = _next_scale(plan, codings, budget_bytes, overhead_bytes)
        tensors = rounded(weights, plan, scale, feedback, tensors)
        size = overhead_bytes + size_of(tensors)
        codings.append((scale, size))
        progress(f"coding {coding + 1}: D {scale:.4g}, {size:,} bytes")
        if size > budget_bytes and scale == coarsest:
            raise UserError(
                f"golf.budget_bytes: {budget_bytes:,} is too small: with the coarsest steps the model still takes"
                f" {size:,} bytes; raise the budget to that at least, or train a smaller model."
            )
        if size <= budget_bytes and (best is None or size > best.size_bytes):
            best = QuantizedModel(tensors, scale, SDCLIP_LEVELS * scale * mean_relative_step(plan), size, codings)
        if best is not None and (best.size_bytes >= _LOWEST * budget_bytes or best.scale == finest):
            break
    if best is None:
        raise UserError(
            f"golf.budget_bytes: found no steps that fit in {budget_bytes:,}; the last attempt took {size:,} bytes."
        )
    return replace(best, findings=_findings(best, budget_bytes, finest))


def plan_steps(
    weights: Mapping[str, NDArray[np.float32]],
    curvature: Mapping[str, Curvature],
    available_bytes: float,
    method: str,
    allocation: str,
    column_steps: bool = False,
) -> tuple[Allocation, dict[str, Feedback] | None]:
    """Return the steps at D = 1 and how errors are passed on; None: rounding to nearest.

    The inputs of a matrix come from matrices that are rounded, too, but its Hessian is of exact ones. Their noise is
    about the share of the weights that rounding takes, so it is added to _DAMPING. At 3 bits per weight it is
    nothing; at 1 bit, errors would otherwise go where the noisy inputs do not cancel them.
    """
    nearest = allocate(weights, allocation, curvature, None, column_steps)
    if method == "nearest":
        return nearest, None
    if method != "gptq":
        raise ValueError(f"method is {method!r}; it must be gptq or nearest")
    noise = lost_share(nearest, scale_for_bytes(nearest, available_bytes, *scale_range(nearest)))
    feedback = {name: error_feedback(curvature[name].hessian, _DAMPING + noise) for name in weights}
    return allocate(weights, allocation, curvature, feedback, column_steps), feedback


def _on_grid(weights: Mapping[str, NDArray[np.float32]]) -> dict[str, Quantized] | None:
    """Return the integers and codes of matrices that all are on a grid already; None if one is not."""
    tensors = {}
    for name, weight in weights.items():
        one = grid_of(weight)
        if one is None:
            return None
        tensors[name] = one
    return tensors if any(one.integers.any() for one in tensors.values()) else None


def _kept(tensors: dict[str, Quantized], size: int, free: int) -> QuantizedModel:
    """Return what quantize_model returns for a model that is on a grid. D is that of SDClip: the mean relative step."""
    plan = allocate({name: one.dequantized() for name, one in tensors.items()}, "sdclip", {}, None)
    steps = {
        name: replace(unit, row_steps=steps_of(tensors[name].row_codes).astype(np.float64))
        for name, unit in plan.items()
    }
    scale = mean_relative_step(steps)
    note = f"The matrices are on a grid already (golf.qat_fraction), so they are kept; {free:,} bytes stay free."
    return QuantizedModel(tensors, scale, SDCLIP_LEVELS * scale, size, [(scale, size)], [note])


def _next_scale(
    plan: Allocation, codings: Sequence[tuple[float, int]], budget_bytes: int, overhead_bytes: int
) -> float:
    """Return the D to code next: the predicted one, corrected by the real sizes so far.

    The ratio of predicted and real sizes corrects it, and from two codings on a power (a secant). If that leaves the
    range between the best D that fits and the best that does not, it is the middle of this range.
    """
    finest, coarsest = scale_range(plan)
    aim = _AIM * budget_bytes - overhead_bytes
    if not codings:
        return scale_for_bytes(plan, aim, finest, coarsest)
    predicted = [predicted_bytes(plan, scale) for scale, _ in codings[-2:]]
    real = [max(1, size - overhead_bytes) for _, size in codings[-2:]]
    power = 1.0
    if len(codings) > 1 and predicted[0] != predicted[1]:
        power = min(max(math.log(real[1] / real[0]) / math.log(predicted[1] / predicted[0]), 0.3), 1.5)
    scale = scale_for_bytes(plan, predicted[-1] * (max(aim, 1.0) / real[-1]) ** (1 / power), finest, coarsest)
    fits = max(((size, scale) for scale, size in codings if size <= budget_bytes), default=None)
    exceeds = min(((size, scale) for scale, size in codings if size > budget_bytes), default=None)
    if fits and exceeds:
        low, high = sorted((fits[1], exceeds[1]))
        scale = scale if low < scale < high else math.sqrt(low * high)
    return scale


def _findings(quantized: QuantizedModel, budget_bytes: int, finest: float) -> list[str]:
    free = budget_bytes - quantized.size_bytes
    if quantized.scale == finest:
        return [
            f"The budget is larger than the model needs: at 11 bits per weight, finer than fp16 needs, {free:,} bytes"
            " stay free. A larger model would use them."
        ]
    if quantized.size_bytes < _LOWEST * budget_bytes:
        return [f"No step came closer to the budget: {free:,} bytes stay free."]
    return []


def rounded(
    weights: Mapping[str, NDArray[np.float32]],
    plan: Allocation,
    scale: float,
    feedback: Mapping[str, Feedback] | None,
    before: Mapping[str, Quantized],
) -> dict[str, Quantized]:
    """Return all matrices rounded at D = scale. before: the same at another D; rows with the same step are kept."""

    def one(name: str) -> Quantized:
        weight, row_codes, column_codes = weights[name], plan[name].row_codes(scale), plan[name].column_codes
        if feedback is None:
            return round_nearest(weight, row_codes, column_codes)
        if name not in before:
            return round_with_feedback(weight, row_codes, column_codes, feedback[name])
        integers, is_new = before[name].integers.copy(), row_codes != before[name].row_codes
        integers[is_new] = round_with_feedback(weight[is_new], row_codes[is_new], column_codes, feedback[name]).integers
        return Quantized(integers, row_codes, column_codes)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy lets go of the GIL
        return dict(zip(weights, pool.map(one, weights), strict=True))
