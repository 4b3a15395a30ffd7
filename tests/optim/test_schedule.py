"""Schedules: closed forms at their corners, continuity, bounds, and what they write into the groups."""

import math
from itertools import pairwise

import pytest
import torch

from hfgolf.config import OptimConfig, ScheduleConfig
from hfgolf.optim.muon import Muon
from hfgolf.optim.schedule import apply_schedule, learning_rate_multiplier, momentum, projected_steps

NAMES = ["constant", "linear", "cosine", "wsd"]


def multipliers(total: int, **settings) -> list[float]:
    schedule = ScheduleConfig(**settings)
    return [learning_rate_multiplier(step, total, schedule) for step in range(total)]


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_linear_and_reaches_the_peak(name):
    values = multipliers(100, name=name, warmup_steps=10)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(values) == values[9] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_without_warmup_the_first_update_is_at_the_peak(name):
    assert multipliers(50, name=name)[0] == 1.0


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_closed_forms(floor):
    def above(value: float) -> float:
        return floor + (1 - floor) * value

    linear = multipliers(110, name="linear", warmup_steps=10, floor=floor)
    assert [linear[s] for s in (10, 60, 109)] == pytest.approx([1.0, above(0.5), above(0.01)])
    cosine = multipliers(110, name="cosine", warmup_steps=10, floor=floor)
    last = 0.5 * (1 + math.cos(0.99 * math.pi))
    half_quarter = 0.5 * (1 + math.sqrt(0.5))
    expected = [1.0, above(half_quarter), above(0.5), above(last)]
    assert [cosine[s] for s in (10, 35, 60, 109)] == pytest.approx(expected)
    wsd = multipliers(100, name="wsd", warmup_steps=10, warmdown_fraction=0.4, floor=floor)
    assert [wsd[s] for s in (30, 60, 61, 80, 99)] == pytest.approx([1, 1, above(39 / 40), above(0.5), above(1 / 40)])
    assert multipliers(9, name="constant", floor=floor) == [1.0] * 9


def test_wsd_falls_over_the_whole_run_or_not_at_all():
    assert multipliers(20, name="wsd", warmdown_fraction=1.0) == pytest.approx(multipliers(20, name="linear"))
    assert multipliers(20, name="wsd", warmdown_fraction=0.0) == [1.0] * 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup_steps", [0, 7, 90, 500])
@pytest.mark.parametrize("fraction", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_rises_then_falls_without_a_jump_between_floor_and_peak(name, warmup_steps, fraction, floor):
    settings = {"name": name, "warmup_steps": warmup_steps, "warmdown_fraction": fraction, "floor": floor}
    total = 100
    values = multipliers(total, **settings)
    assert all(0 < value <= 1 for value in values)
    assert all(value > floor for value in values[warmup_steps:])
    steepest = max(1 / max(warmup_steps, 1) if warmup_steps else 0, 1 / (fraction * total))
    if name in ("linear", "cosine") and warmup_steps < total:
        steepest = max(steepest, math.pi / 2 / (total - warmup_steps))
    differences = [after - before for before, after in pairwise(values)]
    assert max(map(abs, differences)) <= steepest + 1e-9
    has_fallen = False
    for difference in differences:
        has_fallen |= difference < -1e-12
        assert not (has_fallen and difference > 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_past_the_end_it_stays_at_the_floor(name):
    schedule = ScheduleConfig(name=name, warmup_steps=3, floor=0.2)
    expected = 1.0 if name == "constant" else 0.2
    assert [learning_rate_multiplier(step, 10, schedule) for step in (10, 11, 50)] == pytest.approx([expected] * 3)


@pytest.mark.parametrize("name", NAMES)
def test_by_the_clock_it_is_the_same_when_the_clock_is_even(name):
    schedule = ScheduleConfig(name=name, warmup_steps=5)
    by_steps = [learning_rate_multiplier(step, 40, schedule) for step in range(40)]
    by_clock = [learning_rate_multiplier(step, projected_steps(step, step / 40), schedule) for step in range(40)]
    assert by_clock == pytest.approx(by_steps)


def test_the_warmdown_ends_with_the_clock_when_steps_slow_down():
    """The share of the time that is left decides, not the number of steps made."""
    schedule = ScheduleConfig(name="wsd", warmdown_fraction=0.5)
    for step, progress in ((10, 0.5), (11, 0.75), (12, 0.99)):
        value = learning_rate_multiplier(step, projected_steps(step, progress), schedule)
        assert value == pytest.approx((1 - progress) / 0.5)


def test_momentum_rises_from_085():
    optim = OptimConfig(momentum=0.95, momentum_warmup_steps=100)
    assert [momentum(step, optim) for step in (0, 50, 100, 1000)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert momentum(0, OptimConfig(momentum_warmup_steps=0)) == 0.95
    assert momentum(0, OptimConfig(momentum=0.5)) == 0.5


def test_apply_schedule_sets_the_groups_from_their_peaks():
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = Muon(
        [
            {"params": [p], "rule": r, "lr": lr, "initial_lr": lr}
            for p, r, lr in zip(params, ("muon", "sgd"), (0.02, 0.4), strict=True)
        ],
        momentum=0.95,
    )
    optim = OptimConfig(momentum=0.95, momentum_warmup_steps=10)
    schedule = ScheduleConfig(name="linear")
    for step in (5, 2, 5):  # any order: nothing is remembered
        apply_schedule(optimizer, step, 10, optim, schedule)
        multiplier = 1 - step / 10
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02 * multiplier, 0.4 * multiplier])
        assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.85 + 0.01 * step)
        assert optimizer.param_groups[1]["momentum"] == 0.95
