"""Track a run's progress and its stop and save requests; all processes agree on them once per step."""

from __future__ import annotations

import math
import time
from dataclasses import InitVar, dataclass, field

import torch
from torch import distributed

from hfgolf.checkpoint.state import TrainState
from hfgolf.config.sections import BatchSection, TrainSection
from hfgolf.optim.schedule import projected_steps
from hfgolf.system.signals import Signals
from hfgolf.system.stopwatch import Stopwatch

_BATCHES_PER_AGREEMENT = 8


def step_limit(train: TrainSection, batch: BatchSection, blocks: int, state: TrainState | None = None) -> float:
    """Return the step at which max_steps, max_tokens or max_epochs ends a run; infinity if only max_minutes does.

    blocks: sequences per epoch. state: of a resumed run; its tokens and blocks count, even if read in other batches.
    """
    state = state or TrainState()
    steps = float(train.max_steps or math.inf)
    if train.max_tokens:
        steps = min(steps, state.step + math.ceil((train.max_tokens - state.tokens) / batch.tokens_per_step))
    if train.max_epochs:
        left = train.max_epochs * blocks - state.blocks
        steps = min(steps, state.step + math.ceil(left / batch.sequences_per_step))
    return steps


class Interrupted(Exception):
    """Ends an evaluation early, on all processes, because one of them was asked to stop."""


@dataclass(eq=False)
class Clock:
    """Measures progress in steps and in minutes of the main process, and shares stop and save requests.

    Per step, this costs one all-reduce of four numbers, and one more if minutes limit the run. They run over gloo
    between the CPUs, so no GPU waits for them.
    """

    train: InitVar[TrainSection]
    state: TrainState
    stopwatch: Stopwatch
    signals: Signals
    step_limit: float
    num_processes: int = 1
    is_main_process: bool = True
    stop_signal: int = field(default=0, init=False)
    """Number of the signal that ends the run after this step; 0 if there is none."""
    save_is_due: bool = field(default=False, init=False)
    """Whether train.save_every_minutes have passed since the last save, or a checkpoint was requested."""

    def __post_init__(self, train: TrainSection) -> None:
        self.max_seconds = 60 * (train.max_minutes or math.inf)
        self._save_every_seconds = 60 * (train.save_every_minutes or math.inf)
        self._hosts = distributed.new_group(backend="gloo") if self.num_processes > 1 else None
        self._saved_at = time.perf_counter()
        self._batches = 0
        self._is_ended = self._end_is_asked = False
        self.synchronize()

    def synchronize(self) -> None:
        """Agree with all processes on the time, a stop, a save and an end. All processes call it after each step."""
        save = max(self.signals.save, time.perf_counter() - self._saved_at >= self._save_every_seconds)
        seconds, stop, is_due, is_ended = self._maximum(self._seconds(), self.signals.stop, save, self._end_is_asked)
        self.state.elapsed_seconds = seconds
        self.save_is_due, self._is_ended = bool(is_due), bool(is_ended)
        self._agree_on_stop(stop)

    def raise_if_stopped(self) -> None:
        """Raise Interrupted if any process was asked to stop. All call it before each batch of an evaluation.

        They agree only every few batches: an all-reduce takes about 0.1 ms on one machine, and more between machines.
        """
        self._batches += 1
        if not self.stop_signal and (self._hosts is None or self._batches % _BATCHES_PER_AGREEMENT == 0):
            (stop,) = self._maximum(self.signals.stop)
            self._agree_on_stop(stop)
        if self.stop_signal:
            raise Interrupted

    def expected_steps(self) -> float:
        """Return the expected number of steps at the end of the run. All processes call it."""
        if self.max_seconds == math.inf:
            return self.step_limit
        # the time now, not at the last step: an evaluation or a save since then used some of the minutes
        (seconds,) = self._maximum(self._seconds())
        return min(self.step_limit, projected_steps(self.state.step, seconds / self.max_seconds))

    def is_over(self) -> bool:
        """Return whether the run has reached its last step or minute, or a callback has ended it."""
        has_time = self.state.elapsed_seconds < self.max_seconds
        return self._is_ended or self.state.step >= self.step_limit or not has_time

    def end(self) -> None:
        """Let this step be the last, on all processes, once they synchronize."""
        self._end_is_asked = True

    def agree_on_end(self) -> None:
        """Agree with all processes on whether the run ends without another step: `end` was called, or time is up.

        All processes call it after an evaluation, which is then the last one.
        """
        seconds, is_asked = self._maximum(self._seconds(), self._end_is_asked)
        self._is_ended = bool(is_asked) or seconds >= self.max_seconds

    def note_save(self) -> None:
        """Restart the minutes to the next save, and clear a pending request."""
        self._saved_at, self.signals.save = time.perf_counter(), 0
        self.save_is_due = False

    def _agree_on_stop(self, stop: float) -> None:
        self.stop_signal = int(stop)
        self.signals.agree(self.stop_signal)

    def _seconds(self) -> float:
        """Return the seconds of training on the main process, 0 on the others: the maximum over all is its time."""
        return self.stopwatch.training_seconds() if self.is_main_process else 0.0

    def _maximum(self, *numbers: float) -> list[float]:
        """Return the maximum of each number over the processes."""
        maxima = torch.tensor(numbers, dtype=torch.float64)
        if self._hosts is not None:
            distributed.all_reduce(maxima, distributed.ReduceOp.MAX, group=self._hosts)
        return maxima.tolist()
