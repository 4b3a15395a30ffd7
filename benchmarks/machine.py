"""What the benchmarks share: the machine's description in their JSON files, and readings of memory.

Owns the first fields of every --output file: hardware, versions and the benchmark's own facts. Does not know what is
measured. Memory is what torch's allocator handed out on a GPU, or this process's resident memory on a CPU (Linux).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any


def about(*packages: str, **facts: Any) -> dict[str, Any]:
    """Return the hardware, the versions of the given packages ("python" works too), hfgolf's commit, and the facts."""
    from hfgolf.hardware import fingerprint
    from hfgolf.run.provenance import git_commit

    versions = {package: version(package) for package in packages}
    return {"hardware": fingerprint(), "versions": versions | {"hfgolf": git_commit()}, **facts}


def version(package: str) -> str:
    if package == "python":
        return platform.python_version()
    # prefer __version__, because a wheel's metadata may lack torch's +cu130
    return getattr(importlib.import_module(package), "__version__", None) or importlib.metadata.version(package)


def write(path: Path, about: dict[str, Any], **figures: Any) -> None:
    path.write_text(json.dumps(about | figures, indent=1) + "\n")


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
