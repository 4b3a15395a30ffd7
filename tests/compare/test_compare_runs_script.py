"""hfgolf compare as a user runs it: from a definition, from existing runs, and with mistakes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from hfgolf.compare.experiment import load_experiment, plan_runs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compare_runs(hfgolf):
    """Return a function that runs the command and returns its exit status and log."""

    def script(*arguments: object) -> tuple[int, str]:
        said = hfgolf("compare", *arguments)
        return said.status, said.err

    return script


def final_loss(folder: Path) -> float:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]


def test_existing_runs_are_compared_without_training(compare_runs, tiny_definition, run, tmp_path, monkeypatch):
    """With complete runs, nothing is trained and a second call writes the same; --runs finds the same arms."""
    monkeypatch.chdir(tmp_path)
    definition = tiny_definition(arms={"adamw": {"optim.name": "adamw"}, "muon": {}}, baseline="adamw")
    out = tmp_path / "runs" / "experiments" / "tiny"
    for planned in plan_runs(load_experiment(definition), out, ["--train.max_steps=4"]):
        run(planned.arguments)
    assert compare_runs(definition, "--train.max_steps", "4") == (0, "")
    first = (out / "tiny.json").read_bytes()
    assert compare_runs("--train.max_steps", "4", definition)[0] == 0  # in any order
    assert (out / "tiny.json").read_bytes() == first
    assert not list(out.glob("*/train.log")), "a run was started"
    found = json.loads(first)
    losses = {arm: [final_loss(out / f"{arm}-seed{seed}") for seed in (1, 2)] for arm in ("adamw", "muon")}
    assert found["arms"]["muon"]["final_losses"] == dict(zip("12", losses["muon"], strict=True))
    difference = statistics.mean(losses["muon"]) - statistics.mean(losses["adamw"])
    assert found["arms"]["muon"]["difference"]["mean"] == pytest.approx(difference)
    assert found["command"] == f"hfgolf compare {definition} --train.max_steps=4"
    assert found["is_whole"] and found["baseline"] == "adamw" and found["failures"] == {}
    assert "| `adamw` |" in (out / "tiny.md").read_text()
    assert (out / "tiny.png").read_bytes().startswith(b"\x89PNG")

    names = [out / f"{arm}-seed{seed}" for arm in ("adamw", "muon") for seed in (1, 2)]
    assert compare_runs(*names, "--output_dir", tmp_path / "read") == (0, "")
    read = json.loads((tmp_path / "read" / "read.json").read_text())
    assert read["arms"] == found["arms"] and read["baseline"] == "adamw"
    (tmp_path / "same").mkdir()
    monkeypatch.chdir(tmp_path / "same")
    assert compare_runs(*names, "--output_dir", ".", "--equivalent", "9") == (0, "")
    same = json.loads((tmp_path / "same" / "same.json").read_text())
    assert same["command"].endswith("/muon-seed2 --equivalent 9 --output_dir .") and same["margin"] == 9
    assert same["arms"]["muon"]["equivalence"]["p_value"] < 0.05
    assert "equivalent within 9 nats" in (tmp_path / "same" / "same.md").read_text()
    assert read["settings"] == {"adamw": {"optim.name": "adamw"}, "muon": {"optim.name": "muon"}}


def test_script_trains_missing_runs(tiny_definition, hfgolf, tmp_path):
    """Two real arms at once, one of which diverges; a second call does nothing."""
    arms = {"muon": {}, "wild": {"optim.name": "sgd", "optim.learning_rate": "1e14", "train.max_rollbacks": 0}}
    command = ["compare", tiny_definition(arms=arms, seeds=[1]), "--jobs", 2, "--output_dir", tmp_path / "out"]
    first = hfgolf(*command)
    assert first.status == 0, first.out + first.err
    assert "wild-seed1 failed: train: step " in first.out and "[2/2]" in first.out
    results = (tmp_path / "out" / "tiny.json").read_bytes()
    found = json.loads(results)
    assert set(found["arms"]["muon"]["final_losses"]) == {"1"} and set(found["failures"]["wild"]) == {"1"}
    assert "shared the machine" in found["seconds_caveats"][0]
    second = hfgolf(*command)
    assert "2 runs: 1 already complete, 0 to do\n1 failed before; " in second.out
    assert (tmp_path / "out" / "tiny.json").read_bytes() == results
