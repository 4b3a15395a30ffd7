"""hfgolf schedule prints and draws what a run does; a mistake gives one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfgolf.run.metrics import read_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture
def show(tmp_path: Path, hfgolf: Callable[..., Any]) -> Callable[..., str]:
    """Return a function that runs the script in this process and returns what it said; with `fails`, on stderr."""

    def run(*arguments: object, fails: bool = False) -> str:
        picture = tmp_path / "schedule.png"
        said = hfgolf("schedule", "--output", picture, *arguments)
        assert said.status == (2 if fails else 0)
        assert picture.is_file() != fails
        if not fails:
            assert picture.read_bytes().startswith(b"\x89PNG")
            picture.unlink()
        return said.err if fails else said.out

    return run


def cells(said: str) -> dict[str, list[str]]:
    """Return {name of the row: its cells}, the header's under ""."""
    lines = [line for line in said.splitlines() if "  " in line]
    split = [[cell for cell in line.split("  ") if cell.strip()] for line in lines]
    header, *rows = [[cell.strip() for cell in row] for row in split]
    return {"": header} | {row[0]: row[1:] for row in rows}


def test_shows_the_corners_of_the_small_config(show):
    said = cells(show("--config", ROOT / "configs" / "small.yaml"))
    assert said == {
        "": ["step", "run done", "matrix", "embedding, vector", "momentum", "weight decay"],
        "first step": ["1", "0.0%", "0.001", "0.0005", "0.85", "0.1"],
        "end of warmup": ["20", "6.3%", "0.02", "0.01", "0.8595", "0.1"],
        "start of warmdown": ["151", "50.0%", "0.02", "0.01", "0.925", "0.1"],
        "end of momentum warmup": ["201", "66.7%", "0.01333", "0.006667", "0.95", "0.1"],
        "last step": ["300", "99.7%", "0.0001333", "6.667e-05", "0.95", "0.1"],
    }


def test_shows_the_decay_of_a_cosine(show):
    config = ("--config", ROOT / "configs" / "small.yaml", "--schedule.name", "cosine_warmdown")
    said = cells(show(*config, "--schedule.floor", 0.1, "--schedule.warmdown_fraction", 0.1))
    assert said["start of warmdown"][:2] == ["271", "90.0%"]
    assert float(said["last step"][2]) == pytest.approx(0.02 * 0.1 / 30, rel=0.01)  # a 30th of the decay is left


def test_shown_rates_match_a_real_run(show, run, tiny_run):
    """Compared with the learning rates in metrics.jsonl of a run whose length depends on the text."""
    options = tiny_run(
        train__max_steps="null", train__max_epochs=0.08, train__eval_every_steps=100, schedule__warmup_steps=3
    )
    shown = cells(show(*options))
    rows = read_rows(run(options) / "metrics.jsonl")
    done = {row["step"]: row["learning_rate"] for row in rows}
    assert max(done) == int(shown["last step"][0]) > 8
    assert len(shown) == 5
    for name in ("first step", "end of warmup", "start of warmdown", "last step"):
        step, _, matrix, *_ = shown[name]
        assert float(matrix) == pytest.approx(done[int(step)], rel=1e-3), name


def test_minutes_end_a_run_at_a_step_per_second(show):
    config = ("--config", ROOT / "configs" / "shakespeare_char.yaml", "--schedule.warmup_steps", 30)
    config += ("--train.max_minutes", 9)
    said = show(*config)
    assert "note: train.max_minutes ends it; drawn at 1 s per step" in said
    shown = cells(said)
    assert shown["end of warmup"][:3] == ["30", "5.4%", "0.02"]
    assert shown["last step"][:3] == ["540", "99.8%", "6.173e-05"]
    said = show("--config", ROOT / "configs" / "small.yaml", "--train.max_minutes", 2)
    assert "note: train.max_minutes may end the run earlier" in said and cells(said)["last step"][0] == "300"


def test_baselines_show_one_rule_and_adamw_no_momentum(show):
    config = ("--config", ROOT / "configs" / "small.yaml", "--optim.embedding_learning_rate", 1, "--optim.name")
    assert cells(show(*config, "adamw"))[""] == ["step", "run done", "matrix, vector", "embedding", "weight decay"]
    sgd = cells(show(*config, "sgd", "--model.tie_word_embeddings", "false"))
    assert sgd[""] == ["step", "run done", "matrix, head, vector", "embedding", "momentum", "weight decay"]
    assert {row[4] for name, row in sgd.items() if name} == {"0.95"}
