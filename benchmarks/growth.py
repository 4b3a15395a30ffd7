"""How time and memory grow: with parameters, context, vocabulary, tokens per step, processes and the corpus.

    python benchmarks/growth.py --output benchmarks/results/growth_cpu.json --picture docs/growth.png

Each axis changes one number of one small model and keeps the rest; with the context, the tokens per step stay. hfgolf
and transformers' Trainer train the same GPT-2 from the same weights on the same tokens, in bf16 with fused AdamW and
without compiling, and take turns (see train_throughput.py). FLOPs are those that MFU counts, without the optimizer's.
Processes have one thread each and share a step's tokens; their memory is the sum. The corpus is prepared as in
large_corpus.py: "own" memory is what the process allocated.

Cost leaves the line where its GFLOP/s fall below half of the axis's best, and a corpus where its MB/s do. CPU only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import large_corpus
from machine import build_parser, write
from train_throughput import Shape, measure

ARMS = ("trainer_bf16", "hfgolf_bf16")
BASE = Shape(4, 256, 4, 256, 16, "byte", 257)
SIZES = {  # {parameters: (layers, width, heads)}, with 257 bytes and 256 positions
    "1 M": (5, 128, 2),
    "3 M": (4, 256, 4),
    "11 M": (6, 384, 6),
    "25 M": (8, 512, 8),
    "86 M": (12, 768, 12),
    "303 M": (24, 1024, 16),
}
TOKENS = 4096
LABELS = {"corpus": "MB of text"}


@dataclass(frozen=True)
class Point:
    """One place on an axis."""

    value: str
    """As the table says it."""
    number: float
    """As the picture places it."""
    shape: Shape


def _points(values: list[int], change: Callable[[int], Shape]) -> list[Point]:
    return [Point(f"{value:,}", value, change(value)) for value in values]


AXES: dict[str, list[Point]] = {
    "parameters": [
        Point(name, float(name.split()[0]) * 1e6, Shape(*size, 256, 8, "byte", 257)) for name, size in SIZES.items()
    ],
    "context": _points(
        [128, 256, 512, 1024, 2048, 4096, 8192], lambda n: replace(BASE, context=n, sequences=2 * TOKENS // n)
    ),
    "vocabulary": [
        Point("257", 257, BASE),
        *_points([1024, 4096, 16384, 50257], lambda n: replace(BASE, tokenizer="bpe", vocabulary=n)),
    ],
    "tokens per step": _points([512, 2048, 8192, 32768], lambda n: replace(BASE, sequences=n // BASE.context)),
}


def measure_axis(points: list[Point], threads: int, repetitions: int) -> list[dict[str, Any]]:
    rows = []
    for point in points:
        arms = measure(point.shape, "cpu", list(ARMS), threads, 1, 1, repetitions)
        row: dict[str, Any] = {"value": point.value, "number": point.number, "arms": {}}
        tokens = point.shape.sequences * point.shape.context
        for name, figures in arms.items():
            if "error" in figures:
                row["arms"][name] = {"error": figures["error"]}
                continue
            seconds = figures["step_seconds"]
            row["arms"][name] = {"seconds": seconds, "bytes": figures["peak_bytes"]}
            row["parameters"] = figures["parameters"]
        row["flops"] = tokens * flops_per_token(point.shape)
        rows.append(row)
        print(line(row), flush=True)
    return rows


def flops_per_token(shape: Shape) -> float:
    """Return the FLOPs of a token's forward and backward pass, as MFU counts them (hfgolf.measure.flops)."""
    import torch

    from hfgolf.measure.flops import training_flops_per_token
    from hfgolf.model.configuration_golf import GolfConfig
    from hfgolf.model.modeling_golf import GolfForCausalLM

    sizes = {"num_hidden_layers": shape.layers, "hidden_size": shape.width, "num_attention_heads": shape.heads}
    with torch.device("meta"):
        model = GolfForCausalLM(GolfConfig(vocab_size=shape.vocabulary, activation="gelu_new", **sizes))
    return training_flops_per_token(model, shape.context)


