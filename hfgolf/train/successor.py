"""The minutes that a short text leaves: models that used it up teach another one (hooks/distillation.py).

Owns how many there are, and the configs of the runs after the first, which are ordinary ones. Does not train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hfgolf.config.parse import DISTILL_FROM, ResolvedConfig, base_for, load_config, name_of
from hfgolf.run.folder import RunFolder, run_folder
from hfgolf.run.record import read_summary, row_seconds

COSTS = {1: 4 / 3, 2: 1 + 5 / 3}
"""{teachers: what follows the first training, as a multiple of it}. The forward pass of each is a third of a step."""


def count_teachers(seconds: float, minutes: float) -> int:
    """Return how many models that train for so many seconds can teach another one in the minutes of all: 0 to 2."""
    return max((count for count, cost in COSTS.items() if (1 + cost) * seconds <= 60 * minutes), default=0)


def teachers_in_time(said: ResolvedConfig) -> int:
    """Return how many models can teach another one after a complete run: 0 if the autopilot did not end it early."""
    folder = run_folder(said.config)
    settings = folder.read_config() or {}
    is_used_up = said.sources.get("train.max_tokens") == "auto" and settings.get("train.max_tokens")
    return count_teachers(_seconds(folder), said.config.train.max_minutes or 0) if is_used_up else 0


def second_teacher(said: ResolvedConfig) -> ResolvedConfig:
    """Return the config of the training of a complete run with another seed. Its name ends with "-second"."""
    folder = run_folder(said.config)
    base, limits = base_for({DISTILL_FROM: [str(folder.path)]}), _limits(said, [folder], 1 / COSTS[2])
    return _named(said, load_config([], where="auto", base=base, values=limits), "-second")


def taught(said: ResolvedConfig, teachers: Sequence[RunFolder]) -> ResolvedConfig:
    """Return the config of the run that learns from a complete one, or from two. Its name ends with "-taught"."""
    values: dict[str, Any] = {key: said.config.flat()[key] for key in said.sources if key.startswith("hub.")}
    values |= {DISTILL_FROM: [str(folder.path) for folder in teachers]}
    return _named(said, load_config([], where="auto", values=values | _limits(said, teachers)), "-taught")


def _limits(said: ResolvedConfig, before: Sequence[RunFolder], share: float = 1.0) -> dict[str, Any]:
    """Return a share of the minutes that these runs left, and that a run resumes if the first one may."""
    left = (said.config.train.max_minutes or 0) - sum(map(_seconds, before)) / 60
    limits: dict[str, Any] = {"train.max_minutes": float(f"{share * left:.3g}")}
    return limits | ({"train.resume": "auto"} if said.config.train.resume else {})


def _named(said: ResolvedConfig, run: ResolvedConfig, ending: str) -> ResolvedConfig:
    """Return a run with the name of the first and an ending; without a source: if another has it, it gets a number."""
    return ResolvedConfig(run.config.replace(run__name=name_of(str(said.config.run.name), ending)), run.sources)


def _seconds(folder: RunFolder) -> float:
    return sum(row_seconds(read_summary(folder.summary)).values())
