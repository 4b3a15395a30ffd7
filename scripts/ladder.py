"""Climb from a naive training loop to hfgolf's: python scripts/ladder.py --config configs/small.yaml

Measures a step of each rung on this machine: tokenize every batch, stored tokens, tokens in RAM, vectorized batches,
torch.compile, mixed precision, SDPA, hfgolf. All rungs use the same model, data, optimizer and learning rates, and
their first losses must agree. Writes ladder.png and ladder.json and prints a table. Holds one copy of the model and
the optimizer state per rung; dropout is 0. benchmarks/ladder.py defines the rungs.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hfgolf import palette
from hfgolf.command_line import load_config, run_command
from hfgolf.errors import UserError
from hfgolf.script_options import ScriptParser, check_output, within

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = ScriptParser(
        __doc__,
        "Also takes train.py's options: --config FILE --section.key value. --train.compile false skips the\n"
        "rung of torch.compile, --train.mixed_precision no the rung of mixed precision.",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/ladder"), help="folder to write to (runs/ladder)")
    parser.add_argument("--repetitions", type=within(1, 10**4), default=9, help="timed steps per rung (9)")
    parser.add_argument("--losses", type=within(1, 10**4), default=4, help="first steps, whose losses are compared (4)")
    arguments, run_options = parser.parse_known_args()
    resolved = load_config(run_options)
    may_compile = resolved.config.train.compile is not False

    sys.path.insert(0, str(ROOT))  # for benchmarks/, which is not part of the package
    import torch

    from benchmarks.ladder import (
        build_rungs,
        busy_seconds,
        check_losses,
        climb,
        measure_bf16,
        others_share,
        why_no_gain,
    )
    from hfgolf.durable import write_text
    from hfgolf.hardware import accelerator_name, fingerprint
    from hfgolf.run.provenance import run_metadata
    from hfgolf.tools.scratch import scratch_run
    from hfgolf.train.console import show_log

    show_log(True)
    folder = arguments.output
    check_output("--output", folder, besides=[folder / "ladder.json", folder / "ladder.png"])
    changes = {"model__dropout": 0.0, "model__attention_dropout": 0.0, "train__compile": False}
    # without segments: the naive rungs read whole sequences
    with scratch_run(resolved, "ladder", **changes, batch__segment_length=None) as run:
        if run.accelerator.num_processes > 1:
            raise UserError("ladder.py measures one process; start it with python, not accelerate launch.")
        if run.config.train.mixed_precision == "fp16":
            raise UserError("train.mixed_precision: fp16 has no rung; allowed: no, bf16.")
        rungs = build_rungs(run, arguments.losses + arguments.repetitions, run.folder.path, may_compile)
        print(f"\nclimbing: {arguments.losses} + {arguments.repetitions} steps per rung")
        before = busy_seconds()
        rows = climb(rungs, arguments.losses, arguments.repetitions)
        facts = measure_bf16(rows, run, others_share(before))
    check_losses(rows)
    record = {
        "rungs": rows,
        "bf16": asdict(facts) if facts else None,
        "threads": torch.get_num_threads(),
        "metadata": run_metadata(run.resolved, fingerprint()),
    }
    write_text(folder / "ladder.json", json.dumps(record, indent=1))
    draw(rows, f"{run.config.run.name} on {accelerator_name()}", folder / "ladder.png")
    print(f"\n{table(rows)}")
    if facts:
        print(why_no_gain(facts))
    print(f"wrote {folder / 'ladder.png'} and {folder / 'ladder.json'}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return one row per rung: its time, its speedup, its last loss, and the difference from the first rung's."""
    lines = [f"{'rung':<17}{'ms/step':>11}{'faster':>8}{'total':>8}{'loss':>9}{'off by':>9}  what is new"]
    for row in rows:
        if "skipped" in row:
            lines.append(f"{row['rung']:<17}skipped: {row['skipped']}")
            continue
        lines.append(
            f"{row['rung']:<17}{row['milliseconds']:>11,.1f}{row['faster']:>7.2f}x{row['faster_than_first']:>7.2f}x"
            f"{row['losses'][-1]:>9.4f}{row['losses_off_by']:>9.0e}  {row['what']}"
        )
    lines.append("all rungs have the same losses, within the tolerance of their precision")
    return "\n".join(lines)


@palette.style()
def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write the picture: one bar per measured rung, with its time and speedup."""
    from matplotlib.figure import Figure

    climbed = [row for row in rows if "skipped" not in row]
    figure = Figure(figsize=(8, 1 + 0.5 * len(climbed)), dpi=120, layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row["rung"] for row in climbed], [row["milliseconds"] for row in climbed], color=palette.BLUE)
    labels = [f" {row['milliseconds']:,.0f} ms, {row['faster_than_first']:.2f}x" for row in climbed]
    axes.bar_label(bars, labels)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set(xlabel="milliseconds per step (median)", title=title)
    axes.grid(visible=False)
    palette.save(figure, path)


if __name__ == "__main__":
    run_command(main)
