"""A finding of the doctor, and the config values it recommends."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfgolf.doctor.history import History
from hfgolf.system.command import own_command


@dataclass(frozen=True)
class Finding:
    """A symptom of a run, and what to do about it. Its fields are written to metrics.jsonl."""

    symptom: str
    step: int
    """The step of its first appearance."""
    saw: str
    """The evidence."""
    causes: tuple[str, ...]
    """The most likely cause comes first."""
    fix: dict[str, Any]
    """Values to try, by "section.key". Empty if no setting helps."""

    def __str__(self) -> str:
        advice = f"; try {self.options}" if self.fix else ""
        return f"{self.symptom} at step {self.step}: {self.saw}; most likely {self.causes[0]}{advice}"

    @property
    def options(self) -> str:
        """The fix as command line options."""
        return _options(self.fix)

    def find_lr(self, config: Path) -> str | None:
        """Return the command that finds learning rates for the run with this config; None if the fix has none.

        It starts from the rates of the fix, because those of the run may break its steps, too.
        """
        rates = {key: value for key, value in self.fix.items() if key.endswith("learning_rate")}
        return f"{own_command()} find_lr --config {shlex.quote(str(config))} {_options(rates)}" if rates else None


def _options(values: Mapping[str, Any]) -> str:
    return " ".join(f"--{key} {str(value).lower()}" for key, value in values.items())


Detector = Callable[[History], Finding | None]

IN_A_ROW = 3  # a third time in a row is no coincidence
USUAL_LEARNING_RATES = {"muon": 0.02, "adamw": 0.003, "sgd": 0.1}
"""Peaks for small models, as in OptimSection. The best ones in benchmarks/experiments are within a factor of 3."""
FAR_ABOVE_USUAL = 10  # times the usual rate; halving a rate above that would not help, nor doubling one as far below


def _usual_learning_rates(history: History) -> dict[str, float]:
    """Return {key: usual peak} for each learning rate of the run's optimizer."""
    name = history.settings["optim.name"]
    as_adamw = name == "muon" and history.settings["optim.update_scale"] == "match_rms_adamw"
    usual = {"optim.learning_rate": USUAL_LEARNING_RATES["adamw" if as_adamw else name]}
    if name == "muon":
        usual["optim.adamw_learning_rate"] = USUAL_LEARNING_RATES["adamw"]
    if history.settings["optim.embedding_learning_rate"] is not None:
        usual["optim.embedding_learning_rate"] = 10 * USUAL_LEARNING_RATES["adamw"]  # embeddings tolerate more
    return usual


def max_learning_rate_ratio(history: History) -> float:
    """Return the largest ratio of a peak learning rate to its usual value."""
    return max(history.settings[key] / usual for key, usual in _usual_learning_rates(history).items())


def scaled_learning_rates(history: History, factor: float) -> dict[str, Any]:
    """Return the peak learning rates times a factor, or the usual rate for one far above it, or far below if raised."""
    values = {}
    for key, usual in _usual_learning_rates(history).items():
        rate = history.settings[key]
        is_far_off = rate > FAR_ABOVE_USUAL * usual or (factor > 1 and rate * FAR_ABOVE_USUAL < usual)
        values[key] = two_digits(usual if is_far_off else factor * rate)
    return values


def two_digits(number: float) -> float:
    """Round a number to two significant digits, as a person would set it."""
    return float(f"{number:.2g}")
