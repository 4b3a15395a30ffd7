"""How much memory training takes, predicted from shapes, and the micro-batch that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch

from hfgolf.errors import UserError

if TYPE_CHECKING:
    from hfgolf.config import BatchConfig

Number = TypeVar("Number", int, float)

# The most tokens in a micro-batch on a CPU. Larger ones leave the cache: configs/small.yaml ran forward and backward at
# 3,600, 3,360 and 3,200 tokens/s with 1,024, 2,048 and 4,096 tokens (2 cores, AVX-512, fp32, best of several steps).
MOST_CPU_TOKENS = 2048
# What the allocator, the kernels' workspaces and other programs may need beside the prediction.
USABLE_SHARE = 0.8
# Logits of one chunk of the loss on an accelerator, in fp32 with their gradient; those of the batch never exist.
LOSS_CHUNK_BYTES = 512 * 2**20


@dataclass(frozen=True)
class TrainingMemory:
    """Predicted bytes of one process, by what holds them."""

    weights: int
    gradients: int
    optimizer: int
    """Its state, and the moving average of the weights."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def training_memory(
    *,
    parameters: int,
    matrix_parameters: int,
    batch: int,
    sequence: int,
    layers: int,
    width: int,
    intermediate: int,
    optimizer: str = "muon",
    precision: str = "no",
    gradient_checkpointing: bool = False,
    ema: bool = False,
) -> TrainingMemory:
    """Predict the bytes that training takes on one process.

    batch: sequences in a micro-batch; sequence: tokens in each; width, intermediate: of the model and of its MLP.
    matrix_parameters: those that Muon updates. Weights, gradients and state are fp32: 4 bytes each, and per parameter
    8 bytes of state under AdamW, 4 under Muon and SGD with momentum; the moving average (ema) takes 4 more. Activations
    a token and layer, after Korthikanti et al. 2022 ("Reducing activation recomputation", section 4.1) for this block
    with SDPA, which keeps no scores: two norms in and out, fused qkv, normed q and k, attention out, projections:
    11 x width, and 3 x intermediate of the MLP; under checkpointing only the block's input, and one block whole. In 16
    bits for a 16-bit precision, of which the norms' fp32 copies are the 4 x width that stay.
    """
    state = 8 * parameters if optimizer == "adamw" else 4 * parameters
    if optimizer == "muon":
        state = 4 * matrix_parameters + 8 * (parameters - matrix_parameters)
    value_bytes = 4 if precision == "no" else 2
    token_bytes = (7 * width + 3 * intermediate) * value_bytes + 4 * width * 4
    blocks = layers * width * 4 + token_bytes if gradient_checkpointing else layers * token_bytes
    ends = 4 * width * 4  # embedding, final norm and their gradients
    return TrainingMemory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=state + (4 * parameters if ema else 0),
        activations=batch * sequence * (blocks + ends),
        logits=LOSS_CHUNK_BYTES,
    )


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that are free on the device: of the GPU's memory, or of RAM for a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def used_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes this process took: of the GPU's memory as allocated, or resident in RAM for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_memory_bytes()


def process_memory_bytes() -> int:
    """Return the bytes of RAM that this process holds now."""
    return psutil.Process().memory_info().rss


def gpu_utilization(device: torch.device) -> float | None:
    """Return the share of time the GPU was busy lately, by NVML; None on a CPU, or without the nvidia-ml-py package."""
    return _ask_nvml(lambda: torch.cuda.utilization(device) / 100, device)


def gpu_memory_bytes(device: torch.device) -> int | None:
    """Return the bytes of the GPU that are taken, by whomever, by NVML; None as for `gpu_utilization`."""
    return _ask_nvml(lambda: torch.cuda.device_memory_used(device), device)


def _ask_nvml(question: Callable[[], Number], device: torch.device) -> Number | None:
    if device.type != "cuda":
        return None
    try:
        return question()
    except (ModuleNotFoundError, RuntimeError):
        return None


def choose_micro_batch_size(
    batch: BatchConfig, num_processes: int, device: torch.device, free_bytes: int, **shape: object
) -> int:
    """Return the largest micro-batch that fits in the free memory and divides tokens_per_step evenly.

    shape: what `training_memory` takes beside batch and sequence. Raises UserError where not even one sequence fits, or
    where the processes cannot share the sequences of a step.
    """
    batch.accumulation_steps(1, num_processes)  # raises where no micro-batch could divide it
    budget = int(free_bytes * USABLE_SHARE)
    for size in reversed(batch.micro_batch_sizes(num_processes)):
        if device.type == "cpu" and size > 1 and size * batch.sequence_length > MOST_CPU_TOKENS:
            continue
        if training_memory(batch=size, sequence=batch.sequence_length, **shape).total <= budget:  # type: ignore[arg-type]
            return size
    need = training_memory(batch=1, sequence=batch.sequence_length, **shape).total  # type: ignore[arg-type]
    raise UserError(
        f"batch.micro_batch_size: not even one sequence of {batch.sequence_length} tokens fits: it needs"
        f" {need / 2**30:.1f} GiB of {budget / 2**30:.1f} GiB usable; try model.gradient_checkpointing true, a shorter"
        " batch.sequence_length or a smaller model."
    )