def line(row: dict[str, Any]) -> str:
    text = f"{row['value']:>15}"
    for name in ARMS:
        arm = row["arms"][name]
        if "error" in arm:
            text += f"{'failed':>14}{'':>9}{'':>10}"
            continue
        text += f"{1e3 * arm['seconds']:>11,.0f} ms{row['flops'] / arm['seconds'] / 1e9:>9,.0f}"
        text += f"{arm['bytes'] / 1e6:>7,.0f} MB"
    theirs, ours = (row["arms"][name] for name in ARMS)
    if "error" not in theirs and "error" not in ours:
        text += f"{theirs['seconds'] / ours['seconds']:>8.2f}{ours['bytes'] / theirs['bytes']:>8.2f}"
    return text


def heading(axis: str) -> str:
    columns = f"{'Trainer':>14}{'GFLOP/s':>9}{'memory':>10}{'hfgolf':>14}{'GFLOP/s':>9}{'memory':>10}"
    return f"{axis:>15}{columns}{'faster':>8}{'memory':>8}"


def measure_processes(numbers: list[int], steps: int) -> list[dict[str, Any]]:
    """Train with each number of processes, one thread each. Returns seconds per step and the sum of the peaks."""
    rows = []
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            train = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
            train += ["scripts/train.py", "--tokenizer.kind=byte", f"--run.output_dir={folder}", "--run.name=growth"]
            train += [f"--model.num_hidden_layers={BASE.layers}", f"--model.hidden_size={BASE.width}"]
            train += [f"--model.num_attention_heads={BASE.heads}", f"--batch.sequence_length={BASE.context}"]
            train += [f"--batch.tokens_per_step={TOKENS}", f"--batch.micro_batch_size={TOKENS // BASE.context // 4}"]
            train += ["--optim.name=adamw", "--optim.learning_rate=3e-4", "--train.mixed_precision=bf16"]
            train += [f"--train.max_steps={steps}", "--train.compile=false", "--train.cpu_threads=1"]
            train += ["--train.log_every_steps=1", "--train.sample_tokens=null"]
            train += ["--train.save_every_steps=null", "--train.eval_tokens=4096"]
            done = subprocess.run(train, capture_output=True, text=True, cwd=Path(__file__).parents[1])
            if done.returncode:
                raise SystemExit(f"error: {number} processes failed:\n{done.stderr[-2000:]}")
            rows_of_run = (Path(folder) / "growth" / "metrics.jsonl").read_text().splitlines()
            speeds = [json.loads(each)["tokens_per_second"] for each in rows_of_run[2:]]
            seconds = TOKENS / median(speeds)
        rows.append({"value": str(number), "number": number, "seconds": seconds})
        print(f"{number:>15}{1e3 * seconds:>11,.0f} ms{rows[0]['seconds'] / seconds:>9.2f}", flush=True)
    return rows


def measure_corpora(gigabytes: list[float]) -> list[dict[str, Any]]:
    """Prepare texts of these sizes. Returns seconds, the preparing process's own peak, and seconds to start again."""
    rows = []
    for size in gigabytes:
        with tempfile.TemporaryDirectory() as folder:
            figures = large_corpus.measure(size, 4096, Path(folder))
        megabytes, seconds = figures["text_bytes"] / 1e6, figures["build_seconds"]
        own, again = figures["peak_own_bytes"], figures["cached_seconds"]
        row = {"value": f"{1e3 * size:,.0f}", "number": megabytes, "seconds": seconds}
        row |= {"bytes": own, "cached_seconds": again}
        rows.append(row)
        text = f"{row['value']:>15}{seconds:>11,.1f} s {megabytes / seconds:>9.1f}{own / 1e6:>9,.0f} MB{again:>9.2f} s"
        print(text, flush=True)
    return rows


def where_it_leaves_the_line(rows: list[dict[str, Any]], rate: Callable[[dict[str, Any]], float | None]) -> str:
    """Say where the rate is below half of the axis's best."""
    rates = {row["value"]: rate(row) for row in rows}
    known = {value: found for value, found in rates.items() if found is not None}
    if not known:
        return "never ran"
    below = [value for value, found in known.items() if found < max(known.values()) / 2]
    return f"below half of its best at {', '.join(below)}" if below else "on the line throughout"


