"""Prove that a run survives kill -9 on this machine: hfgolf verify_resume --config configs/small.yaml

Trains a few steps straight, then again with kills at random moments, also inside saves, and compares sample hashes,
losses, weights, optimizer and random states. Exit status 0: equal; 1: different; 2: a run failed.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hfgolf.commands.options import Answer, ScriptParser, bounded
from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_lines, read_rows
from hfgolf.system.errors import UserError
from hfgolf.system.signals import Signals, Stopped

logger = logging.getLogger(__name__)

TRAIN = ("-m", "hfgolf", "train")
_POLL_SECONDS = 0.001  # saving a small model takes only a few hundredths of a second


def main() -> Answer:
    parser = ScriptParser(
        __doc__,
        "Also takes the options of hfgolf train, for both runs: --config FILE --section.key value. It sets\n"
        "their length, how often they log, evaluate and save, and their (temporary) folder.",
    )
    parser.add_argument("--steps", **bounded(1, 10**9, "optimizer steps of each run", 30))
    parser.add_argument("--kills", **bounded(0, 10**6, "number of kills; every second one aims at a save", 4))
    parser.add_argument("--kill_seed", **bounded(0, 2**63 - 1, "seed of the moments of the kills", 0))
    parser.add_argument("--num_processes", **bounded(1, 1024, "processes on this machine, one per GPU", 1))
    arguments, run_options = parser.parse_known_args()
    if arguments.steps <= arguments.kills:
        raise UserError(f"--steps: {arguments.steps} is out of range; allowed: more than --kills {arguments.kills}.")
    resolved = load_config([*run_options, f"--train.max_steps={arguments.steps}"], may_choose=False)

    from hfgolf.train.console import show_log

    show_log(is_main_process=True)
    plan = KillPlan(**vars(arguments))
    is_equal = verify_resume(run_options, resolved, plan)
    return Answer({"equal": is_equal}, status=int(not is_equal))


@dataclass(frozen=True)
class KillPlan:
    """How long the runs are, and how often to kill the second one."""

    steps: int
    """Optimizer steps of each run."""
    kills: int
    """Number of kills; every second one aims at a save."""
    kill_seed: int
    num_processes: int


def verify_resume(
    arguments: list[str], resolved: ResolvedConfig, plan: KillPlan, train: Sequence[str | Path] = TRAIN
) -> bool:
    """Run both runs, log how they compare, and return whether they are equal.

    arguments: for hfgolf train, as written; resolved: the resulting config; train: what starts a run, after the name of
    Python. Raises UserError if a run fails on its own, or under a launcher of several processes.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("verify_resume starts its processes itself; run `hfgolf verify_resume --num_processes`.")
    import torch

    from hfgolf.commands.evidence import diff_runs, diff_table, evidence, verdict

    started_at = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="verify_resume-"))
    options = [f"--{key}={value}" for key, value in settings(resolved, plan.steps, folder).items()]
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={plan.num_processes}"]
    launcher = [sys.executable, *(several if plan.num_processes > 1 else [])]
    command = [*launcher, *map(str, train), *arguments, *options]
    straight, killed = RunFolder(folder / "straight"), RunFolder(folder / "killed")
    try:
        with Signals("before the verdict; both runs were deleted"):
            with Session(command, straight) as session:
                session.finish()
            logger.info("straight: %d steps in %.0f s", plan.steps, time.perf_counter() - started_at)
            run_with_kills(command, killed, straight, plan)
    except Stopped:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    diffs = diff_runs(evidence(straight), evidence(killed))
    # one process on a CPU is bitwise reproducible; elsewhere the order of sums may vary
    is_exact = plan.num_processes == 1 and not torch.accelerator.is_available()
    is_equal, text = verdict(diffs, plan.steps, is_exact)
    logger.info("\n%s\n\n%s (%.0f s)", diff_table(diffs), text, time.perf_counter() - started_at)
    if is_equal:
        shutil.rmtree(folder)
        return True
    if plan.kills:
        logger.info("use --kills 0 to check whether two straight runs are equal on this machine")
    logger.info("both runs are in %s", folder)
    return False


