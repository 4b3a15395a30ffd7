"""Runs as SLURM jobs, by submitit: with its executor for local processes, and with stand-ins for SLURM's commands."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hfgolf.errors import UserError
from hfgolf.tools.compare import slurm
from hfgolf.tools.compare.comparison import compare_experiment
from hfgolf.tools.compare.experiment import load_experiment, plan_runs
from hfgolf.tools.compare.launch import run_missing
from hfgolf.tools.compare.outcome import read_outcomes
from hfgolf.tools.compare.slurm import SlurmLauncher, TrainJob, slurm_executor

submitit = pytest.importorskip("submitit", reason="needs submitit, of the dev extra")

OPTIONS = ["partition=gpu", "gpus=1", "time=30", "exclusive", "setup=export OF_SETUP=yes"]
# Stand-ins for SLURM's commands. A job is its script in the background, started again if it is put back into the queue;
# the folder of a job, jobs/ID, has its script (a copy: submitit moves its own), its state and its submissions.
SBATCH = """#!/bin/bash
[ ! -e {jobs}/refuse ] || {{ echo "sbatch: error: invalid partition specified" >&2; exit 1; }}
id=$((100 + $(ls {jobs} | wc -l)))
mkdir {jobs}/$id
cp "$1" {jobs}/$id/script
echo RUNNING > {jobs}/$id/state
export SLURM_JOB_ID=$id
(
    while true; do
        bash {jobs}/$id/script >> {jobs}/$id/output 2>&1
        [ -e {jobs}/$id/requeue ] || break
        rm {jobs}/$id/requeue
    done
    [ -e {jobs}/$id/end ] && cp {jobs}/$id/end {jobs}/$id/state || echo COMPLETED > {jobs}/$id/state
) > /dev/null 2>&1 &
echo "Submitted batch job $id"
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --unbuffered ]] && shift || shift 2; done
echo $$ > {jobs}/$SLURM_JOB_ID/pid
exec "$@"
"""
SACCT = """#!/bin/bash
echo 'JobID|State|NodeList'
for job in {jobs}/1*; do echo "$(basename $job)|$(cat $job/state)|node"; done
"""
SCONTROL = """#!/bin/bash
touch {jobs}/$2/requeue
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the jobs of a machine with SLURM."""
    path, commands = tmp_path / "jobs", tmp_path / "bin"
    path.mkdir()
    commands.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text.format(jobs=path))
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(SlurmLauncher, "poll_seconds", 0.05)
    monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 0)
    submitit.SlurmJob.watcher.clear()
    submitit.SlurmJob.watcher._registered.clear()
    return path


@pytest.fixture
def planned(tiny_definition, tmp_path):
    """Return a function that plans the runs of a definition of tiny runs."""
    return lambda **parts: plan_runs(load_experiment(tiny_definition(**parts)), tmp_path / "out", [])


@pytest.fixture
def launcher(jobs, tmp_path):
    return lambda script: SlurmLauncher(script, slurm_executor(tmp_path / "out" / "slurm", OPTIONS), 8)


@pytest.mark.slow
def test_runs_of_jobs_are_those_of_local_processes(tiny_definition, run, run_script, tmp_path, jobs):
    """Two configs over two seeds, each run a job of submitit's own local executor; and the same in this process."""
    definition = tiny_definition(arms={"adamw": {"optim.name": "adamw"}, "muon": {}})
    experiment = load_experiment(definition)
    script = ["-m", "hfgolf", "train"]

    def results(folder: Path, failed: dict[str, str]) -> dict[str, Any]:
        outcomes, failures = read_outcomes(plan_runs(experiment, folder, []), failed)
        found = compare_experiment(experiment, "", outcomes, failures)
        assert found.failures == {}
        return {arm: summary.final_losses for arm, summary in found.arms.items()}

    executor = submitit.LocalExecutor(tmp_path / "local")
    executor.update_parameters(timeout_min=10)
    of_jobs = results(
        tmp_path / "there",
        run_missing(plan_runs(experiment, tmp_path / "there", []), SlurmLauncher(script, executor, 4)),
    )
    for planned in plan_runs(experiment, tmp_path / "here", []):
        run(planned.arguments)
    assert of_jobs == results(tmp_path / "here", {})
    arguments = [definition, "--output_dir", tmp_path / "there", "--launcher", "slurm", "--slurm", "time=5"]
    assert run_script("compare_runs.py", *arguments).status == 0
    found = json.loads((tmp_path / "there" / "tiny.json").read_text())["arms"]
    assert {arm: one["final_losses"] for arm, one in found.items()} == {
        arm: {str(seed): loss for seed, loss in losses.items()} for arm, losses in of_jobs.items()
    }
    assert not list(jobs.iterdir()), "complete runs are not submitted"


