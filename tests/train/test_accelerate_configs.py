"""configs/accelerate: what accelerate hands to the processes that it starts with each file, and a short run of each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sharded
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "accelerate"
TRAIN = ROOT / "scripts" / "train.py"


def launched(name, monkeypatch, *options):
    """Return the arguments and the environment of a launch on a machine with GPUs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    words = ["--config_file", str(FOLDER / name), *options, "scripts/train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return arguments, prepare_multi_gpu_env(arguments)


@pytest.mark.parametrize(
    ("name", "processes", "machines"), [("one_gpu", 1, 1), ("ddp", 8, 1), ("fsdp2", 8, 1), ("multi_node", 16, 2)]
)
def test_each_config_starts_its_processes(monkeypatch, name, processes, machines):
    arguments, environment = launched(f"{name}.yaml", monkeypatch, "--machine_rank", "0")
    assert (arguments.num_processes, arguments.num_machines) == (processes, machines)
    assert bool(arguments.multi_gpu) == (name in ("ddp", "multi_node")) and bool(arguments.use_fsdp) == (
        name == "fsdp2"
    )
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"  # "no" would be fp32
    assert ("ACCELERATE_USE_FSDP" in environment) == (name == "fsdp2")


def test_fsdp2_config_sets_what_the_fsdp2_tests_set(monkeypatch):
    _, environment = launched("fsdp2.yaml", monkeypatch)
    assert {key: environment[key].lower() for key in sharded.LAUNCHED} == {
        key: value.lower() for key, value in sharded.LAUNCHED.items()
    }


def start(name, tmp_path, arguments, *options, program=TRAIN):
    """Start `accelerate launch` with a file; see test_each_config_of_several_processes_trains for what a CPU needs."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / f"{name}.yaml")]
    return subprocess.Popen(
        [*launch, *options, str(program), *arguments],
        cwd=tmp_path,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


SHARDED = f"""import os
assert os.environ["ACCELERATE_USE_FSDP"] == "true" and os.environ["FSDP_VERSION"] == "2"
{sharded.TRAIN}"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", [pytest.param("fsdp2", marks=sharded.needs_fsdp2), "multi_node"])
def test_each_config_of_several_processes_trains(tiny_run, tmp_path, name):
    """The real command, with what a CPU needs.

    ACCELERATE_USE_CPU: accelerate would look for GPUs. --num_processes 2 instead of 8 and 16: each would need a core.
    multi_node: both "machines" are this one. fsdp2: accelerate shards only on GPUs, so SHARDED tells it to here. The
    port is a free one.
    """
    options = {"train__max_steps": 2, "train__eval_every_steps": 100, "train__save_every_steps": "null"}
    arguments = tiny_run(**options, batch__micro_batch_size=4, train__mixed_precision="null")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        two = ["--num_processes", "2", "--main_process_port", str(free.getsockname()[1])]
    sharded_train = tmp_path / "sharded_train.py"
    sharded_train.write_text(SHARDED)
    if name == "multi_node":
        two += ["--main_process_ip", "127.0.0.1", "--machine_rank"]
        launches = [start(name, tmp_path, arguments, *two, rank) for rank in ("0", "1")]
    else:
        launches = [start(name, tmp_path, arguments, *two, program=sharded_train)]
    try:
        said = [launch.communicate(timeout=150)[0] for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    assert [launch.returncode for launch in launches] == [0] * len(launches), said
    assert "2 processes of " in said[0]
    assert ", bf16 (accelerate)" in said[0]
    assert json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())["steps"] == 2
