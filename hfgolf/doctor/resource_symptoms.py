"""Symptoms in what a run is fed and what it spends: batches, speed, damaged tokens, evaluations, bytes.

For the interface of a detector, see symptoms.py.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import Any

import numpy as np

from hfgolf.config.sections import budgeted_eval_tokens
from hfgolf.doctor.finding import IN_A_ROW, Detector, Finding, two_digits
from hfgolf.doctor.history import MAX_KEPT, History, Interval
from hfgolf.system.wording import every

MAX_HASHES = 10_000  # steps within which a repeated batch is noticed
EPOCH_TOLERANCE = 1e-9  # for rounding, in epochs
MIN_FORECASTS = 3
OVER_BUDGET = 1.05  # times the budget, at the end of the run


class SameBatches:
    """The same batch read twice within an epoch, which should read each block once."""

    def __init__(self) -> None:
        self._epoch = -1
        self._first_step: dict[str, int] = {}
        """The step that first read each hash, in this epoch."""
        self._repeats: list[tuple[int, int]] = []
        """(step, the earlier step that read the same batch) of the first repeats."""

    def __call__(self, history: History) -> Finding | None:
        if history.latest is history.restore:
            last_kept = 0 if history.latest.get("begins_data") else history.latest["step"]
            self._first_step = {hash_: step for hash_, step in self._first_step.items() if step <= last_kept}
        each = history.epochs_per_step
        if not history.new_steps or not each <= 1:
            return None
        for new, sample_hash in zip(history.new_steps, history.latest.get("sample_hashes", ()), strict=False):
            start = history.epoch - (history.step + 1 - new.step) * each  # in epochs, before this step
            epoch = math.floor(start + EPOCH_TOLERANCE)
            if start + each - EPOCH_TOLERANCE > epoch + 1:
                continue  # the step crosses into the next epoch
            if epoch != self._epoch or len(self._first_step) >= MAX_HASHES:
                self._epoch, self._first_step = epoch, {}
            earlier = self._first_step.setdefault(sample_hash, new.step)
            if earlier != new.step and len(self._repeats) < IN_A_ROW:
                self._repeats.append((new.step, earlier))
        if len(self._repeats) < IN_A_ROW:
            return None
        pairs = ", ".join(f"{step} that of {earlier}" for step, earlier in self._repeats)
        saw = f"in epoch {self._epoch + 1}, steps read the batch of an earlier step: step {pairs}"
        causes: tuple[str, ...] = (
            "a data order that restarts instead of continuing, so that the model sees only part of the text",
        )
        fix = {}
        if history.settings["data.num_workers"]:
            causes, fix = (*causes, "loader workers that share one seed"), {"data.num_workers": 0}
        return Finding("same batches again", self._repeats[0][0], saw, causes, fix)


MIN_INTERVALS = 10  # a median over fewer is noise
MIN_SLOW_SECONDS = 120.0  # a shorter slow phase costs less than a minute, and may be a harmless pause
SLOW_RATIO = 0.5  # to the earlier speed; on a shared machine, healthy runs vary by nearly as much
MIN_DROP_STEPS = 10  # that are all slow, after as many that were all fast (but the first, which includes the start-up)
MIN_DROP_SECONDS = 2.0  # ten steps of a tiny model are over before a passing load is


def throughput_falls(history: History) -> Finding | None:
    """Throughput below half of what it was earlier in the session: for minutes, or in every step since it dropped."""
    intervals = list(history.intervals) if history.new_steps else []
    start = _start_of_drop(intervals) or _start_of_slow_minutes(intervals)
    if start is None:
        return None
    end_before, begin = start
    before, recent = intervals[:end_before], intervals[begin:]
    speed, speed_before = (float(np.median([i.tokens_per_second for i in part])) for part in (recent, before))
    if not speed < SLOW_RATIO * speed_before:
        return None
    step = next(i.step for i in recent if i.tokens_per_second < SLOW_RATIO * speed_before)
    wait, wait_before = (float(np.median([i.data_share for i in part])) for part in (recent, before))
    saw = (
        f"{speed:,.0f} tokens/s, down from {speed_before:,.0f}; time waiting for batches is {wait:.0%} of compute time,"
        f" {wait_before:.0%} before"
    )
    slow_data = "a data loader that falls behind (a slow disk, workers without a core, an uncached part of the file)"
    slow_machine = "other programs on this machine, or a processor that throttles because it is hot"
    causes: tuple[str, ...] = (slow_machine, "memory swapped to disk", slow_data)
    fix: dict[str, Any] = {}
    if wait > max(MAX_DATA_SHARE, 2 * wait_before):
        causes, fix = (slow_data, slow_machine), _faster_data(history)
    elif history.out_of_memory is not None and history.out_of_memory["step"] >= before[0].step:
        smaller = f"the smaller micro-batches since memory ran out at step {history.out_of_memory['step']}"
        causes, fix = (smaller, slow_machine), {"model.gradient_checkpointing": True}
    return Finding("throughput falling", step, saw, causes, fix)


def _start_of_drop(intervals: list[Interval]) -> tuple[int, int] | None:
    """Return where the fast intervals end and the slow ones begin: each is slower than half of the slowest before."""
    speeds = np.array([interval.tokens_per_second for interval in intervals])
    slowest_before = np.minimum.accumulate(speeds)
    fastest_after = np.maximum.accumulate(speeds[::-1])[::-1]
    for gap in (0, 1):  # 1: without the interval in which it dropped, which is neither fast nor slow
        for end in 1 + np.flatnonzero(fastest_after[1 + gap :] < SLOW_RATIO * slowest_before[: -1 - gap]):
            slow = intervals[end + gap :]
            steps_before = sum(interval.num_steps for interval in intervals[:end])
            is_long = steps_before >= MIN_DROP_STEPS - 1 and sum(i.num_steps for i in slow) >= MIN_DROP_STEPS
            if is_long and sum(interval.seconds for interval in slow) >= MIN_DROP_SECONDS:
                return int(end), int(end) + gap
    return None


def _start_of_slow_minutes(intervals: list[Interval]) -> tuple[int, int] | None:
    """Return where the last minutes begin; None if they, or what is before, are too few intervals."""
    start, seconds = len(intervals), 0.0
    while start and not (seconds >= MIN_SLOW_SECONDS and len(intervals) - start >= MIN_INTERVALS):
        start -= 1
        seconds += intervals[start].seconds
    return (start, start) if seconds >= MIN_SLOW_SECONDS and start >= MIN_INTERVALS else None


MAX_DATA_SHARE = 0.1  # of compute time
MIN_DATA_STEPS = 20  # after the steps that fill the queues
MIN_DATA_SECONDS = 1.0  # spent waiting; less is timer noise


def data_bound(history: History) -> Finding | None:
    """Time waiting for batches above a tenth of compute time."""
    recent = list(islice(reversed(history.intervals), MIN_INTERVALS))[::-1]
    if not history.new_steps or len(recent) < 2 or recent[-1].step - recent[0].step < MIN_DATA_STEPS:
        return None
    share = float(np.median([interval.data_share for interval in recent]))
    waited = sum(interval.data_seconds for interval in recent)
    if not (share > MAX_DATA_SHARE and waited >= MIN_DATA_SECONDS):
        return None
    workers = history.settings["data.num_workers"]
    saw = (
        f"time waiting for batches is {share:.0%} of compute time, with data.num_workers {workers};"
        f" {waited:.3g} s since step {recent[0].step}"
    )
    causes = (
        "too few loader workers" if workers else "no loader workers: the device waits while batches are gathered",
        *(() if history.settings["data.in_memory"] is True else ("a token cache on a slow disk",)),
        "other programs on the cores that gather the batches",
    )
    return Finding("data-bound", recent[0].step, saw, causes, _faster_data(history))


def _faster_data(history: History) -> dict[str, Any]:
    """Return the settings that deliver batches sooner: more workers, and the tokens in memory."""
    in_memory = {} if history.settings["data.in_memory"] is True else {"data.in_memory": True}
    return {"data.num_workers": max(2, 2 * history.settings["data.num_workers"])} | in_memory


def damaged_cache(history: History) -> Finding | None:
    """Tokens that differ from what was written: a file has the wrong hash, or an id is out of range."""
    event = history.latest
    if event.get("event") != "damaged_cache":
        return None
    saw = str(event.get("reason")).removeprefix("data: ").removesuffix(".")
    causes = (
        "another program that wrote to the cache's files",
        "a faulty disk or faulty memory",
        "a power failure or system crash that lost part of a file",
    )
    return Finding("damaged token cache", event["step"], saw, causes, {})


USUAL_SHARE = 0.05  # of the time of the steps; train.eval_tokens auto aims at it
MAX_SHARE = 2 * USUAL_SHARE  # an evaluation is not compiled, and its samples are not counted in train.eval_tokens
MIN_SECONDS = 60.0  # less is not worth a change
MAX_LAST_SHARE = 0.25  # the evaluation at the end, on more tokens, happens once


class CostlyEvaluation:
    """Evaluations that take more than a tenth of the time of the steps, or at the end a quarter."""

    def __init__(self) -> None:
        self._seconds = 0.0
        """Of all evaluations up to the row before."""

    def __call__(self, history: History) -> Finding | None:
        row, settings = history.latest, history.settings
        if "event" in row or "seconds_evaluate" not in row:
            return None
        before, self._seconds = self._seconds, row["seconds_evaluate"]
        if row.get("val_loss") is None:
            return None
        steps, is_last = row["seconds_train"] + row["seconds_data"], "subset_val_loss" in row
        seconds = self._seconds - before if is_last else self._seconds
        usual = MAX_LAST_SHARE if is_last else MAX_SHARE
        if seconds <= max(MIN_SECONDS, usual * steps) or not (is_last or len(history.evaluations) > 1):
            return None
        took = f"took {seconds:,.0f} s and the steps {steps:,.0f} s ({seconds / steps:.0%})"
        tokens, interval = row["val_tokens"], settings["train.eval_every_steps"]
        if is_last:
            saw = f"the last evaluation, on {tokens:,} validation tokens, {took}"
            causes = ("more validation text than so short a run needs", "a run shorter than meant")
            affordable = max(1, int(two_digits(tokens * USUAL_SHARE * steps / seconds)))
            fix: dict[str, Any] = {"train.final_eval_tokens": affordable}
            return Finding("costly evaluations", history.step, saw, causes, fix)
        saw = f"evaluations {took}, with {tokens:,} tokens {every(interval, 'step')}"
        stated = settings["train.eval_tokens"]  # at least one piece of text is read, whatever the budget
        if stated != "auto" and (stated or tokens) > budgeted_eval_tokens(settings["batch.tokens_per_step"] * interval):
            causes = ("evaluations that read more tokens than they need", "evaluations that are too frequent")
            fix = {"train.eval_tokens": "auto"}
        else:
            samples = (
                ("samples that are slow to write (train.sample_tokens)",) if settings["train.sample_tokens"] else ()
            )
            causes = ("evaluations that are too frequent", *samples)
            fix = {"train.eval_every_steps": math.ceil(two_digits(interval * seconds / steps / USUAL_SHARE))}
        return Finding("costly evaluations", history.step, saw, causes, fix)


class OverBudget:
    """An artifact that will not fit the budget at a small loss. Sizes grow like the logarithm of the step."""

    def __init__(self) -> None:
        self._sizes: deque[tuple[int, float]] = deque(maxlen=MAX_KEPT)
        """(step, bytes of the forecast)."""

    def __call__(self, history: History) -> Finding | None:
        budget, size = history.settings["golf.budget_bytes"], history.latest.get("golf_bytes")
        if history.latest is history.restore:
            while self._sizes and self._sizes[-1][0] > history.restore["step"]:
                self._sizes.pop()
        if budget is None or size is None:
            return None
        now, last_step = history.step, max(history.settings["train.max_steps"] or 0, history.step)
        self._sizes.append((now, size))
        if len(self._sizes) < MIN_FORECASTS:
            return None
        recent = np.array([(math.log(step), size) for step, size in self._sizes if 4 * step >= now])
        slope = float(np.polyfit(recent[:, 0], recent[:, 1], 1)[0]) if len(recent) > 1 else 0.0
        at_end = size + slope * math.log(last_step / now)
        if at_end <= OVER_BUDGET * budget:
            return None
        saw = (
            f"at 0.01 nats per token lost, the artifact would take {size:,.0f} bytes at step {now} and about"
            f" {at_end:,.0f} at step {last_step}; golf.budget_bytes is {budget:,}"
        )
        causes = (
            "a model with more weights than the budget has room for",
            "a budget that counts fewer bytes than meant",
        )
        heads, width = history.settings["model.num_attention_heads"], history.settings["model.hidden_size"]
        narrower = int(width * math.sqrt(budget / at_end)) // (2 * heads) * 2 * heads  # rope needs an even head size
        layers = history.settings["model.num_hidden_layers"]
        fix = {"model.hidden_size": narrower} if narrower else {"model.num_hidden_layers": max(1, layers - 1)}
        return Finding("artifact over budget", now, saw, causes, fix)


def detectors() -> list[Detector]:
    """Return the detectors of this file for a run."""
    return [SameBatches(), throughput_falls, data_bound, damaged_cache, CostlyEvaluation(), OverBudget()]
