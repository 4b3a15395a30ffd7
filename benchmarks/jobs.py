"""Runs that several processes share: start a benchmark once per core, and each takes the next run that is not taken.

Owns the claims, empty files with the names of the runs, and the rows of JSON that the runs leave.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def do_unclaimed(jobs: Iterable[tuple[str, Callable[[], dict[str, Any]]]], claims: Path, rows: Path) -> None:
    """Do each job whose name no process has claimed, with one thread, and add its row to a file.

    jobs: name and what returns the row. claims: a folder for these processes alone.
    """
    torch.set_num_threads(1)
    claims.mkdir(parents=True, exist_ok=True)
    for name, job in jobs:
        try:
            (claims / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        row = job()
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")


def series_of(path: Path, title: Callable[[dict[str, Any]], str]) -> dict[str, list[dict[str, Any]]]:
    """Return {title: rows} of a file, in the order of the first rows."""
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(path):
        series.setdefault(title(row), []).append(row)
    return series


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
