"""A lock between processes that logs which process it is waiting for."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_log = logging.getLogger(__name__)
PATIENCE_SECONDS = 3.0
_REPEAT_SECONDS = 60.0


@contextmanager
def locked(path: Path, work: str) -> Iterator[None]:
    """Hold the lock file at `path`. While waiting, log its holder after a few seconds and then every minute.

    work: what the holder does, such as "builds the token cache". Raises OSError if the file cannot be written.
    """
    lock, owner = FileLock(path), path.with_suffix(".owner")
    patience = PATIENCE_SECONDS
    while True:
        try:
            lock.acquire(timeout=patience)
            break
        except Timeout:
            patience = _REPEAT_SECONDS
            try:
                who = owner.read_text("utf-8")
            except OSError:
                who = "another process"
            _log.info("waiting for %s, which %s (%s)", who, work, path)
    try:
        with suppress(OSError):  # only needed for the log line above
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%H:%M:%S')}")
        yield
    finally:
        with suppress(OSError):
            owner.unlink(missing_ok=True)
        lock.release()
