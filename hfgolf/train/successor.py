"""The minutes that a short text leaves: the model that used it up teaches another one (hooks/distillation.py).

Owns when this pays and the config of the second run, which is an ordinary one. Does not train.
"""

from __future__ import annotations

from typing import Any

from hfgolf.config.parse import DISTILL_FROM, ResolvedConfig, load_config, name_of
from hfgolf.run.folder import run_folder
from hfgolf.run.record import read_summary

COST = 4 / 3
"""Of a training with a teacher, as a factor: its forward pass is a third of a step."""


def has_time(seconds: float, minutes: float | None) -> bool:
    """Return whether a training that took so many seconds can be repeated with a teacher in the minutes of both."""
    return minutes is not None and (1 + COST) * seconds <= 60 * minutes


def successor(said: ResolvedConfig) -> ResolvedConfig | None:
    """Return the config of the run that a complete one teaches, in what it left of its minutes.

    None if the autopilot did not end it early, or if too little is left. It has the name of the first, with "-taught".
    """
    config, folder = said.config, run_folder(said.config)
    settings, summary = folder.read_config() or {}, read_summary(folder.summary)
    seconds = sum(value for key, value in summary.items() if key.startswith("seconds_"))
    is_used_up = said.sources.get("train.max_tokens") == "auto" and settings.get("train.max_tokens")
    if not (is_used_up and config.train.max_minutes and has_time(seconds, config.train.max_minutes)):
        return None
    left = 60 * config.train.max_minutes - seconds
    values: dict[str, Any] = {key: config.flat()[key] for key in said.sources if key.startswith("hub.")}
    values |= {DISTILL_FROM: [str(folder.path)], "train.max_minutes": float(f"{left / 60:.3g}")}
    values |= {"train.resume": "auto"} if config.train.resume else {}
    taught = load_config([], values=values)
    # without a source: if another run has that name, this one gets a number
    return ResolvedConfig(taught.config.replace(run__name=name_of(str(config.run.name), "-taught")), taught.sources)
