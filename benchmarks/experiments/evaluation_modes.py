"""What windows, strides and test-time training are worth: one model, one text, each way to evaluate it.

    python benchmarks/experiments/evaluation_modes.py --name small --model runs/small/model --files "texts/*.txt"

Adds the figures of a name to results/evaluation_modes.json. The kept ones are of two models trained with one CPU thread
of a busy machine, and scored on one that ten other jobs shared, so their seconds say little. "small":
configs/small.yaml, scored on its first 11 validation documents. "shakespeare": configs/shakespeare_char.yaml for 22
minutes, on the first 20,000 characters of its validation part, one document. Both have a context of 256 tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from hfgolf.commands.evaluate_text import EvaluationOptions, evaluate_text
from hfgolf.system.durable import write_text
from hfgolf.system.hardware import fingerprint
from hfgolf.train.console import quiet_libraries

RESULT = Path(__file__).parent / "results" / "evaluation_modes.json"
SLIDING: dict[str, Any] = {"evaluation": "sliding", "stride": 128}
SGD: dict[str, Any] = SLIDING | {"adapt": "sgd", "adapt_chunk": 1024}
LORA: dict[str, Any] = {"evaluation": "documents", "adapt": "lora", "adapt_chunk": 48}
WAYS: list[dict[str, Any]] = [
    {},
    SLIDING,
    SLIDING | {"stride": 64},
    SLIDING | {"stride": 32},
    {"evaluation": "documents", "stride": 128},
    *(SGD | {"adapt_rate": rate} for rate in (0.005, 0.02, 0.1)),
    SGD | {"adapt_rate": 0.02, "adapt_epochs": 3},
    SGD | {"adapt_chunk": 8192, "adapt_rate": 0.02, "adapt_epochs": 3},
    *(LORA | {"adapt_rate": rate} for rate in (0.0, 1e-4, 1e-3, 3e-3, 1e-2)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the model in the JSON file")
    parser.add_argument("--model", required=True)
    parser.add_argument("--files", required=True, nargs="+")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    quiet_libraries()
    rows = []
    for way in WAYS:
        started_at = time.perf_counter()
        result = evaluate_text(
            EvaluationOptions(arguments.model, arguments.files, batch_size=16, mixed_precision="bf16", **way)
        )
        figures = result.figures()
        del figures["model"]
        rows.append({"options": way, "seconds": time.perf_counter() - started_at, **figures})
        print(f"{figures['bits_per_byte']:.4f}  {way}", flush=True)
    kept = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    kept |= {"hardware": fingerprint(), arguments.name: rows}
    write_text(arguments.output, json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
