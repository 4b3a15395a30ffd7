"""Prove that a run survives kill -9 on this machine: hfgolf verify_resume --config configs/small.yaml

Trains straight, then again with faults at random moments, also inside saves, and compares losses, weights, optimizer
and random states, and all else of hfgolf's own runs. --command does so with any other trainer, by what its log says and
by the tensors that it saves. Exit status 0: equal; 1: different; 2: a run failed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hfgolf.commands.options import Answer, ScriptParser, bounded
from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.run.folder import RunFolder
from hfgolf.system.errors import UserError
from hfgolf.system.signals import Signals, Stopped

logger = logging.getLogger(__name__)

TRAIN = ("-m", "hfgolf", "train")
PATTERN = (
    r"(?i)(?=.*?\b(?:step|iter)\W+(?P<step>\d+))"
    r"(?=.*?\bloss\W+?(?P<loss>-?\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf(?:inity)?)\b)"
)
FAULTS: dict[str, tuple[str, ...]] = {
    "SIGKILL": (),
    "SAVE": (),
    "SIGTERM": ("SIGTERM",),
    "SIGSEGV": ("SIGSEGV",),
    "SIGSTOP": ("SIGSTOP",),
    "SIGCONT": ("SIGSTOP", "SIGCONT"),
    "GIL": ("SIGUSR2",),
}
"""{fault: the signals that cause it, before SIGKILL}. SAVE: kill -9 inside a save; SIGCONT: a stop that ends; GIL: a
thread that never releases Python's lock."""
KILLS = ("SIGKILL", "SAVE")
_HOLD_GIL = "import ctypes, signal\nsignal.signal(signal.SIGUSR2, lambda *_: ctypes.PyDLL(None).pause())\n"
_POLL_SECONDS = 0.001  # saving a small model takes only a few hundredths of a second
_PATIENCE_SECONDS = (2.0, 60.0)  # at least and at most, for the next line of a log


def main() -> Answer:
    parser = ScriptParser(
        __doc__,
        "Without --command, it also takes the options of hfgolf train, for both runs: --config FILE\n"
        "--section.key value. It sets their length, how often they log, evaluate and save, and their (temporary)\n"
        "folder.",
    )
    parser.add_argument("--steps", **bounded(1, 10**9, "optimizer steps of each run of hfgolf's", 30))
    parser.add_argument("--kills", **bounded(0, 10**6, "number of faults", 4))
    parser.add_argument("--kill_seed", **bounded(0, 2**63 - 1, "seed of the moments of the faults", 0))
    parser.add_argument("--num_processes", **bounded(1, 1024, "processes on this machine, one per GPU", 1))
    text = f"which faults, in turn: {', '.join(FAULTS)} ({' '.join(KILLS)})"
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=KILLS, metavar="FAULT", help=text)
    parser.add_argument("--command", help="the command of another trainer; it starts all of its processes itself")
    parser.add_argument("--resume", help="the command that continues its run (the same command)")
    parser.add_argument("--folder", type=Path, help="the folder that it writes to; must not exist yet")
    text = "regular expression with the groups step and loss, for lines of its log (step or iter, and loss)"
    parser.add_argument("--pattern", default=PATTERN, help=text)
    arguments, run_options = parser.parse_known_args()
    plan = KillPlan(arguments.kills, arguments.kill_seed, arguments.num_processes, arguments.faults)
    if arguments.command is not None:
        of_own_runs = ["--steps"] if arguments.steps != parser.get_default("steps") else []
        if given := [*of_own_runs, *run_options]:
            raise UserError(f"{given[0]}: not with --command; add it to the command itself.")
        build = partial(other_trainer, arguments.command, arguments.resume, arguments.folder, arguments.pattern)
    else:
        if arguments.resume or arguments.folder or arguments.pattern != PATTERN:
            raise UserError("--resume, --folder and --pattern describe another trainer; add its --command.")
        if arguments.steps <= plan.kills:
            raise UserError(f"--steps: {arguments.steps} is out of range; allowed: more than --kills {plan.kills}.")
        steps = f"--train.max_steps={arguments.steps}"
        resolved = load_config([*run_options, steps], may_choose=False, verb="verify_resume")
        build = partial(own_trainer, run_options, resolved, arguments.steps, plan.num_processes)

    from hfgolf.train.console import show_log

    show_log(is_main_process=True)
    is_equal, text = verify_resume(build(), plan)
    return Answer({"equal": is_equal, "verdict": text}, status=int(not is_equal))


