"""The report of a run that still trains: rewritten at evaluations, for at most one percent of the time."""

from __future__ import annotations

import logging
from time import perf_counter

from hfgolf.durable import write_text
from hfgolf.report.report import render_page
from hfgolf.run.record import read_run
from hfgolf.train.run import Run
from hfgolf.wording import one_line

logger = logging.getLogger(__name__)

_SHARE = 0.01  # of the time since the last rewrite
_FIRST_SECONDS = 0.05  # what the first page is expected to take, so it waits for the first 5 seconds


class LiveReport:
    """Rewrites report.html; only the main process does. Markdown and pictures wait for the end of the run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._written_at = perf_counter()
        self._seconds = _FIRST_SECONDS
        self._has_failed = False

    def write(self) -> None:
        """Rewrite the page, unless that would take more than its share. A failure is one warning and ends nothing."""
        started_at = perf_counter()
        since = started_at - self._written_at
        if not self._run.accelerator.is_main_process or self._has_failed or self._seconds > _SHARE * since:
            return
        try:
            record = read_run(self._run.folder.path)
            write_text(self._run.folder.report, render_page([record], rewrite_seconds=since))
        except Exception as error:  # a full disk, or any error of the report: training matters more
            self._has_failed = True
            logger.warning("report not rewritten until the end: %s", one_line(error))
        self._written_at = perf_counter()
        self._seconds = self._written_at - started_at
