"""The charts of a report, drawn once with matplotlib and saved as PNG and as SVG that adopts the page's colors.

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

import numpy as np

from hfgolf import palette
from hfgolf.report.curves import Curve, bin_numbers, read_curve
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
INK = "#1f2328"  # text and axes; in SVG, replaced by the color of the surrounding text
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK),
    **{"font.size": 8.5, "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.labelcolor": INK},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.15},
    **{"lines.linewidth": 1.3, "lines.markersize": 3.5, "legend.frameon": False},
    "svg.fonttype": "none",  # keep text as text, so that the browser picks a font and readers can search
}

EVENTS = {
    "skipped_step": ("x", "✕", "skipped step"),
    "fp16_overflow": ("1", "▿", "fp16 overflow"),
    "rollback": ("<", "◀", "rollback"),
    "resumed": (">", "▶", "resumed"),
    "out_of_memory": ("s", "■", "out of memory"),
    "finding": ("D", "◆", "doctor's finding"),
    "save_failed": ("v", "▼", "failed save"),
    "stopped": ("o", "●", "stopped by a signal"),
}
"""For each kind of event: its marker at the bottom of a chart, its symbol in text, and its name."""

DPI = 200  # PNG images are 840 pixels wide
_MAX_LABELS = 6
_MAX_LABEL_CHARACTERS = 20  # about a third of a chart's width
_MAX_MARKERS = 40
_MAX_LINEAR_RATIO = 10  # of maximum to minimum; beyond it (such as a spike) a linear scale would flatten the rest


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


CHARTS = (
    Chart("loss", "loss (nats per token)", "train_losses", ("val_loss", "val_loss_ema")),
    Chart("bits_per_byte", "validation bits per byte", None, ("val_bits_per_byte", "val_bits_per_byte_ema")),
    Chart("old_bits_per_byte", "bits per byte of the old text", None, ("old_val_bits_per_byte",)),
    Chart("learning_rate", "learning rate", "learning_rate", from_zero=True),
    Chart("grad_norm", "gradient norm before clipping", "grad_norms", limit="train.max_grad_norm"),
    Chart("tokens_per_second", "tokens/s", "tokens_per_second", from_zero=True),
    Chart("memory", "memory (bytes)", "memory_bytes", from_zero=True),
    Chart(
        "golf_bytes", "forecast: bytes of the artifact", "golf_bytes", (), "golf.budget_bytes", "budget", from_zero=True
    ),
)
_SINGLE_RUN_LABELS = ("training", "validation", "averaged weights")


@dataclass(frozen=True)
class Drawing:
    """A chart drawn for one or more runs."""

    chart: Chart
    figure: Figure
    values_per_point: int
    """The largest number of values that one point of a line represents."""

    def to_svg(self) -> str:
        """Return an SVG element to embed in HTML."""
        import matplotlib

        text = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with matplotlib.rc_context(STYLE | {"svg.hashsalt": self.chart.name}):
            self.figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
        svg = text.getvalue()
        svg = re.sub(
            r'<g id="[^"]*">', "<g>", svg[svg.index("<svg") :]
        )  # ids must be unique in a page with several charts
        return svg.replace(INK, "currentColor")

    def to_png(self) -> bytes:
        """Return a PNG image on a white background."""
        import matplotlib

        picture = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(picture, format="png", dpi=DPI, facecolor="white")
        return picture.getvalue()


def draw_charts(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Draw each of CHARTS that some run has values for. All runs share each chart; their names must differ."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        drawings = [_draw(chart, runs) for chart in CHARTS]
    return [drawing for drawing in drawings if drawing is not None]


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
        axes.axhline(level, color=INK, linestyle=":", linewidth=1, label=f"{chart.limit_label} {_short(level)}")
    _set_axes(axes, chart, curves, last_step=max(run.last["step"] for run in runs))
    _add_legend(axes)
    return Drawing(chart, figure, max(curve.values_per_point for curve in curves))


def _draw_run(axes: Axes, chart: Chart, run: RunRecord, number: int | None) -> list[Curve]:
    """Draw the lines and events of a run and return its curves.

    number: the run's index among several runs; all its lines then share one style. None: it is the only run, and each
    of its lines has its own style.
    """
    curves, line = [], None
    keys = (chart.logged, *chart.evaluated) if number is None else (chart.logged, *chart.evaluated[:1])
    rows = [*run.events("init_from")[-1:], *run.metrics.rows]  # the event has the evaluation of step 0
    for index, key in enumerate(keys):
        curve = read_curve(rows, key) if key else None
        if not curve:
            continue
        curves.append(curve)
        style = line_style(index if number is None else number)
        (line,) = axes.plot(
            curve.steps,
            curve.values,
            color=style.color,
            linestyle=(0, style.dashes) if style.dashes and number is not None else "-",
            alpha=0.4 if number is not None and index == 0 and chart.evaluated else 1,
            marker=style.marker if index > 0 or len(curve) == 1 else "",
            markevery=math.ceil(len(curve) / _MAX_MARKERS),
            label=_SINGLE_RUN_LABELS[index] if number is None else None,
        )
        if number is None and curve.values_per_point > 1:
            axes.fill_between(curve.steps, curve.lowest, curve.highest, color=style.color, alpha=0.25, linewidth=0)
    if line and number is not None:
        line.set_label(run.name)
    if line:
        _mark_events(axes, run, INK if number is None else line.get_color())
    return curves


def _mark_events(axes: Axes, run: RunRecord, color: Any) -> None:
    for kind, (marker, _, _) in EVENTS.items():
        steps = np.array(sorted(event["step"] for event in run.events(kind)), dtype=np.float64)
        if len(steps):
            steps = steps[np.unique(bin_numbers(steps), return_index=True)[1]]
            bottom = axes.get_xaxis_transform()
            axes.plot(steps, np.full(len(steps), 0.03), marker, color=color, markersize=4, transform=bottom, zorder=3)


def _set_axes(axes: Axes, chart: Chart, curves: Sequence[Curve], last_step: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    lowest, highest = min(curve.values.min() for curve in curves), max(curve.highest.max() for curve in curves)
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


def _add_legend(axes: Axes) -> None:
    """Add a legend, unless there is only one line or the labels would cover the lines."""
    # matplotlib's own selection of lines would skip a run whose name starts with _
    labels = {line: str(line.get_label()) for line in axes.lines if not str(line.get_label()).startswith("_child")}
    if 2 <= len(labels) <= _MAX_LABELS and max(map(len, labels.values())) <= _MAX_LABEL_CHARACTERS:
        for text in axes.legend(list(labels), list(labels.values())).get_texts():
            text.set_parse_math(False)  # a name may contain a $
