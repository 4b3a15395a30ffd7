"""metrics.jsonl: written line by line while a run trains, and read back whatever became of it since.

A line may be cut off by a crash, and a file may be too long to read whole. What the lines hold is in schema.py.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hfgolf.durable import sync, write_bytes

logger = logging.getLogger(__name__)

MAX_BYTES = 2**26
"""Of a file that is read whole: some 50,000 rows of 10 steps."""
SAMPLED_ROWS = 20_000
_OF_EACH_STEP = ("train_losses", "grad_norms")
_TOO_LARGE = 10**38
_ALWAYS = (b'"event":', b'"val_tokens":')  # what makes a row worth more than its neighbours


class MetricsFile:
    """Appends to the metrics.jsonl of a run. A full disk costs no row: it waits, and is written with the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[str] = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row or an event; null stands for a number that is not finite, because JSON has none."""
        self._unwritten.append(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")
        reason = self._flush()
        if reason and len(self._unwritten) == 1:
            logger.warning("%s: not written (%s), kept for the next row", self._path, reason)

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`, which will be written again, and broken lines; events stay."""
        self._unwritten = [line for line in self._unwritten if _outlives(line, step)]
        try:
            if self._path.is_file():
                content = self._path.read_bytes()
                kept = b"".join(line + b"\n" for line in content.splitlines() if _outlives(line, step))
                if kept != content:
                    write_bytes(self._path, kept)
        except OSError as error:
            logger.warning("%s: rows after step %d stay in it (%s)", self._path, step, error.strerror)

    def sync(self) -> None:
        """Have the rows so far on the disk, if it takes them; a checkpoint that follows has all rows up to its step."""
        with suppress(OSError):  # no row is worth a checkpoint
            sync(self._path)
            sync(self._path.parent)

    def close(self) -> None:
        """Write what still waits; say how many rows are lost if the disk refuses them."""
        reason = self._flush() if self._unwritten else None
        if reason:
            logger.warning("%s: %d rows are lost (%s)", self._path, len(self._unwritten), reason)

    def _flush(self) -> str | None:
        """Append what is not written yet; return why that is not possible now."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self._path, self._unwritten)
        except OSError as error:
            return str(error.strerror)
        self._unwritten = []
        return None


def append_lines(path: Path, lines: list[str]) -> None:
    """Append whole lines or none: what a full disk took of them is cut off again before OSError is raised."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            data = "".join(lines).encode()
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


def _outlives(line: bytes | str, step: int) -> bool:
    try:
        row = json.loads(line)
        return "event" in row or row["step"] <= step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False  # cut off by a crash, or damaged


@dataclass(frozen=True)
class Metrics:
    """The rows of a run, a log each, and its events, each in the order they were written."""

    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    broken_lines: int = 0
    """Lines that are no row and no event: cut off by a crash, or with a value that its key can't have."""
    is_sampled: bool = False
    """The file is so long that only some rows were read: evaluations, events and others evenly spaced."""


def read_metrics(path: Path) -> Metrics:
    """Read the metrics.jsonl of a run; of one above MAX_BYTES a sample.

    Raises OSError where there is no such file. A missing or empty one is the caller's to explain.
    """
    is_sampled = path.stat().st_size > MAX_BYTES
    rows, events, broken_lines = [], [], 0
    for line in _sample(path) if is_sampled else path.read_bytes().splitlines():
        row = _parse(line)
        if row is None:
            broken_lines += 1
        elif "event" in row:
            events.append(row)
        else:
            rows.append(row)
    return Metrics(rows, events, broken_lines, is_sampled)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, all of them, without the events; lines that are no row are passed over."""
    with path.open("rb") as file:
        rows = [_parse(line) for line in file]
    return [row for row in rows if row is not None and "event" not in row]


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a row or an event whose values have the types that readers count on, None for any other line."""
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
    """Return the value with null for NaN and infinity, which JSON does not have and Python reads all the same."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_column(key: str, value: Any) -> bool:
    if key == "sample_hashes":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if key in _OF_EACH_STEP and value is not None:
        return isinstance(value, list) and len(value) > 0 and all(map(is_number, value))
    return is_number(value)


def is_number(value: Any) -> bool:
    """Say whether a value is null, true, false, or a finite number of a size that sums and charts have room for."""
    return value is None or (isinstance(value, int | float) and abs(value) < _TOO_LARGE)


def _is_event(event: dict[str, Any]) -> bool:
    kind = event["event"]
    if not isinstance(kind, str):
        return False
    if kind == "finding":
        return isinstance(event.get("symptom"), str)
    if "block_starts" in event:
        starts, parameter = event["block_starts"], event.get("first_parameter")
        return isinstance(starts, list) and all(type(at) is int for at in starts) and isinstance(parameter, str)
    return True


def _sample(path: Path) -> Iterator[bytes]:
    """Yield, in order, the evaluations and events (of very many some, evenly) and SAMPLED_ROWS rows evenly by place."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        places = np.linspace(0, len(content) - 1, SAMPLED_ROWS).astype(np.int64).tolist()
        places.append(max(0, content.rfind(b"\n") - 1))  # of the last whole line
        for marker in _ALWAYS:
            places += _thin(list(_find_all(content, marker)))
        starts = {content.rfind(b"\n", 0, place) + 1 for place in places}
        for start in sorted(starts):
            end = content.find(b"\n", start)
            yield content[start : end if end >= 0 else len(content)]


def _find_all(content: mmap.mmap, marker: bytes) -> Iterator[int]:
    place = content.find(marker)
    while place >= 0:
        yield place
        place = content.find(marker, place + len(marker))


def _thin(places: list[int]) -> list[int]:
    if len(places) <= SAMPLED_ROWS:
        return places
    return [places[i] for i in np.linspace(0, len(places) - 1, SAMPLED_ROWS).astype(np.int64)]
