"""How this process computes: its rank and device, precision, threads, memory and seeds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from hfgolf.command_line import ResolvedConfig
from hfgolf.errors import UserError
from hfgolf.hardware import accelerator_name, cpu_cores, fast_product_dtype

if TYPE_CHECKING:
    from accelerate import PartialState

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def resolve_precision(resolved: ResolvedConfig, of_run: str | None = None) -> ResolvedConfig:
    """Decide train.mixed_precision if it is null: as `accelerate` was told, else bf16 if it is fast here, else no.

    of_run: what a run that goes on had decided; it comes after what accelerate was told.
    Raises UserError for a precision that accelerate would pass over in silence (fp16 on a CPU) or does not exist here.
    """
    if resolved.config.train.mixed_precision is None:
        told = _precision_told_to_accelerate()
        is_fast = fast_product_dtype(torch.device(_device_type())) == torch.bfloat16
        choices = {"accelerate": told, "the run so far": of_run, "auto": "bf16" if is_fast else "no"}
        source, choice = next((source, choice) for source, choice in choices.items() if choice)
        resolved = resolved.resolve(source, train__mixed_precision=choice)
    precision = resolved.config.train.mixed_precision
    if precision not in ("no", "bf16", "fp16") or (precision == "fp16" and _device_type() == "cpu"):
        where = resolved.sources["train.mixed_precision"]
        raise UserError(
            f"train.mixed_precision: {precision} (from {where}) does not run on this device, {accelerator_name()};"
            f" allowed: no, bf16{'' if _device_type() == 'cpu' else ', fp16'}."
        )
    return resolved


def processes() -> PartialState:
    """Return which process of how many this is, and its device; known before there is an Accelerator."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # as Accelerator does it: the first one to ask settles for the process whether there are others
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def _device_type() -> str:
    return processes().device.type


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
    number = max(1, cpu_cores() // local_processes) if threads == "auto" else int(threads)
    torch.set_num_threads(number)
    return number


def tune_memory() -> None:
    """Have freed memory kept for the next step, and large tensors lie in pages of 2 MB; before the first tensor.

    By default glibc hands large blocks back at once, and in the next step the kernel has to find and clear the same
    memory again; where it is another C library nothing happens. Large pages cost fewer look-ups and some memory; the
    variable is torch's, and a person's own value stays. What each brings is in benchmarks/kept_memory.py.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


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
