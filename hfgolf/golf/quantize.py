"""From a model to integers that fit in a number of bytes: which steps, and the search for the one that fills a budget.

One number D sets the steps of all matrices: at D they are D times those at D = 1. So the size is monotone in D, and a
byte budget has one D. Does not know files: `size_of` says what integers take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hfgolf.golf.curvature import Curvature, grid_layers
from hfgolf.golf.gptq import Feedback, error_feedback, round_with_feedback
from hfgolf.golf.grid import (
    CODES_PER_OCTAVE,
    MAX_INTEGER,
    MAX_ROW_CODE,
    Quantized,
    gaussian_bits,
    grid_of,
    round_nearest,
    row_codes_of,
    steps_of,
)
from hfgolf.system.errors import UserError

FINEST_RELATIVE_STEP = 2.0**-9  # of a row's RMS: 11 bits per weight, the precision of fp16
COARSEST_RELATIVE_STEP = 16.0  # hardly anything is left
SIDE_BYTES_PER_ROW = 1.0  # a step's code, and a class for the coder
SIDE_BYTES_PER_COLUMN = 0.5  # a class for the coder
SDCLIP_LEVELS = 31  # of 6 bits, to either side
_AIM = 0.999  # of the budget; a real size a little off is still in [_CLOSE, 1]
_CLOSE, _LOWEST = 0.997, 0.995  # what the first codings have to reach, and what is enough after them
_FIRST_CODINGS = 4
_DAMPING = 0.01  # of the Hessians of a matrix's inputs and outputs, as a share of the mean of their diagonal
_EXCESS = 0.02  # of the budget, that integers nearer to zero can take away
_MAX_CODINGS = 12  # two to four as a rule; the size is nearly smooth in D
_GOLDEN = (math.sqrt(5) - 1) / 2

Weights = Mapping[str, NDArray[np.float32]]
"""{parameter name: (outputs, inputs) or (tokens, columns)}: matrices as `matrices` returns them."""
Grids = Mapping[str, Quantized]
"""Such matrices on their grids."""
Curvatures = Mapping[str, Curvature]
SizeOf = Callable[[Grids], int]


def matrices(model: nn.Module) -> dict[str, NDArray[np.float32]]:
    """Return the weights that go on a grid, {parameter name: (outputs, inputs) or (tokens, columns), an fp32 copy}.

    They are the weights of linear layers and embeddings, a tied one once, in the order of the parameters.
    """
    layers = {name: layer for layer, name in grid_layers(model).items()}
    return {name: stored(layers[name], weight) for name, weight in model.named_parameters() if name in layers}


def stored(layer: nn.Module | None, weight: Tensor) -> NDArray[np.float32]:
    """Return an fp32 copy of a weight as it is coded: a row for each output of its layer (None: as it is)."""
    values = weight.detach().to("cpu", torch.float32, copy=True)
    return (values.T if isinstance(layer, Conv1D) else values).numpy()


@dataclass(frozen=True)
class UnitSteps:
    """The steps of one matrix at D = 1, and what is needed of its weights to predict their size.

    row_steps, row_rms, row_max: (rows,) the step, the RMS and the largest absolute value of each row.
    """

    row_steps: NDArray[np.float64]
    row_rms: NDArray[np.float64]
    row_max: NDArray[np.float64]
    columns: int

    def row_codes(self, scale: float) -> NDArray[np.uint8]:
        """Return the codes at D = scale, coarser where a row's largest weight would leave the alphabet."""
        within_alphabet = self.row_max * 2 ** (0.5 / CODES_PER_OCTAVE) / MAX_INTEGER  # codes round by half an eighth
        return row_codes_of(np.maximum(scale * self.row_steps, within_alphabet))

    def error_variances(self, scale: float) -> NDArray[np.float64]:
        """Return the mean square of a weight's error by row, (rows,), at D = scale.

        It is step**2 / 12, but never more than the weight's own square: the weight is 0 then.
        """
        return np.minimum(np.square(steps_of(self.row_codes(scale)).astype(np.float64)) / 12, self.row_rms**2)

    def predicted_bytes(self, scale: float) -> float:
        """Return the size at D = scale if rows are Gaussian: their entropy, and side information."""
        relative = steps_of(self.row_codes(scale)) / self.row_rms
        side = SIDE_BYTES_PER_ROW * len(relative) + SIDE_BYTES_PER_COLUMN * self.columns
        return float(gaussian_bits(relative).sum()) * self.columns / 8 + side


