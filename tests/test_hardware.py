"""Free memory in a container, the device table against torch's names, and the measured peak."""

from __future__ import annotations

import math

import pytest
import torch

from hfgolf.system import hardware
from hfgolf.system.hardware import fast_product_dtype, find_device, free_cgroup_bytes, measured_peak_flops, peak_flops

CPU = torch.device("cpu")

LIMIT, FREE = 10**9, 10**9 - 300 + 100


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ({"user/run": "max", "user": LIMIT}, FREE),
        ({"": LIMIT}, FREE),
        ({"user/run": LIMIT, "user": 2 * LIMIT}, FREE),
        ({"user/run": 100}, 0),
        ({"user/run": "max"}, math.inf),
        ({"other": LIMIT}, math.inf),
    ],
)
def test_free_cgroup_memory_respects_every_limit(groups, free, tmp_path):
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n0::/user/run\n")
    for name, limit in groups.items():
        folder = tmp_path / "tree" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("300\n")
        (folder / "memory.stat").write_text("inactive_file 100\nanon 7\n")
    assert free_cgroup_bytes(tmp_path / "cgroup", tmp_path / "tree") == free
    assert free_cgroup_bytes(tmp_path / "nowhere", tmp_path / "tree") == math.inf


@pytest.mark.parametrize(
    ("groups", "cores"),
    [
        ({"user/run": "max 100000", "user": "150000 100000", "": "max 100000"}, 1.5),
        ({"user/run": "400000 100000", "user": "800000 100000"}, 4.0),
        ({"user/run": "max 100000"}, math.inf),
    ],
)
def test_cores_respect_every_quota(groups, cores, tmp_path):
    (tmp_path / "cgroup").write_text("0::/user/run\n")
    (tmp_path / "tree" / "user" / "run").mkdir(parents=True)
    for name, quota in groups.items():
        (tmp_path / "tree" / name / "cpu.max").write_text(f"{quota}\n")
    assert hardware.cgroup_cores(tmp_path / "cgroup", tmp_path / "tree") == cores
    assert hardware.cgroup_cores(tmp_path / "nowhere", tmp_path / "tree") == math.inf


def test_free_memory_and_cores_are_those_of_the_container(monkeypatch):
    monkeypatch.setattr(hardware, "free_cgroup_bytes", lambda: 12345.0)
    assert hardware.free_memory_bytes(torch.device("cpu")) == 12345
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    for allowed, cores in ((math.inf, 64), (1.5, 2)):
        monkeypatch.setattr(hardware, "cgroup_cores", lambda allowed=allowed: allowed)
        assert hardware.cpu_cores() == cores


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("AMD Instinct MI300X", "MI300X"),
        ("h100", "H100"),
        # different chips, which must be measured
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA", None),
    ],
)
def test_device_is_recognized_by_its_torch_name(name, known):
    device = find_device(name)
    assert (device and device.name) == known


def test_known_gpu_uses_its_peak_from_the_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpu = torch.device("cuda")
    assert peak_flops(gpu, "bf16") == peak_flops(gpu, "fp16") == 989e12
    assert peak_flops(gpu, "no") == 67e12
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert peak_flops(gpu, "no") == 494e12
    finally:
        matmul.fp32_precision = before


def test_measuring_the_peak_does_not_change_random_state():
    state = torch.get_rng_state()
    measured = measured_peak_flops(CPU, torch.float32, size=128)
    assert torch.equal(torch.get_rng_state(), state)
    assert 1e8 < measured < 1e14


def test_any_accelerator_is_waited_for_and_named(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for kind in ("cpu", "mps", "xpu", "cuda"):
        hardware.synchronize(torch.device(kind))
    assert [device.type for device in waited] == ["mps", "xpu", "cuda"]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert hardware.accelerator_name() == f"{hardware.device_name(CPU)} (mps)"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: "Intel Arc")
    assert hardware.accelerator_name() == "Intel Arc"


@pytest.mark.parametrize(
    ("has_avx512", "has_amx", "bf16_flops", "expected"),
    [
        (False, False, 2e11, torch.float32),
        (False, True, 1e11, torch.bfloat16),
        (True, False, 4e11, torch.bfloat16),
        (True, False, 1e11, torch.float32),  # an Intel Xeon whose hypervisor hides AMX
    ],
)
def test_products_are_bf16_on_a_cpu_only_if_faster(monkeypatch, has_avx512, has_amx, bf16_flops, expected):
    flops = {torch.bfloat16: bf16_flops, torch.float32: 2e11}
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(hardware, "measured_peak_flops", lambda device, dtype, size: flops[dtype])
    hardware._avx512_is_faster_in_bf16.cache_clear()
    assert fast_product_dtype(CPU) == expected
    hardware._avx512_is_faster_in_bf16.cache_clear()
