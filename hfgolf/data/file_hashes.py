"""Cached SHA-256 hashes of files, so that a second start does not read the text again.

Owns the cache file and the rule for when an entry is still valid. Does not know what the files are.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hfgolf.system.durable import write_text

SETTLED_SECONDS = 2.0  # the coarsest time stamp of a file system (FAT)


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
        # Taken before the file is read: a write in between invalidates the entry instead of hiding behind it.
        state = file_state(path)
        entry = cached.get(str(path))
        if isinstance(entry, list) and entry[:-1] == state:
            hashes[path] = str(entry[-1])
            continue
        # A second write within the resolution of the clock would not change the times.
        is_settled = time.time() - state[2] / 1e9 > SETTLED_SECONDS
        with open(path, "rb") as file:
            hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
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
