"""The table against figures worked out by hand, and what it says about matrices that stand out."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hfgolf.golf.curvature import Curvature
from hfgolf.golf.grid import Quantized, round_nearest, row_codes_of
from hfgolf.golf.table import findings, folded, measure_each, table, table_data, table_text

NAMES = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(3) for part in ("up", "down")]


@pytest.fixture
def parts():
    generator = np.random.default_rng(0)
    weights = {name: generator.standard_normal((40, 50)).astype(np.float32) for name in NAMES}
    tensors = {name: round_nearest(weight, row_codes_of(np.full(40, 0.4))) for name, weight in weights.items()}
    curvature = {name: Curvature(np.eye(50) * 2, np.full(40, 1e-3 * (1 + place))) for place, name in enumerate(NAMES)}
    return weights, tensors, curvature


def test_figures_of_one_matrix():
    weight = np.array([[1.0, -1.0, 1.0, -1.0], [4.0, 0.0, 0.0, 0.0]], dtype=np.float32)
    one = Quantized(np.array([[2, -2, 2, -2], [1, 0, 0, 0]], dtype=np.int32), row_codes_of(np.array([0.5, 2.0])))
    curvature = Curvature(np.diag([1.0, 1.0, 1.0, 2.0]), np.array([1.0, 3.0]))
    (row,) = table({"w": weight}, {"w": one}, {"w": curvature}, {"w": SimpleNamespace(weights=10.0, side=3.0)})
    assert (row.weights, row.levels, row.bytes, row.side_bytes, row.coded_bits) == (8, 4, 13.0, 3.0, 10.0)
    assert row.entropy_bits == pytest.approx(
        -(3 / 8 * np.log2(3 / 8) + 2 * 2 / 8 * np.log2(2 / 8) + np.log2(1 / 8) / 8)
    )
    assert (row.finest_step, row.step, row.coarsest_step) == pytest.approx((0.5, 0.75, 1.0))
    assert row.relative_error == pytest.approx(2**2 / 20)  # only the outlier is off, by 2
    assert row.output_error == pytest.approx(4 / (5 + 16))
    assert row.predicted_loss == pytest.approx(0.5 * 3 * 4)
    assert row.nats_per_kilobyte == pytest.approx(0.75 * 6 / 0.001)
    assert row.kurtosis == pytest.approx(8 * (4 + 256) / 20**2)


def test_first_row_is_where_bytes_are_best_spent(parts):
    rows = table(*parts)
    assert [row.name for row in rows] == NAMES[::-1]
    assert sum(row.share_of_bytes for row in rows) == pytest.approx(1)
    measured = {name: 0.01 * (6 - place) for place, name in enumerate(NAMES)}
    assert [row.name for row in table(*parts, measured=measured)] == NAMES


def test_layers_fold_into_one_row(parts):
    rows = table(*parts)
    up, down = sorted(folded(rows), key=lambda row: row.name, reverse=True)
    assert (up.name, down.name) == ("model.layers.*.mlp.up_proj.weight", "model.layers.*.mlp.down_proj.weight")
    members = [row for row in rows if "up_proj" in row.name]
    assert up.weights == 6000 and up.bytes == pytest.approx(sum(row.bytes for row in members))
    assert up.predicted_loss == pytest.approx(sum(row.predicted_loss for row in members))
    assert up.entropy_bits == pytest.approx(np.mean([row.entropy_bits for row in members]))


def test_table_prints_as_text_and_as_data(parts):
    rows = table(*parts)
    data = json.loads(json.dumps(table_data(rows)))
    assert [one["name"] for one in data["tensors"]] == [row.name for row in rows]
    assert data["total"]["bytes"] == pytest.approx(sum(row.bytes for row in rows)) and data["findings"] == []
    lines = table_text(rows).splitlines()
    assert lines[0].split()[:3] == ["matrix", "weights", "bytes"] and "measured" not in lines[0]
    assert lines[1].startswith("layers.2.mlp.down_proj") and lines[-1].startswith("total") and len(lines) == 8
    assert f"{rows[0].bytes:,.0f}" in lines[1]
    assert "measured" in table_text(table(*parts, measured=dict.fromkeys(NAMES, 0.5))).splitlines()[0]


def test_findings_name_what_stands_out(parts):
    weights, tensors, curvature = parts
    assert findings(table(weights, tensors, curvature)) == []
    fine, coarse, spiky = NAMES[0], NAMES[2], NAMES[1]
    tensors[fine] = round_nearest(weights[fine], row_codes_of(np.full(40, 0.1)))
    tensors[coarse] = round_nearest(weights[coarse], row_codes_of(np.full(40, 3.0)))
    weights[spiky][3, 4] = 40
    said = findings(table(weights, tensors, curvature))
    assert [sentence.split()[0] for sentence in sorted(said)] == sorted([fine, coarse, spiky])
    by_name = {sentence.split()[0]: sentence for sentence in said}
    assert "outliers (kurtosis" in by_name[spiky]
    assert "bits per weight, but the same matrix takes 3.4" in by_name[fine]
    assert "uses only 3 levels" in by_name[coarse]


def test_measured_loss_is_of_each_matrix_alone():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tensors = {
        name: round_nearest(parameter.numpy(), row_codes_of(np.full(len(parameter), 0.5)))
        for name, parameter in before.items()
    }

    def distance(model):  # from the weights before: only one matrix may differ at a time
        return float(sum(((p.detach() - before[n]) ** 2).sum() for n, p in model.named_parameters()))

    rises = measure_each(model, tensors, distance)
    for name, one in tensors.items():
        assert rises[name] == pytest.approx(float(np.square(one.dequantized() - before[name].numpy()).sum()), rel=1e-5)
    assert distance(model) == 0
