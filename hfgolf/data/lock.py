"""A lock between processes that says what it is waiting for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_log = logging.getLogger(__name__)
PATIENCE_SECONDS = 3.0


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
