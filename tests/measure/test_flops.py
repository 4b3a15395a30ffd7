"""The count of FLOPs against torch's own counter, the table of devices against names torch reports, and the peak."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from torch.utils.flop_counter import FlopCounterMode

from hfgolf.command_line import load_config
from hfgolf.measure import flops
from hfgolf.measure.flops import (
    DEVICES,
    find_device,
    measured_peak_flops,
    peak_flops,
    token_flops,
    training_flops_per_token,
)
from hfgolf.model.build import build_golf
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.train import meter as meter_module
from hfgolf.train import setup
from hfgolf.train.meter import Meter, StepResult
from hfgolf.train.stopwatch import Stopwatch

CPU = torch.device("cpu")
B, T = 3, 16


def counted(config: GolfConfig, checkpointing: bool = False) -> dict[str, float]:
    """Return what torch counts in a forward and backward pass, FLOPs a token by operation."""
    model = GolfForCausalLM(config).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    ids = torch.randint(0, 97, (B, T))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, shift_labels=ids).loss.backward()
    return {str(operation): count / (B * T) for operation, count in counter.get_flop_counts()["Global"].items()}


def golf(attention: str, **options: object) -> GolfConfig:
    config = GolfConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, **options)
    config._attn_implementation = attention
    return config


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False},
        {"activation": "swiglu"},
        {"num_key_value_heads": 1},
        {"position_embedding": "learned", "intermediate_size": 80},
    ],
)
def test_flops_are_those_torch_counts(options):
    """Eager attention is products of batches, which the counter tells from those with weights; all of the square."""
    config = golf("eager", **options)
    told = token_flops(GolfForCausalLM(config), T)
    by_torch = counted(config)
    assert by_torch.pop("aten.bmm") == 2 * told.attention  # the causal half need not be computed
    assert sum(by_torch.values()) == told.matrices + told.head
    assert told.useful == told.matrices + told.attention + told.head


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_recomputation_is_what_checkpointing_adds(activation):
    config = golf("eager", activation=activation)
    told = token_flops(GolfForCausalLM(config), T)
    added = sum(counted(config, checkpointing=True).values()) - sum(counted(config).values())
    assert added == told.recomputation + told.attention / 3  # and the other half of its forward products


def test_torch_does_not_count_a_cpus_fused_attention():
    """Why the tests above attend eagerly: of SDPA's kernels the counter knows those of GPUs."""
    config = golf("sdpa")
    told = token_flops(GolfForCausalLM(config), T)
    assert sum(counted(config).values()) == told.useful - told.attention


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("h100", "H100"),
        # chips of their own, which have to be measured
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA", None),
    ],
)
def test_a_device_is_known_by_the_name_torch_reports(name, known):
    device = find_device(name)
    assert (device and device.name) == known


def test_every_device_of_the_table_is_found_and_plausible():
    for device in DEVICES:
        assert find_device(device.name) is device
        assert device.half >= device.tf32 >= device.single > 1e12
        assert 16 <= device.memory_gb <= 288


def test_a_known_gpu_takes_its_peak_from_the_table(monkeypatch):
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


def test_the_measured_peak_leaves_the_generators_alone():
    state = torch.get_rng_state()
    measured = measured_peak_flops(CPU, torch.float32, size=128)
    assert torch.equal(torch.get_rng_state(), state)
    assert 1e8 < measured < 1e14


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that has the next measurement say a number, with a home of its own for what is remembered."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))

    def says(peak: float) -> float:
        monkeypatch.setattr(flops, "measured_peak_flops", lambda device, dtype: peak)
        return peak_flops(CPU, "no")

    return says


def test_the_highest_measurement_is_remembered(measure, tmp_path, monkeypatch):
    assert measure(2e9) == 2e9
    assert measure(1e9) == 2e9, "the machine was busy"
    assert measure(3e9) == 3e9
    (key,) = json.loads((tmp_path / "home" / "hfgolf" / "device_peaks.json").read_text())
    assert "float32" in key and torch.__version__ in key and f"{torch.get_num_threads()} threads" in key
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert measure(1e9) == 1e9, "other threads are another machine"
    assert peak_flops(CPU, "bf16") == 1e9
    assert len(json.loads((tmp_path / "home" / "hfgolf" / "device_peaks.json").read_text())) == 3


@pytest.mark.parametrize("content", ["", "[1]", '{"a": "b"}', '{"a": null}', "\xff"])
def test_a_damaged_memory_is_written_anew(measure, tmp_path, content):
    file = tmp_path / "home" / "hfgolf" / "device_peaks.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(content.encode("latin-1"))
    assert measure(2e9) == 2e9
    assert measure(1e9) == 2e9


def test_a_home_that_cannot_be_written_costs_nothing(measure, tmp_path):
    (tmp_path / "home").write_text("a file where a folder should be")
    assert measure(2e9) == 2e9
    assert measure(1e9) == 1e9


def test_mfu_leaves_out_compiling_and_evaluating():
    class Seconds:
        spent = dict.fromkeys(("setup", "compile", "data", "train", "evaluate", "checkpoint", "other"), 0.0)

        def seconds(self) -> dict[str, float]:
            return dict(self.spent)

    stopwatch = Seconds()
    meter = Meter(CPU, tokens_per_step=1000, flops_per_second_of_peak=1e-3, stopwatch=stopwatch)
    for _ in range(2):
        meter.add(StepResult(1.0, 1.0, None, torch.tensor(0)))
    stopwatch.spent |= {"compile": 100.0, "evaluate": 50.0, "checkpoint": 25.0, "other": 12.0}
    stopwatch.spent |= {"data": 1.0, "train": 3.0}
    row = meter.row(lambda tensor, how: tensor)
    assert row["tokens_per_second"] == 2000 / 4
    assert row["mfu"] == pytest.approx(0.5)


def test_mfu_is_of_the_peak_of_all_processes(tiny_run, monkeypatch):
    config = load_config(tiny_run()).config
    model = build_golf(config, 257, "cpu")
    monkeypatch.setattr(setup, "peak_flops", lambda device, precision: 1e12)
    accelerator = SimpleNamespace(device=CPU, num_processes=4)
    meter = setup._build_meter(config, model, accelerator, Stopwatch())
    assert meter.flops_per_second_of_peak == pytest.approx(training_flops_per_token(model, 32) / 4e12)
    assert meter.tokens_per_step == 256


def test_a_row_has_every_figure_of_the_memory(monkeypatch):
    figures = {"used_memory_bytes": 1, "process_memory_bytes": 2, "gpu_memory_bytes": 3, "gpu_utilization": 4}
    for name, value in figures.items():
        monkeypatch.setattr(meter_module, name, lambda *device, value=value: value)
    meter = Meter(CPU, tokens_per_step=1, flops_per_second_of_peak=1.0, stopwatch=Stopwatch())
    meter.stopwatch.switch("train")
    meter.add(StepResult(1.0, 1.0, None, torch.tensor(0)))
    row = meter.row(lambda tensor, how: tensor)
    names = ("memory_bytes", "process_memory_bytes", "gpu_memory_bytes", "gpu_utilization")
    assert [row[name] for name in names] == [1, 2, 3, 4]
