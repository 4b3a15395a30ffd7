"""What a run has logged, as the doctor's detectors want it: bounded, however long the run is.

Owns how lines of metrics.jsonl are remembered, and what going back to a checkpoint makes of them. Judges nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Line = dict[str, Any]

KEPT = 1000  # steps, rows, evaluations: more than a median needs
LEVEL_STEPS = 50  # enough that their median moves by less than the noise of a step


class Step(NamedTuple):
    """An optimizer step; NaN stands for what was not finite."""

    step: int
    loss: float
    grad_norm: float


class Interval(NamedTuple):
    """What a row says of the steps since the row before."""

    step: int
    tokens_per_second: float
    data_seconds: float
    compute_seconds: float

    @property
    def data_share(self) -> float:
        """Seconds waited for batches, as a share of those the steps were computed."""
        return self.data_seconds / max(self.compute_seconds, 1e-9)


class Evaluation(NamedTuple):
    """What a row says of the validation part."""

    step: int
    val_loss: float
    val_tokens: int | None
    """Of which it is the mean; losses of other tokens do not compare."""
    train_level: float
    """The training loss then, a median over LEVEL_STEPS or as many as there were."""


class Place(NamedTuple):
    """Where in the data a row ended."""

    step: int
    epoch: float


class History:
    """The config of a run, its past and its latest line."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        """{"section.key": value}, of every key."""
        self.latest: Line = {}
        self.new_steps: list[Step] = []
        """The steps of the latest line, none where it is an event."""
        self.steps: deque[Step] = deque(maxlen=KEPT)
        self.intervals: deque[Interval] = deque(maxlen=KEPT)
        """Those of this session but for the first, in which it starts up."""
        self.evaluations: deque[Evaluation] = deque(maxlen=KEPT)
        self.first_loss = math.nan
        """About ln(vocabulary); NaN where the first rows are lost."""
        self.level = math.nan
        """The training loss now, a median over LEVEL_STEPS; NaN before half of them are there."""
        self.lowest_level = math.inf
        self.epochs_per_step = math.nan
        """Of the latest row's steps."""
        self._places: deque[Place] = deque(maxlen=KEPT)
        self.skips: deque[list[Line]] = deque(maxlen=100)
        """Steps that were not finite, those in a row together."""
        self.restore: Line | None = None
        """The last event that went back to a checkpoint."""
        self.out_of_memory: Line | None = None
        """The last event of that name."""
        self._would_follow: set[int] = set()
        """Steps that would be in a row with the last skipped one."""
        self._session_has_begun = False

    @property
    def step(self) -> int:
        """Updates completed, by the last row."""
        return self.steps[-1].step if self.steps else 0

    @property
    def epoch(self) -> float:
        """Passes over the training blocks, by the last row; NaN if no row says."""
        return self._places[-1].epoch if self._places else math.nan

    def losses(self, after: int, up_to: float = math.inf) -> list[float]:
        """Return the finite losses of the steps after < step <= up_to, as far as they are kept."""
        return [s.loss for s in self.steps if after < s.step <= up_to and math.isfinite(s.loss)]

    def add(self, line: Line) -> None:
        """Take in the next line of metrics.jsonl."""
        self.latest, self.new_steps = line, []
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
        first = row["step"] + 1 - len(losses)
        self.new_steps = [Step(first + i, *pair) for i, pair in enumerate(zip(losses, grad_norms, strict=False))]
        self.steps.extend(self.new_steps)
        for step in self.new_steps:
            if not math.isfinite(step.loss):
                self._add_skip({"step": step.step})
            elif math.isnan(self.first_loss) and step.step <= LEVEL_STEPS:
                self.first_loss = step.loss
        recent = [self.steps[-i].loss for i in range(1, 1 + min(LEVEL_STEPS, len(self.steps)))]
        recent = [loss for loss in recent if math.isfinite(loss)]
        median = float(np.median(recent)) if recent else math.nan
        self.level = median if len(recent) >= LEVEL_STEPS // 2 else math.nan
        self.lowest_level = min(self.lowest_level, self.level)
        self._add_place(Place(row["step"], row.get("epoch") or 0.0))
        if self._session_has_begun:
            values = _numbers([row.get(name) for name in Interval._fields[1:]])
            self.intervals.append(Interval(row["step"], *values))
        self._session_has_begun = True
        if row.get("val_loss") is not None:
            averaged = row.get("val_loss_ema") if self.settings["optim.ema_export"] else None
            self.evaluations.append(Evaluation(row["step"], averaged or row["val_loss"], row.get("val_tokens"), median))

    def _add_place(self, place: Place) -> None:
        """Note how much of an epoch each of the row's steps read; 0 and NaN say nothing."""
        before = self._places[-1] if self._places else Place(0, 0.0)
        if place.step > before.step and place.epoch > before.epoch:
            self.epochs_per_step = (place.epoch - before.epoch) / (place.step - before.step)
            self._places.append(place)

    def _add_skip(self, skip: Line) -> None:
        step = skip["step"]
        if "event" not in skip and self.skips and step <= self.skips[-1][-1]["step"]:
            return  # its event came before the row
        if step in self._would_follow:
            self.skips[-1].append(skip)
        else:
            self.skips.append([skip])
        self._would_follow = {step, step + 1}

    def _go_back(self, event: Line) -> None:
        """Forget the steps after the checkpoint: they did not happen, or will be made again."""
        self.restore = event
        last_skip = self.skips[-1][-1]["step"] if self.skips else None
        self._would_follow = {event["step"] + 1} if last_skip == event.get("from_step", -1) else set()
        kept: deque[Any]
        for kept in (self.steps, self.intervals, self.evaluations, self._places):
            while kept and kept[-1].step > event["step"]:
                kept.pop()
        if event["event"] == "resumed":  # another process, perhaps on another machine
            self.intervals.clear()
            self._session_has_begun = False
        if event.get("begins_data"):  # other text, or another order of it: no loss or epoch before compares
            self.steps.clear()
            self.evaluations.clear()
            self._places = deque([Place(event["step"], 0.0)], maxlen=KEPT)
            self.lowest_level = math.inf


def _numbers(values: list[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]
