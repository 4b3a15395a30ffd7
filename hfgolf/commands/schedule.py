"""Draw the schedule of a config before running it: hfgolf schedule --config configs/small.yaml

Prints learning rates, momentum and weight decay at the steps where a phase begins or ends, and draws them over the
steps, or over the minutes if train.max_minutes ends the run. The numbers come from a real optimizer with the schedule
applied.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hfgolf import palette
from hfgolf.commands.options import ScriptParser, bounded, check_picture
from hfgolf.config.parse import load_config
from hfgolf.config.sections import RunConfig
from hfgolf.system.errors import UserError, writing

STAND_INS = {  # one parameter of each kind; its name decides its rule and peak learning rate
    "matrix": "model.layers.0.mlp.up_proj.weight",
    "embedding": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "vector": "model.norm.weight",
}
STYLES = ("-", "--", "-.", ":")
POINTS = 1000


@dataclass(frozen=True)
class TimeAxis:
    """The x axis of the picture: steps, or minutes if they end the run."""

    steps: int
    """Optimizer steps; if only the minutes are known, so many that a warmup (counted in steps) takes no time."""
    minutes: float | None
    """Minutes, if they end the run; None if steps do."""
    note: str = ""
    """What is unknown about the length of the run."""

    @property
    def unit(self) -> str:
        return "step" if self.minutes is None else "minute"

    def position(self, step: int) -> float:
        """Return the x position of the update that follows `step` updates: its number, or its minute."""
        return step + 1 if self.minutes is None else self.minutes * step / self.steps


def main() -> None:
    parser = ScriptParser(__doc__, "Also takes the options of hfgolf train: --config FILE --section.key value.")
    parser.add_argument("--output", type=Path, default=Path("schedule.png"), help="picture to write (schedule.png)")
    parser.add_argument(
        "--seconds_per_step", **bounded(1e-6, 1e6, "locates warmups and the end if train.max_minutes limits the run")
    )
    arguments, run_options = parser.parse_known_args()
    resolved = load_config(run_options)
    check_picture("--output", arguments.output)

    from hfgolf.train.init_from import take_architecture

    config = take_architecture(resolved).config
    axis = time_axis(config, arguments.seconds_per_step)
    corners = corner_steps(config, axis.steps)
    grid = (round(i * (axis.steps - 1) / POINTS) for i in range(POINTS + 1))
    steps = sorted({*grid, *corners.values()})
    rates, others = values(config, steps, axis.steps)
    print(_table(axis, corners, steps, rates | others))
    if axis.note:
        seconds = f"{config.batch.tokens_per_step} divided by the tokens/s of a log line"
        print(f"note: {axis.note}; set --seconds_per_step ({seconds})")
    with writing("--output", arguments.output):
        _draw(config, axis, corners, steps, rates, others, arguments.output)
    print(f"wrote {arguments.output}")


def time_axis(config: RunConfig, seconds_per_step: float | None) -> TimeAxis:
    """Return the axis over the whole run. Reads the text like the run, but only if train.max_epochs is set."""
    from hfgolf.train.clock import step_limit

    minutes = config.train.max_minutes
    if seconds_per_step is not None and minutes is None:
        raise UserError("--seconds_per_step: has no effect because train.max_minutes is null; remove it.")
    by_steps = step_limit(config.train, config.batch, _blocks(config) if config.train.max_epochs else 0)
    by_clock = math.ceil(60 * minutes / seconds_per_step) if minutes and seconds_per_step else math.inf
    if by_clock < by_steps:
        return TimeAxis(int(by_clock), minutes)
    if by_steps == math.inf:
        return TimeAxis(10**9, minutes, "warmups are counted in steps, and are drawn as if they took no time")
    is_unsure = minutes is not None and seconds_per_step is None
    return TimeAxis(int(by_steps), None, "train.max_minutes may end the run earlier" if is_unsure else "")


def _blocks(config: RunConfig) -> int:
    from hfgolf.data.batches import num_blocks
    from hfgolf.data.token_cache import load_tokens

    return num_blocks(len(load_tokens(config.data, config.tokenizer).train), config.batch.sequence_length)


def corner_steps(config: RunConfig, total_steps: int) -> dict[str, int]:
    """Return {name: updates before it}, in order, of the updates where a phase begins or ends."""
    optim, schedule, last = config.optim, config.schedule, total_steps - 1
    corners = {"first step": 0}
    if schedule.warmup_steps > 1:
        corners["end of warmup"] = schedule.warmup_steps - 1
    if optim.name == "muon" and optim.momentum_start < optim.momentum:
        corners["end of momentum warmup"] = optim.momentum_warmup_steps
    if schedule.name in ("wsd", "cosine_warmdown"):
        begins = (1 - schedule.warmdown_fraction) * total_steps
        corners["start of warmdown"] = math.floor(begins + 1e-9 * total_steps)  # the last step before; 1e-9: rounding
    ordered = sorted(corners.items(), key=lambda corner: corner[1])
    return {name: step for name, step in ordered if step < last} | {"last step": last}


def values(
    config: RunConfig, steps: Sequence[int], total_steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the learning rates by kind of parameter, and the other values, of the update that follows each step.

    Kinds with equal learning rates share an entry.
    """
    import torch

    from hfgolf.optim.groups import build_optimizer
    from hfgolf.optim.schedule import apply_schedule

    kinds = [kind for kind in STAND_INS if kind != "head" or not config.model.tie_word_embeddings]
    stand_ins = [(STAND_INS[kind], torch.nn.Parameter(torch.zeros(1, 1))) for kind in kinds]
    optimizer = build_optimizer(stand_ins, config.optim, {})
    by_kind: dict[str, list[float]] = defaultdict(list)
    others: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        apply_schedule(optimizer, step, total_steps, config.optim, config.schedule)
        for group in optimizer.param_groups:
            by_kind[group["kind"]].append(group["lr"])
        matrix = optimizer.param_groups[0]
        if config.optim.name != "adamw":
            others["momentum"].append(matrix["momentum"])
        others["weight decay"].append(matrix["weight_decay"])
    alike: dict[tuple[float, ...], list[str]] = defaultdict(list)
    for kind, line in by_kind.items():
        alike[tuple(line)].append(kind)
    return {", ".join(names): list(line) for line, names in alike.items()}, others


