"""Speedup on a CPU from keeping freed memory for the next step, and from huge pages for large tensors.

    python benchmarks/kept_memory.py --output benchmarks/results/kept_memory_cpu.json

Trains compiled models of 10.7 M, 5 M and 124 M parameters. Each repetition is a separate process. Three settings take
turns: the defaults of the C library and torch ("returned"), freed memory kept ("kept"), and also 2 MB pages ("large
pages"), which is what train/process.tune_memory() sets. Page faults are per step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

from machine import build_parser, write

SHAPES = {
    "characters": [
        "--tokenizer.kind=byte",
        "--model.hidden_size=384",
        "--model.num_hidden_layers=6",
        "--model.num_attention_heads=6",
        "--batch.micro_batch_size=16",
    ],
    "small": [],
    "gpt2_124m": [
        "--tokenizer.vocab_size=50257",
        "--model.hidden_size=768",
        "--model.num_hidden_layers=12",
        "--model.num_attention_heads=12",
        "--batch.sequence_length=1024",
        "--batch.tokens_per_step=1024",
        "--optim.name=adamw",
        "--optim.learning_rate=3e-4",
    ],
}
KINDS = ("returned", "kept", "large pages")
STEPS = 10


def child(shape: str, kind: str) -> dict[str, float]:
    """Return a step's median seconds and page faults, and the peak memory of the process in bytes."""
    from hfgolf.commands.scratch import scratch_run
    from hfgolf.config.parse import load_config
    from hfgolf.train import setup
    from hfgolf.train.console import quiet_libraries
    from hfgolf.train.loop import train_step

    quiet_libraries()
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1" if kind == "large pages" else "0"
    if kind == "returned":
        setup.tune_memory = lambda config: None
    seconds, faults = [], []
    options = ["--train.max_steps=1000", "--train.compile=true", *SHAPES[shape]]
    with scratch_run(load_config(options), "benchmark") as run:
        for _ in range(4 + STEPS):
            before, started_at = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            train_step(run, math.inf)
            run.state.step += 1
            seconds.append(time.perf_counter() - started_at)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": median(seconds[4:]), "faults": median(faults[4:]), "peak_bytes": peak}


def main() -> None:
    parser = build_parser(__doc__, repetitions=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(*arguments.child)))
        return

    import torch

    results: list[dict[str, Any]] = []
    print(f"{'':<12}{'':<13}{'ms/step':>11}{'from':>8}{'to':>8}{'faster':>8}{'page faults':>13}{'peak':>10}")
    for shape in SHAPES:
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(arguments.repetitions):
            for kind, rows in runs.items():
                command = [sys.executable, __file__, "--child", shape, kind]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
        for kind, rows in runs.items():
            faster = median(a["seconds"] / b["seconds"] for a, b in zip(runs["returned"], rows, strict=True))
            times = [1e3 * row["seconds"] for row in rows]
            faults, peak = (median(row[key] for row in rows) for key in ("faults", "peak_bytes"))
            line = f"{shape:<12}{kind:<13}{median(times):>11,.1f}{min(times):>8,.1f}{max(times):>8,.1f}{faster:>8.2f}"
            print(f"{line}{faults:>13,.0f}{peak / 1e6:>7,.0f} MB")
            results.append({"shape": shape, "freed": kind, "faster": faster, "runs": rows})
    write(arguments.output, ["torch"], threads=torch.get_num_threads(), results=results)


if __name__ == "__main__":
    main()