def settings(resolved: ResolvedConfig, steps: int, folder: Path) -> dict[str, Any]:
    """Return the options of both runs on top of the config: short, logged at every step, without trackers or a push."""
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
    """The processes of one start of a run; leaving the `with` block kills them."""

    def __init__(self, command: list[str], run: RunFolder) -> None:
        run.path.mkdir(exist_ok=True)
        self.log = run.path / f"session-{len(list(run.path.glob('session-*')))}.log"
        self._metrics = run.metrics
        self._version_before = self._version_read = self._metrics_version()
        self._last_step = 0
        with self.log.open("wb") as output:
            self._process = psutil.Popen(
                [*command, f"--run.name={run.path.name}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only this process gets Ctrl-C, and then kills them
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def step(self) -> int:
        """Return the last step in metrics.jsonl; 0 if this session has not written to it yet."""
        version = self._metrics_version()
        if version not in (self._version_before, self._version_read):
            with contextlib.suppress(OSError):  # it is being replaced
                lines = read_lines(self._metrics)
                self._version_read, self._last_step = version, lines[-1]["step"] if lines else 0
        return 0 if version == self._version_before else self._last_step

    def kill(self) -> bool:
        """Kill -9 all processes of the session and wait for them; return False if it had already ended."""
        # not the process group: torchrun gives each of its processes its own
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [self._process, *self._process.children(recursive=True)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes)
        return self._process.wait() == -9

    def finish(self) -> None:
        """Wait for the end; if the run failed, log its last lines and raise UserError."""
        status = self._process.wait()
        if status:
            lines = self.log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if line.startswith("error: ")]  # torchrun adds 20 lines after them
            logger.info("%s\n", "\n".join(errors or lines[-15:]))
            raise UserError(f"the {self.log.parent.name} run failed with status {status}; see its log, {self.log}.")

    def _metrics_version(self) -> tuple[int, int] | None:
        """Return (inode, size) of metrics.jsonl, which change when it is written; a rewind replaces the file."""
        if not self._metrics.exists():
            return None
        status = self._metrics.stat()
        return status.st_ino, status.st_size


def run_with_kills(command: list[str], run: RunFolder, straight: RunFolder, plan: KillPlan) -> None:
    """Start and kill a run repeatedly until it is complete, with one log line per session.

    The kills are spread evenly over the steps. straight: the finished straight run, which shows how long a step takes
    and how many files a checkpoint has, so that a kill can hit any moment of a step or a save.
    """
    from hfgolf.checkpoint.store import newest_first  # late: it imports torch

    moments = random.Random(plan.kill_seed)
    step_seconds = statistics.median(
        row["data_seconds"] + row["compute_seconds"] for row in read_rows(straight.metrics)
    )
    max_files = len(list(newest_first(straight.checkpoints)[0].iterdir()))
    killed_at = 0
    for number in range(1, plan.kills + 2):
        is_killed, is_aimed = False, number % 2 == 0  # at a save
        with Session(command, run) as session:
            if number <= plan.kills:
                first, last = ((plan.steps - 1) * part // plan.kills for part in (number - 1, number))
                target = moments.randint(first + 1, last)
                num_files = moments.randint(1, max_files)
                is_due = False
                while session.is_running() and not is_due:
                    is_due = session.step() >= (1 if is_aimed else target)
                    if is_aimed and is_due:
                        save = _pending_save(run)
                        is_due = save is not None and save[0] >= target and save[1] >= num_files
                    time.sleep(0.0 if is_due else _POLL_SECONDS)
                time.sleep(0.0 if is_aimed else moments.uniform(0, step_seconds))
                is_killed = session.kill()
            if not is_killed:
                session.finish()
        log = session.log.read_text(errors="replace")
        resumed = re.search(r"^resumed from .* at step (\d+)$", log, re.MULTILINE)
        resumed_at = int(resumed[1]) if resumed else 0
        start = f"resumed from step {resumed_at}, {killed_at - resumed_at} repeated" if number > 1 else "started"
        if not is_killed:
            missed = f", before kill {number}" if number <= plan.kills else ""
            logger.info("session %d: %s; completed%s", number, start, missed)
            return
        killed_at, save = session.step(), _pending_save(run)
        where = "between saves"
        if save:
            where = f"inside the save of step {save[0]}, with {save[1]} of {max_files} files"
        where += "; it aimed at a save, which finished first" if is_aimed and not save else ""
        logger.info("session %d: %s; kill -9 after step %d, %s", number, start, killed_at, where)


def _pending_save(run: RunFolder) -> tuple[int, int] | None:
    """Return step and number of files of the save under way; None if there is none.

    After a kill, its hidden folder stays until the next session starts.
    """
    with contextlib.suppress(OSError):  # the save may end meanwhile
        for partial in run.checkpoints.glob(".partial-step-*"):
            return int(partial.name.rpartition("-")[2]), len(list(partial.iterdir()))
    return None
