"""What golf does in a run: forecast what an export would take, and train with the weights that it would have.

Both are hooks. A forecast rounds and codes as an export does; quantization-aware training rounds to an export's grid.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray
from torch import nn

from hfgolf.checkpoint.contents import first_nonfinite
from hfgolf.config.sections import GolfSection
from hfgolf.golf.artifact import model_encoder
from hfgolf.golf.curvature import Curvature, calibrated_curvature
from hfgolf.golf.grid import MAX_INTEGER, round_nearest, steps_of
from hfgolf.golf.ledger import bytes_besides
from hfgolf.golf.quantize import (
    Curvatures,
    SizeOf,
    Weights,
    matrices,
    plan_steps,
    quantize_model,
    require_room,
    rounded,
    scale_for_bytes,
)
from hfgolf.system.errors import UserError
from hfgolf.train.hooks import Hook
from hfgolf.train.run import Run
from hfgolf.train.validation import averaged_weights

logger = logging.getLogger(__name__)

TOLERATED_NATS = 0.01
"""Per token. About the noise between seeds of a small model, and what the best published artifacts lose."""
GRIDS = 10
"""A new grid for each tenth of the rounded part. To choose one takes about as long as it takes an export; the last one
stays, so that what is exported trained on the grid it is on."""
RESERVE = 0.001
"""Of the budget, for how the integers change once the grid is frozen: in six runs of the laptop round, their bytes fell
by 0.02 to 0.25 %. Of a smaller model on 16 MB of packages' source, they grew by 0.6 %, which the export takes away."""


class SizeForecast(Hook):
    """Forecasts what an export of the weights would take, every golf.forecast_every_steps."""

    def wants_row(self, run: Run, is_last: bool) -> bool:
        every_steps = run.config.golf.forecast_every_steps
        return every_steps is not None and (is_last or run.state.step % every_steps == 0)

    def columns(self, run: Run, is_last: bool) -> Mapping[str, Any]:
        """Return the forecast; nothing on other processes, or if the weights are not finite.

        The model runs uncompiled and in evaluation mode on the main process; nothing that training uses changes.
        """
        accelerator, golf = run.accelerator, run.config.golf
        is_sharded = accelerator.distributed_type == DistributedType.FSDP  # then no process holds all the weights
        if not self.wants_row(run, is_last) or not accelerator.is_main_process or is_sharded:
            return {}
        if first_nonfinite(run.golf_model.named_parameters()):
            return {}  # recovery.py handles them
        with run.stopwatch.charge("evaluate"), averaged_weights(run):
            weights, curvature = matrices(run.golf_model), _curvature(run)
            return forecast(weights, curvature, golf, **_sizes(run))


def forecast(
    weights: Weights, curvature: Curvatures, golf: GolfSection, *, overhead_bytes: int, size_of: SizeOf
) -> dict[str, float | None]:
    """Forecast an export of these weights. Arguments as in quantize_model; three real codings.

    With steps by curvature every budget can be met, at a price in loss. So golf_bytes are those of everything if
    rounding may cost TOLERATED_NATS per token. With a budget, golf_margin_bytes are what it leaves, golf_step is the D
    that it allows and golf_loss the price there, in nats per token; None without one. The codings go the rest of the
    way by a rule: one bit per weight more is half the step and a quarter of the price.
    """
    octave_bytes = sum(weight.size for weight in weights.values()) / 8  # of one bit per weight

    def attempt(num_bytes: float) -> tuple[float, int, float]:
        """Round to a size; return log2 of D, the real size, and log2 of the predicted price in nats per token."""
        plan, feedback = plan_steps(weights, curvature, num_bytes, golf.method, golf.allocation)
        scale = scale_for_bytes(plan, num_bytes)
        tensors = rounded(weights, plan, scale, feedback)
        price = sum(curvature[name].loss_increase(one.dequantized() - weights[name]) for name, one in tensors.items())
        return math.log2(scale), size_of(tensors), math.log2(max(price, 1e-300))

    def bytes_tolerated(size: int, log_price: float) -> float:
        return max(size + (log_price - math.log2(TOLERATED_NATS)) / 2 * octave_bytes, 1.0)

    available = 3 * octave_bytes if golf.budget_bytes is None else golf.budget_bytes - overhead_bytes
    octave, first_size, log_price = attempt(available)
    tolerated = bytes_tolerated(first_size, log_price)
    for _ in range(2):
        tolerated = bytes_tolerated(*attempt(tolerated)[1:])
    num_bytes = overhead_bytes + round(tolerated)
    if golf.budget_bytes is None:
        return {"golf_bytes": num_bytes, "golf_margin_bytes": None, "golf_step": None, "golf_loss": None}
    octaves = (first_size - available) / octave_bytes
    return {
        "golf_bytes": num_bytes,
        "golf_margin_bytes": golf.budget_bytes - num_bytes,
        "golf_step": 2 ** (octave + octaves),
        "golf_loss": 2 ** (log_price + 2 * octaves),
    }


