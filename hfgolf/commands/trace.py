"""Turn a profiler's trace into a Profile: where the time of its steps went.

Owns reading the Chrome trace format that torch.profiler exports. Does not know how the trace was made. It expects
scopes (`torch.profiler.record_function`) around each step, each phase except the optimizer, and the model's modules,
named as in STEP, PHASES and KINDS.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfgolf.commands.step_profile import KINDS, PHASES, PYTHON, Profile, Work

STEP = "step"
HOST_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
ROUNDING_SECONDS = 2e-9  # rounding of the trace's times, which count from boot


def read_trace(path: Path) -> Profile:
    """Read a gzipped trace of `torch.profiler.profile.export_chrome_trace`. Raises ValueError if it has no step."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return profile_events(json.load(file)["traceEvents"])


def profile_events(events: Iterable[dict[str, Any]]) -> Profile:
    """Return the profile of a trace's events. Raises ValueError if none of them is the scope of a step.

    The device must be idle when the first step begins and when the last one ends.
    """
    events = list(events)
    spans = _spans(events)
    steps = [span for span in spans if span.is_scope and span.name == STEP]
    if not steps:
        raise ValueError(f"the trace has no scope named {STEP}")
    timeline = _timeline(steps, spans)
    on_gpu = sorted((e for e in events if e.get("cat") in GPU_CATEGORIES), key=lambda event: event["ts"])
    if on_gpu:
        work, phases = _on_gpu(on_gpu, spans, timeline)
    else:
        phases = timeline.seconds()
        work = _on_cpu([span for span in spans if span.thread == steps[0].thread], timeline, phases)
    wall_seconds = steps[-1].end - steps[0].start
    return Profile(len(steps), wall_seconds, phases, work, _memory(events, steps[-1], timeline, bool(on_gpu)))


@dataclass
class _Span:
    """An event of a CPU thread, with what it inherits from the events around it."""

    name: str
    thread: Any
    start: float
    end: float
    is_scope: bool
    kind: str | None
    is_forward: bool
    correlation: int | None
    own_seconds: float


