"""What the doctor reports, and the values it advises."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfgolf.report.history import History


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


def learning_rates(history: History, factor: float) -> dict[str, Any]:
    """Return the peak learning rates of the optimizer, times a factor."""
    others = ["optim.adamw_learning_rate"] if history.settings["optim.name"] == "muon" else []
    keys = ["optim.learning_rate", *others, "optim.embedding_learning_rate"]
    return {key: short(factor * rate) for key in keys if (rate := history.settings[key]) is not None}


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
