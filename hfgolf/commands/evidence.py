"""Check whether two runs are equal: their rows, step by step, and everything in their last checkpoints.

Owns what is compared and how much rounding is tolerated. Compares contents, not files: names, dtypes, shapes and bytes.
Knows only what a run leaves on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from accelerate.utils import load
from accelerate.utils.constants import OPTIMIZER_NAME, RNG_STATE_NAME
from safetensors.torch import load_file
from torch import Tensor

from hfgolf.checkpoint.contents import EMA_NAME, STATE_NAME, WEIGHTS_NAME, leaves
from hfgolf.checkpoint.identity import RUN_NAME, comparable
from hfgolf.checkpoint.sharded import OPTIMIZER_FOLDER
from hfgolf.checkpoint.store import newest_first
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_rows

TOLERANCE = 1e-5
# On several processes or a GPU, losses must agree to TOLERANCE. The other bounds are loose, relative to a tensor's
# largest value; they only distinguish rounding from the state of another run. Everything else must be bitwise equal.
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

_TENSOR_SUFFIXES = (".safetensors", ".bin", ".pkl", ".pt", ".pth")

Contents = dict[str, Any]
"""{name: a tensor or a plain Python value}, compared bit by bit."""


@dataclass(frozen=True)
class Diff:
    """The result of comparing one kind of content, such as the weights."""

    what: str
    digests: tuple[str, str]
    """The sha256 of names, dtypes, shapes and bytes: (straight, killed)."""
    differences: dict[str, float]
    """{name: relative difference} of what is not bitwise equal; infinity if the difference has no size."""


def evidence(run: RunFolder) -> dict[str, Contents]:
    """Return everything that must be equal in two runs, by kind: rows step by step, then the last checkpoint."""
    columns = {"sample ids": "sample_hashes", "training losses": "train_losses", "gradient norms": "grad_norms"}
    found: dict[str, Contents] = {what: {} for what in (*columns, "validation losses")}
    for row in read_rows(run.metrics):
        for what, column in columns.items():
            for step, value in enumerate(row[column], row["step"] - len(row[column]) + 1):
                found[what].setdefault(f"step {step}", []).append(value)  # a list, so that a repeated step differs
        values = [row[column] for column in ("val_loss", "val_loss_ema") if row.get(column) is not None]
        if values:
            found["validation losses"].setdefault(f"step {row['step']}", []).extend(values)
    summary = json.loads(run.summary.read_text())  # its loss is that of the last evaluation
    found["validation losses"].setdefault(f"step {summary['step']}", []).append(summary["val_loss"])
    checkpoint = newest_first(run.checkpoints)[0]
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"):
        name = str(path.relative_to(checkpoint))
        if path.suffix not in _TENSOR_SUFFIXES and name not in (STATE_NAME, RUN_NAME):
            is_shard = path.parent != checkpoint
            found.setdefault("shards" if is_shard else "other files", {})[name] = path.read_bytes()
            continue
        is_shard = path.parent.name == OPTIMIZER_FOLDER
        what = "optimizer" if is_shard else _NAMES.get(name, name.removesuffix(".pkl").replace("_", " "))
        prefix = f"{path.stem}." if is_shard else ""
        found.setdefault(what, {}).update({f"{prefix}{leaf}": value for leaf, value in _contents(path).items()})
    return found


def tensor_files(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return {file of tensors in a folder, at any depth: (inode, size, time of its last change)}."""
    found = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names if name.endswith(_TENSOR_SUFFIXES)):
            with contextlib.suppress(OSError):  # a trainer may rename or delete it meanwhile
                status = path.stat()
                found[path] = status.st_ino, status.st_size, status.st_mtime_ns
    return found


def saved_tensors(folder: Path) -> dict[str, Contents]:
    """Return what any trainer saved last, by file: the newest file of tensors and those beside it."""
    files = tensor_files(folder)
    newest = max(files, key=lambda path: files[path][2], default=folder)
    last = sorted(path for path in files if path.parent == newest.parent)
    return {_NAMES.get(path.name, path.name): _contents(path) for path in last}


