"""What golf does in a run: forecast what an export would take, and train with the weights that it would have."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from accelerate import DistributedType
from accelerate.utils import broadcast_object_list

from hfgolf.checkpoint.contents import first_nonfinite
from hfgolf.golf.artifact import model_encoder
from hfgolf.golf.budget import bytes_besides
from hfgolf.golf.curvature import Curvature, calibration_batches, measure_curvature, token_counts
from hfgolf.golf.forecast import forecast
from hfgolf.golf.qat import Rounding, packed_codes
from hfgolf.golf.quantize import matrices, quantize_model
from hfgolf.system.errors import UserError
from hfgolf.train.hooks import Hook
from hfgolf.train.validation import averaged_weights

if TYPE_CHECKING:
    from hfgolf.train.run import Run

logger = logging.getLogger(__name__)

GRIDS = 10
"""A new grid for each tenth of the rounded part. To choose one takes about as long as it takes an export; the last one
stays, so that what is exported trained on the grid it is on."""
AIM = 0.995  # of the budget: after the grid is frozen, the integers still change a little


class Forecast(Hook):
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
            weights, curvature = matrices(run.golf_model), calibrated_curvature(run)
            encode = model_encoder(run.golf_model)
            seen = forecast(
                weights,
                curvature,
                golf,
                overhead_bytes=bytes_besides(
                    run.golf_model.config, run.tokens.tokenizer, run.resolved.config, golf.count
                ),
                size_of=lambda tensors: len(encode(tensors).data),
            )
        return {
            "golf_bytes": seen.num_bytes,
            "golf_margin_bytes": None if golf.budget_bytes is None else golf.budget_bytes - seen.num_bytes,
            "golf_step": seen.scale,
            "golf_loss": seen.loss,
        }


class QuantizationAwareTraining(Hook):
    """Rounds the matrices in each pass of the last golf.qat_fraction of a run; golf/qat.py rounds.

    The grid is chosen when it is due, renewed, and frozen at last. It is in the checkpoint, so a resumed run rounds as
    before.
    """

    def __init__(self) -> None:
        self._grid: dict[str, Any] = {}
        """{"step", "frozen", "codes"}; empty: not yet."""
        self._rounding: Rounding | None = None

    def before_step(self, run: Run, expected_steps: float) -> None:
        """Choose, renew or freeze the grid, if it is time. Raises UserError under FSDP, or if no grid fits."""
        fraction, state, accelerator, grid = run.config.golf.qat_fraction, run.state, run.accelerator, self._grid
        if accelerator.distributed_type == DistributedType.FSDP:
            raise UserError("golf.qat_fraction: FSDP shards the matrices that it would round; use DDP, or set it to 0.")
        steps_per_grid = fraction * expected_steps / GRIDS
        is_late = state.step >= min(expected_steps - steps_per_grid, expected_steps - 1)
        is_due = state.step >= (1 - fraction) * expected_steps
        if grid:
            is_due = not grid["frozen"] and (is_late or state.step - grid["step"] >= steps_per_grid)
        if not is_due or first_nonfinite(run.golf_model.named_parameters()):
            return
        codes, problem = broadcast_object_list(list(_choose(run)) if accelerator.is_main_process else [None, None])
        if problem:
            raise UserError(problem)
        self._grid = {"step": state.step, "frozen": is_late, "codes": codes}
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


def calibrated_curvature(run: Run) -> dict[str, Curvature]:
    """Measure the curvature of the model on the blocks that the run reads next, as many as an export takes.

    With fewer, the predicted loss is too low: with 4,096, configs/small.yaml seems to need 6 to 11 % fewer bytes.
    """
    config, model, tokens = run.config, run.golf_model, run.tokens.train
    batches = calibration_batches(
        tokens,
        seed=config.order_seed,
        sequence_length=config.batch.sequence_length,
        blocks_read=run.state.blocks,
        num_tokens=config.golf.calibration_tokens,
        batch_size=run.micro_batch_size,
    )
    return measure_curvature(model, batches, token_counts(tokens, model.config.vocab_size))


def _choose(run: Run) -> tuple[dict[str, str] | None, str | None]:
    """Return the grid that an export by nearest rounding would use now, packed; or the reason why there is none."""
    golf, model = run.config.golf, run.golf_model
    assert golf.budget_bytes is not None
    encode = model_encoder(model)
    try:
        with run.stopwatch.charge("evaluate"):
            quantized = quantize_model(
                model,
                calibrated_curvature(run),
                budget_bytes=int(AIM * golf.budget_bytes),
                overhead_bytes=bytes_besides(model.config, run.tokens.tokenizer, run.resolved.config, golf.count),
                size_of=lambda tensors: len(encode(tensors).data),
                method="nearest",
                allocation=golf.allocation,
            )
    except UserError as error:
        return None, str(error)
    name = "step %d: rounding %d matrices to a grid of %s bytes, D %.4g"
    logger.info(name, run.state.step, len(quantized.tensors), f"{quantized.size_bytes:,}", quantized.scale)
    return packed_codes({name: one.row_codes for name, one in quantized.tensors.items()}), None
