"""The doctor on synthetic logs: on both sides of each threshold, truncated, very long; and the script."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.config.sections import RunConfig
from hfgolf.doctor.doctor import Doctor, examine
from hfgolf.doctor.finding import Finding
from hfgolf.hooks.doctor import Diagnosis
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import Metrics
from hfgolf.system.command import own_command

ROOT = Path(__file__).parents[2]
Line = dict[str, Any]
LOG_EVERY = 10


def noise(step: int) -> float:
    """Return noise with a standard deviation of 0.03, reproducible for each step."""
    return random.Random(step).gauss(0, 0.03)


def learning(step: int) -> float:
    """Return the loss of a healthy run, which falls from ln(256) to about 2 and never quite stops falling."""
    return 2 + 3.55 * math.exp(-step / 60) + 0.5 * (1 - step / 1000) + noise(step)


def settled(step: int) -> float:
    """Return the loss of a run that has learned most of what it can after 20 steps."""
    return 2.5 + 3.05 * math.exp(-step / 5) - step / 1000 + noise(step)


def log(
    steps: Iterable[int],
    loss: Callable[[int], float | None] = learning,
    norm: Callable[[int], float] = lambda step: 0.5,
    sample_hash: Callable[[int], str] = str,
    **columns: Callable[[int], Any],
) -> list[Line]:
    """Return rows of LOG_EVERY steps each. Each extra column is a function of the row's step."""
    rows, steps = [], list(steps)
    for first in range(0, len(steps), LOG_EVERY):
        of_row = steps[first : first + LOG_EVERY]
        step = of_row[-1]
        row = {
            "step": step,
            "epoch": step / 1000,
            "tokens_per_second": 1000.0,
            "data_seconds": 0.1,
            "compute_seconds": 10.0,
            "train_losses": [loss(step) for step in of_row],
            "grad_norms": [norm(step) for step in of_row],
            "sample_hashes": [sample_hash(step) for step in of_row],
            "val_loss": None,
            "learning_rate": 0.01,
            "elapsed_seconds": float(step),
        }
        rows.append(row | {name: column(step) for name, column in columns.items()})
    return rows


def skipped(step: int, blocks: list[int], parameter: str = "model.norm.weight") -> Line:
    return {
        "step": step,
        "event": "skipped_step",
        "first_parameter": parameter,
        "block_starts": [1024 * block for block in blocks],
    }


def diagnose(lines: Iterable[Line], **settings: Any) -> list[Finding]:
    """Return a doctor's findings after it observes all lines. Keywords such as optim__name set the run's config."""
    doctor_of_run = Doctor({key.replace("__", "."): value for key, value in settings.items()})
    return [finding for line in lines for finding in doctor_of_run.observe(line)]


def symptoms(lines: Iterable[Line], **settings: Any) -> list[tuple[str, int]]:
    return [(finding.symptom, finding.step) for finding in diagnose(lines, **settings)]


def test_healthy_log_has_no_symptom():
    assert symptoms(log(range(1, 1001), val_loss=lambda step: learning(step) + 0.1, val_tokens=lambda step: 9)) == []


def test_three_nonfinite_steps_in_a_row_are_reported():
    good, bad = log(range(1, 11)), [skipped(step, [step]) for step in (12, 13, 14)]
    assert symptoms([*good, *bad[:2]]) == []
    (finding,) = diagnose([*good, *bad])
    assert (finding.symptom, finding.step) == ("immediate NaN", 12)
    assert "3 steps in a row" in finding.saw and "first in model.norm.weight" in finding.saw
    rates = {"optim.learning_rate": 0.002, "optim.adamw_learning_rate": 0.0003}
    assert finding.fix == rates | {"schedule.warmup_steps": 100}
    late = [*log(range(1, 51)), *(skipped(step, [step]) for step in (51, 52, 53))]
    assert symptoms(late) == [("NaN in mid-run", 51)]
    assert symptoms(late, schedule__warmup_steps=51) == [("immediate NaN", 51)]


def test_nan_is_found_in_rows_without_events():
    assert symptoms(log(range(1, 31), lambda step: None if step > 15 else learning(step))) == [("immediate NaN", 16)]


def test_nonfinite_steps_count_across_a_rollback():
    lines = [*log(range(1, 11)), skipped(11, [1]), skipped(12, [2]), {"step": 10, "event": "rollback", "from_step": 12}]
    assert symptoms(lines) == []
    assert symptoms([*lines, skipped(11, [3])]) == [("immediate NaN", 11)]
    elsewhere = [*lines[:-1], {"step": 5, "event": "rollback", "from_step": 12}, *log(range(6, 11)), skipped(11, [3])]
    assert symptoms(elsewhere) == []


@pytest.mark.parametrize(
    ("steps", "blocks", "parameters", "is_found"),
    [
        pytest.param([15, 35], [[7, 1], [2, 7]], "aa", True, id="one block in both"),
        pytest.param([15, 35], [[7, 1], [2, 3]], "aa", False, id="two, nothing in common but the parameter"),
        pytest.param([15, 35, 55], [[7, 1], [2, 3], [4, 5]], "aaa", True, id="three, one parameter"),
        pytest.param([15, 35, 55], [[7, 1], [2, 3], [4, 5]], "aab", False, id="three, nothing in common"),
        pytest.param([15, 16, 35], [[7, 1], [2, 3], [7, 5]], "aaa", False, id="two of them side by side"),
    ],
)
def test_nan_on_specific_tokens(steps, blocks, parameters, is_found):
    skips = [skipped(*skip) for skip in zip(steps, blocks, parameters, strict=True)]
    lines = sorted([*log(range(1, 71)), *skips], key=lambda line: line["step"])
    assert symptoms(lines, batch__sequence_length=32) == [("NaN on specific tokens", 15)] * is_found


