"""Time of a step on a CPU, alone and beside other work, by how long OpenMP's threads spin.

    python benchmarks/busy_machine.py --output benchmarks/results/busy_machine_cpu.json

Threads that wait for each other spin, and then sleep. If they spin for long while another program has one of the cores,
each wait lasts until that program's time slice is over, and a step has hundreds of them. GOMP_SPINCOUNT is what GCC's
OpenMP, which torch uses on Linux, waits before it sleeps. Each row is a process of its own, and rows take turns.
Beside it runs nothing, or a loop in Python. A figure is the median over --repetitions of the median of steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from typing import Any

from machine import build_parser, write

SPINS = ("default", "1000", "3000", "10000")
WIDTHS = (128, 256, 512)


def measure(width: int) -> float:
    """Return the seconds of a step of 2,048 tokens of configs/small.yaml in this width."""
    import torch

    from hfgolf.config.parse import load_config
    from hfgolf.train.autopilot import seconds_per_step
    from hfgolf.train.law import layers_of

    shape = {"model.hidden_size": width, "model.num_hidden_layers": layers_of(width)}
    config = load_config(["--config", "small"], values=shape | {"train.mixed_precision": "bf16"}).config
    return seconds_per_step(config, 4096, torch.device("cpu"), 1)


def main() -> None:
    parser = build_parser(__doc__ or "", repetitions=3)
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--spins", nargs="+", choices=SPINS, default=list(SPINS))
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(measure(arguments.measure))
        return
    rows: dict[tuple[int, int, str], list[float]] = {}
    for _, busy, width, spin in itertools.product(
        range(arguments.repetitions), (0, 1), arguments.widths, arguments.spins
    ):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        environment |= {} if spin == "default" else {"GOMP_SPINCOUNT": spin}
        command = [sys.executable, __file__, "--measure", str(width)]
        try:
            printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        finally:
            for other in others:
                other.kill()
                other.wait()
        rows.setdefault((width, busy, spin), []).append(float(printed.split()[-1]))
    found: list[dict[str, Any]] = []
    print("| width | spins | alone | beside a busy program |\n|---:|---:|---:|---:|")
    for width, spin in itertools.product(arguments.widths, arguments.spins):
        alone, beside = (1000 * statistics.median(rows[width, busy, spin]) for busy in (0, 1))
        found.append({"width": width, "spins": spin, "alone_ms": alone, "beside_ms": beside})
        print(f"| {width} | {spin} | {alone:.0f} ms | {beside:.0f} ms |")
    write(arguments.output, ("torch", "python"), rows=found)


if __name__ == "__main__":
    main()
