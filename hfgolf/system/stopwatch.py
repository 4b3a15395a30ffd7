"""Measure where the time of a run goes: each second counts toward one kind of work, so the sum is wall-clock time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

KINDS = ("setup", "compile", "data", "train", "evaluate", "checkpoint", "other")
"""setup: from the start of the process, or of a call from Python, to the first step, without compiling; data: waiting
for batches; train: the rest of the steps; checkpoint: time that the loop waits for saves, and rollbacks; other: logging
and, after the last step, exporting and pushing."""


class Stopwatch:
    """Charges all time since the process was created to one kind of work at a time, starting with `setup`.

    On a GPU, a kind is charged for the time that the process waits; each step waits for its own kernels once.
    on_switch: called with each new kind, in each step several times.
    """

    def __init__(self, on_switch: Callable[[str], None] = lambda kind: None) -> None:
        self._on_switch = on_switch
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kind = "setup"
        self._since = time.perf_counter() - max(0.0, process_seconds())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind so far, including earlier sessions."""
        self.switch(self._kind)
        return dict(self._seconds)

    def row(self) -> dict[str, float]:
        """Return columns of a metrics.jsonl row: the seconds of each kind so far, and the Unix time."""
        return {f"seconds_{kind}": seconds for kind, seconds in self.seconds().items()} | {"logged_at": time.time()}

    def training_seconds(self) -> float:
        """Return the seconds of all kinds except setup, over all sessions: train.max_minutes limits these."""
        return sum(seconds for kind, seconds in self.seconds().items() if kind != "setup")

    def carry_over(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of earlier sessions."""
        for kind, before in seconds.items():
            self._seconds[kind if kind in KINDS else "other"] += before

    def switch(self, kind: str) -> str:
        """Charge the time from now on to `kind`; return the previous kind."""
        now = time.perf_counter()
        self._seconds[self._kind] += now - self._since
        self._since = now
        before, self._kind = self._kind, kind
        self._on_switch(kind)
        return before

    @contextmanager
    def charge(self, kind: str) -> Iterator[None]:
        """Charge the time inside to `kind`. A nested charge takes its time away from the outer one."""
        outside = self.switch(kind)
        try:
            yield
        finally:
            self.switch(outside)


def process_seconds() -> float:
    """Return the seconds since this process was created; on Linux by the boot clock, which is never adjusted."""
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    # proc(5): field 22, in ticks since boot; the command in field 2 may contain spaces and parentheses
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
