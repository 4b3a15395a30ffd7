"""Forecast during training what an export of the weights would take (golf.forecast_every_steps)."""

from __future__ import annotations

from typing import Any

from accelerate import DistributedType

from hfgolf.checkpoint.contents import first_nonfinite
from hfgolf.golf.artifact import encode
from hfgolf.golf.curvature import calibration_batches, measure_curvature, token_counts
from hfgolf.golf.forecast import forecast
from hfgolf.golf.grid import Quantized
from hfgolf.golf.quantize import matrices
from hfgolf.golf.script import config_differences, packed_script
from hfgolf.train.run import Run
from hfgolf.train.validation import exported_weights

CALIBRATION_TOKENS = 4096  # a tenth of a bit in 3 is lost by it at most; an export takes more


def forecast_export(run: Run) -> dict[str, Any]:
    """Return the forecast's columns of the row; none on other processes, or if the weights are not finite.

    The model runs in fp32 and evaluation mode on the main process; nothing that training uses changes.
    """
    accelerator, config, model = run.accelerator, run.config, run.raw_model
    if not accelerator.is_main_process or accelerator.distributed_type == DistributedType.FSDP:
        return {}  # under FSDP, no process holds all the weights
    if first_nonfinite(model.named_parameters()):
        return {}  # recovery.py handles them
    batches = calibration_batches(
        run.tokens.train,
        seed=config.run.seed,
        sequence_length=config.batch.sequence_length,
        blocks_read=run.state.blocks,
        num_tokens=CALIBRATION_TOKENS,
        batch_size=run.micro_batch_size,
    )
    counts = token_counts(run.tokens.train, model.config.vocab_size)
    with run.stopwatch.charge("evaluate"), exported_weights(run):
        curvature = measure_curvature(model, batches, counts)
        weights = matrices(model)
        parameters = dict(model.named_parameters())
        rest = {name: one.detach().float().cpu().numpy() for name, one in parameters.items() if name not in weights}

        def size_of(tensors: dict[str, Quantized]) -> int:
            return len(encode(config_differences(model.config), {**rest, **tensors}, list(parameters)).data)

        seen = forecast(
            weights, curvature, config.golf, overhead_bytes=len(packed_script(model.config)), size_of=size_of
        )
    budget = config.golf.budget_bytes
    return {
        "golf_bytes": seen.num_bytes,
        "golf_margin_bytes": None if budget is None else budget - seen.num_bytes,
        "golf_step": seen.scale,
        "golf_loss": seen.loss,
    }
