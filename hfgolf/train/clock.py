"""How far a run is, and what it was asked to do, agreed on by all processes once a step."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
from torch import distributed

from hfgolf.optim.schedule import projected_steps
from hfgolf.train.signals import Signals

if TYPE_CHECKING:
    from hfgolf.train.setup import Run


class Clock:
    """Measures a run by steps or by the minutes of the main process, and passes on what any process was asked to do.

    One all-reduce of three numbers between the hosts a step, over gloo: no GPU waits for it. It reads a monotonic
    clock, so that setting the machine's time changes nothing.
    """

    def __init__(self, run: Run, signals: Signals) -> None:
        self._run = run
        self._signals = signals
        self._started_at = time.perf_counter() - run.state.elapsed_seconds - run.compile_seconds
        self._saved_at = time.perf_counter()
        self._most_seconds = 60 * (run.config.train.max_minutes or math.inf)
        self._hosts = distributed.new_group(backend="gloo") if run.accelerator.num_processes > 1 else None
        self._save_is_due = False
        self.stop_signal = 0
        """Number of the signal that ends the run after this step; 0: none."""
        self.tick()

    def tick(self) -> None:
        """Look at the clock and the signals; afterwards all processes know the same."""
        now = time.perf_counter()
        save_every = 60 * (self._run.config.train.save_every_minutes or math.inf)
        save = max(self._signals.save, now - self._saved_at >= save_every)
        seen = torch.tensor([now - self._started_at, self._signals.stop, save], dtype=torch.float64)
        if self._hosts is not None:
            if not self._run.accelerator.is_main_process:
                seen[0] = 0
            distributed.all_reduce(seen, distributed.ReduceOp.MAX, group=self._hosts)
        seconds, stop, save = seen.tolist()
        self._run.state.elapsed_seconds = seconds
        self.stop_signal, self._save_is_due = int(stop), bool(save)

    def total_steps(self) -> float:
        """Return the steps the run will have made, as far as one can tell."""
        if self._most_seconds == math.inf:
            return self._run.most_steps
        progress = self._run.state.elapsed_seconds / self._most_seconds
        return min(self._run.most_steps, projected_steps(self._run.state.step, progress))

    def is_over(self) -> bool:
        """Say whether the run has reached its last step or minute."""
        state = self._run.state
        return state.step >= self._run.most_steps or state.elapsed_seconds >= self._most_seconds

    def save_is_due(self) -> bool:
        """Say, once, whether train.save_every_minutes have passed or somebody asked for a checkpoint."""
        is_due, self._save_is_due = self._save_is_due, False
        if is_due:
            self._saved_at, self._signals.save = time.perf_counter(), 0
        return is_due
