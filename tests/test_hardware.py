"""Free memory in a container, the device table against torch's names, and the measured peak."""

from __future__ import annotations

import json
import math

import pytest
import torch
from huggingface_hub import constants

from hfgolf.system import hardware
from hfgolf.system.hardware import fast_product_dtype, find_device, free_cgroup_bytes, measured_peak_flops, peak_flops

CPU = torch.device("cpu")

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
def test_free_cgroup_memory_respects_every_limit(listed, groups, free, tmp_path):
    (tmp_path / "cgroup").write_text(listed)
    for folder, (version, limit) in groups.items():
        control_group(tmp_path / "tree" / folder, version, limit)
    assert free_cgroup_bytes(tmp_path / "cgroup", tmp_path / "tree") == free
    assert free_cgroup_bytes(tmp_path / "nowhere", tmp_path / "tree") == math.inf


def test_free_memory_respects_the_container(monkeypatch):
    monkeypatch.setattr(hardware, "free_cgroup_bytes", lambda: 12345.0)
    assert hardware.free_memory_bytes(torch.device("cpu")) == 12345


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


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that fakes the next measurement; the file of peaks is temporary."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))

    def says(peak: float) -> float:
        monkeypatch.setattr(hardware, "measured_peak_flops", lambda device, dtype: peak)
        return peak_flops(CPU, "no")

    return says


def test_highest_measurement_is_cached(measure, tmp_path, monkeypatch):
    assert measure(2e9) == 2e9
    assert measure(1e9) == 2e9, "a lower measurement means that the machine was busy"
    assert measure(3e9) == 3e9
    (key,) = json.loads((tmp_path / "home" / "hfgolf" / "device_peaks.json").read_text())
    assert "float32" in key and torch.__version__ in key and f"{torch.get_num_threads()} threads" in key
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert measure(1e9) == 1e9, "another thread count has its own peak"
    assert peak_flops(CPU, "bf16") == 1e9
    assert len(json.loads((tmp_path / "home" / "hfgolf" / "device_peaks.json").read_text())) == 3


@pytest.mark.parametrize("content", ["", "[1]", '{"a": "b"}', '{"a": null}', "\xff"])
def test_damaged_peak_cache_is_rewritten(measure, tmp_path, content):
    file = tmp_path / "home" / "hfgolf" / "device_peaks.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(content.encode("latin-1"))
    assert measure(2e9) == 2e9
    assert measure(1e9) == 2e9


def test_unwritable_home_only_disables_the_cache(measure, tmp_path):
    (tmp_path / "home").write_text("a file where a folder should be")
    assert measure(2e9) == 2e9
    assert measure(1e9) == 1e9


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
