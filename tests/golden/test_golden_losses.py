"""Ten losses and gradient norms of a tiny run, recorded for good: a code change must not change what hfgolf computes.

They must be bitwise equal on the machine that recorded them, and within RELATIVE_TOLERANCE on any other. (AVX2 or SSE4
kernels instead of AVX-512 change them by at most 2.1e-7.) If a change is meant to alter them, explain why in the commit
and record them again:

    python tests/golden/test_golden_losses.py
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parent / "losses.json"
OPTIMIZERS = ("muon", "adamw")
RELATIVE_TOLERANCE = 1e-6
SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"


def train_ten_steps(optimizer: str, folder: Path, train: Callable[[list[str]], object]) -> dict[str, list[float]]:
    """Return the losses (nats per token) and gradient norms of ten steps: fp32, one thread, dropout on.

    train: runs with a command line, on the CPU.
    """
    text = folder / "text.txt"
    text.write_text("".join(f"{n} times {n % 13} is {n * (n % 13)}.\n" for n in range(2500)), encoding="utf-8")
    settings = {
        "run.name": optimizer,
        "run.output_dir": folder,
        "run.seed": 1,
        "data.source": "files",
        "data.files": text,
        "data.split": "contiguous",
        "data.cache_dir": folder / "cache",
        "tokenizer.kind": "byte",
        "model.hidden_size": 64,
        "model.num_hidden_layers": 2,
        "model.num_attention_heads": 4,
        "model.dropout": 0.1,
        "model.induction_heads": 0,  # their start takes LAPACK, which rounds as it likes
        "batch.sequence_length": 64,
        "batch.tokens_per_step": 1024,
        "batch.micro_batch_size": 8,
        "optim.name": optimizer,
        "optim.learning_rate": {"muon": 0.02, "adamw": 0.003}[optimizer],
        "schedule.warmup_steps": 2,
        "train.max_steps": 10,
        "train.mixed_precision": "no",
        "train.cpu_threads": 1,
        "train.compile": "false",
        "train.eval_every_steps": 10,
    }
    train([f"--{key}={value}" for key, value in settings.items()])
    lines = (folder / optimizer / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "event" not in row]
    return {column: [value for row in rows for value in row[column]] for column in ("train_losses", "grad_norms")}


def machine() -> dict[str, str]:
    """Return what the last bits of a loss depend on."""
    import torch
    import transformers

    processor = "unknown"
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        fields = (line.partition(":") for line in lines)
        named = {name.strip(): value.strip() for name, _, value in reversed(list(fields))}
        keys = ("model name", "cpu family", "model", "stepping")
        processor = " ".join(named.get(key, "") for key in keys)
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "processor": processor,
        "instructions": capability,
        "architecture": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_losses_and_gradient_norms_are_those_recorded(optimizer, run, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    now = train_ten_steps(optimizer, tmp_path, run)
    for column, values in recorded["runs"][optimizer].items():
        assert len(values) == 10
        if machine() == recorded["machine"]:
            assert now[column] == values, f"{column} differ in their last bits"
        assert now[column] == pytest.approx(values, rel=RELATIVE_TOLERANCE, abs=0), column


def test_the_recorded_losses_are_those_of_a_model_that_learns():
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
    for optimizer in OPTIMIZERS:
        losses = recorded[optimizer]["train_losses"]
        assert losses[0] == pytest.approx(math.log(257), abs=0.1)
        assert losses[-1] < losses[0] - 0.5


def record() -> None:
    """Write losses.json, each run in a process of its own."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}

    def train(arguments: list[str]) -> None:
        subprocess.run([sys.executable, str(SCRIPT), *arguments], check=True, env=environment)

    runs: dict[str, Any] = {}
    for optimizer in OPTIMIZERS:
        with tempfile.TemporaryDirectory() as folder:
            runs[optimizer] = train_ten_steps(optimizer, Path(folder), train)
    content = {"command": "python tests/golden/test_golden_losses.py", "machine": machine(), "runs": runs}
    RECORDED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