Allocation = dict[str, UnitSteps]


def allocate(
    weights: Weights, allocation: str, curvature: Curvatures, feedback: Mapping[str, Feedback] | None
) -> Allocation:
    """Return the steps of each matrix at D = 1.

    curvature: step[r] = 1 / sqrt(row_weights[r] * mean of U[j, j]**-2), with the curvature of the loss and the factor U
        that GPTQ passes errors on with. Rounding costs the loss about 1/24 of the sum of row_weights[r] * step[r]**2 /
        U[j, j]**2 per token, and each octave of a step takes one bit. So at the optimum every row costs the loss the
        same. For nearest rounding (no feedback), hessian[j, j] replaces U[j, j]**-2. Where errors are passed on to
        rows, their U[r, r]**-2 replaces row_weights[r].
    sdclip: step[r] = RMS of row r, the same bits for every row (k standard deviations over the 31 levels of 6 bits are
        D = k / 31).
    uniform: step = 1 for all weights.
    """
    result: Allocation = {}
    rows_before = 0
    for name, weight in weights.items():
        sizes = np.abs(weight.astype(np.float64))
        if allocation == "curvature":
            column_weights, row_weights = np.diag(curvature[name].hessian), curvature[name].row_weights
            if feedback:
                column_weights = feedback[name].weights()
                row_weights = row_weights if (rows := feedback[name].rows) is None else rows.weights()
            with np.errstate(divide="ignore"):  # no gradient at all: the coarsest step
                row_steps = 1 / np.sqrt(row_weights * float(column_weights.mean()))
        row_rms = np.maximum(np.sqrt(np.square(sizes).mean(axis=1)), np.finfo(np.float32).tiny)
        if allocation == "sdclip":
            row_steps = row_rms
        elif allocation == "uniform":
            row_steps = np.ones(len(weight))
        elif allocation != "curvature":
            raise ValueError(f"allocation is {allocation!r}; it must be curvature, sdclip or uniform")
        # Codes are eighths of an octave. Rows that share a step, such as those of tokens that never occur, are spread
        # over one eighth; else all of them would change their code at the same D, and the size would jump there.
        spread = (rows_before + np.arange(len(weight))) * _GOLDEN % 1 - 0.5
        spread[np.unique(row_steps, return_index=True)[1]] = 0
        row_steps = row_steps * 2.0 ** (spread / CODES_PER_OCTAVE)
        result[name] = UnitSteps(row_steps, row_rms, sizes.max(axis=1), weight.shape[1])
        rows_before += len(weight)
    return result


def predicted_bytes(allocation: Allocation, scale: float) -> float:
    """Return the predicted size of all matrices at D = scale."""
    return sum(unit.predicted_bytes(scale) for unit in allocation.values())


def lost_share(allocation: Allocation, scale: float) -> float:
    """Return the predicted share of the weights' sum of squares that rounding to nearest at D = scale takes: 0 to 1."""
    lost = sum(float(unit.error_variances(scale).sum()) * unit.columns for unit in allocation.values())
    return lost / sum(float(np.square(unit.row_rms).sum()) * unit.columns for unit in allocation.values())


def mean_relative_step(allocation: Allocation) -> float:
    """Return the geometric mean over all weights of step / RMS of the row, at D = 1. Rows that are zero don't count."""
    octaves = count = 0.0
    for unit in allocation.values():
        is_counted = (unit.row_max > 0) & np.isfinite(unit.row_steps)
        octaves += float(np.log2(unit.row_steps[is_counted] / unit.row_rms[is_counted]).sum()) * unit.columns
        count += float(is_counted.sum()) * unit.columns
    return 2.0 ** (octaves / count) if count else 1.0


