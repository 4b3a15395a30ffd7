"""What a benchmark writes about the machine beside its figures, and how it reads the most memory that it took.

Owns how the JSON files of --output begin: hardware, versions, then what else a benchmark has to say. Does not know what
is measured. The memory is a GPU's as torch's allocator gave it out, or the resident memory of this process (Linux).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any


def about(*packages: str, **facts: Any) -> dict[str, Any]:
    """Return the hardware, the versions of these packages ("python" is one, too), hfgolf's commit, and the facts."""
    from hfgolf.hardware import fingerprint
    from hfgolf.run.provenance import git_commit

    versions = {package: version(package) for package in packages}
    return {"hardware": fingerprint(), "versions": versions | {"hfgolf": git_commit()}, **facts}


def version(package: str) -> str:
    if package == "python":
        return platform.python_version()
    # its own word, where it has one: the metadata of a wheel may lack torch's +cu130
    return getattr(importlib.import_module(package), "__version__", None) or importlib.metadata.version(package)


def write(path: Path, about: dict[str, Any], **figures: Any) -> None:
    path.write_text(json.dumps(about | figures, indent=1) + "\n")


def held_bytes(on_gpu: bool) -> int:
    """Return the memory that is taken now."""
    if on_gpu:
        import torch

        return torch.cuda.memory_allocated()
    return _resident_bytes("VmRSS")


def peak_bytes(on_gpu: bool) -> int:
    """Return the most memory that was taken since forget_peak()."""
    if on_gpu:
        import torch

        return torch.cuda.max_memory_allocated()
    return _resident_bytes("VmHWM")


def forget_peak(on_gpu: bool) -> None:
    if on_gpu:
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of resident memory starts anew


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
