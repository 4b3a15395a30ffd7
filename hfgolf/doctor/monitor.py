"""Run the doctor during training, on the new lines of metrics.jsonl."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfgolf.doctor.doctor import Doctor, in_order
from hfgolf.doctor.finding import Finding
from hfgolf.run.metrics import read_lines, read_metrics
from hfgolf.wording import one_line

logger = logging.getLogger(__name__)


class Monitor:
    """Examine a run while it trains. Each call reads only the new lines.

    The first call reads the whole file, including earlier sessions. So does the first call after a rollback, which
    rewrites the file.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self._doctor = Doctor(settings)
        self._file: int | None = None
        """The inode, to notice that the file was replaced, as `tail -F` does."""
        self._read_bytes = 0
        self._is_active = True

    def new_findings(self) -> list[Finding]:
        """Return the findings since the last call. Never raises, because no finding is worth a crashed run."""
        try:
            return self._read_and_observe() if self._is_active else []
        except OSError:
            return []  # the file is missing, or unreadable for now
        except Exception as error:
            self._is_active = False
            logger.warning("doctor: gave up on %s (%s: %s)", self._path, type(error).__name__, one_line(error))
            return []

    def _read_and_observe(self) -> list[Finding]:
        status = self._path.stat()
        if status.st_ino != self._file:
            self._doctor, self._file, self._read_bytes = Doctor(self._settings), status.st_ino, status.st_size
            lines = in_order(read_metrics(self._path))
        else:
            lines, self._read_bytes = read_lines(self._path, self._read_bytes)
        return [finding for line in lines for finding in self._doctor.observe(line)]
