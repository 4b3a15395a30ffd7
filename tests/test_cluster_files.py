"""The files for several machines run as they are: their own commands, on two "machines" that are this one."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from hfgolf.run.metrics import read_rows

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "configs" / "cluster"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes would share one GPU"),
]
# Stand-ins for SLURM's commands: two tasks, started here; a signal goes to the tasks; a requeue is noted.
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit
"$@" & echo $! > first.pid
"$@" & echo $! > second.pid
wait $(cat first.pid); one=$?
wait $(cat second.pid); two=$?
exit $((one > two ? one : two))
"""
SCONTROL = """#!/bin/bash
case $1 in show) echo 127.0.0.1; sleep 0.2; echo elsewhere;; requeue) echo "$2" > requeued;; esac
"""
SCANCEL = """#!/bin/bash
kill -TERM $(cat first.pid) $(cat second.pid)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    commands = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}
    commands["torchrun"] = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in commands.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("scripts", "configs", "hfgolf"):
        (tmp_path / name).symlink_to(ROOT / name)
    of_job = {"SLURM_JOB_ID": str(random.randrange(10**6)), "SLURM_JOB_NODELIST": "any", "SLURM_NNODES": "2"}
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return os.environ | of_job | {"PATH": path, "PROCESSES": "1", "PYTHONPATH": str(ROOT)}


def options_of(arguments: list[str]) -> list[str]:
    """Return the tiny run's options, and those that undo what only configs/fineweb_124m.yaml sets."""
    undone = ["data.hub_name", "data.hub_config", "data.max_documents", "tokenizer.name_or_path"]
    undone += ["optim.embedding_learning_rate", "train.eval_tokens"]
    return [*(f"--{key}=null" for key in undone), *arguments]


def test_slurm_script_saves_and_requeues_before_the_time_limit(tiny_run, tmp_path, environment):
    options = options_of(tiny_run(batch__micro_batch_size=4, train__max_steps=10**5, train__save_every_steps="null"))
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            ["bash", str(CLUSTER / "slurm.sh"), *options], cwd=tmp_path, env=environment, stdout=output, stderr=output
        )
    until = time.monotonic() + 200
    while not (metrics.is_file() and len(read_rows(metrics)) > 2):
        assert time.monotonic() < until and job.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(120) == 0, (tmp_path / "output").read_text()
    assert "2 processes" in (tmp_path / "output").read_text()
    assert (tmp_path / "requeued").read_text().strip() == environment["SLURM_JOB_ID"]
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "latest" / "manifest.json").is_file()


@pytest.mark.parametrize("name", ["skypilot.yaml", "kubernetes.yaml"])
def test_command_in_the_file_trains_one_run_on_two_machines(tiny_run, tmp_path, environment, name):
    """The file's own command on each machine, with the run's options after it."""
    documents = list(yaml.safe_load_all((CLUSTER / name).read_text()))
    if name == "skypilot.yaml":
        command = documents[0]["run"].replace(".venv/bin/torchrun", "torchrun").replace("/shared", str(tmp_path))
    else:
        (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
        command = container["args"][0].replace("/shared", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (
        command.strip().replace(":29500", f":{port}")
        + " "
        + " ".join(f"'{one}'" for one in options_of(tiny_run(batch__micro_batch_size=4)))
    )
    of_node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\nelsewhere", "SKYPILOT_TASK_ID": "1"}
    machines = [
        subprocess.Popen(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment | of_node | {"HEAD": "127.0.0.1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    said = [machine.communicate(timeout=240)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "2 processes" in "".join(said)
    assert len(read_rows(tmp_path / "runs" / "tiny" / "metrics.jsonl")) == 6
