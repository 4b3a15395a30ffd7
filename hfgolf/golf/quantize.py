"""From a model to integers that fit in a number of bytes.

Owns the search for the one number D that the budget allows. Does not know files: `size_of` says what integers take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hfgolf.errors import UserError
from hfgolf.golf.allocate import Allocation, allocate, mean_relative_step, predicted_bytes, scale_for_bytes, scale_range
from hfgolf.golf.curvature import Curvature
from hfgolf.golf.gptq import Feedback, error_feedback, round_with_feedback
from hfgolf.golf.grid import Quantized, round_nearest, steps_of
from hfgolf.golf.qat import grid_of
from hfgolf.optim.groups import parameter_kind

SDCLIP_LEVELS = 31  # of 6 bits, to either side
_AIM = 0.9985  # of the budget; a real size a little off is still in [_LOWEST, 1]
_LOWEST = 0.995
_MAX_CODINGS = 4
_MAX_RETRIES = 5  # codings more, each aiming lower, if none of them fits


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
    damping: float = 0.01,
    progress: Callable[[str], None] = lambda line: None,
) -> QuantizedModel:
    """Round the matrices of a model so that they take 99.5 to 100 % of a budget.

    Args:
        curvature: from measure_curvature; nearest rounding with sdclip or uniform steps doesn't read it.
        budget_bytes: of everything. overhead_bytes: what everything but the matrices takes.
        size_of: the bytes of coded matrices. The search predicts sizes, codes really, and corrects the prediction by
            what it was off: three codings as a rule, four at most unless none of them fits.
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
    feedback = None
    if method == "gptq":
        feedback = {name: error_feedback(curvature[name].hessian, damping) for name in weights}
    plan = allocate(weights, allocation, curvature, feedback, column_steps)
    finest, coarsest = scale_range(plan)
    codings: list[tuple[float, int]] = []
    best: QuantizedModel | None = None
    prediction = _Prediction()
    aim = _AIM * budget_bytes
    for coding in range(_MAX_CODINGS + _MAX_RETRIES):
        scale = scale_for_bytes(plan, prediction.before(aim - overhead_bytes), finest, coarsest)
        # the first coding shows how far off the prediction is, and nearest rounding is quick and close in size
        is_trial = feedback is not None and coding == 0
        tensors = _rounded(weights, plan, scale, None if is_trial else feedback)
        size = overhead_bytes + size_of(tensors)
        codings.append((scale, size))
        progress(f"coding {coding + 1}: D {scale:.4g}, {size:,} bytes{', rounded to nearest' if is_trial else ''}")
        if size > budget_bytes and scale == coarsest and not is_trial:
            raise UserError(
                f"golf.budget_bytes: {budget_bytes:,} is too small: with the coarsest steps the model still takes"
                f" {size:,} bytes; raise the budget to that at least, or train a smaller model."
            )
        if not is_trial and size <= budget_bytes and (best is None or size > best.size_bytes):
            best = QuantizedModel(tensors, scale, SDCLIP_LEVELS * scale * mean_relative_step(plan), size, codings)
        if best is not None and (best.size_bytes >= _LOWEST * budget_bytes or scale == finest):
            break
        prediction.learn(predicted_bytes(plan, scale), size - overhead_bytes, is_trial)
        if coding + 1 >= _MAX_CODINGS:
            if best is not None:
                break
            aim *= 0.998
    if best is None:
        raise UserError(
            f"golf.budget_bytes: found no steps that fit in {budget_bytes:,}; the last attempt took {size:,} bytes."
        )
    return replace(best, findings=_findings(best, budget_bytes, finest))


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


class _Prediction:
    """Correct predicted sizes by real ones: their ratio, and from two codings of a kind on, a power (a secant)."""

    def __init__(self) -> None:
        self.predicted = self.real = self.power = 1.0
        self.was_trial = True

    def learn(self, predicted: float, real: float, is_trial: bool) -> None:
        if not self.was_trial and predicted != self.predicted:
            power = math.log(real / self.real) / math.log(predicted / self.predicted)
            self.power = min(max(power, 0.3), 1.5)
        self.predicted, self.real, self.was_trial = predicted, real, is_trial

    def before(self, real: float) -> float:
        """Return the predicted size whose real one is `real`."""
        return self.predicted * (max(real, 1.0) / self.real) ** (1 / self.power)


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


def _rounded(
    weights: Mapping[str, NDArray[np.float32]],
    plan: Allocation,
    scale: float,
    feedback: Mapping[str, Feedback] | None,
) -> dict[str, Quantized]:
    def one(name: str) -> Quantized:
        codes = plan[name].row_codes(scale), plan[name].column_codes
        if feedback is None:
            return round_nearest(weights[name], *codes)
        return round_with_feedback(weights[name], *codes, feedback[name])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy lets go of the GIL
        return dict(zip(weights, pool.map(one, weights), strict=True))