def scale_range(allocation: Allocation) -> tuple[float, float]:
    """Return the D of the finest and of the coarsest useful steps."""
    unit = mean_relative_step(allocation)
    return FINEST_RELATIVE_STEP / unit, COARSEST_RELATIVE_STEP / unit


def scale_for_bytes(allocation: Allocation, num_bytes: float) -> float:
    """Return the smallest useful D that is predicted to take at most num_bytes, by bisection; the coarsest if none."""
    finest, coarsest = scale_range(allocation)
    if predicted_bytes(allocation, finest) <= num_bytes:
        return finest
    low, high = math.log2(finest), math.log2(coarsest)
    while high - low > 1e-5:
        middle = (low + high) / 2
        is_enough = predicted_bytes(allocation, 2.0**middle) <= num_bytes
        low, high = (low, middle) if is_enough else (middle, high)
    return coarsest if high == math.log2(coarsest) else 2.0**high


def plan_steps(
    weights: Weights, curvature: Curvatures, available_bytes: float, method: str, allocation: str
) -> tuple[Allocation, dict[str, Feedback] | None]:
    """Return the steps at D = 1 and how errors are passed on; None: rounding to nearest.

    The inputs of a matrix come from matrices that are rounded, too, and so do the gradients of its outputs, but its
    Hessians are of exact ones. Their noise is about the share of the weights that rounding takes, so it is added to
    _DAMPING. At 3 bits per weight it is small; at 1 bit, errors would otherwise go where nothing cancels them.
    """
    nearest = allocate(weights, allocation, curvature, None)
    if method == "nearest":
        return nearest, None
    if method != "gptq":
        raise ValueError(f"method is {method!r}; it must be gptq or nearest")
    noise = lost_share(nearest, scale_for_bytes(nearest, available_bytes))
    feedback = {name: _feedback(curvature[name], _DAMPING + noise) for name in weights}
    return allocate(weights, allocation, curvature, feedback), feedback


def _feedback(curvature: Curvature, damping: float) -> Feedback:
    of_outputs, rows = curvature.output_hessian, None
    if of_outputs is not None and of_outputs.any():  # without any gradient, no row counts
        rows = error_feedback(of_outputs, damping)
    return replace(error_feedback(curvature.hessian, damping), rows=rows)


def rounded(
    weights: Weights, plan: Allocation, scale: float, feedback: Mapping[str, Feedback] | None
) -> dict[str, Quantized]:
    """Return all matrices rounded at D = scale. plan, feedback: from plan_steps."""
    result = {}
    for name, weight in weights.items():  # with a thread for each of several, they wait for Python's lock
        grid = weight, plan[name].row_codes(scale)
        result[name] = round_nearest(*grid) if feedback is None else round_with_feedback(*grid, feedback[name])
    return result


@dataclass(frozen=True)
class QuantizedModel:
    """The matrices of a model on their grids, and how they were chosen.

    scale: D, see the module. sdclip_k: the k of SDClip at 6 bits that gives the same mean step relative to the rows.
    size_bytes: everything, overhead included. findings: what the user should know, one sentence each.
    """

    tensors: dict[str, Quantized]
    scale: float
    sdclip_k: float
    size_bytes: int
    findings: list[str] = field(default_factory=list)


def require_room(weights: Weights, *, budget_bytes: int, overhead_bytes: int, size_of: SizeOf) -> None:
    """Raise UserError if not even zeros fit a budget, which is known before anything is measured."""
    zeros = {
        name: Quantized(np.zeros(weight.shape, np.int32), np.full(len(weight), MAX_ROW_CODE, np.uint8))
        for name, weight in weights.items()
    }
    if (least := overhead_bytes + size_of(zeros)) > budget_bytes:
        raise UserError(
            f"budget_bytes: {budget_bytes:,} is too small: with zeros in all matrices the files still take"
            f" {least:,} bytes; raise the budget far above that, or train a smaller model."
        )


