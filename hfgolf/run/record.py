"""Read a run back from its folder: its rows and events, its final figures, its time and its cost.

Owns the definitions of a run's final figures. Only metrics.jsonl is required; other missing or broken files are
treated as empty.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hfgolf.config.parse import read_settings
from hfgolf.run.metrics import Metrics, is_number, of_averages, read_metrics_of
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact
from hfgolf.system.wording import dollars, duration, size

_TEXTS = {"run", "weights", "device", "commit", "model", "sample"}
"""Keys of the summary that hold text. "commits" holds a list of texts, "init_from" an object, all others numbers."""
_TEXT_KEYS = {
    *("source", "files", "val_files", "split", "val_fraction", "hub_name", "hub_config", "hub_split"),
    *("text_column", "messages_column", "ids_column"),
}
"""Of a corpus (Corpus.identity), and of each text of a mixture after `entry 1: `: what tells the validation text.

Others depend on the version of hfgolf, or, as the revision of a dataset, may change without it.
"""
_YEAR_9999 = 253_370_764_800  # seconds since 1970


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says about it."""

    name: str
    metrics: Metrics
    config: dict[str, Any]
    """{"section.key": value}"""
    config_yaml: str
    metadata: dict[str, Any]
    summary: dict[str, Any]
    """The final figures; empty if the run is not complete."""
    profile: dict[str, Any]

    @property
    def last(self) -> dict[str, Any]:
        """The last row."""
        return self.metrics.rows[-1]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [event for event in self.metrics.events if event["event"] == kind]


def read_run(folder: Path, metrics: Metrics | None = None) -> RunRecord:
    """Read a run's folder, whether it is complete or not. metrics: its rows and events, if they are at hand.

    Raises UserError if there is not a single row.
    """
    metrics = metrics or read_metrics_of(folder)
    if not metrics.rows:
        raise UserError(
            f"{folder / 'metrics.jsonl'} holds no row: the run has logged nothing yet; wait for its first step."
        )
    config: dict[str, Any] = {}
    with suppress(UserError):
        config = read_settings(folder / "config.yaml")
    summary = read_summary(folder / "summary.json")
    if summary.get("weights") == "ema" or config.get("optim.ema_export"):
        metrics = replace(metrics, rows=[of_averages(row) for row in metrics.rows])
    return RunRecord(
        name=redact(folder.resolve().name),
        metrics=metrics,
        config=config,
        config_yaml=_text(folder / "config.yaml"),
        metadata=read_json(folder / "metadata.json"),
        summary=summary,
        profile=read_json(folder / "profile.json"),
    )


def final_figures(run: RunRecord, price_per_hour: float | None) -> dict[str, Any]:
    """Return the final figures of a run, {key of FIGURES: value}; None for an unknown figure.

    price_per_hour: dollars for the machine; None: no cost. The cost covers the sessions of the run, not the time
    between them.
    """
    rows, summary = run.metrics.rows, run.summary
    commit, hardware = run.metadata.get("commit"), run.metadata.get("hardware")
    device = hardware.get("device") if isinstance(hardware, dict) else None
    evaluated: dict[str, Any] = next((row for row in reversed(rows) if row.get("val_loss") is not None), {})
    start: dict[str, Any] = next(reversed(run.events("init_from")), {})
    if start.get("val_tokens") != summary.get("val_tokens", start.get("val_tokens")):
        start = {}  # of other text: a run that went on with another train.final_eval_tokens
    old: float | None = summary.get("old_val_bits_per_byte", evaluated.get("old_val_bits_per_byte"))
    old_start: float | None = start.get("old_val_bits_per_byte")
    seconds = seconds_by_kind(run)
    work_seconds = sum(seconds.values()) - seconds["idle"] if seconds else run.last.get("elapsed_seconds")
    return {
        "val_loss": summary.get("val_loss", evaluated.get("val_loss")),
        "val_bits_per_byte": summary.get("val_bits_per_byte", evaluated.get("val_bits_per_byte")),
        "start_val_bits_per_byte": start.get("val_bits_per_byte"),
        "old_val_bits_per_byte": old,
        "old_change": None if old is None or old_start is None else old - old_start,
        "val_step": summary.get("step", evaluated.get("step")),
        "train_loss": run.last.get("train_loss"),
        "steps": run.last["step"],
        "tokens": run.last.get("tokens"),
        "seconds": work_seconds,
        "dollars": None if price_per_hour is None or work_seconds is None else work_seconds / 3600 * price_per_hour,
        "tokens_per_second": _aggregate(statistics.median, rows, "tokens_per_second"),
        "mfu": _aggregate(statistics.median, rows, "mfu"),
        "memory_bytes": summary.get("peak_memory_bytes") or _aggregate(max, rows, "memory_bytes"),
        "parameters": summary.get("parameters"),
        "device": summary.get("device") or (device if isinstance(device, str) else None),
        "commits": summary.get("commits") or ([commit] if commit and isinstance(commit, str) else None),
    }


FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "val_loss": ("validation loss", "{:.4f}".format),
    "val_bits_per_byte": ("bits per byte", "{:.4f}".format),
    "start_val_bits_per_byte": ("bits per byte before the first step", "{:.4f}".format),
    "old_val_bits_per_byte": ("bits per byte of the old text", "{:.4f}".format),
    "old_change": ("change of the old text since step 0", "{:+.4f}".format),
    "val_step": ("evaluated at step", "{:,}".format),
    "train_loss": ("training loss", "{:.4f}".format),
    "steps": ("steps", "{:,}".format),
    "tokens": ("training tokens", "{:,}".format),
    "seconds": ("time", duration),
    "dollars": ("cost", dollars),
    "tokens_per_second": ("tokens/s, median", "{:,.0f}".format),
    "mfu": ("MFU, median", "{:.1%}".format),
    "memory_bytes": ("peak memory", size),
    "parameters": ("parameters", "{:,}".format),
    "device": ("device", str),
    # shorten each 40-digit hash to 10, but keep a "-dirty" suffix
    "commits": ("commit", lambda commits: ", then ".join(commit.replace(commit[10:40], "") for commit in commits)),
}
"""{key: (label, function that formats the value)} of each final figure."""


def format_figures(figures: dict[str, Any]) -> dict[str, str]:
    """Return the known final figures as {label: text}."""
    return {
        label: write(figures[key])
        for key, (label, write) in FIGURES.items()
        if figures[key] is not None and not (isinstance(figures[key], float) and not math.isfinite(figures[key]))
    }


def seconds_by_kind(run: RunRecord) -> dict[str, float]:
    """Return the seconds of each kind of work and of "idle"; the sum is the time from the first start to the end.

    Idle counts the time when no session ran, and work that the next session did not continue from. The end is that of
    the run, or its last row. Returns {} if the rows lack these columns (older versions).
    """
    timed = [row for row in run.metrics.rows if row.get("logged_at") is not None]
    if not timed:
        return {}
    first, last = timed[0], timed[-1] if run.summary.get("logged_at") is None else run.summary
    seconds = row_seconds(last)
    total = last["logged_at"] - first["logged_at"] + sum(row_seconds(first).values())
    return seconds | {"idle": max(0.0, total - sum(seconds.values()))}


def status(run: RunRecord) -> str:
    """Describe how the run ended, as far as its folder shows."""
    step = f"{run.last['step']:,}"
    if run.summary:
        return f"Complete: {step} steps."
    stopped = [event for event in run.events("stopped") if event["step"] >= run.last["step"]]
    if stopped:
        last = stopped[-1]  # its step has no row if the signal interrupted the evaluation
        return f"Stopped by {last.get('signal', 'a signal')} at step {last['step']:,}; it can be resumed."
    at = run.last.get("logged_at")
    when = f" of {minute(at)}" if at is not None and 0 <= at < _YEAR_9999 else ""
    return f"Not complete: still running, or it failed after its last row{when}, step {step}."


def started_at(run: RunRecord) -> float | None:
    """Return when the first process of the run started, in seconds since 1970; None if the rows do not say."""
    first = next((row for row in run.metrics.rows if row.get("logged_at") is not None), None)
    at = None if first is None else first["logged_at"] - sum(row_seconds(first).values())
    return at if at is not None and 0 <= at < _YEAR_9999 else None


def minute(at: float) -> str:
    """Return a time in seconds since 1970 as "2026-01-31 23:59 UTC"."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def row_seconds(row: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each kind of work up to a row, or in all of a run for its summary."""
    return {
        key.removeprefix("seconds_"): value
        for key, value in row.items()
        if key.startswith("seconds_") and value is not None
    }


def _aggregate(function: Callable[[list[float]], float], rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return function(values) if values else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""  # no read of a pipe ends
    except OSError:
        return ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or broken."""
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary of a run, with None for each value of the wrong type."""
    return {key: value if _is_figure(key, value) else None for key, value in read_json(path).items()}


def validates_on_other_text(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two runs, by their metadata, validate on different text; False if one does not say on which.

    Names of files do not matter, and of runs whose validation text is in files of its own, only these do.
    """
    found = (metadata.get("corpus") for metadata in (one, other))
    first, second = (corpus if isinstance(corpus, dict) else {} for corpus in found)
    known = {key for key in first.keys() & second.keys() if key.rpartition(": ")[2] in _TEXT_KEYS}
    if first.get("val_files") and second.get("val_files"):
        known -= {"files", "split", "val_fraction"}
    return any(_without_names(first[key]) != _without_names(second[key]) for key in known)


def _without_names(value: Any) -> Any:
    is_listing = isinstance(value, list) and all(isinstance(entry, list) for entry in value)
    return [entry[1:] for entry in value] if is_listing else value


def _is_figure(key: str, value: Any) -> bool:
    if key == "init_from":
        return isinstance(value, dict)
    if key == "commits":
        return isinstance(value, list) and all(isinstance(commit, str) for commit in value)
    return isinstance(value, str) if key in _TEXTS else is_number(value)
