"""SHA-256 of files, remembered beside the caches, so that a second start does not read the text again.

Owns the note and when it is believed. Does not know what the files are.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hfgolf.durable import write_text

_SETTLED_SECONDS = 2.0  # file systems count time in steps, at the coarsest (FAT) of two seconds


def file_hashes(paths: Iterable[Path], note: Path) -> dict[Path, str]:
    """Return the SHA-256 of each file, as `note` has it for a file that is as it was then, else hashed and noted.

    A file is as it was while size, times and inode are. That misses a write that leaves all of them alone: below the
    file system (a disk edited offline), or where the clock went back. Delete the note to have everything hashed anew.
    """
    noted = _read(note)
    hashes: dict[Path, str] = {}
    new: dict[str, Any] = {}
    for path in paths:
        # before the file is read: what is written meanwhile makes the note wrong, not the hash
        state = file_state(path)
        entry = noted.get(str(path))
        if isinstance(entry, list) and entry[:-1] == state:
            hashes[path] = str(entry[-1])
            continue
        # a second write within the clock's step leaves the times as they are
        is_settled = time.time() - state[2] / 1e9 > _SETTLED_SECONDS
        with open(path, "rb") as file:
            hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
        if is_settled:
            new[str(path)] = [*state, hashes[path]]
    if new:
        _write(noted | new, note)
    return hashes


def file_state(path: Path) -> list[int]:
    """Return size, times and inode of a file, of which at least one changes when it is written. Raises OSError."""
    status = path.stat()
    # the ctime too: `cp -p`, `rsync -t` and `touch -r` set the mtime back, and nothing sets this one
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read(note: Path) -> dict[str, Any]:
    try:
        content = json.loads(note.read_bytes())
    except (OSError, ValueError):  # not there yet, or damaged: then everything is hashed
        return {}
    return content if isinstance(content, dict) else {}


def _write(content: dict[str, Any], note: Path) -> None:
    for left_behind in note.parent.glob(f"{note.name}.*.part"):  # by an earlier version that was killed
        left_behind.unlink(missing_ok=True)
    with suppress(OSError):  # a full disk, or two processes at once: the next start hashes again
        write_text(note, json.dumps(content))
