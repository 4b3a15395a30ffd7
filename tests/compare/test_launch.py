"""Which runs are launched, how many at once, and how failed or stopped runs are handled."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from hfgolf.compare import launch
from hfgolf.compare.experiment import load_experiment, plan_runs
from hfgolf.compare.launch import run_missing
from hfgolf.system.errors import UserError

NEVER = "raise SystemExit('this run must not start')\n"


@pytest.fixture
def planned(tiny_definition, tmp_path):
    """Return a function that plans the runs of a definition of tiny runs."""
    return lambda **parts: plan_runs(load_experiment(tiny_definition(**parts)), tmp_path / "out", [])


def test_failed_run_is_one_line_and_does_not_stop_the_others(planned, train_script, caplog):
    script = train_script(
        "if name.startswith('sick'):\n"
        "    print('step 1', flush=True)\n"
        "    print('error: train: step 2: not finite; lower optim.learning_rate.', file=sys.stderr)\n"
        "    sys.exit(2)\n"
        "if name.startswith('broken'):\n"
        "    raise ValueError('a bug')\n"
    )
    caplog.set_level("INFO", "hfgolf")
    runs = planned(arms={"sick": {}, "broken": {}, "well": {}}, seeds=[1])
    assert run_missing(runs, 1, script) == {
        "sick-seed1": "train: step 2: not finite; lower optim.learning_rate",
        "broken-seed1": "ValueError: a bug",
    }
    messages = caplog.messages
    assert messages[0] == "3 runs: 0 already complete, 3 to do"
    assert messages[1].startswith("sick-seed1 started; log: ") and messages[1].endswith("sick-seed1/train.log")
    assert messages[2].startswith("[1/3] sick-seed1 failed: train: step 2: not finite; lower optim.learning_rate; ")
    assert messages[2].endswith("left") and " s so far, about " in messages[2]
    assert messages[-1].startswith("[3/3] well-seed1 is complete; ") and messages[-1].endswith(" so far")


def test_failed_run_is_not_resumed(planned, train_script, tmp_path, caplog):
    """A failed run is not retried, because a resume could hide the failure; one that never began or was stopped is."""
    script = train_script(
        "if not name.startswith('unbegun'): (path / 'config.yaml').write_text('{}')\n"
        "print('error: it diverged.')\n"
        "sys.exit(143 if name.startswith('stopped') else 2)\n"
    )
    runs = planned(arms={"unbegun": {}, "diverged": {}, "stopped": {}}, seeds=[1])
    first = run_missing(runs, 3, script)
    assert set(first) == {run.name for run in runs}
    for run in runs:
        if run.folder.config.exists():
            run.folder.config.write_text(run.resolved.to_yaml())
    caplog.set_level("INFO", "hfgolf")
    assert run_missing(runs, 3, train_script("")) == {"diverged-seed1": "it diverged"}
    assert caplog.messages[:2] == [
        "3 runs: 0 already complete, 2 to do",
        "1 failed before; delete failed.txt in a run's folder to try it again",
    ]
    (tmp_path / "out" / "diverged-seed1" / "failed.txt").unlink()
    assert run_missing(runs[1:2], 1, train_script("")) == {}


def test_what_kept_a_run_from_training_is_not_its_failure(planned, train_script, monkeypatch):
    """Neither in its first session, nor in a later one, whose folder has a config already; nor a full disk."""
    (run,) = planned(arms={"a": {}}, seeds=[1])
    refused = train_script("print('error: run.name: it is in use by another run.')\nsys.exit(2)\n")
    for _ in range(2):
        assert run_missing([run], 1, refused) == {"a-seed1": "run.name: it is in use by another run"}
        run.folder.config.write_text(run.resolved.to_yaml())
    full = train_script("(path / 'config.yaml').write_text('{}')\nsys.exit(2)\n")
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert run_missing([run], 1, full).keys() == {"a-seed1"}
    run.folder.config.write_text(run.resolved.to_yaml())
    assert run_missing([run], 1, train_script("")) == {}


def test_jobs_run_in_parallel_and_share_the_cores(planned, train_script, tmp_path, monkeypatch):
    """Each run waits for the other to start, which works only if they run at once."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    script = train_script(
        "(path / 'here').write_text(options['train.cpu_threads'] + ' ' + os.environ['HFGOLF_CONCURRENT_RUNS'])\n"
        "other = path.with_name({'a-seed1': 'a-seed2', 'a-seed2': 'a-seed1'}[name])\n"
        "while not (other / 'here').exists(): time.sleep(0.01)\n"
    )
    assert run_missing(planned(arms={"a": {}}), 2, script) == {}
    assert [path.read_text() for path in sorted(tmp_path.glob("out/*/here"))] == ["3 2", "3 2"]


@pytest.mark.slow
def test_completed_runs_are_skipped(planned, train_script, run, caplog):
    runs = planned(arms={"a": {}, "b": {"optim.learning_rate": 0.01}}, seeds=[1])
    for one in runs:
        run(one.arguments)
    caplog.set_level("INFO", "hfgolf")
    caplog.clear()
    assert run_missing(runs, 2, train_script(NEVER)) == {}
    assert caplog.messages == ["2 runs: 2 already complete, 0 to do"]
    runs[0].folder.summary.unlink()  # like a stopped run
    assert run_missing(runs, 1, train_script(NEVER)) == {"a-seed1": "this run must not start"}
    with pytest.raises(
        UserError, match=r"b-seed1 holds a run with another config \(optim.learning_rate 0.01 -> 0.03\)"
    ):
        run_missing(planned(arms={"a": {}, "b": {"optim.learning_rate": 0.03}}, seeds=[1]), 1, train_script(NEVER))


def test_stopping_the_comparison_saves_and_stops_its_runs(planned, train_script, tmp_path, capsys):
    number = signal.SIGTERM
    script = train_script(
        "def stop(*signal):\n"
        "    (path / 'saved').touch()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "(path / 'ready').touch()\n"
        "time.sleep(120)\n"
    )

    def stop_when_ready() -> None:
        while len(list(tmp_path.glob("out/*/ready"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)  # asks for nothing that is done here, and ends nothing
        os.kill(os.getpid(), number)

    def not_to_be_called(*arguments: object) -> None:
        raise AssertionError

    before = signal.signal(number, not_to_be_called)
    threading.Thread(target=stop_when_ready, daemon=True).start()
    with pytest.raises(SystemExit) as exit_:
        run_missing(planned(arms={"a": {}, "b": {}, "c": {}}), 2, script)
    assert exit_.value.code == 128 + number
    line = f"stopped by {number.name} before all runs were complete; run the same command to continue\n"
    assert capsys.readouterr().err == line
    assert sorted(path.parent.name for path in tmp_path.glob("out/*/saved")) == ["a-seed1", "b-seed1"]
    assert not (tmp_path / "out" / "c-seed1").exists()
    assert signal.signal(number, before) is not_to_be_called
