"""What machine and process this is, and what follows from it: precision, threads, seeds, the run's metadata.

Owns the answers to "which precision, how many threads, which commit, which changes to it, which versions", without
the secrets of whoever asks. Does not know the loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from hfgolf.command_line import ResolvedConfig
from hfgolf.config import join_words
from hfgolf.errors import UserError
from hfgolf.measure import flops
from hfgolf.optim.muon import fast_product_dtype
from hfgolf.redact import is_secret_name, redact, redact_values

if TYPE_CHECKING:
    from accelerate import PartialState

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "wandb", "numpy")
# What changes what a run computes, how fast, or where it reads and writes.
_VARIABLES = re.compile(
    r"(HFGOLF|ACCELERATE|FSDP|HF|TRANSFORMERS|TOKENIZERS|WANDB|SLURM|TORCH\w*|PYTORCH|TRITON)_"
    r"|(CUDA|CUBLAS|CUDNN|NCCL|GLOO|OMP|MKL|KMP|OPENBLAS|THP)_|NVIDIA_(TF32_OVERRIDE|VISIBLE_DEVICES)$"
    r"|((LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|CC|CXX|LD_PRELOAD|PYTHONHASHSEED)$"
)

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h

MOST_PATCH_BYTES = 1_000_000
_MOST_NEW_FILES = 100  # in a patch; each costs a call of git
# whatever the user's git is set to, a patch that `git apply` takes
_DIFF = ("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")


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
            f"train.mixed_precision: {precision} (from {where}) does not run on this device, {device_name()};"
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


def cpu_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def run_metadata(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return what one needs to repeat and to judge a run: commit, command, config, versions, hardware, environment.

    `sources` says where a value of `config` is from, if it is not the default. Secrets are redacted.
    """
    metadata = {
        "commit": git_commit(),
        "command": [Path(sys.executable).name, *sys.argv],
        "seed": resolved.config.run.seed,
        "config": resolved.config.flat(),
        "sources": resolved.sources,
        "environment": _environment_variables(),
        "python": platform.python_version(),
        "packages": {"hfgolf": importlib.metadata.version("hfgolf")} | {p: _version(p) for p in _PACKAGES},
        "hardware": hardware(),
    }
    return redact_values(metadata)


def hardware() -> dict[str, Any]:
    """Return a fingerprint of this machine: device, cores, memory, operating system."""
    fingerprint: dict[str, Any] = {
        "device": device_name(),
        "cpu": flops.device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        fingerprint |= {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
    return fingerprint


def device_name() -> str:
    """Return the accelerator's name, or the CPU's."""
    return flops.device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def git_commit() -> str | None:
    """Return the commit hfgolf runs from, marked `-dirty` where files differ; HFGOLF_COMMIT (an image) else None."""
    root = _checkout(Path(__file__).parent)
    described = root and _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return described.decode().strip() if described else os.environ.get("HFGOLF_COMMIT")


def uncommitted_changes(folder: Path = Path(__file__).parent) -> str | None:
    """Return what `git apply` needs to make, of the commit, the checkout that `folder` is part of; redacted.

    None where nothing differs, or there is no checkout. Files that git does not track are in it where they are text,
    neither ignored nor hidden (.env, .netrc). What would make it longer than MOST_PATCH_BYTES is only named, at its
    top. A file that is not UTF-8, or lost a secret, does not come out of it as it was.
    """
    root = _checkout(folder)
    if root is None:
        return None
    patch, left_out = _git(root, *_DIFF, "HEAD") or b"", []
    if len(patch) > MOST_PATCH_BYTES:
        patch, left_out = b"", ["the changes to tracked files"]
    for number, (name, size) in enumerate(_untracked_texts(root)):
        if number >= _MOST_NEW_FILES or len(patch) + size > MOST_PATCH_BYTES:
            left_out.append(name)
        else:
            patch += _git(root, *_DIFF, "--no-index", "--", os.devnull, name) or b""
    if left_out:
        named = join_words(left_out[:10]) + (f" and {len(left_out) - 10} more" if len(left_out) > 10 else "")
        patch = os.fsencode(f"# left out, too large for this patch: {named}\n") + patch
    return redact(patch.decode("utf-8", errors="replace")) or None


def _untracked_texts(root: Path) -> Iterator[tuple[str, int]]:
    """Yield name and size in bytes of each text file that git does not track, nor ignore, and that is not hidden."""
    listed = os.fsdecode(_git(root, "ls-files", "--others", "--exclude-standard", "-z") or b"").split("\0")
    for name in listed:
        path = root / name
        if path.is_file() and not any(part.startswith(".") for part in Path(name).parts):
            try:
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    is_text = b"\0" not in file.read(8000)  # as git judges
            except OSError:  # not ours to read, or gone
                continue
            if is_text:
                yield name, size


def _checkout(folder: Path) -> Path | None:
    """Return the root of the git checkout whose files `folder` holds, None if it only lies in one (site-packages)."""
    root = _git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(root).removesuffix("\n")) if root and _git(folder, "ls-files", "--", ".") else None


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return what git says in `folder`, None where it fails, or takes too long."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode in (0, 1) else None  # 1: `diff --no-index` found the difference


def _environment_variables() -> dict[str, str]:
    names = [name for name in sorted(os.environ) if _VARIABLES.match(name) and not is_secret_name(name)]
    return {name: os.environ[name] for name in names}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
