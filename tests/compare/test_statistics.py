"""The statistics against hand-computed cases; steps to a loss on hand-made curves."""

from __future__ import annotations

import importlib
import math
import sys

import pytest

from hfgolf.compare.statistics import Point, arm_results, best_of_grid, first_reach, paired_difference
from hfgolf.system.errors import UserError


def curve(*losses: float, every: int = 10, seconds: float = 2.0) -> list[Point]:
    return [Point(every * n, seconds * n, loss) for n, loss in enumerate(losses, 1)]


def test_missing_scipy_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "hfgolf.compare.statistics")
    with pytest.raises(UserError, match=r"^Comparing runs needs scipy; run `pip install scipy`\.$"):
        importlib.import_module("hfgolf.compare.statistics")


def test_paired_difference_by_hand():
    """Differences 1, 2, 3: mean 2, deviation 1, t = 2 sqrt(3) with 2 degrees of freedom, p = 1 - t / sqrt(2 + t^2)."""
    difference = paired_difference({3: 8.0, 1: 2.0, 2: 6.0, 9: 100.0}, {1: 1.0, 2: 4.0, 3: 5.0, 7: -100.0})
    assert difference is not None
    assert difference.by_seed == {3: 3.0, 1: 1.0, 2: 2.0}
    assert (difference.mean, difference.sd) == (2.0, 1.0)
    assert difference.p_value == pytest.approx(1 - math.sqrt(12 / 14))
    assert difference.is_noise
    assert paired_difference({1: 2.0}, {2: 2.0}) is None


@pytest.mark.parametrize(
    ("differences", "p_value"), [([0.5], None), ([0.0, 0.0], 1.0), ([0.5, 0.5, 0.5], 0.0), ([1.0, -1.0], 1.0)]
)
def test_p_value_edge_cases(differences, p_value):
    difference = paired_difference(dict(enumerate(differences)), dict.fromkeys(range(9), 0.0))
    assert difference is not None and difference.p_value == p_value


@pytest.mark.parametrize(
    ("loss", "reached"),
    [
        (2.5, (15.0, 3.0)),  # halfway between two evaluations
        (2.0, (20.0, 4.0)),  # at one
        (1.25, (37.5, 7.5)),  # after it had gone up again
        (3.0, (10.0, 2.0)),  # at the first
        (9.0, (10.0, 2.0)),  # before it
        (0.9, None),
    ],
)
def test_steps_to_reach_a_loss(loss, reached):
    assert first_reach(curve(3.0, 2.0, 2.0, 1.0, 5.0), loss) == reached


def test_arm_compared_with_the_baseline():
    baseline = {1: curve(4.0, 3.0, 2.0, 1.9), 2: curve(4.0, 3.0, 2.0, 2.1)}  # mean end: 2.0 at 40 steps, 8 s
    fast = {1: curve(3.0, 1.0, seconds=3.0), 2: curve(5.0, 2.0, seconds=3.0), 3: curve(5.0, 2.5, seconds=3.0)}
    results = arm_results({"slow": baseline, "fast": fast, "failed": {}}, "slow")
    assert results["slow"].difference is None and results["slow"].reach is None
    assert (results["slow"].mean, results["slow"].steps, results["slow"].seconds) == (2.0, 40, 8.0)
    assert results["slow"].sd == pytest.approx(0.2 / math.sqrt(2))
    fast_result = results["fast"]
    assert fast_result.final_losses == {1: 1.0, 2: 2.0, 3: 2.5}
    assert fast_result.difference is not None and fast_result.reach is not None
    assert fast_result.difference.by_seed == pytest.approx({1: -0.9, 2: -0.1})
    assert fast_result.reach.steps == {1: 15.0, 2: 20.0, 3: None}
    assert fast_result.reach.seconds == {1: 4.5, 2: 6.0, 3: None}
    assert fast_result.reach.share_of_steps == 17.5 / 40
    assert fast_result.reach.share_of_seconds == 5.25 / 8
    failed = results["failed"]
    assert (failed.mean, failed.sd, failed.difference) == (None, None, None)
    never = arm_results({"slow": baseline, "other": {1: curve(4.0, 3.9)}}, "slow")["other"].reach
    assert never is not None and never.share_of_steps is None


def test_failed_baseline_allows_no_comparison():
    results = arm_results({"failed": {}, "other": {1: curve(2.0)}}, "failed")
    assert results["other"].mean == 2.0 and results["other"].difference is None and results["other"].reach is None


@pytest.mark.parametrize(
    ("best", "bracketed"),
    [
        (("0.02", "0.1"), {"rate": True, "decay": True}),
        (("0.01", "0.1"), {"rate": False, "decay": True}),
        (("4e-2", "0.1"), {"rate": False, "decay": True}),
        (("0.02", "0"), {"rate": True, "decay": True}),  # nothing is below 0
        (("0.02", "0.3"), {"rate": True, "decay": False}),
    ],
)
def test_grid_reports_whether_its_best_is_bracketed(best, bracketed):
    axes = {"rate": ["0.01", "0.02", "4e-2"], "decay": ["0.1", "0", "0.3"], "name": ["linear", "cosine"]}
    settings = {
        f"{rate} {decay} {name}": {"rate": rate, "decay": decay, "name": name}
        for rate in axes["rate"]
        for decay in axes["decay"]
        for name in axes["name"]
    }
    arm = " ".join([*best, "cosine"])
    found = best_of_grid(dict.fromkeys(settings, 2.0) | {arm: 1.9}, settings, axes)
    assert found is not None and (found.arm, found.is_bracketed) == (arm, bracketed)
    assert best_of_grid({}, settings, axes) is None
    only_value = best_of_grid({"a": 1.0}, {"a": {"rate": "3"}}, {"rate": ["3"]})
    assert only_value is not None and only_value.is_bracketed == {"rate": False}