def quantize_model(
    weights: Weights,
    curvature: Curvatures,
    *,
    budget_bytes: int,
    overhead_bytes: int,
    size_of: SizeOf,
    method: str = "gptq",
    allocation: str = "curvature",
    progress: Callable[[str], None] = lambda line: None,
) -> QuantizedModel:
    """Round matrices so that they take 99.5 to 100 % of a budget.

    Args:
        weights: from matrices. curvature: from measure_curvature, of each of them; nearest rounding with sdclip or
            uniform steps doesn't read it.
        budget_bytes: of everything. overhead_bytes: what everything but the matrices takes.
        size_of: the bytes of coded matrices. The search predicts sizes, codes really, and corrects the prediction by
            what it was off: two to four codings as a rule.
        method: gptq or nearest. allocation: curvature, sdclip or uniform, see `allocate`.
        progress: called with one line per coding.

    A budget beyond the finest useful steps is not an error; the findings say what it leaves free.

    Raises UserError if the matrices do not fit even with the coarsest steps; it names the bytes that are needed.
    """
    plan, feedback = plan_steps(weights, curvature, budget_bytes - overhead_bytes, method, allocation)
    finest, coarsest = scale_range(plan)
    codings: list[tuple[float, int]] = []
    best: QuantizedModel | None = None
    for coding in range(_MAX_CODINGS):
        scale = _next_scale(plan, codings, budget_bytes, overhead_bytes)
        if scale in dict(codings):  # between the sizes on both sides of the budget, there is none
            break
        tensors = rounded(weights, plan, scale, feedback)
        size = overhead_bytes + size_of(tensors)
        codings.append((scale, size))
        progress(f"coding {coding + 1}: D {scale:.4g}, {size:,} bytes")
        if size > budget_bytes and scale == coarsest:
            raise UserError(
                f"budget_bytes: {budget_bytes:,} is too small: with the coarsest steps the model still takes"
                f" {size:,} bytes; raise the budget to that at least, or train a smaller model."
            )
        if size <= budget_bytes and (best is None or size > best.size_bytes):
            best = QuantizedModel(tensors, scale, SDCLIP_LEVELS * scale * mean_relative_step(plan), size)
        enough = budget_bytes * (_CLOSE if coding + 1 < _FIRST_CODINGS else _LOWEST)
        if best is not None and (best.size_bytes >= enough or best.scale == finest):
            break
    if best is None:
        raise UserError(
            f"budget_bytes: found no steps that fit in {budget_bytes:,}; the last attempt took {size:,} bytes."
        )
    free, findings = budget_bytes - best.size_bytes, []
    if best.scale == finest:
        findings = [
            f"The budget is larger than the model needs: at 11 bits per weight, finer than fp16 needs, {free:,} bytes"
            " stay free. A larger model would use them."
        ]
    elif best.size_bytes < _LOWEST * budget_bytes:
        findings = [f"No step came closer to the budget: {free:,} bytes stay free."]
    return replace(best, findings=findings)


def on_own_grid(
    weights: Weights, curvature: Curvatures, *, budget_bytes: int, overhead_bytes: int, size_of: SizeOf
) -> QuantizedModel | None:
    """Return matrices that were trained on a grid (golf.qat_fraction), else None. Arguments as in quantize_model.

    D is that of SDClip: the mean relative step. If they exceed the budget by little, they are made to fit: to round to
    a coarser grid would lose what the training on this one has gained.
    """
    tensors = {}
    for name, weight in weights.items():
        one = grid_of(weight)
        if one is None:
            return None
        tensors[name] = one
    if not any(one.integers.any() for one in tensors.values()):
        return None
    nearer, size = fitting(
        tensors, curvature, budget_bytes=budget_bytes, overhead_bytes=overhead_bytes, size_of=size_of
    )
    if size > budget_bytes:
        return None
    steps = {
        name: replace(unit, row_steps=steps_of(tensors[name].row_codes).astype(np.float64))
        for name, unit in allocate(weights, "sdclip", {}, None).items()
    }
    scale, free = mean_relative_step(steps), budget_bytes - size
    count = num_changes(tensors, nearer)
    but = f" but for {count:,} integers that went one nearer to zero, so that they fit" if count else ""
    note = f"The matrices are on a grid already (golf.qat_fraction), so they are kept{but}; {free:,} bytes stay free."
    return QuantizedModel(nearer, scale, SDCLIP_LEVELS * scale, size, [note])