@pytest.mark.parametrize(
    ("segment_length", "epochs_per_step", "is_found"),
    [(None, 0.02, True), (None, 0.03, False), (2048, 0.01, True), (512, 0.01, False)],
)
def test_only_text_that_steps_share_beyond_chance_is_blamed(segment_length, epochs_per_step, is_found):
    """Blocks of 1,024 tokens that start 600 tokens apart overlap; segments of 512 do not.

    A step reads one block, which overlaps two of another epoch: 2 * epochs_per_step on average.
    """
    skips = [skipped(15, [2]) | {"block_starts": [2048]}, skipped(35, [2], "b") | {"block_starts": [2648]}]
    rows = log(range(1, 71), epoch=lambda step: step * epochs_per_step)
    lines = sorted([*rows, *skips], key=lambda line: line["step"])
    settings = {"batch__sequence_length": 1024, "batch__segment_length": segment_length}
    assert symptoms(lines, **settings) == [("NaN on specific tokens", 15)] * is_found


@pytest.mark.parametrize(("norm", "is_found"), [(1.3, True), (1.2, False)])
def test_constant_clipping_is_found(norm, is_found):
    lines = log(range(1, 201), norm=lambda step: 0.9 if step % 12 == 0 else norm)
    assert symptoms(lines) == [("gradient constantly clipped", 100)] * is_found
    assert symptoms([row | {"clipped_share": 0.9} for row in lines]) == symptoms(lines)
    assert symptoms([row | {"clipped_share": 0.4} for row in lines]) == [], "the limit has been raised since"
    assert symptoms(lines, train__max_grad_norm=None) == []
    assert symptoms(lines, schedule__warmup_steps=160) == []
    assert symptoms(log(range(1, 201), norm=lambda step: 0.9 if step % 6 == 0 else norm)) == []
    at_first = log(range(1, 201), norm=lambda step: norm if step <= 100 else 0.9)
    assert symptoms(at_first) == [("gradient constantly clipped", 100)] * is_found


def test_low_clipping_limit_is_blamed_before_the_learning_rate():
    lines = log(range(1, 101), norm=lambda step: 3.0)
    ((usual,), (tight,)) = (diagnose(lines, train__max_grad_norm=clip) for clip in (1.0, 0.1))
    assert "learning rate" in usual.causes[0] and usual.fix["optim.learning_rate"] == 0.01
    assert "limit too low" in tight.causes[0] and tight.fix == {"train.max_grad_norm": 6.0}


def with_spikes(at: set[int], height: float = 2.0) -> Callable[[int], float]:
    return lambda step: settled(step) + height * (step in at)


@pytest.mark.parametrize(
    ("steps", "height", "noise_factor", "is_found"),
    [
        pytest.param(2, 0.7, 0, True, id="clear"),
        pytest.param(2, 0.35, 0, False, id="low"),
        pytest.param(15, 1.0, 0, True, id="short"),
        pytest.param(24, 1.0, 0, False, id="long"),
        pytest.param(1, 2.0, 7, True, id="above the noise"),
        pytest.param(1, 1.0, 7, False, id="in the noise"),
    ],
)
def test_only_a_clear_and_short_spike_is_found(steps, height, noise_factor, is_found):
    at = with_spikes(set(range(150, 150 + steps)), height)
    lines = log(range(1, 201), lambda step: at(step) + noise_factor * noise(step))
    found = [finding for finding in diagnose(lines) if finding.symptom == "isolated loss spike"]
    assert len(found) == is_found
    if is_found:
        assert 150 <= found[0].step < 150 + steps and "spike number 1" in found[0].saw and found[0].fix == {}
        assert diagnose(lines, train__max_grad_norm=None)[0].fix == {"train.max_grad_norm": 1.0}


def test_loss_far_above_guessing_is_not_a_spike():
    """Muon at 10 or AdamW at 0.3: 1,951 nats where ln(257) is 5.55."""
    lines = log(range(1, 101), lambda step: 1951.0 if step == 60 else learning(step))
    (finding,) = diagnose(lines, optim__learning_rate=10.0)
    assert (finding.symptom, finding.step) == ("divergence", 60)
    assert finding.causes[0] == "a learning rate that is too high"
    assert "the training loss was 1951, 324 times the first step's loss" in finding.saw
    assert finding.fix == {"optim.learning_rate": 0.02, "optim.adamw_learning_rate": 0.0003}


@pytest.mark.parametrize(
    ("name", "rate", "advised"),
    [("muon", 10.0, 0.02), ("muon", 0.1, 0.05), ("adamw", 0.3, 0.003), ("adamw", 0.02, 0.01), ("sgd", 100.0, 0.1)],
)
def test_extreme_learning_rate_fix_is_a_usual_rate(name, rate, advised):
    lines = log(range(1, 101), norm=lambda step: 3.0)
    (finding,) = diagnose(lines, optim__name=name, optim__learning_rate=rate)
    assert finding.fix["optim.learning_rate"] == advised


