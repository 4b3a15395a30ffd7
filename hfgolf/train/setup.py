"""Build everything the loop needs from a config, in six phases: claim, resolve, load data, build, restore, start.

Owns the order of these phases, and the order matters: precision and threads before the Accelerator, seeds before the
model, the optimizer before `prepare`, the checkpoint after it.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hfgolf.checkpoint.contents import Checkpointer
from hfgolf.checkpoint.identity import (
    check_config,
    check_text,
    check_tokenizer,
    keep_decisions,
    read_identity,
    run_identity,
)
from hfgolf.checkpoint.state import TrainState
from hfgolf.checkpoint.store import check_resume, choose_checkpoint, clean_up
from hfgolf.config.parse import ResolvedConfig
from hfgolf.config.sections import RunConfig
from hfgolf.data.batches import num_blocks
from hfgolf.data.corpus import load_corpus, text_name
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import embedding_rows, keep_old_documents, text_start
from hfgolf.measure.flops import training_flops_per_token
from hfgolf.measure.memory import (
    choose_micro_batch_size,
    chunk_elements,
    expected_bytes,
    fragmented_bytes,
    require_room,
    run_memory,
)
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.ema import Ema
from hfgolf.optim.groups import build_optimizer, group_rows, group_table
from hfgolf.optim.layout import layout
from hfgolf.publish.export import supporting_files
from hfgolf.publish.load import load_config
from hfgolf.run.folder import RunFolder, run_folder
from hfgolf.run.metrics import MetricsFile
from hfgolf.run.provenance import run_metadata, uncommitted_changes
from hfgolf.system.errors import UserError, writing
from hfgolf.system.hardware import (
    accelerator_name,
    cpu_cores,
    fast_product_dtype,
    fingerprint,
    free_memory_bytes,
    has_fast_fp16_only,
    peak_flops,
    total_memory_bytes,
)
from hfgolf.system.ranks import agree, first_of_machine, gather
from hfgolf.system.signals import Signals
from hfgolf.system.stopwatch import Stopwatch
from hfgolf.system.wording import count_of, gigabytes, labeled
from hfgolf.train.architectures import other_config
from hfgolf.train.attention_probe import describe_attention
from hfgolf.train.build import build_model, check_golf
from hfgolf.train.claim import agree_on_config, claim
from hfgolf.train.clock import Clock, step_limit
from hfgolf.train.compilation import choose_compilation, has_compiler, warm_up
from hfgolf.train.console import console
from hfgolf.train.feed import is_out_of_memory, start_batches
from hfgolf.train.hooks import Hooks
from hfgolf.train.init_from import frozen_names, keep_architecture, load_old_text, load_weights, take_architecture
from hfgolf.train.meter import Meter
from hfgolf.train.process import (
    processes,
    processes_asked_of_accelerate,
    resolve_precision,
    seed_everything,
    set_cpu_threads,
    trim_memory,
    tune_memory,
)
from hfgolf.train.run import Run
from hfgolf.train.validation import describe_validation

logger = logging.getLogger(__name__)


def set_up(
    resolved: ResolvedConfig,
    hooks: Hooks | None = None,
    signals: Signals | None = None,
    stopwatch: Stopwatch | None = None,
) -> Run:
    """Build a run: folder, data, model, optimizer. Resume from a checkpoint if train.resume says so.

    signals and stopwatch: of the session; None: there is none. Raises UserError for a problem that the user can fix; an
    earlier run in the folder is not harmed.
    """
    check_golf(resolved.config)
    stopwatch = stopwatch or Stopwatch(console.switch)
    folder, origin = _claim(resolved)
    resolved, accelerator = _resolve(resolved, origin)
    tokens = _load_tokens(resolved, accelerator, origin)
    run = _build(resolved, accelerator, tokens, folder, origin, stopwatch, hooks or Hooks())
    _restore(run, origin)
    _start(run, origin, signals or Signals())
    return run


@dataclass
class _Origin:
    """The checkpoint that a run resumes from."""

    checkpoint: Path
    identity: dict[str, Any]
    changes: list[str] = field(default_factory=list)
    """What this run changes, as "key old -> new"."""

    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """Return the tokenizer that the weights belong to."""
        if not (self.checkpoint / "tokenizer.json").is_file():
            return None
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.checkpoint)
        keep_old_documents(tokenizer)
        return tokenizer


def _claim(resolved: ResolvedConfig) -> tuple[RunFolder, _Origin | None]:
    """Phase 1: claim the run's folder, and find the checkpoint to resume from."""
    folder, which = run_folder(resolved.config), resolved.config.train.resume
    check_resume(folder.checkpoints, which)
    if processes().is_main_process:
        claim(folder, resolved)
        clean_up(folder.checkpoints)
    checkpoint = choose_checkpoint(folder.checkpoints, which) if which else None
    return folder, _Origin(checkpoint, read_identity(checkpoint)) if checkpoint else None


