"""Plot a comparison: validation loss over steps and over seconds, with bands, and the final losses of grids."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfgolf import palette
from hfgolf.compare.comparison import Comparison, Outcomes
from hfgolf.compare.experiment import Experiment
from hfgolf.compare.statistics import Curve, numbers

_COLORS = (palette.BLACK, *palette.LINES[:6])
_DASHES = ("-", "--", "-.", ":")


@palette.style()
def draw(comparison: Comparison, outcomes: Outcomes, path: Path, experiment: Experiment | None = None) -> None:
    """Write the plot as PNG: means over the seeds, with bands from the lowest to the highest.

    Only the best arm of a grid has curves. If the grid's first axis is numeric, a panel shows the final losses of all
    its arms over that axis; grids with the same first axis share a panel.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[str]] = {}
    for grid, values in experiment.grids.items() if experiment else ():
        first = next(iter(values))
        if numbers(values[first]):
            panels.setdefault(first, []).append(grid)
    figure = Figure(figsize=(5.2 * (2 + len(panels)), 4.4), dpi=120, layout="constrained")
    by_steps, by_seconds, *by_grid = figure.subplots(1, 2 + len(panels))
    candidates = _arms_to_draw(comparison, experiment)
    arms = candidates[: len(_COLORS)]
    if len(arms) < len(candidates):
        by_steps.set_title(f"the best {len(arms)} of {len(candidates)} arms", fontsize="medium")
    for number, arm in enumerate(arms):
        curves = [run.curve for run in outcomes[arm].values()]
        style = {"color": _COLORS[number], "linestyle": _DASHES[number % len(_DASHES)], "label": arm}
        steps, seconds, losses = _by_evaluation(curves)
        for axes, x in ((by_steps, steps), (by_seconds, seconds)):
            axes.plot(x, [statistics.mean(by_seed) for by_seed in losses], linewidth=1.6, **style)
            lowest, highest = [min(by_seed) for by_seed in losses], [max(by_seed) for by_seed in losses]
            axes.fill_between(x, lowest, highest, color=_COLORS[number], alpha=0.15, linewidth=0)
    bottom, top = _range_of_interest([run.curve for arm in arms for run in outcomes[arm].values()])
    by_steps.set(xlabel="step", ylabel="validation loss (nats per token)", ylim=(bottom, top))
    incomparable = " (not comparable, see the text)" if comparison.seconds_caveats else ""
    by_seconds.set(xlabel=f"seconds of training{incomparable}", ylim=(bottom, top))
    by_steps.legend(fontsize="small")
    for axes, (key, grids) in zip(by_grid, panels.items(), strict=True):
        assert experiment is not None
        _draw_grids(axes, key, grids, comparison, experiment)
    palette.save(figure, path)


def _arms_to_draw(comparison: Comparison, experiment: Experiment | None) -> list[str]:
    """Return the arms that can have curves: the baseline first, then by mean loss."""
    grid_arms = {arm for grid in comparison.grids for arm in experiment.arms_of(grid)} if experiment else set()
    best = {best.arm for best in comparison.grids.values() if best}
    means = {arm: result.mean for arm, result in comparison.arms.items() if result.mean is not None}
    shown = [arm for arm in means if arm not in grid_arms or arm in best or arm == comparison.baseline]
    return sorted(shown, key=lambda arm: (arm != comparison.baseline, means[arm]))


def _by_evaluation(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[list[float]]]:
    """Return steps, mean seconds and the losses of all seeds for each evaluation that every seed has."""
    by_step = [{point.step: point for point in curve} for curve in curves]
    steps = [step for step in by_step[0] if all(step in points for points in by_step)]
    seconds = [statistics.mean(points[step].seconds for points in by_step) for step in steps]
    return steps, seconds, [[points[step].loss for points in by_step] for step in steps]


def _range_of_interest(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the range of losses to show, from the last two thirds of the curves: the initial drop would flatten it."""
    losses = [point.loss for curve in curves for point in curve[len(curve) // 3 :]]
    margin = 0.05 * (max(losses) - min(losses)) or 0.1
    return min(losses) - margin, max(losses) + margin


def _draw_grids(axes: Any, key: str, grids: list[str], comparison: Comparison, experiment: Experiment) -> None:
    """Draw final losses over the grids' first axis, with one line per grid and combination of its other values."""
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for grid in grids:
        for arm in experiment.arms_of(grid):
            settings, losses = experiment.arms[arm], list(comparison.arms[arm].final_losses.values())
            others = [f"{other.split('.')[1]} {settings[other]}" for other in experiment.grids[grid] if other != key]
            if losses:
                lines.setdefault(", ".join([grid, *others]), []).append((float(settings[key]), losses))
    for number, (label, points) in enumerate(lines.items()):
        points.sort()
        x = [value for value, _ in points]
        mean, lowest, highest = ([function(losses) for _, losses in points] for function in (statistics.mean, min, max))
        color, dashes = _COLORS[number % len(_COLORS)], _DASHES[number % len(_DASHES)]
        axes.plot(x, mean, color=color, linestyle=dashes, marker="o", label=label)
        axes.vlines(x, lowest, highest, color=color)
    values = sorted({x for points in lines.values() for x, _ in points})
    axes.set(xlabel=key, ylabel="final validation loss (nats per token)")
    if values and values[0] > 0:
        axes.set_xscale("log")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    axes.legend(fontsize="small")