@dataclass(frozen=True)
class KillPlan:
    """How often to disturb the second run, and by what."""

    kills: int
    kill_seed: int
    num_processes: int
    faults: Sequence[str] = KILLS
    """Names in FAULTS, in turn."""


@dataclass(frozen=True)
class Trainer:
    """What is tested: how it starts, what it writes, and what of that must be equal."""

    command: list[str]
    """Starts a run; continues it, too, unless `resume` does."""
    folder: Path
    """What the command writes to; absent before the first start."""
    work: Path
    """Takes both runs and their logs."""
    evidence: Callable[[Path], dict[str, Any]]
    """Returns what must be equal in two such folders, besides the losses in the log; see evidence.py."""
    resume: list[str] | None = None
    pattern: str = PATTERN


def own_trainer(
    arguments: list[str], resolved: ResolvedConfig, steps: int, num_processes: int, train: Sequence[str | Path] = TRAIN
) -> Trainer:
    """Return hfgolf itself, for a short run.

    arguments: for hfgolf train, as written; resolved: the resulting config; train: what starts a run, after the name of
    Python. Raises UserError under a launcher of several processes.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("verify_resume starts its processes itself; run `hfgolf verify_resume --num_processes`.")
    from hfgolf.commands.evidence import evidence

    work = Path(tempfile.mkdtemp(prefix="verify_resume-"))
    options = [f"--{key}={value}" for key, value in settings(resolved, steps, work).items()]
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command = [sys.executable, *(several if num_processes > 1 else []), *map(str, train), *arguments, *options]
    return Trainer(command, work / "run", work, lambda folder: evidence(RunFolder(folder)))


def other_trainer(command: str, resume: str | None, folder: Path | None, pattern: str) -> Trainer:
    """Return a trainer that hfgolf knows nothing of. Raises UserError if it can't be tested."""
    from hfgolf.commands.evidence import saved_tensors

    if folder is None or folder.exists():
        what = "--command needs it" if folder is None else f"{folder} exists; move it"
        raise UserError(f"--folder: {what}. Name the folder that the command writes to; it must not exist yet.")
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise UserError(f"--pattern: not a regular expression ({error}).") from None
    if not {"step", "loss"} <= groups.keys():
        raise UserError("--pattern: needs the groups (?P<step>...) and (?P<loss>...).")
    try:
        commands = [shlex.split(line) for line in (command, resume or command)]
    except ValueError as error:
        raise UserError(f"--command, --resume: {error}; quote it as for a shell.") from None
    if not all(words and shutil.which(words[0]) for words in commands):
        raise UserError("--command, --resume: each must begin with a program on the PATH, or its path.")
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="verify_resume-", dir=parent))  # on the same disk: runs are moved there
    return Trainer(commands[0], folder, work, saved_tensors, commands[1] if resume else None, pattern)