def diff_runs(straight: dict[str, Contents], killed: dict[str, Contents]) -> list[Diff]:
    """Compare two runs' evidence kind by kind, bit by bit."""
    diffs = []
    for what in straight | killed:
        pair = straight.get(what, {}), killed.get(what, {})
        in_one = {name: math.inf for name in pair[0] | pair[1] if name not in pair[0] or name not in pair[1]}
        in_both = {
            name: relative_difference(pair[0][name], pair[1][name])
            for name in pair[0]
            if name in pair[1] and _bytes(pair[0][name]) != _bytes(pair[1][name])
        }
        diffs.append(Diff(what, (_digest(pair[0]), _digest(pair[1])), in_both | in_one))
    return diffs


def relative_difference(a: Any, b: Any) -> float:
    """Return the largest difference between two numbers, lists or tensors, relative to their largest value.

    Infinity if that is meaningless: different shapes or dtypes, integers, nonfinite values, or no numbers.
    """
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        values = [x if isinstance(x, list) else [x] for x in (a, b)]
        if not all(isinstance(number, float) for number in itertools.chain(*values)):
            return math.inf
        a, b = (torch.tensor(x, dtype=torch.float64) for x in values)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return math.inf
    if not a.is_floating_point():
        return math.inf
    a, b = a.double(), b.double()
    difference = (a - b).abs().max()
    share = (difference / torch.maximum(a.abs().max(), b.abs().max())).item() if difference else 0.0  # 0.0 and -0.0
    return share if math.isfinite(share) else math.inf


def diff_table(diffs: list[Diff]) -> str:
    """Format the diffs as a table."""
    lines = [f"{'what':<20}{'straight':<16}{'killed':<16}equal"]
    for diff in diffs:
        largest = max(diff.differences.values(), default=0.0)
        size = f"largest relative difference {largest:.1e}" if math.isfinite(largest) else "not comparable"
        outcome = f"no: {len(diff.differences)} differ, {size}" if diff.differences else "yes"
        lines.append(f"{diff.what:<20}{diff.digests[0]:<16}{diff.digests[1]:<16}{outcome}")
    return "\n".join(lines)


def verdict(diffs: list[Diff], steps: int, is_exact: bool) -> tuple[bool, str]:
    """Return whether the runs are equal, and a description. is_exact: require bitwise equality."""
    if not any(diff.differences for diff in diffs):
        return True, "bitwise identical"
    broken: dict[int, dict[str, list[str]]] = {}  # {step: {what: names}}
    for diff in diffs:
        tolerance = _TOLERATED.get(diff.what, _TOLERATED["weights"] if diff.what.endswith(_TENSOR_SUFFIXES) else 0)
        for name, difference in diff.differences.items():
            if is_exact or difference > tolerance:
                step = int(name.removeprefix("step ")) if name.startswith("step ") else steps
                broken.setdefault(step, {}).setdefault(diff.what, []).append(name)
    if not broken:
        return True, f"equal within {TOLERANCE:.0e}: sample ids and random states bitwise, losses up to rounding"
    first = min(broken)
    parts = [what if names == [f"step {first}"] else f"{what} ({names[0]})" for what, names in broken[first].items()]
    return False, f"DIFFERENT at step {first}: {', '.join(parts)}"


def _contents(path: Path) -> Contents:
    """Return the tensors and values in a file; its bytes if they can't be read without running code."""
    try:
        content = _read(path)
    except (EOFError, UnpicklingError, RuntimeError, ValueError):
        content = path.read_bytes()
    named = leaves(content)
    return {leaf: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for leaf, value in named}


def _read(path: Path) -> Any:
    """Return the content of a checkpoint's file, without what depends on the clock or the session."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.name == STATE_NAME:
        state = json.loads(path.read_text())
        return {key: value for key, value in state.items() if key not in ("elapsed_seconds", "seconds", "wandb_id")}
    if path.name == RUN_NAME:
        return comparable(json.loads(path.read_text()))
    content = load(path, map_location="cpu")
    if path.name.startswith(RNG_STATE_NAME):
        content.pop("step", None)  # micro-batches since this process started
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
