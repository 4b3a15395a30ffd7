"""Whether to compile the model, and doing it in place so that state-dict keys stay clean."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hfgolf.command_line import one_line
from hfgolf.train.recovery import is_out_of_memory

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

# What a compilation costs, and by precision what it saves and the MFU without it; rounded against compiling. Measured
# for the model of configs/small.yaml on 2 CPU cores: 35 s, 9 s where torch's cache has it from an earlier run; in bf16
# (AVX512-BF16) a step of 0.27 s instead of 0.34 s, in fp32 (another CPU) of 0.54 s instead of 0.61 s.
COMPILE_SECONDS = 40.0
SAVED_SHARE_OF_TIME = {"no": 0.12, "bf16": 0.2, "fp16": 0.2}
UNCOMPILED_MFU = {"no": 0.6, "bf16": 0.4, "fp16": 0.4}


def should_compile(
    device: torch.device, precision: str, seconds_at_peak: float, most_seconds: float = math.inf
) -> tuple[bool, str]:
    """Decide train.compile auto and say why.

    seconds_at_peak: of the whole training, were its MFU 1; most_seconds: after which it ends in any case.
    """
    if not has_compiler(device):
        return False, "there is no compiler for this device"
    saved = min(seconds_at_peak / UNCOMPILED_MFU[precision], most_seconds) * SAVED_SHARE_OF_TIME[precision]
    if saved < COMPILE_SECONDS:
        return False, f"about {saved:.0f} s saved would not pay for about {COMPILE_SECONDS:.0f} s of compiling"
    return True, f"about {saved:.0f} s saved pay for about {COMPILE_SECONDS:.0f} s of compiling"


def has_compiler(device: torch.device) -> bool:
    """Say whether torch.compile can make code for this device: a C++ compiler for a CPU, Triton for a GPU."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return has_triton()
    return device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is not None


def compile_in_place(model: nn.Module, run_once: Callable[[], None]) -> None:
    """Compile the model in place; falls back to eager, with one line, where it fails.

    run_once: runs a forward and backward pass, which is when torch compiles; it must leave no trace.
    """
    model.compile()
    try:
        run_once()
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
        undo_compilation(model)
        if is_out_of_memory(error):
            raise
        torch._dynamo.reset()
        logger.warning("compile: failed, going on without: %s", one_line(error)[:200])
        run_once()


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Make the model eager for a while."""
    compiled_call = model._compiled_call_impl
    undo_compilation(model)
    try:
        yield
    finally:
        model._compiled_call_impl = compiled_call


def undo_compilation(model: nn.Module) -> None:
    """Make the model eager again: generate() would have it compiled anew for every length."""
    model._compiled_call_impl = None  # what Module.compile() set
