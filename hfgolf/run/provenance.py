"""Record what is needed to repeat and judge a run: commit, uncommitted changes, command, versions, environment.

Keeps the user's secrets out of all of these.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfgolf.config.parse import ResolvedConfig
from hfgolf.system.hardware import fingerprint
from hfgolf.system.redact import is_secret_name, redact, redact_values
from hfgolf.system.wording import join_words

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "wandb", "numpy")
# Environment variables that affect what a run computes, how fast, or where it reads and writes.
_VARIABLES = re.compile(
    r"(HFGOLF|ACCELERATE|FSDP|HF|TRANSFORMERS|TOKENIZERS|WANDB|SLURM|TORCH\w*|PYTORCH|TRITON)_"
    r"|(CUDA|CUBLAS|CUDNN|NCCL|GLOO|OMP|MKL|KMP|OPENBLAS|THP)_|NVIDIA_(TF32_OVERRIDE|VISIBLE_DEVICES)$"
    r"|((LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|CC|CXX|LD_PRELOAD|PYTHONHASHSEED)$"
)

MAX_PATCH_BYTES = 1_000_000
MAX_NEW_FILES = 100  # per patch; each costs one call of git
# Untracked files that a run may execute or read as settings; a corpus or notes are neither.
_CODE = {".py", ".pyi", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".c", ".cpp", ".cu", ".h"}
# These options override the user's git settings, so that `git apply` accepts the patch.
_DIFF = ("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")


def run_metadata(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return what is needed to repeat and judge a run: commit, command, config, versions, hardware, environment.

    `sources` names the source of each config value that is not a default. Secrets are redacted.
    """
    variables = [name for name in sorted(os.environ) if _VARIABLES.match(name) and not is_secret_name(name)]
    metadata = {
        "commit": git_commit(),
        "command": _command(),
        "seed": resolved.config.run.seed,
        "config": resolved.config.flat(),
        "sources": resolved.sources,
        "environment": {name: os.environ[name] for name in variables},
        "python": platform.python_version(),
        "packages": {p: package_version(p) for p in ("hfgolf", *_PACKAGES)},
        "hardware": fingerprint(),
    }
    return redact_values(metadata)


def _command() -> list[str]:
    script, *arguments = sys.argv
    if Path(script).name == "ipykernel_launcher.py":  # its arguments name a file of the kernel
        return ["hfgolf.fit", "in a notebook"]
    if script.startswith("hfgolf "):  # cli.py's name for the command and its verb
        return [*script.split(), *arguments]
    return [Path(sys.executable).name, script, *arguments]


def git_commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the commit of the checkout that contains `folder`, with `-dirty` if files differ.

    Without a checkout: $HFGOLF_COMMIT (set in an image) or None.
    """
    root = _checkout(folder)
    described = root and _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return described.decode().strip() if described else os.environ.get("HFGOLF_COMMIT")


def uncommitted_changes(folder: Path = Path(__file__).parent) -> str | None:
    """Return the patch from the commit to the working tree that contains `folder`, for `git apply`; redacted.

    None if nothing differs or there is no checkout. Of untracked files it includes code and configs, unless they are
    ignored or hidden (.env, .netrc), and no other text. Changes that would exceed MAX_PATCH_BYTES are only named, at
    the top. The patch does not restore files exactly if they are not UTF-8 or contain a redacted secret.
    """
    root = _checkout(folder)
    if root is None:
        return None
    patch, omitted = _git(root, *_DIFF, "HEAD") or b"", []
    if len(patch) > MAX_PATCH_BYTES:
        patch, omitted = b"", ["the changes to tracked files"]
    for number, (name, size) in enumerate(_untracked_code(root)):
        if number >= MAX_NEW_FILES or len(patch) + size > MAX_PATCH_BYTES:
            omitted.append(name)
        else:
            patch += _git(root, *_DIFF, "--no-index", "--", os.devnull, name) or b""
    if omitted:
        patch = os.fsencode(f"# omitted, too large for this patch: {join_words(omitted, maximum=10)}\n") + patch
    return redact(patch.decode("utf-8", errors="replace")) or None


def _untracked_code(root: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, size in bytes) of each file of code or config that is untracked, not ignored and not hidden."""
    listed = os.fsdecode(_git(root, "ls-files", "--others", "--exclude-standard", "-z") or b"").split("\0")
    for name in listed:
        path = root / name
        if path.suffix in _CODE and path.is_file() and not any(part.startswith(".") for part in Path(name).parts):
            try:
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    is_text = b"\0" not in file.read(8000)  # git's own test
            except OSError:  # not readable, or gone
                continue
            if is_text:
                yield name, size


def _checkout(folder: Path) -> Path | None:
    """Return the root of the git checkout that tracks files in `folder`; None if it tracks none (site-packages)."""
    root = _git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(root).removesuffix("\n")) if root and _git(folder, "ls-files", "--", ".") else None


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return git's output in `folder`; None if it fails or takes too long."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode in (0, 1) else None  # 1: `diff --no-index` found a difference


def package_version(package: str) -> str | None:
    """Return the version of an installed package. None if there is none: hfgolf may be only on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
