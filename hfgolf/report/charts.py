"""The charts of a report: which there are, their lines, and how they look, drawn with matplotlib.

As SVG inside the page, and as PNG for the model card. The colors are those of Okabe and Ito, which color-blind readers
can tell apart. Markers and dashes work without color.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hfgolf import palette
from hfgolf.report.curves import MAX_POINTS, Curve, bin_numbers, read_curve
from hfgolf.run.metrics import on_subset
from hfgolf.run.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVENTS = {
    "skipped_step": ("x", "✕", "skipped step"),
    "fp16_overflow": ("1", "▿", "fp16 overflow"),
    "rollback": ("<", "◀", "rollback"),
    "resumed": (">", "▶", "resumed"),
    "out_of_memory": ("s", "■", "out of memory"),
    "finding": ("D", "◆", "doctor's finding"),
    "save_failed": ("v", "▼", "failed save"),
    "stopped": ("o", "●", "stopped by a signal"),
    "milestone": ("^", "▲", "milestone"),
}
"""For each kind of event: its marker in charts, its symbol in text, and its name."""

_MAX_LINEAR_RATIO = 10  # of maximum to minimum; beyond it (such as a spike) a linear scale would flatten the rest
_POINTS_PER_PAGE = 2400  # per column, shared by all runs: keeps the page of any number of runs under 1 MB
_FEWEST_POINTS = 40


@dataclass(frozen=True)
class Chart:
    """One measure plotted over the steps."""

    name: str
    title: str
    logged: str | None = None
    """Column with one number, or a list with one number per step; rows without it are skipped."""
    evaluated: tuple[str, ...] = ()
    """Columns that only evaluations fill: for the weights, and for their moving average."""
    limit: str | None = None
    """Config key whose value is drawn as a horizontal line."""
    limit_label: str = "clipped to"
    from_zero: bool = False
    is_noisy: bool = False
    """Whether `logged` is noise around a curve, so that it is smoothed to the line to read."""


CHARTS = (
    Chart("loss", "Loss, nats per token", "train_losses", ("val_loss", "val_loss_ema"), is_noisy=True),
    Chart("bits_per_byte", "Validation bits per byte", None, ("val_bits_per_byte", "val_bits_per_byte_ema")),
    Chart("old_bits_per_byte", "Bits per byte of the old text", None, ("old_val_bits_per_byte",)),
    Chart("learning_rate", "Learning rate", "learning_rate", from_zero=True),
    Chart("grad_norm", "Gradient norm before clipping", "grad_norms", limit="train.max_grad_norm", is_noisy=True),
    Chart("tokens_per_second", "Tokens per second", "tokens_per_second", from_zero=True),
    Chart("memory", "Memory, bytes", "memory_bytes", from_zero=True),
    Chart(
        "golf_bytes", "Forecast: bytes of the artifact", "golf_bytes", (), "golf.budget_bytes", "budget", from_zero=True
    ),
)
LABELS = ("training", "validation", "averaged weights")


@dataclass(frozen=True)
class Line:
    """One column of one run."""

    number: int
    """Of its style: the index of the run, or of the line if there is only one run."""
    label: str
    curve: Curve
    is_logged: bool
    """Logged in every row, and not by evaluations only."""


def _lines_of(chart: Chart, runs: Sequence[RunRecord]) -> list[Line]:
    """Return the lines of a chart: all that one run has, or of several runs what is logged and what is validated."""
    points = max(_FEWEST_POINTS, min(MAX_POINTS, _POINTS_PER_PAGE // len(runs)))
    lines = []
    for number, run in enumerate(runs):
        # the event has the evaluation of step 0
        rows = [*run.events("init_from")[-1:], *map(on_subset, run.metrics.rows)]
        keys = (chart.logged, *(chart.evaluated if len(runs) == 1 else chart.evaluated[:1]))
        for index, key in enumerate(keys):
            curve = read_curve(rows, key, points) if key else None
            if curve:
                only = LABELS[index] if chart.evaluated else chart.title.lower()
                label = only if len(runs) == 1 else run.name
                lines.append(Line(index if len(runs) == 1 else number, label, curve, index == 0))
    return lines


def _caption(chart: Chart, lines: Sequence[Line], is_alone: bool) -> str:
    """Say how the lines were smoothed and thinned; "" if they show every value."""
    thinned, said = max(line.curve.values_per_point for line in lines), []
    windows = sorted({line.curve.window for line in lines if line.is_logged and chart.is_noisy} - {1})
    if windows:
        what = "training line" if chart.evaluated else "line"
        wide = " to ".join(f"{window:,}" for window in windows[:: len(windows) - 1 or 1])
        said.append(f"The {what} is smoothed over {wide} steps, as many before as after, so it ends before the last.")
    if thinned > 1:
        band = "; the band is from their minimum to their maximum" if is_alone else ""
        said.append(f"A point stands for up to {thinned:,} values: their mean{band}.")
    return " ".join(said)


# (dash, gap, ...) in line widths. 5 patterns and 6 colors give 30 different lines.
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.5, 1.5), (5, 1.5, 1.5, 1.5), (9, 3))
_MARKERS = ("o", "s", "D", "^", "v")

DPI = 200  # PNG images are 840 pixels wide
_SMALL, _LARGE = (4.2, 2.8), (9.0, 3.6)  # inches; the page scales them to its width
_MAX_LABELS = 6
_MAX_LABEL_CHARACTERS = 20  # about a third of a chart's width
_MAX_MARKERS = 40


@dataclass(frozen=True)
class Drawing:
    """A chart drawn for one or more runs."""

    chart: Chart
    figure: Figure
    caption: str
    """How the lines were smoothed and thinned."""
    values: dict[str, list[str]]
    """What the markers of a line say to a pointer, {ID of the line: texts}."""

    def to_png(self) -> bytes:
        """Return a PNG image on a white background."""
        picture = io.BytesIO()
        with palette.style():
            palette.save(self.figure, picture, "png", dpi=DPI, facecolor="white")
        return picture.getvalue()

    def to_svg(self) -> str:
        """Return an SVG element for a page that defines the colors --line-0 to --line-5 and --ink."""
        picture = io.BytesIO()
        with palette.style(**{"svg.fonttype": "none", "svg.hashsalt": self.chart.name}):
            palette.save(self.figure, picture, "svg", transparent=True)
        svg = picture.getvalue().decode()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        for line, texts in self.values.items():
            before, opening, group = svg.partition(f'<g id="{line}">')
            for text in texts:  # a browser shows the title of a marker to a pointer
                done, use, group = group.partition("<use ")
                attributes, _, group = group.partition("/>")
                opening += f"{done}{use}{attributes}><title>{text}</title></use>"
            svg = before + opening + group
        svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # the same in all charts; those that hashsalt makes differ
        for number, color in enumerate(palette.LINES[:6]):
            svg = svg.replace(color.lower(), f"var(--line-{number})")
        return svg.replace(palette.INK, "var(--ink)")


def draw_charts(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Draw each of CHARTS that some run has values for, the first large. All runs share a chart; their names differ."""
    drawings = [_draw(chart, runs, _LARGE if chart is CHARTS[0] else _SMALL) for chart in CHARTS]
    return [drawing for drawing in drawings if drawing is not None]