def test_slurm_options_without_jobs_are_refused(run_script, tmp_path):
    said = run_script("compare_runs.py", "any.yaml", "--slurm", "time=5")
    assert (said.status, said.err.count("\n")) == (2, 1)
    assert said.err.startswith("error: --slurm: is for jobs, so it has no effect here; add --launcher slurm")


@pytest.mark.slow
def test_jobs_get_their_options_and_a_failed_run_is_one_line(planned, launcher, train_script, jobs, caplog):
    script = train_script(
        "print(os.environ['OF_SETUP'], os.environ['SLURM_JOB_ID'])\n"
        "if name.startswith('sick'):\n"
        "    (path / 'config.yaml').write_text('{}')\n"
        "    sys.exit('error: train: step 2: not finite; lower optim.learning_rate.')\n"
    )
    caplog.set_level("INFO", "hfgolf")
    runs = planned(arms={"sick": {}, "well": {}}, seeds=[1])
    assert run_missing(runs, launcher(script)) == {"sick-seed1": "train: step 2: not finite; lower optim.learning_rate"}
    assert (runs[0].folder.path / "failed.txt").exists()
    assert caplog.messages[1].startswith("sick-seed1 submitted as job 100; log: ")
    assert runs[1].log.read_text() == "yes 101\n"
    lines = (jobs / "101" / "script").read_text().splitlines()
    for stated in (
        "partition=gpu",
        "gpus=1",
        "time=30",
        "exclusive",
        "requeue",
        "signal=USR2@90",
        "job-name=well-seed1",
    ):
        assert f"#SBATCH --{stated}" in lines
    assert not list(runs[0].folder.path.parent.glob(f"*/{slurm.JOB_NAME}"))


@pytest.mark.slow
def test_preempted_job_saves_and_goes_on_when_it_is_put_back(planned, launcher, train_script, jobs):
    """SLURM's signal reaches every process of the job."""
    script = train_script(
        "def stop(*signal):\n"
        "    time.sleep(0.5)\n"
        "    (path / 'saved').touch()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('resumed' if (path / 'saved').exists() else 'began', options['train.resume'], flush=True)\n"
        "if not (path / 'ready').exists():\n"
        "    (path / 'ready').touch()\n"
        "    time.sleep(120)\n"
    )
    (run,) = planned(arms={"a": {}}, seeds=[1])

    def preempt() -> None:
        wait_for(run.folder.path / "ready")
        job = psutil.Process(int((jobs / "100" / "pid").read_text()))
        for process in [*job.children(recursive=True), job]:
            process.send_signal(signal.SIGUSR2)

    threading.Thread(target=preempt, daemon=True).start()
    assert run_missing([run], launcher(script)) == {}
    assert run.log.read_text() == "began auto\nresumed auto\n"
    assert [path.name for path in jobs.iterdir()] == ["100"], "one job, started twice"


