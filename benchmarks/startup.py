"""Seconds from the start of a process to its end, or to the first step of a run.

    python benchmarks/startup.py --output benchmarks/results/startup_cpu.json

Each line is a separate process with a warm page cache, and the lines take turns. On a shared machine, the CPU seconds
are the better measure; on a quiet one they differ little from the wall clock if only one core works. The run is that of
configs/small.yaml, uncompiled, and a start that does not count fills the token cache. The time to the first step comes
from metrics.jsonl (seconds_setup) and does not include that step. "imports" is only what a run imports.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from machine import build_parser, write

ROOT = Path(__file__).parents[1]
TRAIN = str(ROOT / "scripts" / "train.py")
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import hfgolf": ["-c", "import hfgolf"],
    "train.py --help": [TRAIN, "--help"],
    "import torch": ["-c", "import torch"],
    # os._exit skips the interpreter's shutdown, which a run does after its steps
    "imports": ["-c", "import os, hfgolf.train.loop; os._exit(0)"],
}
TO_FIRST_STEP, FIRST_STEP = "run: to the first step", "run: the first step"


def main() -> None:
    parser = build_parser(__doc__, repetitions=5)
    parser.add_argument("--config", default=str(ROOT / "configs" / "small.yaml"))
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    cpu_seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = time_run(arguments.config, Path(folder), "first")  # fills the caches
        for repetition in range(arguments.repetitions):
            for name, command in COMMANDS.items():
                took, cpu_took = time_process(command)
                seconds.setdefault(name, []).append(took)
                cpu_seconds.setdefault(name, []).append(cpu_took)
            for name, took in time_run(arguments.config, Path(folder), f"again-{repetition}").items():
                seconds.setdefault(name, []).append(took)
    show(seconds, cpu_seconds, first)
    figures = {"without_cached_tokens": first, "seconds": seconds, "cpu_seconds": cpu_seconds}
    write(arguments.output, ["python", "torch"], **figures)


def time_run(config: str, folder: Path, name: str) -> dict[str, float]:
    """Train for one step in a separate process. Return the seconds before the step, and of the step."""
    options = {
        "config": config,
        "run.name": name,
        "run.output_dir": folder / "runs",
        "data.cache_dir": folder / "cache",
        "train.max_steps": 1,
        "train.compile": "false",
        "train.eval_tokens": 4096,
        "train.sample_tokens": "null",
    }
    time_process([TRAIN, *(f"--{key}={value}" for key, value in options.items())])
    row = json.loads((folder / "runs" / name / "metrics.jsonl").read_text().splitlines()[0])
    return {TO_FIRST_STEP: row["seconds_setup"], FIRST_STEP: row["seconds_data"] + row["seconds_train"]}


def time_process(arguments: list[str]) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds of a Python process."""
    cpu_before, started_at = children_cpu_seconds(), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    took = time.perf_counter() - started_at
    if done.returncode:
        raise SystemExit(f"error: {' '.join(arguments)} failed:\n{done.stderr}")
    return took, children_cpu_seconds() - cpu_before


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def show(seconds: dict[str, list[float]], cpu_seconds: dict[str, list[float]], first: dict[str, float]) -> None:
    print(f"{'':<24}{'median':>10}{'from':>10}{'to':>10}{'CPU':>10}")
    for name, times in seconds.items():
        line = f"{name:<24}" + "".join(f"{t:>8.2f} s" for t in (median(times), min(times), max(times)))
        print(line + (f"{median(cpu_seconds[name]):>8.2f} s" if name in cpu_seconds else ""))
    share = median(a / b for a, b in zip(seconds["imports"], seconds[TO_FIRST_STEP], strict=True))
    print(f"the imports take {share:.0%} of the time to the first step")
    print(f"the first start, without a token cache: {first[TO_FIRST_STEP]:.2f} s to the first step")


if __name__ == "__main__":
    main()
