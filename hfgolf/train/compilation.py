"""Decide whether to compile the model, compile it in place (state-dict keys stay clean), and warm it up."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hfgolf.evaluate.context import undo_compilation
from hfgolf.model.modeling_golf import ChunkedCrossEntropy
from hfgolf.system.hardware import missing_compiler, seconds_of
from hfgolf.system.ranks import gather
from hfgolf.system.wording import first_line
from hfgolf.train.feed import halve_until_it_fits, is_out_of_memory
from hfgolf.train.recurrence import each_loop_state
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# The cost of compiling, the share of time it saves by precision, and the MFU without it, all rounded against compiling.
# Measured on 2 CPU cores. Compiling the layers and the loss of configs/small.yaml takes 33 s, or 5 s from torch's
# cache, on an AMD EPYC at 370 GFLOP/s (as one graph, the model took 64 s and 12 s). In bf16, a pass takes 0.53 s
# instead of 0.70 s there, and 0.15 s instead of 0.25 s on a Xeon with AMX; in fp32, 0.54 s instead of 0.61 s a step.
COMPILE_SECONDS = 30.0
SAVED_SHARE_OF_TIME = {"no": 0.12, "bf16": 0.25, "fp16": 0.25}
UNCOMPILED_MFU = {"no": 0.6, "bf16": 0.4, "fp16": 0.4}
# On a GPU, time without compiling is measured. On an H200 (torch 2.11), GPT-2 124M compiled in 49 s, from torch's cache
# in 18 s. A step of 131,072 tokens then took 273 ms instead of 529, and a pass of 10.7 M parameters over 16,384 tokens
# 8.3 ms instead of 18.8.
COMPILE_SECONDS_GPU = 50.0
SAVED_SHARE_OF_TIME_GPU = 0.48


def choose_compilation(run: Run) -> bool:
    """Return whether to compile: train.compile, or if it is auto, whether that saves time. Then logs the reason."""
    train, device = run.config.train, run.accelerator.device
    if isinstance(train.compile, bool):
        return train.compile
    missing = _missing_on_a_rank(device)
    compiling, reason = False, missing or ""
    if missing is None:
        max_seconds = 60 * (train.max_minutes or math.inf)
        compiling, reason = should_compile(device, run.decisions.precision, uncompiled_seconds(run), max_seconds)
    by_rank = gather((compiling, reason))  # on a CPU, each measures its own peak
    if not all(yes for yes, _ in by_rank):
        compiling, reason = next(answer for answer in by_rank if not answer[0])
    level = logging.INFO if compiling or missing else logging.DEBUG
    logger.log(level, "compile: %s, because %s", "yes" if compiling else "no", reason)
    return compiling


def should_compile(
    device: torch.device, precision: str, uncompiled_seconds: float, max_seconds: float = math.inf
) -> tuple[bool, str]:
    """Decide whether compiling pays, and return the decision and the reason.

    uncompiled_seconds: time that the remaining passes take uncompiled. max_seconds: train.max_minutes in seconds.
    """
    on_cpu = device.type == "cpu"
    share, cost = (
        (SAVED_SHARE_OF_TIME[precision], COMPILE_SECONDS) if on_cpu else (SAVED_SHARE_OF_TIME_GPU, COMPILE_SECONDS_GPU)
    )
    saved = min(uncompiled_seconds, max_seconds) * share
    return saved >= cost, f"it would save about {saved:.0f} s and cost about {cost:.0f} s"


def uncompiled_seconds(run: Run) -> float:
    """Estimate the time of the remaining passes: on a CPU from FLOPs, on a GPU from a pass, on the slowest rank.

    On a GPU, small models take several times what their FLOPs say, because the host launches too slowly.
    """
    steps = run.step_limit - run.state.step
    if run.accelerator.device.type == "cpu":
        at_peak = steps * run.config.batch.tokens_per_step * run.meter.flops_per_second_of_peak
        return at_peak / UNCOMPILED_MFU[run.decisions.precision]
    with run.stopwatch.charge("setup"):
        seconds = halve_until_it_fits(run, lambda: _on_all_processes(run, lambda: timed_pass(run)))
    return steps * run.accumulation_steps * max(gather(seconds))


def timed_pass(run: Run) -> float:
    """Return the seconds of a second forward and backward pass: the first also loads kernels and finds memory."""
    _run_pass(run)
    return seconds_of(lambda: _run_pass(run), run.accelerator.device)


def _missing_on_a_rank(device: torch.device) -> str | None:
    """Return what the first rank that cannot compile lacks, None if all can. All ranks must call it."""
    return next(filter(None, gather(missing_compiler(device))), None)


def warm_up(run: Run) -> None:
    """Run a forward and backward pass before the first step, to compile and, on a GPU, to test the micro-batch."""
    compiling, device = bool(run.is_compiled), run.accelerator.device
    missing = _missing_on_a_rank(device) if compiling else None
    if missing and device.type in ("cpu", "cuda"):  # elsewhere, who states it may try
        compiling = False
        logger.warning("compile: no, in spite of train.compile true, because %s", missing)

    def run_once() -> None:
        for _ in each_loop_state(run):
            _run_pass(run)

    def work() -> None:
        compile_in_place(run.raw_model, run_once) if compiling else run_once()

    if compiling or run.accelerator.device.type == "cuda":
        with run.stopwatch.charge("compile" if compiling else "setup"):
            halve_until_it_fits(run, lambda: _on_all_processes(run, work))
    if compiling:
        logger.info("compile: %.0f s", run.stopwatch.seconds()["compile"])


def _run_pass(run: Run) -> None:
    """Run a forward and backward pass on token 0 that leaves no trace."""
    accelerator = run.accelerator
    ids = torch.zeros(
        run.micro_batch_size, run.config.batch.sequence_length, dtype=torch.long, device=accelerator.device
    )
    # clone: if labels and inputs were one tensor, torch would compile for that, and again for real batches
    batch = {"input_ids": ids, "shift_labels": ids.clone()}
    if run.tokens.train.is_target is not None:
        batch["num_items_in_batch"] = torch.ones((), device=accelerator.device)
    # FSDP2 would keep the gradients of a pass without sync, and add them to those of the first step
    without_sync = nullcontext() if run.is_sharded else accelerator.no_sync(run.model)
    with torch.random.fork_rng([accelerator.device] if accelerator.device.type == "cuda" else []), without_sync:
        accelerator.backward(run.model(**batch).loss)
    run.raw_model.zero_grad(set_to_none=True)


def _on_all_processes(run: Run, work: Callable[[], Result]) -> Result:
    """Return work(). Raises OutOfMemoryError if it runs out of memory on any process."""
    reason = None
    try:
        result = work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error)
    failed = torch.tensor(float(reason is not None), device=run.accelerator.device)
    if run.accelerator.reduce(failed, "sum").item():
        raise torch.OutOfMemoryError(reason or "on another process")
    return result


def modules_to_compile(model: nn.Module) -> list[nn.Module]:
    """Return the layers, the loss and the outer RMSNorms of a model on a CPU, else the whole model.

    One compilation serves all layers that are alike, so that its time does not grow with their number. On a CPU, the
    steps are as fast as those of the whole model. On a GPU, what lies outside would launch too many kernels.
    """
    if not isinstance(model, PreTrainedModel) or model.device.type != "cpu":
        return [model]
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    losses: list[nn.Module] = [module for module in model.modules() if isinstance(module, ChunkedCrossEntropy)]
    norms = [module for module in model.base_model.children() if type(module).__name__.endswith("RMSNorm")]
    return layers + norms + losses if len(layers) > 1 else [model]


def compile_in_place(model: nn.Module, run_once: Callable[[], None]) -> None:
    """Compile the model in place; if that fails, log a warning and fall back to eager.

    run_once: runs a forward and backward pass, which triggers the compilation; it must have no side effects.
    """
    modules = modules_to_compile(model)
    recompile_limit = 8 + 2 * len(modules)  # layers may all differ, and a loop may run each of them in two ways
    for module in modules:
        module.compile(dynamic=False)  # else a halved micro-batch makes sizes symbolic, and the kernels slower
    try:
        with torch._dynamo.config.patch(recompile_limit=recompile_limit):
            run_once()
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
        undo_compilation(model)
        if is_out_of_memory(error):
            raise
        torch._dynamo.reset()
        logger.warning("compile: failed, continuing without it: %s", first_line(error)[:200])
        run_once()