def verify_resume(trainer: Trainer, plan: KillPlan) -> tuple[bool, str]:
    """Run both runs, log how they compare, and return whether they are equal, and the verdict in words.

    Raises UserError if one fails.
    """
    import torch

    from hfgolf.commands.evidence import diff_runs, diff_table, verdict

    started_at = time.perf_counter()
    found = []
    if "GIL" in plan.faults:
        (trainer.work / "sitecustomize.py").write_text(_HOLD_GIL)  # Python imports it at its start
    try:
        with Signals("before the verdict; both runs were deleted"):
            with Session(trainer, trainer.command, "straight") as straight:
                straight.finish()
            if not trainer.folder.exists():
                raise UserError(f"--folder: the command wrote nothing to {trainer.folder}; name its folder.")
            if len(straight.losses) <= plan.kills:
                raise UserError(
                    f"--pattern: {straight.log} has {len(straight.losses)} steps with a loss; needed: more than "
                    f"--kills, {plan.kills}. Log more often, train longer, or describe the lines by --pattern."
                )
            last_step = max(straight.losses)
            logger.info("straight: %d steps in %.0f s", last_step, time.perf_counter() - started_at)
            found.append({"training losses": by_step(straight.losses)} | trainer.evidence(trainer.folder))
            shutil.move(trainer.folder, trainer.work / "straight")
            sessions = run_with_faults(trainer, straight, plan)
            losses = {step: loss for session in sessions for step, loss in session.losses.items()}  # the last counts
            found.append({"training losses": by_step(losses)} | trainer.evidence(trainer.folder))
            shutil.move(trainer.folder, trainer.work / "killed")
    except UserError:
        with contextlib.suppress(OSError):  # there may be none
            shutil.move(trainer.folder, trainer.work / "failed")
        raise
    except Stopped:
        for folder in (trainer.work, trainer.folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    diffs = diff_runs(*found)
    # one process on a CPU is bitwise reproducible; elsewhere the order of sums may vary
    is_exact = plan.num_processes == 1 and not torch.accelerator.is_available()
    is_equal, text = verdict(diffs, last_step, is_exact)
    if len(sessions) > 1 and not any(is_resumed(session, straight) for session in sessions[1:]):
        is_equal, text = False, "NOT RESUMED: each session began with the first step"
    logger.info("\n%s\n\n%s (%.0f s)", diff_table(diffs), text, time.perf_counter() - started_at)
    if is_equal:
        shutil.rmtree(trainer.work)
        return True, text
    if plan.kills:
        logger.info("use --kills 0 to check whether two straight runs are equal on this machine")
    logger.info("both runs are in %s", trainer.work)
    return False, text


def by_step(losses: dict[int, float]) -> dict[str, float]:
    return {f"step {step}": loss for step, loss in sorted(losses.items())}


def settings(resolved: ResolvedConfig, steps: int, folder: Path) -> dict[str, Any]:
    """Return the options of both runs on top of the config: short, logged at every step, without trackers or a push."""
    return {
        "run.output_dir": folder,
        "run.name": "run",
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
    """The processes of one start of a run, and what they log; leaving the `with` block kills them."""

    def __init__(self, trainer: Trainer, command: list[str], name: str) -> None:
        self.losses: dict[int, float] = {}
        """{step: loss}, as logged so far; of a step that is logged again, the last one."""
        self.gaps: list[float] = []
        """Seconds between one of them and the next."""
        self.log = trainer.work / f"{name}.log"
        self._pattern = re.compile(trainer.pattern)
        self._heard_at, self._unread = time.perf_counter(), ""
        self._seen: set[psutil.Process] = set()
        paths = os.pathsep.join(filter(None, (str(trainer.work), os.environ.get("PYTHONPATH"))))
        with self.log.open("wb") as output:
            self._process = psutil.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths},
                start_new_session=True,  # only this process gets Ctrl-C, and then kills them
            )
        self._reader = self.log.open(errors="replace", newline="")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._reader.close()

    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def last_step(self) -> int:
        """The last step in the log; 0 before the first."""
        return next(reversed(self.losses), 0)

    def read(self) -> None:
        """Read what the log has by now."""
        *lines, self._unread = (self._unread + self._reader.read()).split("\n")  # a kill may cut off the last line
        now = time.perf_counter()
        for found in filter(None, map(self._pattern.search, lines)):
            with contextlib.suppress(ValueError, TypeError):  # no numbers, or an optional group that is absent
                step, loss = int(found["step"]), float(found["loss"])
                self.gaps += [now - self._heard_at] if self.losses else []
                self._heard_at, self.losses[step] = now, loss

    def wait(self, is_due: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the end, and return False; or until something is due, and return True."""
        while self.is_running():
            self.read()
            if is_due():
                return True
            time.sleep(_POLL_SECONDS)
        self.read()
        return False

    def wait_for_step(self, step: float) -> bool:
        return self.wait(lambda: self.last_step >= step)

    def wait_for_save(self, folder: Path, num_files: int) -> bool:
        from hfgolf.commands.evidence import tensor_files

        before = tensor_files(folder).items()
        return self.wait(lambda: len(tensor_files(folder).items() - before) >= num_files)

    def strike(self, fault: str, patience_seconds: float) -> str:
        """Cause a fault in all processes, kill what then makes no progress, and return what happened."""
        for name in FAULTS[fault]:
            for process in self._processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(getattr(signal, name))
            if name == "SIGCONT":
                return f"SIGSTOP, and SIGCONT after {patience_seconds:.0f} s,"
            self._heard_at = time.perf_counter()
            self.wait(lambda: time.perf_counter() - self._heard_at > patience_seconds)
        hangs = bool(FAULTS[fault]) and self.is_running()
        self.kill()
        self.read()
        end = f"a hang, ended after {patience_seconds:.0f} s" if hangs else f"status {self._process.wait()}"
        return f"{fault} ({end})"

    def kill(self) -> None:
        """Kill -9 all processes of the session and wait for them."""
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes)

    def finish(self) -> None:
        """Wait for the end; if the run failed, log its last lines and raise UserError."""
        self.wait()
        status = self._process.wait()
        if status:
            lines = self.log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if line.startswith("error: ")]  # torchrun adds 20 lines after them
            logger.info("%s\n", "\n".join(errors or lines[-15:]))
            raise UserError(f"the {self.log.stem} run failed with status {status}; see its log, {self.log}.")

    def _processes(self) -> set[psutil.Process]:
        """Return the processes of the session, also those seen earlier, whose parent may have ended before them."""
        # not the process group: torchrun gives each of its processes its own
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen |= {self._process, *self._process.children(recursive=True)}
        return self._seen


def run_with_faults(trainer: Trainer, straight: Session, plan: KillPlan) -> list[Session]:
    """Start a run and disturb it until it is complete; return its sessions. One log line per fault.

    The faults are spread evenly over the steps. The straight run shows how long a step takes and how many files a save
    has, so that a fault can hit any moment of either.
    """
    from hfgolf.commands.evidence import tensor_files  # late: it imports torch

    moments = random.Random(plan.kill_seed)
    steps, folders = sorted(straight.losses), Counter(path.parent for path in tensor_files(trainer.work / "straight"))
    save_files = max(folders.values(), default=0)
    patience_seconds = min(max(3 * max(straight.gaps, default=0.0), _PATIENCE_SECONDS[0]), _PATIENCE_SECONDS[1])
    sessions: list[Session] = []
    with contextlib.ExitStack() as stack:
        for number in range(plan.kills + 1):
            if not sessions or not sessions[-1].is_running():
                sessions.append(stack.enter_context(next_session(trainer, len(sessions) + 1)))
            session, is_last = sessions[-1], number == plan.kills
            first, last = ((len(steps) - 1) * part // max(1, plan.kills) for part in (number, number + 1))
            target = math.inf if is_last else steps[moments.randint(first, last - 1)]
            is_due = session.wait_for_step(target)
            fault, where = plan.faults[number % len(plan.faults)], ""
            if is_due and fault == "SAVE" and save_files:
                num_files = moments.randint(1, save_files)
                is_due = session.wait_for_save(trainer.folder, num_files)
                where = f", with {num_files} of {save_files} files of a save begun"
            elif is_due:
                time.sleep(moments.uniform(0, statistics.median(straight.gaps)))
            if is_due:
                what = session.strike(fault, patience_seconds)
                what += f" after step {session.last_step}{where}"
            else:
                session.finish()
                what = "completed" if is_last else f"completed, before fault {number + 1}"
            logger.info("session %d: %s; %s", len(sessions), describe_start(sessions, straight), what)
            if not is_due:
                break
    return sessions


def next_session(trainer: Trainer, number: int) -> Session:
    """Start the trainer, from nothing as long as nothing was saved."""
    from hfgolf.commands.evidence import tensor_files

    command = trainer.command
    if number > 1 and trainer.resume:
        if tensor_files(trainer.folder):
            command = trainer.resume
        else:
            shutil.rmtree(trainer.folder, ignore_errors=True)
    return Session(trainer, command, f"killed-{number}")


def is_resumed(session: Session, straight: Session) -> bool:
    return not session.losses or min(session.losses) > min(straight.losses)


def describe_start(sessions: list[Session], straight: Session) -> str:
    if len(sessions) == 1:
        return "started"
    *_, before, session = sessions
    if not is_resumed(session, straight):
        return "started over"
    first = min(session.losses, default=math.inf)
    resumed_at = max(step for step in straight.losses if step < first)
    repeated = sum(resumed_at < step <= before.last_step for step in straight.losses)
    return f"resumed from step {resumed_at}, {repeated} repeated"