def _resolve(resolved: ResolvedConfig, origin: _Origin | None) -> tuple[ResolvedConfig, Accelerator]:
    """Phase 2: decide precision and threads (a resumed run keeps its own), and set up this process."""
    before, device = origin.identity["config"] if origin else {}, processes().device
    agree_on_config(resolved.config)
    agree({"the checkpoint": origin.identity if origin else None}, "all ranks must resume from the same one")
    resolved = resolve_precision(resolved, before.get("train.mixed_precision"))
    agree_on_config(resolved.config)  # now, because other decisions follow from the precision
    resolved = keep_decisions(resolved, before, partial(_is_possible, resolved, before))
    resolved = keep_architecture(resolved, before) if origin else take_architecture(resolved)
    if resolved.config.train.eval_tokens == "auto":
        resolved = resolved.resolve("auto", train__eval_tokens=resolved.config.eval_tokens)
    if resolved.config.optim.newton_schulz_dtype == "auto":
        is_bf16 = resolved.config.train.mixed_precision != "no" and fast_product_dtype(device) == torch.bfloat16
        resolved = resolved.resolve("auto", optim__newton_schulz_dtype="bf16" if is_bf16 else "fp32")
    if device.type == "cpu":
        threads = set_cpu_threads(resolved.config.train.cpu_threads, _local_processes())
        if resolved.config.train.cpu_threads == "auto":
            resolved = resolved.resolve("auto", train__cpu_threads=threads)
        tune_memory(resolved.config)
    if resolved.config.model.architecture != "golf" and not origin:
        other_config(resolved.config, vocab_size=1)  # raises if it is wrong, before any data is read
    accelerator = _build_accelerator(resolved.config)
    if origin:
        origin.changes += check_config(origin.checkpoint.name, before, resolved)
    batch = resolved.config.batch
    stated_size = 1 if batch.micro_batch_size == "auto" else batch.micro_batch_size
    batch.accumulation_steps(stated_size, accelerator.num_processes)  # raises if it does not divide
    agree_on_config(resolved.config)  # with what this process decided by itself
    _log_environment(accelerator, resolved)
    seed_everything(resolved.config.run.seed, resolved.config.train.deterministic)
    return resolved, accelerator


def _is_possible(resolved: ResolvedConfig, before: dict[str, Any], key: str, value: Any) -> bool:
    """Return whether a decision made on another machine, or for other tokens_per_step or precision, is possible here.

    before: the config that it was made for.
    """
    match key:
        case "optim.newton_schulz_dtype":
            return resolved.config.train.mixed_precision == before.get("train.mixed_precision")
        case "train.cpu_threads":
            return value * _local_processes() <= cpu_cores()
        case "batch.micro_batch_size":
            return value in resolved.config.batch.micro_batch_sizes(processes().num_processes)
        case "train.compile":
            return all(gather(not value or has_compiler(processes().device)))
    return True