@pytest.mark.parametrize(("level", "gain", "is_found"), [(3.2, 0.015, True), (2.4, 0.015, False), (3.2, 0.06, False)])
def test_stalling_at_token_frequencies_is_found(level, gain, is_found):
    """AdamW at 0.3 stayed at 3.2 of 5.55, and fell by 1.5 % per quarter of its steps."""

    def sits(step: int) -> float:
        return level * (1 + gain * (200 - step) / 50) + (5.5 - level) * math.exp(-step / 10) + noise(step) / 3

    lines = log(range(1, 201), sits)
    findings = diagnose(lines, optim__name="adamw", optim__learning_rate=0.3)
    assert [finding.symptom for finding in findings] == ["early plateau"] * is_found
    if is_found:
        assert findings[0].causes[0] == "a learning rate so high that the model cannot learn fine detail"
        assert findings[0].fix == {"optim.learning_rate": 0.003}
    assert symptoms(lines, optim__name="adamw", optim__learning_rate=0.003) == []


def with_norms(spikes: dict[int, float]) -> Callable[[int], float]:
    return lambda step: spikes.get(step, 0.5 + noise(step))


def test_gradient_spike_before_the_loss_is_found():
    """The norm often spikes one or two steps before the loss reacts."""
    lines = log(range(1, 101), with_spikes({87, 88}), with_norms({86: 4.0, 87: 5.0}))
    findings = diagnose(lines)
    assert symptoms(lines) == [("isolated loss spike", 87), ("gradient norm spike", 86)]
    assert "the gradient norm rose from 0.495 to 4" in findings[1].saw and "the loss rose to" in findings[1].saw
    assert "at step 87" in findings[1].saw
    assert "edge of stability" in findings[1].causes[0] and findings[1].fix["optim.learning_rate"] == 0.01


@pytest.mark.parametrize(("norm", "is_found"), [(2.2, True), (1.8, False)])
def test_gradient_spike_alone_is_an_early_warning(norm, is_found):
    lines = log(range(1, 101), settled, with_norms({86: norm}))
    assert symptoms(lines) == [("gradient norm spike", 86)] * is_found
    if is_found:
        (finding,) = diagnose(lines)
        assert "the loss held" in finding.saw and finding.fix == {}
        assert diagnose(lines, train__max_grad_norm=None)[0].fix == {"train.max_grad_norm": 1.0}
    both = log(range(1, 101), with_spikes({86}), with_norms({86: norm}))
    assert symptoms(both) == [("isolated loss spike", 86)], "both together are one bad batch"


@pytest.mark.parametrize("first_rounded", [30, 90])
def test_the_first_steps_with_rounded_matrices_are_no_spikes(first_rounded):
    rounded = {"golf_rounded_matrices": lambda step: 9 * (step >= first_rounded)}
    lines = log(range(1, 101), with_spikes({87, 88}), with_norms({86: 4.0, 87: 5.0}), **rounded)
    found = [] if first_rounded == 90 else [("isolated loss spike", 87), ("gradient norm spike", 86)]
    assert symptoms(lines) == found


def test_repeated_spikes_are_reported_less_often():
    at = range(60, 960, 30)
    findings = diagnose(log(range(1, 1001), with_spikes(set(at))))
    assert [finding.step for finding in findings] == [at[number - 1] for number in (1, 2, 4, 8, 16)]
    assert "unusual batch" in findings[0].causes[0] and findings[0].fix == {}
    assert "edge of stability" in findings[-1].causes[0] and findings[-1].fix["optim.learning_rate"] == 0.01


def test_lasting_high_loss_is_a_divergence():
    lines = log(range(1, 201), lambda step: settled(step) + (step >= 100))
    assert [symptom for symptom, _ in symptoms(lines)] == ["divergence"]
    slowly = log(range(1, 501), lambda step: settled(step) + step / 400)
    assert [symptom for symptom, _ in symptoms(slowly)] == ["divergence"]
    assert symptoms(log(range(1, 501), lambda step: settled(step) + step / 600)) == []


@pytest.mark.parametrize(("top", "is_found"), [(6.4, True), (5.95, False)])
def test_worsening_from_the_start_is_a_divergence(top, is_found):
    lines = log(range(1, 91), lambda step: min(5.5 + step / 40, top) + noise(step))
    assert [symptom for symptom, _ in symptoms(lines)] == ["divergence"] * is_found


@pytest.mark.parametrize("event", ["resumed", "rollback"])
@pytest.mark.parametrize(("rise", "is_found"), [(0.4, True), (0.21, False), (-0.3, False)])
def test_rising_loss_after_a_restore_is_found(event, rise, is_found):
    again = log(range(101, 301), lambda step: settled(step) + rise)
    findings = diagnose([*log(range(1, 151), settled), {"step": 100, "event": event}, *again])
    assert [(finding.symptom, finding.step) for finding in findings] == [("divergence after a restore", 100)] * is_found
    if is_found:
        assert event in findings[0].saw and ("train.resume" in findings[0].fix) == (event == "resumed")


