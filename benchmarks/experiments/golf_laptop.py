"""The laptop round: bits per byte of each run in 500,000 bytes, everything counted.

    hfgolf compare benchmarks/experiments/golf_laptop.yaml --jobs 2
    python benchmarks/experiments/golf_laptop.py --runs runs/experiments/golf_laptop/*
    python benchmarks/experiments/golf_laptop.py --runs runs/experiments/golf_laptop_plain/* --plain

Exports each run that has no export of this budget, and tells its score by the run's evaluation and by others. With
--plain, the runs are packed without hfgolf's methods instead: int8 rows and zlib 9, fp16 and xz, bf16 as it is. Their
program, tokenizer and config count as they do for an export.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golf_export import Scorer, Weights, int8_rows

from hfgolf.golf.ledger import rescore
from hfgolf.golf.quantize import matrices
from hfgolf.golf.source import run_source
from hfgolf.system.durable import write_text
from hfgolf.train.console import quiet_libraries

RESULT = Path(__file__).parent / "results" / "golf_laptop.json"
ROOT = Path(__file__).parents[2]
BUDGET_BYTES, STRIDE = 500_000, 64


def exported(run: Path) -> dict[str, Any]:
    """Return what the ledger of a run's export says, and other evaluations. Makes the export if there is none."""
    ledger = run / "golf" / "ledger.json"
    if not ledger.exists() or json.loads(ledger.read_text())["budget_bytes"] != BUDGET_BYTES:
        command = [sys.executable, str(ROOT / "scripts/golf_export.py"), "--run", str(run), "--count", "everything"]
        subprocess.run([*command, "--budget_bytes", str(BUDGET_BYTES)], check=True, stdout=subprocess.DEVNULL)
    told = json.loads(ledger.read_text())
    return {
        "bytes": told["totals"]["everything"],
        "before": told["before"] and told["before"]["bpb"],
        "after": told["after"]["bpb"],
        "seconds": sum(told["seconds"].values()),
        "evaluation": {name: told["settings"][name] for name in ("evaluation", "stride", "adapt_rate")},
        "flat": rescore(ledger.parent)["bpb"],
        "sliding": rescore(ledger.parent, "sliding", STRIDE)["bpb"],
    }


def packed(run: Path) -> list[dict[str, Any]]:
    """Return the bytes and the score of a run's weights as a user would pack them."""
    source = run_source(run)
    scorer = Scorer(source, len(source.tokens.val.tokens) - 1)
    besides = _bytes_besides(run)
    weights = matrices(source.model)
    rest = {name: tensor.numpy() for name, tensor in scorer.state.items() if name not in weights}
    vectors = b"".join(tensor.astype(np.float16).tobytes() for tensor in rest.values())
    num_bytes, rounded = int8_rows(weights, vectors)
    ways: list[tuple[str, int, Weights]] = [("int8 rows and zlib 9", num_bytes, rounded)]
    halves = {name: weight.astype(np.float16) for name, weight in weights.items()}
    content = lzma.compress(vectors + b"".join(half.tobytes() for half in halves.values()), preset=9)
    ways.append(("fp16 and xz", len(content), {name: half.astype(np.float32) for name, half in halves.items()}))
    brain = {name: torch.from_numpy(weight).bfloat16().float().numpy() for name, weight in weights.items()}
    ways.append(("bf16", 2 * sum(weight.size for weight in weights.values()) + len(vectors), brain))
    return [{"way": way, "bytes": size + besides, "after": scorer.bits_per_byte(state)} for way, size, state in ways]


def _bytes_besides(run: Path) -> int:
    """Return the bytes of an export's program, packed tokenizer and config."""
    exported(run)
    files = json.loads((run / "golf" / "ledger.json").read_text())["files"]
    return sum(entry["bytes"] for entry in files if entry["counted_by"] and entry["name"] != "artifact.bin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", required=True, type=Path, nargs="+")
    parser.add_argument("--plain", action="store_true", help="pack the weights without hfgolf's methods")
    parser.add_argument("--output", type=Path, default=RESULT, help="JSON, in which the runs of this call are replaced")
    arguments = parser.parse_args()
    quiet_libraries()
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    for run in sorted(arguments.runs):
        summary = json.loads((run / "summary.json").read_text())
        row = {key: summary[key] for key in ("parameters", "tokens", "tokens_per_second")}
        row |= {"plain": packed(run)} if arguments.plain else exported(run)
        results[run.name] = row
        write_text(arguments.output, json.dumps(results, indent=1) + "\n")
        print(run.name, json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
