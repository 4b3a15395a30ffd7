"""The manifest of a cache folder, cache.json: the size and SHA-256 of each file.

Owns the manifest, the thread that verifies a large cache while training starts, and the file that marks a cache as
damaged so that the next start does not trust it. Does not know what the files mean.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hfgolf.system.durable import list_files, write_text
from hfgolf.system.errors import UserError

NAME = "cache.json"
_DAMAGED = "damaged.txt"


class DamagedCacheError(UserError):
    """The token cache is not what was written. The one-line message says what is wrong and what to do."""


def write_manifest(folder: Path, **fields: Any) -> None:
    """Write cache.json for all files in `folder`, plus the given fields. Raises OSError."""
    files = list_files(folder, (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != NAME))
    write_text(folder / NAME, json.dumps({**fields, "files": files}, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of cache.json after checking the size of every file.

    Raises ValueError, with the reason, if the folder is damaged or was marked as damaged.
    """
    try:
        manifest = json.loads((folder / NAME).read_bytes())
        for name, stated in manifest["files"].items():
            if (folder / name).stat().st_size != stated["bytes"]:
                raise ValueError(f"{name} is not {stated['bytes']} bytes long")
        if (folder / _DAMAGED).exists():
            raise ValueError((folder / _DAMAGED).read_text("utf-8"))
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME}: {type(error).__name__}: {error}") from error
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


class Verification:
    """Compare the hashes of a cache's files with its manifest in a daemon thread.

    hashes: returns an iterator of (name, SHA-256) of the data that training reads, one file at a time.
    """

    def __init__(self, manifest: dict[str, Any], hashes: Callable[[], Iterator[tuple[str, str]]]) -> None:
        self._stated = manifest["files"]
        self._hashes = hashes
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._compare, name="token cache verification", daemon=True)
        self._thread.start()

    def problem(self, wait: bool = False) -> str | None:
        """Return the first problem found so far, or None. wait: finish the comparison first."""
        if wait:
            self._thread.join()
        return self._problem

    def _compare(self) -> None:
        try:
            for name, sha256 in self._hashes():
                if sha256 != self._stated[name]["sha256"]:
                    self._problem = f"{name} does not match the SHA-256 in {NAME}"
                    return
        except (OSError, KeyError) as error:
            self._problem = f"{type(error).__name__}: {error}"