def test_early_plateau_is_found():
    def flat(step: int) -> float:
        return 4 + 1.55 * math.exp(-step / 20) + noise(step) / 3

    (finding,) = diagnose(log(range(1, 301), flat))
    assert (finding.symptom, finding.step) == ("early plateau", 130)
    assert "the learning rate is 0.01" in finding.saw and finding.fix["optim.learning_rate"] == 0.06
    assert symptoms(log(range(1, 301), flat), schedule__warmup_steps=151) == []
    assert symptoms(log(range(1, 301), lambda step: flat(step) - step / 400)) == [], "slow, but it learns"
    assert symptoms(log(range(1, 301), lambda step: flat(step) - 0.9 * min(1, step / 50))) == [], "not early"
    assert symptoms(log(range(101, 301), flat)) == [], "the first rows are missing"
    assert symptoms(log(range(1, 301), flat), model__init_from="gpt2") == [], "its weights know more from the start"


def test_repeated_batches_are_found():
    assert symptoms(log(range(1, 101), sample_hash=lambda step: str(step % 5))) == [("same batches again", 6)]
    assert symptoms(log(range(1, 101), sample_hash=lambda step: str(step % 98))) == [], "only two repeats"
    # a small text: 8.5 steps per epoch, so batches repeat only in another epoch
    small = log(range(1, 101), sample_hash=lambda step: str((step - 1) % 17 % 8), epoch=lambda step: step / 8.5)
    assert symptoms(small) == []
    whole = log(range(1, 101), sample_hash=lambda step: "all", epoch=lambda step: step * 1.0)
    assert symptoms(whole) == [], "each step reads the whole text"


def test_steps_repeated_by_a_rollback_are_not_repeated_batches():
    """The batches of steps 13 to 15 are excluded, and later ones move up."""

    def moved(step: int) -> str:
        return str(step + 3 * (step > 12))

    rollback = {"step": 10, "event": "rollback", "from_step": 20, "excluded_blocks": [[24, 30]]}
    assert symptoms([*log(range(1, 21)), rollback, *log(range(11, 101), sample_hash=moved)]) == []


def test_resume_with_new_data_is_not_a_symptom():
    """train.resume_with_other data: reading starts at the first block, and earlier losses are not comparable."""
    before = log(range(1, 101), settled, val_loss=lambda step: 2.0, val_tokens=lambda step: 9)
    after = log(
        range(101, 301),
        lambda step: settled(step - 100) + 0.5 - step / 1000,
        sample_hash=lambda step: str(step - 100),
        epoch=lambda step: (step - 100) / 1000,
        val_loss=lambda step: 2.6 + step / 3000,
        val_tokens=lambda step: 9,
    )
    resumed = {"step": 100, "event": "resumed"}
    assert symptoms([*before, resumed | {"begins_data": True}, *after]) == []
    assert ("same batches again", 101) in symptoms([*before, resumed | {"begins_data": False}, *after])


def evaluated(val_losses: list[float], train: Callable[[int], float] = learning, val_tokens: int = 9) -> list[Line]:
    """Return a log with an evaluation every 50 steps."""
    values = dict(zip(range(50, 10**6, 50), val_losses, strict=False))
    steps = range(1, 50 * len(val_losses) + 1)
    return log(steps, train, val_loss=values.get, val_tokens=lambda step: val_tokens)


def test_overfitting_is_found():
    (finding,) = diagnose(evaluated([3.0, 2.5, 2.55, 2.6, 2.7]))
    assert (finding.symptom, finding.step) == ("validation loss rising", 100)
    assert "from 2.5 at step 100 to 2.6 at step 200" in finding.saw and "(epoch 0.2)" in finding.saw
    assert symptoms(evaluated([3.0, 2.5, 2.51, 2.57])) == [], "within the noise"
    assert symptoms(evaluated([3.0, 2.5, 2.7])) == [], "only once"
    assert symptoms(evaluated([3.0, 2.5, 2.9, 2.6])) == [], "falling again"
    assert symptoms(evaluated([3.0, 2.5, 2.6, 2.7], lambda step: settled(step) + step / 900)) == [], "both rise"
    others = log(range(101, 151), val_loss=lambda step: 2.7, val_tokens=lambda step: 5)
    assert symptoms(evaluated([3.0, 2.5, 2.6])[:-10] + others) == [], "on other tokens"


def test_validation_uses_the_averaged_weights_if_they_are_exported():
    rows = evaluated([3.0, 2.5, 2.6, 2.7])
    for row in rows:
        row["val_loss_ema"] = row["val_loss"] and 2.4
    assert symptoms(rows) == [("validation loss rising", 100)]
    assert symptoms(rows, optim__ema_export=True) == []


@pytest.mark.parametrize(("floor", "is_found"), [(0.09, True), (0.12, False)])
def test_near_zero_loss_is_found(floor, is_found):
    def falls(step: int) -> float:
        return floor + 5 * math.exp(-step / 8)

    expected = ["near-zero loss"] * is_found
    assert [symptom for symptom, _ in symptoms(log(range(1, 101), falls))] == expected
    assert [symptom for symptom, _ in symptoms(evaluated([3.0, floor], falls))] == expected
    assert symptoms(evaluated([3.0, 2.5], falls)) == [], "memorized"
    assert symptoms(log(range(1, 101), falls, epoch=lambda step: step / 10)) == [], "perhaps memorized"


