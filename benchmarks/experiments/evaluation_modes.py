"""What windows, strides and test-time training are worth: one model, one text, each way to evaluate it.

    python benchmarks/experiments/evaluation_modes.py --name small --model runs/small/model --files "texts/*.txt"

Adds the figures of a name to results/evaluation_modes.json. The kept ones were scored beside other jobs, so their
seconds say little. "laptop": configs/golf_laptop.yaml as it is exported, on its first 11 validation documents.
"shakespeare": configs/shakespeare_char.yaml, on the first 20,000 characters of its validation part, one document.
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
SLIDING: dict[str, Any] = {"evaluation": "sliding", "stride": 64}
WAYS: list[dict[str, Any]] = [
    {},
    *(SLIDING | {"stride": stride} for stride in (128, 64, 32)),
    SLIDING | {"evaluation": "documents"},
    {"adapt_rate": 1e-4},
    *(SLIDING | {"adapt_rate": rate} for rate in (5e-5, 1e-4, 2e-4, 4e-4)),
    *(SLIDING | {"stride": stride, "adapt_rate": 1e-4} for stride in (128, 32)),
    SLIDING | {"evaluation": "documents", "adapt_rate": 1e-4},
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
        options = EvaluationOptions(arguments.model, arguments.files, batch_size=16, mixed_precision="no", **way)
        answer = evaluate_text(options)
        assert answer is not None  # only on other processes
        figures = {name: figure for name, figure in answer.figures.items() if name != "model"}
        rows.append({"options": way, "seconds": time.perf_counter() - started_at, **figures})
        print(f"{figures['bits_per_byte']:.4f}  {way}", flush=True)
    kept = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    kept |= {"hardware": fingerprint(), arguments.name: rows}
    write_text(arguments.output, json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
