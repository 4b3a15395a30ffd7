"""From a config to everything the loop needs, built once and in the right order.

The order matters: precision and threads before the Accelerator, seeds before the model, the optimizer before
`prepare`, the checkpoint after it. Owns that order; the loop only uses what comes out.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

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
from hfgolf.command_line import ResolvedConfig, one_line
from hfgolf.config import RunConfig
from hfgolf.data.batches import build_loader, device_prefetch, num_blocks
from hfgolf.data.corpus import load_corpus
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import tokenizer_sha256
from hfgolf.doctor.doctor import Rounds
from hfgolf.errors import UserError
from hfgolf.evaluate.bits_per_byte import Evaluation
from hfgolf.evaluate.loss import evaluate_loss
from hfgolf.evaluate.sample import generate_text
from hfgolf.hardware import accelerator_name, cpu_cores, fingerprint, free_memory_bytes, peak_flops
from hfgolf.measure.flops import training_flops_per_token
from hfgolf.measure.memory import (
    TrainingMemory,
    choose_micro_batch_size,
    expected_bytes,
    fragmented_bytes,
    require_room,
    run_memory,
)
from hfgolf.model.build import build_golf
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.ema import Ema, ema_decay
from hfgolf.optim.groups import build_optimizer, group_table
from hfgolf.publish.export import files_beside_weights
from hfgolf.publish.hub import HubPusher
from hfgolf.redact import redact
from hfgolf.run.folder import RunFolder, run_folder
from hfgolf.run.provenance import run_metadata, uncommitted_changes
from hfgolf.train.attention_probe import describe_attention
from hfgolf.train.clock import most_steps
from hfgolf.train.compilation import compile_in_place, has_compiler, should_compile, uncompiled
from hfgolf.train.meter import Meter
from hfgolf.train.process import processes, resolve_precision, seed_everything, set_cpu_threads, tune_memory
from hfgolf.train.recovery import halve_until_it_fits, is_out_of_memory
from hfgolf.train.stopwatch import Stopwatch
from hfgolf.train.trackers import Tracker, check_trackers
from hfgolf.wording import gigabytes

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything the loop touches."""

    resolved: ResolvedConfig
    folder: RunFolder
    accelerator: Accelerator
    tokens: TokenCache
    raw_model: GolfForCausalLM
    """The model itself; `model` may be wrapped (DDP)."""
    model: nn.Module
    optimizer: Any
    ema: Ema | None
    state: TrainState
    checkpoints: Checkpointer
    stopwatch: Stopwatch
    meter: Meter
    tracker: Tracker
    rounds: Rounds
    """The doctor's visits."""
    hub: HubPusher
    most_steps: float
    """Steps after which max_steps, max_tokens or max_epochs end the run; infinity where only the clock does."""
    predicted_memory_bytes: int
    """Peak of this process, as `top` shows it, or of the tensors on its GPU."""
    batches: Iterator[dict[str, Tensor]] = field(default_factory=lambda: iter(()))
    begins_at: int = 0
    """Step that this start of the run goes on from."""
    has_begun: bool = False
    """The loop makes its steps: from here on processes wait for each other in the middle of one."""
    whole_evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """The last evaluation on the whole validation part, by its step, so that the end need not repeat it."""

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def micro_batch_size(self) -> int:
        """Sequences a process runs at once; resolved, so no longer "auto"."""
        return int(self.config.batch.micro_batch_size)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a process in an optimizer step."""
        return self.accelerator.gradient_accumulation_steps

    @property
    def num_blocks(self) -> int:
        """Blocks in an epoch."""
        return num_blocks(len(self.tokens.train), self.config.batch.sequence_length)

    @property
    def epoch(self) -> float:
        """Passes over the training blocks so far, excluded blocks counted as passed."""
        return int(self.state.next_positions(1)[0]) / self.num_blocks

    def start_batches(self) -> None:
        """Let the data go on from the blocks read so far: at the start, after a rollback, for another micro-batch."""
        config, accelerator = self.config, self.accelerator
        loader = build_loader(
            self.tokens.train,
            sequence_length=config.batch.sequence_length,
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation_steps,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            seed=config.run.seed,
            num_steps=int(min(self.most_steps, 10**9)) - self.state.step,
            blocks_read=self.state.blocks,
            excluded=self.state.excluded_blocks,
            num_workers=config.data.num_workers,
            prefetch_factor=config.data.prefetch_factor,
            device=accelerator.device,
        )
        self.batches = iter(device_prefetch(loader, accelerator.device))

    def decide(self, source: str, **values: Any) -> None:
        """Let `section__key=value` be part of the run from here on, in its checkpoints too."""
        self.resolved = self.resolved.resolve(source, **values)
        identity = self.checkpoints.identity
        identity["config"] |= {key.replace("__", "."): value for key, value in values.items()}

    def shrink_micro_batch(self, reason: str) -> None:
        """Halve the micro-batch and accumulate more of them; UserError where that is not possible."""
        batch, accelerator = self.config.batch, self.accelerator
        sizes = batch.micro_batch_sizes(accelerator.num_processes)
        smaller = [size for size in sizes if size <= self.micro_batch_size // 2]
        is_in_step = accelerator.num_processes > 1 and self.has_begun
        if not smaller or is_in_step:
            size = smaller[-1] if smaller else None
            advice = f"continue with --batch.micro_batch_size {size} --train.resume auto" if size else "make it smaller"
            message = f"train: out of memory with {self.micro_batch_size} sequences at once ({reason}); {advice}"
            logger.warning("%s", message)  # from every process, as the one that prints errors may not be this one
            raise UserError(f"{message}.")
        before, size = self.micro_batch_size, smaller[-1]
        self.decide("out of memory", batch__micro_batch_size=size)
        accelerator.gradient_accumulation_steps = batch.accumulation_steps(size, accelerator.num_processes)
        accelerator.step = 0  # of micro-batches; those of the broken step do not count
        self.start_batches()
        self.tracker.event("out_of_memory", self.state, micro_batch_size=[before, size], reason=reason)
        logger.warning(
            "out of memory at step %d with %d sequences at once: going on with %d, %d accumulated; the tokens a step"
            " stay the same",
            self.state.step + 1,
            before,
            size,
            self.accumulation_steps,
        )

    def exported_weights(self) -> AbstractContextManager[None]:
        """Give the model, for a while, the weights that would be exported now: the averaged ones under ema_export."""
        return self.ema.applied() if self.ema is not None and self.config.optim.ema_export else nullcontext()

    def evaluate(self, budget_tokens: int | None = None, before_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluate the model as it is on the first `budget_tokens` of the validation part, or on all of it.

        before_batch: may end the evaluation by an exception, on all processes before the same batch.
        """
        with self.stopwatch.of("evaluate"):
            return evaluate_loss(
                self.raw_model,
                self.tokens.val,
                self.accelerator,
                sequence_length=self.config.batch.sequence_length,
                batch_size=self.micro_batch_size,
                budget_tokens=budget_tokens,
                before_batch=before_batch,
            )

    def sample(self, max_new_tokens: int) -> str | None:
        """Return text that the model writes, the same for the same weights; None, with a line, if it can't write any.

        Never raises: no sample is worth a run, and weights that are not finite are the guard's business.
        """
        tokenizer, seed = self.tokens.tokenizer, self.config.run.seed
        try:
            with self.stopwatch.of("evaluate"), uncompiled(self.raw_model):
                # redacted, because a model may have learned a secret from its corpus
                return redact(generate_text(self.raw_model, tokenizer, max_new_tokens=max_new_tokens, seed=seed))
        except Exception as error:
            reason = one_line(error)[:200]
        logger.warning("no sample at step %d: %s", self.state.step, reason)
        self.tracker.event("sample_failed", self.state, reason=reason)
        return None


