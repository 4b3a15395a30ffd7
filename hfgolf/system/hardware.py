"""What this machine is and can do: memory, cores, fast bf16, device names and peak FLOP/s. Knows no model and no run.

Tokens, checkpoints, micro-batch and MFU must agree on these facts, so anything in hfgolf may import this module.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch


def free_memory_bytes(device: torch.device) -> int:
    """Return the free bytes of the device: GPU memory, or for a CPU the RAM that this container may still use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(min(psutil.virtual_memory().available, free_cgroup_bytes()))


def total_memory_bytes(device: torch.device) -> int:
    """Return the memory of the device: of a CUDA GPU, or else the RAM of this machine."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total


def free_cgroup_bytes(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes that this process's control groups still allow it; infinity if none sets a limit.

    For each group, that is the limit minus the usage. The file cache does not count as used, because the kernel can
    reclaim it.
    """
    free = math.inf
    for group in _control_groups(process, root):
        with suppress(OSError, ValueError):  # no such group here, or "max": no limit
            max_bytes = int((group / "memory.max").read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used_bytes = int((group / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
            free = min(free, max(0, max_bytes - used_bytes))
    return free


def cpu_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and by its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cores, cgroup_cores()))


def cgroup_cores(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many cores' time this process's control groups allow it; infinity if none sets a limit."""
    cores = math.inf
    for group in _control_groups(process, root):
        with suppress(OSError, ValueError):  # no such group here, or "max": no limit
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
    return cores


def _control_groups(process: Path, root: Path) -> Iterator[Path]:
    """Yield the folder of a process's control group, and of each parent.

    Only version 2 (docs.kernel.org/admin-guide/cgroup-v2). In a container, the path is often the host's, and the
    container's own group is the root.
    """
    with suppress(OSError):  # not Linux
        for line in process.read_text().splitlines():
            if line.startswith("0::"):
                own = root / line.removeprefix("0::").lstrip("/")
                yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def fast_product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the hardware multiplies it natively and faster than float32, else float32."""
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or _avx512_is_faster_in_bf16())
    return torch.bfloat16 if is_fast else torch.float32


@functools.cache
def _avx512_is_faster_in_bf16() -> bool:
    """Measure AVX512-BF16, in about 0.1 s: AMD's is twice as fast as fp32, Intel's without AMX half as fast."""
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    fastest = dict.fromkeys((torch.bfloat16, torch.float32), 0.0)
    for _ in range(3):  # in turns, since other load can slow down either
        for dtype in fastest:
            fastest[dtype] = max(fastest[dtype], measured_peak_flops(torch.device("cpu"), dtype, size=512))
    return fastest[torch.bfloat16] > fastest[torch.float32]


def has_fast_fp16_only(device: torch.device) -> bool:
    """Return whether a GPU multiplies fp16 natively but not bf16: Volta and Turing, such as V100 and T4."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 7


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the model name of the CPU. Of other devices, the CPU's with the kind of device."""
    if device.type in ("cuda", "xpu"):
        return str(torch.get_device_module(device).get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (" ".join(line.partition(":")[2].split()) for line in lines if line.startswith("model name"))
    name = next(models, platform.processor() or platform.machine())
    return name if device.type == "cpu" else f"{name} ({device.type})"


def accelerator_name() -> str:
    """Return the name of this machine's GPU, or of its CPU if there is no GPU."""
    return device_name(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))


def fingerprint() -> dict[str, Any]:
    """Return a fingerprint of this machine: device, cores, memory, operating system."""
    found: dict[str, Any] = {
        "device": accelerator_name(),
        "cpu": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
    return found


@dataclass(frozen=True)
class Device:
    """An accelerator's peaks from its data sheet: dense, without sparsity, in FLOP/s."""

    name: str
    """Words that must all appear in the name that torch reports."""
    half: float
    """16-bit operands, fp32 accumulation."""
    tf32: float
    """fp32 operands rounded to TF32; equal to `single` if the hardware has no TF32."""
    single: float
    memory_gb: int
    has_bf16: bool = True

    def peak_flops(self, precision: str) -> float:
        """Return the peak in a precision (no, bf16, fp16), with torch's current setting for fp32 products."""
        if precision != "no":
            return self.half
        return self.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else self.single


# The first entry whose words are all in the name matches, so specific names come before general ones. Sources: NVIDIA's
# data sheets of the HGX B300 and B200 (one GPU's share), GB200 NVL72, GH200, H200, H100, A100, A40, A30, A10, L40S,
# L40, L4, V100 and T4; the appendices of its white papers on RTX Blackwell, Ada and Ampere GA102; AMD's data sheet of
# the MI300X. The A800 and H800 compute like the A100 and H100. For the H20, there are only the figures that resellers
# and the press agree on.
DEVICES = (
    Device("B300", 2250e12, 1125e12, 75e12, 288),
    Device("GB200", 2500e12, 1250e12, 80e12, 186),
    Device("B200", 2250e12, 1125e12, 75e12, 180),
    Device("GH200", 989e12, 494e12, 67e12, 96),
    Device("H200 NVL", 835e12, 417e12, 60e12, 141),
    Device("H200", 989e12, 494e12, 67e12, 141),
    Device("H100 NVL", 835e12, 417e12, 60e12, 94),
    Device("H100 PCIe", 756e12, 378e12, 51e12, 80),
    Device("H100", 989e12, 494e12, 67e12, 80),
    Device("H800", 989e12, 494e12, 67e12, 80),
    Device("H20", 148e12, 74e12, 44e12, 96),
    Device("A100 40GB", 312e12, 156e12, 19.5e12, 40),
    Device("A100", 312e12, 156e12, 19.5e12, 80),
    Device("A800", 312e12, 156e12, 19.5e12, 80),
    Device("A40", 149.7e12, 74.8e12, 37.4e12, 48),
    Device("A30", 165e12, 82e12, 10.3e12, 24),
    Device("A10", 125e12, 62.5e12, 31.2e12, 24),
    Device("L40S", 362e12, 183e12, 91.6e12, 48),
    Device("L40", 181e12, 90.5e12, 90.5e12, 48),
    Device("L4", 121e12, 60e12, 30.3e12, 24),
    Device("RTX 6000 Ada", 364.2e12, 182.1e12, 91.1e12, 48),
    Device("RTX A6000", 154.8e12, 77.4e12, 38.7e12, 48),
    Device("RTX 5090", 209.5e12, 104.8e12, 104.8e12, 32),
    Device("RTX 5080", 112.6e12, 56.3e12, 56.3e12, 16),
    Device("RTX 4090", 165.2e12, 82.6e12, 82.6e12, 24),
    Device("RTX 4080", 97.5e12, 48.7e12, 48.7e12, 16),
    Device("RTX 3090 Ti", 80e12, 40e12, 40e12, 24),
    Device("RTX 3090", 71e12, 35.6e12, 35.6e12, 24),
    Device("V100 PCIe", 112e12, 14e12, 14e12, 16, has_bf16=False),
    Device("V100", 125e12, 15.7e12, 15.7e12, 16, has_bf16=False),
    Device("T4", 65e12, 8.1e12, 8.1e12, 16, has_bf16=False),
    Device("MI300X", 1307e12, 653.7e12, 163.4e12, 192),
)
# Words in a name that do not mean a different chip. "Laptop", "Ti", "MIG" and "Max-Q" do.
_MAKERS_AND_FORMS = re.compile(
    r"NVIDIA|AMD|Instinct|GeForce|Tesla|SXM\d?|PCIe?|HBM\w+|\d+GB?|Generation|AC", re.IGNORECASE
)


def find_device(name: str) -> Device | None:
    """Return the entry of DEVICES for a name as torch reports it or a person types it; None if there is none."""
    words = re.split(r"[\s-]+", name.strip().casefold())
    for device in DEVICES:
        own = device.name.casefold().split()
        rest = [word for word in words if word not in own]
        if set(own) <= set(words) and all(_MAKERS_AND_FORMS.fullmatch(word) for word in rest):
            return device
    return None


def peak_flops(device: torch.device, precision: str) -> float:
    """Return the device's peak FLOP/s in a precision (no, bf16, fp16), from DEVICES or else by measurement."""
    known = find_device(device_name(device)) if device.type == "cuda" else None
    if known:
        return known.peak_flops(precision)
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return measured_peak_flops(device, dtype)


def measured_peak_flops(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """Return the FLOP/s of the fastest of five square matrix products. Takes about 0.1 s on two CPU cores.

    Other load on the machine can only slow a product down.
    """
    size = size or (1024 if device.type == "cpu" else 4096)
    own_generator = torch.Generator(device).manual_seed(0)  # leaves the run's random state alone
    a, b = torch.randn(2, size, size, device=device, generator=own_generator).to(dtype)
    return 2 * size**3 / min(seconds_of(lambda: a @ b, device) for _ in range(6))  # the first is a warm-up


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a device takes for some work, once it has done all that came before."""
    synchronize(device)
    started_at = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started_at


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work; a CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def missing_compiler(device: torch.device) -> str | None:
    """Return what torch.compile lacks on this device, None if nothing: a C++ compiler for a CPU, Triton for a GPU."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton, which torch.compile needs on a GPU, does not work here"
    if device.type != "cpu":
        return "there is no compiler for this device"
    name = os.environ.get("CXX", "g++")
    return None if shutil.which(name) else f"there is no C++ compiler {name}; install one, or name one in CXX"
