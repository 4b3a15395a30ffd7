"""Symptoms in the data feed: repeated or late batches, falling throughput, tokens damaged on disk.

For the interface of a detector, see symptoms.py.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np

from hfgolf.doctor.finding import Finding, faster_data
from hfgolf.doctor.history import History, Interval
from hfgolf.doctor.symptoms import IN_A_ROW

MAX_HASHES = 10_000  # steps within which a repeated batch is noticed
EPOCH_TOLERANCE = 1e-9  # for rounding, in epochs


class SameBatches:
    """The same batch read twice within an epoch, which should read each block once."""

    def __init__(self) -> None:
        self._epoch = -1
        self._first_step: dict[str, int] = {}
        """The step that first read each hash, in this epoch."""
        self._repeats: list[tuple[int, int]] = []
        """(step, the earlier step that read the same batch)."""

    def __call__(self, history: History) -> Finding | None:
        if history.latest is history.restore:
            last_kept = 0 if history.latest.get("begins_data") else history.latest["step"]
            self._first_step = {hash_: step for hash_, step in self._first_step.items() if step <= last_kept}
        if not history.new_steps or not history.epochs_per_step <= 1:
            return None
        for new, sample_hash in zip(history.new_steps, history.latest.get("sample_hashes", ()), strict=False):
            steps_left = history.step + 1 - new.step  # of this row, including this step
            self._add(new.step, sample_hash, history.epoch - steps_left * history.epochs_per_step, history)
        if len(self._repeats) < IN_A_ROW:
            return None
        step = self._repeats[0][0]
        pairs = ", ".join(f"{step} that of {earlier}" for step, earlier in self._repeats[:IN_A_ROW])
        saw = f"in epoch {self._epoch + 1}, steps read the batch of an earlier step: step {pairs}"
        causes = (
            "a data order that restarts instead of continuing, so that the model sees only part of the text",
            "loader workers that share one seed",
        )
        fix = {"data.num_workers": 0} if history.settings["data.num_workers"] else {}
        return Finding("same batches again", step, saw, causes, fix)

    def _add(self, step: int, sample_hash: str, start_epoch: float, history: History) -> None:
        """Add the hash of a step. start_epoch: the position in the data, in epochs, before this step."""
        epoch = math.floor(start_epoch + EPOCH_TOLERANCE)
        if start_epoch + history.epochs_per_step - EPOCH_TOLERANCE > epoch + 1:
            return  # the step crosses into the next epoch
        if epoch != self._epoch or len(self._first_step) >= MAX_HASHES:
            self._epoch, self._first_step = epoch, {}
        earlier = self._first_step.setdefault(sample_hash, step)
        if earlier != step:
            self._repeats.append((step, earlier))


MIN_INTERVALS = 10  # a median over fewer is noise
MIN_SLOW_SECONDS = 120.0  # a shorter slow phase costs less than a minute, and may be a harmless pause
SLOW_RATIO = 0.5  # to the earlier speed; on a shared machine, healthy runs vary by nearly as much


MIN_DROP_STEPS = 10  # that are all slow, after as many that were all fast (but the first, which includes the start-up)
MIN_DROP_SECONDS = 2.0  # ten steps of a tiny model are over before a passing load is

Intervals = list[Interval]


def throughput_falls(history: History) -> Finding | None:
    """Throughput below half of what it was earlier in the session: for minutes, or in every step since it dropped."""
    intervals = list(history.intervals) if history.new_steps else []
    before, recent = _drop(intervals) or _slow_minutes(intervals) or ([], [])
    if not recent:
        return None
    speed, speed_before = (float(np.median([i.tokens_per_second for i in part])) for part in (recent, before))
    if not speed < SLOW_RATIO * speed_before:
        return None
    step = next(i.step for i in recent if i.tokens_per_second < SLOW_RATIO * speed_before)
    wait, wait_before = (float(np.median([i.data_share for i in part])) for part in (recent, before))
    saw = (
        f"{speed:,.0f} tokens/s, down from {speed_before:,.0f}; time waiting for batches is {wait:.0%} of compute time,"
        f" {wait_before:.0%} before"
    )
    out_of_memory = history.out_of_memory
    slow_data = "a data loader that falls behind (a slow disk, workers without a core, an uncached part of the file)"
    slow_machine = "other programs on this machine, or a processor that throttles because it is hot"
    if wait > max(MAX_DATA_SHARE, 2 * wait_before):
        return Finding("throughput falling", step, saw, (slow_data, slow_machine), faster_data(history))
    if out_of_memory is not None and out_of_memory["step"] >= before[0].step:
        smaller = f"the smaller micro-batches since memory ran out at step {out_of_memory['step']}"
        return Finding("throughput falling", step, saw, (smaller, slow_machine), {"model.gradient_checkpointing": True})
    return Finding("throughput falling", step, saw, (slow_machine, "memory swapped to disk", slow_data), {})


def _drop(intervals: Intervals) -> tuple[Intervals, Intervals] | None:
    """Return the intervals before and after a drop: each one after is slower than half of the slowest before."""
    speeds = np.array([interval.tokens_per_second for interval in intervals])
    slowest_before = np.minimum.accumulate(speeds)
    fastest_after = np.maximum.accumulate(speeds[::-1])[::-1]
    for gap in (1, 2):  # 2: without the interval in which it dropped, which is neither fast nor slow
        for last in np.flatnonzero(fastest_after[gap:] < SLOW_RATIO * slowest_before[:-gap]).tolist():
            before, after = intervals[: last + 1], intervals[last + gap :]
            steps_before, steps_after = (sum(i.num_steps for i in part) for part in (before, after))
            is_long = steps_before >= MIN_DROP_STEPS - 1 and steps_after >= MIN_DROP_STEPS
            if is_long and sum(i.seconds for i in after) >= MIN_DROP_SECONDS:
                return before, after
    return None


def _slow_minutes(intervals: Intervals) -> tuple[Intervals, Intervals] | None:
    """Return the intervals before the last minutes, and those of them; None if either are too few."""
    start, seconds = len(intervals), 0.0
    while start and not (seconds >= MIN_SLOW_SECONDS and len(intervals) - start >= MIN_INTERVALS):
        start -= 1
        seconds += intervals[start].seconds
    is_long = seconds >= MIN_SLOW_SECONDS and start >= MIN_INTERVALS
    return (intervals[:start], intervals[start:]) if is_long else None


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
        "a token cache on a slow disk",
        "other programs on the cores that gather the batches",
    )
    return Finding("data-bound", recent[0].step, saw, causes, faster_data(history))


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
