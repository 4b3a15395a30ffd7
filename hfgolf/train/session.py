"""One session of a run in this process: its signals, its place among the other processes, its console."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hfgolf.config.sections import RunConfig
from hfgolf.run.folder import run_folder
from hfgolf.system.ranks import together
from hfgolf.system.signals import Signals
from hfgolf.system.stopwatch import Stopwatch, process_seconds
from hfgolf.train.claim import require_shared
from hfgolf.train.console import console
from hfgolf.train.process import own_accelerator, processes


@contextmanager
def session(config: RunConfig, signals: Signals | None) -> Iterator[tuple[Signals, Stopwatch]]:
    """Handle signals, meet the other processes and open the console inside a `with` block.

    signals: already entered by the caller; None: the caller is Python, which has done other things before. Yields the
    signals and the stopwatch of the run. Raises UserError if the processes do not share the run's folder.
    """
    not_ours = process_seconds() if signals is None else 0.0
    with signals or Signals() as signals, own_accelerator(), console, together(processes().num_processes):
        if processes().is_main_process:
            console.open()
        require_shared(run_folder(config))
        stopwatch = Stopwatch(console.switch)
        stopwatch.carry_over({"setup": -not_ours})
        yield signals, stopwatch
