"""Where the time of a training step goes, by phase, kind of work and operation, and what bounds the step.

Owns the figures and the conclusion drawn from them. Does not know how they were measured; trace.py reads them from a
profiler's trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
