"""Find learning rates for a config: hfgolf find_lr --config configs/small.yaml

Runs real steps on the real data while the learning rate grows exponentially, until the loss diverges: once for the Muon
groups and once for the AdamW groups. Writes a plot and a JSON file, and prints the learning rates to train with. Leaves
nothing else behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hfgolf import palette
from hfgolf.commands.options import Answer, ScriptParser, bounded, check_picture
from hfgolf.config.parse import load_config
from hfgolf.system.errors import UserError, writing

if TYPE_CHECKING:
    from hfgolf.commands.lr_sweep import Sweep

MIN_STEPS = 20  # of a sweep, to see the loss fall and rise


def main() -> Answer | None:
    parser = ScriptParser(
        __doc__,
        "Also takes the options of hfgolf train: --config FILE --section.key value. track.*, hub.* and the limits of\n"
        "the run have no effect; train.compile is false unless you set it.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("lr.png"), help="picture to write (lr.png); the JSON file is next to it"
    )
    parser.add_argument("--lowest", **bounded(1e-20, 1e20, "first learning rate of a sweep", 1e-4))
    parser.add_argument("--highest", **bounded(1e-20, 1e20, "last learning rate, unless the loss diverges first", 1.0))
    parser.add_argument("--steps", **bounded(MIN_STEPS, 10**6, "optimizer steps per sweep", 80))
    arguments, run_options = parser.parse_known_args()
    rates = sweep_rates(arguments.lowest, arguments.highest, arguments.steps)
    resolved = load_config(run_options, needs_limit=False, may_choose=False)
    check_picture("--output", arguments.output, [arguments.output.with_suffix(".json")])

    from hfgolf.commands.lr_sweep import RULE, find_lr, suggested_values
    from hfgolf.run.provenance import run_metadata
    from hfgolf.system.durable import write_text
    from hfgolf.train.console import show_log

    is_main_process = os.environ.get("RANK", "0") == "0"
    show_log(is_main_process)
    sweeps = find_lr(resolved, rates)
    values = suggested_values(sweeps, resolved.config.optim)
    if not is_main_process:
        return None
    results = {
        "suggestion": values,
        "rule": RULE,
        "sweeps": [dataclasses.asdict(sweep) | {"gains": sweep.gains} for sweep in sweeps],
        "metadata": run_metadata(resolved),
    }
    numbers = arguments.output.with_suffix(".json")
    with writing("--output", arguments.output):
        _draw(sweeps, values, f"{resolved.config.run.name}, {resolved.config.optim.name}", arguments.output)
        write_text(numbers, json.dumps(results, indent=1))
    lines = [f"wrote {arguments.output} and {numbers}\n\nsuggestion: {RULE}"]
    lines += [f"{key} {value:g} (the config has {resolved.config.flat()[key]:g})" for key, value in values.items()]
    return Answer(results, "\n".join([*lines, " ".join(f"--{key} {value:g}" for key, value in values.items())]))


def sweep_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Return `steps` learning rates from lowest to highest, spaced by a constant factor.

    Raises UserError unless lowest < highest.
    """
    if lowest >= highest:
        raise UserError(f"--lowest {lowest:g}, --highest {highest:g}: allowed: 0 < lowest < highest.")
    return [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]


@palette.style()
def _draw(sweeps: list[Sweep], values: dict[str, float], title: str, path: Path) -> None:
    """Write the picture, one panel per sweep: the losses with and without the swept groups, and the suggestion."""
    from matplotlib.figure import Figure

    from hfgolf.commands.lr_sweep import moving_averages

    figure = Figure(figsize=(6 * len(sweeps), 4), dpi=120, layout="constrained")
    figure.suptitle(title)
    for axes, sweep in zip(figure.subplots(1, len(sweeps), squeeze=False)[0], sweeps, strict=True):
        rates, suggestion = sweep.learning_rates, values[f"optim.{sweep.key}"]
        for name, losses, color in (
            ("frozen", sweep.losses_at_rest, palette.ORANGE),
            ("swept", sweep.losses, palette.BLUE),
        ):
            axes.plot(rates, losses, color=color, alpha=0.4, linewidth=1)
            axes.plot(rates, moving_averages(losses), color=color, linewidth=2, label=f"{name}, smoothed")
        axes.axvline(suggestion, color=palette.VERMILION, linestyle="--", label=f"suggestion: {suggestion:g}")
        axes.set(xscale="log", xlabel=f"optim.{sweep.key}", ylabel="loss (nats per token)")
        axes.legend()
    palette.save(figure, path)
