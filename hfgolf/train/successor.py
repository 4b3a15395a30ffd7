"""The minutes that a short text leaves: the model that used it up teaches another one (hooks/distillation.py).

Owns whether there is time, and the config of the second run, which is an ordinary one. Does not train.
"""

from __future__ import annotations

from typing import Any

from hfgolf.config.parse import DISTILL_FROM, ResolvedConfig, load_config, name_of
from hfgolf.run.folder import RunFolder, run_folder
from hfgolf.run.record import read_summary, row_seconds
from hfgolf.train.law import decay_of

STEP = 4 / 3
"""A step with a teacher, as a multiple of one without: its forward pass is a third of a step."""
MOST_STEPS = 2
"""Steps of the second training, as a multiple of the first: with a teacher, a model overfits later."""
LEAST_STEPS = 0.5
"""The autopilot plans at least as many as the first makes; if that one takes longer than expected, half will do."""


def has_time_to_teach(seconds: float, minutes: float, steps: float = 1.0) -> bool:
    """Return whether a model that trains for so many seconds can teach another one in the minutes of both.

    All are those that train.max_minutes counts. steps: of the second training, as a multiple of the first.
    """
    return (1 + steps * STEP) * seconds <= 60 * minutes


def steps_of_taught(steps: int, seconds: float, minutes: float) -> int:
    """Return the steps of a model that another one teaches, after its training of so many steps and seconds."""
    return round(steps * min(MOST_STEPS, (60 * minutes - seconds) / (STEP * seconds)))


def is_used_up(said: ResolvedConfig) -> bool:
    """Return whether a complete run is to teach another one: the autopilot ended it before its minutes."""
    settings = run_folder(said.config).read_config() or {}
    return said.sources.get("train.max_tokens") == "auto" and bool(settings.get("train.max_tokens"))


def taught(said: ResolvedConfig) -> ResolvedConfig | None:
    """Return the config of the run that learns from a complete one, in the minutes that it left, as it resumes.

    None if they are too few. Its name ends with "-taught", without a source: if another run has it, it gets a number.
    """
    folder = run_folder(said.config)
    seconds, minutes, summary = _seconds(folder), said.config.train.max_minutes or 0, read_summary(folder.summary)
    if not has_time_to_teach(seconds, minutes, LEAST_STEPS):
        return None
    steps = steps_of_taught(summary["steps"], seconds, minutes)
    values: dict[str, Any] = {key: said.config.flat()[key] for key in said.sources if key.startswith("hub.")}
    values |= {DISTILL_FROM: [str(folder.path)], "train.max_minutes": float(f"{minutes - seconds / 60:.3g}")}
    values["train.final_eval_tokens"] = summary["val_tokens"]  # so that their last evaluations compare
    values |= {"train.max_steps": steps} | ({"train.resume": "auto"} if said.config.train.resume else {})
    run = load_config([], where="auto", values=values)
    unstated: dict[str, Any] = {"run__name": name_of(str(said.config.run.name), "-taught")}
    if said.sources.get("optim.ema_decay") == "auto" and run.config.optim.ema_decay is not None:
        unstated["optim__ema_decay"] = decay_of(steps)  # with the source auto, the autopilot would choose again
    return ResolvedConfig(run.config.replace(**unstated), run.sources)


def _seconds(folder: RunFolder) -> float:
    """Return the seconds that train.max_minutes counts, up to the end of the run: its setup is none of them."""
    return sum(row_seconds(read_summary(folder.summary) | {"seconds_setup": None}).values())