def set_up(resolved: ResolvedConfig) -> Run:
    """Build a run: folder, data, model, optimizer; then continue from a checkpoint where train.resume names one.

    Raises UserError, in one line, for whatever a person can mend; nothing earlier is lost by it.
    """
    stopwatch = Stopwatch()
    folder = run_folder(resolved.config)
    check_resume(folder.checkpoints, resolved.config.train.resume)
    if processes().is_main_process:
        folder.claim(resolved)
        clean_up(folder.checkpoints)
    origin = _find_origin(folder, resolved)
    resolved = _settle_machine(resolved, origin)
    accelerator = _build_accelerator(resolved.config)
    config = resolved.config
    changed = check_config(origin.name, origin.identity["config"], resolved) if origin else []
    stated_size = config.batch.micro_batch_size
    config.batch.accumulation_steps(1 if stated_size == "auto" else stated_size, accelerator.num_processes)  # or raise
    _say_environment(accelerator, config, resolved)

    seed_everything(config.run.seed, config.train.deterministic)
    with accelerator.local_main_process_first():
        corpus = load_corpus(config.data)
        if origin:
            changed += check_text(origin.name, origin.identity["corpus"], corpus.identity, resolved)
        tokens = load_tokens(config.data, config.tokenizer, corpus, origin.tokenizer() if origin else None)
        tokenizer_hash = tokenizer_sha256(tokens.tokenizer)
        if origin:
            check_tokenizer(origin.name, origin.identity["tokenizer_sha256"], tokenizer_hash)
    blocks_per_epoch = num_blocks(len(tokens.train), config.batch.sequence_length)
    tokens.tokenizer.model_max_length = config.batch.sequence_length
    _require_room(config, len(tokens.tokenizer), accelerator)
    raw_model = _build_model(config, tokens, accelerator.device)
    resolved, predicted_memory_bytes = _settle_batch(resolved, raw_model, accelerator)
    config = resolved.config

    optimizer = build_optimizer(raw_model.named_parameters(), config.optim, raw_model.fused_projections())
    logger.info("%s", group_table(optimizer))
    beside_weights = files_beside_weights(raw_model, tokens.tokenizer) if accelerator.is_main_process else {}
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    torch.manual_seed(config.run.seed + accelerator.process_index)  # from here on dropout, which differs by rank
    state = TrainState()
    decay = ema_decay(config.optim, config.batch.tokens_per_step)
    ema = Ema(raw_model.named_parameters(), decay) if decay is not None else None
    identity = run_identity(resolved, corpus.identity, tokenizer_hash)
    checkpoints = Checkpointer(
        accelerator,
        folder.checkpoints,
        raw_model,
        optimizer,
        state,
        ema,
        config.train.keep_last,
        identity,
        beside_weights,
    )
    if accelerator.is_main_process:
        folder.reopen()
    if origin:
        checkpoints.load(origin.checkpoint)
        stopwatch.carry_over(state.seconds)
        logger.info("resumed from %s at step %d", origin.checkpoint, state.step)
        if changed:
            logger.info("changed since then: %s", ", ".join(changed))
    elif config.train.resume:
        logger.info("nothing to resume yet: the run begins")
    optimizer.optimizer.create_state()  # before the rehearsal, which asks whether all has room together
    checkpoints.reserve()

    run = Run(
        resolved=resolved,
        folder=folder,
        accelerator=accelerator,
        tokens=tokens,
        raw_model=raw_model,
        model=model,
        optimizer=optimizer,
        ema=ema,
        state=state,
        checkpoints=checkpoints,
        stopwatch=stopwatch,
        meter=_build_meter(config, raw_model, accelerator, stopwatch),
        tracker=Tracker(accelerator, config, folder.path, state),
        rounds=Rounds(folder.metrics, config.flat()),
        hub=HubPusher(config.hub.repo_id if config.hub.push else None, config.hub.private),
        most_steps=most_steps(config.train, config.batch, blocks_per_epoch, state),
        begins_at=state.step,
        predicted_memory_bytes=predicted_memory_bytes,
    )
    if origin:
        run.tracker.event("resumed", state, changed=changed, begins_data=not state.blocks)
    _settle_compilation(run)
    try:
        write_description(run)
    except OSError as error:
        raise UserError(
            f"run.output_dir: cannot write to {folder.path} ({one_line(error)}); make room, or choose another"
            " --run.output_dir."
        ) from None
    logger.info("attention: %s", describe_attention(raw_model, accelerator, config.batch.sequence_length))
    _rehearse(run)
    run.start_batches()
    return run


