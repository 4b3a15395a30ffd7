"""Where the time of training steps went, by phase, kind of work and operation, read from a profiler's trace.

Owns reading the Chrome trace format that torch.profiler exports, the figures, and the conclusion drawn from them. Does
not know how the trace was made. It expects scopes (`torch.profiler.record_function`) around each step, each phase but
the optimizer, and the model's modules, named as in STEP, PHASES and KINDS.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP = "step"
HOST_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
ROUNDING_SECONDS = 2e-9  # rounding of the trace's times, which count from boot
PHASES = ("data", "forward", "backward", "optimizer")
"""optimizer: everything after the last backward pass of a step, including norm and clipping. On a GPU, a kernel belongs
to the phase that launched it."""
COMPUTING = ("forward", "backward", "optimizer")
KINDS = ("attention", "MLP", "norm", "embedding", "head and loss", "optimizer", "rest")
"""Kinds of work by module; the innermost module counts. rest: residual stream, rotation, gradient accumulation."""
PYTHON = "(Python between operations)"

# Thresholds for what_bounds: fractions of the step's time or of its computing time.
DATA_BOUND = 0.10
GPU_IDLE = 0.15
SMALL_OPERATION_SECONDS = 20e-6  # calling an operation costs 2 to 10 us, and more under the profiler
OVERHEAD_BOUND = 0.30
OPTIMIZER_HEAVY = 0.15
HEAD_HEAVY = 0.40
NEAR_PEAK = 0.50  # MFU; the rest goes to operations that are not matrix products
MAX_POINTS = 400  # of the memory curve


@dataclass(frozen=True)
class Work:
    """Something that took time: a CPU operation without the operations it called, or a GPU kernel."""

    name: str
    kind: str | None
    phase: str
    seconds: float

    @property
    def is_overhead(self) -> bool:
        return self.name == PYTHON or self.seconds < SMALL_OPERATION_SECONDS


@dataclass(frozen=True)
class Profile:
    """Where the time of the profiled steps went."""

    num_steps: int
    wall_seconds: float
    phases: dict[str, float]
    """Seconds of data, forward, backward, optimizer and the rest ("idle" on a GPU, "other" on a CPU); they add up to
    wall_seconds. When a GPU does nothing, it counts as waiting for data or as idle."""
    work: list[Work]
    memory: list[tuple[float, int, str]]
    """For the last step: (seconds since it began, bytes of torch's allocator above its start, phase)."""

    @property
    def is_on_gpu(self) -> bool:
        return "idle" in self.phases

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the wall time by phase; they add up to 1."""
        return {phase: seconds / self.wall_seconds for phase, seconds in self.phases.items()}

    @property
    def kinds(self) -> dict[str, float]:
        """Fractions of the computing time (forward, backward, optimizer) by kind of work; they add up to 1."""
        seconds = dict.fromkeys(KINDS, 0.0)
        for work in self._computing():
            seconds["optimizer" if work.phase == "optimizer" else work.kind or "rest"] += work.seconds
        return {kind: part / self._computing_seconds() for kind, part in seconds.items()}

    @property
    def overhead_share(self) -> float:
        """Fraction of the computing time that a CPU spent in Python or in operations too small to be efficient."""
        seconds = sum(work.seconds for work in self._computing() if work.is_overhead)
        return 0.0 if self.is_on_gpu else seconds / self._computing_seconds()

    def top(self, limit: int = 15) -> list[dict[str, Any]]:
        """Return the operations that took the most time, by phase and kind (null in a compiled model)."""
        groups: dict[tuple[str, str, str | None], list[float]] = defaultdict(list)
        for work in self.work:
            groups[work.name, work.phase, work.kind].append(work.seconds)
        longest = sorted(groups.items(), key=lambda group: -sum(group[1]))[:limit]
        return [
            {
                "operation": name,
                "phase": phase,
                "kind": kind,
                "calls_per_step": len(seconds) / self.num_steps,
                "milliseconds_per_step": 1e3 * sum(seconds) / self.num_steps,
                "share": sum(seconds) / self.wall_seconds,
            }
            for (name, phase, kind), seconds in longest
        ]

    def memory_record(self) -> dict[str, Any]:
        """Return the memory of the last step for profile.json: its curve, and the peak with its phase."""
        _, peak_bytes, phase = max(self.memory, key=lambda point: point[1], default=(0.0, 0, "forward"))
        per_point = -(-len(self.memory) // MAX_POINTS) or 1
        buckets = (self.memory[i : i + per_point] for i in range(0, len(self.memory), per_point))
        curve = [max(bucket, key=lambda point: point[1]) for bucket in buckets]
        return {
            "peak_bytes": peak_bytes,
            "peak_phase": phase,
            "milliseconds": [1e3 * seconds for seconds, _, _ in curve],
            "bytes": [num_bytes for _, num_bytes, _ in curve],
        }

    def _computing(self) -> Iterator[Work]:
        return (work for work in self.work if work.phase in COMPUTING)

    def _computing_seconds(self) -> float:
        return sum(work.seconds for work in self._computing())


def what_bounds(profile: Profile, kinds: dict[str, float], mfu: float, is_compiled: bool) -> str:
    """Return one sentence that says what bounds the step and what to try, decided by the thresholds above.

    kinds: fractions by kind of work, from uncompiled steps. mfu: MFU of the step without the profiler.
    """
    shares = profile.shares
    if shares["data"] > DATA_BOUND:
        return (
            f"The step waits for data {shares['data']:.0%} of its time (above {DATA_BOUND:.0%}): try data.in_memory"
            " true or more data.num_workers."
        )
    larger = f"a larger batch.micro_batch_size{'' if is_compiled else ' or train.compile true'}"
    if profile.is_on_gpu and shares["idle"] > GPU_IDLE:
        return (
            f"The GPU waits {shares['idle']:.0%} of the time (above {GPU_IDLE:.0%}) for the process that launches its"
            f" work: try {larger}."
        )
    if profile.overhead_share > OVERHEAD_BOUND:
        return (
            f"Many small operations bound the step: {profile.overhead_share:.0%} of its computing time (above"
            f" {OVERHEAD_BOUND:.0%}) is call overhead, in Python and operations under"
            f" {SMALL_OPERATION_SECONDS * 1e6:.0f} us: try {larger}."
        )
    if shares["optimizer"] > OPTIMIZER_HEAVY:
        return (
            f"The optimizer takes {shares['optimizer']:.0%} of the step (above {OPTIMIZER_HEAVY:.0%}): try a larger"
            " batch.tokens_per_step, or with Muon optim.muon_every_steps 2."
        )
    if kinds["head and loss"] > HEAD_HEAVY:
        return (
            f"Head and loss take {kinds['head and loss']:.0%} of the computing time (above {HEAD_HEAVY:.0%}): try a"
            " smaller tokenizer.vocab_size."
        )
    if mfu > NEAR_PEAK:
        return (
            f"Matrix products near the machine's limit bound the step (MFU {mfu:.0%}, above {NEAR_PEAK:.0%}): only a"
            " smaller model, fewer tokens or a faster machine makes it faster."
        )
    largest = max(kinds, key=lambda kind: kinds[kind])
    remedy = "a larger batch.micro_batch_size" if is_compiled else "train.compile true, which fuses small operations"
    return (
        f"No single thing bounds the step: MFU {mfu:.0%}, most of the computing time is {largest}"
        f" ({kinds[largest]:.0%}): try {remedy}."
    )


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
