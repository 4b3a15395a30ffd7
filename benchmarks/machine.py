"""What the benchmarks share: their options, the machine's description in their JSON files, and readings of memory.

Owns the first fields of every --output file: hardware, load and versions. Does not know what is measured. Memory is
what torch's allocator handed out on a GPU, or this process's resident memory on a CPU (Linux).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def build_parser(description: str, repetitions: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks share: --output, and --repetitions with this default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repetitions is not None:
        parser.add_argument("--repetitions", type=int, default=repetitions, help=f"({repetitions})")
    parser.add_argument("--output", type=Path, help="JSON with all measurements")
    return parser


def write(path: Path | None, packages: Sequence[str], **figures: Any) -> None:
    """Write the figures, and what they were measured on: hardware, load, hfgolf's commit, versions of the packages.

    path: of the JSON file; None writes nothing. packages: "python" works, too.
    """
    if path is None:
        return
    from hfgolf.run.provenance import git_commit
    from hfgolf.system.hardware import cpu_cores, fingerprint

    versions = {package: _version(package) for package in packages} | {"hfgolf": git_commit()}
    machine = {"hardware": fingerprint(), "cores": cpu_cores(), "load": os.getloadavg()[0], "versions": versions}
    path.write_text(json.dumps(machine | figures, indent=1) + "\n")


def _version(package: str) -> str:
    if package == "python":
        return platform.python_version()
    # prefer __version__, because a wheel's metadata may lack torch's +cu130
    return getattr(importlib.import_module(package), "__version__", None) or importlib.metadata.version(package)


def held_bytes(on_gpu: bool) -> int:
    """Return the bytes in use now."""
    if on_gpu:
        import torch

        return torch.cuda.memory_allocated()
    return _resident_bytes("VmRSS")


def peak_bytes(on_gpu: bool) -> int:
    """Return the peak bytes in use since reset_peak()."""
    if on_gpu:
        import torch

        return torch.cuda.max_memory_allocated()
    return _resident_bytes("VmHWM")


def reset_peak(on_gpu: bool) -> None:
    if on_gpu:
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
