"""Profile real steps of a run, that is, calls of train_step(), and say what bounds them.

torch.profiler measures and adds up. This file marks the parts of a step with scopes, and says to which of them the time
of each operation belongs: also in the backward pass, which runs outside the modules' scopes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from hfgolf.evaluate.context import compiled_modules, undo_compilation
from hfgolf.model.layers_golf import GolfAttention, GolfMLP, GolfRMSNorm
from hfgolf.model.modeling_golf import GolfForCausalLM, GolfModel
from hfgolf.run.provenance import run_metadata
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import fingerprint, synchronize
from hfgolf.train.loop import train_step
from hfgolf.train.run import Run

WARMUP_STEPS = 3
STEP = "step"
PHASES = ("data", "forward", "backward", "optimizer")
"""optimizer: everything after the last backward pass of a step, including norm and clipping. On a GPU, a kernel belongs
to the phase that launched it."""
KINDS = ("attention", "MLP", "norm", "embedding", "head and loss", "optimizer", "rest")
"""Kinds of work by module; the innermost module counts. rest: residual stream, rotation, gradient accumulation."""
KIND_OF_MODULE: dict[type[nn.Module], str] = {
    GolfForCausalLM: "head and loss",
    GolfModel: "rest",
    nn.Embedding: "embedding",
    GolfRMSNorm: "norm",
    nn.LayerNorm: "norm",
    GolfAttention: "attention",
    GolfMLP: "MLP",
}

# Thresholds for what_bounds: fractions of the step's time or of its computing time.
DATA_BOUND = 0.10
GPU_IDLE = 0.15
SMALL_OPERATION_US = 20.0  # calling an operation costs 2 to 10 us, and more under the profiler
OVERHEAD_BOUND = 0.30
OPTIMIZER_HEAVY = 0.15
HEAD_HEAVY = 0.40
NEAR_PEAK = 0.50  # MFU; the rest goes to operations that are not matrix products


@dataclass(frozen=True)
class Profile:
    """Where the time of the profiled steps went."""

    seconds: float
    """From the beginning of the first step to the end of the last one."""
    shares: dict[str, float]
    """Fractions of that time by phase; they add up to 1. The last one is idle on a GPU, and other on a CPU. If a GPU
    does nothing, it waits for data or is idle."""
    kinds: dict[str, float]
    """Fractions of the computing time (forward, backward, optimizer) by kind of work; they add up to 1."""
    overhead_share: float
    """Fraction of the computing time that a CPU spent in Python or in operations too small to be efficient."""


def profile_run(run: Run, num_steps: int, trace: Path) -> tuple[dict[str, Any], str]:
    """Profile the next steps of a run and write their trace (.json.gz).

    Returns the content of profile.json, and torch's table of the slowest operations. If the model is compiled, the
    shares by kind of work come from as many extra steps without compilation, and the model stays uncompiled afterwards.
    Call it in every process of the run; each profiles itself. Raises UserError if the profiler cannot see the GPU's
    kernels.
    """
    is_compiled = bool(compiled_modules(run.raw_model))
    seconds = timed_steps(run, num_steps)
    profiler = _profile(run, num_steps, modules=not is_compiled)
    profiler.export_chrome_trace(str(trace))
    as_run = by_kind = read_events(profiler.events() or [])
    if is_compiled:
        undo_compilation(run.raw_model)
        by_kind = read_events(_profile(run, num_steps, modules=True).events() or [])
    step_seconds = statistics.median(seconds)
    mfu = run.config.batch.tokens_per_step / step_seconds * run.meter.flops_per_second_of_peak
    record = {
        "shares": as_run.shares,
        "kinds": by_kind.kinds,
        "kinds_are_of": "uncompiled" if is_compiled else "as run",
        "sentence": what_bounds(as_run, by_kind.kinds, mfu, is_compiled),
        "steps": num_steps,
        "step_seconds": step_seconds,
        "profiled_step_seconds": as_run.seconds / num_steps,
        "overhead_share": as_run.overhead_share,
        "mfu": mfu,
        "is_compiled": is_compiled,
        "precision": run.config.train.mixed_precision,
        "tokens_per_step": run.config.batch.tokens_per_step,
        "micro_batch_size": run.micro_batch_size,
        "machine": fingerprint() | {"threads": torch.get_num_threads()},
        "metadata": run_metadata(run.resolved),
    }
    slowest = "self_device_time_total" if "idle" in as_run.shares else "self_cpu_time_total"
    return record, profiler.key_averages().table(sort_by=slowest, row_limit=15, max_name_column_width=48)


def timed_steps(run: Run, num_steps: int) -> list[float]:
    """Return the seconds of each of the next steps, after WARMUP_STEPS."""
    for _ in range(WARMUP_STEPS):
        _step(run)
    seconds = []
    for _ in range(num_steps):
        synchronize(run.accelerator.device)
        started_at = time.perf_counter()
        _step(run)
        synchronize(run.accelerator.device)
        seconds.append(time.perf_counter() - started_at)
    return seconds


def _step(run: Run) -> None:
    train_step(run, math.inf)
    run.state.step += 1


def _profile(run: Run, num_steps: int, modules: bool) -> profile:
    """Return the profiler of the next steps. modules: with scopes of the modules, which compilation does not allow."""
    device = run.accelerator.device
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    warm = schedule(wait=0, warmup=1, active=1, repeat=1)  # a profiler's first events are slower
    with _marked(run, modules), profile(activities=activities, schedule=warm) as profiler:
        _step(run)
        synchronize(device)
        profiler.step()
        for number in range(num_steps):
            with record_function(STEP):
                _step(run)
                if number == num_steps - 1:
                    synchronize(device)  # only after the last: on a GPU, steps may overlap
    if device.type == "cuda" and not any(event.kernels for event in profiler.events() or []):
        raise UserError("profile: torch's profiler sees no kernels of this GPU; enable CUPTI, or profile on a CPU.")
    return profiler


@contextmanager
def _marked(run: Run, modules: bool) -> Iterator[None]:
    """Add profiler scopes to the parts of a step and, if `modules`, to the model's modules."""
    model, accelerator, batches = run.model, run.accelerator, run.batches

    def marked_batches() -> Iterator[dict[str, Tensor]]:
        while True:
            with record_function("data"):
                batch = next(batches)
            yield batch

    with ExitStack() as stack:
        stack.callback(setattr, run, "batches", batches)
        run.batches = marked_batches()
        # wrap the compiled call itself, so that the scope is outside the compiled code
        _mark(stack, "forward", model, "_compiled_call_impl", model._compiled_call_impl or model._call_impl)
        _mark(stack, "backward", accelerator, "backward", accelerator.backward)
        for module in run.raw_model.modules() if modules else ():
            if type(module) in KIND_OF_MODULE:
                _mark(stack, KIND_OF_MODULE[type(module)], module, "forward", module.forward)
        yield


