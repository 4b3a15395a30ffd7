"""Schedules: closed forms at their corners, continuity, bounds, the values in the groups, and time limits."""

import math
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from hfgolf.checkpoint.state import TrainState
from hfgolf.config.schedules import SCHEDULES
from hfgolf.config.sections import BatchSection, OptimSection, ScheduleSection, TrainSection
from hfgolf.optim.muon import Muon
from hfgolf.optim.schedule import (
    apply_schedule,
    learning_rate_multiplier,
    momentum,
    projected_steps,
    weight_decay_multiplier,
)
from hfgolf.system.signals import Signals
from hfgolf.train import clock

EVERY_SHAPE = pytest.mark.parametrize("shape", [{"name": name} for name in SCHEDULES], ids=list(SCHEDULES))


def multipliers(total: int, **settings) -> list[float]:
    schedule = ScheduleSection(**settings)
    return [learning_rate_multiplier(step, total, schedule) for step in range(total)]


@EVERY_SHAPE
def test_warmup_is_linear_and_reaches_the_peak(shape):
    values = multipliers(100, **shape, warmup_steps=10)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(values) == values[9] == 1.0
    assert multipliers(50, **shape)[0] == 1.0, "without a warmup, the first update is at the peak"


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
    both = multipliers(110, name="cosine_warmdown", warmup_steps=10, warmdown_fraction=0.2, floor=floor)
    assert both[:88] == cosine[:88]
    assert [both[s] for s in (99, 109)] == pytest.approx([cosine[99] * 0.5, cosine[109] / 22])
    assert multipliers(9, name="constant", floor=floor) == [1.0] * 9


def test_wsd_warmdown_may_cover_all_or_none_of_the_run():
    assert multipliers(20, name="wsd", warmdown_fraction=1.0) == pytest.approx(multipliers(20, name="linear"))
    assert multipliers(20, name="wsd", warmdown_fraction=0.0) == [1.0] * 20


@EVERY_SHAPE
def test_learning_rate_stays_at_the_floor_past_the_end(shape):
    schedule = ScheduleSection(**shape, warmup_steps=3, floor=0.2)
    expected = {"constant": 1.0, "cosine_warmdown": 0.0}.get(shape["name"], 0.2)
    assert [learning_rate_multiplier(step, 10, schedule) for step in (10, 11, 50)] == pytest.approx([expected] * 3)


@EVERY_SHAPE
def test_no_decay_while_the_end_is_unknown(shape):
    schedule = ScheduleSection(**shape, warmup_steps=10, weight_decay="linear")
    assert learning_rate_multiplier(4, math.inf, schedule) == 0.5
    assert learning_rate_multiplier(10**6, math.inf, schedule) == 1.0
    assert weight_decay_multiplier(10**6, math.inf, schedule) == 1.0


@EVERY_SHAPE
def test_clock_schedule_matches_step_schedule_at_constant_speed(shape):
    schedule = ScheduleSection(**shape, warmup_steps=5)
    by_steps = [learning_rate_multiplier(step, 40, schedule) for step in range(40)]
    by_clock = [learning_rate_multiplier(step, projected_steps(step, step / 40), schedule) for step in range(40)]
    assert by_clock == pytest.approx(by_steps)


def test_zero_length_steps_do_not_predict_the_end():
    assert projected_steps(3, 0.0) == projected_steps(0, 0.5) == math.inf


MINUTES = 2


def updates_by_the_clock(schedule: ScheduleSection, seed: int) -> list[SimpleNamespace]:
    """Return step, multiplier, start (share of the time) and seconds of each update of a run of MINUTES.

    Updates come in the loop's order. Steps take about 0.5 s, with noise, and become twice as long over the run; every
    ninth is followed by an evaluation of 3 to 5 s; after 40 s the run dies and resumes, with 2 s to compile.
    """
    noise = random.Random(seed)
    spent, has_died = 5.0, False
    state, stopwatch = TrainState(), SimpleNamespace(training_seconds=lambda: spent)

    def start_clock() -> clock.Clock:
        return clock.Clock(TrainSection(max_minutes=MINUTES), state, stopwatch, Signals(), step_limit=math.inf)

    of_run = start_clock()
    updates = []
    while not of_run.is_over():
        multiplier = learning_rate_multiplier(state.step, of_run.expected_steps(), schedule)
        share = spent / (60 * MINUTES)
        seconds = 0.5 * (1 + share) * noise.uniform(0.7, 1.4)
        updates.append(SimpleNamespace(step=state.step, multiplier=multiplier, share=share, seconds=seconds))
        spent += seconds
        state.step += 1
        of_run.synchronize()
        if state.step % 9 == 0:
            spent += noise.uniform(3, 5)
        if spent > 40 and not has_died:
            spent, has_died = state.elapsed_seconds + 2.0, True
            of_run = start_clock()
    return updates


