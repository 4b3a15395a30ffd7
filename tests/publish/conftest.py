"""An exported tiny model, a loopback Hub, and processes that can only reach that Hub."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import TOKEN, HubServer, serving_here
from tiny_export import SUMMARY, build_tiny, card_of

from hfgolf.config.sections import DataSection, RunConfig
from hfgolf.publish.export import export_model


@pytest.fixture(scope="session")
def tiny_config() -> RunConfig:
    data = DataSection(source="files", files=["/home/somebody/texts/corpus.txt"], cache_dir="/home/somebody/cache")
    return RunConfig(data=data).replace(run__name="tiny", run__output_dir="/home/somebody/runs")


@pytest.fixture(scope="session")
def original_export(tmp_path_factory: pytest.TempPathFactory, tiny_config: RunConfig) -> Path:
    folder = tmp_path_factory.mktemp("original") / "tiny" / "model"
    folder.parent.mkdir()
    export_model(*build_tiny(), folder, card_of(tiny_config, SUMMARY))
    return folder


@pytest.fixture
def exported(original_export: Path, tmp_path: Path) -> Path:
    """The folder runs/tiny/model, a fresh copy for each test."""
    return Path(shutil.copytree(original_export, tmp_path / "runs" / "tiny" / "model"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_here(monkeypatch) as server:
        yield server


@pytest.fixture
def push(hfgolf: Callable[..., Any], exported: Path) -> Callable[..., Any]:
    """Return a function that pushes the exported model with the script, to user/name."""
    return functools.partial(hfgolf, "push", "--run", exported.parent, "--repo", "user/name")


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with a token for the Hub at `endpoint`, or offline without an endpoint."""

    def run(*arguments: object, endpoint: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
        environment |= {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN} if endpoint else {"HF_HUB_OFFLINE": "1"}
        command = [sys.executable, *map(str, arguments)]
        outcome = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert TOKEN not in outcome.stdout + outcome.stderr
        return outcome

    return run
