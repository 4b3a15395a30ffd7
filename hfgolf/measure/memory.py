"""Predict the memory of training from shapes, choose a micro-batch that fits, and measure memory use.

Golf has formulas, because a step on torch's fake tensors, whose peak is the same within 8 %, takes 0.5 to 8 s, and
cannot predict a GPU unless torch was built for one. For other architectures, fake_pass.py runs that step.
"""

from __future__ import annotations

import logging
import math
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
from transformers import PreTrainedModel

from hfgolf.config.sections import BatchSection, ModelSection, OptimSection, RunConfig, TrainSection
from hfgolf.measure.fake_pass import pass_bytes
from hfgolf.model.causal_blocks import NAME as CAUSAL_BLOCKS
from hfgolf.model.causal_blocks import QUERIES_PER_BLOCK
from hfgolf.model.causal_lm import takes_shift_labels
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.layers_golf import layer_order
from hfgolf.model.modeling_golf import GolfForCausalLM, default_chunk_elements
from hfgolf.optim.groups import parameter_groups, parameter_kinds
from hfgolf.optim.muon import DEFAULT_MAX_BUCKET_ELEMENTS, MAX_BUCKET_ELEMENTS
from hfgolf.optim.state import num_outputs
from hfgolf.system.errors import UserError

logger = logging.getLogger(__name__)

# The most tokens in a micro-batch on a CPU. Larger ones exceed the cache: configs/small.yaml ran forward and backward
# at 3,600, 3,360 and 3,200 tokens/s with 1,024, 2,048 and 4,096 tokens (2 cores, AVX-512, fp32, best of several steps).
MAX_CPU_TOKENS = 2048
# The same on a GPU: torch.compile unrolls the chunks of the loss. Steps with 2, 16 and 48 chunks compiled in 33, 64 and
# 147 s on two CPU cores. What it costs in speed has not been measured.
MAX_GPU_TOKENS = 2**16
# The fp32 logits of one chunk of the loss take at most this share of a GPU's memory; with all that is made of them, a
# chunk takes about three times as much. 2**29 (2 GiB) are 10,600 tokens at V = 50,257, on a card from 137 GB up.
MAX_CHUNK_SHARE = 1 / 64
MAX_CHUNK_ELEMENTS = 2**29
# The rest is for the allocator, the kernels' workspaces and other programs.
USABLE_SHARE = 0.8
# The heap that glibc loses to fragmentation: a constant, plus a share of what each step allocates and frees. The hole
# that a tensor leaves is too small for the next one of its size, because small objects settle in the rest of the block
# that posix_memalign takes (sourceware bug 30723; benchmarks/README.md). Predictions were 0.85 to 1.29 times the
# measured peak (benchmarks/memory_prediction.py).
FRAGMENTED_BYTES, FRAGMENTED_SHARE = 150_000_000, 0.6


@dataclass(frozen=True)
class TrainingMemory:
    """Predicted bytes of one process on its device, by use."""

    weights: int
    """With those of the models that teach."""
    gradients: int
    optimizer: int
    """Optimizer state."""
    ema: int
    """Moving average of the weights."""
    buckets: int
    """DDP's communication buckets: a second copy of the gradients. Under FSDP2: what is gathered during a pass."""
    casts: int
    """16-bit copies of the weights, which autocast caches in the forward pass and autograd keeps for the backward."""
    activations: int
    """Everything else that autograd keeps for the backward pass."""
    loss: int
    """One chunk of logits, its gradient, and the gradient of the head. The logits of the batch never exist."""
    backward: int
    """Temporary memory at the peak of the backward pass; includes one block's activations if they are recomputed."""
    update: int
    """Temporary memory of the optimizer step."""
    peak: int
    """Less than the sum, because activations, loss, backward pass and update do not all peak at the same time."""