def draw_losses(runs: Sequence[RunRecord]) -> Drawing | None:
    """Draw the chart of the losses as a picture for a model card; None if there are none."""
    return _draw(CHARTS[0], runs, _SMALL)


def line_style(number: int) -> tuple[str, tuple[float, ...], str]:
    """Return color, dashes (with gaps, in line widths) and marker of the run, or of the line, with this number."""
    return palette.LINES[number % 6], _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)]


@palette.style()
def _draw(chart: Chart, runs: Sequence[RunRecord], size: tuple[float, float]) -> Drawing | None:
    from matplotlib.figure import Figure

    lines = _lines_of(chart, runs)
    if not lines:
        return None
    width, height = size
    figure = Figure(figsize=size)
    axes = figure.add_axes((0.5 / width, 0.42 / height, 1 - 0.63 / width, 1 - 0.73 / height))  # margins in inches
    values: dict[str, list[str]] = {}
    for index, line in enumerate(lines):
        if said := _draw_line(axes, chart, line, f"line-{index}", is_alone=len(runs) == 1):
            values[f"line-{index}"] = said
    shown = {line.number for line in lines}
    for number, run in enumerate(runs):
        if len(runs) == 1 or number in shown:
            _mark_events(axes, run, palette.INK if len(runs) == 1 else line_style(number)[0])
    limits = {run.config.get(chart.limit or "") for run in runs}
    for level in sorted(limit for limit in limits if isinstance(limit, int | float)):
        axes.axhline(level, color=palette.INK, linestyle=":", linewidth=1, label=f"{chart.limit_label} {_short(level)}")
    _set_axes(axes, chart, lines, last_step=max(run.last["step"] for run in runs))
    # matplotlib's own selection of lines would skip a run whose name starts with _
    labels = {line: str(line.get_label()) for line in axes.lines if not str(line.get_label()).startswith("_child")}
    if 2 <= len(labels) <= _MAX_LABELS and max(map(len, labels.values())) <= _MAX_LABEL_CHARACTERS:
        for text in axes.legend(list(labels), list(labels.values())).get_texts():
            text.set_parse_math(False)  # a name may contain a $
    return Drawing(chart, figure, _caption(chart, lines, len(runs) == 1), values)


