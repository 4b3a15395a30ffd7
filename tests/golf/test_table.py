"""The table against figures worked out by hand, and what it says about matrices that stand out."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hfgolf.golf.artifact import TensorBytes
from hfgolf.golf.curvature import Curvature
from hfgolf.golf.grid import Quantized, round_nearest, row_codes_of
from hfgolf.golf.table import findings, table, table_data, table_text

NAMES = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(3) for part in ("up", "down")]


@pytest.fixture
def parts():
    generator = np.random.default_rng(0)
    weights = {name: generator.standard_normal((40, 50)).astype(np.float32) for name in NAMES}
    tensors = {name: round_nearest(weight, row_codes_of(np.full(40, 0.4))) for name, weight in weights.items()}
    curvature = {name: Curvature(np.eye(50) * 2, np.full(40, 1e-3 * (1 + place))) for place, name in enumerate(NAMES)}
    return weights, tensors, curvature, dict.fromkeys(NAMES, TensorBytes(800.0, 50.0))


def test_figures_of_one_matrix():
    weight = np.array([[1.0, -1.0, 1.0, -1.0], [4.0, 0.0, 0.0, 0.0]], dtype=np.float32)
    one = Quantized(np.array([[2, -2, 2, -2], [1, 0, 0, 0]], dtype=np.int32), row_codes_of(np.array([0.5, 2.0])))
    curvature = Curvature(np.diag([1.0, 1.0, 1.0, 2.0]), np.array([1.0, 3.0]))
    (row,) = table({"w": weight}, {"w": one}, {"w": curvature}, {"w": TensorBytes(10.0, 3.0)})
    entropy = -(3 / 8 * np.log2(3 / 8) + 2 * 2 / 8 * np.log2(2 / 8) + np.log2(1 / 8) / 8)
    assert row == {"name": "w", "shape": [2, 4]} | {
        key: pytest.approx(value)
        for key, value in {
            **{"weights": 8, "levels": 4, "bytes": 13.0, "side_bytes": 3.0, "coded_bits": 10.0, "share_of_bytes": 1.0},
            **{"entropy_bits": entropy, "step": 0.75},
            "relative_error": 2**2 / 20,  # only the outlier is off, by 2
            "output_error": 4 / (5 + 16),
            "predicted_loss": 0.5 * 3 * 4,
            "nats_per_kilobyte": 0.75 * 6 / 0.001,
            "kurtosis": 8 * (4 + 256) / 20**2,
        }.items()
    }


def test_table_prints_a_line_for_each_kind_and_all_rows_as_data(parts):
    rows = table(*parts)
    data = json.loads(json.dumps(table_data(rows)))
    assert [one["name"] for one in data["tensors"]] == NAMES[::-1] and data["findings"] == []
    assert data["total"]["bytes"] == pytest.approx(6 * 850) and data["total"]["weights"] == 12_000
    assert data["total"]["entropy_bits"] == pytest.approx(np.mean([row["entropy_bits"] for row in rows]))
    assert data["total"]["nats_per_kilobyte"] == pytest.approx(0.75 * data["total"]["predicted_loss"] / 1.5)
    header, down, up, total = (line.split() for line in table_text(rows).splitlines())
    assert header[:3] == ["matrix", "weights", "bytes"]
    assert down[:4] == ["layers.*.mlp.down_proj", "6,000", "2,550", "50.0%"]
    assert (up[0], total[0], total[3]) == ("layers.*.mlp.up_proj", "total", "100.0%")
    predicted = header.index("predicted") + 1  # "of outputs" is one column
    loss = sum(row["predicted_loss"] for row in rows if "down" in row["name"])
    assert f"{loss:.5f}" in down[predicted - 2 : predicted + 1]


def test_findings_name_what_stands_out(parts):
    weights, tensors, *others = parts
    assert findings(table(*parts)) == []
    fine, coarse, spiky = NAMES[0], NAMES[2], NAMES[1]
    tensors[fine] = round_nearest(weights[fine], row_codes_of(np.full(40, 0.1)))
    tensors[coarse] = round_nearest(weights[coarse], row_codes_of(np.full(40, 3.0)))
    weights[spiky][3, 4] = 40
    by_name = {sentence.split()[0]: sentence for sentence in findings(table(weights, tensors, *others))}
    assert by_name.keys() == {fine, coarse, spiky}
    assert "outliers (kurtosis" in by_name[spiky]
    assert "bits per weight, but the same matrix takes 3.4" in by_name[fine]
    assert "uses only 3 levels" in by_name[coarse]
