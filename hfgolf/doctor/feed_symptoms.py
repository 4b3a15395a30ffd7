"""Symptoms in what feeds a run: batches that come again or come late, slow steps, tokens damaged on the disk.

Detectors as in symptoms.py.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np

from hfgolf.doctor.finding import Finding, quicker_data
from hfgolf.doctor.history import History, Interval
from hfgolf.doctor.symptoms import IN_A_ROW

KEPT_HASHES = 10_000  # steps within which batches that come again are noticed
SEAM = 1e-9  # of an epoch: rounding


class SameBatches:
    """Batches that come again before the epoch is over, in which each block is read once."""

    def __init__(self) -> None:
        self._epoch = -1
        self._seen: dict[str, int] = {}
        self._again: list[tuple[int, int]] = []

    def __call__(self, history: History) -> Finding | None:
        if history.latest is history.restore:
            is_made = 0 if history.latest.get("begins_data") else history.latest["step"]
            self._seen = {number: step for number, step in self._seen.items() if step <= is_made}
        if not history.new_steps or not history.epochs_per_step <= 1:
            return None
        for new, number in zip(history.new_steps, history.latest.get("sample_hashes", ()), strict=False):
            steps_left = history.step + 1 - new.step  # of the row, this one included
            self._look_at(new.step, number, history.epoch - steps_left * history.epochs_per_step, history)
        if len(self._again) < IN_A_ROW:
            return None
        step = self._again[0][0]
        pairs = ", ".join(f"{step} that of {earlier}" for step, earlier in self._again[:IN_A_ROW])
        saw = f"within epoch {self._epoch + 1} steps read again what others had read: step {pairs}"
        causes = (
            "an order of the data that begins anew where it should go on, so that the model sees little of the text",
            "loader workers that share one seed",
        )
        fix = {"data.num_workers": 0} if history.settings["data.num_workers"] else {}
        return Finding("same batches again", step, saw, causes, fix)

    def _look_at(self, step: int, number: str, begins_at: float, history: History) -> None:
        """Take in the hash of a step. begins_at: where in the data it began, in epochs."""
        epoch = math.floor(begins_at + SEAM)
        if begins_at + history.epochs_per_step - SEAM > epoch + 1:
            return  # of two epochs
        if epoch != self._epoch or len(self._seen) >= KEPT_HASHES:
            self._epoch, self._seen = epoch, {}
        earlier = self._seen.setdefault(number, step)
        if earlier != step:
            self._again.append((step, earlier))


FEW_INTERVALS = 10  # a median over fewer is noise
SLOW_SECONDS = 120.0  # training that slow for less has not cost a minute, which may be anybody's pause
SLOW = 0.5  # of the speed before; that of healthy runs varies by as much where others share the machine


def throughput_falls(history: History) -> Finding | None:
    """Tokens a second at less than half of what they were earlier in the session, for minutes."""
    recent: list[Interval] = []
    seconds = 0.0
    for interval in reversed(history.intervals):
        if seconds >= SLOW_SECONDS and len(recent) >= FEW_INTERVALS:
            break
        recent.append(interval)
        seconds += interval.data_seconds + interval.compute_seconds
    before = list(history.intervals)[: -len(recent)]
    if not history.new_steps or not seconds >= SLOW_SECONDS or len(before) < FEW_INTERVALS:
        return None
    is_now, was = (float(np.median([i.tokens_per_second for i in part])) for part in (recent, before))
    if not is_now < SLOW * was:
        return None
    step = next(interval.step for interval in reversed(recent) if interval.tokens_per_second < SLOW * was)
    data, data_before = (float(np.median([i.data_share for i in part])) for part in (recent, before))
    saw = (
        f"{is_now:,.0f} tokens/s, {was:,.0f} before; batches are waited for {data:.0%} as long as the steps are"
        f" computed, {data_before:.0%} before"
    )
    out_of_memory = history.out_of_memory
    of_data = "a data loader that falls behind (a slow disk, workers without a core, a colder part of the file)"
    of_others = "other programs on this machine, or a processor that slows down because it is hot"
    if data > max(DATA_SHARE, 2 * data_before):
        return Finding("throughput falling", step, saw, (of_data, of_others), quicker_data(history))
    if out_of_memory is not None and out_of_memory["step"] >= before[0].step:
        smaller = f"the smaller micro-batches since memory ran out at step {out_of_memory['step']}"
        return Finding("throughput falling", step, saw, (smaller, of_others), {"model.gradient_checkpointing": True})
    return Finding("throughput falling", step, saw, (of_others, "memory that is swapped to a disk", of_data), {})


DATA_SHARE = 0.1  # of the time the steps are computed: REQUIREMENTS D4
DATA_STEPS = 20  # after those that fill the queues
DATA_SECONDS = 1.0  # waited for; less is the noise of a clock


def data_bound(history: History) -> Finding | None:
    """Steps that wait for their batches for more than a tenth of the time they are computed."""
    recent = list(islice(reversed(history.intervals), FEW_INTERVALS))[::-1]
    if not history.new_steps or len(recent) < 2 or recent[-1].step - recent[0].step < DATA_STEPS:
        return None
    share = float(np.median([interval.data_share for interval in recent]))
    waited = sum(interval.data_seconds for interval in recent)
    if not (share > DATA_SHARE and waited >= DATA_SECONDS):
        return None
    workers = history.settings["data.num_workers"]
    saw = (
        f"batches are waited for {share:.0%} as long as the steps are computed, with data.num_workers {workers};"
        f" {waited:.3g} s since step {recent[0].step}"
    )
    causes = (
        "too few loader workers" if workers else "batches that are gathered while the device waits",
        "a token cache on a slow disk",
        "other programs on the cores that gather the batches",
    )
    return Finding("data-bound", recent[0].step, saw, causes, quicker_data(history))


def damaged_cache(history: History) -> Finding | None:
    """Tokens that are not those that were written: the hash of a file, or an id, is wrong."""
    event = history.latest
    if event.get("event") != "damaged_cache":
        return None
    saw = str(event.get("reason")).removeprefix("data: ").removesuffix(".")
    causes = (
        "another program that wrote to the files of the cache",
        "a disk or memory that loses bits",
        "a power cut or a crash of the machine that lost part of a file",
    )
    return Finding("damaged token cache", event["step"], saw, causes, {})