class QuantizationAwareTraining(Hook):
    """Rounds the matrices in each pass of the last golf.qat_fraction of a run.

    The grid is chosen when it is due, renewed, and frozen at last. It is in the checkpoint, so a resumed run rounds as
    before.
    """

    def __init__(self) -> None:
        self._grid: dict[str, Any] = {}
        """{"step", "frozen", "codes", "bytes"}, of everything on it when it was chosen; empty: not yet."""
        self._rounding: Rounding | None = None

    def start(self, run: Run) -> None:
        """Raise UserError under FSDP, or if not even zeros fit the budget."""
        if run.accelerator.distributed_type == DistributedType.FSDP:
            raise UserError("golf.qat_fraction: FSDP shards the matrices that it would round; use DDP, or set it to 0.")
        require_room(matrices(run.golf_model), budget_bytes=run.config.golf.budget_bytes or 0, **_sizes(run))

    def before_step(self, run: Run, expected_steps: float) -> None:
        """Choose, renew or freeze the grid, if it is time. Raises UserError if no grid fits."""
        fraction, state, accelerator, grid = run.config.golf.qat_fraction, run.state, run.accelerator, self._grid
        steps_per_grid = fraction * expected_steps / GRIDS
        is_late = state.step >= min(expected_steps - steps_per_grid, expected_steps - 1)
        is_due = state.step >= (1 - fraction) * expected_steps
        if grid:
            is_due = not grid["frozen"] and (is_late or state.step - grid["step"] >= steps_per_grid)
        if not is_due or first_nonfinite(run.golf_model.named_parameters()):
            return
        chosen, problem = broadcast_object_list(
            list(_choose(run, grid)) if accelerator.is_main_process else [None, None]
        )
        if problem:
            raise UserError(problem)
        self._grid = {"step": state.step, "frozen": is_late} | chosen
        if is_late:
            state.forget_best()  # the weights to export are on this grid

    def weights(self, run: Run) -> AbstractContextManager[None]:
        rounding = self._current(run)
        return nullcontext() if rounding is None else rounding.applied()

    def columns(self, run: Run, is_last: bool) -> Mapping[str, Any]:
        rounding = self._current(run)
        return {"golf_rounded_matrices": 0 if rounding is None else rounding.num_rounded}

    def state_dict(self) -> dict[str, Any]:
        return self._grid

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._grid = state

    def _current(self, run: Run) -> Rounding | None:
        codes = self._grid.get("codes")
        if codes is None:
            return None
        if self._rounding is None or self._rounding.codes is not codes:
            self._rounding = Rounding(run.raw_model, codes)
        return self._rounding


