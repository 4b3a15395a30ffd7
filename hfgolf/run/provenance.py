"""What one needs to repeat a run and to judge it: commit, uncommitted changes, command, versions, environment.

Knows how to keep the secrets of whoever runs it out of all of these. Knows nothing of devices: it is told.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hfgolf.command_line import ResolvedConfig
from hfgolf.config import join_words
from hfgolf.redact import is_secret_name, redact, redact_values

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "wandb", "numpy")
# What changes what a run computes, how fast, or where it reads and writes.
_VARIABLES = re.compile(
    r"(HFGOLF|ACCELERATE|FSDP|HF|TRANSFORMERS|TOKENIZERS|WANDB|SLURM|TORCH\w*|PYTORCH|TRITON)_"
    r"|(CUDA|CUBLAS|CUDNN|NCCL|GLOO|OMP|MKL|KMP|OPENBLAS|THP)_|NVIDIA_(TF32_OVERRIDE|VISIBLE_DEVICES)$"
    r"|((LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|CC|CXX|LD_PRELOAD|PYTHONHASHSEED)$"
)

MAX_PATCH_BYTES = 1_000_000
_MAX_NEW_FILES = 100  # in a patch; each costs a call of git
# whatever the user's git is set to, a patch that `git apply` takes
_DIFF = ("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")


def run_metadata(resolved: ResolvedConfig, hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one needs to repeat and to judge a run: commit, command, config, versions, hardware, environment.

    hardware: from hfgolf.hardware.fingerprint. `sources` says where each value of `config` that is not the default
    comes from. Secrets are redacted.
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
        "hardware": dict(hardware),
    }
    return redact_values(metadata)


def git_commit() -> str | None:
    """Return the commit hfgolf runs from, marked `-dirty` where files differ; HFGOLF_COMMIT (an image) else None."""
    root = _checkout(Path(__file__).parent)
    described = root and _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return described.decode().strip() if described else os.environ.get("HFGOLF_COMMIT")


def uncommitted_changes(folder: Path = Path(__file__).parent) -> str | None:
    """Return what `git apply` needs to make, of the commit, the checkout that `folder` is part of; redacted.

    None where nothing differs, or there is no checkout. Files that git does not track are in it where they are text,
    neither ignored nor hidden (.env, .netrc). What would make it longer than MAX_PATCH_BYTES is only named, at its
    top. A file that is not UTF-8, or lost a secret, does not come out of it as it was.
    """
    root = _checkout(folder)
    if root is None:
        return None
    patch, left_out = _git(root, *_DIFF, "HEAD") or b"", []
    if len(patch) > MAX_PATCH_BYTES:
        patch, left_out = b"", ["the changes to tracked files"]
    for number, (name, size) in enumerate(_untracked_texts(root)):
        if number >= _MAX_NEW_FILES or len(patch) + size > MAX_PATCH_BYTES:
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
