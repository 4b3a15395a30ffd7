"""One command runs a device's benchmarks and collects their output on one page."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARK = '''"""Time of {name}."""
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--output")
{device}
arguments = parser.parse_args()
print("as fast as", getattr(arguments, "device", "it is"))
about = {{"hardware": {{"device": "Abacus", "cores": 9}}, "versions": {{"torch": "3.0"}}}}
open(arguments.output, "w").write(json.dumps(about | {{"seconds": 1}}))
'''
LADDER = '''"""Climb: python benchmarks/ladder.py

More of it.
"""
import json, os, sys
*options, folder = sys.argv[1:]
os.makedirs(folder, exist_ok=True)
print("made with", *options)
metadata = {"hardware": {"device": "Slide rule"}, "packages": {"torch": "2.9"}, "commit": "abc"}
open(f"{folder}/ladder.json", "w").write(json.dumps({"mfu": 0.5, "folder": folder, "metadata": metadata}))
'''


HERE = {"hardware": {"device": "Abacus", "cores": 9}, "versions": {"torch": "3.0"}}


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return run_all for a folder with three benchmarks, one of which fails, a script and a folder of tests."""
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.run_all")
    for folder in ("benchmarks/results", "checks"):
        (tmp_path / folder).mkdir(parents=True)
    takes_device = 'parser.add_argument("--device")'
    (tmp_path / "benchmarks" / "saving.py").write_text(BENCHMARK.format(name="saving", device=""))
    (tmp_path / "benchmarks" / "cpu_kernels.py").write_text(BENCHMARK.format(name="kernels", device=takes_device))
    (tmp_path / "benchmarks" / "broken.py").write_text("print('so far')\nraise SystemExit('no such luck')")
    (tmp_path / "benchmarks" / "ladder.py").write_text(LADDER)
    (tmp_path / "checks" / "test_it.py").write_text("def test_it(): pass")
    kernels, saving = module.Part("benchmarks/cpu_kernels.py"), module.Part("benchmarks/saving.py")
    broken, checks = module.Part("benchmarks/broken.py"), module.Part("checks", ("-k", "it"))
    ladder = module.Part("benchmarks/ladder.py", ("--train.max_steps=1",), ("--tiny",), "ladder.json")
    cpu = {"broken": broken, "cpu_kernels": kernels, "ladder_tiny": ladder, "saving": saving}
    monkeypatch.setattr(module, "PARTS", {"cpu": cpu, "cuda": {"tests": checks, "saving": saving, "broken": broken}})
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(module, "here", lambda: HERE)
    monkeypatch.setattr(module, "missing", list)
    return module


