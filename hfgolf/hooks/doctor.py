"""Run the doctor during training, on each line of metrics.jsonl as it is written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hfgolf.doctor.doctor import Doctor, in_order
from hfgolf.system.wording import one_line
from hfgolf.train.hooks import Hook
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)


class Diagnosis(Hook):
    """Logs each finding once, also over resumes: earlier lines are read again, and with them the findings."""

    def __init__(self) -> None:
        self._doctor: Doctor | None = None

    def start(self, run: Run) -> None:
        if run.accelerator.is_main_process:
            self._doctor = Doctor(run.resolved.config.flat())
            for line in in_order(run.earlier):
                self._observe(run, line)

    def logged(self, run: Run, line: Mapping[str, Any]) -> None:
        self._observe(run, dict(line))

    def _observe(self, run: Run, line: dict[str, Any]) -> None:
        """Show the doctor a line. Raises nothing, because no finding is worth a crashed run."""
        if self._doctor is None:
            return
        try:
            findings = self._doctor.observe(line)
        except Exception as error:
            self._doctor = None
            logger.warning("doctor: gave up on this run (%s: %s)", type(error).__name__, one_line(error))
            return
        for finding in findings:
            find_lr = finding.find_lr(run.folder.config)
            logger.warning("doctor: %s%s", finding, f", or find them: {find_lr}" if find_lr else "")
            run.event("finding", **asdict(finding))
