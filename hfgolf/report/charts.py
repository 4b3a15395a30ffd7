"""Which charts a report has, and the lines of each.

Does not know how a chart looks, except that its lines are numbered: figures.py gives each number a style.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hfgolf.report.curves import MAX_POINTS, Curve, Smoothing, bin_numbers, read_curve
from hfgolf.run.record import RunRecord
from hfgolf.run.schema import on_subset

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
    smoothed_by: Smoothing | None = None
    """If `logged` is noise around a curve, what of its values makes the line to read; None: it is read as it is."""


CHARTS = (
    Chart("loss", "Loss, nats per token", "train_losses", ("val_loss", "val_loss_ema"), smoothed_by="mean"),
    Chart("bits_per_byte", "Validation bits per byte", None, ("val_bits_per_byte", "val_bits_per_byte_ema")),
    Chart("old_bits_per_byte", "Bits per byte of the old text", None, ("old_val_bits_per_byte",)),
    Chart("learning_rate", "Learning rate", "learning_rate", from_zero=True),
    # by the median, which spikes do not lift
    Chart(
        "grad_norm", "Gradient norm before clipping", "grad_norms", limit="train.max_grad_norm", smoothed_by="median"
    ),
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


def lines_of(chart: Chart, runs: Sequence[RunRecord]) -> list[Line]:
    """Return the lines of a chart: all that one run has, or of several runs what is logged and what is validated."""
    points = max(_FEWEST_POINTS, min(MAX_POINTS, _POINTS_PER_PAGE // len(runs)))
    lines = []
    for number, run in enumerate(runs):
        # the event has the evaluation of step 0
        rows = [*run.events("init_from")[-1:], *map(on_subset, run.metrics.rows)]
        keys = (chart.logged, *(chart.evaluated if len(runs) == 1 else chart.evaluated[:1]))
        for index, key in enumerate(keys):
            curve = read_curve(rows, key, points, chart.smoothed_by or "mean") if key else None
            if curve:
                only = LABELS[index] if chart.evaluated else chart.title.lower()
                label = only if len(runs) == 1 else run.name
                lines.append(Line(index if len(runs) == 1 else number, label, curve, index == 0))
    return lines


def limits_of(chart: Chart, runs: Sequence[RunRecord]) -> list[float]:
    """Return the values of the config key that bounds the measure, without repetitions."""
    limits = (run.config.get(chart.limit or "") for run in runs)
    return sorted({limit for limit in limits if isinstance(limit, int | float)})


def is_wide(lines: Sequence[Line]) -> bool:
    """Return whether the values of lines span so much that only a logarithmic axis shows all of them."""
    lowest, highest = min(line.curve.lowest.min() for line in lines), max(line.curve.highest.max() for line in lines)
    return bool(lowest > 0 and highest > _MAX_LINEAR_RATIO * lowest)


def marked_events(run: RunRecord) -> dict[str, list[float]]:
    """Return the steps of each kind of event, at most one per pixel."""
    marked = {}
    for kind in EVENTS:
        steps = np.array(sorted(event["step"] for event in run.events(kind)), dtype=np.float64)
        if len(steps):
            marked[kind] = steps[np.unique(bin_numbers(steps), return_index=True)[1]].tolist()
    return marked


def caption(chart: Chart, lines: Sequence[Line], is_alone: bool) -> str:
    """Say how the lines were smoothed and thinned; "" if they show every value."""
    curve = max((line.curve for line in lines), key=lambda curve: curve.values_per_point)
    said = []
    windows = {line.curve.window for line in lines if line.is_logged and chart.smoothed_by and line.curve.window > 1}
    if windows:
        wide = f"{min(windows):,}" if len(windows) == 1 else f"{min(windows):,} to {max(windows):,}"
        kind = "training line" if chart.evaluated else "line"
        what = f"Each {kind}" if not is_alone else "The bold line" if len(lines) == 1 else f"The {kind}"
        said.append(f"{what} is the {chart.smoothed_by} over {wide} steps, as many before as after.")
    if curve.values_per_point > 1:
        band = "; the band is from their minimum to their maximum" if is_alone else ""
        said.append(f"A point stands for up to {curve.values_per_point:,} values: their mean{band}.")
    return " ".join(said)
