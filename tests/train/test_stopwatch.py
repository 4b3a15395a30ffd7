"""Each second counts toward one kind of work, and their sum is the wall-clock time."""

from __future__ import annotations

import itertools
import math
import sys
import time

import pytest

from hfgolf.run.metrics import read_rows
from hfgolf.system.stopwatch import KINDS, Stopwatch


def test_nested_work_is_counted_once(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    stopwatch = Stopwatch()
    setup = stopwatch.seconds()["setup"]
    stopwatch.carry_over({"train": 1000.0})
    stopwatch.switch("train")
    now += 1
    with stopwatch.charge("evaluate"):
        now += 10
        with pytest.raises(ValueError, match="lost"), stopwatch.charge("checkpoint"):
            now += 100
            raise ValueError("lost")
        now += 20
    now += 2
    expected = dict.fromkeys(KINDS, 0.0) | {"setup": setup, "train": 1003.0, "evaluate": 30.0, "checkpoint": 100.0}
    assert stopwatch.seconds() == pytest.approx(expected) == stopwatch.seconds()
    assert stopwatch.training_seconds() == pytest.approx(1133.0)


def test_setup_starts_with_the_process():
    assert Stopwatch().seconds()["setup"] > time.process_time() / 64  # CPU time of at most 64 threads


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the system's clock knows when a process began")
def test_setting_the_clock_does_not_change_durations(monkeypatch):
    before = Stopwatch().seconds()["setup"]
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert Stopwatch().seconds()["setup"] == pytest.approx(before, abs=60)


def test_seconds_of_a_run_add_up_to_the_wall_clock(run, tiny_run):
    options = {"train__eval_every_steps": 2, "train__save_every_steps": 2, "schedule__name": "constant"}
    started_at = time.time()
    folder = run(tiny_run(**options, train__max_steps=6))
    rows = read_rows(folder / "metrics.jsonl")
    for sooner, later in itertools.pairwise(rows):
        spent = sum(later[f"seconds_{kind}"] - sooner[f"seconds_{kind}"] for kind in KINDS)
        assert spent == pytest.approx(later["logged_at"] - sooner["logged_at"], abs=0.01)
    last = rows[-1]
    assert all(last[f"seconds_{kind}"] > 0 for kind in KINDS if kind != "compile") and last["seconds_compile"] == 0
    assert rows[0]["logged_at"] > started_at
    total = math.fsum(last[f"seconds_{kind}"] for kind in KINDS)
    run(tiny_run(**options, train__max_steps=8, train__resume="latest"))
    resumed = read_rows(folder / "metrics.jsonl")[-1]
    assert sum(resumed[f"seconds_{kind}"] for kind in KINDS) > total
    assert all(resumed[f"seconds_{kind}"] > last[f"seconds_{kind}"] for kind in ("setup", "data", "train", "evaluate"))