class Rounding:
    """Round the matrices of a model to fixed grids while it runs.

    In a forward and backward pass the matrices hold their rounded values; the optimizer updates the unrounded ones.
    That is the straight-through gradient (Bengio et al. 2013, arXiv:1308.3432), without a hook in the model: a compiled
    graph reads the weights that it is given, so no compiler can fold the rounding away.

    codes: {parameter name: its row codes}, from packed_codes. num_rounded: matrices rounded in the last pass, for the
    log.
    """

    def __init__(self, model: nn.Module, codes: Mapping[str, str]) -> None:
        self.codes = codes
        self.num_rounded = 0
        self._weights = [model.get_parameter(name) for name in codes]
        self._steps = [
            torch.from_numpy(steps_of(unpacked_codes(text)))[:, None].to(weight.device)
            for weight, text in zip(self._weights, codes.values(), strict=True)
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the parameters their rounded values inside the `with` block, and restore them bit for bit after it.

        Gradients that the block computes stay. Enter autocast inside the block, because it caches what it has cast.
        """
        # Swap storages, not contents: a checkpoint in the background may still be reading these.
        kept = [weight.data for weight in self._weights]
        try:
            for weight, steps in zip(self._weights, self._steps, strict=True):
                weight.data = (weight.data / steps).round_().clamp_(-MAX_INTEGER, MAX_INTEGER).mul_(steps)
            self.num_rounded = len(self._weights)
            yield
        finally:
            for weight, values in zip(self._weights, kept, strict=True):
                weight.data = values


def packed_codes(row_codes: Mapping[str, NDArray[np.uint8]]) -> dict[str, str]:
    """Return row codes, (rows,) uint8 for each matrix, in a form that JSON holds: base64."""
    return {name: base64.b64encode(codes.tobytes()).decode() for name, codes in row_codes.items()}


def unpacked_codes(text: str) -> NDArray[np.uint8]:
    """Return the row codes of a matrix from the form that JSON holds."""
    return np.frombuffer(base64.b64decode(text), dtype=np.uint8)


def _curvature(run: Run) -> dict[str, Curvature]:
    return calibrated_curvature(
        run.golf_model,
        run.tokens.train,
        seed=run.config.order_seed,
        sequence_length=run.config.batch.sequence_length,
        blocks_read=run.state.blocks,
        num_tokens=run.config.golf.calibration_tokens,
        batch_size=run.micro_batch_size,
    )


def _sizes(run: Run) -> dict[str, Any]:
    """Return overhead_bytes and size_of, as forecast and quantize_model take them."""
    golf, encode = run.config.golf, model_encoder(run.golf_model)
    return {
        "overhead_bytes": bytes_besides(run.golf_model.config, run.tokens.tokenizer, run.resolved.config, golf.count),
        "size_of": lambda tensors: len(encode(tensors).data),
    }


def _choose(run: Run, before: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return the grid that an export by nearest rounding would use now: codes and bytes; or why there is none.

    before: the grid until now, on which the bytes may have grown. As much stays free for the next one.
    """
    golf, weights, sizes = run.config.golf, matrices(run.golf_model), _sizes(run)
    budget_bytes = golf.budget_bytes or 0  # golf.qat_fraction asks for one
    reserve = int(RESERVE * budget_bytes)
    with run.stopwatch.charge("evaluate"):
        if before:
            now = {name: round_nearest(weights[name], unpacked_codes(codes)) for name, codes in before["codes"].items()}
            size = sizes["overhead_bytes"] + sizes["size_of"](now)
            reserve = max(reserve, size - before.get("bytes", size))  # older runs did not keep them
        sizes["overhead_bytes"] += reserve
        try:
            quantized = quantize_model(
                weights,
                _curvature(run),
                method="nearest",
                allocation=golf.allocation,
                budget_bytes=budget_bytes,
                **sizes,
            )
        except UserError as error:
            return None, str(error)
    size, line = quantized.size_bytes - reserve, "step %d: rounding %d matrices to a grid of %s bytes, D %.4g"
    logger.info(line, run.state.step, len(quantized.tensors), f"{size:,}", quantized.scale)
    codes = {name: one.row_codes for name, one in quantized.tensors.items()}
    return {"codes": packed_codes(codes), "bytes": size}, None