def _draw_line(axes: Axes, chart: Chart, line: Line, name: str, is_alone: bool) -> list[str]:
    """Draw one line: noise faint below its smoothed line, and evaluations with markers. Return what the markers say."""
    curve, (color, dashes, marker) = line.curve, line_style(line.number)
    is_noise = chart.is_noisy and line.is_logged and curve.window > 1
    is_marked, every = not line.is_logged or len(curve) == 1, math.ceil(len(curve) / _MAX_MARKERS)
    is_second = not is_alone and line.is_logged and bool(chart.evaluated)  # of a run that also has evaluations
    if is_noise and is_alone:
        axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=0.6)
    axes.plot(
        curve.steps,
        curve.smoothed if is_noise else curve.values,
        color=color,
        linestyle=(0, dashes) if dashes and not is_alone else "-",
        alpha=0.4 if is_second else 1,
        marker=marker if is_marked else "",
        markevery=every,
        gid=name,
        label=None if is_second else line.label,
    )
    if is_alone and curve.values_per_point > 1:
        axes.fill_between(curve.steps, curve.lowest, curve.highest, color=color, alpha=0.15, linewidth=0)
    points = zip(curve.steps[::every], curve.values[::every], strict=True) if is_marked else ()
    return [f"step {step:,.0f}: {value:.5g}" for step, value in points]


def _mark_events(axes: Axes, run: RunRecord, color: Any) -> None:
    bottom = axes.get_xaxis_transform()
    for kind, (marker, _, _) in EVENTS.items():
        steps = np.array(sorted(event["step"] for event in run.events(kind)), dtype=np.float64)
        if len(steps):
            steps = steps[np.unique(bin_numbers(steps), return_index=True)[1]]  # at most one per pixel
            axes.plot(steps, [0.03] * len(steps), marker, color=color, markersize=4, transform=bottom, zorder=3)


def _set_axes(axes: Axes, chart: Chart, lines: Sequence[Line], last_step: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    lowest = min(line.curve.lowest.min() for line in lines)
    highest = max(line.curve.highest.max() for line in lines)
    axes.set_title(chart.title)
    axes.set_xlabel("step", labelpad=2)
    axes.set_xlim(-0.02 * last_step, 1.02 * last_step)  # the same in all charts, so that they line up
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    if chart.from_zero and lowest >= 0 < highest:
        axes.set_ylim(0, 1.08 * highest)
    elif lowest > 0 and highest > _MAX_LINEAR_RATIO * lowest:
        axes.set_yscale("log")
        axes.set_ylim(0.8 * lowest, 1.25 * highest)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 100 * lowest else (1,)))
        axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    """Format 20000 as "20k" and 3e9 as "3G", and small numbers in full."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit and value >= 1e4:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"
