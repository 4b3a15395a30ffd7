"""How much memory training takes, predicted from shapes, and the micro-batch that follows from it."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch

from hfgolf.errors import UserError
from hfgolf.model import modeling_golf
from hfgolf.model.causal_blocks import NAME as CAUSAL_BLOCKS
from hfgolf.model.causal_blocks import QUERIES_PER_BLOCK
from hfgolf.optim.groups import parameter_kind
from hfgolf.optim.muon import DEFAULT_MAX_BUCKET_ELEMENTS, MAX_BUCKET_ELEMENTS

if TYPE_CHECKING:
    from hfgolf.config import RunConfig
    from hfgolf.model.configuration_golf import GolfConfig
    from hfgolf.model.modeling_golf import GolfForCausalLM

logger = logging.getLogger(__name__)
Number = TypeVar("Number", int, float)

# The most tokens in a micro-batch on a CPU. Larger ones leave the cache: configs/small.yaml ran forward and backward at
# 3,600, 3,360 and 3,200 tokens/s with 1,024, 2,048 and 4,096 tokens (2 cores, AVX-512, fp32, best of several steps).
MAX_CPU_TOKENS = 2048
# What the allocator, the kernels' workspaces and other programs may need beside the prediction.
USABLE_SHARE = 0.8
# The heap that glibc loses to fragmentation: some bytes, and a share of what a step allocates and frees. torch aligns
# tensors by posix_memalign, which takes a block of 96 bytes more than it needs and gives the rest back; small objects
# settle there, and then the hole that a tensor leaves is too small for the next one of its size (sourceware bug 30723).
# The allocations of three steps of configs/small.yaml in bf16, 508 MB alive at the peak, replayed with glibc 2.36: 786
# MB of heap by posix_memalign, 548 MB by malloc. No setting helps that costs no time: of blocks from 2 MB by mmap, the
# peak is 633 MB, but each step faults 0.9 GB in. Over the ten runs of benchmarks/memory_prediction.py (5 M to 124 M
# parameters, fp32 and bf16) these two predict 0.85 to 1.29 of the peak, eight of them within 15 %; what was lost beside
# the bytes was 0.1 to 1.2 of what a step frees. Other versions of glibc are not measured.
FRAGMENTED_BYTES, FRAGMENTED_SHARE = 150_000_000, 0.6


@dataclass(frozen=True)
class TrainingMemory:
    """Predicted bytes of one process on its device, by what holds them."""

    weights: int
    gradients: int
    optimizer: int
    """Its state."""
    ema: int
    """The moving average of the weights."""
    buckets: int
    """The gradients once more, where DDP exchanges them."""
    casts: int
    """The weights in 16 bits: autocast keeps them during the forward pass, autograd for the backward pass."""
    activations: int
    """What else autograd keeps for the backward pass."""
    loss: int
    """One chunk of the logits, their gradient, and that of the head; the logits of the batch never exist."""
    backward: int
    """The widest moment of the backward pass; under gradient checkpointing with the activations of one block."""
    update: int
    """What the optimizer takes for a while."""
    peak: int
    """Not the sum: gradients and activations, loss, backward pass and update are not all there at one time."""


def training_memory(
    model: GolfConfig,
    *,
    parameters: int,
    matrix_parameters: int,
    batch: int,
    sequence: int,
    optimizer: str = "muon",
    ema: bool = False,
    precision: str = "no",
    gradient_checkpointing: bool = False,
    accumulates: bool = False,
    cautious_weight_decay: bool = False,
    processes: int = 1,
    device: str = "cuda",
) -> TrainingMemory:
    """Predict the bytes that training takes on each process, uncompiled (compiled, autograd keeps less).

    model: widths, layers, block. matrix_parameters: of the blocks' matrices, which Muon updates. batch: sequences in a
    micro-batch, sequence: tokens in each. accumulates: a step has several of them. device: cuda or cpu.

    Weights, gradients, averages and state are fp32, 4 bytes a parameter each, and the state 8 under AdamW: Rajbhandari
    et al. 2020 ("ZeRO", section 3.1), whose 16-bit weights exist here during a pass only. Activations: `block_bytes`.
    The peak of a pass is within 5 % of what is alive on torch's fake tensors, of CUDA and of the CPU. On top come a
    GPU's context and workspaces, some 0.5 GB, and on a CPU `fragmented_bytes`.
    """
    weights = 4 * parameters
    state = 8 * parameters if optimizer == "adamw" else 4 * parameters
    if optimizer == "muon":
        state += 4 * (parameters - matrix_parameters)
    average = weights if ema else 0
    half = precision != "no"
    casts = 2 * matrix_parameters if half else 0

    tokens, width, layers = batch * sequence, model.hidden_size, model.num_hidden_layers
    kept, passing = block_bytes(model, sequence, half, device)
    stream = 4 * width  # bytes of a token between two blocks: fp32, whatever the precision
    norms = 1 + model.embedding_norm  # outside of the blocks
    # their inputs, and the gradient of the last output, which the loss computes in its forward pass
    ends = stream * (norms + 1 + (norms if _keeps_normed(model, device) else 0))
    activations = tokens * (layers * kept + ends)
    backward = tokens * passing
    if gradient_checkpointing:
        activations = tokens * (layers * stream + ends)
        backward += tokens * (kept - 2 * stream)

    head = model.vocab_size * width
    loss = 4 * head + tokens * stream + _chunk_bytes(model, tokens, half, device)
    backward = max(backward + 4 * head, 8 * head + tokens * stream)
    gradients = weights
    update = _orthogonalization_bytes(model, device) if optimizer == "muon" else 0
    if cautious_weight_decay:  # the matrices as they were, and twice their change
        update = 4 * matrix_parameters + max(update, 8 * matrix_parameters)
    buckets = weights if processes > 1 else 0
    casts_in_backward = casts // layers if gradient_checkpointing else casts  # those of the block recomputed
    in_pass = activations + max(casts + loss, casts_in_backward + backward) + (gradients if accumulates else 0)
    peak = weights + state + average + buckets + max(in_pass, gradients + update)
    return TrainingMemory(
        weights=weights, gradients=gradients, optimizer=state, ema=average, buckets=buckets, casts=casts,
        activations=activations, loss=loss, backward=backward, update=update, peak=peak,
    )  # fmt: skip


def block_bytes(model: GolfConfig, sequence: int, half: bool, device: str) -> tuple[int, int]:
    """Return the bytes a token of what autograd keeps of one block, and of the widest moment of its backward pass.

    Counted as Korthikanti et al. 2022 do ("Reducing activation recomputation", section 4.1), for this block: what each
    operation's derivative needs, each storage once. half: operands in 16 bits; the residual stream stays in 32.
    """
    width, inner, heads = model.hidden_size, model.intermediate_size, model.num_attention_heads
    keys = model.num_key_value_heads * model.head_dim
    operand = 2 if half else 4
    on_cpu, blocks = device == "cpu", model._attn_implementation == CAUSAL_BLOCKS
    is_turned = model.qk_norm or model.position_embedding == "rope"

    # both norms: the residual stream that comes in, and what goes into the products
    kept = 2 * width * (4 + operand + (4 if _keeps_normed(model, device) else 0))
    qkv = operand * (width + 2 * keys)
    kept += 0 if blocks else qkv  # whole, whichever part is needed
    if model.qk_norm:  # in fp32 under autocast; a CPU keeps the normed ones too
        kept += (width + keys) * ((4 if half else 0) + (4 if on_cpu else 0))
    if is_turned:
        kept += operand * (width + keys)
    kept += operand * width  # attended, for o_proj
    if blocks:
        span = min(sequence, QUERIES_PER_BLOCK)
        kept += operand * width * (1 if is_turned else 3)  # copies of the values, and of what else is only a view
        kept += heads * (sequence + span) // 2 * (operand + (1 + operand) * (model.attention_dropout > 0))
    elif model.attention_dropout and on_cpu:
        kept += heads * sequence * 12  # torch has no fused attention with dropout for CPUs
    elif is_turned and (half or on_cpu):
        kept += operand * width  # attended, for attention itself: in another layout than o_proj's
    kept += 2 * width if model.dropout else 0  # masks

    if model.activation == "swiglu":
        kept += 4 * operand * inner + (operand * width if half else 0)  # its input is cast twice
        passing = 2 * operand * inner
    elif model.activation == "relu2" and half and not on_cpu:
        kept += 8 * inner  # autocast squares in fp32
        passing = 14 * inner
    else:
        kept += 2 * operand * inner
        passing = (3 if model.activation == "relu2" else 1) * operand * inner
    return kept, max(passing, 12 * width)


def _keeps_normed(model: GolfConfig, device: str) -> bool:
    """Say whether a norm of the stream keeps, beside its input, what it scales: torch has no fused RMSNorm for CPUs."""
    return device == "cpu" and model.norm == "rmsnorm"


def _chunk_bytes(model: GolfConfig, tokens: int, half: bool, device: str) -> int:
    """Return the most that a chunk of the loss takes: its logits, or adding what it gives to the head's gradient."""
    most = modeling_golf._CHUNK_ELEMENTS_CPU if device == "cpu" else modeling_golf._CHUNK_ELEMENTS_ACCELERATOR
    rows = min(tokens, max(1, most // model.vocab_size))
    former = 4 if rows < tokens else 0  # left of the chunk before
    squashed = 0 if model.logit_soft_cap is None else 8
    logits = rows * model.vocab_size * (8 + former + squashed)  # and log-softmax, both in fp32
    if not half:
        return logits
    head = model.vocab_size * model.hidden_size
    summand = 6 if device == "cpu" else 2  # in 16 bits, of which a CPU makes a copy in fp32 to add it
    return 2 * head + max(logits, 6 * rows * model.vocab_size + summand * head)


def _orthogonalization_bytes(model: GolfConfig, device: str) -> int:
    """Return what Newton-Schulz takes for the largest batch of matrices of one shape.

    An element: 4 bytes of the direction, and in the dtype of the products the matrix, two iterates and, where it is
    square, three Gram matrices.
    """
    ups = 2 if model.activation == "swiglu" else 1
    alike = model.num_hidden_layers * model.hidden_size * max(4 * model.hidden_size, ups * model.intermediate_size)
    product_bytes = 4 if device == "cpu" else 2
    return min(alike, MAX_BUCKET_ELEMENTS.get(device, DEFAULT_MAX_BUCKET_ELEMENTS)) * (4 + 6 * product_bytes)


def run_memory(
    config: RunConfig, model: GolfForCausalLM, micro_batch_size: int, num_processes: int, device: str
) -> TrainingMemory:
    """Predict the bytes that a run takes on each process: `training_memory` of a config whose precision is decided.

    model: it may lie on the meta device.
    """
    sizes = [(parameter_kind(name), p.numel()) for name, p in model.named_parameters()]
    return training_memory(
        model.config,
        parameters=sum(size for _, size in sizes),
        matrix_parameters=sum(size for kind, size in sizes if kind == "matrix"),
        batch=micro_batch_size,
        sequence=config.batch.sequence_length,
        optimizer=config.optim.name,
        ema=config.optim.has_ema,
        precision=str(config.train.mixed_precision),
        gradient_checkpointing=config.model.gradient_checkpointing,
        accumulates=micro_batch_size * num_processes < config.batch.sequences_per_step,
        cautious_weight_decay=config.optim.cautious_weight_decay,
        processes=num_processes,
        device=device,
    )


def expected_bytes(memory: TrainingMemory, device: torch.device) -> int:
    """Return the peak that a person will see of this process, once the model is built: `top`'s RES, or a GPU's tensors.

    On a CPU it is what the process holds already (Python, torch, the tokens, the weights), what training adds, and
    `fragmented_bytes`; of a run that is not compiled, which takes more (measured for two shapes).
    """
    if device.type == "cuda":
        return memory.peak
    return process_memory_bytes() + memory.peak - memory.weights + fragmented_bytes(memory)


def fragmented_bytes(memory: TrainingMemory) -> int:
    """Return what a CPU's heap takes beside what is alive in it; 0 for another C library than glibc: not measured."""
    if platform.libc_ver()[0] != "glibc":
        return 0
    of_a_step = memory.peak - memory.weights - memory.optimizer - memory.ema - memory.buckets
    return FRAGMENTED_BYTES + int(FRAGMENTED_SHARE * of_a_step)


def used_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes this process took: of the GPU's memory as allocated, or for a CPU resident in RAM.

    The latter as `top` shows it, Python and torch included; elsewhere than on Linux what it holds now.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return process_memory_bytes()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


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
    except ModuleNotFoundError:
        _say_what_is_missing()
        return None
    except RuntimeError:
        return None


@cache
def _say_what_is_missing() -> None:
    """Say it once: figures that are missing without a word look like a fault."""
    logger.warning("GPU utilization and memory are not measured: run `pip install nvidia-ml-py`")


def choose_micro_batch_size(
    config: RunConfig, model: GolfForCausalLM, num_processes: int, device: str, free_bytes: int
) -> int:
    """Return the largest micro-batch that fits in the free memory and divides tokens_per_step evenly.

    config: with its precision decided. model: it may lie on the meta device. device: cuda or cpu.
    Raises UserError where not even one sequence fits, or where the processes cannot share the sequences of a step.
    """
    batch = config.batch
    batch.accumulation_steps(1, num_processes)  # raises where no micro-batch could divide it
    budget = int(free_bytes * USABLE_SHARE)
    for size in reversed(batch.micro_batch_sizes(num_processes)):
        if device == "cpu" and size > 1 and size * batch.sequence_length > MAX_CPU_TOKENS:
            continue
        if run_memory(config, model, size, num_processes, device).peak <= budget:
            return size
    raise _too_large(config, run_memory(config, model, 1, num_processes, device), budget, "usable")


def require_room(config: RunConfig, model: GolfForCausalLM, num_processes: int, device: str, free_bytes: int) -> None:
    """Raise UserError if not even one sequence at a time fits in the free memory. model: on the meta device.

    All of what is free counts, not a share of it: only what is sure to fail is refused.
    """
    memory = run_memory(config, model, 1, num_processes, device)
    if memory.peak > free_bytes:
        raise _too_large(config, memory, free_bytes, "free")


def _too_large(config: RunConfig, memory: TrainingMemory, num_bytes: int, kind: str) -> UserError:
    return UserError(
        f"batch.micro_batch_size: not even one sequence of {config.batch.sequence_length} tokens fits: it needs"
        f" {memory.peak / 1e9:.2f} GB of {num_bytes / 1e9:.2f} GB {kind}; try model.gradient_checkpointing true, a"
        " shorter batch.sequence_length or a smaller model."
    )