@dataclass(frozen=True)
class _Origin:
    """The checkpoint that a run goes on from."""

    checkpoint: Path
    identity: dict[str, Any]

    @property
    def name(self) -> str:
        return self.checkpoint.name

    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """Return the tokenizer that the weights belong to."""
        if not (self.checkpoint / "tokenizer.json").is_file():
            return None
        return PreTrainedTokenizerFast.from_pretrained(self.checkpoint)


def _find_origin(folder: RunFolder, resolved: ResolvedConfig) -> _Origin | None:
    which = resolved.config.train.resume
    checkpoint = choose_checkpoint(processes(), folder.checkpoints, which) if which else None
    return _Origin(checkpoint, read_identity(checkpoint)) if checkpoint else None


def _settle_machine(resolved: ResolvedConfig, origin: _Origin | None) -> ResolvedConfig:
    """Decide precision and threads, as the run so far had them if it goes on, and set up this process for them."""
    before = origin.identity["config"] if origin else {}
    resolved = resolve_precision(resolved, before.get("train.mixed_precision"))
    resolved = keep_decisions(resolved, before, partial(_is_possible, resolved))
    if processes().device.type == "cpu":
        threads = set_cpu_threads(resolved.config.train.cpu_threads, _local_processes())
        if resolved.config.train.cpu_threads == "auto":
            resolved = resolved.resolve("auto", train__cpu_threads=threads)
        tune_memory()
    return resolved