def _mark(stack: ExitStack, scope: str, owner: object, name: str, function: Callable[..., Any]) -> None:
    """Replace the function `owner.name` with one that runs inside a scope, until the stack closes."""
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}

    def in_scope(*arguments: Any, **options: Any) -> Any:
        with record_function(scope):
            return function(*arguments, **options)

    def restore() -> None:
        del attributes[name]
        attributes.update(before)

    attributes[name] = in_scope
    stack.callback(restore)


def read_events(events: Iterable[FunctionEvent]) -> Profile:
    """Return the profile of a profiler's events, sorted by their beginning, with the scopes of `_marked` and STEP.

    The device must be idle when the first step begins and when the last one ends.
    """
    events = list(events)
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    scopes = [event for event in on_host if event.is_user_annotation]
    steps = [event for event in scopes if event.name == STEP]
    ends = [event.time_range.end for event in scopes if event.name == "backward"]
    updates = [(max(end for end in ends if end <= step.time_range.end), step.time_range.end) for step in steps]
    first, last = steps[0].time_range.start, steps[-1].time_range.end
    phases, kinds = dict.fromkeys(PHASES, 0.0), dict.fromkeys(KINDS, 0.0)
    placed = list(_placed(on_host, steps[0].thread, updates))
    efficient_us = 0.0
    if any(event.kernels for event in on_host):
        rest = "idle"
        for event, phase, kind in placed:
            phase = "forward" if phase == "other" else phase  # other: sums over micro-batches, hashes
            for kernel in event.kernels if phase else ():
                phases[phase] += kernel.duration
                if phase != "data":
                    kinds[phase if phase == "optimizer" else kind] += kernel.duration
        busy = _busy(events, first, last)
        waiting = 0.0  # for data, while the GPU did nothing
        for scope in scopes:
            if scope.name == "data":
                start, end = scope.time_range.start, scope.time_range.end
                waiting += end - start - sum(max(0.0, min(b, end) - max(a, start)) for a, b in busy)
        total = sum(phases.values())  # more than the busy time if kernels overlap
        phases = {phase: us / total * sum(end - start for start, end in busy) for phase, us in phases.items()}
        phases["data"] += waiting
    else:
        rest = "other"
        for scope in scopes:
            if scope.name in PHASES and scope.time_range.start >= first:
                phases[scope.name] += scope.time_range.elapsed_us()
        phases["optimizer"] = kinds["optimizer"] = sum(end - start for start, end in updates)
        for event, phase, kind in placed:
            if phase in ("forward", "backward"):
                kinds[kind] += event.self_cpu_time_total
            if phase in PHASES[1:] and not event.is_user_annotation and event.self_cpu_time_total > SMALL_OPERATION_US:
                efficient_us += event.self_cpu_time_total
    phases[rest] = last - first - sum(phases.values())
    computing = sum(kinds.values())
    return Profile(
        seconds=(last - first) * 1e-6,
        shares={phase: us / (last - first) for phase, us in phases.items()},
        kinds={kind: us / computing for kind, us in kinds.items()},
        overhead_share=0.0 if rest == "idle" else 1 - efficient_us / computing,
    )


