"""What the weights of configs/golf_baseline.yaml take before any training, in the challenge's format and in ours.

    python benchmarks/experiments/golf_baseline_bytes.py

The challenge's baseline packs int8 rows with zlib 9. Its scales have a floor of 1/127, so small weights leave most of
the 255 levels unused, and the size follows their RMS. hfgolf's steps have no floor, so the size follows the bits.
Prints each figure beside the expected one, writes results/golf_baseline_bytes.json, and exits with 1 if one is off.
It takes a minute.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from hfgolf.config.parse import load_config
from hfgolf.golf.artifact import model_encoder
from hfgolf.golf.grid import gaussian_bits, round_nearest
from hfgolf.golf.quantize import allocate, matrices, quantize_model
from hfgolf.golf.script import packed_script
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.system.durable import write_text
from hfgolf.train.build import golf_config
from hfgolf.train.console import quiet_libraries

RESULT = Path(__file__).parent / "results" / "golf_baseline_bytes.json"
CONFIG = Path(__file__).parents[2] / "configs" / "golf_baseline.yaml"
BUDGET = 16_000_000
PERCENTILE = 0.9999984  # of a row's absolute values; larger weights are clipped
EXPECTED = {  # figure: (expected value, relative tolerance: as stated, or half of the last digit)
    "weights in matrices": (17_039_360, 0.0),
    "rows of matrices": (28_672, 0.0),
    "int8 and zlib 9, fresh weights": (4.9e6, 0.05 / 4.9),
    "int8 and zlib 9, Gaussian of 0.03": (9.7e6, 0.05 / 9.7),
    "int8 and zlib 9, Gaussian of 0.25": (15.2e6, 0.05 / 15.2),
    "ours, D 0.4145": (7.16e6, 0.01),
    "ours, D 0.05": (13.6e6, 0.05 / 13.6),
    "ours, 16,000,000 bytes: share of the budget": (0.9975, 0.0025),
    "ours, 16,000,000 bytes: bits per weight": (7.44, 0.01),
    "ours, 16,000,000 bytes: D": (0.024, 0.05),  # 1 % of the bits is 5 % of the step
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    quiet_libraries()
    figures, is_off = {}, False
    for name, figure in measure():
        expected, tolerance = EXPECTED[name]
        figures[name] = figure
        is_off |= (off := abs(figure / expected - 1) > tolerance)
        print(f"{name:<44} {figure:>14,.8g}   expected {expected:,.8g}{'  OFF' if off else ''}", flush=True)
    write_text(arguments.output, json.dumps(figures, indent=1) + "\n")
    return int(is_off)


def measure() -> Iterator[tuple[str, float]]:
    """Yield each figure of EXPECTED, in order."""
    config = load_config([f"--config={CONFIG}"]).config
    torch.manual_seed(0)
    model = GolfForCausalLM(golf_config(config, config.tokenizer.max_vocab_size))
    shapes = [weight.shape for weight in matrices(model).values()]
    yield "weights in matrices", sum(rows * columns for rows, columns in shapes)
    yield "rows of matrices", sum(rows for rows, _ in shapes)
    yield "int8 and zlib 9, fresh weights", challenge_bytes(model)
    for std in (0.03, 0.25):
        for name in matrices(model):
            nn.init.normal_(model.get_parameter(name), std=std)
        yield f"int8 and zlib 9, Gaussian of {std}", challenge_bytes(model)
    weights, encode, script_bytes = matrices(model), model_encoder(model), len(packed_script(model.config))
    plan = allocate(weights, "sdclip", {}, None)
    for scale in (0.4145, 0.05):
        tensors = {name: round_nearest(weight, plan[name].row_codes(scale)) for name, weight in weights.items()}
        yield f"ours, D {scale}", len(encode(tensors).data)
    quantized = quantize_model(
        matrices(model),
        {},
        budget_bytes=BUDGET,
        overhead_bytes=script_bytes,
        size_of=lambda tensors: len(encode(tensors).data),
        method="nearest",
        allocation="sdclip",
    )
    yield "ours, 16,000,000 bytes: share of the budget", quantized.size_bytes / BUDGET
    yield "ours, 16,000,000 bytes: bits per weight", float(gaussian_bits(quantized.scale))
    yield "ours, 16,000,000 bytes: D", quantized.scale


def challenge_bytes(model: GolfForCausalLM) -> int:
    """Return the bytes of a model as the challenge's baseline writes it: int8 rows, torch.save, zlib 9."""
    saved = {name: int8_rows(weight) if weight.numel() > 65536 else weight for name, weight in model.named_parameters()}
    file = io.BytesIO()
    torch.save(saved, file)
    return len(zlib.compress(file.getvalue(), 9))


@torch.no_grad()
def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as int8 (rows, columns) and the scale of each row in fp16, which is at least 1/127."""
    limit = weight.abs().quantile(PERCENTILE, dim=1, keepdim=True)
    scale = (limit / 127).clamp(min=1 / 127)
    return (weight.clamp(-limit, limit) / scale).round().to(torch.int8), scale[:, 0].half()


if __name__ == "__main__":
    sys.exit(main())