@pytest.mark.parametrize(("speed", "is_found"), [(400.0, True), (600.0, False)])
def test_minutes_of_low_throughput_are_found(speed, is_found):
    def slow_after(last: int, seconds: float = 10.0) -> list[Line]:
        def tokens_per_second(step: int) -> float:
            return speed if step > last or step == 20 else 1000.0  # so slow once before that it counts only for minutes

        def compute_seconds(step: int) -> float:
            return seconds * 1000 / tokens_per_second(step)

        return log(range(1, 601), tokens_per_second=tokens_per_second, compute_seconds=compute_seconds)

    findings = diagnose(slow_after(300))
    assert [(finding.symptom, finding.step) for finding in findings] == [("throughput falling", 310)] * is_found
    assert symptoms(slow_after(560)) == [], "a pause"
    assert symptoms(slow_after(50)) == [], "slow from the beginning"
    assert symptoms(slow_after(600 - 140, seconds=2)) == [], "only 70 seconds"
    assert symptoms(slow_after(600 - 260, seconds=2)) == [("throughput falling", 350)] * is_found, "130 seconds"
    out_of_memory = {"step": 305, "event": "out_of_memory"}
    lines = sorted([*slow_after(300), out_of_memory], key=lambda line: line["step"])
    causes = [finding.causes[0] for finding in diagnose(lines)]
    assert causes == ["the smaller micro-batches since memory ran out at step 305"] * is_found
    resumed = [*slow_after(300)[:30], {"step": 300, "event": "resumed"}, *slow_after(300)[30:]]
    assert symptoms(resumed) == [], "perhaps another machine"


def timed(seconds: Callable[[int], float], last: int, every: int) -> list[Line]:
    """Return rows at step 1 and every so many steps, of a run whose steps take these seconds."""
    ends = [1, *range(every, last + 1, every)] if every > 1 else list(range(1, last + 1))
    rows = []
    for before, end in pairwise([0, *ends]):
        (row,) = log(range(before + 1, end + 1))
        spent = sum(seconds(step) for step in range(before + 1, end + 1))
        speed = 1000 * (end - before) / spent
        rows.append(row | {"tokens_per_second": speed, "compute_seconds": spent, "data_seconds": 0.0})
    return rows


@pytest.mark.parametrize("every", [1, 2, 10])
@pytest.mark.parametrize("fast", [10, 14, 200])
@pytest.mark.parametrize(("slow", "is_found"), [(2.5, True), (9.0, True), (1.8, False)])
def test_a_drop_of_the_speed_is_found_within_20_steps(every, fast, slow, is_found):
    """Whether it comes at a row or between two, and although the first step is slow, which includes the start-up."""

    def seconds(step: int) -> float:
        return 30.0 if step == 1 else 1.0 + step % 3 / 20 if step <= fast else slow

    findings = diagnose(timed(seconds, fast + 20, every))
    assert [finding.symptom for finding in findings] == ["throughput falling"] * is_found
    assert all(fast < finding.step <= fast + 20 for finding in findings)


def test_the_speed_of_a_busy_machine_is_no_drop():
    """Real steps while up to nine other jobs shared two cores, of 0.03 s to 4.5 s each."""
    of_steps = json.loads((Path(__file__).parent / "busy_machine.json").read_text())["seconds"]
    for every in (1, 2, 5, 10):
        assert symptoms(timed(lambda step: of_steps[step - 1], len(of_steps), every)) == []
    pause = timed(lambda step: 9.0 if 50 < step <= 58 else 0.5, 100, 1)
    assert symptoms(pause) == [], "eight slow steps"
    assert symptoms(timed(lambda step: 0.1 if step <= 30 else 0.3, 36, 1)) == [], "six slow steps at the end"
    assert symptoms(timed(lambda step: 0.01 if step <= 30 else 0.03, 60, 1)) == [], "under two seconds"


@pytest.mark.parametrize(("data", "workers", "is_found"), [(1.1, 0, True), (1.1, 3, True), (0.9, 0, False)])
def test_waiting_for_data_is_found(data, workers, is_found):
    findings = diagnose(log(range(1, 101), data_seconds=lambda step: data), data__num_workers=workers)
    assert [(finding.symptom, finding.step) for finding in findings] == [("data-bound", 20)] * is_found
    if is_found:
        assert findings[0].fix == {"data.num_workers": 6 if workers else 2, "data.in_memory": True}
        assert "is 11% of compute time" in findings[0].saw
        assert ("too few" in findings[0].causes[0]) == bool(workers)
    one_wait = log(range(1, 101), data_seconds=lambda step: 60.0 if step == 50 else 0.1)
    assert symptoms(one_wait) == [], "one long wait"
    for few, enough in ((30, 40), (100, 120)):  # steps, then seconds
        share = 1 if few < 50 else 0.1
        columns = {"data_seconds": lambda step, s=share: s * data, "compute_seconds": lambda step, s=share: s * 10}
        assert symptoms(log(range(1, few + 1), **columns)) == []
        assert len(symptoms(log(range(1, enough + 1), **columns))) == is_found


