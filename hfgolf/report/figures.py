"""The charts of a report, drawn with matplotlib: as SVG inside the page, and as PNG for the model card.

Owns how each chart looks. The colors are those of Okabe and Ito, which color-blind readers can tell apart. Markers and
dashes work without color.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfgolf import palette
from hfgolf.report.charts import CHARTS, EVENTS, Chart, Line, caption, is_wide, limits_of, lines_of, marked_events
from hfgolf.run.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = dict(zip(("blue", "vermilion", "green", "pink", "orange", "sky blue"), palette.LINES, strict=False))
# (dash, gap, ...) in line widths. 5 patterns and 6 colors give 30 different lines.
_DASHES = {
    "solid": (),
    "dashed": (5, 1.5),
    "dotted": (1.5, 1.5),
    "dash-dotted": (5, 1.5, 1.5, 1.5),
    "long-dashed": (9, 3),
}
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
            svg = before + opening + _with_titles(group, texts)
        svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # the same in all charts; those that hashsalt makes differ
        for number, color in enumerate(palette.LINES[:6]):
            svg = svg.replace(color.lower(), f"var(--line-{number})")
        return svg.replace(palette.INK, "var(--ink)")


def draw_charts(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Draw each of CHARTS that some run has values for, the first large. All runs share a chart; their names differ."""
    with palette.style():
        drawings = [_draw(chart, runs, _LARGE if chart is CHARTS[0] else _SMALL) for chart in CHARTS]
    return [drawing for drawing in drawings if drawing is not None]


def draw_losses(runs: Sequence[RunRecord]) -> Drawing | None:
    """Draw the chart of the losses as a picture for a model card; None if there are none."""
    with palette.style():
        return _draw(CHARTS[0], runs, _SMALL)


def _with_titles(svg: str, titles: Sequence[str]) -> str:
    """Give the first markers of an SVG their titles, which a browser shows to a pointer."""
    left = iter(titles)
    return re.sub(
        r"<use ([^>]*)/>", lambda use: f"<use {use[1]}><title>{next(left)}</title></use>", svg, count=len(titles)
    )


@dataclass(frozen=True)
class LineStyle:
    """The style that distinguishes one line from the others."""

    name: str
    color: str
    dashes: tuple[float, ...]
    """Lengths of dashes and gaps, in line widths; empty for a solid line."""
    marker: str


def line_style(number: int) -> LineStyle:
    """Return the style of the run, or of the line, with this number."""
    name, color = list(_COLORS.items())[number % len(_COLORS)]
    dash_name, dashes = list(_DASHES.items())[number % len(_DASHES)]
    return LineStyle(f"{name}, {dash_name}", color, dashes, _MARKERS[number % len(_MARKERS)])


def _draw(chart: Chart, runs: Sequence[RunRecord], size: tuple[float, float]) -> Drawing | None:
    from matplotlib.figure import Figure

    lines = lines_of(chart, runs)
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
            _mark_events(axes, run, palette.INK if len(runs) == 1 else line_style(number).color)
    for level in limits_of(chart, runs):
        axes.axhline(level, color=palette.INK, linestyle=":", linewidth=1, label=f"{chart.limit_label} {_short(level)}")
    _set_axes(axes, chart, lines, last_step=max(run.last["step"] for run in runs))
    _add_legend(axes)
    return Drawing(chart, figure, caption(chart, lines, len(runs) == 1), values)


def _draw_line(axes: Axes, chart: Chart, line: Line, name: str, is_alone: bool) -> list[str]:
    """Draw one line: noise faint below its moving mean, and evaluations with markers. Return what the markers say."""
    curve, style = line.curve, line_style(line.number)
    is_noise = chart.smoothed_by and line.is_logged and curve.window > 1
    is_marked, every = not line.is_logged or len(curve) == 1, math.ceil(len(curve) / _MAX_MARKERS)
    is_second = not is_alone and line.is_logged and bool(chart.evaluated)  # of a run that also has evaluations
    if is_noise and is_alone:
        axes.plot(curve.steps, curve.values, color=style.color, alpha=0.3, linewidth=0.6)
    axes.plot(
        curve.steps,
        curve.smoothed if is_noise else curve.values,
        color=style.color,
        linestyle=(0, style.dashes) if style.dashes and not is_alone else "-",
        alpha=0.4 if is_second else 1,
        marker=style.marker if is_marked else "",
        markevery=every,
        gid=name,
        label=None if is_second else line.label,
    )
    if is_alone and curve.values_per_point > 1:
        axes.fill_between(curve.steps, curve.lowest, curve.highest, color=style.color, alpha=0.15, linewidth=0)
    points = zip(curve.steps[::every], curve.values[::every], strict=True) if is_marked else ()
    return [f"step {step:,.0f}: {value:.5g}" for step, value in points]


def _mark_events(axes: Axes, run: RunRecord, color: Any) -> None:
    bottom = axes.get_xaxis_transform()
    for kind, steps in marked_events(run).items():
        axes.plot(steps, [0.03] * len(steps), EVENTS[kind][0], color=color, markersize=4, transform=bottom, zorder=3)


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
    elif is_wide(lines):
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


def _add_legend(axes: Axes) -> None:
    """Add a legend, unless there is only one line or the labels would cover the lines."""
    # matplotlib's own selection of lines would skip a run whose name starts with _
    labels = {line: str(line.get_label()) for line in axes.lines if not str(line.get_label()).startswith("_child")}
    if 2 <= len(labels) <= _MAX_LABELS and max(map(len, labels.values())) <= _MAX_LABEL_CHARACTERS:
        for text in axes.legend(list(labels), list(labels.values())).get_texts():
            text.set_parse_math(False)  # a name may contain a $
