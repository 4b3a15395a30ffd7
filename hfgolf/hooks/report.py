"""The report of a run: rewritten at evaluations, for at most one percent of the time, and at the end."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from hfgolf.report.report import render_page, write_report
from hfgolf.run.metrics import Metrics
from hfgolf.run.record import RunRecord, read_run
from hfgolf.system.durable import write_text
from hfgolf.system.wording import one_line
from hfgolf.train.hooks import Hook
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)

_SHARE = 0.01  # of the time since the last rewrite
_FIRST_SECONDS = 0.05  # what the first page is taken to need, so it waits for the first 5 seconds


class Report(Hook):
    """Rewrites report.html; only the main process does. The picture waits for the end of the run."""

    def __init__(self) -> None:
        self._metrics = Metrics([], [])
        self._written_at = perf_counter()
        self._seconds = _FIRST_SECONDS
        self._has_failed = False

    def start(self, run: Run) -> None:
        self._metrics = dataclasses.replace(run.earlier, rows=list(run.earlier.rows), events=list(run.earlier.events))

    def logged(self, run: Run, line: Mapping[str, Any]) -> None:
        self._metrics.add(dict(line))

    def after_evaluate(self, run: Run, row: Mapping[str, Any]) -> None:
        """Rewrite the page, unless that would take more than its share. A failure is one warning and ends nothing."""
        since = perf_counter() - self._written_at
        is_asked = run.accelerator.is_main_process and not self._has_failed and not run.clock.stop_signal
        if not is_asked or self._seconds > _SHARE * since:
            return
        started_at = perf_counter()
        try:
            import matplotlib.figure  # noqa: F401

            started_at = perf_counter()  # the import does not count, because the end of the run needs it in any case
            write_text(run.folder.report, render_page([self._record(run)], rewrite_seconds=since))
        except Exception as error:  # a full disk, or any error of the report: training matters more
            self._has_failed = True
            logger.warning("report not rewritten until the end: %s", one_line(error))
        self._written_at = perf_counter()
        self._seconds = self._written_at - started_at

    def before_export(self, run: Run, summary: dict[str, Any]) -> None:
        self._write(run, summary)

    def end(self, run: Run, summary: dict[str, Any] | None) -> None:
        if summary is None and run.accelerator.is_main_process:
            self._write(run, {})

    def _write(self, run: Run, summary: dict[str, Any]) -> None:
        """Write the report. If that fails, warn and continue, because exporting the model matters more."""
        if not self._metrics.rows:
            return  # nothing logged yet
        try:
            write_report([dataclasses.replace(self._record(run), summary=summary)], run.folder.report)
        except Exception as error:  # a full disk, or any error of the drawing library
            logger.warning("report not written: %s", one_line(error))

    def _record(self, run: Run) -> RunRecord:
        return read_run(run.folder.path, self._metrics)