def rate_of(arm: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda row: row["flops"] / row["arms"][arm]["seconds"] if "seconds" in row["arms"][arm] else None


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw seconds and memory of each axis, with a dotted line for a cost that grows as its FLOPs, or as the text.

    Processes are not drawn: a machine has too few cores for a curve.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, NullFormatter

    from hfgolf.palette import BLUE, GREY, VERMILION, style

    drawn = {name: rows for name, rows in results.items() if name != "processes"}
    with style():
        figure, axes = plt.subplots(2, len(drawn), figsize=(2.5 * len(drawn), 4.4), squeeze=False)
        for column, (name, rows) in enumerate(drawn.items()):
            above, below = axes[:, column]
            costs = [row.get("flops", row["number"]) for row in rows]
            for arm, color in zip(ARMS, (VERMILION, BLUE), strict=True):
                points = [(row["number"], figures) for row in rows if "seconds" in (figures := figures_of(row, arm))]
                numbers = [number for number, _ in points]
                label = arm.split("_")[0].replace("trainer", "Trainer")
                above.plot(numbers, [figures["seconds"] for _, figures in points], "o-", color=color, label=label)
                below.plot(numbers, [figures["bytes"] / 1e9 for _, figures in points], "o-", color=color)
            last = figures_of(rows[-1], ARMS[-1]).get("seconds", 0.0)
            as_flops = [last * cost / costs[-1] for cost in costs]
            above.plot([row["number"] for row in rows], as_flops, ":", color=GREY, label="as FLOPs or text")
            above.set(title="seconds", xscale="log", yscale="log")
            below.set(title="memory, GB", xscale="log", yscale="log", ylim=(0.25, 12), xlabel=LABELS.get(name, name))
            for each in (above, below):
                each.xaxis.set_major_formatter(EngFormatter(sep=""))
                each.yaxis.set_major_formatter("{x:g}")
                each.xaxis.set_minor_formatter(NullFormatter())
                each.yaxis.set_minor_formatter(NullFormatter())
            low, high = above.get_ylim()
            above.set_ylim(low / 2, 2 * high)  # at least one power of ten, and so one label
        axes[0][0].legend(fontsize="small")
        figure.tight_layout()
        figure.savefig(path, dpi=110)


def figures_of(row: dict[str, Any], arm: str) -> dict[str, Any]:
    """Return the figures of an arm at one point. Without arms, they are hfgolf's."""
    if "arms" in row:
        return row["arms"][arm]
    return row if arm == ARMS[-1] else {}


def main() -> None:
    parser = build_parser(__doc__, repetitions=3)
    parser.add_argument("--axes", nargs="+", choices=(*AXES, "processes", "corpus"), help="only these")
    parser.add_argument("--points", type=int, help="only the first points of each axis")
    parser.add_argument(
        "--gigabytes", nargs="+", type=float, default=[0.01, 0.1, 1.0, 10.0], help="sizes of the corpus (0.01 to 10)"
    )
    parser.add_argument("--picture", type=Path, help="PNG of the growth")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    names = arguments.axes or [*AXES, "processes", "corpus"]
    for name in names:
        print()
        if name == "processes":
            print(f"{name:>15}{'step':>14}{'faster':>9}")
            numbers = list(range(1, arguments.threads + 1))[: arguments.points]
            results[name] = measure_processes(numbers, 3 + arguments.repetitions)
        elif name == "corpus":
            print(f"{'MB of text':>15}{'prepared in':>13}{'MB/s':>9}{'own memory':>12}{'again':>11}")
            results[name] = measure_corpora(arguments.gigabytes[: arguments.points])
            print("MB/s: " + where_it_leaves_the_line(results[name], lambda row: row["number"] / row["seconds"]))
        else:
            print(heading(name))
            results[name] = measure_axis(AXES[name][: arguments.points], arguments.threads, arguments.repetitions)
            for arm in ARMS:
                print(f"GFLOP/s of {arm}: {where_it_leaves_the_line(results[name], rate_of(arm))}")
    if arguments.picture:
        draw(results, arguments.picture)
    write(arguments.output, ["torch", "transformers"], threads=arguments.threads, results=results)


if __name__ == "__main__":
    main()