UNHEALTHY = {
    "nan": [*log(range(1, 11)), *(skipped(step, [step]) for step in (11, 12, 13))],
    "late nan": [*log(range(1, 101)), *(skipped(step, [step]) for step in (101, 102, 103))],
    "clip": log(range(1, 201), norm=lambda step: 2.0),
    "spikes": log(range(1, 301), with_spikes(set(range(60, 300, 30)))),
    "divergence": log(range(1, 201), lambda step: settled(step) + step / 50),
    "plateau": log(range(1, 301), lambda step: 5.5 + noise(step) / 10),
    "data": log(range(1, 101), data_seconds=lambda step: 2.0),
    "validation": evaluated([3.0, 2.5, 2.6, 2.7]),
}


@pytest.mark.parametrize("name", UNHEALTHY)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_every_fix_is_a_valid_change(name, optimizer):
    """Each fix uses existing keys and allowed values, and changes the current setting."""
    settings = {"optim.name": optimizer, "optim.embedding_learning_rate": 0.1, "data.num_workers": 1}
    options = [f"--{key}={value}" for key, value in settings.items()]
    findings = diagnose(UNHEALTHY[name], **{key.replace(".", "__"): value for key, value in settings.items()})
    assert findings
    before = load_config([*options, "--train.max_steps=1"]).config.flat()
    for finding in findings:
        fix = [f"--{key}={str(value).lower()}" for key, value in finding.fix.items()]
        after = load_config([*options, "--train.max_steps=1", *fix]).config.flat()
        assert {key for key in after if after[key] != before[key]} == set(finding.fix)
        assert "optim.adamw_learning_rate" not in finding.fix or optimizer == "muon"
        assert "\n" not in str(finding) and finding.causes


REPEATED = log(range(1, 101), sample_hash=lambda step: str(step % 50))
CONTRADICTED = {
    "bf16 has the range of fp32": ("late nan", "fp16", {"train__mixed_precision": "fp16"}),
    "a long warmup": ("nan", "warmup", {"schedule__warmup_steps": 0}),
    "a long warmup, and a loss far above guessing": ("blow-up", "warmup", {"schedule__warmup_steps": 20}),
    "no loader workers": ("repeated", "workers that share", {"data__num_workers": 2}),
    "tokens in memory": ("data", "slow disk", {"data__in_memory": False}),
    "no clipping": ("norm spike", "clipping makes harmless", {"train__max_grad_norm": 1.0}),
    "a rate at its peak": ("plateau", "lowered", {"optim__learning_rate": 0.02}),
}
SETTINGS = {
    "train__mixed_precision": "bf16",
    "schedule__warmup_steps": 100,
    "data__num_workers": 0,
    "data__in_memory": True,
    "train__max_grad_norm": None,
    "optim__learning_rate": 0.01,
}


@pytest.mark.parametrize(("name", "cause", "other"), CONTRADICTED.values(), ids=CONTRADICTED)
def test_no_cause_contradicts_the_config(name, cause, other):
    norms = log(range(1, 101), norm=lambda step: 9.0 if step == 60 else 0.5)
    blow_up = log(range(1, 31), lambda step: 40.0 if step == 30 else learning(step))
    lines = (UNHEALTHY | {"repeated": REPEATED, "norm spike": norms, "blow-up": blow_up})[name]
    (finding,), (possible,) = diagnose(lines, **SETTINGS), diagnose(lines, **SETTINGS | other)
    assert not any(cause in each for each in finding.causes)
    assert any(cause in each for each in possible.causes)


def test_after_a_restore_only_what_changed_is_a_cause():
    restored = {"step": 100, "event": "resumed"}
    before, after = log(range(1, 101), settled), log(range(101, 121), lambda step: 4.0 + noise(step))
    (finding,) = diagnose([*before, restored, *after])
    assert not any("changed" in cause for cause in finding.causes)
    (finding,) = diagnose([*before, restored | {"changed": ["model.dropout 0.0 -> 0.1"]}, *after])
    assert "what was changed for the resume: model.dropout 0.0 -> 0.1" in finding.causes


def test_what_was_read_once_is_not_called_too_little():
    (once,) = diagnose(evaluated([3.0, 2.5, 2.6, 2.7]))
    assert "another kind" in once.causes[0] and once.fix == {"train.patience_evals": 3}
    often = [row | {"epoch": row["step"] / 50} for row in evaluated([3.0, 2.5, 2.6, 2.7])]
    (finding,) = [finding for finding in diagnose(often) if finding.symptom == "validation loss rising"]
    assert "too little text" in finding.causes[0] and "model.dropout" in finding.fix