def _build_accelerator(config: RunConfig) -> Accelerator:
    already = AcceleratorState._shared_state.get("_mixed_precision")  # of an Accelerator of the user's own
    if already not in (None, config.train.mixed_precision):
        raise UserError(
            f"train.mixed_precision: this process computes in {already} and cannot change to"
            f" {config.train.mixed_precision}; restart it (the kernel of a notebook), or keep {already}."
        )
    return Accelerator(
        mixed_precision=config.train.mixed_precision,
        # the loader is not accelerate's, so its end must not force a sync; _choose_micro_batch sets the real num_steps
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],  # no copy of the gradients
        log_with=list(config.track.trackers) or None,
        project_dir=str(run_folder(config).path),
    )


def bucket_megabytes(model: PreTrainedModel) -> int:
    """Return the size of DDP's buckets: a quarter of the gradients, but not less than its default.

    torch.compile cuts the model into one graph per bucket, 13 for GPT-2 124M with the default. With four, the exchange
    still overlaps with the backward pass, except the bucket with the embedding, whose gradients come last in any case.
    """
    gradient_bytes = 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return max(DistributedDataParallelKwargs.bucket_cap_mb, math.ceil(gradient_bytes / 2**20 / 4))


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _log_environment(accelerator: Accelerator, resolved: ResolvedConfig) -> None:
    config = resolved.config
    threads = count_of(int(config.train.cpu_threads), "thread") if accelerator.device.type == "cpu" else ""
    processes = "" if accelerator.num_processes == 1 else f"{accelerator.num_processes} processes"
    of_each = " of ".join(filter(None, (processes, threads)))
    precision, source = config.train.mixed_precision, resolved.sources["train.mixed_precision"]
    if source == "auto":
        source = "fast on this hardware" if precision != "no" else "bf16 is not fast on this hardware"
        if precision != os.environ.get("ACCELERATE_MIXED_PRECISION", precision):
            source += f"; accelerate's {os.environ['ACCELERATE_MIXED_PRECISION']} is only its default"
    shown = f"{'fp32' if precision == 'no' else precision} ({source})"
    logger.info("%s", labeled("device", ", ".join(filter(None, (accelerator_name(), of_each, shown)))))
    asked = processes_asked_of_accelerate() or 1
    if asked > 1 and accelerator.num_processes == 1:
        logger.warning(
            "accelerate was told to start %d processes, but on a CPU `accelerate launch` starts one; for %d, start with"
            " `torchrun --nproc_per_node %d -m hfgolf train`",
            *[asked] * 3,
        )
    if (precision, source) == ("no", "accelerate") and fast_product_dtype(accelerator.device) == torch.bfloat16:
        logger.warning(
            "precision: accelerate's mixed_precision no means fp32; bf16 is fast on this machine:"
            " --train.mixed_precision bf16"
        )
    if precision == "bf16" and has_fast_fp16_only(accelerator.device):
        logger.warning("precision: this GPU only emulates bf16; --train.mixed_precision fp16 is several times faster")


def _load_tokens(resolved: ResolvedConfig, accelerator: Accelerator, origin: _Origin | None) -> TokenCache:
    """Phase 3: load the text as tokens. A resumed run uses the tokenizer of its checkpoint."""
    config = resolved.config
    console.now("tokenizing")
    with first_of_machine():
        corpus = load_corpus(config.data)
        if origin:
            origin.changes += check_text(origin.checkpoint.name, origin.identity["corpus"], corpus.identity, resolved)
        tokens = load_tokens(config.data, config.tokenizer, corpus, origin.tokenizer() if origin else None)
        if origin:
            check_tokenizer(origin.checkpoint.name, origin.identity["tokenizer_sha256"], tokens.tokenizer_sha256)
    agree(
        {
            **{f"data: {key}": value for key, value in tokens.identity.items()},
            "the tokenizer's sha256": tokens.tokenizer_sha256,
            "the number of train tokens": len(tokens.train),
        },
        "all machines must read the same text with the same tokenizer",
    )
    counts = f"{len(tokens.train):,} train and {len(tokens.val):,} validation tokens"
    how = f"{config.tokenizer.kind} {embedding_rows(tokens.tokenizer):,}{', cached' if tokens.is_hit else ''}"
    logger.info("%s", labeled("data", f"{text_name(config.data)}: {counts} ({how})"))
    num_blocks(len(tokens.train), config.batch.sequence_length)  # raises if there is not one block
    tokens.tokenizer.model_max_length = config.max_positions
    return tokens


