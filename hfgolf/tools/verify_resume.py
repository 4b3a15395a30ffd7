"""The proof that a run survives: once straight, once killed again and again, and nothing may differ.

Owns the two runs, the kills and the comparison. Runs them as a person would, as processes, and knows of them only what
they leave on the disk: metrics.jsonl, checkpoints and summary.json.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from hfgolf.checkpoint.store import newest_first
from hfgolf.command_line import ResolvedConfig
from hfgolf.errors import UserError
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_rows
from hfgolf.tools.evidence import compare, evidence, table, verdict
from hfgolf.train.signals import Signals, Stopped

logger = logging.getLogger(__name__)

# Without it accelerate takes the processes of torchrun on a CPU for so many runs of one process.
_ENVIRONMENT = {} if torch.accelerator.is_available() else {"ACCELERATE_USE_CPU": "true"}
_POLL_SECONDS = 0.001  # a save of a small model takes some hundredths of a second


@dataclass(frozen=True)
class Plan:
    """How long, and how often to kill."""

    steps: int
    """Optimizer steps of each run."""
    kills: int
    """Every second one aims at a save."""
    kill_seed: int
    num_processes: int


def verify_resume(train_script: Path, arguments: list[str], resolved: ResolvedConfig, plan: Plan) -> bool:
    """Make both runs, show how they compare and return whether they are equal.

    arguments: of train.py, as written; resolved: the config they make. Raises UserError where a run fails by itself.
    """
    started_at = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="verify_resume-"))
    options = [f"--{key}={value}" for key, value in settings(resolved, plan.steps, folder).items()]
    command = [*_launcher(plan.num_processes), str(train_script), *arguments, *options]
    straight, killed = RunFolder(folder / "straight"), RunFolder(folder / "killed")
    try:
        with Signals("before the verdict; both runs are gone"):
            with Session(command, straight) as session:
                session.finish()
            logger.info("straight: %d steps in %.0f s", plan.steps, time.perf_counter() - started_at)
            run_with_kills(command, killed, straight, plan)
    except Stopped:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    findings = compare(evidence(straight), evidence(killed))
    # the promise of one process on a CPU; elsewhere sums may be taken in another order
    is_exact = plan.num_processes == 1 and not torch.accelerator.is_available()
    is_equal, text = verdict(findings, plan.steps, is_exact)
    logger.info("\n%s\n\n%s (%.0f s)", table(findings), text, time.perf_counter() - started_at)
    if is_equal:
        shutil.rmtree(folder)
        return True
    if plan.kills:
        logger.info("--kills 0 tells whether two straight runs are equal on this machine")
    logger.info("both runs are kept in %s", folder)
    return False


def settings(resolved: ResolvedConfig, steps: int, folder: Path) -> dict[str, Any]:
    """Return what both runs are told on top of the config, by key: short, watched closely, kept to themselves."""
    return {
        "run.output_dir": folder,
        "train.resume": "auto",
        "train.max_steps": steps,
        "train.max_tokens": "null",
        "train.max_epochs": "null",
        "train.max_minutes": "null",
        "train.patience_evals": "null",
        "train.log_every_steps": 1,
        "train.eval_every_steps": max(1, steps // 3),
        "train.eval_tokens": resolved.config.batch.tokens_per_step,
        "train.save_every_steps": max(1, steps // 6),
        "train.save_every_minutes": "null",
        "track.trackers": "[]",
        "hub.push": "false",
    }


class Session:
    """The processes of a run from a start until their end, which is also the end of the `with`."""

    def __init__(self, command: list[str], run: RunFolder) -> None:
        run.path.mkdir(exist_ok=True)
        self.log = run.path / f"session-{len(list(run.path.glob('session-*')))}.log"
        self._metrics = run.metrics
        self._before = self._written()
        with self.log.open("wb") as output:
            self._process = psutil.Popen(
                [*command, f"--run.name={run.path.name}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who then kill
                env=os.environ | _ENVIRONMENT,
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def step(self) -> int:
        """Return the step that metrics.jsonl has come to; 0 as long as this session has not touched it."""
        if self._written() == self._before:
            return 0
        with contextlib.suppress(OSError, ValueError):  # it is being written, or has no row
            text = self._metrics.read_bytes()
            return json.loads(text[: text.rindex(b"\n")].splitlines()[-1])["step"]  # a kill may cut a row off
        return 0

    def resumed_step(self) -> int:
        """Return the step this session went on from; 0: it began the run."""
        resumed = re.search(r"^resumed from .* at step (\d+)$", self.log.read_text(errors="replace"), re.MULTILINE)
        return int(resumed[1]) if resumed else 0

    def kill(self) -> bool:
        """Kill -9 all its processes and wait until they are gone; returns False where it was over already."""
        # not the process group: torchrun gives each of its processes one of its own
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [self._process, *self._process.children(recursive=True)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes)
        return self._process.wait() == -9

    def finish(self) -> None:
        """Wait for the end; raises UserError, after its last lines, where it is not a good one."""
        status = self._process.wait()
        if status:
            lines = self.log.read_text(errors="replace").splitlines()
            of_run = [line for line in lines if line.startswith("error: ")]  # torchrun goes on for 20 lines after it
            logger.info("%s\n", "\n".join(of_run or lines[-15:]))
            raise UserError(f"the {self.log.parent.name} run ended with status {status}; all of its log: {self.log}.")

    def _written(self) -> tuple[int, int] | None:
        """Return what tells whether metrics.jsonl was written to: a resume that drops rows writes another file."""
        if not self._metrics.exists():
            return None
        status = self._metrics.stat()
        return status.st_ino, status.st_size


def run_with_kills(command: list[str], run: RunFolder, straight: RunFolder, plan: Plan) -> None:
    """Start, kill and start again, with a line for each session, until the run is complete.

    The steps are divided evenly over the kills. straight: the run that says how long a step takes and how many files a
    checkpoint has, so that a kill meets any moment of them.
    """
    moments = random.Random(plan.kill_seed)
    step_seconds = statistics.median(
        row["data_seconds"] + row["compute_seconds"] for row in read_rows(straight.metrics)
    )
    max_files = len(list(newest_first(straight.checkpoints)[0].iterdir()))
    saves_to_hit, killed_at = 0, 0
    for number in range(1, plan.kills + 2):
        is_killed = False
        with Session(command, run) as session:
            if number <= plan.kills:
                first, last = ((plan.steps - 1) * part // plan.kills for part in (number - 1, number))
                target = moments.randint(first + 1, last)
                saves_to_hit += number % 2 == 0
                if saves_to_hit:
                    _wait_for_save(session, run, target, num_files=moments.randint(1, max_files))
                else:
                    _wait_for_step(session, target, and_seconds=moments.uniform(0, step_seconds))
                is_killed = session.kill()
            if not is_killed:
                session.finish()
        resumed_at = session.resumed_step()
        start = f"resumed from step {resumed_at}, {killed_at - resumed_at} made again" if number > 1 else "began"
        if not is_killed:
            missed = f", before kill {number} met it" if number <= plan.kills else ""
            logger.info("session %d: %s; completed%s", number, start, missed)
            return
        killed_at, save = session.step(), _save_under_way(run)
        where = f"inside the save of {save} of {max_files} files" if save else "between saves"
        where += "; it aimed at one, which was too quick" if saves_to_hit and not save else ""
        logger.info("session %d: %s; kill -9 after step %d, %s", number, start, killed_at, where)
        saves_to_hit -= bool(saves_to_hit and save)


def _launcher(num_processes: int) -> list[str]:
    if num_processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]


def _wait_for_step(session: Session, step: int, and_seconds: float) -> None:
    while session.is_running() and session.step() < step:
        time.sleep(_POLL_SECONDS)
    time.sleep(and_seconds)


def _wait_for_save(session: Session, run: RunFolder, step: int, num_files: int) -> None:
    """Wait until a save of `step` or a later one has so many files, the last of which is being written."""
    while session.is_running() and not (session.step() and _num_files(run, step) >= num_files):
        time.sleep(_POLL_SECONDS)


def _num_files(run: RunFolder, step: int) -> int:
    """Return the files in the save under way, if it is of `step` or a later one; else 0."""
    with contextlib.suppress(OSError):  # it ends while we look
        for partial in run.checkpoints.glob(".partial-step-*"):
            if int(partial.name.rpartition("-")[2]) >= step:
                return len(list(partial.iterdir()))
    return 0


def _save_under_way(run: RunFolder) -> str | None:
    """Return step and files of a save that a kill cut off: its hidden folder stays until the next session begins."""
    for partial in run.checkpoints.glob(".partial-step-*"):
        return f"step {int(partial.name.rpartition('-')[2])}, with {len(list(partial.iterdir()))}"
    return None
