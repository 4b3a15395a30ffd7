"""What finished runs left on the disk, as a comparison needs it: curves, what they were judged on, by which machine.

Reads config, metrics, metadata and summary of a run folder and tells runs of one arm from those of another.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfgolf.command_line import one_line
from hfgolf.errors import UserError
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_rows
from hfgolf.run.record import read_json, read_summary
from hfgolf.tools.compare.differences import Curve, Point
from hfgolf.tools.compare.experiment import PlannedRun
from hfgolf.tools.compare.launch import CONCURRENT_RUNS

# What two runs of one arm may differ in: seed, where they lie, and how the machine goes about them.
_NOT_OF_THE_ARM = re.compile(
    r"run\.|track\.|hub\.|data\.(cache_dir|num_workers|prefetch_factor|in_memory)$|train\.(resume|cpu_threads|save_\w+|keep_last)$"
)
_METADATA: dict[str, Any] = {
    "seed": int,
    "config": dict,
    "sources": dict,
    "environment": dict,
    "hardware": dict,
    "packages": dict,
    "commit": str | None,
}


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    path: Path
    curve: Curve
    """Of the weights that the run exports, raw or averaged: validation losses in nats a token."""
    judged_on: tuple[int, int]
    """Tokens and bytes of the validation part behind each of these losses."""
    is_whole: bool
    """Was that the whole of it, or as much as train.eval_tokens said."""
    config: dict[str, Any]
    """By "section.key", as in metadata.json."""
    metadata: dict[str, Any]
    summary: dict[str, Any]

    @property
    def seed(self) -> int:
        return self.metadata["seed"]

    @property
    def ran_beside_others(self) -> bool:
        return CONCURRENT_RUNS in self.metadata["environment"]


def read_outcome(folder: RunFolder) -> Outcome:
    """Read a finished run; UserError where it is not finished, or ended with a loss that is not finite.

    The final loss is that of the last step, and not the summary's, which is of the best one: to choose the best by the
    validation part would favour curves that go up and down. The seconds are those of compilation and of as many median
    steps: without evaluations and saves, without a pause of the machine, or of the run between two sessions.
    """
    if not (folder.summary.is_file() and folder.metrics.is_file() and folder.metadata.is_file()):
        raise UserError(f"{folder.path} holds no complete run; train it to its end, or leave it out.")
    try:
        return _outcome(folder)
    except (KeyError, TypeError, OSError) as error:
        raise UserError(
            f"{folder.path} is damaged: summary.json, metadata.json or metrics.jsonl lacks something"
            f" ({type(error).__name__}: {one_line(error)}); train it again, or leave it out."
        ) from None


def _outcome(folder: RunFolder) -> Outcome:
    summary, metadata, rows = read_summary(folder.summary), read_json(folder.metadata), read_rows(folder.metrics)
    for key, kind in _METADATA.items():
        if not isinstance(metadata[key], kind):
            raise TypeError(f"{key} in metadata.json")
    column = {"raw": "val_loss", "ema": "val_loss_ema"}[summary["weights"]]
    if not rows:
        raise KeyError("rows")
    first, last = rows[0], rows[-1]
    step_seconds = statistics.median(_training_seconds(row) / len(row["train_losses"]) for row in rows)
    before_seconds = first["elapsed_seconds"] - _training_seconds(first)  # the clock begins before compilation
    curve = [
        Point(row["step"], before_seconds + row["step"] * step_seconds, row[column])
        for row in rows
        if row.get(column) is not None  # no evaluation, or one that is not finite
    ]
    if not curve or curve[-1].step != last["step"]:
        raise UserError(f"{folder.path} ended with a validation loss that is not finite.")
    return Outcome(
        path=folder.path,
        curve=curve,
        judged_on=(last["val_tokens"], last["val_bytes"]),
        is_whole=last["val_tokens"] == summary["val_tokens"],
        config=metadata["config"],
        metadata=metadata,
        summary=summary,
    )


def read_outcomes(
    runs: Sequence[PlannedRun], failed: Mapping[str, str]
) -> tuple[dict[str, dict[int, Outcome]], dict[str, dict[int, str]]]:
    """Return by arm and seed the runs of an experiment that finished, and why others did not; every arm is in both.

    failed: by the name of a run why it ended, in one line.
    """
    outcomes: dict[str, dict[int, Outcome]] = {run.arm: {} for run in runs}
    failures: dict[str, dict[int, str]] = {run.arm: {} for run in runs}
    for run in runs:
        try:
            if run.name in failed:
                raise UserError(failed[run.name])
            outcomes[run.arm][run.seed] = read_outcome(run.folder)
        except UserError as error:
            failures[run.arm][run.seed] = str(error)
    return outcomes, failures


def group_by_arm(outcomes: Sequence[Outcome]) -> dict[str, dict[int, Outcome]]:
    """Return runs by arm and seed: an arm are those that differ only in the seed and where they lie.

    An arm is called as its first run is, less a `-seed1` at the end. Raises UserError for two runs of one arm and seed.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(json.dumps(_settings(outcome), sort_keys=True), []).append(outcome)
    arms: dict[str, dict[int, Outcome]] = {}
    for members in groups.values():
        name = re.sub(r"[-_.]seed\d+$", "", members[0].path.name)
        name = str(members[0].path) if name in arms else name
        for outcome in members:
            twin = arms.setdefault(name, {}).setdefault(outcome.seed, outcome)
            if twin is not outcome:
                raise UserError(f"--runs: {twin.path} and {outcome.path} are the same config and seed; leave one out.")
    return arms


def _settings(outcome: Outcome) -> dict[str, Any]:
    """Return the config as far as it makes the arm: without what was decided anew on each machine."""
    sources = outcome.metadata["sources"]
    return {
        key: value
        for key, value in outcome.config.items()
        if not _NOT_OF_THE_ARM.match(key) and sources.get(key) != "auto"
    }


def _training_seconds(row: dict[str, Any]) -> float:
    """Return the seconds of the steps since the row before."""
    return row["data_seconds"] + row["compute_seconds"]