def _build(
    resolved: ResolvedConfig,
    accelerator: Accelerator,
    tokens: TokenCache,
    folder: RunFolder,
    origin: _Origin | None,
    stopwatch: Stopwatch,
    hooks: Hooks,
) -> Run:
    """Phase 4: build the model, optimizer, EMA and checkpointer. Nothing is loaded from a checkpoint yet."""
    console.now("building the model")
    building = _building_config(resolved.config, origin)
    frozen = origin.identity.get("frozen", []) if origin else frozen_names(resolved.config)
    _require_room(building, embedding_rows(tokens.tokenizer), accelerator, frozen)
    raw_model = _build_model(building, tokens, accelerator.device, frozen)
    if accelerator.distributed_type == DistributedType.FSDP and not isinstance(raw_model, GolfForCausalLM):
        name = resolved.config.model.architecture
        raise UserError(f"model.architecture: {name} does not train under FSDP2, only golf does; start without it.")
    if accelerator.distributed_type == DistributedType.FSDP and resolved.config.optim.state_dtype != "fp32":
        raise UserError(
            "optim.state_dtype: under FSDP2, which shards the state, it must be fp32; set it, or leave out"
            " train.low_memory."
        )
    init_from = origin.identity.get("init_from") if origin else None
    if resolved.config.model.init_from is not None and not origin:
        init_from = load_weights(resolved.config, raw_model, tokens)
    resolved, predicted_memory_bytes = _choose_micro_batch(resolved, raw_model, accelerator)
    config = resolved.config
    optimizer = build_optimizer(raw_model.named_parameters(), config.optim, **layout(raw_model))
    logger.debug("%s", group_table(optimizer))
    support = supporting_files(raw_model, tokens.tokenizer) if accelerator.is_main_process else {}
    gather(None)  # no rank waits in a collective of `prepare` for one that has failed
    accelerator.ddp_handler.bucket_cap_mb = bucket_megabytes(raw_model)
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    torch.manual_seed(config.run.seed + accelerator.process_index)  # dropout must differ between ranks
    state = TrainState(loop_active=getattr(raw_model.config, "loop_active", True))
    decay = config.optim.ema_decay
    ema = Ema(raw_model.named_parameters(), decay) if decay is not None else None
    checkpoints = Checkpointer(
        accelerator,
        folder.checkpoints,
        raw_model,
        optimizer,
        state,
        ema,
        config.train.keep_last,
        run_identity(resolved, tokens.identity, tokens.tokenizer_sha256, init_from, frozen),
        support,
    )
    metrics = MetricsFile(folder.metrics) if accelerator.is_main_process else None
    return Run(
        resolved,
        folder,
        accelerator,
        tokens,
        raw_model,
        model,
        optimizer,
        ema,
        state,
        checkpoints,
        stopwatch,
        hooks,
        metrics,
        predicted_memory_bytes,
    )


def _building_config(config: RunConfig, origin: _Origin | None) -> RunConfig:
    """Return the config to build the model from. A resumed run finds another architecture in its checkpoint."""
    if config.model.architecture == "golf" or not origin:
        return config
    saved = str(origin.checkpoint)
    kind = load_config(saved, "train.resume").model_type
    return config.replace(model__architecture=kind, model__init_from=saved)


