"""A finding of the doctor, and the config values it recommends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfgolf.doctor.history import History


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
        return " ".join(f"--{key} {str(value).lower()}" for key, value in self.fix.items())


Detector = Callable[[History], Finding | None]


USUAL_LEARNING_RATES = {"muon": 0.02, "adamw": 0.003, "sgd": 0.1}
"""Peaks for small models, as in OptimConfig. The best ones in benchmarks/experiments are within a factor of 3."""
FAR_ABOVE_USUAL = 10  # times the usual rate; halving a rate above that would not help


def usual_learning_rates(history: History) -> dict[str, float]:
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
    return max(history.settings[key] / usual for key, usual in usual_learning_rates(history).items())


def scaled_learning_rates(history: History, factor: float) -> dict[str, Any]:
    """Return the peak learning rates times a factor, or the usual rate for one far above it."""
    rates = {key: (history.settings[key], usual) for key, usual in usual_learning_rates(history).items()}
    return {
        key: two_digits(usual if rate > FAR_ABOVE_USUAL * usual else factor * rate)
        for key, (rate, usual) in rates.items()
    }


def full_precision(history: History) -> dict[str, Any]:
    """Return the setting that turns 16-bit compute off, or nothing if it is off already."""
    return {} if history.settings["train.mixed_precision"] == "no" else {"train.mixed_precision": "no"}


def faster_data(history: History) -> dict[str, Any]:
    """Return the settings that deliver batches sooner: more workers, and the tokens in memory."""
    in_memory = {} if history.settings["data.in_memory"] is True else {"data.in_memory": True}
    return {"data.num_workers": max(2, 2 * history.settings["data.num_workers"])} | in_memory


def two_digits(number: float) -> float:
    """Round a number to two significant digits, as a person would set it."""
    return float(f"{number:.2g}")


def robust_sigma(values: Collection[float]) -> float:
    """Return a standard deviation that outliers barely affect: 1.4826 times the median absolute deviation."""
    array = np.asarray(list(values))
    return 1.4826 * float(np.median(np.abs(array - np.median(array))))