def write(folder: Path, lines: Iterable[Line], tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def as_event(finding: Finding) -> Line:
    return {"event": "finding", **vars(finding)}


class Watched:
    """What a hook sees of a run: it logs each event, as Run does, and hands it to the hook."""

    def __init__(self, folder: Path, earlier: Sequence[Line] = ()) -> None:
        self.accelerator, self.folder = SimpleNamespace(is_main_process=True), RunFolder(folder)
        self.resolved, self.lines = ResolvedConfig.from_code(RunConfig()), [*earlier]
        self.earlier = Metrics(
            [line for line in earlier if "event" not in line], [line for line in earlier if "event" in line]
        )
        self.hook: Any = Diagnosis()
        self.hook.start(self)

    def log(self, line: Line) -> None:
        self.lines.append(line)
        self.hook.logged(self, line)

    def event(self, name: str, **details: Any) -> None:
        self.log({"event": name, **details})

    def found(self) -> list[Line]:
        return [line for line in self.lines if line.get("event") == "finding"]


def test_training_and_examine_agree(tmp_path):
    """A run finds what one pass over its file finds, and a resumed one does not repeat a finding."""
    for lines in UNHEALTHY.values():
        run = Watched(tmp_path)
        for line in lines:
            run.log(line)
        assert run.found() == [as_event(finding) for finding in diagnose(lines)]
        assert Watched(tmp_path, run.lines).found() == run.found()


def test_defect_of_the_doctor_is_one_line(tmp_path, caplog, monkeypatch):
    def fail(*arguments: Any) -> Any:
        raise ValueError("a defect\nof the doctor")

    run = Watched(tmp_path)
    monkeypatch.setattr(Doctor, "observe", fail)
    run.log({"step": 1, "train_losses": [7.0]})
    run.log({"step": 2, "train_losses": [7.0]})
    (line,) = caplog.messages
    assert line.startswith("doctor: gave up on this run (ValueError: ") and "\n" not in line


def test_damaged_run_folder_can_be_examined(tmp_path):
    """A truncated line, null losses, a missing or invalid config: the rest is still examined."""
    lines = log(range(1, 201), lambda step: None if step > 150 else learning(step), norm=lambda step: 2.0)
    folder = write(tmp_path / "run", lines, '{"step": 210, "train_lo')
    expected = ["gradient constantly clipped", "NaN in mid-run"]
    findings, read = examine(folder)
    assert [finding.symptom for finding in findings] == expected and read.broken_lines == 1
    (folder / "config.yaml").write_text("train:\n  max_grad_norm: 5\n")
    assert [finding.symptom for finding in examine(folder)[0]] == expected[1:]
    (folder / "config.yaml").write_text("trian:\n  max_grad_norm: 5\n")
    assert [finding.symptom for finding in examine(folder)[0]] == expected


def test_nonfinite_steps_count_across_a_resume_once():
    """A run killed between two bad steps: the event of the second is in the file before and after the resume."""
    bad = [skipped(step, [step]) for step in (11, 12, 13)]
    resumed = {"step": 11, "event": "resumed"}
    for repeated in ([], bad[1:2]):
        lines = [*log(range(1, 11)), bad[0], *repeated, resumed, bad[1]]
        assert symptoms(lines) == []
        assert symptoms([*lines, bad[2]]) == symptoms([*log(range(1, 11)), *bad]) == [("immediate NaN", 11)]


def test_undone_steps_are_not_a_symptom(tmp_path):
    """A resume rewrites the rows after its checkpoint, but the skipped_step events stay in the file."""
    skips = [skipped(step, [step]) for step in (31, 32)]
    resumed = {"step": 30, "event": "resumed"}
    folder = write(tmp_path / "run", [*log(range(1, 31)), *skips, resumed, *log(range(31, 201))])
    assert examine(folder)[0] == []


def test_script_prints_findings(hfgolf, tmp_path):
    well, sick = write(tmp_path / "well", log(range(1, 101))), write(tmp_path / "sick", UNHEALTHY["nan"])
    (finding,) = diagnose(UNHEALTHY["nan"])
    assert hfgolf("doctor", well) == (0, f"{well}: all is well (100 steps)\n", "")
    rows = log(range(1, 101))
    often = write(tmp_path / "often", [row | {"epoch": 0.06 * row["step"]} for row in rows])
    assert hfgolf("doctor", often) == (0, f"{often}: all is well (100 steps)\n", ""), "a run that lasts cannot teach"
    (often / "summary.json").touch()
    better = "  better the text was read 6.0 times; a model that this one teaches learns more from it: "
    assert hfgolf("doctor", often).out.startswith(f"{often}: all is well (100 steps)\n{better}")
    hardly = write(tmp_path / "hardly", log(range(1, 4), lambda step: 8.3 if step == 2 else None))  # null: nonfinite
    said = "nothing is wrong, but the training loss, 8.30, is still near that of the first step, 8.30"
    assert said in hfgolf("doctor", hardly).out
    status, out, _ = hfgolf("doctor", well, sick)
    assert status == 1 and out.splitlines()[0] == f"{well}: all is well (100 steps)"
    assert f"{sick}: 1 finding (10 steps)\n\nstep 11: immediate NaN\n  saw    {finding.saw}\n  causes 1. " in out
    assert finding.fix.keys() >= {"optim.learning_rate", "optim.adamw_learning_rate"}
    rates = " ".join(f"--{key} {value}" for key, value in finding.fix.items() if key.endswith("learning_rate"))
    config = sick / "config.yaml"
    assert f"  try    {finding.options}\n  find   {own_command()} find_lr --config {config} {rates}\n" in out
    status, out, _ = hfgolf("doctor", "--json", well, sick)
    figures = json.loads(out)
    as_json = json.loads(json.dumps(vars(finding)))
    advised = {"options": finding.options, "find_lr": f"{own_command()} find_lr --config {config} {rates}"}
    is_well = {"steps": 100, "is_sampled": False, "verdict": "all is well", "better": None, "findings": []}
    assert status == 1 and figures[str(well)] == is_well
    assert figures[str(sick)] == is_well | {"steps": 10, "verdict": "1 finding", "findings": [as_json | advised]}
    assert json.loads(hfgolf("doctor", "--json", often).out)[str(often)]["better"].startswith("the text was read 6.0")


def test_rates_far_below_the_usual_are_raised_to_it_and_tiny_batches_enlarged():
    rates = {"optim.learning_rate": 2e-5, "optim.adamw_learning_rate": 3e-6}
    (finding,) = diagnose(log(range(1, 201), lambda step: 5.45 + noise(step)), **rates)
    assert finding.fix == {"optim.learning_rate": 0.02, "optim.adamw_learning_rate": 0.003}
    clipped = log(range(1, 201), norm=lambda step: 1.6)
    (finding,) = diagnose(clipped, **{"batch.tokens_per_step": 256, "batch.sequence_length": 256})
    assert finding.fix == {"batch.tokens_per_step": 4096} and "fewer than 8 sequences" in finding.causes[0]
    assert finding.find_lr(ROOT) is None


def timed_evaluations(seconds: list[float], tokens: int = 20_000, last: bool = False, **settings: Any) -> list[Finding]:
    """Return the findings of a run with an evaluation each 100 steps of 0.1 s. last: the last one reads more tokens."""
    rows, spent = log(range(1, 1 + 100 * len(seconds)))[9::10], 0.0
    for number, (row, each) in enumerate(zip(rows, seconds, strict=True), 1):
        spent += each
        times = {"seconds_evaluate": spent, "seconds_train": 10.0 * number, "seconds_data": 0.0}
        row |= times | {"val_loss": 1.0, "val_tokens": tokens}
    if last:
        rows[-1] |= {"subset_val_loss": 1.0, "subset_val_tokens": tokens}
    return [finding for finding in diagnose(rows, **settings) if finding.symptom == "costly evaluations"]


def test_costly_evaluations_read_too_many_tokens_or_are_too_frequent():
    assert timed_evaluations([0.9] * 30) == []
    assert timed_evaluations([19.0] * 3) == [], "57 seconds are not worth a change"
    options = {"train__eval_every_steps": 100, "batch__tokens_per_step": 1000}
    (finding,) = timed_evaluations([20.0] * 9, train__eval_tokens=None, **options)
    assert "took 80 s and the steps 40 s (200%), with 20,000 tokens every 100 steps" in finding.saw
    assert finding.fix == {"train.eval_tokens": "auto"} and finding.step == 400
    for known in ({"tokens": 15_000}, {"train__eval_tokens": 15_000}):  # 5 % of the compute, but not of the time
        (finding,) = timed_evaluations([20.0] * 9, **known, **options)
        assert finding.fix == {"train.eval_every_steps": 4000}


def test_a_last_evaluation_that_takes_as_long_as_the_run_gets_a_budget():
    assert timed_evaluations([0.5] * 40 + [70.0], last=True) == [], "more text at the end is read once"
    (finding,) = timed_evaluations([0.5] * 9 + [100.0], last=True)
    assert "on 20,000 validation tokens, took 100 s and the steps 100 s (100%)" in finding.saw
    assert finding.fix == {"train.final_eval_tokens": 1000}


def over_budget(sizes: dict[int, float], **settings: Any) -> list[Finding]:
    """Return the findings on forecasts of these bytes, {step: bytes}."""
    forecasts = ({"step": step, "train_losses": [1.0], "golf_bytes": size} for step, size in sizes.items())
    found = diagnose(forecasts, **{"golf__budget_bytes": 100_000, "train__max_steps": 1000} | settings)
    return [finding for finding in found if finding.symptom == "artifact over budget"]


def growing(bytes_per_e_fold: int, steps: Iterable[int] = (50, 100, 150, 200)) -> dict[int, float]:
    return {step: 80_000 + bytes_per_e_fold * math.log(step / 50) for step in steps}


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        (growing(5_000), {}),  # 95,000 at the end
        (growing(50_000, steps=(50, 100)), {}),  # too early to tell
        (growing(50_000), {"golf__budget_bytes": None}),
        (dict.fromkeys((50, 100, 150), 104_000), {}),  # within 5 %
        (growing(15_000), {"train__max_steps": None}),  # only the present is known
        ({50: 200_000, 100: 170_000, 150: 120_000, 200: 103_000}, {}),  # falling
    ],
)
def test_forecast_within_budget_is_no_finding(sizes, settings):
    assert over_budget(sizes, **settings) == []


def test_expected_final_size_is_reported_once():
    (finding,) = over_budget(growing(20_000, steps=(50, 100, 150, 200, 250)))
    assert finding.step == 150
    assert f"about {80_000 + 20_000 * math.log(20):,.0f} at step 1000; golf.budget_bytes is 100,000" in finding.saw


@pytest.mark.parametrize(("width", "heads"), [(256, 4), (48, 12), (16, 8)])
def test_a_model_over_budget_is_advised_to_be_smaller(width, heads):
    shape = {"model.hidden_size": width, "model.num_attention_heads": heads}
    (finding,) = over_budget(dict.fromkeys((50, 100, 150), 400_000), **shape)
    options = [[f"--{key}={value}" for key, value in (shape | fix).items()] for fix in ({}, finding.fix)]
    before, after = (load_config([*each, "--train.max_steps=1"]).config.flat() for each in options)
    assert {key for key in after if after[key] != before[key]} == finding.fix.keys()
    assert all(after[key] < before[key] for key in finding.fix)