def _is_possible(resolved: ResolvedConfig, key: str, value: Any) -> bool:
    """Say whether this machine can do what a run decided elsewhere, or with other tokens a step."""
    match key:
        case "train.cpu_threads":
            return value * _local_processes() <= cpu_cores()
        case "batch.micro_batch_size":
            return value in resolved.config.batch.micro_batch_sizes(processes().num_processes)
        case "train.compile":
            return not value or has_compiler(processes().device)
    return True


def _build_accelerator(config: RunConfig) -> Accelerator:
    check_trackers(config.track.trackers)
    folder = str(run_folder(config).path)
    return Accelerator(
        mixed_precision=config.train.mixed_precision,
        # the loader is not accelerate's, so it must not end an accumulation; num_steps follows once it is known
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        log_with=config.track.trackers or None,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder),
    )


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _say_environment(accelerator: Accelerator, config: RunConfig, resolved: ResolvedConfig) -> None:
    count = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
    cores = f", {config.train.cpu_threads} threads each" if accelerator.device.type == "cpu" else ""
    logger.info("device: %s, %s%s", accelerator_name(), count, cores)
    precision, source = config.train.mixed_precision, resolved.sources["train.mixed_precision"]
    if source == "auto":
        source = "this hardware is fast at it" if precision == "bf16" else "this hardware is not fast at bf16"
    logger.info("precision: %s (%s)", "fp32" if precision == "no" else precision, source)


def _require_room(config: RunConfig, vocab_size: int, accelerator: Accelerator) -> None:
    """Raise UserError if a model cannot fit even with one sequence at a time, before any of it takes memory."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return  # each process holds a part, which the prediction does not know
    device = accelerator.device
    with torch.device("meta"), torch.random.fork_rng([]):
        model = build_golf(config, vocab_size, device.type)
    require_room(config, model, accelerator.num_processes, device.type, _free_bytes(device))


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that are free for this process: on a CPU, the processes of this machine share them."""
    return free_memory_bytes(device) // (1 if device.type == "cuda" else _local_processes())


def _build_model(config: RunConfig, tokens: TokenCache, device: torch.device) -> GolfForCausalLM:
    vocab_size, eos = len(tokens.tokenizer), tokens.tokenizer.eos_token_id
    model = build_golf(config, vocab_size, device.type, bos_token_id=eos, eos_token_id=eos, pad_token_id=eos)
    logger.info("model: %s parameters, vocabulary %s", f"{model.num_parameters():,}", f"{vocab_size:,}")
    return model


