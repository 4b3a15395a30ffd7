"""What hfgolf.golf.pack does to a model that is not hfgolf's.

    hfgolf train --config small --run.name llama --model.architecture llama --model.hidden_size 128 \
        --model.num_hidden_layers 4 --data.source files --data.files input.txt --tokenizer.vocab_size 1024
    python benchmarks/experiments/golf_pack.py --run runs/llama --budgets 500000 250000

Packs a run's model to each budget, measured on the training tokens that the run would have read next, and evaluates it
on the first --held_out tokens of the validation part. Adds a row for each to golf_pack.jsonl in results/.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from hfgolf.golf import pack
from hfgolf.golf.curvature import calibration_batches
from hfgolf.golf.source import run_source
from hfgolf.train.console import quiet_libraries

RESULTS = Path(__file__).parent / "results" / "golf_pack.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--budgets", required=True, type=int, nargs="+", help="bytes of artifact.bin and unpack.py")
    parser.add_argument("--calibration_tokens", type=int, default=32_768)
    parser.add_argument("--held_out", type=int, default=10_240)
    parser.add_argument("--length", type=int, default=128, help="of the rows, in tokens")
    arguments = parser.parse_args()
    quiet_libraries()
    source, length = run_source(arguments.run), arguments.length
    batches = [
        *calibration_batches(
            source.tokens.train,
            seed=source.seed,
            sequence_length=length,
            blocks_read=source.blocks_read * source.sequence_length // length,
            num_tokens=arguments.calibration_tokens,
        )
    ]
    rows = torch.tensor(source.tokens.val.tokens[: arguments.held_out].astype("int64")).view(-1, length)
    for budget in arguments.budgets:
        with tempfile.TemporaryDirectory() as folder:
            packed = pack(source.model, batches, budget, folder, held_out=rows.split(8))
        row = {
            "run": arguments.run.name,
            "weights": packed.num_weights,
            "budget_bytes": budget,
            "bytes": packed.num_bytes,
            "bits_per_weight": packed.bits_per_weight,
            "loss_before": packed.loss_before,
            "loss_after": packed.loss_after,
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    main()
