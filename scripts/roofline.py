"""Measure the roofline of this machine: python scripts/roofline.py --config configs/small.yaml

Measures how fast the device computes (large matrix products in bf16 and fp32) and moves data (arrays larger than the
caches), each main operation of a training step alone, and the whole step. Writes roofline.png and roofline.json and
prints a table. Run it on an idle machine: other load lowers the ceilings.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfgolf import palette
from hfgolf.command_line import load_config, run_command
from hfgolf.errors import UserError
from hfgolf.script_options import ScriptParser, check_output

if TYPE_CHECKING:
    from hfgolf.tools.roofline import Roofline

DEFAULT = Path(__file__).parents[1] / "configs" / "small.yaml"
MARKERS = "os^Dvhpd"
STEPS = 3


def main() -> None:
    parser = ScriptParser(
        __doc__,
        "Also takes train.py's options: --config FILE (configs/small.yaml) --section.key value.\n"
        "The step is not compiled unless you set train.compile.",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/roofline"), help="folder to write to (runs/roofline)")
    arguments, run_options = parser.parse_known_args()
    if not any(option.split("=")[0] == "--config" for option in run_options):
        run_options = ["--config", str(DEFAULT), *run_options]
    resolved = load_config(run_options)
    if "train.compile" not in resolved.sources:
        resolved = resolved.resolve("roofline", train__compile=False)

    import torch

    from hfgolf.durable import write_text
    from hfgolf.hardware import accelerator_name, fingerprint
    from hfgolf.measure.flops import training_flops_per_token
    from hfgolf.run.provenance import run_metadata
    from hfgolf.tools.profile_step import timed_steps
    from hfgolf.tools.roofline import measure_roofline, place, step_operations
    from hfgolf.tools.scratch import scratch_run
    from hfgolf.train.console import show_log

    show_log(True)
    folder = arguments.output
    check_output("--output", folder, besides=[folder / "roofline.json", folder / "roofline.png"])
    with scratch_run(resolved, "roofline") as run:
        if run.accelerator.num_processes > 1:
            raise UserError("roofline.py measures one device; start it with python, not accelerate launch.")
        device, config = run.accelerator.device, run.config
        precision = "fp32" if config.train.mixed_precision == "no" else str(config.train.mixed_precision)
        step_seconds = min(timed_steps(run, STEPS))
        flops = training_flops_per_token(run.raw_model, config.batch.sequence_length) * config.batch.tokens_per_step
        shape = (run.golf_model.config, run.micro_batch_size, config.batch.sequence_length)
    roofline = measure_roofline(device)
    rows = [place(operation, roofline) for operation in step_operations(*shape, precision, device)]
    step = {"precision": precision, "flops": flops, "seconds": step_seconds, "flops_per_second": flops / step_seconds}
    record = {
        "peak_flops": roofline.peak_flops,
        "bytes_per_second": roofline.bytes_per_second,
        "operations": rows,
        "step": step,
        "threads": torch.get_num_threads(),
        "metadata": run_metadata(run.resolved, fingerprint()),
    }
    write_text(folder / "roofline.json", json.dumps(record, indent=1))
    draw(roofline, rows, step, f"{config.run.name} on {accelerator_name()}", folder / "roofline.png")
    print(f"\n{table(roofline, rows, step)}\nwrote {folder / 'roofline.png'} and {folder / 'roofline.json'}")


def table(roofline: "Roofline", rows: Sequence[dict[str, Any]], step: dict[str, Any]) -> str:
    """Return the ceilings and one row per operation: what it reaches of what is attainable."""
    peaks = ", ".join(f"{name} {flops / 1e9:,.0f} GFLOP/s" for name, flops in roofline.peak_flops.items())
    lines = [
        f"ceilings: {peaks}; {roofline.bytes_per_second / 1e9:,.1f} GB/s",
        f"{'operation':<24}{'precision':<11}{'FLOP/byte':>10}{'GFLOP/s':>10}{'of':>10}{'reached':>9}  bound by",
    ]
    for row in rows:
        gigaflops, attainable = row["flops_per_second"] / 1e9, row["attainable_flops_per_second"] / 1e9
        lines.append(
            f"{row['operation']:<24}{row['precision']:<11}{row['intensity']:>10,.1f}{gigaflops:>10,.1f}{attainable:>10,.1f}"
            f"{row['reached']:>9.0%}  {row['bound_by']}"
        )
    gigaflops, peak = step["flops_per_second"] / 1e9, roofline.peak_flops[step["precision"]] / 1e9
    lines.append(
        f"{'the step':<24}{step['precision']:<11}{'':>10}{gigaflops:>10,.1f}{peak:>10,.1f}{gigaflops / peak:>9.0%}"
    )
    if any(row["reached"] > 1 for row in rows):
        lines.append(
            "above 100 %: the operands stay in the caches, which they may not in a real step, or the machine multiplies"
            " this shape faster than the square matrices that measured the ceiling"
        )
    return "\n".join(lines)


@palette.style()
def draw(roofline: "Roofline", rows: Sequence[dict[str, Any]], step: dict[str, Any], title: str, path: Path) -> None:
    """Write the picture: logarithmic axes, one roof per precision, one point per operation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    ridges = [peak / roofline.bytes_per_second for peak in roofline.peak_flops.values()]
    left = min([row["intensity"] for row in rows]) / 3
    right = max([*ridges, *(row["intensity"] for row in rows)]) * 3
    for (name, peak), ridge, style in zip(roofline.peak_flops.items(), ridges, ("-", "--", ":"), strict=False):
        floor = left * roofline.bytes_per_second
        label = f"{name}: {peak / 1e9:,.0f} GFLOP/s"
        axes.plot([left, ridge, right], [floor, peak, peak], style, color=palette.INK, linewidth=1.5, label=label)
    axes.plot([], [], " ", label=f"memory: {roofline.bytes_per_second / 1e9:,.1f} GB/s")
    share = step["flops_per_second"] / roofline.peak_flops[step["precision"]]
    axes.axhline(
        step["flops_per_second"],
        color=palette.GREY,
        linestyle="-.",
        label=f"the whole step: {step['flops_per_second'] / 1e9:,.0f} GFLOP/s, {share:.0%} of {step['precision']}",
    )
    for row, color, marker in zip(rows, palette.LINES, MARKERS, strict=True):
        label = f"{row['operation']} ({row['precision']}): {row['reached']:.0%} of its roof"
        point = row["intensity"], row["flops_per_second"]
        # hollow markers, because the products often overlap
        axes.plot(*point, marker, color=color, markersize=10, markerfacecolor="none", markeredgewidth=2, label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="FLOP/s", title=title)
    figure.legend(loc="outside right upper", fontsize="small")
    palette.save(figure, path)


if __name__ == "__main__":
    run_command(main)