def _settle_batch(
    resolved: ResolvedConfig, model: GolfForCausalLM, accelerator: Accelerator
) -> tuple[ResolvedConfig, int]:
    """Decide the micro-batch if it is auto, and tell the accelerator the accumulation that follows from it.

    Returns the config with the micro-batch, and the predicted peak of this process's memory in bytes.
    """
    config = resolved.config
    if config.batch.micro_batch_size == "auto":
        device = accelerator.device
        size = choose_micro_batch_size(config, model, accelerator.num_processes, device.type, _free_bytes(device))
        resolved = resolved.resolve("auto", batch__micro_batch_size=size)
    size = int(resolved.config.batch.micro_batch_size)
    accumulation = config.batch.accumulation_steps(size, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = accumulation
    logger.info(
        "batch: %s tokens a step = %d sequences x %d tokens x %d accumulated x %d processes",
        f"{config.batch.tokens_per_step:,}",
        size,
        config.batch.sequence_length,
        accumulation,
        accelerator.num_processes,
    )
    memory = run_memory(resolved.config, model, size, accelerator.num_processes, accelerator.device.type)
    predicted = expected_bytes(memory, accelerator.device)
    parts = "" if accelerator.device.type == "cuda" else _memory_parts(memory, predicted)
    logger.info("memory: %s predicted at the peak of each process%s", gigabytes(predicted), parts)
    return resolved, predicted


def _memory_parts(memory: TrainingMemory, predicted: int) -> str:
    """Say what the predicted bytes of a process on a CPU consist of."""
    fragmented = fragmented_bytes(memory)
    rest = gigabytes(predicted - memory.peak - fragmented)
    return (
        f": {gigabytes(memory.peak)} for training, {rest} for Python, its libraries and the tokens,"
        f" {gigabytes(fragmented)} lost to fragmentation of the heap"
    )


def _build_meter(config: RunConfig, model: GolfForCausalLM, accelerator: Accelerator, stopwatch: Stopwatch) -> Meter:
    flops = training_flops_per_token(model, config.batch.sequence_length)
    peak = peak_flops(accelerator.device, str(config.train.mixed_precision)) * accelerator.num_processes
    return Meter(accelerator.device, config.batch.tokens_per_step, flops / peak, stopwatch)


def write_description(run: Run) -> None:
    """Write what repeats this start of the run: config, metadata and, if hfgolf differs from its commit, the patch."""
    if not run.accelerator.is_main_process:
        return
    # without what only a resume can do, so that the file repeats the run
    stated = run.resolved.config.replace(train__resume=None, train__resume_with_other=None)
    config_yaml = ResolvedConfig(stated, run.resolved.sources).to_yaml()
    if run.begins_at:
        config_yaml = f"# The run went on from step {run.begins_at} with this; starts/ has each start.\n{config_yaml}"
    run.folder.describe_start(config_yaml, run_metadata(run.resolved, fingerprint()), uncommitted_changes())


def _settle_compilation(run: Run) -> None:
    """Decide train.compile if it is auto."""
    train = run.config.train
    if train.compile != "auto":
        reason = f"{run.resolved.sources.get('train.compile', 'train.compile')} says so"
        logger.info("compile: %s, because %s", "yes" if train.compile else "no", reason)
        return
    tokens = (run.most_steps - run.state.step) * run.config.batch.tokens_per_step
    compiling, reason = should_compile(
        run.accelerator.device,
        str(train.mixed_precision),
        seconds_at_peak=tokens * run.meter.flops_per_second_of_peak,
        most_seconds=60 * (train.max_minutes or math.inf),
    )
    run.decide("auto", train__compile=compiling)
    logger.info("compile: %s, because %s", "yes" if compiling else "no", reason)


def _rehearse(run: Run) -> None:
    """Run a forward and backward pass ahead of time: to compile and, on a GPU, to see whether the micro-batch fits."""
    accelerator, compiling = run.accelerator, bool(run.config.train.compile)
    on_gpu = accelerator.device.type == "cuda"

    def run_once() -> None:
        ids = torch.zeros(
            run.micro_batch_size, run.config.batch.sequence_length, dtype=torch.long, device=accelerator.device
        )
        with torch.random.fork_rng([accelerator.device] if on_gpu else []), accelerator.no_sync(run.model):
            # a clone: torch would compile for labels that are the inputs, and once more for a real batch
            accelerator.backward(run.model(input_ids=ids, shift_labels=ids.clone()).loss)
        run.raw_model.zero_grad(set_to_none=True)

    def on_all_processes() -> None:
        reason = None
        try:
            if compiling:
                compile_in_place(run.raw_model, run_once)
            else:
                run_once()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        failed = torch.tensor(float(reason is not None), device=accelerator.device)
        if accelerator.reduce(failed, "sum").item():
            raise torch.OutOfMemoryError(reason or "on another process")

    if compiling or on_gpu:
        with run.stopwatch.of("compile" if compiling else "setup"):
            halve_until_it_fits(run, on_all_processes)
    if compiling:
        logger.info("compile: %.0f s", run.stopwatch.seconds()["compile"])
