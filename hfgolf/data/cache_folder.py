"""The cache folder: where it is, its locks, what its folders hold (cache.json), and the hashes of files read before.

Does not know what the files mean.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hfgolf.config.sections import DataSection
from hfgolf.system.durable import file_sha256, list_files, write_text
from hfgolf.system.errors import UserError

_log = logging.getLogger(__name__)
PATIENCE_SECONDS = 3.0
SETTLED_SECONDS = 2.0  # the coarsest time stamp of a file system (FAT)
MANIFEST = "cache.json"
_DAMAGED = "damaged.txt"


def cache_folder(data: DataSection) -> Path:
    """Return data.cache_dir or its default, creating it if needed. Raises UserError if it cannot be created."""
    from huggingface_hub.constants import HF_HOME

    path = Path(os.path.expanduser(data.cache_dir or Path(HF_HOME) / "hfgolf"))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: cannot create {path} ({error.strerror}); name a writable folder.") from error
    return path


@contextmanager
def locked(path: Path, work: str) -> Iterator[None]:
    """Hold the lock file at `path`. Log if another process has held it for a few seconds.

    work: what its holder does, such as "builds the token cache". Raises OSError if the file cannot be written.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=PATIENCE_SECONDS)
    except Timeout:
        _log.info("waiting for another process, which %s (%s)", work, path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def file_hashes(paths: Iterable[Path], cache: Path) -> dict[Path, str]:
    """Return the SHA-256 of each file: from `cache` if the file is unchanged, otherwise hashed now and added to it.

    A file counts as unchanged if its size, times and inode are the same. This misses a write that preserves all of
    them: one below the file system (a disk edited offline), or one after the clock was set back. Delete the
    cache to hash everything again.
    """
    try:
        cached = dict(json.loads(cache.read_bytes()))
    except (OSError, ValueError, TypeError):  # missing or damaged: hash everything
        cached = {}
    hashes: dict[Path, str] = {}
    new: dict[str, Any] = {}
    for path in paths:
        state = file_state(path)  # before the file is read: a write in between invalidates the entry
        entry = cached.get(str(path))
        if isinstance(entry, list) and entry[:-1] == state:
            hashes[path] = str(entry[-1])
            continue
        # A second write within the resolution of the clock would not change the times.
        is_settled = time.time() - state[2] / 1e9 > SETTLED_SECONDS
        hashes[path] = file_sha256(path)
        if is_settled:
            new[str(path)] = [*state, hashes[path]]
    if new:
        with suppress(OSError):  # full disk or concurrent writers: the next start hashes again
            write_text(cache, json.dumps(cached | new))
    return hashes


def file_state(path: Path) -> list[int]:
    """Return a file's size, times and inode. Any write changes at least one of them. Raises OSError."""
    status = path.stat()
    # ctime too: `cp -p`, `rsync -t` and `touch -r` can reset mtime, but nothing can reset ctime
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


class DamagedCacheError(UserError):
    """The token cache is not what was written. The one-line message says what is wrong and what to do."""


def write_manifest(folder: Path, **fields: Any) -> None:
    """Write cache.json: size and SHA-256 of all files in `folder`, plus the given fields. Raises OSError."""
    files = list_files(folder, (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST))
    write_text(folder / MANIFEST, json.dumps({**fields, "files": files}, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of cache.json after checking the size of every file.

    Raises ValueError, with the reason, if the folder is damaged or was marked as damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        for name, stated in manifest["files"].items():
            if (folder / name).stat().st_size != stated["bytes"]:
                raise ValueError(f"{name} is not {stated['bytes']} bytes long")
        if (folder / _DAMAGED).exists():
            raise ValueError((folder / _DAMAGED).read_text("utf-8"))
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST}: {type(error).__name__}: {error}") from error
    return manifest


def note_damage(folder: Path, reason: str) -> DamagedCacheError:
    """Mark the cache in `folder` as damaged, so that the next start rebuilds it, and return the error to raise."""
    try:
        write_text(folder / _DAMAGED, reason)
        remedy = "The next start rebuilds it"
    except OSError as error:
        remedy = f"It cannot be marked as damaged ({error.strerror}): delete it, or set another data.cache_dir"
    return DamagedCacheError(
        f"data: the token cache {folder} is damaged: {reason}. {remedy}. The model may have trained on wrong tokens:"
        " start over or resume from an earlier checkpoint."
    )


def find_wrong_hash(manifest: dict[str, Any], hashes: Iterable[tuple[str, str]]) -> str | None:
    """Return the first difference of some (name, SHA-256) from what the manifest states, or None."""
    try:
        for name, sha256 in hashes:
            if sha256 != manifest["files"][name]["sha256"]:
                return f"{name} does not match the SHA-256 in {MANIFEST}"
    except (OSError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None
