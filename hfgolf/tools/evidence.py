"""Whether two runs are the same run: their rows step by step, and all that is in their last checkpoints.

Owns what is compared, and what rounding may excuse. Compares by content and not by file: names, dtypes, shapes and
bytes. Knows of a run only what it leaves on the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import load
from accelerate.utils.constants import OPTIMIZER_NAME, RNG_STATE_NAME
from safetensors.torch import load_file
from torch import Tensor

from hfgolf.checkpoint.contents import EMA_NAME, STATE_NAME, WEIGHTS_NAME, leaves
from hfgolf.checkpoint.identity import RUN_NAME, comparable
from hfgolf.checkpoint.store import newest_first
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_rows

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
_NAMES = {
    WEIGHTS_NAME: "weights",
    EMA_NAME: "averaged weights",
    f"{OPTIMIZER_NAME}.bin": "optimizer",
    STATE_NAME: "train state",
    RUN_NAME: "config and text",
}

_STATE_SUFFIXES = (".safetensors", ".bin", ".pkl", ".pt")

Contents = dict[str, Any]
"""By name what is compared bit by bit: tensors and plain Python values."""


@dataclass(frozen=True)
class Finding:
    """What comparing one thing gave."""

    what: str
    digests: tuple[str, str]
    """The sha256 of names, dtypes, shapes and bytes, straight and killed."""
    differences: dict[str, float]
    """By name the relative difference of what is not bitwise equal; infinity where it is no matter of size."""


def evidence(run: RunFolder) -> dict[str, Contents]:
    """Return all that must be equal in two runs, by what it is: its rows step by step, then its last checkpoint."""
    columns = {"sample ids": "sample_hashes", "training losses": "train_losses", "gradient norms": "grad_norms"}
    found: dict[str, Contents] = {what: {} for what in (*columns, "validation losses")}
    for row in read_rows(run.metrics):
        for what, column in columns.items():
            for step, value in enumerate(row[column], row["step"] - len(row[column]) + 1):
                found[what].setdefault(f"step {step}", []).append(value)  # a step that is there twice will differ
        values = [row[column] for column in ("val_loss", "val_loss_ema") if row.get(column) is not None]
        if values:
            found["validation losses"].setdefault(f"step {row['step']}", []).extend(values)
    summary = json.loads(run.summary.read_text())  # on the whole validation part
    found["validation losses"].setdefault(f"step {summary['step']}", []).append(summary["val_loss"])
    checkpoint = newest_first(run.checkpoints)[0]
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"):
        name = str(path.relative_to(checkpoint))
        if path.suffix not in _STATE_SUFFIXES and name not in (STATE_NAME, RUN_NAME):
            of_shards = path.parent != checkpoint
            found.setdefault("shards" if of_shards else "files beside weights", {})[name] = path.read_bytes()
            continue
        found[_NAMES.get(name, name.removesuffix(".pkl").replace("_", " "))] = {
            leaf: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for leaf, value in leaves(_read(path))
        }
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
    difference = (a - b).abs().max()
    if difference == 0:  # 0.0 and -0.0
        return 0.0
    share = (difference / torch.maximum(a.abs().max(), b.abs().max())).item()
    return share if math.isfinite(share) else math.inf


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
    broken: dict[int, dict[str, list[str]]] = {}  # by step and what
    for finding in findings:
        for name, difference in finding.differences.items():
            if is_exact or difference > _TOLERATED.get(finding.what, 0):
                step = int(name.removeprefix("step ")) if name.startswith("step ") else steps
                broken.setdefault(step, {}).setdefault(finding.what, []).append(name)
    if not broken:
        return True, f"equal within {TOLERANCE:.0e}: sample ids and random states bitwise, losses up to rounding"
    first = min(broken)
    parts = [what if names == [f"step {first}"] else f"{what} ({names[0]})" for what, names in broken[first].items()]
    return False, f"DIFFERENT at step {first}: {', '.join(parts)}"


def _read(path: Path) -> Any:
    """Return what a file of a checkpoint holds, less what is of the clock and the session and not of the run."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.name == STATE_NAME:
        state = json.loads(path.read_text())
        return {key: value for key, value in state.items() if key not in ("elapsed_seconds", "seconds", "wandb_id")}
    if path.name == RUN_NAME:
        return comparable(json.loads(path.read_text()))
    content = load(path, map_location="cpu")
    if path.name.startswith(RNG_STATE_NAME):
        del content["step"]  # the micro-batches since the process began
    return content


def _bytes(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    return f"{value.dtype} {tuple(value.shape)} ".encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(contents: Contents) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(contents.items()):
        digest.update(f"{name}: ".encode() + _bytes(value))
    return digest.hexdigest()[:12]


def _is_floats(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and all(isinstance(x, float) for x in value))
