"""Read finished runs for a comparison: their curves, the validation tokens behind them, and the machine.

Reads config, metrics, metadata and summary from the run folders, and groups the runs by arm.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfgolf.compare.experiment import PlannedRun
from hfgolf.compare.launch import CONCURRENT_RUNS
from hfgolf.compare.statistics import Curve, Point
from hfgolf.config.other_names import in_current_names
from hfgolf.run.find_model import is_run, models_here
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import of_averages, on_subset, read_rows
from hfgolf.run.record import read_json, read_summary
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line

# Keys in which runs of one arm may differ: seed, location, and settings that do not affect the results.
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
    """Validation losses (nats per token) of the weights that the run exports, raw or averaged."""
    evaluated_on: tuple[int, int]
    """Validation tokens and their bytes behind the final loss."""
    is_whole: bool
    """Whether that is the whole validation set; False for a run of the first versions that train.eval_tokens limits."""
    curve_tokens: int
    """Validation tokens behind each point of the curve."""
    config: dict[str, Any]
    """{"section.key": value}, from metadata.json."""
    metadata: dict[str, Any]
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of its folder, also of one that is given as `.` or `..`."""
        return Path(os.path.abspath(self.path)).name

    @property
    def seed(self) -> int:
        return self.metadata["seed"]

    @property
    def shared_the_machine(self) -> bool:
        return CONCURRENT_RUNS in self.metadata["environment"]


def read_outcome(folder: RunFolder) -> Outcome:
    """Read a finished run. Raises UserError if it is not finished or its last loss is not finite.

    The final loss is that of the last step, not that of the best step in the summary: selecting the best step on the
    validation set would favor noisy curves. The seconds count compilation and the median step time, without
    evaluations, saves, and pauses of the machine or between sessions.
    """
    if not (folder.summary.is_file() and folder.metrics.is_file() and folder.metadata.is_file()):
        if not is_run(folder.path):
            raise UserError(f"there is no run {folder.path}; {models_here(str(folder.path))}")
        raise UserError(f"{folder.path} holds no complete run; finish its training, or leave it out.")
    try:
        return _outcome(folder)
    except (KeyError, TypeError, OSError) as error:
        raise UserError(
            f"{folder.path} is damaged: something is missing in summary.json, metadata.json or metrics.jsonl"
            f" ({type(error).__name__}: {one_line(error)}); train it again, or leave it out."
        ) from None


def _outcome(folder: RunFolder) -> Outcome:
    summary, metadata, rows = read_summary(folder.summary), read_json(folder.metadata), read_rows(folder.metrics)
    for key, kind in _METADATA.items():
        if not isinstance(metadata[key], kind):
            raise TypeError(f"{key} in metadata.json")
    if summary["weights"] == "ema":
        rows = [of_averages(row) for row in rows]
    if not rows:
        raise KeyError("rows")
    last, seconds = rows[-1], [row["data_seconds"] + row["compute_seconds"] for row in rows]  # since the row before
    step_seconds = statistics.median(spent / len(row["train_losses"]) for spent, row in zip(seconds, rows, strict=True))
    before_seconds = rows[0]["elapsed_seconds"] - seconds[0]  # compilation; the clock starts before it
    curve = [
        Point(row["step"], before_seconds + row["step"] * step_seconds, on_subset(row)["val_loss"])
        for row in rows
        if on_subset(row).get("val_loss") is not None  # None: no evaluation, or a nonfinite loss
    ]
    if not curve or curve[-1].step != last["step"]:
        raise UserError(f"{folder.path} ended with a validation loss that is not finite.")
    curve[-1] = curve[-1]._replace(loss_at_end=last["val_loss"])
    return Outcome(
        path=folder.path,
        curve=curve,
        evaluated_on=(last["val_tokens"], last["val_bytes"]),
        is_whole=last["val_tokens"] == summary["val_tokens"] and summary.get("val_share_read", 1) == 1,
        curve_tokens=on_subset(last)["val_tokens"],
        config=in_current_names(metadata["config"]),
        metadata=metadata,
        summary=summary,
    )


def read_outcomes(
    runs: Sequence[PlannedRun], failed: Mapping[str, str]
) -> tuple[dict[str, dict[int, Outcome]], dict[str, dict[int, str]]]:
    """Return ({arm: {seed: finished run}} with every arm, {arm: {seed: why it did not finish}}).

    failed: {name of a run: why it failed, in one line}.
    """
    outcomes: dict[str, dict[int, Outcome]] = {run.arm: {} for run in runs}
    failures: dict[str, dict[int, str]] = {}
    for run in runs:
        try:
            if run.name in failed:
                raise UserError(failed[run.name])
            outcomes[run.arm][run.seed] = read_outcome(run.folder)
        except UserError as error:
            failures.setdefault(run.arm, {})[run.seed] = str(error)
    return outcomes, failures


def group_by_arm(outcomes: Sequence[Outcome], *, by_name: bool = False) -> dict[str, dict[int, Outcome]]:
    """Return {arm: {seed: run}}. Runs belong to one arm if they differ only in the seed and their location.

    An arm is named after its first run, without a final `-seed1`. by_name: runs of the same config and seed, of two
    versions of the code perhaps, belong to an arm for each such name. Raises UserError for two runs with one arm and
    seed.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        sources, settings = outcome.metadata["sources"], {"corpus": outcome.metadata.get("corpus")}
        for key, value in outcome.config.items():
            if not _NOT_OF_THE_ARM.match(key) and sources.get(key) != "auto":  # which each machine decides for itself
                settings[key] = value
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(outcome)
    arms: dict[str, dict[int, Outcome]] = {}
    for members in groups.values():
        has_twins = by_name and len({outcome.seed for outcome in members}) < len(members)
        taken = set(arms)
        for outcome in members:
            namesake = outcome if has_twins else members[0]
            stem = re.sub(r"[-_.]seed\d+$", "", namesake.name)
            name = str(namesake.path) if stem in taken else stem
            twin = arms.setdefault(name, {}).setdefault(outcome.seed, outcome)
            if twin is not outcome:
                raise UserError(f"{twin.path} and {outcome.path} are the same config and seed; leave one out.")
    return arms
