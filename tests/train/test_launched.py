"""Every setting that `accelerate launch` hands to its processes is honored, harmless, or refused in one line."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate.utils import launch
from torch.torch_version import TorchVersion

from hfgolf.config.parse import load_config
from hfgolf.system.errors import UserError
from hfgolf.train import launched, process
from hfgolf.train.setup import set_up

SWITCHES = {"MEGATRON_LM_": "ACCELERATE_USE_MEGATRON_LM", "PARALLELISM_CONFIG_": "ACCELERATE_USE_PARALLELISM_CONFIG"}


def exported() -> set[str]:
    """Return the variables that accelerate's own source sets for its processes."""
    source = inspect.getsource(launch)
    return set(re.findall(r'current_env\["((?:ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG)_\w+)"\]', source))


def test_each_setting_that_accelerate_exports_is_known():
    assert len(exported()) > 35
    assert {
        name for name in exported() if not launched.is_known(name) and not name.startswith(tuple(SWITCHES))
    } == set()


def test_a_refused_setting_stops_a_run_before_anything_is_written(monkeypatch, tiny_run, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match=r"^accelerate: .*DeepSpeed; start .*--use_fsdp --fsdp_version 2"):
        set_up(load_config(tiny_run()))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "version", "message"),
    [
        ({}, "2.13.0", "FSDP version 1, its default, flattens the matrices that Muon needs; start"),
        ({"FSDP_VERSION": "1"}, "2.13.0", "FSDP version 1, its default, flattens"),
        ({"FSDP_VERSION": "2"}, "2.9.1+cu130", r"FSDP2 needs torch 2\.13 or newer, this is 2\.9\.1"),
    ],
)
def test_only_fsdp2_with_a_recent_torch_shards(monkeypatch, settings, version, message):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(UserError, match=f"^accelerate: {message}"):
        launched.check_settings({"ACCELERATE_USE_FSDP": "true"} | settings)


@pytest.mark.parametrize("name", launched.REFUSED)
@pytest.mark.parametrize("value", ["7", "True", "INDUCTOR"])
def test_each_refused_setting_is_one_line_that_says_what_to_do(name, value):
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", name: value}
    with pytest.raises(UserError, match=rf"^accelerate: {name}={value} \(.*\): .*(; start |leave it out)") as raised:
        launched.check_settings(environment)
    keys = re.findall(r"(?:train|batch|model|optim)\.\w+", str(raised.value))
    assert set(keys) <= set(load_config(["--train.max_steps=1"]).config.flat())


@pytest.mark.parametrize("name", sorted([*launched.REFUSED, *launched.HARMLESS]))
def test_settings_without_effect_pass(name):
    for value in ("no", "NO", "false", "0", "None") if name in launched.REFUSED else ("1", "whatever"):
        launched.check_settings({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", name: value})


@pytest.mark.parametrize("name", ["ACCELERATE_TELEPORT", "ACCELERATE_USE_SOMETHING_NEW", "FSDP_NEW"])
def test_an_unknown_setting_is_refused(name):
    with pytest.raises(UserError, match=rf"^accelerate: {name}=1: hfgolf does not know this setting; unset it"):
        launched.check_settings({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", name: "1"})


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("python /bin/accelerate launch --main_process_port 7 train.py", 7),
        ("python -m accelerate.commands.launch --main_process_port 7 train.py", 7),
        ("python /bin/accelerate-launch --main_process_port 7 train.py", 7),
        ("make launch", None),
        ("launch --main_process_port 7", None),
    ],
)
def test_only_what_accelerate_was_told_is_read(monkeypatch, command, port):
    parent = SimpleNamespace(cmdline=command.split)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    arguments = launched.launch_arguments()
    assert (arguments and arguments.main_process_port) == port


def test_a_parent_that_must_not_be_seen_is_none(monkeypatch):
    """As that of `sudo -u someone` on a Mac."""

    def parent(self):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "parent", parent)
    assert launched.launch_arguments() is None


@pytest.mark.parametrize("option", ["--gradient_accumulation_steps", "--gradient_clipping"])
def test_options_that_accelerate_tells_only_deepspeed_are_refused(monkeypatch, option):
    monkeypatch.setattr(launched, "launcher_options", lambda: [option, "7", "scripts/train.py"])
    with pytest.raises(UserError, match=rf"^accelerate: ACCELERATE_{option[2:].upper()}=7\S* .*leave it out"):
        process.processes()
