"""Forecast during training what an export of the weights would take (golf.forecast_every_steps)."""

from __future__ import annotations

from typing import Any

from accelerate import DistributedType

from hfgolf.checkpoint.contents import first_nonfinite
from hfgolf.golf.artifact import model_encoder
from hfgolf.golf.budget import bytes_besides
from hfgolf.golf.curvature import Curvature, calibration_batches, measure_curvature, token_counts
from hfgolf.golf.forecast import forecast
from hfgolf.golf.quantize import matrices
from hfgolf.train.run import Run
from hfgolf.train.validation import averaged_weights


def forecast_export(run: Run) -> dict[str, Any]:
    """Return the forecast's columns of the row; none on other processes, or if the weights are not finite.

    The model runs uncompiled and in evaluation mode on the main process; nothing that training uses changes.
    """
    accelerator, golf = run.accelerator, run.config.golf
    if not accelerator.is_main_process or accelerator.distributed_type == DistributedType.FSDP:
        return {}  # under FSDP, no process holds all the weights
    if first_nonfinite(run.golf_model.named_parameters()):
        return {}  # recovery.py handles them
    with run.stopwatch.charge("evaluate"), averaged_weights(run):
        weights, curvature = matrices(run.golf_model), calibrated_curvature(run)
        encode = model_encoder(run.golf_model)
        seen = forecast(
            weights,
            curvature,
            golf,
            overhead_bytes=bytes_besides(run.golf_model.config, run.tokens.tokenizer, run.config, golf.count),
            size_of=lambda tensors: len(encode(tensors).data),
        )
    return {
        "golf_bytes": seen.num_bytes,
        "golf_margin_bytes": None if golf.budget_bytes is None else golf.budget_bytes - seen.num_bytes,
        "golf_step": seen.scale,
        "golf_loss": seen.loss,
    }


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
