"""The proof that a run survives: once straight, once killed again and again, and nothing may differ.

Owns the two runs, the kills and the comparison. Runs them as a person would, as processes, and knows of them only what
they leave on the disk: metrics.jsonl, checkpoints and summary.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate.utils import load
from accelerate.utils.constants import OPTIMIZER_NAME, RNG_STATE_NAME
from safetensors.torch import load_file
from torch import Tensor

from hfgolf.command_line import ResolvedConfig
from hfgolf.errors import UserError
from hfgolf.train.checkpointer import EMA_NAME, STATE_NAME, WEIGHTS_NAME
from hfgolf.train.run_folder import RunFolder

logger = logging.getLogger(__name__)

TOLERANCE = 1e-5
# What several processes and GPUs promise: losses to TOLERANCE. The rest is only bounded loosely, relative to a tensor's
# largest value, to tell rounding from a state that is not this run's. What is not here must be equal to the last bit.
_TOLERATED = {
    "training losses": TOLERANCE,
    "validation losses": TOLERANCE,
    "train state": TOLERANCE,
    "gradient norms": 0.1,
    "weights": 0.1,
    "averaged weights": 0.1,
    "optimizer": 0.1,
}
_NAMES = {WEIGHTS_NAME: "weights", EMA_NAME: "averaged weights", f"{OPTIMIZER_NAME}.bin": "optimizer"}
_NAMES |= {STATE_NAME: "train state"}
# Of the clock and the session, not of the run: accelerate's `step` counts the micro-batches since its process began.
_NOT_COMPARED = {"train state": ("elapsed_seconds", "wandb_id"), RNG_STATE_NAME: ("step",)}
_POLL_SECONDS = 0.001  # a save of a small model takes some hundredths of a second

Contents = dict[str, Any]
"""By name what is compared bit by bit: tensors and plain Python values."""


@dataclass(frozen=True)
class Plan:
    """How long, and how often to kill."""

    steps: int
    """Optimizer steps of each run."""
    kills: int
    """Every second one aims at a save."""
    kill_seed: int
    num_processes: int


@dataclass(frozen=True)
class Finding:
    """What comparing one thing gave."""

    what: str
    digests: tuple[str, str]
    """The sha256 of names, dtypes, shapes and bytes, straight and killed."""
    differences: dict[str, float]
    """By name the relative difference of what is not bitwise equal; infinity where it is no matter of size."""


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
        with Session(command, straight) as session:
            session.finish()
        logger.info("straight: %d steps in %.0f s", plan.steps, time.perf_counter() - started_at)
        run_with_kills(command, killed, plan, step_seconds=_step_seconds(straight))
    except KeyboardInterrupt:
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
    told: dict[str, Any] = {
        "run.output_dir": folder,
        "train.resume": "auto",
        "train.max_steps": steps,
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
    return told if "train.compile" in resolved.sources else told | {"train.compile": "false"}


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
        with contextlib.suppress(OSError, ValueError, IndexError):  # it is being written
            return json.loads(self._metrics.read_bytes().splitlines()[-1])["step"]
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
            logger.info("%s\n", "\n".join(self.log.read_text(errors="replace").splitlines()[-15:]))
            raise UserError(f"the {self.log.parent.name} run ended with status {status}; all of its log: {self.log}.")

    def _written(self) -> tuple[int, int] | None:
        """Return what tells whether metrics.jsonl was written to: a resume that drops rows writes another file."""
        if not self._metrics.exists():
            return None
        status = self._metrics.stat()
        return status.st_ino, status.st_size


def run_with_kills(command: list[str], run: RunFolder, plan: Plan, step_seconds: float) -> None:
    """Start, kill and start again, saying where it was hit and what was lost, and at last let it finish.

    The steps are divided evenly over the kills, so that each has its part of the run. step_seconds: how long one takes.
    """
    moments = random.Random(plan.kill_seed)
    inside_due, kill = 0, ""
    killed_at = 0
    for number in range(1, plan.kills + 2):
        with Session(command, run) as session:
            if number <= plan.kills:
                first, last = ((plan.steps - 1) * part // plan.kills for part in (number - 1, number))
                target = moments.randint(first + 1, last)
                inside_due += number % 2 == 0
                if inside_due:
                    _wait_for_save(session, run, target, num_files=moments.randint(1, 6))
                else:
                    _wait_for_step(session, target)
                    time.sleep(moments.uniform(0, step_seconds))
            is_over = number > plan.kills or not session.kill()
            if is_over:
                session.finish()
        if kill:
            resumed_step = session.resumed_step()
            logger.info("%s; resumed from step %d, %d steps made again", kill, resumed_step, killed_at - resumed_step)
        if is_over:
            break
        killed_at, inside = _last_step(run), _save_under_way(run)
        kill = f"kill {number}: after step {killed_at}, {inside or 'not inside a save'}"
        kill += ", though it aimed at one: too quick" if inside_due and not inside else ""
        inside_due -= bool(inside_due and inside)
    if number <= plan.kills:
        logger.info("kill %d and later ones found the run complete", number)


def evidence(run: RunFolder) -> dict[str, Contents]:
    """Return all that must be equal in two runs, by what it is: from its rows step by step, then its last checkpoint."""
    columns = {"sample ids": "sample_hashes", "training losses": "train_losses", "gradient norms": "grad_norms"}
    found: dict[str, dict[str, Any]] = {what: {} for what in (*columns, "validation losses")}
    for row in _rows(run):
        for what, column in columns.items():
            start = row["step"] - len(row[column]) + 1
            for step, value in enumerate(row[column], start):
                found[what].setdefault(f"step {step}", []).append(value)  # twice would be wrong too
        for column in ("val_loss", "val_loss_ema"):
            if row.get(column) is not None:
                found["validation losses"].setdefault(f"step {row['step']}", []).append(row[column])
    summary = json.loads(run.summary.read_text())
    found["validation losses"].setdefault(f"step {summary['step']}", []).append(summary["val_loss"])
    checkpoint = run.checkpoints / "latest"
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            what = _NAMES.get(path.name, str(path.relative_to(checkpoint)).removesuffix(".pkl").replace("_", " "))
            left_out = next((keys for name, keys in _NOT_COMPARED.items() if name in (what, path.stem[:-2])), ())
            content = _read(path)
            if isinstance(content, dict):
                content = {key: value for key, value in content.items() if key not in left_out}
            found[what] = dict(_leaves(content))
    return found


def compare(straight: dict[str, Contents], killed: dict[str, Contents]) -> list[Finding]:
    """Compare two runs' evidence thing by thing, by content and to the last bit."""
    findings = []
    for what in straight | killed:
        pair = straight.get(what, {}), killed.get(what, {})
        in_one = {name: math.inf for name in pair[0] | pair[1] if name not in pair[0] or name not in pair[1]}
        in_both = {
            name: relative_difference(pair[0][name], pair[1][name])
            for name in pair[0]
            if name in pair[1] and _bytes(pair[0][name]) != _bytes(pair[1][name])
        }
        findings.append(Finding(what, (_digest(pair[0]), _digest(pair[1])), in_both | in_one))
    return findings