def run_memory(
    config: RunConfig,
    model: PreTrainedModel,
    micro_batch_size: int,
    num_processes: int,
    device: str,
    is_sharded: bool = False,
) -> TrainingMemory:
    """Predict the bytes of training per process, without compilation (with it, autograd keeps less).

    Args:
        config: its precision must be decided.
        model: may be on the meta device, and must not be sharded yet. A weight without a gradient has no state either.
        micro_batch_size: sequences per micro-batch.
        device: cuda or cpu.
        is_sharded: whether the processes share weights, gradients, averages and state (FSDP2), not copy them (DDP); of
            Golf only.

    Weights, gradients, averages and state are fp32: 4 bytes per parameter each, and 8 for the state of AdamW, or half
    of that for a state in bf16 (Rajbhandari et al. 2020, "ZeRO", section 3.1; unlike there, 16-bit weights exist only
    during a pass). NorMuon adds 4 bytes for each row of a matrix. Under FSDP2, a pass also holds whole weights, and the
    update whole directions of Muon's matrices. Not included: a GPU's context and workspaces (about 0.5 GB) and, on a
    CPU, `fragmented_bytes`.
    """
    optim, kinds = config.optim, parameter_kinds(model)
    parameters = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for name, p in model.named_parameters() if kinds[name] == "matrix" and p.ndim == 2)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shapes = Counter[tuple[int, int]]()  # (outputs, inputs) of the trained matrices, those fused in a weight apart
    for group in parameter_groups(model, optim):
        for (_, p), split in zip(group["params"], group["splits"], strict=True):
            if group["kind"] == "matrix" and p.ndim == 2:
                outputs = num_outputs(group, p)
                shapes.update((part, p.numel() // outputs) for part in split or (outputs,))
    trained_matrices = sum(number * outputs * inputs for (outputs, inputs), number in shapes.items())
    update = rows = 0
    if optim.name == "muon":
        update = max((_bucket_bytes(shape, n, num_processes, device) for shape, n in shapes.items()), default=0)
        if optim.normuon_beta2 is not None:  # it keeps the mean square of each row
            rows = sum(number * outputs for (outputs, _), number in shapes.items())
    if isinstance(model, GolfForCausalLM):
        passes = _golf_pass(config, model, micro_batch_size, matrices, device)
    else:
        kept, peak = pass_bytes(config, model, micro_batch_size, device)
        passes, is_sharded = _Pass(0, kept, 0, peak - kept, peak), False
    if optim.cautious_weight_decay:  # a copy of the matrices, and two tensors for their change
        update = 4 * trained_matrices + max(update, 8 * trained_matrices)
    kept_numbers = {"muon": 2 * trained - trained_matrices, "adamw": 2 * trained, "sgd": trained}
    state = (2 if optim.state_dtype == "bf16" else 4) * kept_numbers[optim.name] + 4 * rows
    weights, gradients = 4 * parameters, 4 * trained
    average = weights if optim.ema_decay is not None else 0
    weights *= 1 + len(config.train.distill_from)  # as if teachers were of the same size
    buckets = in_update = gradients if num_processes > 1 else 0  # DDP's stay in the update
    if is_sharded:
        weights, gradients, state, average = (
            math.ceil(whole / num_processes) for whole in (weights, weights, state, average)
        )
        buckets, in_update = _gathered_bytes(parameters, matrices, model.config.num_hidden_layers), 0
        if optim.name == "muon":  # whole directions and updates, and the directions' shards
            # two copies of the directions: torch's fake process group keeps them, gloo does not
            update += 12 * trained_matrices + math.ceil(4 * trained_matrices / num_processes) + 4 * rows
    in_pass = passes.peak + buckets
    if micro_batch_size * num_processes < config.batch.sequences_per_step:  # earlier micro-batches
        in_pass += gradients
    peak = weights + state + average + max(in_pass, gradients + update + in_update)
    uses = passes._asdict() | {"peak": peak}
    return TrainingMemory(
        weights=weights, gradients=gradients, optimizer=state, ema=average, buckets=buckets, update=update, **uses
    )


def training_memory(
    model: GolfConfig,
    *,
    batch: int,
    sequence: int,
    accumulation: int = 1,
    processes: int = 1,
    is_sharded: bool = False,
    device: str = "cuda",
    precision: Literal["no", "bf16", "fp16"] = "no",
    checkpointing: bool = False,
    chunk_elements: int | None = None,
    **optim: Any,
) -> TrainingMemory:
    """Predict the bytes of training a Golf model per process, from its shape and the sizes of a step; see `run_memory`.

    batch: sequences per micro-batch. sequence: tokens per sequence. accumulation: micro-batches per step. device: cuda
    or cpu. chunk_elements: logits per chunk of the loss; None: what suits any card. optim: keys of the config's section
    optim, such as name="adamw". Raises UserError for a value that no config may have.
    """
    with torch.device("meta"):
        golf = GolfForCausalLM(model)
    golf.chunk_elements = chunk_elements
    config = RunConfig(
        model=ModelSection(gradient_checkpointing=checkpointing),
        batch=BatchSection(sequence_length=sequence, tokens_per_step=batch * sequence * processes * accumulation),
        optim=OptimSection(**optim),
        train=TrainSection(max_steps=1, mixed_precision=precision),
    )
    return run_memory(config, golf, batch, processes, device, is_sharded)


class _Pass(NamedTuple):
    """The bytes of one micro-batch's pass without weights and earlier gradients, by use as in TrainingMemory."""

    casts: int
    activations: int
    loss: int
    backward: int
    peak: int


def _golf_pass(config: RunConfig, model: GolfForCausalLM, batch: int, matrices: int, device: str) -> _Pass:
    """Predict a pass of Golf from its shapes. matrices: the parameters in the blocks' matrices."""
    golf, half, checkpointing = model.config, config.train.mixed_precision != "no", config.model.gradient_checkpointing
    sequence = config.batch.sequence_length
    tokens, width, order = batch * sequence, golf.hidden_size, layer_order(golf)
    kept, temporary = block_bytes(golf, sequence, half, device)
    extra = [_switch_bytes(golf, layer, half) for layer in order]
    stream = 4 * width  # bytes per token of the residual stream, which is fp32 in any precision
    norms = 1 + golf.embedding_norm  # outside the blocks
    # the inputs of these norms, and the gradient of the last output, which the loss computes in its forward pass
    ends = stream * (norms + 1 + (norms if _keeps_normed(golf, device) else 0))
    ends += _switch_bytes_outside_blocks(golf, sequence, half, checkpointing)
    activations = tokens * (len(order) * kept + sum(extra) + ends)
    backward = tokens * temporary
    casts = casts_in_backward = 2 * matrices if half else 0
    if checkpointing:
        second_lanes = sum(golf.lanes and layer >= (golf.parallel_from or 0) for layer in order)
        activations = tokens * ((len(order) + second_lanes) * stream + ends)
        backward += tokens * (kept + max(extra) - 2 * stream)
        casts_in_backward = casts // golf.num_hidden_layers  # of one block only
    head = golf.vocab_size * width
    loss = 4 * head + tokens * stream + _chunk_bytes(golf, tokens, half, device, model.chunk_elements)
    backward = max(backward + 4 * head, 8 * head + tokens * stream)
    peak = activations + max(casts + loss, casts_in_backward + backward)
    return _Pass(casts, activations, loss, backward, peak)


def _gathered_bytes(parameters: int, matrix_parameters: int, num_layers: int) -> int:
    """Return the bytes of whole tensors that FSDP2 holds during a pass, in fp32.

    All weights outside the blocks, those of a block and of the next, which is prefetched, and the gradients of a block
    until they are scattered.
    """
    block = math.ceil(matrix_parameters / num_layers)
    return 4 * (parameters - matrix_parameters + 3 * block)


def block_bytes(model: GolfConfig, sequence: int, half: bool, device: str) -> tuple[int, int]:
    """Return the bytes per token that autograd keeps for one block, and the peak of its backward pass.

    Counts what each operation needs for its derivative, each storage once, as Korthikanti et al. 2022 do ("Reducing
    activation recomputation", section 4.1). half: operands are 16-bit; the residual stream stays fp32.
    """
    width, inner, heads = model.hidden_size, model.intermediate_size, model.num_attention_heads
    keys = model.num_key_value_heads * model.head_dim
    operand = 2 if half else 4
    on_cpu, blocks = device == "cpu", model._attn_implementation == CAUSAL_BLOCKS
    copies_qk = model.qk_norm or model.position_embedding == "rope"  # else queries and keys are views of qkv

    # both norms: their input (the residual stream) and their output (the operand of the next matmul)
    kept = 2 * width * (4 + operand + (4 if _keeps_normed(model, device) else 0))
    qkv = operand * (width + 2 * keys)
    kept += 0 if blocks else qkv  # kept entirely, even if only a part is needed
    if model.qk_norm:  # fp32 under autocast; a CPU also keeps the normed values
        kept += (width + keys) * ((4 if half else 0) + (4 if on_cpu and model.norm_weight else 0))
    if copies_qk:
        kept += operand * (width + keys)
    kept += operand * width  # the output of attention, for o_proj
    if blocks:
        span = min(sequence, QUERIES_PER_BLOCK)
        kept += operand * width * (1 if copies_qk else 3)  # contiguous copies of every view: values, maybe q and k
        kept += heads * (sequence + span) // 2 * (operand + (1 + operand) * (model.attention_dropout > 0))
    elif model.attention_dropout and on_cpu:
        kept += heads * sequence * 12  # torch has no fused attention with dropout for CPUs
    elif copies_qk and (half or on_cpu):
        kept += operand * width  # attention's own copy of its output, in another layout than o_proj's
    kept += 2 * width if model.dropout else 0  # dropout masks

    if model.activation == "swiglu":
        kept += 4 * operand * inner + (operand * width if half else 0)  # up_proj and gate_proj each cast their input
        temporary = 2 * operand * inner
    else:
        kept += 2 * operand * inner
        temporary = (2 if model.activation in ("relu2", "leaky_relu2") else 1) * operand * inner
    return kept, max(temporary, 12 * width)


def _switch_bytes(model: GolfConfig, layer: int, half: bool) -> int:
    """Return the bytes per token that autograd keeps for the switches of GolfConfig in one pass through a layer.

    Measured one by one on torch's fake tensors, as operations of a CPU; those of a GPU may keep less.
    """
    width, keys, heads = model.hidden_size, model.num_key_value_heads * model.head_dim, model.num_attention_heads
    operand = 2 if half else 4
    is_parallel = model.parallel_from is not None and layer >= model.parallel_from
    bytes_of = {
        "query_gain": 4 * width if model.query_gain else 0,
        "branch_scale": 2 * operand * width if model.branch_scale else 0,
        "embedding_residual": 4 * width if model.embedding_residual else 0,
        "leaky_relu2": operand * model.intermediate_size if model.activation == "leaky_relu2" else 0,
        "attention_span": 2 * operand * width if model.attention_span == "document" else 0,
        "head_gate": operand * width + 8 * heads if model.head_gate else 0,
        "lanes": 2 * (4 if model.branch_scale else operand) * width if model.lanes and is_parallel else 0,
    }
    if layer >= model.num_hidden_layers - model.exclude_self_value:
        bytes_of["exclude_self_value"] = operand * width + (8 if half else 4) * keys + 12 * heads
    if layer >= model.num_hidden_layers - model.value_embedding_layers:
        bytes_of["value_embedding"] = 0 if half else 4 * keys
    if is_parallel and not model.lanes:  # one norm less; each branch casts what it reads
        bytes_of["parallel_from"] = -8 * width if half else -12 * width
    return sum(bytes_of.values())


def _switch_bytes_outside_blocks(model: GolfConfig, sequence: int, half: bool, checkpointing: bool) -> int:
    """Return the same for what a pass does once: skips, embeddings, the mask of documents."""
    width, skips = model.hidden_size, len(layer_order(model)) // 2
    bytes_of_skips = {None: 0, "add": 4 * width * (skips if checkpointing else 1), "gated": 8 * width * skips}
    kept = bytes_of_skips[model.unet_skips]
    kept += 8 * width if model.smear_gate else 0
    kept += (4 if half else 8) * width if model.bigram_buckets else 0
    return kept + (sequence if model.attention_span == "document" else 0)


def _keeps_normed(model: GolfConfig, device: str) -> bool:
    """Return whether a norm keeps its normed values in addition to its input. torch has no fused RMSNorm for CPUs."""
    return device == "cpu" and model.norm == "rmsnorm" and model.norm_weight


def chunk_elements(device: str, total_bytes: int) -> int:
    """Return how many logits a chunk of the loss should have on a device with so much memory: a power of two.

    Larger chunks are fewer: fewer launches, a shorter compilation, fewer additions to the gradient of the head. A CPU
    keeps the size that was measured there.
    """
    smallest = default_chunk_elements(device)
    if device == "cpu":
        return smallest
    fitting = int(total_bytes * MAX_CHUNK_SHARE) // 4
    return min(max(smallest, 1 << max(0, fitting.bit_length() - 1)), MAX_CHUNK_ELEMENTS)


def _chunk_bytes(model: GolfConfig, tokens: int, half: bool, device: str, max_elements: int | None) -> int:
    """Return the peak memory of one loss chunk: its logits, or its addition to the gradient of the head."""
    max_elements = max_elements or default_chunk_elements(device)
    rows = min(tokens, max(1, max_elements // model.vocab_size))
    previous = 4 if rows < tokens else 0  # still held from the previous chunk
    squashed = 0 if model.logit_soft_cap is None else 28 if model.soft_cap_form == "poly5" else 8
    squashed += 4 if model.logit_soft_cap_negative else 0
    logits = rows * model.vocab_size * (8 + previous + squashed)  # logits and log-softmax, both fp32
    if not half:
        return logits
    head = model.vocab_size * model.hidden_size
    summand = 6 if device == "cpu" else 2  # 16-bit; a CPU also makes an fp32 copy to add it
    return 2 * head + max(logits, 6 * rows * model.vocab_size + summand * head)


def _bucket_bytes(shape: tuple[int, int], number: int, ranks: int, device: str) -> int:
    """Return the memory of Newton-Schulz for so many matrices of a shape, or for as many as a bucket takes.

    Per element of a rank's share: 4 bytes for the direction, and in the matmul dtype the matrix and two iterates; and
    three Gram matrices of the short side. Then only direction and result are left, and the results of all ranks.
    """
    product_bytes = 4 if device == "cpu" else 2
    short, long = sorted(shape)
    in_bucket = max(1, MAX_BUCKET_ELEMENTS.get(device, DEFAULT_MAX_BUCKET_ELEMENTS) // (short * long))
    share = min(math.ceil(number / ranks), in_bucket)
    iterations = short * (long * (4 + 3 * product_bytes) + short * 3 * product_bytes)
    gathered = short * long * (4 + (1 + ranks) * product_bytes) if ranks > 1 else 0
    return share * max(iterations, gathered)


def expected_bytes(memory: TrainingMemory, device: torch.device) -> int:
    """Predict the peak that a user will see: RES in `top` on a CPU, or allocated tensors on a GPU.

    Call it after the model is built. On a CPU it is what the process already holds (Python, torch, the tokens, the
    weights), plus what training adds, plus `fragmented_bytes`. It is for an uncompiled run, which takes more memory
    (measured for two shapes).
    """
    if device.type == "cuda":
        return memory.peak
    return process_memory_bytes() + memory.peak - memory.weights + fragmented_bytes(memory)


def fragmented_bytes(memory: TrainingMemory) -> int:
    """Predict the heap lost to fragmentation on a CPU, or 0 for C libraries other than glibc (not measured)."""
    if platform.libc_ver()[0] != "glibc":
        return 0
    temporary = memory.peak - memory.weights - memory.optimizer - memory.ema - memory.buckets
    return FRAGMENTED_BYTES + int(FRAGMENTED_SHARE * temporary)


def used_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory: allocated bytes on a GPU, or resident bytes in RAM for a CPU.

    The resident bytes include Python and torch, as `top` shows them. Where the system does not say their peak, as
    outside Linux, returns the current value.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):  # not Linux, or a sandbox that leaves this line out
        return process_memory_bytes()


def process_memory_bytes() -> int:
    """Return the resident bytes of this process."""
    return psutil.Process().memory_info().rss


def gpu_utilization(device: torch.device) -> float | None:
    """Return the fraction of recent time that the GPU was busy, from NVML. None on a CPU or without nvidia-ml-py."""
    percent = _query_nvml(torch.cuda.utilization, device)
    return None if percent is None else percent / 100


def gpu_memory_bytes(device: torch.device) -> int | None:
    """Return the GPU memory in use by all processes, in bytes, from NVML. None on a CPU or without nvidia-ml-py."""
    return _query_nvml(torch.cuda.device_memory_used, device)


def _query_nvml(query: Callable[[torch.device], int], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    try:
        return query(device)
    except ModuleNotFoundError:
        _warn_that_nvml_is_missing()
        return None
    except Exception:  # NVML's own errors are no RuntimeError: not supported under MIG, vGPU or WSL
        return None


@cache
def _warn_that_nvml_is_missing() -> None:
    """Warn once, because figures that are missing without a reason look like a bug."""
    logger.warning("GPU utilization and memory are not measured; to measure them, run `pip install nvidia-ml-py`")


def choose_micro_batch_size(
    config: RunConfig,
    model: PreTrainedModel,
    num_processes: int,
    device: str,
    free_bytes: int,
    is_sharded: bool = False,
) -> int:
    """Return the largest micro-batch, in sequences, that fits in the free memory and divides tokens_per_step.

    config: its precision must be decided. model: may be on the meta device. device: cuda or cpu.
    Raises UserError if not even one sequence fits, or if the processes cannot share the sequences of a step evenly.
    """
    batch = config.batch
    batch.accumulation_steps(1, num_processes)  # raises if no micro-batch can divide the step
    budget = int(free_bytes * USABLE_SHARE)
    for size in reversed(batch.micro_batch_sizes(num_processes)):
        if size > 1 and size * batch.sequence_length > (MAX_CPU_TOKENS if device == "cpu" else MAX_GPU_TOKENS):
            continue
        if run_memory(config, model, size, num_processes, device, is_sharded).peak <= budget:
            return size
    raise _too_large(config, run_memory(config, model, 1, num_processes, device, is_sharded), budget, "usable")


def evaluation_batch_size(model: PreTrainedModel, sequence_length: int, device: str, free_bytes: int) -> int:
    """Return how many windows an evaluation runs at once: as many tokens as are fast and fit in the free memory."""
    logits = 0 if takes_shift_labels(model) else 3 * 4 * model.config.get_text_config().vocab_size  # and their softmax
    width = next(model.get_input_embeddings().parameters()).shape[1]
    per_token = logits + 100 * width  # of one layer at a time: its input, queries, keys, values and an MLP of 4 x width
    fast = MAX_CPU_TOKENS if device == "cpu" else MAX_GPU_TOKENS
    return max(1, min(fast, int(USABLE_SHARE * free_bytes) // per_token) // sequence_length)


def require_room(config: RunConfig, model: PreTrainedModel, num_processes: int, device: str, free_bytes: int) -> None:
    """Raise UserError if not even a micro-batch of one sequence fits in the free memory. model: on the meta device.

    This counts all free memory, not USABLE_SHARE of it, because it should only reject runs that are sure to fail.
    """
    memory = run_memory(config, model, 1, num_processes, device)
    if memory.peak > free_bytes:
        raise _too_large(config, memory, free_bytes, "free")


def _too_large(config: RunConfig, memory: TrainingMemory, num_bytes: int, kind: str) -> UserError:
    checkpointing = "" if config.model.gradient_checkpointing else "model.gradient_checkpointing true, "
    return UserError(
        f"batch.micro_batch_size: not even one sequence of {config.batch.sequence_length} tokens fits: it needs"
        f" {memory.peak / 1e9:.2f} GB of {num_bytes / 1e9:.2f} GB {kind}; try {checkpointing}a shorter"
        " batch.sequence_length or a smaller model."
    )
