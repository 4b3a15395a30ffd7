"""Write metrics.jsonl line by line during a run, and read it back even if it is damaged.

A crash may cut off a line, and there may be too many rows to keep. docs/metrics.md says what is in the lines.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfgolf.system.durable import sync, write_bytes
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact_values

logger = logging.getLogger(__name__)

MAX_ROWS = 40_000
"""Of more, every second one is dropped, and again; evaluations only if there are too many of them alone."""
_TOO_LARGE = 10**38


class MetricsFile:
    """Appends to a run's metrics.jsonl. If the disk is full, rows wait in memory and are written with the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[str] = []

    def append(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Append a row or an event; return it as written.

        Nonfinite numbers become null, because JSON has none. Secrets in events are redacted; rows hold numbers and
        hashes.
        """
        written = {key: _finite(value) for key, value in row.items()}
        written = redact_values(written) if "event" in written else written
        self._unwritten.append(json.dumps(written) + "\n")
        reason = self._flush()
        if reason and len(self._unwritten) == 1:
            logger.warning("%s: cannot write (%s); the row is kept and written with the next one", self._path, reason)
        return written

    def rewind(self, step: int) -> Metrics:
        """Drop the rows after `step`, which will be written again, and broken lines; return what is left."""
        self._unwritten = [line for line in self._unwritten if _survives_rewind(line, step)]
        try:
            if self._path.is_file():
                content = self._path.read_bytes()
                kept = b"".join(line + b"\n" for line in content.splitlines() if _survives_rewind(line, step))
                if kept != content:
                    write_bytes(self._path, kept)
                return read_metrics(self._path)
        except OSError as error:
            logger.warning("%s: cannot remove the rows after step %d (%s)", self._path, step, error.strerror)
        return Metrics([], [])

    def sync(self) -> None:
        """Force the rows so far to disk, if possible. Called before a checkpoint appears, so that its rows exist."""
        with suppress(OSError):  # a row must not cost a checkpoint
            sync(self._path)
            sync(self._path.parent)

    def close(self) -> None:
        """Write the waiting rows; if that fails, warn how many are lost."""
        reason = self._flush() if self._unwritten else None
        if reason:
            logger.warning("%s: %d rows lost (%s)", self._path, len(self._unwritten), reason)

    def _flush(self) -> str | None:
        """Append the unwritten lines; return the reason if that fails, else None."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self._path, self._unwritten)
        except OSError as error:
            return str(error.strerror)
        self._unwritten = []
        return None


def append_lines(path: Path, lines: list[str]) -> None:
    """Append all lines or none: if the disk fills up, truncate the file to its old size, then raise OSError."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            data = "".join(lines).encode()
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


def _survives_rewind(line: bytes | str, step: int) -> bool:
    try:
        row = json.loads(line)
        return "event" in row or row["step"] <= step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False  # cut off by a crash, or damaged


@dataclass
class Metrics:
    """The rows of a run, one per log interval, and its events, in the order they were written."""

    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    broken_lines: int = 0
    """Number of lines that are neither row nor event: cut off by a crash, or with a value of the wrong type."""
    is_sampled: bool = False
    """True if there are too many rows to keep: these are the evaluations and a sample of the others."""

    def add(self, line: dict[str, Any]) -> None:
        """Add a row or an event; if there are then too many rows, keep a sample of them."""
        if "event" in line:
            self.events.append(line)
            return
        self.rows.append(line)
        if len(self.rows) > MAX_ROWS:
            *rows, last = self.rows
            sample = [row for i, row in enumerate(rows) if i % 2 == 0 or row.get("val_loss") is not None]
            self.rows = [*(sample if len(sample) < 0.9 * MAX_ROWS else rows[::2]), last]
            self.is_sampled = True


def on_subset(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its evaluation on the tokens of the rows before, if it is a last one on more (`subset_*`)."""
    subset = {key.removeprefix("subset_"): value for key, value in row.items() if key.startswith("subset_")}
    return {**row, **subset}


def of_averages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the evaluation of averaged weights alone. Earlier versions evaluated both (`*_ema`), always."""
    averaged = {key.removesuffix("_ema"): value for key, value in row.items() if key.endswith("_ema")}
    return {key: value for key, value in {**row, **averaged}.items() if not key.endswith("_ema")}


def read_metrics(path: Path) -> Metrics:
    """Read a metrics.jsonl. Raises OSError if it cannot be read."""
    metrics = Metrics([], [])
    with path.open("rb") as file:
        for line in map(_parse, file):
            if line is None:
                metrics.broken_lines += 1
            else:
                metrics.add(line)
    return metrics


def read_metrics_of(folder: Path) -> Metrics:
    """Read the metrics.jsonl of a run. Raises UserError if there is none, or neither a row nor an event in it."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        if (folder / "config.yaml").is_file():
            raise UserError(f"{folder} has logged nothing yet; wait for its first step, or start it again.")
        problem = f"{path} does not exist" if folder.is_dir() else f"there is no folder {folder}"
        raise UserError(f"{problem}; name the folder of a run, such as runs/small.")
    try:
        metrics = read_metrics(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable.") from None
    if not metrics.rows and not metrics.events:
        held = f"holds no row, only {metrics.broken_lines} broken lines" if metrics.broken_lines else "is empty"
        raise UserError(f"{path} {held}: the run has logged nothing yet; wait for its first step.")
    return metrics


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a metrics.jsonl that may still be written, without events and broken lines."""
    lines = map(_parse, path.read_bytes().splitlines())
    return [line for line in lines if line is not None and "event" not in line]


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a line's row or event if all its values have the expected types, else None."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < _TOO_LARGE:
        return None
    if "event" in row:
        return row if _is_event(row) else None
    row = {key: _finite(value) for key, value in row.items()}
    return row if all(_is_column(key, value) for key, value in row.items()) else None


def _finite(value: Any) -> Any:
    """Return a value as JSON has it: no tuples, and no NaN or infinity, although Python has them in its JSON."""
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_column(key: str, value: Any) -> bool:
    if key == "sample_hashes":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if key in ("train_losses", "grad_norms") and value is not None:
        return isinstance(value, list) and len(value) > 0 and all(map(is_number, value))
    return is_number(value)


def is_number(value: Any) -> bool:
    """Return whether a value is None, a bool, or a finite number small enough for sums and charts."""
    return value is None or (isinstance(value, int | float) and abs(value) < _TOO_LARGE)


def _is_event(event: dict[str, Any]) -> bool:
    kind = event["event"]
    if not isinstance(kind, str):
        return False
    if kind in ("finding", "sample"):
        return isinstance(event.get("symptom" if kind == "finding" else "text"), str)
    if kind == "init_from":
        return all(is_number(value) for key, value in event.items() if "val_" in key)
    if "block_starts" in event:
        starts, parameter = event["block_starts"], event.get("first_parameter")
        return isinstance(starts, list) and all(type(at) is int for at in starts) and isinstance(parameter, str)
    return True