def relative_difference(a: Any, b: Any) -> float:
    """Return the largest difference between two numbers, lists or tensors as a share of the largest value in them.

    Infinity where it says nothing: another shape or dtype, whole numbers, values that are not finite, no numbers.
    """
    a, b = (torch.tensor(x, dtype=torch.float64) if _is_floats(x) else x for x in (a, b))
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype != b.dtype or a.shape != b.shape:
        return math.inf
    if not a.is_floating_point():
        return math.inf
    a, b = a.double(), b.double()
    difference = ((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max())).item()
    return difference if math.isfinite(difference) else math.inf


def table(findings: list[Finding]) -> str:
    """Return the findings as lines for a person."""
    lines = [f"{'what':<20}{'straight':<16}{'killed':<16}equal"]
    for finding in findings:
        largest = max(finding.differences.values(), default=0.0)
        size = f"largest relative difference {largest:.1e}" if math.isfinite(largest) else "not at all"
        outcome = f"no: {len(finding.differences)} differ, {size}" if finding.differences else "yes"
        lines.append(f"{finding.what:<20}{finding.digests[0]:<16}{finding.digests[1]:<16}{outcome}")
    return "\n".join(lines)


def verdict(findings: list[Finding], steps: int, is_exact: bool) -> tuple[bool, str]:
    """Say whether the runs are equal, and how much so. is_exact: nothing but bitwise will do."""
    if not any(finding.differences for finding in findings):
        return True, "bitwise identical"
    broken = []
    for finding in findings:
        bound = 0.0 if is_exact else _TOLERATED.get(finding.what, 0.0)
        for name, difference in finding.differences.items():
            if is_exact or difference > bound:
                step = int(name.removeprefix("step ")) if name.startswith("step ") else steps
                broken.append((step, finding.what if name.startswith("step ") else f"{finding.what}, {name}"))
    if not broken:
        return True, f"equal within {TOLERANCE:.0e}: sample ids and random states bitwise, losses to rounding"
    first = min(step for step, _ in broken)
    return False, f"DIFFERENT at step {first}: {'; '.join([what for step, what in broken if step == first][:3])}"
