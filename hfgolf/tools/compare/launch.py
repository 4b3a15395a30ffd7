"""Launch the missing runs of an experiment, each as its own train.py process.

Owns the processes, their logs and the progress messages. Knows only a run's folder and its exit status.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hfgolf.durable import write_text
from hfgolf.errors import UserError
from hfgolf.hardware import cpu_cores
from hfgolf.tools.compare.experiment import PlannedRun
from hfgolf.train.claim import changes, completed
from hfgolf.train.process import resolve_precision
from hfgolf.train.signals import Signals
from hfgolf.wording import duration, join_words, one_line

logger = logging.getLogger(__name__)

CONCURRENT_RUNS = "HFGOLF_CONCURRENT_RUNS"
"""Environment variable of a run that shares the machine with others. It is in metadata.json: such timings are void."""
LOG_NAME = "train.log"
FAILURE_NAME = "failed.txt"
"""In the folder of a failed run: the reason."""

_FAILED = (1, 2)  # exit statuses of errors that would happen again; a signal has another status
_POLL_SECONDS = 0.1
_SAVE_SECONDS = 60  # a stopped run first finishes its step and saves


def run_missing(runs: Sequence[PlannedRun], train_script: Path, jobs: int) -> dict[str, str]:
    """Run the unfinished runs, `jobs` at once; return {name of a failed run: its reason in one line}.

    An interrupted run is resumed. A failed run is left alone, because a resumed one could hide the failure. Raises
    UserError, before any run starts, if a folder holds a run with another config. However this call ends, also by a
    signal, the active runs save and stop first.
    """
    complete = [run for run in runs if _is_complete(run)]
    failures = {run.name: _failure(run).read_text(encoding="utf-8") for run in runs if _failure(run).exists()}
    missing = [run for run in runs if run not in complete and run.name not in failures]
    logger.info("%d runs: %d already complete, %d to do", len(runs), len(complete), len(missing))
    if failures:
        logger.info("%d failed before; delete %s in a run's folder to try it again", len(failures), FAILURE_NAME)
    waiting, active = list(missing), dict[subprocess.Popen, PlannedRun]()
    started_at = time.perf_counter()
    signals = Signals("before all runs were complete; run the same command to continue")
    with signals, signals.deferred():
        try:
            while (waiting or active) and not signals.stop:
                while waiting and len(active) < jobs:
                    run = waiting.pop(0)
                    active[_start(run, train_script, jobs)] = run
                    logger.info("%s started; log: %s", run.name, run.folder.path / LOG_NAME)
                time.sleep(_POLL_SECONDS)
                for process in [process for process in active if process.poll() is not None]:
                    run = active.pop(process)
                    if process.returncode:
                        failures[run.name] = _failure_reason(run)
                        if process.returncode in _FAILED and run.folder.config.exists():  # else training never began
                            write_text(_failure(run), failures[run.name])
                    end = f"failed: {failures[run.name]}" if process.returncode else "is complete"
                    done = len(missing) - len(waiting) - len(active)
                    progress = _progress(done, len(missing), time.perf_counter() - started_at)
                    logger.info("[%d/%d] %s %s; %s", done, len(missing), run.name, end, progress)
        finally:
            _stop(list(active))
    return failures


def _is_complete(run: PlannedRun) -> bool:
    resolved, folder = resolve_precision(run.resolved), run.folder
    if completed(folder, resolved):
        return True
    changed = changes(folder, resolved) if folder.config.exists() else []
    if changed:
        raise UserError(
            f"--output_dir: {folder.path} holds a run with another config ({join_words(changed[:3])}"
            f"{', ...' if len(changed) > 3 else ''}); choose another --output_dir or delete that folder."
        )
    return False


def _start(run: PlannedRun, train_script: Path, jobs: int) -> subprocess.Popen:
    arguments, environment = list(run.arguments), dict(os.environ)
    if jobs > 1:
        arguments.append(f"--train.cpu_threads={max(1, cpu_cores() // jobs)}")
        environment[CONCURRENT_RUNS] = str(jobs)
    run.folder.path.mkdir(parents=True, exist_ok=True)
    with (run.folder.path / LOG_NAME).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(train_script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # only this process gets Ctrl-C, and then stops the runs
        )


def _stop(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=_SAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(run: PlannedRun) -> Path:
    return run.folder.path / FAILURE_NAME


def _failure_reason(run: PlannedRun) -> str:
    """Return why a run failed: its last error line, or else its last line."""
    lines = (run.folder.path / LOG_NAME).read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return one_line((errors or lines)[-1])


def _progress(done: int, total: int, seconds: float) -> str:
    left = f", about {duration(seconds / done * (total - done))} left" if done < total else ""
    return f"{duration(seconds)} so far{left}"
