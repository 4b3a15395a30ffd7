"""The doctor: reads a run's metrics, during training or afterwards, and reports symptoms, likely causes and a fix.

Owns which detectors run, in which order, and that each symptom is reported only once. The detectors themselves are in
the *symptoms.py files. Measures nothing itself and never stops a run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfgolf.config.parse import read_settings
from hfgolf.config.sections import RunConfig
from hfgolf.doctor.budget_symptoms import CostlyEvaluation, over_budget
from hfgolf.doctor.feed_symptoms import SameBatches, damaged_cache, data_bound, throughput_falls
from hfgolf.doctor.finding import Detector, Finding
from hfgolf.doctor.history import History, Line
from hfgolf.doctor.spike_symptoms import NORM_SPIKE, SPIKE, NormSpikes, Spikes
from hfgolf.doctor.symptoms import (
    Divergence,
    blow_up,
    constantly_clipped,
    diverged_after_restore,
    early_plateau,
    near_zero_loss,
    nonfinite,
    nonfinite_on_tokens,
    validation_rises,
)
from hfgolf.run.metrics import Metrics, read_metrics
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line

logger = logging.getLogger(__name__)


class Doctor:
    """Observe the lines of metrics.jsonl one at a time and report each symptom once, but spikes repeatedly.

    settings: the config of the run as {"section.key": value}. Missing keys have their defaults.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._history = History(RunConfig().flat() | dict(settings))
        self._detectors: list[Detector] = [
            nonfinite,
            nonfinite_on_tokens,
            constantly_clipped,
            Spikes(),
            NormSpikes(),
            blow_up,
            Divergence(),
            diverged_after_restore,
            early_plateau,
            SameBatches(),
            validation_rises,
            near_zero_loss,
            throughput_falls,
            data_bound,
            damaged_cache,
            over_budget,
            CostlyEvaluation(),
        ]
        self._reported: set[tuple[str, int | None]] = set()

    def observe(self, line: Line) -> list[Finding]:
        """Return the new findings after a row or an event. A "finding" event counts as already reported."""
        if line.get("event") == "finding":
            self._reported.add(_identity(line["symptom"], line["step"]))
            return []
        self._history.add(line)
        findings = [finding for detect in self._detectors if (finding := detect(self._history))]
        new = [finding for finding in findings if _identity(finding.symptom, finding.step) not in self._reported]
        self._reported.update(_identity(finding.symptom, finding.step) for finding in new)
        return new


def _identity(symptom: str, step: int) -> tuple[str, int | None]:
    return symptom, step if symptom in (SPIKE, NORM_SPIKE) else None


def examine(folder: Path) -> tuple[list[Finding], Metrics]:
    """Return the findings and the metrics of a run, which may be training, complete or dead.

    Raises UserError if the folder does not exist or its metrics.jsonl has no rows.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        problem = "this folder has no metrics.jsonl" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder}: {problem}; give the folder of a run, such as runs/small.")
    try:
        metrics = read_metrics(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable.") from None
    if not metrics.rows and not metrics.events:
        raise UserError(f"{path} has no rows; the run has not logged anything yet.")
    doctor = Doctor(_settings(folder))
    lines = [line for line in in_order(metrics) if line.get("event") != "finding"]
    return [finding for line in lines for finding in doctor.observe(line)], metrics


def in_order(metrics: Metrics) -> list[Line]:
    """Return rows and events in a plausible order: first the earlier findings, then everything else by step.

    At the same step, events come before the row, except that a resume or rollback comes after the row it goes back to.
    """
    priorities = {"finding": -1, "resumed": 2, "rollback": 2}

    def sort_key(line: Line) -> tuple[bool, int, int]:
        priority = priorities.get(line["event"], 0) if "event" in line else 1
        return priority >= 0, line["step"], priority

    return sorted([*metrics.rows, *metrics.events], key=sort_key)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        return read_settings(path) if path.is_file() else {}
    except UserError as error:  # damaged, or from another version: the rows can still be read
        logger.warning("%s; using the defaults instead", one_line(error))
        return {}