def _require_room(config: RunConfig, vocab_size: int, accelerator: Accelerator, frozen: list[str]) -> None:
    """Raise UserError, before allocating the model, if it cannot fit even with one sequence at a time."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return  # the prediction has not been measured there, so it must not refuse a run
    device = accelerator.device
    with torch.device("meta"), torch.random.fork_rng([]):
        model = build_model(config, vocab_size, device.type, frozen)
    require_room(config, model, accelerator.num_processes, device.type, _free_bytes(device))


def _free_bytes(device: torch.device) -> int:
    """Return the free bytes for this process. On a CPU, the processes of this machine share the memory."""
    return free_memory_bytes(device) // (1 if device.type == "cuda" else _local_processes())


def _build_model(config: RunConfig, tokens: TokenCache, device: torch.device, frozen: list[str]) -> PreTrainedModel:
    eos, bos = tokens.tokenizer.eos_token_id, config.data.separator_id
    bos = text_start(tokens.tokenizer)[0] if bos is None else bos  # what begins a document
    token_ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    model = build_model(config, embedding_rows(tokens.tokenizer), device.type, frozen, **token_ids)
    if isinstance(model, GolfForCausalLM):  # the same on all ranks, so that they round alike
        model.chunk_elements = min(gather(chunk_elements(device.type, total_memory_bytes(device))))
    elif not model.head_is_plain:
        logger.info("loss: from the logits of the whole micro-batch, because of what is between them and the head")
    return model


def _choose_micro_batch(
    resolved: ResolvedConfig, model: PreTrainedModel, accelerator: Accelerator
) -> tuple[ResolvedConfig, int]:
    """Choose the micro-batch size if it is auto, and set the accelerator's accumulation accordingly.

    Returns the config with the micro-batch size, and the predicted peak memory of this process in bytes.
    """
    config, count, device = resolved.config, accelerator.num_processes, accelerator.device
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    if config.batch.micro_batch_size == "auto":
        size = choose_micro_batch_size(config, model, count, device.type, _free_bytes(device), is_sharded)
        size = min(gather(size))  # what fits on the rank with the least free memory
        resolved = resolved.resolve("auto", batch__micro_batch_size=size)
    size = int(resolved.config.batch.micro_batch_size)
    accumulation = config.batch.accumulation_steps(size, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = accumulation
    memory = run_memory(resolved.config, model, size, count, device.type, is_sharded)
    predicted = expected_bytes(memory, accelerator.device)
    parts = ""
    if accelerator.device.type != "cuda":
        fragmented = fragmented_bytes(memory)
        rest = gigabytes(predicted - memory.peak - fragmented)
        parts = f": {gigabytes(memory.peak)} for training, {rest} for Python, its libraries and the tokens,"
        parts += f" {gigabytes(fragmented)} lost to fragmentation of the heap"
    kind = "" if isinstance(model, GolfForCausalLM) else f"{type(model).__name__}, "
    layers, width = (getattr(model.config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    shape = f", {count_of(layers, 'layer')} of width {width}" if layers and width else ""
    needs = f"about {gigabytes(predicted)} of memory{' per process' * (count > 1)}"
    parameters = f"{model.num_parameters():,} parameters"
    if still := model.num_parameters() - model.num_parameters(only_trainable=True):
        parameters += f" ({still:,} of them frozen)"
    logger.info("%s", labeled("model", f"{kind}{parameters}{shape}; {needs}"))
    factors = [count_of(size, "sequence"), f"{config.batch.sequence_length:,} tokens"]
    factors += [f"{accumulation} micro-batches"] if accumulation > 1 else []
    factors += [f"{count} processes"] if count > 1 else []
    logger.info("%s", labeled("batch", f"{config.batch.tokens_per_step:,} tokens per step = {' x '.join(factors)}"))
    logger.debug("memory: predicted peak %s per process%s", gigabytes(predicted), parts)
    return resolved, predicted


def _restore(run: Run, origin: _Origin | None) -> None:
    """Phase 5: load the checkpoint, if there is one, and allocate what the first step and the first save need."""
    if run.accelerator.is_main_process:
        run.folder.mark_incomplete()
    if origin:
        run.checkpoints.load(origin.checkpoint)
        run.stopwatch.carry_over(run.state.seconds)
        logger.info("resumed from %s at step %d", origin.checkpoint, run.state.step)
        if origin.changes:
            logger.info("changed since then: %s", ", ".join(origin.changes))
    elif run.config.train.resume:
        logger.debug("no checkpoint to resume from; starting the run")
    try:
        run.optimizer.optimizer.create_state()  # before the warm-up pass, which tests whether everything fits
        run.checkpoints.reserve()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free = gigabytes(_free_bytes(run.accelerator.device))
        raise UserError(
            f"memory: not enough for the optimizer's state, {free} are free; set train.low_memory or a smaller"
            " model.hidden_size, or end other programs."
        ) from None


def _start(run: Run, origin: _Origin | None, signals: Signals) -> None:
    """Phase 6: say when the run ends, start the hooks, record how it was started, compile, and start the loader."""
    config, accelerator, state = run.config, run.accelerator, run.state
    with first_of_machine():
        run.old_text = load_old_text(config, run.tokens)
    run.first_step = state.step
    blocks_per_epoch = num_blocks(len(run.tokens.train), config.batch.sequence_length)
    run.step_limit = step_limit(config.train, config.batch, blocks_per_epoch, state)
    processes, is_main = accelerator.num_processes, accelerator.is_main_process
    gather(None)  # as before `prepare`
    run.clock = Clock(config.train, state, run.stopwatch, signals, run.step_limit, processes, is_main)
    run.meter = _build_meter(config, run.raw_model, accelerator, run.stopwatch)
    run.restart_hooks()
    if origin:
        run.event("resumed", changed=origin.changes, begins_data=not state.blocks)
    choose_compilation(run)
    with writing("run.output_dir", run.folder.path):
        write_description(run)
    logger.info("%s", labeled("evaluate", describe_validation(run)))
    logger.debug("attention: %s", describe_attention(run.raw_model, accelerator, config.batch.sequence_length))
    gather(None)  # as before `prepare`
    warm_up(run)
    if accelerator.device.type == "cpu":
        trim_memory()
    start_batches(run)
    gather(None)


def _build_meter(config: RunConfig, model: PreTrainedModel, accelerator: Accelerator, stopwatch: Stopwatch) -> Meter:
    flops = training_flops_per_token(model, config.batch.sequence_length)
    peak = peak_flops(accelerator.device, str(config.train.mixed_precision)) * accelerator.num_processes
    tokens_per_step, max_grad_norm = config.batch.tokens_per_step, config.train.max_grad_norm
    return Meter(accelerator.device, tokens_per_step, flops / peak, stopwatch, max_grad_norm)


def write_description(run: Run) -> None:
    """Write what is needed to repeat this start of the run: config, metadata and a patch of uncommitted changes."""
    if not run.accelerator.is_main_process:
        return
    # without the resume keys, so that the file repeats the run from its beginning
    stated = run.resolved.config.replace(train__resume=None, train__resume_with_other=None)
    config_yaml = ResolvedConfig(stated, run.resolved.sources).to_yaml()
    if run.first_step:
        note = f"# The run resumed from step {run.first_step} with this config; starts/ has one config per start."
        config_yaml = f"{note}\n{config_yaml}"
    metadata = run_metadata(run.resolved, fingerprint()) | {"init_from": run.init_from}
    metadata["corpus"] = run.checkpoints.identity["corpus"]
    metadata["parameter_groups"] = group_rows(run.optimizer)
    run.folder.describe_start(config_yaml, metadata, uncommitted_changes())
