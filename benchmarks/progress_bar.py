"""What the progress bar costs per step of 10 ms, in CPU time: python benchmarks/progress_bar.py

Needs a terminal with a size, as in: script -qec "stty rows 40 cols 100; python benchmarks/progress_bar.py" /dev/null
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from hfgolf.system.command import run_command
from hfgolf.system.errors import UserError
from hfgolf.system.stopwatch import Stopwatch
from hfgolf.train.console import Console

STEPS = 500
STEP_SECONDS = 0.01
SWITCHES = 6  # of the stopwatch in a step with two micro-batches: each wait for data, and back


def main() -> None:
    if not sys.stderr.isatty():
        raise UserError("benchmarks/progress_bar.py: stderr is not a terminal, so there is no bar to measure.")
    with Console() as console:
        console.open()
        console.begin(STEPS, math.inf, tokens_per_step=4096, tokens_per_epoch=10**6)
        with_bar = seconds_per_step(console.switch, console.step)
    without = seconds_per_step(lambda kind: None, lambda step, seconds: None)
    share = (with_bar - without) / STEP_SECONDS
    print(f"{1e6 * (with_bar - without):.1f} us per step: {share:.3%} of {1000 * STEP_SECONDS:.0f} ms")


def seconds_per_step(on_switch: Callable[[str], None], on_step: Callable[[int, float], None]) -> float:
    """Return the CPU seconds of what the bar can make dearer: the stopwatch's switches, and its own call."""
    stopwatch, spent = Stopwatch(on_switch), 0.0
    for step in range(1, STEPS + 1):
        until = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < until:  # not sleep: a sleeping core forgets its caches, and a training one does not
            pass
        started_at = time.thread_time()
        for kind in ("data", "train") * (SWITCHES // 2):
            stopwatch.switch(kind)
        on_step(step, step * STEP_SECONDS)
        spent += time.thread_time() - started_at
    return spent / STEPS


if __name__ == "__main__":
    run_command(main)