def _placed(
    events: Iterable[FunctionEvent], main: int, updates: list[tuple[float, float]]
) -> Iterator[tuple[FunctionEvent, str, str]]:
    """Yield (event, its phase, its kind) for each event of the steps; the phase is empty outside of them.

    An operation has the kind of the innermost scope around it. In the backward pass, there are none around it: an
    operation of the forward pass and the autograd node that it makes have the same sequence number, and so does the
    evaluation of that node. On a GPU, another thread evaluates it.
    """
    places: dict[int, tuple[str, str]] = {}
    kind_of_node: dict[tuple[int | None, int], str] = {}
    for event in events:
        is_node = event.name.startswith("autograd::engine::evaluate_function")
        phase, kind = places.get(id(event.cpu_parent), ("backward" if is_node and event.thread != main else "", "rest"))
        if event.is_user_annotation:
            phase = "other" if event.name == STEP else event.name if event.name in PHASES else phase
            kind = event.name if event.name in KINDS else kind
        elif is_node:
            kind = kind_of_node.get((event.fwd_thread, event.sequence_nr), kind)
        elif event.sequence_nr >= 0 and not event.fwd_thread:
            kind_of_node[event.thread, event.sequence_nr] = kind  # of several with a number, the last made the node
        if phase == "other" and any(start <= event.time_range.start < end for start, end in updates):
            phase = "optimizer"
        places[id(event)] = phase, kind
        yield event, phase, kind


def _busy(events: Iterable[FunctionEvent], first: float, last: float) -> list[tuple[float, float]]:
    """Return when a GPU did something between two moments: (beginning, end), in order and apart."""
    busy: list[tuple[float, float]] = []
    for event in events:
        if event.device_type == DeviceType.CPU or event.is_user_annotation:
            continue
        start, end = max(first, event.time_range.start), min(last, event.time_range.end)
        if busy and start <= busy[-1][1]:
            busy[-1] = busy[-1][0], max(busy[-1][1], end)
        elif start < end:
            busy.append((start, end))
    return busy


def what_bounds(profile: Profile, kinds: dict[str, float], mfu: float, is_compiled: bool) -> str:
    """Return one sentence that says what bounds the step and what to try, decided by the thresholds above.

    kinds: fractions by kind of work, from uncompiled steps. mfu: MFU of the step without the profiler.
    """
    shares, overhead, head = profile.shares, profile.overhead_share, kinds["head and loss"]
    larger = f"try a larger batch.micro_batch_size{'' if is_compiled else ' or train.compile true'}."
    many_small = f"call overhead, in Python and in operations under {SMALL_OPERATION_US:.0f} us; {larger}"
    sooner = "try data.in_memory true or more data.num_workers."
    fewer = "try a larger batch.tokens_per_step, or with Muon optim.muon_every_steps 2."
    less_work = "only a smaller model, fewer tokens or a faster machine makes it faster."
    cases = (  # share, threshold, what it means, what to try
        (shares["data"], DATA_BOUND, "The step waits for data {} of its time", sooner),
        (shares.get("idle", 0.0), GPU_IDLE, "The GPU waits {} of the time for what launches its work", larger),
        (overhead, OVERHEAD_BOUND, "Many small operations bound the step: {} of its computing time", many_small),
        (shares["optimizer"], OPTIMIZER_HEAVY, "The optimizer takes {} of the step", fewer),
        (head, HEAD_HEAVY, "Head and loss take {} of the computing time", "try a smaller tokenizer.vocab_size."),
        (mfu, NEAR_PEAK, "Matrix products near the machine's limit bound the step: MFU {}", less_work),
    )
    for share, threshold, meaning, advice in cases:
        if share > threshold:
            return f"{meaning.format(f'{share:.0%}')} (above {threshold:.0%}): {advice}"
    largest = max(kinds, key=lambda kind: kinds[kind])
    return (
        f"No single thing bounds the step: MFU {mfu:.0%}, most of the computing time is {largest}"
        f" ({kinds[largest]:.0%}): {larger}"
    )
