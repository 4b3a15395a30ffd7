"""One command runs a device's benchmarks and collects their output on one page."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

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
SCRIPT = '''"""Profile a step: python scripts/profile_step.py

More of it.
"""
import json, os, sys
*options, folder = sys.argv[1:]
os.makedirs(folder)
print("made with", *options)
metadata = {"hardware": {"device": "Slide rule"}, "packages": {"torch": "2.9"}, "commit": "abc"}
open(f"{folder}/profile.json", "w").write(json.dumps({"mfu": 0.5, "metadata": metadata}))
'''


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return run_all for a folder with three benchmarks, one of which fails, and a script."""
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.run_all")
    (tmp_path / "results").mkdir()
    takes_device = 'parser.add_argument("--device")'
    (tmp_path / "saving.py").write_text(BENCHMARK.format(name="saving", device=""))
    (tmp_path / "cpu_kernels.py").write_text(BENCHMARK.format(name="kernels", device=takes_device))
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    (tmp_path / "ladder.py").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "profile_step.py").write_text(SCRIPT)
    scripts = {"cpu": {"profile_tiny": ("profile_step", "--train.max_steps=1")}, "cuda": {}}
    monkeypatch.setattr(module, "SCRIPTS", scripts)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    return module


def test_benchmarks_of_a_device_run_and_save_their_results(run_all, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    with pytest.raises(SystemExit, match="failed: broken"):  # the others ran
        run_all.main()
    kept = json.loads((tmp_path / "results" / "cpu_kernels_cpu.json").read_text())
    assert kept["printed"] == "as fast as cpu" and kept["seconds"] == 1
    page = (tmp_path / "page.md").read_text()
    kernels = "Time of kernels.\n\nAbacus, 9 cores, torch 3.0.\n\n```text\nas fast as cpu\n```\n"
    profile = "Profile a step.\n\nSlide rule, ? cores, torch 2.9, hfgolf abc.\n\n```text\n"
    profile += "made with --train.max_steps=1 --output\n```\n"
    assert f"## CPU\n\n### cpu_kernels\n\n{kernels}\n### profile_tiny\n\n{profile}\n### saving\n" in page
    assert "## GPU" not in page and "ladder" not in page

    assert run_all.names("cuda") == ["broken", "saving"]
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--device", "cuda", "--only", "saving"])
    run_all.main()
    page = (tmp_path / "page.md").read_text()
    assert page.index("### cpu_kernels") < page.index("## GPU") < page.rindex("### saving\n\nTime of saving.")
    assert "as fast as it is" in capfd.readouterr().out


def test_missing_benchmark_is_named(run_all, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--device", "cuda", "--only", "cpu_kernels"])
    with pytest.raises(SystemExit):
        run_all.main()
    assert "no benchmark for cuda is called cpu_kernels; choose from broken, saving" in capsys.readouterr().err


def test_page_has_every_saved_result(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    run_all = importlib.import_module("benchmarks.run_all")

    page = run_all.PAGE.read_text()
    assert page == run_all.page(), "docs/benchmarks.md is older than benchmarks/results: run_all.page() makes it"
    kept = {path.stem.removesuffix(f"_{kind}") for kind in ("cpu", "gpu") for path in RESULTS.glob(f"*_{kind}.json")}
    assert {"ladder", "optimizer_step", "against_gpt2"} <= kept
    assert [name for name in kept if f"\n### {name}\n" not in page] == []
