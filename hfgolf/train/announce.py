"""What the start of a run says to people: the device, the model, the batch, and if nothing is left to train."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from hfgolf.config.mixture import describe_stages
from hfgolf.config.sections import BatchSection
from hfgolf.measure.memory import TrainingMemory, expected_bytes
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.system.hardware import accelerator_name, fast_product_dtype, has_fast_fp16_only
from hfgolf.system.wording import count_of, epochs, gigabytes, join_words, labeled
from hfgolf.train.decisions import Decisions
from hfgolf.train.feed import blocks_per_epoch, read_of_each
from hfgolf.train.launched import processes_asked_of_accelerate

if TYPE_CHECKING:
    from hfgolf.train.run import Run

logger = logging.getLogger(__name__)


def announce_device(decisions: Decisions, accelerator: Accelerator) -> None:
    """Say what computes and in which precision, and warn if another choice is much faster."""
    threads = torch.get_num_threads()
    processes = "" if accelerator.num_processes == 1 else f"{accelerator.num_processes} processes"
    of_each = [processes, count_of(threads, "thread")] if accelerator.device.type == "cpu" else [processes]
    precision, source = decisions.precision, decisions.sources["train.mixed_precision"]
    reason = source
    if source == "auto":
        reason = "fast on this hardware" if precision != "no" else "bf16 is not fast on this hardware"
        if precision != os.environ.get("ACCELERATE_MIXED_PRECISION", precision):
            reason += f"; accelerate's {os.environ['ACCELERATE_MIXED_PRECISION']} is only its default"
    shown = f"{'fp32' if precision == 'no' else precision} ({reason})"
    count = " of ".join(filter(None, of_each))
    logger.info("%s", labeled("device", ", ".join(filter(None, (accelerator_name(), count, shown)))))
    asked = processes_asked_of_accelerate() or 1
    if asked > 1 and accelerator.num_processes == 1:
        logger.warning(
            "accelerate was told to start %d processes, but on a CPU `accelerate launch` starts one; for %d, start with"
            " `torchrun --nproc_per_node %d -m hfgolf train`",
            *[asked] * 3,
        )
    gpus = torch.cuda.device_count() if accelerator.device.type == "cuda" else 1
    if accelerator.num_processes == 1 and gpus > 1:
        advice = f"`accelerate launch --num_processes {gpus} -m hfgolf train`"
        logger.warning("device: one of %d GPUs trains; for all of them, start with %s", gpus, advice)
    if (precision, source) == ("no", "accelerate") and fast_product_dtype(accelerator.device) == torch.bfloat16:
        logger.warning(
            "precision: accelerate's mixed_precision no means fp32; bf16 is fast on this machine:"
            " --train.mixed_precision bf16"
        )
    if precision == "bf16" and has_fast_fp16_only(accelerator.device):
        logger.warning("precision: this GPU only emulates bf16; --train.mixed_precision fp16 is several times faster")


def announce_model(
    model: PreTrainedModel,
    batch: BatchSection,
    micro_batch_size: int,
    accelerator: Accelerator,
    memory: TrainingMemory,
) -> None:
    """Say how large the model is, what memory it needs, and how a step is divided."""
    count, predicted = accelerator.num_processes, expected_bytes(memory, accelerator.device)
    kind = "" if isinstance(model, GolfForCausalLM) else f"{type(model).__name__}, "
    layers, width = (getattr(model.config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    shape = f", {count_of(layers, 'layer')} of width {width}" if layers and width else ""
    needs = f"about {gigabytes(predicted)} of memory{' per process' * (count > 1)}"
    parameters = f"{model.num_parameters():,} parameters"
    if still := model.num_parameters() - model.num_parameters(only_trainable=True):
        parameters += f" ({still:,} of them frozen)"
    logger.info("%s", labeled("model", f"{kind}{parameters}{shape}; {needs}"))
    accumulation = batch.accumulation_steps(micro_batch_size, count)
    factors = [count_of(micro_batch_size, "sequence"), f"{batch.sequence_length:,} tokens"]
    factors += [f"{accumulation} micro-batches"] if accumulation > 1 else []
    factors += [f"{count} processes"] if count > 1 else []
    logger.info("%s", labeled("batch", f"{batch.tokens_per_step:,} tokens per step = {' x '.join(factors)}"))


def announce_mixture(run: Run) -> None:
    """Say of each text of a mixture how large it is, its share, and how often the run will have read it."""
    last_step = None if run.step_limit == math.inf else run.step_limit
    read, shares = read_of_each(run, last_step), describe_stages(run.config.data.mixture)
    for (name, (_, passes)), text, share in zip(read.items(), run.tokens.texts.values(), shares, strict=True):
        num_bytes = f", {text.train.num_bytes:,} bytes" if text.train.num_bytes else ""  # of shards, nobody counts them
        last = "" if last_step is None else f"; {epochs(passes)} by the last step"
        logger.info("%s", labeled("text", f"{name}: {len(text.train):,} tokens{num_bytes}; {share}{last}"))


def announce_end(run: Run) -> None:
    """Say that a resumed run has nothing left to train, which of its limits it has reached, and what to do."""
    state, train = run.state, run.config.train
    done = {"max_steps": state.step, "max_tokens": state.tokens, "max_minutes": state.elapsed_seconds / 60}
    done["max_epochs"] = state.blocks / blocks_per_epoch(run)
    limits = ((f"train.{key}", getattr(train, key), count) for key, count in done.items())
    sources = run.decisions.sources
    ended = [f"{key} {limit:,} ({sources.get(key)})" for key, limit, count in limits if limit and count >= limit]
    advice = "state more, or choose another --run.name to begin anew"
    logger.warning("nothing is left to train: the run has reached %s; %s", join_words(ended), advice)
