"""What a folder of the cache holds: its files with their sizes and SHA-256, in cache.json.

Owns that file, the thread that hashes a large cache while training begins, and the note that a cache is damaged, which
keeps the next start from trusting it. Does not know what the files mean.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hfgolf.durable import list_files, write_text
from hfgolf.errors import UserError

NAME = "cache.json"
_DAMAGED = "damaged.txt"


class DamagedCacheError(UserError):
    """The token cache is not what was written. The message says so in one line, and what happens next."""


def write_manifest(folder: Path, **fields: Any) -> None:
    """Write cache.json for the files in `folder`, with more fields of the caller's. Raises OSError."""
    files = list_files(folder, (path for path in sorted(folder.iterdir()) if path.name != NAME))
    write_text(folder / NAME, json.dumps({**fields, "files": files}, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return cache.json, once every file has the size stated there.

    Raises ValueError, with the reason, if the folder is damaged, or was noted to be by an earlier start.
    """
    try:
        manifest = json.loads((folder / NAME).read_bytes())
        for name, stated in manifest["files"].items():
            if not isinstance(stated, dict):
                raise ValueError(f"{NAME} holds no hashes: an earlier hfgolf wrote it")
            if (folder / name).stat().st_size != stated["bytes"]:
                raise ValueError(f"{name} is not {stated['bytes']} bytes long")
        if (folder / _DAMAGED).exists():
            raise ValueError((folder / _DAMAGED).read_text("utf-8"))
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME}: {type(error).__name__}: {error}") from error
    return manifest


def wrong_hash(name: str) -> str:
    """Say that a file is not the one that was written."""
    return f"{name} does not have the SHA-256 with which it was written"


def note_damage(folder: Path, reason: str) -> DamagedCacheError:
    """Have the next start build the cache in `folder` again; return the error that says so."""
    try:
        write_text(folder / _DAMAGED, reason)
        remedy = "The next start builds it again"
    except OSError as error:
        remedy = f"It cannot be marked as damaged ({error.strerror}): delete it, or set another data.cache_dir"
    return DamagedCacheError(
        f"data: the token cache {folder} is damaged: {reason}. {remedy}; what was trained on it may be wrong, so train"
        " afresh or from an earlier checkpoint."
    )


class Verification:
    """Compare the hashes of a cache's files with its manifest, in a thread that ends with the process.

    hashes: yields (name, SHA-256) of what is read in training, one file after another.
    """

    def __init__(self, manifest: dict[str, Any], hashes: Callable[[], Iterator[tuple[str, str]]]) -> None:
        self._stated = manifest["files"]
        self._hashes = hashes
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._compare, name="token cache verification", daemon=True)
        self._thread.start()

    def problem(self, wait: bool = False) -> str | None:
        """Return what is wrong as far as is known, None if nothing is; wait: for the whole comparison."""
        if wait:
            self._thread.join()
        return self._problem

    def _compare(self) -> None:
        try:
            for name, sha256 in self._hashes():
                if sha256 != self._stated[name]["sha256"]:
                    self._problem = wrong_hash(name)
                    return
        except (OSError, KeyError) as error:
            self._problem = f"{type(error).__name__}: {error}"
