"""What machine and process this is, and what follows from it: precision, threads, seeds, the run's metadata.

Owns the answers to "which precision, how many threads, which commit, which versions". Does not know the loop.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from hfgolf.command_line import ResolvedConfig
from hfgolf.errors import UserError
from hfgolf.optim.muon import fast_product_dtype

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "wandb", "numpy")


def resolve_precision(resolved: ResolvedConfig) -> ResolvedConfig:
    """Decide train.mixed_precision where it is null: as `accelerate` was told, else bf16 where it is fast, else no.

    Raises UserError for a precision that accelerate would pass over in silence (fp16 on a CPU) or does not exist here.
    """
    if resolved.config.train.mixed_precision is None:
        told = _precision_told_to_accelerate()
        is_fast = fast_product_dtype(torch.device(_device_type())) == torch.bfloat16
        source, choice = ("accelerate", told) if told else ("auto", "bf16" if is_fast else "no")
        resolved = resolved.resolve(source, train__mixed_precision=choice)
    precision = resolved.config.train.mixed_precision
    if precision not in ("no", "bf16", "fp16") or (precision == "fp16" and _device_type() == "cpu"):
        where = resolved.sources["train.mixed_precision"]
        raise UserError(
            f"train.mixed_precision: {precision} (from {where}) does not run on this device, {device_name()};"
            f" allowed: no, bf16{'' if _device_type() == 'cpu' else ', fp16'}."
        )
    return resolved


def _device_type() -> str:
    from accelerate import PartialState

    return PartialState().device.type


def _precision_told_to_accelerate() -> str | None:
    """Return the precision a person chose for `accelerate launch`, None if nobody did.

    Without `accelerate config` and without a flag, launch exports ACCELERATE_MIXED_PRECISION=no all the same: that
    "no" is told from a chosen one by the launcher's own command line and by the default config file.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision != "no":
        return precision
    from accelerate.commands.config.config_args import default_config_file

    parent = psutil.Process().parent()
    words = " ".join(parent.cmdline()) if parent else ""
    is_chosen = "--mixed_precision" in words or "--config_file" in words or os.path.isfile(default_config_file)
    return precision if is_chosen else None


def set_cpu_threads(threads: int | str, local_processes: int) -> int:
    """Set torch's CPU threads and return their number; "auto" shares this process's cores over the local processes.

    `accelerate launch` sets OMP_NUM_THREADS=1 on a machine without a GPU, which would leave the other cores idle.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = max(1, cores // local_processes) if threads == "auto" else int(threads)
    torch.set_num_threads(number)
    return number


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy, torch and CUDA; called before anything is built, so that all ranks build equal weights.

    deterministic: deterministic kernels, and an error where an operation has none (torch.use_deterministic_algorithms;
    cuBLAS needs its workspace setting for it).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds CUDA too
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def run_metadata(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return what one needs to repeat and to judge a run: commit, command, versions, hardware, seed."""
    return {
        "commit": git_commit(),
        "command": [Path(sys.executable).name, *sys.argv],
        "seed": resolved.config.run.seed,
        "python": platform.python_version(),
        "packages": {"hfgolf": importlib.metadata.version("hfgolf")} | {p: _version(p) for p in _PACKAGES},
        "hardware": hardware(),
    }


def hardware() -> dict[str, Any]:
    """Return a fingerprint of this machine: device, cores, memory, operating system."""
    fingerprint: dict[str, Any] = {
        "device": device_name(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        fingerprint |= {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
    return fingerprint


def device_name() -> str:
    """Return the accelerator's name, or the CPU's."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()


def git_commit() -> str | None:
    """Return the commit hfgolf runs from, marked `-dirty` where files differ; HFGOLF_COMMIT (an image) else None."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("HFGOLF_COMMIT")


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":")[1].split())
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
