"""How far the forecasts of a run are from exports of the same weights.

    hfgolf train --config configs/small.yaml --run.name forecast --golf.budget_bytes 2000000 \\
        --golf.forecast_every_steps 50 --train.save_every_steps 50 --train.keep_last 10
    python benchmarks/experiments/golf_forecast.py --run runs/forecast

Exports the checkpoint of each forecast as golf_export.py does, with the curvature of golf.calibration_tokens. Two
exports around the forecast's bytes say how many bytes keep the predicted cost of rounding at 0.01 nats per token, which
is what the forecast claims. One at the budget says what rounding costs there: predicted from the integers, and measured
on the start of the validation part. Adds the figures of a name to results/golf_forecast.json. Exits with 1 if bytes are
off by more than 3 % from step 50 on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hfgolf.checkpoint.store import STATE_NAME
from hfgolf.config.parse import load_config
from hfgolf.config.sections import RunConfig
from hfgolf.data.corpus import load_corpus
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.golf.artifact import model_encoder
from hfgolf.golf.curvature import calibration_batches, measure_curvature, token_counts
from hfgolf.golf.grid import Quantized
from hfgolf.golf.hooks import TOLERATED_NATS
from hfgolf.golf.ledger import bytes_besides
from hfgolf.golf.quantize import QuantizedModel, matrices, quantize_model
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.load import load_exported
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_rows
from hfgolf.system.durable import write_text
from hfgolf.train.console import quiet_libraries

RESULT = Path(__file__).parent / "results" / "golf_forecast.json"
ALLOWED, FIRST_STEP = 0.03, 50
SCORED_ROWS = 64


class Exporter:
    """Rounds the weights of a checkpoint to any number of bytes, as golf_export.py does."""

    def __init__(self, checkpoint: Path, config: RunConfig, tokens: TokenCache) -> None:
        model, _ = load_exported(str(checkpoint))
        assert isinstance(model, GolfForCausalLM)
        self.model, self.golf, self.length = model.float().eval(), config.golf, config.batch.sequence_length
        self.weights, self.encode = matrices(model), model_encoder(model)
        self.overhead_bytes = bytes_besides(model.config, tokens.tokenizer, config, self.golf.count)
        batches = calibration_batches(
            tokens.train,
            seed=config.order_seed,
            sequence_length=self.length,
            blocks_read=json.loads((checkpoint / STATE_NAME).read_text())["blocks"],
            num_tokens=self.golf.calibration_tokens,
        )
        self.curvature = measure_curvature(model, batches, token_counts(tokens.train, model.config.vocab_size))
        self.ids = torch.from_numpy(tokens.val.tokens[: SCORED_ROWS * self.length + 1].astype(np.int64))

    def export(self, num_bytes: int) -> tuple[QuantizedModel, float]:
        """Return the export that fits, and what its rounding is predicted to cost, in nats per token."""
        quantized = quantize_model(
            self.weights,
            self.curvature,
            budget_bytes=num_bytes,
            overhead_bytes=self.overhead_bytes,
            size_of=lambda tensors: len(self.encode(tensors).data),
            method=self.golf.method,
            allocation=self.golf.allocation,
        )
        errors = {name: one.dequantized() - self.weights[name] for name, one in quantized.tensors.items()}
        return quantized, sum(self.curvature[name].loss_increase(error) for name, error in errors.items())

    def bytes_at(self, nats: float, guess: int) -> float:
        """Return the bytes at which rounding is predicted to cost `nats`: on a line through two exports."""
        (first, low), (second, high) = (self.export(round(share * guess)) for share in (0.97, 1.03))
        slope = (second.size_bytes - first.size_bytes) / math.log(high / low)
        return first.size_bytes + slope * math.log(nats / low)

    @torch.no_grad()
    def loss(self, tensors: dict[str, Quantized]) -> float:
        """Return the loss with these matrices in place of the model's, in nats per token."""
        weights = {name: torch.from_numpy(one.dequantized()) for name, one in tensors.items()}
        losses = [
            torch.func.functional_call(
                self.model, weights, (), {"input_ids": ids, "shift_labels": labels}, tie_weights=True
            ).loss.item()
            for ids, labels in zip(
                self.ids[:-1].view(-1, 8, self.length), self.ids[1:].view(-1, 8, self.length), strict=True
            )
        ]
        return float(np.mean(losses))


def compared(forecast: dict[str, Any], exporter: Exporter) -> dict[str, float]:
    """Return a forecast beside the figures of exports. forecast: a row of metrics.jsonl."""
    budget = exporter.golf.budget_bytes
    assert budget is not None
    quantized, predicted = exporter.export(budget)
    real_bytes = exporter.bytes_at(TOLERATED_NATS, forecast["golf_bytes"])
    return {
        "step": forecast["step"],
        "golf_bytes": forecast["golf_bytes"],
        "export_bytes": real_bytes,
        "bytes_off": forecast["golf_bytes"] / real_bytes - 1,
        "golf_loss": forecast["golf_loss"],
        "export_predicted_loss": predicted,
        "export_measured_loss": exporter.loss(quantized.tensors) - exporter.loss({}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--name", default="small", help="of the run in the JSON file")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    quiet_libraries()
    run = RunFolder(arguments.run)
    config = load_config([f"--config={run.config}"]).config
    tokens = load_tokens(config.data, config.tokenizer, load_corpus(config.data))
    rows = []
    for forecast in read_rows(run.metrics):
        checkpoint = run.checkpoints / f"step-{forecast['step']:06d}"
        if "golf_bytes" in forecast and checkpoint.is_dir():
            rows.append(compared(forecast, Exporter(checkpoint, config, tokens)))
            print("  ".join(f"{name} {value:,.5g}" for name, value in rows[-1].items()), flush=True)
    kept = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    write_text(arguments.output, json.dumps(kept | {arguments.name: rows}, indent=1) + "\n")
    return int(any(abs(row["bytes_off"]) > ALLOWED for row in rows if row["step"] >= FIRST_STEP))


if __name__ == "__main__":
    sys.exit(main())
