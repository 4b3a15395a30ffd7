"""Helpers for the fault tests: damage a checkpoint, compare bit for bit, and run in processes that may be killed.

A fork server that has already imported torch starts each process in under a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import load
from safetensors.torch import load_file

import hfgolf
from hfgolf.checkpoint.identity import RUN_NAME, comparable
from hfgolf.checkpoint.store import verify
from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.system.command import run_command
from hfgolf.train import loop

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["hfgolf.train.loop", "datasets", "tokenizers", "pyarrow", "transformers.generation"])


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def remove(file: Path) -> None:
    file.unlink()


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rewrite_manifest(checkpoint: Path, **changes: Any) -> None:
    """Make the manifest match the folder, like an attacker who changed the files; `changes` replace keys."""
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    contents = {p.name: p.read_bytes() for p in checkpoint.iterdir() if p != file}
    manifest["files"] = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in contents.items()}
    file.write_text(json.dumps(manifest | changes))


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the rows and events of a run; every line of metrics.jsonl must be complete, and strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "event" not in line]


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events except samples: what went wrong and what was done about it."""
    return [line for line in lines(folder) if line.get("event", "sample") != "sample"]


def column(folder: Path, name: str) -> list[Any]:
    """Return the values of a per-step column for every step of the run."""
    return [value for row in rows(folder) for value in row[name]]


def losses(folder: Path) -> list[float]:
    return column(folder, "train_losses")


def assert_same_course(ours: Path, theirs: Path, of_norms: float = 1e-5) -> None:
    """Assert that two runs have the same losses, norms and evaluations, up to the order of sums."""
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    for name in ("grad_norm", "val_loss", *({"val_loss_ema"} & rows(theirs)[-1].keys())):
        one, other = ([row[name] for row in rows(folder) if row.get(name)] for folder in (ours, theirs))
        assert len(one) >= 2 and one == pytest.approx(other, rel=of_norms if name == "grad_norm" else 1e-5), name


def valid_steps(checkpoints: Path) -> list[int]:
    """Return the steps of the checkpoints in the folder; all of them must be valid."""
    return sorted(verify(path)["step"] for path in checkpoints.glob("step-*"))


def read(file: Path) -> Any:
    if file.suffix == ".safetensors":
        return load_file(file)
    if file.suffix in (".bin", ".pkl", ".pt"):
        return load(file)
    return json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()


def differences(one: Path, other: Path) -> list[str]:
    """Name the files that differ between two checkpoints, ignoring values that count from the last start."""
    names = {path.name for folder in (one, other) for path in folder.iterdir()} - {"manifest.json"}
    different = []
    for name in sorted(names):
        a, b = read(one / name), read(other / name)
        if name == "train_state.json":
            a |= {"elapsed_seconds": 0, "seconds": {}}
            b |= {"elapsed_seconds": 0, "seconds": {}}
        if name == RUN_NAME:
            a, b = comparable(a), comparable(b)
        if name.startswith("random_states"):
            a["step"] = b["step"] = 0  # accelerate's count of micro-batches
        if not same(a, b):
            different.append(name)
    return different


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def before_step(actions: dict[int, Callable[[Any], None]]) -> Callable[..., Any]:
    """Return a train_step that calls actions[n] with the Run before the n-th step, once the last save has ended."""
    real_step = loop.train_step

    def step(run: Any, total_steps: float) -> Any:
        if run.state.step + 1 in actions:
            run.checkpoints.wait()
            actions[run.state.step + 1](run)
        return real_step(run, total_steps)

    return step


def start(resolved: ResolvedConfig, output: Path, pause_seconds: float = 0.0) -> BaseProcess:
    """Train in a separate process, like scripts/train.py, with pauses between the steps.

    Its output goes to the file `output`.
    """
    process = FORKING.Process(target=train_here, args=(resolved, output, pause_seconds))
    process.start()
    return process


def train_on_two(arguments: list[str], output: Path, prepare: Callable[[], None] | None = None) -> None:
    """Train on two processes, like `torchrun scripts/train.py`; they write to the files `output` and `output1`.

    prepare: called in each process before it trains; a module-level function, because it is pickled.
    Raises AssertionError if a process fails.
    """
    processes = start_two(arguments, output, prepare)
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0], output.read_text()


def start_two(
    arguments: list[str], output: Path, prepare: Callable[[], None] | None = None
) -> tuple[BaseProcess, BaseProcess]:
    """Start the processes that train_on_two waits for; return them by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = (
        FORKING.Process(target=_train_on_rank, args=(rank, port, arguments, output, prepare)) for rank in (0, 1)
    )
    first.start()
    second.start()
    return first, second


def _train_on_rank(
    rank: int, port: int, arguments: list[str], output: Path, prepare: Callable[[], None] | None
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    if prepare:
        prepare()
    train_here(load_config(arguments), output.with_name(f"{output.name}{rank or ''}"))


def train_here(resolved: ResolvedConfig, output: Path, pause_seconds: float = 0.0) -> None:
    """Train in this process, which then ends as the command does; what it says goes to the file `output`."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # loader workers must be children of this process
    real_step = loop.train_step

    def slow_step(run: Any, total_steps: float) -> Any:
        time.sleep(pause_seconds if run.state.step else 0)
        return real_step(run, total_steps)

    loop.train_step = slow_step

    def main() -> None:
        hfgolf.train(resolved)

    with output.open("a") as said, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        logging.basicConfig(stream=said, level=logging.INFO, format="%(message)s")
        run_command(main)
