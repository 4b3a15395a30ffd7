"""How much memory this machine has left for us.

Anything in hfgolf may import it: the tokens, the checkpoints and the micro-batch must agree on what is free.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import psutil
import torch


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that are free on the device: the GPU's, or for a CPU those of RAM that a container may use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(min(psutil.virtual_memory().available, free_cgroup_bytes()))


def free_cgroup_bytes(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes that the control groups of this process leave it; infinity if none limits it.

    In each group and those above it: the limit less what is used, without the file cache, which the kernel gives back.
    Version 2 has one tree (docs.kernel.org/admin-guide/cgroup-v2), version 1 one for memory. In a container the path is
    often that of the host, and the container's own group is the root.
    """
    try:
        lines = process.read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    free = math.inf
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        tree, limit, used, cache = (
            (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else (root, "memory.max", "memory.current", "inactive_file")
        )
        own = tree / path.lstrip("/")
        for folder in (own, *(parent for parent in own.parents if parent == tree or tree in parent.parents)):
            with suppress(OSError, ValueError):  # no such group here, or "max": no limit
                most = int((folder / limit).read_text())
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                taken = int((folder / used).read_text()) - int(statistics.get(cache, 0))
                free = min(free, max(0, most - taken))
    return free