@EVERY_SHAPE
@pytest.mark.parametrize("warmup_steps", [0, 12])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_clock_schedule_ends_at_the_floor_without_rising(shape, warmup_steps, floor):
    """Steps may be uneven, with pauses between them.

    The last update begins less than its own time before the end, so that its fall is less than that share of the whole
    fall: of warmdown_fraction of the time or, from the end of the warmup on, of what the steps would have taken.
    """
    fraction = 0.5
    schedule = ScheduleSection(**shape, warmup_steps=warmup_steps, warmdown_fraction=fraction, floor=floor)
    for seed in range(2):
        updates = updates_by_the_clock(schedule, seed)
        assert len(updates) > 60
        values = [update.multiplier for update in updates]
        assert values[:warmup_steps] == pytest.approx([(step + 1) / 12 for step in range(warmup_steps)])
        assert all(after <= before + 1e-12 for before, after in pairwise(values[max(warmup_steps - 1, 0) :]))
        last = updates[-1]
        if shape["name"] == "constant":
            assert last.multiplier == 1
            continue
        left = last.seconds / (60 * MINUTES)
        most = left / fraction if shape["name"] == "wsd" else left * last.step / (last.step - warmup_steps)
        if shape["name"] == "cosine_warmdown":
            assert 0 <= last.multiplier <= (floor + (1 - floor) * most) * left / fraction + 1e-12
            continue
        assert floor <= last.multiplier <= floor + (1 - floor) * most + 1e-12
        if shape["name"] == "wsd":
            after_warmup = updates[warmup_steps:]
            assert [u.multiplier < 1 for u in after_warmup] == [u.share > 1 - fraction for u in after_warmup]


def test_run_ends_at_its_first_limit():
    batch = BatchSection(sequence_length=32, tokens_per_step=256)  # 8 blocks per step

    def steps(**limits) -> float:
        return clock.step_limit(TrainSection(**limits), batch, blocks=100)

    assert steps(max_minutes=1) == math.inf
    assert [steps(max_tokens=n) for n in (1, 256, 257, 1024)] == [1, 1, 2, 4]
    assert steps(max_epochs=1) == 13  # 100 blocks; the last step continues into the next epoch
    assert [steps(max_steps=n, max_tokens=1024, max_epochs=1) for n in (3, 9)] == [3, 4]
    assert steps(max_tokens=10**6, max_epochs=1, max_minutes=1) == 13
    half_way = TrainState(step=4, tokens=4 * 512, blocks=4 * 16)  # with twice the tokens per step
    assert clock.step_limit(TrainSection(max_tokens=4096), batch, 100, half_way) == 4 + 8
    assert clock.step_limit(TrainSection(max_epochs=1), batch, 100, half_way) == 4 + 5  # 36 blocks remain


def test_momentum_rises_from_its_start():
    def at(steps: tuple[int, ...], **options) -> list[float]:
        return [momentum(step, OptimSection(**options)) for step in steps]

    assert at((0, 50, 100, 1000), momentum_warmup_steps=100) == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert at((0, 50, 100), momentum_warmup_steps=100, momentum_start=0.55) == pytest.approx([0.55, 0.75, 0.95])
    assert at((0,), momentum_warmup_steps=0) == [0.95]
    assert at((0, 300), momentum=0.5) == [0.5, 0.5], "momentum never exceeds optim.momentum"
    assert at((9999,), momentum_warmup_steps=100) == [0.95], "then it is constant"


@pytest.mark.parametrize("name", ["linear", "wsd"])
def test_the_lower_of_warmup_and_decay_applies_if_they_overlap(name):
    values = multipliers(10, name=name, warmup_steps=8, warmdown_fraction=1.0)
    decay = [1 - max(0, step - 8) / 2 for step in range(10)] if name == "linear" else [1 - s / 10 for s in range(10)]
    assert values == pytest.approx([min((step + 1) / 8, decay[step], 1) for step in range(10)])


def test_weight_decay_schedules():
    def at(step: int, weight_decay: str) -> float:
        schedule = ScheduleSection(
            name="wsd", warmup_steps=10, warmdown_fraction=0.4, floor=0.2, weight_decay=weight_decay
        )
        return weight_decay_multiplier(step, 100, schedule)

    steps = (0, 9, 50, 80, 99, 100, 150)
    assert [at(step, "constant") for step in steps] == [1.0] * 7
    assert [at(step, "linear") for step in steps] == pytest.approx([1.0, 0.91, 0.5, 0.2, 0.01, 0, 0])
    assert [at(step, "learning_rate") for step in steps] == pytest.approx([0.1, 1.0, 1.0, 0.6, 0.22, 0.2, 0.2])


@pytest.mark.parametrize("weight_decay", ["constant", "linear", "learning_rate"])
def test_apply_schedule_scales_each_group_from_its_peak(weight_decay):
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = Muon(
        [
            {"params": [p], "rule": r, "lr": lr, "initial_lr": lr, "weight_decay": wd, "initial_weight_decay": wd}
            for p, r, lr, wd in zip(params, ("muon", "sgd"), (0.02, 0.4), (0.1, 0.3), strict=True)
        ],
        momentum=0.95,
    )
    optim = OptimSection(momentum=0.95, momentum_warmup_steps=5)
    schedule = ScheduleSection(name="linear", warmdown_fraction=0.5, weight_decay=weight_decay)
    for step, scale in ((5, 1.0), (2, 0.5), (8, 0.5), (5, 1.0)):  # in any order, because schedules have no state
        apply_schedule(optimizer, step, 10, optim, schedule, scale)
        left = 1 - step / 10
        decay = 1.0 if weight_decay == "constant" else left
        muon, sgd = optimizer.param_groups
        assert [muon["lr"], sgd["lr"]] == pytest.approx([0.02 * left * scale, 0.4 * left * scale])
        assert [muon["weight_decay"], sgd["weight_decay"]] == pytest.approx([0.1 * decay, 0.3 * decay])
        assert muon["momentum"] == pytest.approx({2: 0.89, 5: 0.95, 8: 0.95}[step])
        assert sgd["momentum"] == 0.95, "momentum of SGD is constant"
