"""What the loop pays for saving in the background, and for checking every gradient before its update.

    python benchmarks/saving.py --output benchmarks/results/saving_cpu.json
    python benchmarks/saving.py --output benchmarks/results/saving_gpu.json    # on a machine with a GPU

Trains the model of configs/small.yaml in a temporary folder, in short steps. The loop waits for a blocking save: files,
hashes, fsync, rename. A background save costs the loop its start (on a GPU, the copy to the host) and the slowdown of
the steps during it: the thread's work, and the first update, which waits until the files are written. Steps that check
the gradient are compared with steps that never wait for the device. Everything is interleaved in one process, and
ratios are medians over pairs.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import build_parser, write

from hfgolf.config.parse import load_config

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = build_parser(__doc__, repetitions=31)
    parser.add_argument("--config", default=str(ROOT / "configs" / "small.yaml"))
    arguments, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "config": arguments.config,
            "run.output_dir": folder,
            "train.max_steps": 10**6,
            "train.compile": "false",
            "batch.tokens_per_step": 512,
            "schedule.name": "constant",
        }
        measured = measure([f"--{key}={value}" for key, value in options.items()] + others, arguments.repetitions)
    show(measured)
    write(arguments.output, ["torch"], **measured)


def measure(command_line: list[str], repetitions: int) -> dict[str, Any]:
    import torch

    from hfgolf.checkpoint.store import newest_first
    from hfgolf.train import loop
    from hfgolf.train.console import quiet_libraries
    from hfgolf.train.setup import set_up

    quiet_libraries()
    run = set_up(load_config(command_line))
    run.model.train()
    on_gpu = run.accelerator.device.type == "cuda"

    def steps(number: int) -> float:
        started_at = time.perf_counter()
        for _ in range(number):
            loop.train_step(run, 10**6)
            run.state.step += 1
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started_at

    def save() -> float:
        started_at = time.perf_counter()
        run.checkpoints.save(is_best=False)
        return time.perf_counter() - started_at

    def blocking_save() -> float:
        started_at = time.perf_counter()
        save()
        run.checkpoints.wait()
        return time.perf_counter() - started_at

    run.checkpoints.wait()  # until the memory for a GPU's copies is reserved
    steps(3)
    blocking_save()
    number = 1 + math.ceil(blocking_save() / (steps(5) / 5))  # steps during which a write finishes
    rows = []
    for _ in range(repetitions):
        run.state.step += 1  # otherwise the folder of the save already exists
        row = {"steps": steps(number), "blocking_save": blocking_save()}
        run.state.step += 1
        row |= {"begin": save(), "steps_during_save": steps(number)}
        run.checkpoints.wait()
        row["steps_again"] = steps(number)
        to_host, loop.to_host = loop.to_host, lambda *scalars: [1.0] * len(scalars)
        row["steps_without_check"] = steps(number)
        loop.to_host = to_host
        rows.append(row)
    failures = run.checkpoints.failures()
    if failures:
        raise SystemExit(f"error: {failures[0]}")
    return {
        "parameters": run.raw_model.num_parameters(),
        "checkpoint_bytes": sum(p.stat().st_size for p in newest_first(run.folder.checkpoints)[0].iterdir()),
        "tokens_per_step": run.config.batch.tokens_per_step,
        "steps": number,
        "seconds": rows,
    }


def show(measured: dict[str, Any]) -> None:
    rows, steps = measured["seconds"], measured["steps"]
    plain = [(row["steps"] + row["steps_again"]) / 2 for row in rows]
    slowdowns = [row["steps_during_save"] - base for row, base in zip(rows, plain, strict=True)]
    print(f"{measured['parameters']:,} parameters, {measured['checkpoint_bytes'] / 1e6:,.1f} MB per checkpoint")
    print(f"{'a step':<34}{median(plain) / steps * 1e3:10.1f} ms   ({steps} of them during a save)")
    print(f"{'blocking save':<34}{median(row['blocking_save'] for row in rows) * 1e3:10.1f} ms")
    for name, costs in (
        ("the loop waits for", [row["begin"] for row in rows]),
        ("steps during the write take longer", slowdowns),
        ("together", [row["begin"] + extra for row, extra in zip(rows, slowdowns, strict=True)]),
    ):
        shares = [cost / row["blocking_save"] for cost, row in zip(costs, rows, strict=True)]
        print(f"{name:<34}{median(costs) * 1e3:10.1f} ms   {median(shares):6.1%} of a blocking save")
    checks = [base / row["steps_without_check"] - 1 for row, base in zip(rows, plain, strict=True)]
    span = f"from {min(checks):.2%} to {max(checks):.2%}"
    print(f"{'checking the gradient':<34}{median(checks):10.2%} of a step ({span})")


if __name__ == "__main__":
    main()