def _table(axis: TimeAxis, corners: dict[str, int], steps: Sequence[int], columns: dict[str, list[float]]) -> str:
    """Return one row per corner: its position, the fraction of the run before it, and the value of each column."""
    rows = [("", axis.unit, "run done", *columns)]
    for name, step in corners.items():
        at = f"{axis.position(step):,.0f}" if axis.minutes is None else f"{axis.position(step):.2f}"
        # rounded: if only minutes are known, the last of 10**9 steps is slightly above the floor
        numbers = (f"{round(column[steps.index(step)], 8):.4g}" for column in columns.values())
        rows.append((name, at, f"{step / axis.steps:.1%}", *numbers))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


@palette.style()
def _draw(
    config: RunConfig,
    axis: TimeAxis,
    corners: dict[str, int],
    steps: Sequence[int],
    rates: dict[str, list[float]],
    others: dict[str, list[float]],
    path: Path,
) -> None:
    """Write the picture: learning rates on top, momentum and weight decay below, a thin line at each corner."""
    from matplotlib.figure import Figure

    positions = [axis.position(step) for step in steps]
    figure = Figure(figsize=(8, 4 + 1.5 * len(others)), dpi=120, layout="constrained")
    heights = [3, *(1.5 for _ in others)]
    top, *below = figure.subplots(1 + len(others), sharex=True, height_ratios=heights)
    for (kinds, line), color, style in zip(rates.items(), palette.LINES, STYLES, strict=False):
        top.plot(positions, line, style, color=color, linewidth=2, label=f"{kinds}: peak {max(line):g}")
    peaks = [max(line) for line in rates.values()]
    if max(peaks) > 10 * min(peaks):  # on a linear scale, the small one would be flat at the bottom
        top.set(yscale="log", ylim=(min(peaks) / 100, 1.5 * max(peaks)))
    else:
        top.set_ylim(0, 1.05 * max(peaks))
    top.set(title=f"{config.run.name}: {config.schedule.name}", ylabel="learning rate")
    top.legend()
    for axes, (name, line) in zip(below, others.items(), strict=True):
        axes.plot(positions, line, color=palette.INK)
        axes.set_ylabel(name)
        axes.set_ylim(**({"top": 1} if name == "momentum" else {"bottom": 0}))
    for axes in (top, *below):
        for step in corners.values():
            axes.axvline(axis.position(step), color=palette.GREY, linewidth=0.5, linestyle=":")
    below[-1].set_xlabel(f"{axis.unit}\n{axis.note}" if axis.note else axis.unit)
    palette.save(figure, path)
