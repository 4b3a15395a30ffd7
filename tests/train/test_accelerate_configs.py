"""configs/accelerate: what accelerate hands to the processes that it starts with each file."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from sharded import LAUNCHED

FOLDER = Path(__file__).parents[2] / "configs" / "accelerate"


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
    assert {key: environment[key].lower() for key in LAUNCHED} == {
        key: value.lower() for key, value in LAUNCHED.items()
    }
