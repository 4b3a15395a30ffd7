"""Launch the runs of an experiment as SLURM jobs, by submitit.

Owns what a job does, how it is submitted, and what its end means. Does not know which runs are missing. Imports nothing
heavy: every job imports it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfgolf.durable import write_text
from hfgolf.errors import UserError
from hfgolf.wording import one_line

if TYPE_CHECKING:
    from hfgolf.tools.compare.experiment import PlannedRun

logger = logging.getLogger(__name__)

JOB_NAME = "slurm_job.txt"
"""In the folder of a run that has a job: the job's number."""
LOST = 128 + signal.SIGKILL  # the status of a run whose job ended without one

_OWN_OPTIONS = ("array", "error", "nodes", "ntasks", "ntasks_per_node", "output", "requeue", "signal")
_MAX_REQUEUES = 1000  # submitit counts the time limits that a job reaches; the default is 3
_END_SECONDS = 600  # SLURM's own time between SIGTERM and the end or the requeue of a job


@dataclass
class TrainJob:
    """What a job does: run train.py, whose checkpoints carry it from one start of the job to the next."""

    command: list[str]
    folder: Path
    """Where to run it."""
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __call__(self) -> int:
        """Return train.py's exit status."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_ignore_submitit,
            )
        status = self._process.wait()
        if status in (-signal.SIGTERM, 128 + signal.SIGTERM):
            # SLURM sends it to every process of a job that it preempts or cancels, and then requeues or ends the job. A
            # result before that would say that the run has failed.
            time.sleep(_END_SECONDS)
        return status

    def checkpoint(self) -> Any:
        """Save and stop the run, before a time limit or a preemption; submitit requeues what this returns."""
        from submitit.core.utils import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
            # not Popen.wait: this interrupts the one in __call__, which holds its lock
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(replace(self))


def _ignore_submitit() -> None:
    """Leave submitit's signal to TrainJob: SLURM sends it to train.py, too, which it would kill."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@dataclass(eq=False)
class SlurmRun:
    """A run that has a job."""

    run: PlannedRun
    job: Any

    def poll(self) -> int | None:
        """Return train.py's exit status, LOST if SLURM ended the job without one, or None while there is none yet."""
        if not self.job.done():
            return None
        (self.run.folder.path / JOB_NAME).unlink(missing_ok=True)
        if self.job.exception() is None:
            return int(self.job.result())
        with self.run.log.open("a", encoding="utf-8") as log:
            how = f"ended as {self.job.state} without a result; its own log: {self.job.paths.stderr}"
            log.write(f"error: SLURM job {self.job.job_id} {how}\n")
        return LOST


@dataclass
class SlurmLauncher:
    """Starts each run as a job of one process; submitit's executor says how."""

    train: Sequence[str | Path]
    """What starts a run, after the name of Python."""
    executor: Any
    at_once: int

    is_remote = True
    poll_seconds = 2.0
    when_stopped = "its jobs go on; run the same command to wait for them"

    def start(self, run: PlannedRun) -> SlurmRun:
        """Submit a run, or find the job that an earlier call has submitted.

        Raises UserError if SLURM refuses the job, or no longer knows the earlier one.
        """
        folder = run.folder.path
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / JOB_NAME
        if note.exists():
            job = self.executor.job_class(self.executor.folder, note.read_text(encoding="utf-8").strip())
            if not job.done(force_check=True) and job.state == "UNKNOWN":
                raise UserError(
                    f"--launcher slurm: SLURM does not know job {job.job_id} of {run.name}; if it no longer runs,"
                    f" delete {note}."
                )
            logger.info("%s is job %s; log: %s", run.name, job.job_id, run.log)
            return SlurmRun(run, job)
        run.log.write_bytes(b"")
        self.executor.update_parameters(job_name=run.name)
        command = [sys.executable, *map(str, self.train), *run.arguments]
        try:
            job = self.executor.submit(TrainJob(command, Path.cwd(), run.log.absolute()))
        except (RuntimeError, OSError) as error:  # submitit's errors are RuntimeErrors
            raise UserError(f"--launcher slurm: sbatch refused the job of {run.name}: {one_line(error)}.") from None
        write_text(note, f"{job.job_id}\n")
        logger.info("%s submitted as job %s; log: %s", run.name, job.job_id, run.log)
        return SlurmRun(run, job)

    def stop(self, active: Sequence[SlurmRun]) -> None:
        """Leave the jobs to SLURM."""


def slurm_executor(folder: Path, options: Sequence[str]) -> Any:
    """Return submitit's executor for SLURM.

    folder: for its own files, on the shared disk. options: sbatch's, as KEY=VALUE or KEY. Raises UserError if submitit
    or SLURM is missing, or an option is not allowed.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("--launcher slurm: needs submitit; run `pip install submitit`.") from None
    if submitit.SlurmExecutor.affinity() < 0:
        raise UserError("--launcher slurm: there is no srun here; run it on a machine that submits to SLURM.")
    stated: dict[str, Any] = {}
    for option in options:
        key, has_value, value = option.partition("=")
        key = key.lstrip("-").replace("-", "_")
        if not key or key in _OWN_OPTIONS:
            raise UserError(f"--slurm: {option} is not allowed, because each run is one process of one job; remove it.")
        stated[key] = value if has_value else True
    minutes = str(stated.pop("time", ""))
    if not minutes.isdecimal() or int(minutes) < 1:
        raise UserError("--slurm: each job needs a time limit in minutes; add --slurm time=480, for example.")
    setup = stated.pop("setup", None)
    executor = submitit.SlurmExecutor(folder.absolute(), max_num_timeout=_MAX_REQUEUES)
    executor.update_parameters(
        time=int(minutes),
        setup=None if setup is None else [str(setup)],
        additional_parameters={"requeue": True} | stated,
    )
    return executor