@pytest.fixture
def call(run_all: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that calls run_all.py with options, and returns what it printed and its error."""

    def call_(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["run_all.py", *options])
        error = ""
        try:
            run_all.main()
        except SystemExit as end:
            error = str(end)
        return capfd.readouterr().out + error

    return call_


def test_benchmarks_of_a_device_run_and_save_their_results(run_all, call, tmp_path):
    said = call()
    assert said.endswith("error: failed: broken")  # the others ran
    assert "broken failed: exit status 1, runs/benchmarks/broken_cpu.log ends with:\n" in said
    log = (tmp_path / "runs" / "benchmarks" / "broken_cpu.log").read_text()
    assert sorted(log.splitlines()) == ["no such luck", "so far"] and said.count("no such luck") == 1
    kept = json.loads((tmp_path / "benchmarks" / "results" / "cpu_kernels_cpu.json").read_text())
    assert kept["printed"] == "as fast as cpu" and kept["seconds"] == 1
    page = (tmp_path / "page.md").read_text()
    kernels = "Time of kernels.\n\nAbacus, 9 cores, torch 3.0.\n\n```text\nas fast as cpu\n```\n"
    ladder = "Climb.\n\nSlide rule, ? cores, torch 2.9, hfgolf abc.\n\n```text\n"
    ladder += "made with --train.max_steps=1 --output\n```\n"
    assert f"## CPU\n\n### cpu_kernels\n\n{kernels}\n### ladder_tiny\n\n{ladder}\n### saving\n" in page
    assert "## GPU" not in page and "broken" not in page
    measured = json.loads((tmp_path / "benchmarks" / "results" / "ladder_tiny_cpu.json").read_text())
    assert measured["folder"] == "runs/benchmarks/ladder_tiny_cpu"  # not where this machine has it

    assert "as fast as it is" in call("--device", "cuda", "--only", "saving")
    page = (tmp_path / "page.md").read_text()
    assert page.index("### cpu_kernels") < page.index("## GPU") < page.rindex("### saving\n\nTime of saving.")


def test_measured_and_failed_parts_are_skipped_until_the_code_changes(run_all, call, tmp_path):
    call()
    said = call()
    assert "cpu_kernels: measured before\nladder_tiny: measured before\nsaving: measured before" in said
    assert said.startswith("broken: failed before; once more: --only broken") and said.endswith("failed: broken")
    states = dict(line.split() for line in call("--list").splitlines())
    assert states == {"broken": "failed", "cpu_kernels": "measured", "ladder_tiny": "measured", "saving": "measured"}
    assert "as fast as cpu" in call("--only", "cpu_kernels")

    with (tmp_path / "benchmarks" / "broken.py").open("w") as file:
        file.write(BENCHMARK.format(name="broken", device=""))
    assert {line.split()[-1] for line in call("--list").splitlines()} == {"do"}
    said = call()
    assert "failed" not in said and "measured before" not in said
    assert call("--list").split().count("measured") == 4
    assert not list((tmp_path / "runs" / "benchmarks").glob("*.failed"))


def test_part_that_takes_too_long_is_ended_with_what_it_started(run_all, call, tmp_path, monkeypatch):
    sleeper = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])"
    (tmp_path / "benchmarks" / "saving.py").write_text(f"{sleeper}\nprint(child.pid)\nchild.wait()")
    monkeypatch.setattr(run_all, "LIMITS", {"cpu": 2.0})
    said = call("--only", "saving", "cpu_kernels")
    assert "saving failed: not done after 2 s" in said and "as fast as cpu" in said
    child = int(said.split("saving\n")[1].split()[0])
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"  # nobody may be there to reap it


def test_dry_run_keeps_no_figure(run_all, call, tmp_path):
    said = call("--dry_run")
    assert "made with --train.max_steps=1 --tiny --output" in said
    assert "dry run: 3 of 4 parts work" in said and said.endswith("error: failed: broken")
    assert not any((tmp_path / "benchmarks" / "results").iterdir()) and not (tmp_path / "page.md").exists()


def test_missing_part_or_package_is_named(run_all, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--device", "cuda", "--only", "cpu_kernels"])
    with pytest.raises(SystemExit):
        run_all.main()
    assert "no part for cuda is called cpu_kernels; choose from tests, saving, broken" in capsys.readouterr().err

    monkeypatch.undo()
    monkeypatch.setattr(run_all.importlib.metadata, "distributions", lambda: [SimpleNamespace(name="pandas")])
    absent = run_all.missing()
    assert "datasets" in absent and "pandas" not in absent
    monkeypatch.setattr(run_all, "missing", lambda: ["datasets", "dill"])
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    with pytest.raises(SystemExit):
        run_all.main()
    assert "not installed: datasets, dill; without network: docs/gpu.md" in capsys.readouterr().err


def test_each_benchmark_is_a_part(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    run_all = importlib.import_module("benchmarks.run_all")
    paths = {part.path for parts in run_all.PARTS.values() for part in parts.values()}
    files = {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")}
    # jobs measures nothing, growth measures large_corpus, two need a person's text, the last two need a terminal
    names = (
        "machine",
        "jobs",
        "run_all",
        "large_corpus",
        "vocabulary_study",
        "compressors",
        "progress_bar",
        "transcript",
    )
    without = {f"benchmarks/{name}.py" for name in names}
    assert files - without <= paths
    assert all((ROOT / path).exists() for path in paths)
    cases = [part.options[1:] for name, part in run_all.PARTS["cuda"].items() if name.startswith("memory_prediction")]
    shapes = [part.options[1:] for name, part in run_all.PARTS["cuda"].items() if name.startswith("train_throughput")]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    memory, throughput = (importlib.import_module(name) for name in ("memory_prediction", "train_throughput"))
    assert {name for group in cases for name in group} == set(memory.CASES)
    assert {name for group in shapes for name in group} == set(throughput.SHAPES["cuda"])


def test_page_has_every_saved_result(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    run_all = importlib.import_module("benchmarks.run_all")

    page = run_all.PAGE.read_text()
    assert page == run_all.page(), "benchmarks/tables.md is older than benchmarks/results: run_all.page() makes it"
    kept = {path.stem.removesuffix(f"_{kind}") for kind in ("cpu", "gpu") for path in RESULTS.glob(f"*_{kind}.json")}
    assert {"ladder", "optimizer_step", "against_gpt2"} <= kept
    assert [name for name in kept if f"\n### {name}\n" not in page] == []