@pytest.mark.slow
def test_jobs_outlive_the_comparison_which_finds_them_again(planned, launcher, train_script, jobs, caplog, capsys):
    script = train_script(
        "(path / 'ready').touch()\nwhile not (path.parent / 'go').exists(): time.sleep(0.05)\nprint('done')\n"
    )
    (run,) = planned(arms={"a": {}}, seeds=[1])

    def stop() -> None:
        wait_for(run.folder.path / "ready")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(SystemExit):
        run_missing([run], launcher(script))
    assert "its jobs go on; run the same command to wait for them" in capsys.readouterr().err
    assert (run.folder.path / slurm.JOB_NAME).read_text() == "100\n"
    (run.folder.path.parent / "go").touch()
    caplog.set_level("INFO", "hfgolf")
    caplog.clear()
    assert run_missing([run], launcher(script)) == {}
    assert caplog.messages[1].startswith("a-seed1 is job 100; log: ") and run.log.read_text() == "done\n"
    assert [path.name for path in jobs.iterdir()] == ["100"]


@pytest.mark.slow
def test_job_that_slurm_ends_is_named_and_submitted_again_later(planned, launcher, train_script, jobs):
    script = train_script("(path / 'ready').touch()\ntime.sleep(120 * (not (path / 'again').exists()))\n")
    (run,) = planned(arms={"a": {}}, seeds=[1])

    def end() -> None:
        wait_for(run.folder.path / "ready")
        (jobs / "100" / "end").write_text("NODE_FAIL")
        job = psutil.Process(int((jobs / "100" / "pid").read_text()))
        for process in [job, *job.children(recursive=True)]:  # the job first: it would write the status of its child
            process.kill()

    threading.Thread(target=end, daemon=True).start()
    (reason,) = run_missing([run], launcher(script)).values()
    assert reason.startswith("SLURM job 100 ended as NODE_FAIL without a result; its own log: ")
    assert not (run.folder.path / "failed.txt").exists()
    (run.folder.path / "again").touch()
    assert run_missing([run], launcher(script)) == {}
    assert sorted(path.name for path in jobs.iterdir()) == ["100", "101"]


def test_job_that_is_asked_to_end_leaves_its_end_to_slurm(tmp_path, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(slurm, "time", SimpleNamespace(sleep=slept.append))
    for program, status in [("sys.exit(143)", 143), ("os.kill(os.getpid(), 15)", -15), ("sys.exit(2)", 2)]:
        command = [sys.executable, "-S", "-c", f"import os, sys; {program}"]
        assert TrainJob(command, tmp_path, tmp_path / "log")() == status
    assert slept == [600, 600]


def test_unknown_job_and_refused_job_are_one_line(planned, launcher, train_script, jobs):
    (run,) = planned(arms={"a": {}}, seeds=[1])
    of_slurm = launcher(train_script(""))
    (jobs / "refuse").touch()
    with pytest.raises(UserError, match=r"sbatch refused the job of a-seed1: sbatch: error: invalid partition specif"):
        of_slurm.start(run)
    (run.folder.path / slurm.JOB_NAME).write_text("7\n")
    with pytest.raises(
        UserError, match=r"SLURM does not know job 7 of a-seed1; if it no longer runs, delete .*\.txt\."
    ):
        of_slurm.start(run)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--slurm: each job needs a time limit in minutes; add --slurm time=480, for example."),
        (["time=8:00:00"], "--slurm: each job needs a time limit in minutes"),
        (["time=5", "--nodes=2"], "--slurm: --nodes=2 is not allowed"),
        (["time=5", "=3"], "--slurm: =3 is not allowed"),
    ],
)
def test_options_that_cannot_work_are_refused(jobs, tmp_path, options, said):
    with pytest.raises(UserError) as error:
        slurm_executor(tmp_path, options)
    assert str(error.value).startswith(said)


def test_missing_slurm_and_missing_submitit_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^--launcher slurm: there is no srun here"):
        slurm_executor(tmp_path, OPTIONS)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"^--launcher slurm: needs submitit; run `pip install submitit`\.$"):
        slurm_executor(tmp_path, OPTIONS)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)
