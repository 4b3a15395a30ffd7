"""Where the seconds of a run go: each belongs to one kind of work, so that together they are the wall clock."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

KINDS = ("setup", "compile", "data", "train", "evaluate", "checkpoint", "other")
"""setup: from the start of the process to the first step, but for compiling; data: waiting for batches; train: the rest
of the steps; checkpoint: what saves keep the loop waiting, and rollbacks; other: logging, and from the last step on
exporting and pushing."""


class Stopwatch:
    """Charges the time of a process to one kind of work after the other, from its creation on, which is `setup`.

    On a GPU a kind is charged with what it keeps the process waiting for; a step waits for its own kernels once.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kind = "setup"
        self._since = time.perf_counter() - max(0.0, _process_seconds())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind so far, those of earlier sessions included."""
        self.switch(self._kind)
        return dict(self._seconds)

    def row(self) -> dict[str, float]:
        """Return columns of a row of metrics.jsonl: the seconds of each kind so far, and the time (Unix)."""
        return {f"seconds_{kind}": seconds for kind, seconds in self.seconds().items()} | {"logged_at": time.time()}

    def training_seconds(self) -> float:
        """Return the seconds of all kinds but setup, over all sessions: what train.max_minutes limits."""
        return sum(seconds for kind, seconds in self.seconds().items() if kind != "setup")

    def carry_over(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of the sessions before this one."""
        for kind, before in seconds.items():
            self._seconds[kind] += before

    def switch(self, kind: str) -> str:
        """Charge everything from now on to `kind`; returns what was charged until now."""
        now = time.perf_counter()
        self._seconds[self._kind] += now - self._since
        self._since = now
        before, self._kind = self._kind, kind
        return before

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Charge what happens inside to `kind`, and what inside of that is of another kind to that one alone."""
        outside = self.switch(kind)
        try:
            yield
        finally:
            self.switch(outside)


def _process_seconds() -> float:
    """Return the seconds since this process was created; on Linux by a clock that nobody sets."""
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    # proc(5): field 22, in ticks since the boot; the command in field 2 may hold spaces and parentheses
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
