"""Launch the missing runs of an experiment, each as its own `hfgolf train` process on this machine.

Owns the processes and the progress messages. Knows only a run's folder and its exit status.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from hfgolf.compare.experiment import PlannedRun
from hfgolf.system.durable import write_text
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import cpu_cores
from hfgolf.system.signals import Signals
from hfgolf.system.wording import duration, join_words, one_line
from hfgolf.train.claim import changes, completed
from hfgolf.train.decisions import with_accelerate

logger = logging.getLogger(__name__)

CONCURRENT_RUNS = "HFGOLF_CONCURRENT_RUNS"
"""Environment variable of a run that shares the machine with others. It is in metadata.json: such timings are void."""
FAILURE_NAME = "failed.txt"
"""In the folder of a failed run: the reason."""

_SMALL_BYTES = 2**24  # less is a full disk
_FAILED = (1, 2)  # exit statuses of errors that would happen again; a signal has another status
_SAVE_SECONDS = 60  # a stopped run first finishes its step and saves
_POLL_SECONDS = 0.1


def run_missing(
    runs: Sequence[PlannedRun], at_once: int = 1, command: Sequence[str] = (sys.executable, "-m", "hfgolf", "train")
) -> dict[str, str]:
    """Run the unfinished runs; return {name of a failed run: its reason in one line}.

    at_once: runs that share this machine's cores. command: what each run's arguments are given to.

    An interrupted run is resumed. A failed run is left alone, because a resumed one could hide the failure, but only if
    it failed in its training: what kept it from beginning may be gone the next time. Raises UserError, before any run
    starts, if a folder holds a run with another config. However this call ends, also by a signal, active runs save and
    stop first.
    """
    complete = [run for run in runs if _is_complete(run)]
    reasons = {run.name: run.folder.path / FAILURE_NAME for run in runs}
    failures = {name: path.read_text(encoding="utf-8") for name, path in reasons.items() if path.exists()}
    missing = [run for run in runs if run not in complete and run.name not in failures]
    logger.info("%d runs: %d already complete, %d to do", len(runs), len(complete), len(missing))
    if failures:
        logger.info("%d failed before; delete %s in a run's folder to try it again", len(failures), FAILURE_NAME)
    waiting, active, begun = list(missing), dict[subprocess.Popen[bytes], PlannedRun](), dict[str, Any]()
    started_at = time.perf_counter()
    signals = Signals("before all runs were complete; run the same command to continue")
    with signals, signals.deferred():
        try:
            while (waiting or active) and not signals.stop:
                while waiting and len(active) < at_once:
                    run = waiting.pop(0)
                    begun[run.name] = _last_start(run)
                    active[_start(run, at_once, command)] = run
                time.sleep(_POLL_SECONDS)
                for process, status in [(process, process.poll()) for process in active]:
                    if status is None:
                        continue
                    run = active.pop(process)
                    if status:
                        lines = run.log.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
                        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
                        failures[run.name] = one_line((errors or lines)[-1])
                        is_full = shutil.disk_usage(run.folder.path).free < _SMALL_BYTES
                        if status in _FAILED and _last_start(run) != begun[run.name] and not is_full:
                            write_text(reasons[run.name], failures[run.name])
                    end = f"failed: {failures[run.name]}" if status else "is complete"
                    done, seconds = len(missing) - len(waiting) - len(active), time.perf_counter() - started_at
                    left = duration(seconds / done * (len(missing) - done))
                    progress = f"{duration(seconds)} so far{f', about {left} left' if done < len(missing) else ''}"
                    logger.info("[%d/%d] %s %s; %s", done, len(missing), run.name, end, progress)
        finally:
            for process in active:
                process.terminate()  # the runs save and stop
            for process in active:
                try:
                    process.wait(timeout=_SAVE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    return failures


def _start(run: PlannedRun, at_once: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    arguments, environment = list(run.arguments), dict(os.environ)
    if at_once > 1:
        arguments.append(f"--train.cpu_threads={max(1, cpu_cores() // at_once)}")
        environment[CONCURRENT_RUNS] = str(at_once)
    run.folder.path.mkdir(parents=True, exist_ok=True)
    logger.info("%s started; log: %s", run.name, run.log)
    with run.log.open("wb") as log:
        return subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # only this process gets Ctrl-C, and then stops the runs
        )


def _last_start(run: PlannedRun) -> tuple[int, int] | None:
    """Return what changes when training begins, which writes config.yaml anew."""
    try:
        status = run.folder.config.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _is_complete(run: PlannedRun) -> bool:
    resolved, folder = with_accelerate(run.resolved), run.folder
    if completed(folder, resolved)[0]:
        return True
    changed = changes(folder, resolved) if folder.config.exists() else []
    if changed:
        raise UserError(
            f"--output_dir: {folder.path} holds a run with another config ({join_words(changed[:3])}"
            f"{', ...' if len(changed) > 3 else ''}); choose another --output_dir or delete that folder."
        )
    return False
