"""The charts of a report, drawn by matplotlib once for every medium: SVG that takes on the page's colours, and PNG.

Owns how a measure looks. The colours are those of Okabe and Ito, which the colour-blind tell apart; markers and dashes
do without any.
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
from hfgolf.report.curves import Curve, read_curve, stretches
from hfgolf.run.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    "blue": palette.BLUE,
    "vermilion": palette.VERMILION,
    "green": palette.GREEN,
    "pink": palette.PINK,
    "orange": palette.ORANGE,
    "sky blue": palette.SKY_BLUE,
}
# gaps follow dashes, in line widths; 5 kinds and 6 colours: 30 runs that all differ
_DASHES = {
    "solid": (),
    "dashed": (5, 1.5),
    "dotted": (1.5, 1.5),
    "dash-dotted": (5, 1.5, 1.5, 1.5),
    "long-dashed": (9, 3),
}
_MARKERS = ("o", "s", "D", "^", "v")
_INK = "#1f2328"  # text and axes on paper; in SVG the colour of the text around it
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _INK),
    **{"font.size": 8.5, "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.labelcolor": _INK},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.15},
    **{"lines.linewidth": 1.3, "lines.markersize": 3.5, "legend.frameon": False},
    "svg.fonttype": "none",  # text stays text, for which the browser has a font, and a reader a search
}

EVENTS = {
    "skipped_step": ("x", "✕", "skipped step"),
    "fp16_overflow": ("1", "▿", "fp16 overflow"),
    "rollback": ("<", "◀", "rollback"),
    "resumed": (">", "▶", "resumed"),
    "out_of_memory": ("s", "■", "out of memory"),
    "finding": ("D", "◆", "finding of the doctor"),
    "save_failed": ("v", "▼", "save that failed"),
    "stopped": ("o", "●", "stopped by a signal"),
}
"""For each kind of event the marker at the foot of a chart, the sign for it in text, and what it is called."""

DPI = 200  # of PNG: 840 pixels in width
_MAX_LABELS = 6
_LONGEST_LABEL = 20  # characters; about a third of a chart's width
_MAX_MARKERS = 40
_LINEAR_RANGE = 10  # what spans more than this factor, such as a spike, would flatten everything below it


@dataclass(frozen=True)
class Chart:
    """A measure over the steps."""

    name: str
    title: str
    logged: str | None = None
    """Column that every row has: a number, or a list with one a step."""
    evaluated: tuple[str, ...] = ()
    """Columns that only evaluations fill: of the weights, and of their averages."""
    limit: str | None = None
    """Key of the config that is drawn as a level."""
    from_zero: bool = False


CHARTS = (
    Chart("loss", "loss (nats a token)", "train_losses", ("val_loss", "val_loss_ema")),
    Chart("bits_per_byte", "validation bits per byte", None, ("val_bits_per_byte", "val_bits_per_byte_ema")),
    Chart("learning_rate", "learning rate", "learning_rate", from_zero=True),
    Chart("grad_norm", "gradient norm before clipping", "grad_norms", limit="train.max_grad_norm"),
    Chart("tokens_per_second", "tokens/s", "tokens_per_second", from_zero=True),
    Chart("memory", "memory (bytes)", "memory_bytes", from_zero=True),
)
_ALONE = ("training", "validation", "averaged weights")
"""Labels of the lines of one run."""


@dataclass(frozen=True)
class Drawing:
    """A chart of one run or several."""

    chart: Chart
    figure: Figure
    values_a_point: int
    """The most values that one point of a line stands for."""

    def to_svg(self) -> str:
        """Return an element to set into a page of HTML."""
        import matplotlib

        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with matplotlib.rc_context(_STYLE | {"svg.hashsalt": self.chart.name}):
            self.figure.savefig(text, format="svg", transparent=True, metadata=nothing)
        svg = text.getvalue()
        svg = re.sub(r'<g id="[^"]*">', "<g>", svg[svg.index("<svg") :])  # a page holds several, and an id once
        return svg.replace(_INK, "currentColor")

    def to_png(self) -> bytes:
        """Return a picture on white."""
        import matplotlib

        picture = io.BytesIO()
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(picture, format="png", dpi=DPI, facecolor="white")
        return picture.getvalue()


def draw_charts(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Draw those of CHARTS for which a run has values; several runs, of different names, share each."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        drawings = [_draw(chart, runs) for chart in CHARTS]
    return [drawing for drawing in drawings if drawing is not None]


@dataclass(frozen=True)
class Look:
    """What tells one line from another."""

    name: str
    color: str
    dashes: tuple[float, ...]
    """Lengths of dashes and gaps, in widths of the line; none if it is solid."""
    marker: str


def line_look(number: int) -> Look:
    """Return the look of the run, or of the line, of this number."""
    name, color = list(_COLORS.items())[number % len(_COLORS)]
    dash_name, dashes = list(_DASHES.items())[number % len(_DASHES)]
    return Look(f"{name}, {dash_name}", color, dashes, _MARKERS[number % len(_MARKERS)])


def _draw(chart: Chart, runs: Sequence[RunRecord]) -> Drawing | None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.8))
    axes = figure.add_axes((0.12, 0.15, 0.85, 0.74))
    curves: list[Curve] = []
    for number, run in enumerate(runs):
        curves += _draw_run(axes, chart, run, number if len(runs) > 1 else None)
    if not curves:
        return None
    limits = (run.config.get(chart.limit or "") for run in runs)
    for level in sorted({limit for limit in limits if isinstance(limit, int | float)}):
        axes.axhline(level, color=_INK, linestyle=":", linewidth=1, label=f"clipped to {level:g}")
    _set_axes(axes, chart, curves, last_step=max(run.last["step"] for run in runs))
    _add_legend(axes)
    return Drawing(chart, figure, max(curve.values_a_point for curve in curves))


def _draw_run(axes: Axes, chart: Chart, run: RunRecord, number: int | None) -> list[Curve]:
    """Draw a run's lines and events and return its curves.

    number: of the run among several, where all its lines look the same; None where it is alone, and each differs.
    """
    curves, line = [], None
    keys = (chart.logged, *chart.evaluated) if number is None else (chart.logged, *chart.evaluated[:1])
    for place, key in enumerate(keys):
        curve = read_curve(run.metrics.rows, key) if key else None
        if not curve:
            continue
        curves.append(curve)
        look = line_look(place if number is None else number)
        (line,) = axes.plot(
            curve.steps,
            curve.values,
            color=look.color,
            linestyle=(0, look.dashes) if look.dashes and number is not None else "-",
            alpha=0.4 if number is not None and place == 0 and chart.evaluated else 1,
            marker=look.marker if place > 0 or len(curve) == 1 else "",
            markevery=math.ceil(len(curve) / _MAX_MARKERS),
            label=_ALONE[place] if number is None else None,
        )
        if number is None and curve.values_a_point > 1:
            axes.fill_between(curve.steps, curve.lowest, curve.highest, color=look.color, alpha=0.25, linewidth=0)
    if line and number is not None:
        line.set_label(run.name)
    if line:
        _mark_events(axes, run, _INK if number is None else line.get_color())
    return curves


def _mark_events(axes: Axes, run: RunRecord, color: Any) -> None:
    for kind, (marker, _, _) in EVENTS.items():
        steps = np.array(sorted(event["step"] for event in run.events(kind)), dtype=np.float64)
        if len(steps):
            steps = steps[np.unique(stretches(steps), return_index=True)[1]]
            foot = axes.get_xaxis_transform()
            axes.plot(steps, np.full(len(steps), 0.03), marker, color=color, markersize=4, transform=foot, zorder=3)


def _set_axes(axes: Axes, chart: Chart, curves: Sequence[Curve], last_step: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    lowest, highest = min(curve.values.min() for curve in curves), max(curve.highest.max() for curve in curves)
    axes.set_title(chart.title)
    axes.set_xlabel("step", labelpad=2)
    axes.set_xlim(-0.02 * last_step, 1.02 * last_step)  # the same in all charts, so that they can be read together
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    if chart.from_zero and lowest >= 0 < highest:
        axes.set_ylim(0, 1.08 * highest)
    elif lowest > 0 and highest > _LINEAR_RANGE * lowest:
        axes.set_yscale("log")
        axes.set_ylim(0.8 * lowest, 1.25 * highest)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 100 * lowest else (1,)))
        axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    """Return 20000 as "20k", 3e9 as "3G"; small numbers as they are."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit and value >= 1e4:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def _add_legend(axes: Axes) -> None:
    """Name the lines, unless there is but one, or their names would hide them."""
    # not matplotlib's own choice of lines, which leaves out a run whose name begins with _
    labels = {line: str(line.get_label()) for line in axes.lines if not str(line.get_label()).startswith("_child")}
    if 2 <= len(labels) <= _MAX_LABELS and max(map(len, labels.values())) <= _LONGEST_LABEL:
        for text in axes.legend(list(labels), list(labels.values())).get_texts():
            text.set_parse_math(False)  # a name may hold a $
