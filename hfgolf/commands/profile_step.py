"""Profile real steps of a run, that is, calls of train_step().

Owns running the steps and the profiler scopes around the parts of a step. trace.py interprets the trace.
"""

from __future__ import annotations

import gzip
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from hfgolf.commands.trace import STEP, Profile, read_trace, what_bounds
from hfgolf.evaluate.context import compiled_modules, undo_compilation
from hfgolf.model.layers_golf import GolfAttention, GolfMLP, GolfRMSNorm
from hfgolf.model.modeling_golf import GolfForCausalLM, GolfModel
from hfgolf.run.provenance import run_metadata
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import fingerprint, synchronize
from hfgolf.train.loop import train_step
from hfgolf.train.run import Run

WARMUP_STEPS = 3
KIND_OF_MODULE: dict[type[nn.Module], str] = {
    GolfForCausalLM: "head and loss",
    GolfModel: "rest",
    nn.Embedding: "embedding",
    GolfRMSNorm: "norm",
    nn.LayerNorm: "norm",
    GolfAttention: "attention",
    GolfMLP: "MLP",
}


def profile_run(run: Run, num_steps: int, trace: Path) -> dict[str, Any]:
    """Profile the next steps of a run, write their trace (.json.gz) and return the content of profile.json.

    If the model is compiled, the shares by kind of work come from as many extra steps without compilation, and the
    model stays uncompiled afterwards. Call it in every process of the run; each profiles itself. Raises UserError if
    the profiler cannot see the GPU's kernels.
    """
    is_compiled = bool(compiled_modules(run.raw_model))
    seconds = timed_steps(run, num_steps)
    with _marked(run, modules=not is_compiled):
        as_run = _profile(run, num_steps, trace)
    by_kind = as_run
    if is_compiled:
        undo_compilation(run.raw_model)
        with _marked(run, modules=True):
            by_kind = _profile(run, num_steps, trace.with_name(f"uncompiled-{trace.name}"))
    step_seconds = statistics.median(seconds)
    mfu = run.config.batch.tokens_per_step / step_seconds * run.meter.flops_per_second_of_peak
    return {
        "shares": as_run.shares,
        "kinds": by_kind.kinds,
        "kinds_are_of": "uncompiled" if is_compiled else "as run",
        "top": as_run.top(),
        "sentence": what_bounds(as_run, by_kind.kinds, mfu, is_compiled),
        "memory": as_run.memory_record(),
        "steps": num_steps,
        "step_seconds": step_seconds,
        "profiled_step_seconds": as_run.wall_seconds / num_steps,
        "overhead_share": as_run.overhead_share,
        "mfu": mfu,
        "is_compiled": is_compiled,
        "precision": run.config.train.mixed_precision,
        "tokens_per_step": run.config.batch.tokens_per_step,
        "micro_batch_size": run.micro_batch_size,
        "machine": fingerprint() | {"threads": torch.get_num_threads()},
        "metadata": run_metadata(run.resolved, fingerprint()),
    }


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


def _profile(run: Run, num_steps: int, trace: Path) -> Profile:
    activities = [ProfilerActivity.CPU]
    if run.accelerator.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    warm = schedule(wait=0, warmup=1, active=1, repeat=1)  # a profiler's first events are slower
    with profile(activities=activities, schedule=warm, profile_memory=True) as profiler:
        _step(run)
        synchronize(run.accelerator.device)
        profiler.step()
        for number in range(num_steps):
            with record_function(STEP):
                _step(run)
                if number == num_steps - 1:
                    synchronize(run.accelerator.device)  # only after the last: on a GPU, steps may overlap
    plain = trace.with_suffix("")
    profiler.export_chrome_trace(str(plain))  # uncompressed: torch compresses line by line, several times slower
    trace.write_bytes(gzip.compress(plain.read_bytes(), compresslevel=6))
    plain.unlink()
    found = read_trace(trace)
    if ProfilerActivity.CUDA in activities and not found.is_on_gpu:
        raise UserError("profile: torch's profiler sees no kernels of this GPU; enable CUPTI, or profile on a CPU.")
    return found


@contextmanager
def _marked(run: Run, modules: bool) -> Iterator[None]:
    """Add profiler scopes to the parts of a step and, if `modules`, to the model's modules (not if it is compiled)."""
    model, accelerator, batches = run.model, run.accelerator, run.batches
    with ExitStack() as stack:
        stack.callback(setattr, run, "batches", batches)
        run.batches = _marked_batches(batches)
        # wrap the compiled call itself, so that the scope is outside the compiled code
        _mark(stack, "forward", model, "_compiled_call_impl", model._compiled_call_impl or model._call_impl)
        _mark(stack, "backward", accelerator, "backward", accelerator.backward)
        for module in run.raw_model.modules() if modules else ():
            if type(module) in KIND_OF_MODULE:
                _mark(stack, KIND_OF_MODULE[type(module)], module, "forward", module.forward)
        yield


def _marked_batches(batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    while True:
        with record_function("data"):
            batch = next(batches)
        yield batch


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
