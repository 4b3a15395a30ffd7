"""Build everything the loop needs from a config: claim, decide, set up, load data, build, restore, start.

Owns the order of these phases, and the order matters: precision and threads before the Accelerator, seeds before the
model, the optimizer before `prepare`, the checkpoint after it.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hfgolf.checkpoint.contents import Checkpointer
from hfgolf.checkpoint.identity import check_config, check_text, check_tokenizer, read_identity, run_identity
from hfgolf.checkpoint.state import TrainState
from hfgolf.checkpoint.store import check_resume, choose_checkpoint, clean_up
from hfgolf.config.parse import ResolvedConfig
from hfgolf.config.sections import RunConfig
from hfgolf.data.batches import MicroBatches
from hfgolf.data.corpus import load_corpus, text_name
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import embedding_rows, keep_old_documents, text_start
from hfgolf.measure.flops import training_flops_per_token
from hfgolf.measure.memory import expected_bytes
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.ema import Ema
from hfgolf.optim.groups import build_optimizer, group_rows
from hfgolf.publish.export import supporting_files
from hfgolf.publish.load import load_model_config
from hfgolf.run.folder import RunFolder, run_folder
from hfgolf.run.metrics import MetricsFile
from hfgolf.run.provenance import run_metadata, uncommitted_changes
from hfgolf.system.errors import UserError, writing
from hfgolf.system.hardware import peak_flops
from hfgolf.system.ranks import agree, first_of_machine, gather
from hfgolf.system.signals import Signals
from hfgolf.system.stopwatch import Stopwatch
from hfgolf.system.wording import gigabytes, labeled
from hfgolf.train.announce import announce_device, announce_end, announce_mixture, announce_model
from hfgolf.train.attention_probe import describe_attention
from hfgolf.train.autopilot import choose
from hfgolf.train.build import build_model, check_golf, check_other
from hfgolf.train.claim import agree_on_config, claim
from hfgolf.train.clock import Clock, step_limit
from hfgolf.train.compilation import choose_compilation, warm_up
from hfgolf.train.console import console
from hfgolf.train.decisions import Decisions, choose_micro_batch, decide, free_bytes, share_loss_elements
from hfgolf.train.feed import blocks_per_epoch, is_out_of_memory, start_batches
from hfgolf.train.hooks import Hooks
from hfgolf.train.init_from import (
    frozen_names,
    keep_architecture,
    load_old_text,
    load_weights,
    named_by_weights,
    take_architecture,
)
from hfgolf.train.meter import Meter
from hfgolf.train.process import processes, seed_everything, trim_memory, tune_memory
from hfgolf.train.run import Run
from hfgolf.train.validation import describe_validation

logger = logging.getLogger(__name__)


def set_up(
    said: ResolvedConfig,
    hooks: Hooks | None = None,
    signals: Signals | None = None,
    stopwatch: Stopwatch | None = None,
    may_teach: bool = False,
) -> Run:
    """Build a run: folder, data, model, optimizer. Resume from a checkpoint if train.resume says so.

    said: the config of a person, which this start completes (decisions.py). signals and stopwatch: of the session;
    None: there is none. may_teach: as of autopilot.choose. Raises UserError for a problem that the user can fix; an
    earlier run in the folder is not harmed.
    """
    check_golf(said.config)
    stopwatch = stopwatch or Stopwatch(console.switch)
    folder, origin = _claim(said)
    try:
        decisions = _decide(said, origin)
        accelerator = _set_up_process(decisions)
        if decisions.is_open:
            console.now("timing steps")
            chosen = choose(decisions, accelerator.device, accelerator.num_processes, may_teach)
            for line in chosen.lines:
                logger.info("%s", line)
            decisions = _decide(said.resolve("auto", **chosen.values), origin)
        with named_by_weights(decisions):
            tokens = _load_tokens(decisions.config, origin)
        run = _build(decisions, accelerator, tokens, folder, origin, stopwatch, hooks or Hooks())
        _restore(run, origin)
        _start(run, origin, signals or Signals())
    except BaseException:
        folder.abandon()
        raise
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


def _claim(said: ResolvedConfig) -> tuple[RunFolder, _Origin | None]:
    """Phase 1: claim the run's folder, and find the checkpoint to resume from."""
    folder, which = run_folder(said.config), said.config.train.resume
    check_resume(folder.checkpoints, which)
    if processes().is_main_process:
        claim(folder, said)
        clean_up(folder.checkpoints)
    checkpoint = choose_checkpoint(folder.checkpoints, which) if which else None
    return folder, _Origin(checkpoint, read_identity(checkpoint)) if checkpoint else None


