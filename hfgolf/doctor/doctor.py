"""The doctor: reads a run's metrics, during training or afterwards, and reports symptoms, likely causes and a fix.

Owns that each symptom is reported only once. Measures nothing itself and never stops a run.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfgolf.config.parse import read_settings
from hfgolf.config.sections import RunConfig
from hfgolf.doctor import resource_symptoms, symptoms
from hfgolf.doctor.finding import Finding
from hfgolf.doctor.history import History, Line
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import Metrics, read_metrics_of
from hfgolf.system.command import own_command
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line

logger = logging.getLogger(__name__)


class Doctor:
    """Observe the lines of metrics.jsonl one at a time and report each symptom once, but spikes repeatedly.

    settings: the config of the run as {"section.key": value}. Missing keys have their defaults.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._history = History(RunConfig().flat() | dict(settings))
        self._detectors = [*symptoms.detectors(), *resource_symptoms.detectors()]
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
    return symptom, step if symptom in (symptoms.SPIKE, symptoms.NORM_SPIKE) else None


OFTEN = 4.0
"""Epochs after which a run teaches another one well: 0.11 nats per token after 4.5, benchmarks/learning/distill.py."""


def advice(folder: Path, epochs: float | None) -> str | None:
    """Say what makes a healthy, complete run better whose text is short for it; None if it is not.

    epochs: passes over its text.
    """
    if epochs is None or epochs < OFTEN or not RunFolder(folder).summary.is_file():  # only a complete run teaches
        return None
    settings = settings_of(folder)
    if settings["model.architecture"] != "golf" or settings["data.mixture"] or settings["train.distill_from"]:
        return None
    command = f"{own_command()} train --distill_from {shlex.quote(str(folder))}"
    return f"the text was read {epochs:.1f} times; a model that this one teaches learns more from it: {command}"


def examine(folder: Path) -> tuple[list[Finding], Metrics]:
    """Return the findings and the metrics of a run, which may be training, complete or dead.

    Raises UserError if the folder does not exist or its metrics.jsonl has neither row nor event.
    """
    metrics, doctor = read_metrics_of(folder), Doctor(settings_of(folder))
    lines = [line for line in in_order(metrics) if line.get("event") != "finding"]
    return [finding for line in lines for finding in doctor.observe(line)], metrics


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the config of a run as {"section.key": value}, with the defaults for what cannot be read."""
    config, settings = folder / "config.yaml", dict[str, Any]()
    try:
        settings = read_settings(config) if config.is_file() else {}
    except UserError as error:  # damaged, or from another version: the rows can still be read
        logger.warning("%s; using the defaults instead", one_line(error))
    return RunConfig().flat() | settings


def in_order(metrics: Metrics) -> list[Line]:
    """Return rows and events in a plausible order: first the earlier findings, then everything else by step.

    At the same step, events come before the row, except that a resume or rollback comes after the row it goes back to.
    """
    priorities = {"finding": -1, "resumed": 2, "rollback": 2}

    def sort_key(line: Line) -> tuple[bool, int, int]:
        priority = priorities.get(line["event"], 0) if "event" in line else 1
        return priority >= 0, line["step"], priority

    return sorted([*metrics.rows, *metrics.events], key=sort_key)
