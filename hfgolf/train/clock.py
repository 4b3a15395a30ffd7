"""How far a run is, and what it was asked to do, agreed on by all processes once a step."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
from torch import distributed

from hfgolf.checkpoint.state import TrainState
from hfgolf.optim.schedule import projected_steps
from hfgolf.train.signals import Signals

if TYPE_CHECKING:
    from hfgolf.config import BatchConfig, TrainConfig
    from hfgolf.train.setup import Run

_BATCHES_TO_AGREE = 8


def most_steps(train: TrainConfig, batch: BatchConfig, blocks: int, state: TrainState | None = None) -> float:
    """Return the steps after which max_steps, max_tokens or max_epochs end a run; infinity if only the clock does.

    blocks: sequences in an epoch. state: of a run that goes on; its tokens and blocks count, whatever batch read them.
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
    """An evaluation that ends before its last batch, on all processes, because one was asked to stop."""


class Clock:
    """Measures a run by steps or by the minutes of the main process, and passes on what any process was asked to do.

    One all-reduce of three numbers between the hosts a step, and one of the time where minutes end the run, over
    gloo: no GPU waits for them.
    """

    def __init__(self, run: Run, signals: Signals) -> None:
        self._run = run
        self._signals = signals
        self._saved_at = time.perf_counter()
        self._most_seconds = 60 * (run.config.train.max_minutes or math.inf)
        self._hosts = distributed.new_group(backend="gloo") if run.accelerator.num_processes > 1 else None
        self._save_is_due = False
        self._batches = 0
        self.stop_signal = 0
        """Number of the signal that ends the run after this step; 0: none."""
        self.tick()

    def tick(self) -> None:
        """Look at the clock and the signals; afterwards all processes know the same."""
        save_every = 60 * (self._run.config.train.save_every_minutes or math.inf)
        save = max(self._signals.save, time.perf_counter() - self._saved_at >= save_every)
        seconds, stop, is_due = self._agree(self._seconds(), self._signals.stop, save)
        self._run.state.elapsed_seconds = seconds
        self.stop_signal, self._save_is_due = int(stop), bool(is_due)

    def interrupt(self) -> None:
        """Raise Interrupted if any process was asked to stop; all call it before each batch of an evaluation.

        They agree every few batches: an all-reduce of the hosts takes some 0.1 ms, and more between machines.
        """
        self._batches += 1
        if not self.stop_signal and (self._hosts is None or self._batches % _BATCHES_TO_AGREE == 0):
            (stop,) = self._agree(self._signals.stop)
            self.stop_signal = int(stop)
        if self.stop_signal:
            raise Interrupted

    def _seconds(self) -> float:
        """Return the seconds of training by this process' stopwatch, which counts on the main process only."""
        return self._run.stopwatch.training_seconds() if self._run.accelerator.is_main_process else 0.0

    def _agree(self, *numbers: float) -> list[float]:
        """Return the greatest of each number over the processes."""
        seen = torch.tensor(numbers, dtype=torch.float64)
        if self._hosts is not None:
            distributed.all_reduce(seen, distributed.ReduceOp.MAX, group=self._hosts)
        return seen.tolist()

    def total_steps(self) -> float:
        """Return the steps the run will have made, as far as one can tell."""
        if self._most_seconds == math.inf:
            return self._run.most_steps
        # not as of the tick: an evaluation or a save since then took its part of the minutes
        (seconds,) = self._agree(self._seconds())
        progress = seconds / self._most_seconds
        return min(self._run.most_steps, projected_steps(self._run.state.step, progress))

    def is_over(self) -> bool:
        """Say whether the run has reached its last step or minute."""
        state = self._run.state
        return state.step >= self._run.most_steps or state.elapsed_seconds >= self._most_seconds

    def save_is_due(self) -> bool:
        """Say whether train.save_every_minutes have passed since the last save, or somebody asked for a checkpoint."""
        return self._save_is_due

    def note_save(self) -> None:
        """Count the minutes to the next save from here on; what was asked for is done."""
        self._saved_at, self._signals.save = time.perf_counter(), 0
        self._save_is_due = False
