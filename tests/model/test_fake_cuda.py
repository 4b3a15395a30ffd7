"""What a step would launch on a GPU, counted on fake CUDA tensors (tests/fake_cuda.py). The bounds may only fall."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cuda import reason_to_skip

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "")]

# 124M parameters, 16 x 1,024 tokens, bf16. Without CUDA, torch computes a norm in five launches instead of one. Of the
# update, MuonEq and NorMuon are 63 launches and 1.3 GB.
BOUNDS = {
    "blocks": {"launches": 791, "casts": 169, "gigabytes": 51.9},
    "loss": {"launches": 42, "casts": 8, "gigabytes": 36.4},
    "update": {"launches": 154, "casts": 0, "gigabytes": 15.6},
    "average": {"launches": 1, "casts": 0, "gigabytes": 1.0},
}


@pytest.fixture(scope="module")
def step():
    command = [sys.executable, str(ROOT / "tests" / "fake_cuda.py")]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    return json.loads(output.stdout)


@pytest.mark.parametrize("part", BOUNDS)
@pytest.mark.parametrize("figure", ["launches", "casts", "gigabytes"])
def test_a_step_costs_no_more_than_before(step, part, figure):
    assert step[part][figure] <= BOUNDS[part][figure]


def test_step_never_waits_for_the_device(step):
    assert step["sync_is_refused"], "else nothing in the step would have been refused, either"
    assert step["state_devices"] == ["cuda"]
