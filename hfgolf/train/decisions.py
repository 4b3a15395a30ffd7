"""What a run makes of the keys that its config leaves open: decided once per start, before anything heavy is built.

Owns precision, threads, the tokens of an evaluation and the dtype of Muon's products, and the micro-batch, which
follows from the vocabulary. Whether to compile needs the model (compilation.py). A resumed run keeps its decisions if
this machine can. Does not know what a person said about anything else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator, DistributedType, PartialState

from hfgolf.checkpoint.identity import UNDECIDED, kept_defaults
from hfgolf.config.parse import AUTOPILOT, ResolvedConfig
from hfgolf.config.sections import RunConfig
from hfgolf.measure.memory import TrainingMemory, choose_micro_batch_size, chunk_elements, require_room, run_memory
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import (
    accelerator_name,
    cpu_cores,
    fast_product_dtype,
    free_memory_bytes,
    has_fast_fp16_only,
    missing_compiler,
    total_memory_bytes,
)
from hfgolf.system.ranks import agree, gather
from hfgolf.train.build import build_model
from hfgolf.train.launched import precision_of_accelerate
from hfgolf.train.process import local_processes, processes, share_of_cores

logger = logging.getLogger(__name__)
Precision = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True)
class Decisions(ResolvedConfig):
    """A config in which nothing is open except the micro-batch and compilation, which the run keeps.

    The source of a value that was open is "the run so far", "accelerate" or "auto".
    """

    precision: Precision


def decide(said: ResolvedConfig, before: Mapping[str, Any]) -> Decisions:
    """Decide what the config leaves open.

    before: the config of the run that this one resumes, as {"section.key": value}; {} if there is none. All ranks call
    it. Raises UserError for a precision that does not exist here.
    """
    precision, source = choose_precision(said, before.get("train.mixed_precision"))
    agree({"train.mixed_precision": precision}, "state this key")  # now: other decisions follow from it
    unstated = [key for key in AUTOPILOT if said.sources.get(key) in ("auto", "small") and key in before]
    unstated += kept_defaults(before, said)
    kept_values = {key.replace(".", "__"): before[key] for key in unstated}
    config = said.config.replace(train__mixed_precision=precision, **kept_values)
    sources = said.sources | {"train.mixed_precision": source} | dict.fromkeys(unstated, "the run so far")
    state, stated, values = processes(), config.flat(), dict[str, Any]()
    for key in (key for key, undecided in UNDECIDED.items() if stated[key] == undecided):
        name, undecided = key.replace(".", "__"), UNDECIDED[key]
        kept = before.get(key, undecided)
        if kept != undecided and not _is_possible(key, kept, config, precision, before, state):
            logger.info("%s: the run used %s, which is not possible here; deciding again", key, kept)
            kept = undecided
        if kept != undecided:
            values[name], sources[key] = kept, "the run so far"
        elif (choice := _choose(key, config, precision, state.device)) is not None:
            values[name], sources[key] = choice, "auto"
    return Decisions(config.replace(**values), sources, precision)


def choose_precision(said: ResolvedConfig, before: str | None = None) -> tuple[Precision, str]:
    """Return the precision and who chose it: the config, accelerate, the run so far, or this hardware.

    before: the precision of the run that this one resumes. Raises UserError for a precision that accelerate would
    silently ignore (fp16 on a CPU) or that does not exist here.
    """
    device = processes().device
    possible: tuple[Precision, ...] = ("no", "bf16") if device.type == "cpu" else ("no", "bf16", "fp16")
    precision: str | None = said.config.train.mixed_precision
    source = said.sources.get("train.mixed_precision", "code")
    if precision is None:
        precision, source = precision_of_accelerate(), "accelerate"
    if precision is None:
        precision, source = (before, "the run so far") if before else (_fast_precision(device), "auto")
    for each in possible:
        if each == precision:
            return each, source
    raise UserError(
        f"train.mixed_precision: {precision} (from {source}) does not run on this device, {accelerator_name()};"
        f" allowed: {', '.join(possible)}."
    )


def with_accelerate(said: ResolvedConfig) -> ResolvedConfig:
    """Return what a person said, with the precision that they told `accelerate launch`.

    Raises UserError like choose_precision.
    """
    precision, source = choose_precision(said)
    return said.resolve(source, train__mixed_precision=precision) if source == "accelerate" else said


def _fast_precision(device: torch.device) -> Precision:
    if fast_product_dtype(device) == torch.bfloat16:
        return "bf16"
    return "fp16" if has_fast_fp16_only(device) else "no"


def _choose(key: str, config: RunConfig, precision: Precision, device: torch.device) -> Any:
    """Return the value of an open key, None to leave it open."""
    match key:
        case "train.eval_tokens":
            return config.eval_tokens
        case "optim.newton_schulz_dtype":
            is_fast = precision != "no" and fast_product_dtype(device) == torch.bfloat16
            return "bf16" if is_fast else "fp32"
        case "train.cpu_threads" if device.type == "cpu":
            return share_of_cores(local_processes())
    return None


def _is_possible(
    key: str, value: Any, config: RunConfig, precision: Precision, before: Mapping[str, Any], state: PartialState
) -> bool:
    """Return whether a decision made on another machine, or for other tokens_per_step or precision, is possible here.

    before: the config that it was made for. All ranks call it.
    """
    match key:
        case "optim.newton_schulz_dtype":
            return precision == before.get("train.mixed_precision")
        case "train.cpu_threads":
            return value * local_processes() <= cpu_cores()
        case "batch.micro_batch_size":
            return value in config.batch.micro_batch_sizes(state.num_processes)
        case "train.compile":
            return all(gather(not value or missing_compiler(state.device) is None))
    return True


def choose_micro_batch(
    config: RunConfig, vocab_size: int, accelerator: Accelerator, frozen: list[str], loss_elements: int
) -> tuple[int, TrainingMemory]:
    """Return the micro-batch size, chosen if it is open, and the memory that training needs with it.

    config: to build the model from, which exists on the meta device only. loss_elements: see `share_loss_elements`.
    All ranks call it. Raises UserError if the model cannot fit even with one sequence at a time.
    """
    count, device = accelerator.num_processes, accelerator.device
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    with torch.device("meta"), torch.random.fork_rng([]):
        model = build_model(config, vocab_size, device.type, frozen)
    if isinstance(model, GolfForCausalLM):
        model.chunk_elements = loss_elements
    free = free_bytes(device)
    if not is_sharded:  # the prediction has not been measured there, so it must not refuse a run
        require_room(config, model, count, device.type, free)
    stated = config.batch.micro_batch_size
    if isinstance(stated, int):
        size = stated
    else:  # what fits on the rank with the least free memory
        size = min(gather(choose_micro_batch_size(config, model, count, device.type, free, is_sharded)))
    return size, run_memory(config, model, size, count, device.type, is_sharded)


def share_loss_elements(device: torch.device) -> int:
    """Return the most logits in a chunk of Golf's loss: the same on all ranks, so that they round alike."""
    return min(gather(chunk_elements(device.type, total_memory_bytes(device))))


def free_bytes(device: torch.device) -> int:
    """Return the free bytes for this process. On a CPU, the processes of this machine share the memory."""
    return free_memory_bytes(device) // (1 if device.type == "cuda" else local_processes())
