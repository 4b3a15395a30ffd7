"""The doctor: looks at what a run logs, while it trains or afterwards, and names its illness, the causes and the fix.

Owns what is looked at, in which order, and what is told only once. How an illness looks is in symptoms.py. Measures
nothing itself and never stops a run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfgolf.command_line import one_line, read_settings
from hfgolf.config import RunConfig
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
    not_finite,
    not_finite_on_tokens,
    validation_rises,
)
from hfgolf.errors import UserError
from hfgolf.run.metrics import Metrics, read_metrics

logger = logging.getLogger(__name__)


class Doctor:
    """Takes the lines of a metrics.jsonl one after the other and tells of each symptom once, of spikes as they add up.

    settings: the config of the run as {"section.key": value}; the default counts where a key is missing.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._history = History(RunConfig().flat() | dict(settings))
        self._detectors: list[Detector] = [
            not_finite,
            not_finite_on_tokens,
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
        ]
        self._told: set[tuple[str, int | None]] = set()

    def look_at(self, line: Line) -> list[Finding]:
        """Return what a row or an event brings to light; one of `finding` has told it already."""
        if line.get("event") == "finding":
            self._told.add(_identity(line["symptom"], line["step"]))
            return []
        self._history.add(line)
        findings = [finding for detect in self._detectors if (finding := detect(self._history))]
        new = [finding for finding in findings if _identity(finding.symptom, finding.step) not in self._told]
        self._told.update(_identity(finding.symptom, finding.step) for finding in new)
        return new


def _identity(symptom: str, step: int) -> tuple[str, int | None]:
    return symptom, step if symptom in (SPIKE, NORM_SPIKE) else None


def examine(folder: Path) -> tuple[list[Finding], Metrics]:
    """Return what a run suffers or suffered from, and its rows; it may be training, complete or dead.

    Raises UserError where there is no such folder, or no row in it.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        problem = "there is no metrics.jsonl in it" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder}: {problem}; name the folder of a run, such as runs/small.")
    try:
        metrics = read_metrics(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable.") from None
    if not metrics.rows and not metrics.events:
        raise UserError(f"{path} holds no row; the run has logged nothing yet.")
    doctor = Doctor(_settings(folder))
    lines = [line for line in in_order(metrics) if line.get("event") != "finding"]
    return [finding for line in lines for finding in doctor.look_at(line)], metrics


def in_order(metrics: Metrics) -> list[Line]:
    """Return rows and events in an order in which they may have happened: what was told, then step after step.

    What a step was skipped for comes before the row that holds the step, a restore after the row it goes back to.
    """
    places = {"finding": -1, "resumed": 2, "rollback": 2}

    def place(line: Line) -> tuple[bool, int, int]:
        kind = places.get(line["event"], 0) if "event" in line else 1
        return kind >= 0, line["step"], kind

    return sorted([*metrics.rows, *metrics.events], key=place)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        return read_settings(path) if path.is_file() else {}
    except UserError as error:  # of another version, or damaged: the rows are there all the same
        logger.warning("%s; the defaults are taken for it", one_line(error))
        return {}
