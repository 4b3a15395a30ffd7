"""make test-versions: which sets are run, skipped and left out, without installing any."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return tests/versions.py for a folder with three sets and one code file. pip and pytest are only recorded."""
    module: Any = importlib.import_module("versions")
    for name, python in (("no_pip", "3.11"), ("no_python", "3.99"), ("old", "3.11")):
        (tmp_path / "constraints").mkdir(exist_ok=True)
        (tmp_path / "constraints" / f"{name}.txt").write_text(f"# Python {python}: of {name}\ntorch==2.11.0\n")
    for name in ("setup.cfg", "constraints.txt", "hfgolf/code.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    module.calls = []

    def run(command: list[object], **options: Any) -> SimpleNamespace:
        words = [str(word) for word in command]
        module.calls.append(words)
        if "venv" in words:
            (Path(words[-1]) / "bin").mkdir(parents=True, exist_ok=True)
        if "pytest" in words:
            options["stdout"].write("F\n=== 1 failed, 2 passed in 3.00s ===\n")
            return SimpleNamespace(returncode=module.ends_with)
        failed = "install" in words and "no_pip" in str(words)
        return SimpleNamespace(
            returncode=int(failed), stdout="2.11.0 5.17.0 1.15.0 5.2.0 0.23.1 1.31.0 2.0.0", stderr="ERROR: none"
        )

    module.ends_with = 0
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
    monkeypatch.setattr(module.shutil, "which", lambda name: None if name == "python3.99" else f"/usr/bin/{name}")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path / ".venv-versions")
    return module


def call(versions: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", ["versions.py", *options])
    with pytest.raises(SystemExit) as error:
        versions.main()
    return str(error.value)


def test_table_says_what_was_run_and_why_not(versions, monkeypatch, capsys):
    assert call(versions, monkeypatch, "-k", "muon").startswith("error: not all sets were run and passed")
    no_pip, no_python, old = capsys.readouterr().out.splitlines()[-3:]
    assert no_pip.split(maxsplit=2) == ["no_pip", "3.11", "not run: ERROR: none"]
    assert no_python.split(maxsplit=2) == ["no_python", "3.99", "not run: no python3.99 on the path"]
    assert old.split()[:7] == ["old", "3.11", "2.11.0", "5.17.0", "1.15.0", "5.2.0", "0.23.1"]
    assert old.endswith("1 failed, 2 passed in 3.00s")
    (tests,) = (words for words in versions.calls if "pytest" in words)
    assert tests[-2:] == ["-k", "muon"]


def test_set_that_passed_is_skipped_until_the_code_changes(versions, tmp_path):
    old = tmp_path / "constraints" / "old.txt"
    versions.FOLDER.mkdir()
    assert versions.run_set(old, ["-q"])["passed"]
    calls = len(versions.calls)
    assert versions.run_set(old, ["-q"])["said"].endswith("(before)") and len(versions.calls) == calls

    (tmp_path / "hfgolf" / "code.py").write_text("changed = True")
    versions.ends_with = 1
    assert not versions.run_set(old, ["-q"])["passed"]
    assert not versions.run_set(old, ["-q"])["passed"]  # one that failed runs again
    installs = [words for words in versions.calls if "install" in words]
    assert len(installs) == 1 and sum("pytest" in words for words in versions.calls) == 3
    assert json.loads((versions.FOLDER / "old.json").read_text())["torch"] == "2.11.0"

    old.write_text(old.read_text().replace("2.11", "2.12"))
    versions.run_set(old, ["-q"])
    assert len([words for words in versions.calls if "install" in words]) == 2


def test_a_set_without_versions_is_resolved_and_run_each_time(versions, tmp_path):
    newest = tmp_path / "constraints" / "new.txt"
    newest.write_text("# Python 3.11: no versions\n")
    versions.FOLDER.mkdir()
    for time in (1, 2):
        assert versions.run_set(newest, ["-q"])["passed"]
        installs = [words for words in versions.calls if "install" in words]
        assert len(installs) == time and {"--upgrade", "eager"} <= set(installs[-1])
    assert not any("--clear" in words for words in versions.calls), "what is there already need not come again"
    assert versions.run_set(tmp_path / "constraints" / "old.txt", ["-q"])["passed"]
    assert "--upgrade" not in versions.calls[-3], versions.calls[-3]