@dataclass
class _Timeline:
    """The steps as one interval, divided into phases."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    def add(self, end: float, phase: str, start: float | None = None) -> None:
        self.starts.append(self.ends[-1] if start is None else start)
        self.ends.append(end)
        self.phases.append(phase)

    def phase_at(self, moment: float) -> str:
        return self.phases[self._place(moment)]

    def between(self, start: float, end: float) -> Iterator[tuple[str, float]]:
        """Yield (phase, seconds) for each phase that overlaps an interval."""
        for place in range(self._place(start), len(self.starts)):
            if self.starts[place] >= end:
                break
            yield self.phases[place], max(0.0, min(end, self.ends[place]) - max(start, self.starts[place]))

    def _place(self, moment: float) -> int:
        return max(0, bisect_right(self.starts, moment) - 1)

    def seconds(self) -> dict[str, float]:
        seconds = dict.fromkeys((*PHASES, "other"), 0.0)
        for start, end, phase in zip(self.starts, self.ends, self.phases, strict=True):
            seconds[phase] += end - start
        return seconds


def _spans(events: list[dict[str, Any]]) -> list[_Span]:
    """Return the spans of all CPU threads. Operations inherit their kind from their scope, also in the backward pass.

    An operation of the forward pass and the autograd node that it creates have the same sequence number, and so does
    the evaluation of that node in the backward pass.
    """
    on_host = [event for event in events if event.get("ph") == "X" and event.get("cat") in HOST_CATEGORIES]
    main = next((e["tid"] for e in on_host if e["name"] == STEP and e["cat"] == "user_annotation"), None)
    # the main thread first: on a GPU, another thread runs the backward pass
    on_host.sort(key=lambda event: (event["tid"] != main, str(event["tid"]), event["ts"], -event["dur"]))
    kind_of_node: dict[int, str | None] = {}
    spans: list[_Span] = []
    around: list[_Span] = []
    for event in on_host:
        span = _span(event)
        while around and (around[-1].thread != span.thread or around[-1].end - span.start < ROUNDING_SECONDS):
            around.pop()
        if around:
            parent = around[-1]
            parent.own_seconds -= min(span.end, parent.end) - span.start
            span.is_forward = span.is_forward or parent.is_forward
            span.kind = span.kind or parent.kind
        node = event.get("args", {}).get("Sequence number")
        if span.name.startswith("autograd::engine::evaluate_function"):
            span.kind = kind_of_node.get(node, span.kind)
        elif node is not None and span.is_forward and span.thread == main:
            kind_of_node[node] = span.kind  # if several operations share a number, the last one made the node
        around.append(span)
        spans.append(span)
    return spans


def _span(event: dict[str, Any]) -> _Span:
    name, is_scope = event["name"], event["cat"] == "user_annotation"
    start, seconds = event["ts"] * 1e-6, event["dur"] * 1e-6
    return _Span(
        name=name,
        thread=event["tid"],
        start=start,
        end=start + seconds,
        is_scope=is_scope,
        kind=name if is_scope and name in KINDS else None,
        is_forward=is_scope and name == "forward",
        correlation=event.get("args", {}).get("correlation"),
        own_seconds=seconds,
    )


def _timeline(steps: list[_Span], spans: list[_Span]) -> _Timeline:
    marks = [span for span in spans if span.is_scope and span.name in PHASES and span.thread == steps[0].thread]
    timeline = _Timeline()
    for step in steps:
        timeline.add(step.start, "other", start=timeline.ends[-1] if timeline.ends else step.start)
        for mark in marks:
            if step.start <= mark.start < step.end:
                timeline.add(mark.start, "other")
                timeline.add(mark.end, mark.name)
        timeline.add(step.end, "optimizer")
    return timeline


def _on_cpu(spans: list[_Span], timeline: _Timeline, phases: dict[str, float]) -> list[Work]:
    """Return the work of the training thread; the time of a phase outside any operation or module is Python's."""
    work = []
    left = dict(phases)
    for span in spans:
        is_mark = span.is_scope and span.kind is None
        if timeline.starts[0] <= span.start < timeline.ends[-1] and not is_mark:
            phase = timeline.phase_at(span.start)
            work.append(Work(PYTHON if span.is_scope else span.name, span.kind, phase, span.own_seconds))
            left[phase] -= span.own_seconds
    return work + [Work(PYTHON, None, phase, seconds) for phase, seconds in left.items()]


def _on_gpu(
    events: list[dict[str, Any]], spans: list[_Span], timeline: _Timeline
) -> tuple[list[Work], dict[str, float]]:
    """Return the kernels as work, and the seconds by phase: of the kernels it launched, waiting for data, and idle."""
    launches = {span.correlation: span for span in spans if span.correlation is not None}
    work = []
    phases = dict.fromkeys((*PHASES, "idle"), 0.0)
    done_at, end = timeline.starts[0], timeline.ends[-1]
    gaps = []
    for event in events:
        start, seconds = event["ts"] * 1e-6, event["dur"] * 1e-6
        launch = launches.get(event.get("args", {}).get("correlation"))
        if launch is None or not timeline.starts[0] <= launch.start < end:
            continue
        phase = timeline.phase_at(launch.start)
        phase = "forward" if phase == "other" else phase  # other: sums over micro-batches, hashes
        work.append(Work(event["name"], launch.kind, phase, seconds))
        if start > done_at:
            gaps.append((done_at, start))
        phases[phase] += max(0.0, min(start + seconds, end) - max(start, done_at))  # streams overlap
        done_at = max(done_at, min(start + seconds, end))
    gaps.append((done_at, end))
    for start, stop in gaps:
        for phase, seconds in timeline.between(start, stop):
            phases["data" if phase == "data" else "idle"] += seconds
    return work, phases


def _memory(
    events: list[dict[str, Any]], step: _Span, timeline: _Timeline, on_gpu: bool
) -> list[tuple[float, int, str]]:
    changes = sorted(
        (event["ts"] * 1e-6, event["args"]["Total Allocated"], event["args"]["Bytes"])
        for event in events
        if event["name"] == "[memory]"
        and event["args"]["Device Type"] == int(on_gpu)
        and step.start <= event["ts"] * 1e-6 < step.end
    )
    return [
        (moment - step.start, held - (changes[0][1] - changes[0][2]), timeline.phase_at(moment))
        for moment, held, _ in changes
    ]
