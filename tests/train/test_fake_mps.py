"""Training and scoring on a device that refuses fp64, as MPS does (tests/fake_mps.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cuda import reason_to_skip

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "")
def test_training_and_scoring_make_no_fp64_on_a_device_without_it():
    """The model, its loss with gradients, clipping, schedule, Muon and AdamW, averages, evaluation, windows."""
    command = [sys.executable, str(ROOT / "tests" / "fake_mps.py")]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    places = json.loads(done.stdout)
    assert places.pop("fp64_is_refused"), "else nothing would have been refused"
    on_device, on_host = ("loss", "norm", "state"), ("evaluation", "windows", "sum")
    assert places == dict.fromkeys(on_device, "mps") | dict.fromkeys(on_host, "cpu")