def num_changes(before: Grids, after: Grids) -> int:
    """Return how many integers of the same matrices differ."""
    return sum(int((after[name].integers != one.integers).sum()) for name, one in before.items())


def fitting(
    tensors: dict[str, Quantized], curvature: Curvatures, *, budget_bytes: int, overhead_bytes: int, size_of: SizeOf
) -> tuple[dict[str, Quantized], int]:
    """Return matrices and the size of everything. Arguments as in quantize_model.

    If they exceed the budget by _EXCESS or less, some integers are one nearer to zero, so that they fit.
    """
    size = overhead_bytes + size_of(tensors)
    nearer, less = tensors, 0.0
    while size > budget_bytes and less + size - budget_bytes <= _EXCESS * budget_bytes:
        less += (size - budget_bytes) / 2 + 4  # it takes about twice as much
        nearer = _shrunk(tensors, curvature, less)
        size = overhead_bytes + size_of(nearer)
    return nearer, size


def _shrunk(tensors: Grids, curvature: Curvatures, num_bytes: float) -> dict[str, Quantized]:
    """Return matrices that take num_bytes less by the entropy of each: integers one nearer to zero, where a bit costs
    the least loss. Without curvature, a step costs its square.
    """
    nearer, bits, prices = {}, {}, {}
    for name, one in tensors.items():
        lowest, highest = int(one.integers.min(initial=0)), int(one.integers.max(initial=0))
        counts = np.bincount((one.integers - lowest).ravel(), minlength=highest - lowest + 1)
        logs = np.log2(np.maximum(counts, 1))
        nearer[name] = one.integers - np.sign(one.integers)
        bits[name] = np.maximum(logs[nearer[name] - lowest] - logs[one.integers - lowest], 0)
        loss = np.square(one.steps().astype(np.float64))
        if known := curvature.get(name):
            loss = loss * known.row_weights[:, None] * np.diag(known.hessian)
        prices[name] = np.where(bits[name] > 0, loss / np.maximum(bits[name], 1e-9), np.inf)
    all_prices, all_bits = (np.concatenate([value.ravel() for value in one.values()]) for one in (prices, bits))
    order = np.argsort(all_prices)
    enough = int(np.searchsorted(np.cumsum(all_bits[order]), 8 * num_bytes))
    limit = all_prices[order[min(enough, len(order) - 1)]]
    return {
        name: replace(one, integers=np.where(prices[name] <= limit, nearer[name], one.integers).astype(np.int32))
        for name, one in tensors.items()
    }


def _next_scale(
    plan: Allocation, codings: Sequence[tuple[float, int]], budget_bytes: int, overhead_bytes: int
) -> float:
    """Return the D to code next: the predicted one, corrected by the real sizes so far.

    The ratio of predicted and real sizes corrects it, and from two codings on a power (a secant). If that leaves the
    range between the best D that fits and the best that does not, it is the middle of this range.
    """
    aim = _AIM * budget_bytes - overhead_bytes
    if not codings:
        return scale_for_bytes(plan, aim)
    predicted = [predicted_bytes(plan, scale) for scale, _ in codings[-2:]]
    real = [max(1, size - overhead_bytes) for _, size in codings[-2:]]
    power = 1.0
    if len(codings) > 1 and predicted[0] != predicted[1]:
        power = min(max(math.log(real[1] / real[0]) / math.log(predicted[1] / predicted[0]), 0.3), 1.5)
    scale = scale_for_bytes(plan, predicted[-1] * (max(aim, 1.0) / real[-1]) ** (1 / power))
    fits = max(((size, scale) for scale, size in codings if size <= budget_bytes), default=None)
    exceeds = min(((size, scale) for scale, size in codings if size > budget_bytes), default=None)
    if fits and exceeds:
        low, high = sorted((fits[1], exceeds[1]))
        scale = scale if low < scale < high else math.sqrt(low * high)
    return scale
