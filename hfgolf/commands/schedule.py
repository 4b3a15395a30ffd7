"""Draw the schedule of a config before running it: hfgolf schedule --config configs/small.yaml

Prints learning rates, momentum and weight decay at the steps where a phase begins or ends, and draws them over the
steps. The numbers come from a real optimizer with the schedule applied.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hfgolf import palette
from hfgolf.commands.options import Answer, ScriptParser, check_picture
from hfgolf.config.parse import load_config
from hfgolf.config.sections import RunConfig
from hfgolf.system.errors import writing
from hfgolf.system.wording import aligned

STYLES = ("-", "--", "-.", ":")
POINTS = 1000


def main() -> Answer:
    parser = ScriptParser(__doc__, "Also takes the options of hfgolf train: --config FILE --section.key value.")
    parser.add_argument("--output", type=Path, default=Path("schedule.png"), help="picture to write (schedule.png)")
    arguments, run_options = parser.parse_known_args()
    resolved = load_config(run_options, may_choose=False)
    check_picture("--output", arguments.output)

    from hfgolf.train.init_from import take_architecture

    config = take_architecture(resolved).config
    total_steps, note = count_steps(config)
    corners = corner_steps(config, total_steps)
    grid = (round(i * (total_steps - 1) / POINTS) for i in range(POINTS + 1))
    steps = sorted({*grid, *corners.values()})
    rates, others = values(config, steps, total_steps)
    with writing("--output", arguments.output):
        _draw(config, corners, steps, rates, others, arguments.output)
    lines = [_table(total_steps, corners, steps, rates | others)]
    lines += [f"note: {note}"] if note else []
    figures = {"total_steps": total_steps, "corners": corners, "steps": steps, "values": rates | others, "note": note}
    return Answer(figures, "\n".join([*lines, f"wrote {arguments.output}"]))


def count_steps(config: RunConfig) -> tuple[int, str]:
    """Return the steps of a run, and what is not known of them; "" if all is.

    Reads the text like the run, but only if train.max_epochs is set.
    """
    from hfgolf.data.batches import num_blocks
    from hfgolf.data.token_cache import load_tokens
    from hfgolf.train.clock import step_limit

    train, blocks = config.train, 0
    if train.max_epochs:
        blocks = num_blocks(len(load_tokens(config.data, config.tokenizer).train), config.batch.sequence_length)
    steps = step_limit(train, config.batch, blocks)
    if not train.max_minutes:
        return int(steps), ""
    if steps < math.inf:
        return int(steps), "train.max_minutes may end the run earlier"
    steps = math.ceil(60 * train.max_minutes)
    return steps, "train.max_minutes ends it; drawn at 1 s per step; for another length, add --train.max_steps"


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

    from hfgolf.optim.groups import KINDS, group_settings
    from hfgolf.optim.muon import Muon
    from hfgolf.optim.schedule import apply_schedule

    kinds = [kind for kind in KINDS if kind != "head" or not config.model.tie_word_embeddings]
    settings = [group_settings(kind, config.optim) for kind in kinds]
    stand_ins = [{"params": [torch.nn.Parameter(torch.zeros(1, 1))], **each} for each in settings]
    optimizer = Muon(stand_ins, momentum=config.optim.momentum)
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


def _table(total_steps: int, corners: dict[str, int], steps: Sequence[int], columns: dict[str, list[float]]) -> str:
    """Return one row per corner: its step, the fraction of the run before it, and the value of each column."""
    rows = [["", "step", "run done", *columns]]
    for name, step in corners.items():
        numbers = (f"{column[steps.index(step)]:.4g}" for column in columns.values())
        rows.append([name, f"{step + 1:,}", f"{step / total_steps:.1%}", *numbers])
    return aligned(rows, "l" + "r" * (len(rows[0]) - 1))


@palette.style()
def _draw(
    config: RunConfig,
    corners: dict[str, int],
    steps: Sequence[int],
    rates: dict[str, list[float]],
    others: dict[str, list[float]],
    path: Path,
) -> None:
    """Write the picture: learning rates on top, momentum and weight decay below, a thin line at each corner."""
    from matplotlib.figure import Figure

    positions = [step + 1 for step in steps]
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
            axes.axvline(step + 1, color=palette.GREY, linewidth=0.5, linestyle=":")
    below[-1].set_xlabel("step")
    palette.save(figure, path)
