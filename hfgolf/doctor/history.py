"""The history of a run in the form that the doctor's detectors need, in bounded memory for any length of run.

Owns which lines of metrics.jsonl are kept, and which are dropped when a run goes back to a checkpoint. Judges nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from hfgolf.run.loss_levels import LEVEL_STEPS
from hfgolf.run.metrics import of_averages, on_subset

Line = dict[str, Any]

MAX_KEPT = 1000  # steps, rows and evaluations; more than any median needs


class Step(NamedTuple):
    """An optimizer step. A nonfinite value is stored as NaN."""

    step: int
    loss: float
    grad_norm: float


class Interval(NamedTuple):
    """The timing of the steps since the previous row."""

    step: int
    num_steps: int
    tokens_per_second: float
    data_seconds: float
    compute_seconds: float

    @property
    def data_share(self) -> float:
        """Time waiting for batches divided by compute time."""
        return self.data_seconds / max(self.compute_seconds, 1e-9)

    @property
    def seconds(self) -> float:
        return self.data_seconds + self.compute_seconds


class ValidationPoint(NamedTuple):
    """The validation result in a row."""

    step: int
    val_loss: float
    val_tokens: int | None
    """The number of tokens averaged. Losses over different tokens are not comparable."""
    train_level: float
    """The training loss at that time: the median over at most LEVEL_STEPS steps."""


class History:
    """The config of a run, its past, and its latest line."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        """{"section.key": value}, for every key."""
        self.latest: Line = {}
        self.new_steps: list[Step] = []
        """The steps of the latest line; empty if it is an event."""
        self.steps: deque[Step] = deque(maxlen=MAX_KEPT)
        self.intervals: deque[Interval] = deque(maxlen=MAX_KEPT)
        """The intervals of this session, without its first, which includes the startup."""
        self.evaluations: deque[ValidationPoint] = deque(maxlen=MAX_KEPT)
        self.first_loss = math.nan
        """About ln(vocabulary); NaN if the first rows are missing."""
        self.level = math.nan
        """The current training loss: the median over LEVEL_STEPS steps, or NaN before half of them."""
        self.lowest_level = math.inf
        self.epochs_per_step = math.nan
        """Over the steps of the latest row."""
        self._positions: deque[tuple[int, float]] = deque(maxlen=MAX_KEPT)
        """(step, passes over the data) after each row."""
        self.skips: deque[list[Line]] = deque(maxlen=100)
        """Nonfinite steps; consecutive ones share a list."""
        self.restore: Line | None = None
        """The last event that went back to a checkpoint."""
        self.out_of_memory: Line | None = None
        """The last "out_of_memory" event."""
        self._is_rounded = self._begins_to_round = False
        self._consecutive_steps: set[int] = set()
        """The steps that count as consecutive to the last nonfinite one."""
        self._session_has_row = False

    @property
    def step(self) -> int:
        """Completed updates at the last row."""
        return self.steps[-1].step if self.steps else 0

    @property
    def epoch(self) -> float:
        """Passes over the training blocks at the last row; NaN if unknown."""
        return self._positions[-1][1] if self._positions else math.nan

    @property
    def starts_over(self) -> bool:
        """Whether the steps before the latest line are no measure of the next ones.

        The run went back to a checkpoint, or its matrices are rounded from this row on (golf.qat_fraction).
        """
        return self.latest is self.restore or self._begins_to_round

    def losses(self, after: int, up_to: float = math.inf) -> list[float]:
        """Return the finite losses of the kept steps with after < step <= up_to."""
        return [s.loss for s in self.steps if after < s.step <= up_to and math.isfinite(s.loss)]

    def add(self, line: Line) -> None:
        """Add the next line of metrics.jsonl."""
        self.latest, self.new_steps, self._begins_to_round = line, [], False
        match line.get("event"):
            case None:
                self._add_row(line)
            case "skipped_step":
                self._add_skip(line)
            case "out_of_memory":
                self.out_of_memory = line
            case "resumed" | "rollback":
                self._go_back(line)

    def _add_row(self, row: Line) -> None:
        losses = _numbers(row.get("train_losses") or [row.get("train_loss")])
        grad_norms = _numbers(row.get("grad_norms") or [row.get("grad_norm")] * len(losses))
        step, first = row["step"], row["step"] + 1 - len(losses)
        self.new_steps = [Step(first + i, *pair) for i, pair in enumerate(zip(losses, grad_norms, strict=False))]
        self.steps.extend(self.new_steps)
        was_rounded, self._is_rounded = self._is_rounded, bool(row.get("golf_rounded_matrices"))
        self._begins_to_round = self._is_rounded and not was_rounded
        for new in self.new_steps:
            if not math.isfinite(new.loss):
                self._add_skip({"step": new.step})
            elif math.isnan(self.first_loss) and new.step <= LEVEL_STEPS:
                self.first_loss = new.loss
        recent = [step.loss for step in islice(reversed(self.steps), LEVEL_STEPS) if math.isfinite(step.loss)]
        median = float(np.median(recent)) if recent else math.nan
        self.level = median if len(recent) >= LEVEL_STEPS // 2 else math.nan
        self.lowest_level = min(self.lowest_level, self.level)
        step_before, epoch_before = self._positions[-1] if self._positions else (0, 0.0)
        epoch = row.get("epoch") or 0.0
        if step > step_before and epoch > epoch_before:
            self.epochs_per_step = (epoch - epoch_before) / (step - step_before)
            self._positions.append((step, epoch))
        if self._session_has_row:
            values = _numbers([row.get(name) for name in Interval._fields[2:]])
            self.intervals.append(Interval(step, len(losses), *values))
        self._session_has_row = True
        evaluated = on_subset(of_averages(row) if self.settings["optim.ema_export"] else row)
        if (val_loss := evaluated.get("val_loss")) is not None:
            self.evaluations.append(ValidationPoint(step, val_loss, evaluated.get("val_tokens"), median))

    def _add_skip(self, skip: Line) -> None:
        step = skip["step"]
        if "event" not in skip and self.skips and step <= self.skips[-1][-1]["step"]:
            return  # already added by its event, which comes before the row
        read = (step, skip.get("block_starts"))
        if any(read == (one["step"], one.get("block_starts")) for group in self.skips for one in group):
            pass  # a resumed run repeats it
        elif step in self._consecutive_steps:
            self.skips[-1].append(skip)
        else:
            self.skips.append([skip])
        self._consecutive_steps = {step, step + 1}

    def _go_back(self, event: Line) -> None:
        """Drop the steps after the checkpoint: the run undid them, or will repeat them."""
        self.restore = event
        last_skip = self.skips[-1][-1]["step"] if self.skips else None
        is_next = last_skip in (event["step"], event.get("from_step", event["step"]))
        self._consecutive_steps = {event["step"] + 1} if is_next else set()
        kept: deque[Any]
        for kept in (self.steps, self.intervals, self.evaluations, self._positions):
            while kept and kept[-1][0] > event["step"]:
                kept.pop()
        if event["event"] == "resumed":  # a new process, perhaps on another machine
            self.intervals.clear()
            self._session_has_row = False
        if event.get("begins_data"):  # other text or another order: earlier losses and epochs are not comparable
            self.steps.clear()
            self.evaluations.clear()
            self._positions = deque([(event["step"], 0.0)], maxlen=MAX_KEPT)
            self.lowest_level = math.inf


def _numbers(values: list[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]
