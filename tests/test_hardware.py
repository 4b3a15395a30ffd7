"""What is free: the machine's memory, or what a container leaves of it."""

from __future__ import annotations

import math

import pytest
import torch

from hfgolf import hardware
from hfgolf.hardware import free_cgroup_bytes

V2, V1 = "0::/user/run\n", "5:cpu,memory:/user/run\n1:name=systemd:/\n"
LIMIT, FREE = 10**9, 10**9 - 300 + 100


def control_group(folder, version, limit, used=300, cache=100):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"inactive_file {cache}\ntotal_inactive_file {cache}\nanon 7\n")


@pytest.mark.parametrize(
    ("listed", "groups", "free"),
    [
        (V2, {"user/run": (2, LIMIT)}, FREE),
        (V2, {"user/run": (2, "max"), "user": (2, LIMIT)}, FREE),
        (V2, {"": (2, LIMIT)}, FREE),
        (V2, {"user/run": (2, LIMIT), "user": (2, 2 * LIMIT)}, FREE),
        (V2, {"user/run": (2, 100)}, 0),
        (V2, {"user/run": (2, "max")}, math.inf),
        (V2, {"other": (2, LIMIT)}, math.inf),
        (V1, {"memory/user/run": (1, LIMIT)}, FREE),
        (V1, {"memory": (1, LIMIT)}, FREE),
        ("", {}, math.inf),
    ],
)
def test_a_container_leaves_what_its_control_groups_say(listed, groups, free, tmp_path):
    (tmp_path / "cgroup").write_text(listed)
    for folder, (version, limit) in groups.items():
        control_group(tmp_path / "tree" / folder, version, limit)
    assert free_cgroup_bytes(tmp_path / "cgroup", tmp_path / "tree") == free
    assert free_cgroup_bytes(tmp_path / "nowhere", tmp_path / "tree") == math.inf


def test_free_memory_is_that_of_the_container(monkeypatch):
    monkeypatch.setattr(hardware, "free_cgroup_bytes", lambda: 12345.0)
    assert hardware.free_memory_bytes(torch.device("cpu")) == 12345
