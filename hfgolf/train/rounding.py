"""Train with rounded weights (golf.qat_fraction): when the grid is chosen, renewed and frozen.

The grid is in the training state, so a resumed run rounds as before. golf/qat.py rounds.
"""

from __future__ import annotations

import logging

from accelerate import DistributedType
from accelerate.utils import broadcast_object_list

from hfgolf.checkpoint.contents import first_nonfinite
from hfgolf.errors import UserError
from hfgolf.golf.artifact import model_encoder
from hfgolf.golf.budget import bytes_besides
from hfgolf.golf.qat import packed_codes
from hfgolf.golf.quantize import quantize_model
from hfgolf.train.forecast import calibrated_curvature
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)

GRIDS = 10
"""A new grid for each tenth of the rounded part. To choose one takes about as long as it takes an export; the last one
stays, so that what is exported trained on the grid it is on."""
AIM = 0.995  # of the budget: after the grid is frozen, the integers still change a little


def update_grid(run: Run, expected_steps: float) -> None:
    """Choose, renew or freeze the grid of the next step, if it is time. run.rounding follows it.

    Raises UserError under FSDP, or if no grid fits the budget.
    """
    fraction, state, accelerator = run.config.golf.qat_fraction, run.state, run.accelerator
    if not fraction:
        return
    if accelerator.distributed_type == DistributedType.FSDP:
        raise UserError("golf.qat_fraction: FSDP shards the matrices that it would round; use DDP, or set it to 0.")
    steps_per_grid = fraction * expected_steps / GRIDS
    is_late = state.step >= min(expected_steps - steps_per_grid, expected_steps - 1)
    is_due = state.step >= (1 - fraction) * expected_steps
    if state.grid:
        is_due = not state.grid["frozen"] and (is_late or state.step - state.grid["step"] >= steps_per_grid)
    if not is_due or first_nonfinite(run.golf_model.named_parameters()):
        return
    codes, problem = broadcast_object_list(list(_choose(run)) if accelerator.is_main_process else [None, None])
    if problem:
        raise UserError(problem)
    state.grid = {"step": state.step, "frozen": is_late, "codes": codes}
    if is_late:
        state.forget_best()  # the weights to export are on this grid


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
                overhead_bytes=bytes_besides(model.config, run.tokens.tokenizer, run.config, golf.count),
                size_of=lambda tensors: len(encode(tensors).data),
                method="nearest",
                allocation=golf.allocation,
            )
    except UserError as error:
        return None, str(error)
    name = "step %d: rounding %d matrices to a grid of %s bytes, D %.4g"
    logger.info(name, run.state.step, len(quantized.tensors), f"{quantized.size_bytes:,}", quantized.scale)
    return packed_codes({name: one.row_codes for name, one in quantized.tensors.items()}), None
