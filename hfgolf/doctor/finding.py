"""What the doctor reports, and the values it advises."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfgolf.doctor.history import History


@dataclass(frozen=True)
class Finding:
    """A symptom of a run, and what to do about it."""

    symptom: str
    step: int
    """Where it was seen first."""
    saw: str
    causes: tuple[str, ...]
    """The most likely first."""
    fix: dict[str, Any]
    """Values to try, by "section.key"; empty where no key helps."""

    def __str__(self) -> str:
        advice = f"; try {self.options}" if self.fix else ""
        return f"{self.symptom} at step {self.step}: {self.saw}; most likely {self.causes[0]}{advice}"

    @property
    def options(self) -> str:
        """The fix as a command line."""
        return " ".join(f"--{key} {str(value).lower()}" for key, value in self.fix.items())


Detector = Callable[[History], Finding | None]


USUAL_LEARNING_RATES = {"muon": 0.02, "adamw": 0.003, "sgd": 0.1}
"""Peaks that suit small models, as in OptimConfig; the best of benchmarks/experiments are within 3 times of them."""
UNUSUAL = 10  # times the usual rate: half of what is beyond that would be no better


def usual_learning_rates(history: History) -> dict[str, float]:
    """Return {key: usual peak} of the learning rates that the run's optimizer has."""
    name = history.settings["optim.name"]
    as_adamw = name == "muon" and history.settings["optim.update_scale"] == "match_rms_adamw"
    usual = {"optim.learning_rate": USUAL_LEARNING_RATES["adamw" if as_adamw else name]}
    if name == "muon":
        usual["optim.adamw_learning_rate"] = USUAL_LEARNING_RATES["adamw"]
    if history.settings["optim.embedding_learning_rate"] is not None:
        usual["optim.embedding_learning_rate"] = 10 * USUAL_LEARNING_RATES["adamw"]  # embeddings like more
    return usual


def most_unusual(history: History) -> float:
    """Return the peak learning rates over the usual ones, the largest of these ratios."""
    return max(history.settings[key] / usual for key, usual in usual_learning_rates(history).items())


def learning_rates(history: History, factor: float) -> dict[str, Any]:
    """Return the optimizer's peak learning rates, times a factor; the usual one in place of one far above it."""
    rates = {key: (history.settings[key], usual) for key, usual in usual_learning_rates(history).items()}
    return {key: short(usual if rate > UNUSUAL * usual else factor * rate) for key, (rate, usual) in rates.items()}


def full_precision(history: History) -> dict[str, Any]:
    """Return what turns 16-bit computation off, nothing where it is."""
    return {} if history.settings["train.mixed_precision"] == "no" else {"train.mixed_precision": "no"}


def quicker_data(history: History) -> dict[str, Any]:
    """Return what brings batches sooner: more workers, and the tokens in memory."""
    in_memory = {} if history.settings["data.in_memory"] is True else {"data.in_memory": True}
    return {"data.num_workers": max(2, 2 * history.settings["data.num_workers"])} | in_memory


def short(number: float) -> float:
    """Return a number with two digits, as a person would set it."""
    return float(f"{number:.2g}")


def robust_sigma(values: Collection[float]) -> float:
    """Return the standard deviation of normal values that have the median absolute deviation of these."""
    array = np.asarray(list(values))
    return 1.4826 * float(np.median(np.abs(array - np.median(array))))
