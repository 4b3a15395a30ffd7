"""Each tracker as its users have it: the run's name, one run after a resume, text as text, no file where nobody looks.

Skips those that are not installed. `pip install -e ".[dev,trackers]"` brings them all, without constraints.txt: trackio
0.43 needs an older pillow.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow]

SESSION = """
import sys
from pathlib import Path
from types import SimpleNamespace
from accelerate import Accelerator
from hfgolf.checkpoint.state import TrainState
from hfgolf.config.sections import RunConfig
from hfgolf.hooks.trackers import Trackers

kind, step, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
resume = "latest" if step else None
accelerator = Accelerator(log_with=[kind], project_dir=folder)
config = RunConfig().replace(run__name="blue", track__project="green", track__trackers=[kind], train__resume=resume)
place = SimpleNamespace(path=folder, report=folder / "report.html")
resolved, state = SimpleNamespace(config=config), TrainState(step=step)
run = SimpleNamespace(resolved=resolved, folder=place, state=state, accelerator=accelerator)
place.report.write_text("a page")
trackers = Trackers([kind])
trackers.load_state_dict({"id": "cafe0123"})
trackers.start(run)
trackers.logged(run, {"step": step + 1, "train_loss": 1 / (step + 1)})
for name, text in (("sample", "a line\\nand another"), ("symptom", "one"), ("symptom", "another")):
    trackers.logged(run, {"step": step + 1, "event": name, "elapsed_seconds": 1.0, "text": text})
finding = {"symptom": "plateau", "saw": "no progress", "causes": ["a low rate"], "fix": {}}
trackers.logged(run, {"step": step + 1, "event": "finding", "elapsed_seconds": 1.0} | finding)
trackers.end(run, {})
accelerator.end_training()
print("kept", [kept.name for kept in accelerator.trackers if not kept._is_dropped])
"""


@pytest.fixture
def two_sessions(tmp_path: Path):
    """Return a function that lets a tracker see a run and its resume, and returns the run's folder."""

    def run(kind: str) -> Path:
        if importlib.util.find_spec(kind) is None:
            pytest.skip(f"{kind} is not installed")
        folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
        folder.mkdir()
        elsewhere.mkdir()
        homes = {"HOME": tmp_path / "home", "HF_HOME": tmp_path / "hf", "TRACKIO_DIR": tmp_path / "trackio"}
        environment = os.environ | {name: str(path) for name, path in homes.items()} | {"ACCELERATE_USE_CPU": "true"}
        for step in (0, 1):
            command = [sys.executable, "-c", SESSION, kind, str(step), str(folder)]
            done = subprocess.run(
                command,
                cwd=elsewhere,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stderr
            assert f"kept ['{kind}']" in done.stdout, done.stdout + done.stderr
        assert list(elsewhere.iterdir()) == []  # nothing in the working folder
        return folder

    return run


def test_trackio_has_one_run_by_name_with_samples_as_text(two_sessions, tmp_path):
    two_sessions("trackio")
    (database,) = (tmp_path / "trackio").glob("green.db")
    rows = sqlite3.connect(database).execute("select run_id, run_name, step, metrics from metrics").fetchall()
    assert len({run for run, *_ in rows}) == 1 and {name for _, name, *_ in rows} == {"blue"}
    logged = [(step, json.loads(values)) for *_, step, values in rows]
    assert [(step, values["train/loss"]) for step, values in logged if "train/loss" in values] == [(1, 1.0), (2, 0.5)]
    samples = [(step, values["event/sample"]["_value"]) for step, values in logged if "event/sample" in values]
    assert samples == [(step, "```text\na line\nand another\n```") for step in (1, 2)]
    alerts = sqlite3.connect(database).execute("select step, title, text, level from alerts order by step").fetchall()
    assert alerts == [(step, "doctor: plateau", "no progress; most likely a low rate", "warn") for step in (1, 2)]


def test_mlflow_has_one_run_by_name_with_samples_as_files(two_sessions):
    folder = two_sessions("mlflow")
    database = sqlite3.connect(folder / "mlflow.db")
    assert database.execute("select name, status from runs").fetchall() == [("blue", "FINISHED")]
    query = "select step, value from metrics where key = 'train/loss'"
    assert database.execute(query).fetchall() == [(1, 1.0), (2, 0.5)]
    assert database.execute("select value from params where key = 'run.name'").fetchall() == [("blue",)]
    samples = sorted(folder.glob("mlflow/*/artifacts/event/sample/*.txt"))
    assert [(path.name[:7], path.read_text()) for path in samples] == [
        (f"{step:06d}_", "a line\nand another") for step in (1, 2)
    ]
    assert len(list(folder.glob("mlflow/*/artifacts/event/symptom/000001_*.txt"))) == 2


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("swanlab", "swanlab/run-*-cafe0123/media/text/*.txt"),
        ("comet_ml", "comet_ml/*.zip"),
        ("clearml", "metrics.jsonl"),  # its own files are in its cache
        ("dvclive", "dvclive/plots/metrics/event/sample.tsv"),
        ("aim", ".aim/run_metadata.sqlite"),
    ],
)
def test_others_keep_their_files_in_the_run_folder(two_sessions, kind, pattern):
    assert list(two_sessions(kind).glob(pattern))
