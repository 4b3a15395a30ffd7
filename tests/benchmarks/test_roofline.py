"""FLOPs and bytes of operations, in closed form and by torch's counter; the roofline; the script."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import roofline as roofline_module
from benchmarks.roofline import Operation, Roofline, measure_roofline, place, step_operations
from hfgolf.model.causal_blocks import NAME as CAUSAL_BLOCKS
from hfgolf.model.configuration_golf import GolfConfig

CPU = torch.device("cpu")
B, T, C, H, K, D, V, L = 2, 16, 32, 4, 2, 8, 97, 3
N, INNER = B * T, 4 * C
ROOFLINE = Roofline({"bf16": 400e9, "fp32": 100e9}, 20e9)


def operations(precision: str = "fp32", attention: str = "sdpa") -> dict[str, Operation]:
    config = GolfConfig(vocab_size=V, hidden_size=C, num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=K)
    config._attn_implementation = attention
    return {operation.name: operation for operation in step_operations(config, B, T, precision, CPU)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_matmul_flops_match_torch(precision):
    found = operations(precision)
    for name in ("qkv projection", "MLP up", "MLP down", "head", "Newton-Schulz product"):
        with FlopCounterMode(display=False) as counter:
            found[name].run()
        assert found[name].flops == counter.get_total_flops()


def test_intensities_in_closed_form():
    """Intensity of a matrix product with `size` bytes per element: 2mkn FLOPs over size (mk + kn + mn) bytes."""
    for precision, size in (("fp32", 4), ("bf16", 2)):
        found = operations(precision)
        for name, fan_in, fan_out in (("qkv projection", C, (H + 2 * K) * D), ("MLP down", INNER, C), ("head", C, V)):
            expected = 2 * N * fan_in * fan_out / (size * (N * fan_in + fan_in * fan_out + N * fan_out))
            assert found[name].intensity == pytest.approx(expected)
        # T keys, half of them in the past, each met by a product with queries and one with weights: T FLOPs over the
        # two heads' elements and the share of keys and values that each of them has
        assert found["attention"].intensity == pytest.approx(2 * T / (size * (2 + 2 * K / H)))
        assert found["norm"].intensity == pytest.approx(4 * N / (size * (2 * N + 1)))
        assert found["AdamW update"].intensity == 0.5


def test_both_attention_kernels_agree():
    in_blocks, sdpa = (operations(attention=name)["attention"].run() for name in (CAUSAL_BLOCKS, "sdpa"))
    torch.testing.assert_close(in_blocks, sdpa)


def test_roof_is_the_minimum_of_two_lines_meeting_at_the_ridge():
    assert ROOFLINE.attainable_flops(1, "bf16") == ROOFLINE.attainable_flops(1, "fp32") == 20e9
    assert ROOFLINE.attainable_flops(5, "fp32") == ROOFLINE.attainable_flops(500, "fp32") == 100e9
    assert ROOFLINE.attainable_flops(20, "bf16") == ROOFLINE.attainable_flops(500, "bf16") == 400e9
    assert ROOFLINE.attainable_flops(19, "bf16") == 380e9


@pytest.mark.parametrize(("num_bytes", "bound_by", "reached"), [(1e9, "memory", 0.5), (1e6, "compute", 0.1)])
def test_measured_operation_is_placed_under_the_roof(monkeypatch, num_bytes, bound_by, reached):
    monkeypatch.setattr(roofline_module, "best_seconds", lambda run: 0.1)
    row = place(Operation("product", "fp32", 1e9, num_bytes, lambda: None), ROOFLINE)
    assert row["flops_per_second"] == pytest.approx(1e10)
    assert (row["bound_by"], row["reached"]) == (bound_by, pytest.approx(reached))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_large_matmul_exceeds_the_roof_of_a_gpu():
    device = torch.device("cuda")
    roofline = measure_roofline(device)
    assert roofline.peak_flops["bf16"] > roofline.peak_flops["fp32"] > 1e12 and roofline.bytes_per_second > 1e11
    gpt2 = GolfConfig(vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_attention_heads=12)
    for operation in step_operations(gpt2, 16, 1024, "bf16", device):
        row = place(operation, roofline)
        assert 0 < row["reached"] < 1.3 or row["bound_by"] == "memory"


def test_it_writes_a_plot_and_its_figures(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(roofline_module, "PRODUCT_SIZES", {"cpu": (64,)})
    monkeypatch.setattr(roofline_module, "MAX_STREAM_ELEMENTS", 2**12)
    monkeypatch.setattr(roofline_module, "MIN_SECONDS", 0.01)
    monkeypatch.setattr(sys, "argv", ["roofline.py", *tiny_run(), "--output", str(tmp_path / "roofline")])
    roofline_module.main()
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "roofline" / "roofline.json").read_text())
    assert (tmp_path / "roofline" / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert len(record["operations"]) == 8 and all(row["operation"] in said for row in record["operations"])
    head = record["operations"][4]
    assert head["flops"] == 2 * 8 * 32 * 32 * 257  # the shapes are those of the config
    step = record["step"]
    assert step["flops_per_second"] == pytest.approx(step["flops"] / step["seconds"])
