"""Fixtures for comparisons: a tiny definition, hand-made outcomes, scripts in place of train.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfgolf.compare.outcome import Outcome
from hfgolf.compare.statistics import Point


@pytest.fixture
def tiny_definition(tmp_path: Path, tiny_run: Callable[..., list[str]]) -> Callable[..., Path]:
    """Return a function that writes a definition of tiny runs. parts: arms and other top-level keys."""

    def write(**parts: Any) -> Path:
        common = dict(argument[2:].split("=", 1) for argument in tiny_run())
        common = {key: value for key, value in common.items() if not key.startswith("run.")}
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump({"seeds": [1, 2], "common": common} | parts, sort_keys=False))
        return path

    return write


@pytest.fixture
def train_script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that writes a stand-in for `hfgolf train`, given its `name` and `path`, as a command."""

    def write(program: str) -> list[str]:
        path = tmp_path / "train_instead.py"
        path.write_text(
            "import os, pathlib, signal, sys, time\n"
            "options = dict(argument[2:].split('=', 1) for argument in sys.argv[1:])\n"
            "name = options['run.name']\n"
            f"path = pathlib.Path(options['run.output_dir'], name)\n{program}"
        )
        return [sys.executable, str(path)]

    return write


@pytest.fixture
def outcome(tmp_path: Path) -> Callable[..., Outcome]:
    """Return a function that makes a finished run with these validation losses, ten steps and one second apart."""

    def make(seed: int, *losses: float, config: dict[str, Any] | None = None, **changes: Any) -> Outcome:
        values: dict[str, Any] = {
            "path": tmp_path / f"run-seed{seed}",
            "curve": [Point(10 * number, float(number), loss) for number, loss in enumerate(losses, 1)],
            "evaluated_on": (5000, 5100),
            "is_whole": True,
            "curve_tokens": 5000,
            "config": {"train.cpu_threads": "auto", "optim.learning_rate": 0.02} | (config or {}),
            "metadata": {
                "seed": seed,
                "sources": {},
                "environment": {},
                "hardware": {"device": "an abacus", "cores": 2},
                "packages": {"torch": "2", "hfgolf": "1"},
                "commit": "abc",
            },
            "summary": {"step": 10 * len(losses), "skipped_steps": 0, "rollbacks": 0},
        }
        return Outcome(**values | changes)

    return make
