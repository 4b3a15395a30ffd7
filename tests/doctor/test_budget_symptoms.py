"""The doctor on forecasts: only a model that will clearly not fit is a finding, with a fix that is valid."""

from __future__ import annotations

import math

import pytest

from hfgolf.config.parse import load_config
from hfgolf.config.sections import RunConfig
from hfgolf.doctor.doctor import Doctor


def findings(sizes, **settings):
    doctor = Doctor({"golf.budget_bytes": 100_000, "train.max_steps": 1000} | settings)
    return [
        finding
        for step, size in sizes.items()
        for finding in doctor.observe({"step": step, "train_losses": [1.0], "grad_norms": [1.0], "golf_bytes": size})
        if finding.symptom == "artifact over budget"
    ]


def growing(bytes_per_e_fold, steps=(50, 100, 150, 200)):
    return {step: 80_000 + bytes_per_e_fold * math.log(step / 50) for step in steps}


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        (growing(5_000), {}),  # 95,000 at the end
        (growing(50_000, steps=(50, 100)), {}),  # too early to tell
        (growing(50_000), {"golf.budget_bytes": None}),
        (dict.fromkeys((50, 100, 150), 104_000), {}),  # within 5 %
        (growing(15_000), {"train.max_steps": None}),  # only the present is known
        ({50: 200_000, 100: 170_000, 150: 120_000, 200: 103_000}, {}),  # falling
    ],
)
def test_forecast_within_budget_is_no_finding(sizes, settings):
    assert findings(sizes, **settings) == []


def test_expected_final_size_is_reported_once():
    (finding,) = findings(growing(20_000, steps=(50, 100, 150, 200, 250)))
    assert finding.step == 150
    assert f"about {80_000 + 20_000 * math.log(20):,.0f} at step 1000; golf.budget_bytes is 100,000" in finding.saw


@pytest.mark.parametrize(("width", "heads"), [(256, 4), (48, 12), (16, 8)])
def test_fix_is_a_smaller_model(width, heads):
    sizes = dict.fromkeys((50, 100, 150), 400_000)
    (finding,) = findings(sizes, **{"model.hidden_size": width, "model.num_attention_heads": heads})
    options = [f"--model.num_attention_heads={heads}", f"--model.hidden_size={width}", "--train.max_steps=1"]
    before, after = (
        load_config([*options, *(f"--{key}={value}" for key, value in fix.items())]).config.flat()
        for fix in ({}, finding.fix)
    )
    assert {key for key in after if after[key] != before[key]} == set(finding.fix)
    assert all(after[key] < before[key] for key in finding.fix)
    assert RunConfig().flat().keys() >= finding.fix.keys()


def evaluated(seconds_of_evaluations, *, tokens=20_000, last=None, **settings):
    """Return the findings in a run with an evaluation each 100 steps of 0.1 s; last: seconds of that on all tokens."""
    doctor, found, spent = Doctor(settings), [], 0.0
    rows = [(seconds, {}) for seconds in seconds_of_evaluations]
    rows += [] if last is None else [(last, {"subset_val_loss": 1.0, "subset_val_tokens": tokens})]
    for number, (seconds, subset) in enumerate(rows, 1):
        spent += seconds
        times = {"seconds_evaluate": spent, "seconds_train": 10.0 * number, "seconds_data": 0.0}
        row = {"step": 100 * number, "train_losses": [1.0], "grad_norms": [0.1], "val_loss": 1.0, "val_tokens": tokens}
        found += doctor.observe(row | times | subset)
    return [finding for finding in found if finding.symptom == "costly evaluations"]


def test_evaluations_within_their_budget_are_no_finding():
    assert evaluated([0.9] * 30) == []
    assert evaluated([19.0] * 3) == [], "57 seconds are not worth a change"
    assert evaluated([0.5] * 10, last=20.0) == [], "the whole part at the end happens once"


def test_costly_evaluations_read_too_many_tokens_or_are_too_frequent():
    options = {"train.eval_every_steps": 100, "batch.tokens_per_step": 1000}
    (finding,) = evaluated([20.0] * 9, **options)
    assert "took 80 s and the steps 40 s (200%), with 20,000 tokens every 100 steps" in finding.saw
    assert finding.fix == {"train.eval_tokens": "auto"} and finding.step == 400
    (finding,) = evaluated([20.0] * 9, **options, tokens=15_000)  # 5 % of the compute, but not of the time
    assert finding.fix == {"train.eval_every_steps": 4000}
    load_config(["--train.max_steps=1", *(f"--{key}={value}" for key, value in finding.fix.items())])


def test_a_last_evaluation_that_takes_as_long_as_the_run_names_the_split():
    (finding,) = evaluated([0.5] * 9, last=100.0, **{"data.val_fraction": 0.2})
    assert "on all 20,000 validation tokens, took 100 s and the steps 100 s (100%)" in finding.saw
    assert finding.fix == {"data.val_fraction": 0.01}
    (finding,) = evaluated([0.5] * 9, last=100.0, **{"data.val_files": ["val.txt"]})
    assert finding.fix == {}