def _decide(said: ResolvedConfig, origin: _Origin | None) -> Decisions:
    """Phase 2: complete the config by the weights that the run starts from, and decide what it leaves open."""
    before = origin.identity["config"] if origin else {}
    agree_on_config(said.config)
    agree({"the checkpoint": origin.identity if origin else None}, "all ranks must resume from the same one")
    whole = keep_architecture(said, before) if origin else take_architecture(said)
    if whole.config.model.architecture != "golf" and not origin:
        check_other(whole.config)
    decisions = decide(whole, before)
    agree_on_config(decisions.config)  # with what this process decided by itself
    if origin:
        origin.changes += check_config(origin.checkpoint.name, before, decisions)
    return decisions


def _set_up_process(decisions: Decisions) -> Accelerator:
    """Phase 3: threads, memory, precision and seeds of this process."""
    config, threads = decisions.config, decisions.config.train.cpu_threads
    if isinstance(threads, int) and processes().device.type == "cpu":
        torch.set_num_threads(threads)
        tune_memory(config)
    accelerator = _build_accelerator(config)
    announce_device(decisions, accelerator)
    seed_everything(config.run.seed, config.train.deterministic)
    return accelerator


def _build_accelerator(config: RunConfig) -> Accelerator:
    already = AcceleratorState._shared_state.get("_mixed_precision")  # of an Accelerator of the user's own
    if already not in (None, config.train.mixed_precision):
        raise UserError(
            f"train.mixed_precision: this process computes in {already} and cannot change to"
            f" {config.train.mixed_precision}; restart it (the kernel of a notebook), or keep {already}."
        )
    return Accelerator(
        mixed_precision=config.train.mixed_precision,
        # the loader is not accelerate's, so its end must not force a sync; _build sets the real num_steps
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


def _load_tokens(config: RunConfig, origin: _Origin | None) -> TokenCache:
    """Phase 4: load the text as tokens. A resumed run uses the tokenizer of its checkpoint."""
    stated_size = config.batch.micro_batch_size if isinstance(config.batch.micro_batch_size, int) else 1
    config.batch.accumulation_steps(stated_size, processes().num_processes)  # raises if it does not divide
    console.now("tokenizing")
    with first_of_machine():
        corpus = load_corpus(config.data)
        if origin:
            origin.changes += check_text(origin.checkpoint.name, origin.identity["corpus"], corpus.identity, config)
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
    rows = embedding_rows(tokens.tokenizer)
    kind = "byte" if (config.tokenizer.kind, rows) == ("bpe", 257) else config.tokenizer.kind  # of little text
    how = f"{kind} {rows:,}{', cached' if tokens.is_hit else ''}"
    logger.info("%s", labeled("data", f"{text_name(config.data)}: {counts} ({how})"))
    MicroBatches(tokens.train, config.batch.sequence_length, seed=None)  # raises if there is not one block
    tokens.tokenizer.model_max_length = config.max_positions
    return tokens


def _build(
    decisions: Decisions,
    accelerator: Accelerator,
    tokens: TokenCache,
    folder: RunFolder,
    origin: _Origin | None,
    stopwatch: Stopwatch,
    hooks: Hooks,
) -> Run:
    """Phase 5: build the model, optimizer, EMA and checkpointer. Nothing is loaded from a checkpoint yet."""
    console.now("building the model")
    config, device = decisions.config, accelerator.device
    building = _building_config(config, origin)
    frozen = origin.identity.get("frozen", []) if origin else frozen_names(config)
    loss_elements = share_loss_elements(device)
    rows = embedding_rows(tokens.tokenizer)
    micro_batch_size, memory = choose_micro_batch(building, rows, accelerator, frozen, loss_elements)
    accelerator.gradient_accumulation_steps = config.batch.accumulation_steps(
        micro_batch_size, accelerator.num_processes
    )
    raw_model = _build_model(building, tokens, device, frozen, loss_elements)
    if accelerator.distributed_type == DistributedType.FSDP:
        _check_sharded(config, raw_model)
    init_from = origin.identity.get("init_from") if origin else None
    if config.model.init_from is not None and not origin:
        init_from = load_weights(config, raw_model, tokens)
    announce_model(raw_model, config.batch, micro_batch_size, accelerator, memory)
    optimizer = build_optimizer(raw_model, config.optim)
    for row in group_rows(optimizer):
        logger.debug("%s", ", ".join(f"{key} {value}" for key, value in row.items()))
    support = supporting_files(raw_model, tokens.tokenizer) if accelerator.is_main_process else {}
    gather(None)  # no rank waits in a collective of `prepare` for one that has failed
    accelerator.ddp_handler.bucket_cap_mb = bucket_megabytes(raw_model)
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    torch.manual_seed(config.run.seed + accelerator.process_index)  # dropout must differ between ranks
    state = TrainState(loop_active=getattr(raw_model.config, "loop_active", True))
    decay = config.optim.ema_decay
    ema = Ema(raw_model.named_parameters(), decay) if decay is not None else None
    identity = run_identity(config, tokens.identity, tokens.tokenizer_sha256, init_from, frozen)
    return Run(
        decisions=decisions,
        micro_batch_size=micro_batch_size,
        is_compiled=None,
        folder=folder,
        accelerator=accelerator,
        tokens=tokens,
        raw_model=raw_model,
        model=model,
        optimizer=optimizer,
        ema=ema,
        state=state,
        checkpoints=Checkpointer(
            accelerator, folder.checkpoints, raw_model, optimizer, state, ema, config.train.keep_last, identity, support
        ),
        stopwatch=stopwatch,
        hooks=hooks,
        metrics=MetricsFile(folder.metrics) if accelerator.is_main_process else None,
        predicted_memory_bytes=expected_bytes(memory, device),
    )


def _check_sharded(config: RunConfig, model: PreTrainedModel) -> None:
    """Raise UserError for what does not train under FSDP2."""
    if not isinstance(model, GolfForCausalLM):
        name = config.model.architecture
        raise UserError(f"model.architecture: {name} does not train under FSDP2, only golf does; start without it.")
    if config.optim.state_dtype != "fp32":
        raise UserError(
            "optim.state_dtype: under FSDP2, which shards the state, it must be fp32; set it, or leave out"
            " train.low_memory."
        )


def _building_config(config: RunConfig, origin: _Origin | None) -> RunConfig:
    """Return the config to build the model from. A resumed run finds another architecture in its checkpoint."""
    if config.model.architecture == "golf" or not origin:
        return config
    saved = str(origin.checkpoint)
    kind = load_model_config(saved, "train.resume").model_type
    return config.replace(model__architecture=kind, model__init_from=saved)


def _build_model(
    config: RunConfig, tokens: TokenCache, device: torch.device, frozen: list[str], loss_elements: int
) -> PreTrainedModel:
    eos, bos = tokens.tokenizer.eos_token_id, config.data.separator_id
    bos = text_start(tokens.tokenizer)[0] if bos is None else bos  # what begins a document
    token_ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    model = build_model(config, embedding_rows(tokens.tokenizer), device.type, frozen, **token_ids)
    if isinstance(model, GolfForCausalLM):
        model.chunk_elements = loss_elements
    elif not model.head_is_plain:
        logger.info("loss: from the logits of the whole micro-batch, because of what is between them and the head")
    return model


def _restore(run: Run, origin: _Origin | None) -> None:
    """Phase 6: load the checkpoint, if there is one, and allocate what the first step and the first save need."""
    if run.accelerator.is_main_process:
        run.folder.mark_incomplete()
    if origin:
        run.checkpoints.load(origin.checkpoint)
        run.stopwatch.carry_over(run.state.seconds)
        logger.info("resumed from %s at step %d", origin.checkpoint, run.state.step)
        if origin.changes:
            logger.info("changed since then: %s", ", ".join(origin.changes))
    try:
        run.optimizer.optimizer.create_state()  # before the warm-up pass, which tests whether everything fits
        run.checkpoints.reserve()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free = gigabytes(free_bytes(run.accelerator.device))
        raise UserError(
            f"memory: not enough for the optimizer's state, {free} are free; set train.low_memory or a smaller"
            " model.hidden_size, or end other programs."
        ) from None


def _start(run: Run, origin: _Origin | None, signals: Signals) -> None:
    """Phase 7: say when the run ends, start the hooks, record how it was started, compile, and start the loader."""
    config, accelerator, state = run.config, run.accelerator, run.state
    with first_of_machine():
        run.old_text = load_old_text(config, run.tokens)
    run.first_step = state.step
    run.step_limit = step_limit(config.train, config.batch, blocks_per_epoch(run), state)
    processes, is_main = accelerator.num_processes, accelerator.is_main_process
    gather(None)  # as before `prepare`
    run.clock = Clock(config.train, state, run.stopwatch, signals, run.step_limit, processes, is_main)
    if config.train.resume not in (None, "auto") and run.clock.is_over():
        announce_end(run)
    run.meter = _build_meter(run)
    run.restart_hooks()
    if origin:
        run.event("resumed", changed=origin.changes, begins_data=not state.blocks)
    run.is_compiled = choose_compilation(run)
    with writing("run.output_dir", run.folder.path):
        write_description(run)
    announce_mixture(run)
    logger.info("%s", labeled("evaluate", describe_validation(run)))
    if any(gather(logger.isEnabledFor(logging.DEBUG))):  # the first shows it, and all make the pass
        logger.debug("attention: %s", describe_attention(run.raw_model, accelerator, config.batch.sequence_length))
    gather(None)  # as before `prepare`
    warm_up(run)
    if accelerator.device.type == "cpu":
        trim_memory()
    start_batches(run)
    gather(None)


def _build_meter(run: Run) -> Meter:
    config, accelerator = run.config, run.accelerator
    flops = training_flops_per_token(run.raw_model, config.batch.sequence_length)
    peak = peak_flops(accelerator.device, run.decisions.precision) * accelerator.num_processes
    tokens_per_step, max_grad_norm = config.batch.tokens_per_step, config.train.max_grad_norm
    return Meter(accelerator.device, tokens_per_step, flops, peak, run.stopwatch, max_grad_norm)


def write_description(run: Run) -> None:
    """Write what is needed to repeat this start of the run: config, metadata and a patch of uncommitted changes."""
    if not run.accelerator.is_main_process:
        return
    recorded = run.resolved
    # without the resume keys, so that the file repeats the run from its beginning
    stated = recorded.config.replace(train__resume=None, train__resume_with_other=None)
    config_yaml = ResolvedConfig(stated, recorded.sources).to_yaml()
    if run.first_step:
        note = f"# The run resumed from step {run.first_step} with this config; starts/ has one config per start."
        config_yaml = f"{note}\n{config_yaml}"
    metadata = run_metadata(recorded) | {"init_from": run.init_from}
    metadata["corpus"] = run.checkpoints.identity["corpus"]
    metadata["val_notes"] = run.tokens.val_notes
    metadata["parameter_groups"] = group_rows(run.optimizer)
    run.folder.describe_start(config_yaml, metadata, uncommitted_changes())
