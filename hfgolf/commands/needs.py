"""What a run needs, before it starts: parameters, FLOPs, memory, duration and cost.

Owns the arithmetic from a config to these figures. The model is built on the meta device, where it takes no
memory. Does not know how long the config trains or what the budget is.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hfgolf.checkpoint.state import TrainState
from hfgolf.config.milestones import milestone
from hfgolf.config.sections import DataSection, RunConfig
from hfgolf.data import token_cache
from hfgolf.data.batches import num_blocks
from hfgolf.data.cache_folder import cache_folder
from hfgolf.data.corpus import load_corpus
from hfgolf.data.files import find_paths, is_url
from hfgolf.data.token_stream import open_stream, stream_path
from hfgolf.data.tokenizer import embedding_rows, find_tokenizer
from hfgolf.data.words import count_words
from hfgolf.hooks.milestones import due_steps
from hfgolf.measure.flops import TokenFlops, token_flops
from hfgolf.measure.memory import USABLE_SHARE, TrainingMemory, choose_micro_batch_size, chunk_elements, run_memory
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import KINDS, parameter_groups
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import DEVICES, device_name, find_device, free_memory_bytes, peak_flops
from hfgolf.train.build import build_model
from hfgolf.train.init_from import frozen_names
from hfgolf.train.validation import evaluated_tokens

# The MFU of uncompiled training if it is not measured. configs/small.yaml reaches 0.6 in fp32 on two CPU cores;
# published small GPTs reach 0.3 to 0.5 on a GPU.
ASSUMED_MFU = 0.4
MAX_CHEAP_BYTES = 20_000_000  # of text that is tokenized just to count its tokens
VOCABULARIES = {"byte": 257, "char": 257}  # 256 bytes and the end of text; char adds the text's non-ASCII characters


@dataclass(frozen=True)
class TokenCounts:
    """The vocabulary and the tokens of a config, as far as they are known without a run."""

    vocabulary: int
    train_tokens: int | None = None
    val_tokens: int | None = None
    note: str = ""
    """Why the tokens are not counted or the vocabulary is assumed."""


@dataclass(frozen=True)
class Machine:
    """The machine that a run is planned for."""

    name: str
    device: str
    """cuda or cpu."""
    processes: int
    peak_flops: float
    """FLOP/s of all processes together, in the run's precision."""
    free_bytes: int
    """Free memory of each process."""
    is_sharded: bool = False
    """Whether the processes share weights, gradients and state (FSDP2)."""

    def assumed(self, mfu: float = ASSUMED_MFU) -> str:
        """Say where a speed comes from that is a share of the peak."""
        return f"assumed: {mfu:.0%} of the peak of {self.name}, {self.peak_flops / 1e12:,.4g} TFLOP/s"


@dataclass(frozen=True)
class Needs:
    """What a config needs on a machine. Bytes are per process."""

    parameters: dict[str, int]
    """{kind, as the optimizer has them, or frozen: parameters}; a tied head counts as the embedding."""
    rules: dict[str, int]
    """{rule of the optimizer: parameters}."""
    flops: TokenFlops
    micro_batch_size: int
    accumulation_steps: int
    memory: TrainingMemory
    memory_with_checkpointing: TrainingMemory
    memory_without_checkpointing: TrainingMemory
    usable_bytes: int
    largest_micro_batch: int | None
    """The largest micro-batch that fits; None if not even one sequence does."""
    problem: str | None
    """Why not even one sequence fits, and what to do."""

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.usable_bytes


@dataclass(frozen=True)
class Length:
    """How long a run takes; None means unknown. seconds: of the steps only, without startup, compiling and saving."""

    steps: int
    tokens: int
    epochs: float | None
    seconds: float
    evaluation_seconds: float | None
    dollars: float | None


def meta_model(config: RunConfig, vocabulary: int, device: str) -> PreTrainedModel:
    """Build the model of a config on the meta device, with the attention of a device type (cuda, cpu).

    train.mixed_precision must be decided.
    """
    with torch.device("meta"):
        return build_model(config, vocabulary, device, frozen_names(config))


def count_tokens(config: RunConfig) -> TokenCounts:
    """Count the tokens if they are cached or quick to tokenize; otherwise note why not.

    Raises UserError if the config's tokenizer cannot be loaded, or if all files are here, but no training can use them.
    """
    tokenizer, known = config.tokenizer, None
    found: list[Path | None] = []
    try:
        corpus = load_corpus(config.data)
        texts = [*corpus.texts.values()] or [corpus]
        listed = [file for text in texts for key in ("files", "val_files") for file in text.identity.get(key, [])]
        num_bytes = sum(size for _, size, _ in listed)
        is_listed = all("files" in text.identity for text in texts)
        if (is_listed and 0 < num_bytes <= MAX_CHEAP_BYTES) or config.data.source == "shards":
            tokens = token_cache.load_tokens(config.data, tokenizer)
            return TokenCounts(embedding_rows(tokens.tokenizer), len(tokens.train), len(tokens.val))
        if known := find_tokenizer(tokenizer, corpus.identity, cache_folder(config.data) / "tokenizers"):
            found = [token_cache.find_cache(text, tokenizer, known) for text in texts]
        reason = "not tokenized yet" + (f": {num_bytes / 1e6:,.0f} MB of files" if listed else "")
    except UserError as error:
        if _are_here(config.data):
            raise
        reason = str(error)
    if known and all(found):
        try:
            train, val = (
                sum(len(open_stream(stream_path(one, split))) for one in found if one) for split in ("train", "val")
            )
            return TokenCounts(embedding_rows(known), train, val)
        except (OSError, ValueError) as error:
            reason = f"the token cache is damaged: {error}"
    if tokenizer.kind == "pretrained":
        loaded = find_tokenizer(tokenizer, {}, Path())
        return TokenCounts(embedding_rows(loaded) if loaded else 0, note=reason)
    return TokenCounts(VOCABULARIES.get(tokenizer.kind, tokenizer.max_vocab_size), note=reason)


def _are_here(data: DataSection) -> bool:
    """Return whether this machine has all files of a text; one on the network may only be out of reach."""
    texts = data.sources().values()
    names = [name for text in texts for name in (*text.files, *text.val_files)]
    if any(text.source == "hub" for text in texts) or any(map(is_url, names)):
        return False
    try:
        return all(find_paths(name, "data.files") for name in names)
    except UserError:
        return False


def this_machine(precision: str, processes: int) -> Machine:
    """Describe this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = peak_flops(device, precision) * processes
    free_bytes = free_memory_bytes(device) // (processes if device.type == "cpu" else 1)
    return Machine(device_name(device), device.type, processes, peak, free_bytes)


def machine_with(name: str, precision: str | None, processes: int) -> tuple[Machine, str]:
    """Describe a machine with GPUs of the table (hardware.DEVICES), all their memory free; return its precision, too.

    precision: None: 16 bits, as suits the GPU. Raises UserError for a name that is not in the table.
    """
    device = find_device(name)
    if device is None:
        raise UserError(f"--device: {name} is not in the table; known: {', '.join(known.name for known in DEVICES)}.")
    precision = precision or ("bf16" if device.has_bf16 else "fp16")
    peak, free_bytes = device.peak_flops(precision) * processes, device.memory_gb * 10**9
    return Machine(device.name, "cuda", processes, peak, free_bytes), precision


def assumed_speed(flops: TokenFlops, machine: Machine, recomputes: bool, teachers: int = 0) -> float:
    """Return the tokens per second at ASSUMED_MFU.

    recomputes: gradient checkpointing costs extra FLOPs. teachers: models like this one, whose forward passes do, too.
    """
    each = (1 + teachers / 3) * flops.useful + (flops.recomputation if recomputes else 0)
    return ASSUMED_MFU * machine.peak_flops / each


def find_needs(config: RunConfig, model: PreTrainedModel, machine: Machine) -> Needs:
    """Compute what a config needs on a machine. train.mixed_precision must be decided.

    Raises UserError if no micro-batch divides the step evenly.
    """
    if isinstance(model, GolfForCausalLM):
        model.chunk_elements = chunk_elements(machine.device, machine.free_bytes)
    processes, device, is_sharded = machine.processes, machine.device, machine.is_sharded
    config.batch.accumulation_steps(1, processes)  # raises if it does not divide
    largest = problem = None
    try:
        largest = choose_micro_batch_size(config, model, processes, device, machine.free_bytes, is_sharded)
    except UserError as error:
        problem = str(error).removeprefix("batch.micro_batch_size: ")
    stated = config.batch.micro_batch_size
    size = (largest or 1) if stated == "auto" else stated
    with_, without = (
        run_memory(config.replace(model__gradient_checkpointing=on), model, size, processes, device, is_sharded)
        for on in (True, False)
    )
    kinds, rules = Counter(dict.fromkeys(KINDS, 0)), Counter[str]()
    for group in parameter_groups(model, config.optim):
        count = sum(parameter.numel() for _, parameter in group["params"])
        kinds[group["kind"]] += count
        rules[group["rule"]] += count
    kinds["frozen"] = model.num_parameters() - model.num_parameters(only_trainable=True)
    return Needs(
        parameters=dict(kinds),
        rules=dict(rules),
        flops=token_flops(model, config.batch.sequence_length),
        micro_batch_size=size,
        accumulation_steps=config.batch.accumulation_steps(size, processes),
        memory=with_ if config.model.gradient_checkpointing else without,
        memory_with_checkpointing=with_,
        memory_without_checkpointing=without,
        usable_bytes=int(machine.free_bytes * USABLE_SHARE),
        largest_micro_batch=largest,
        problem=problem,
    )


def run_length(
    config: RunConfig, data: TokenCounts, tokens_per_second: float, steps: int, price_per_hour: float | None
) -> Length:
    """Return tokens, epochs, time and cost of a number of steps. price_per_hour: dollars; None if unknown.

    Raises UserError if the text is shorter than a sequence.
    """
    tokens = steps * config.batch.tokens_per_step
    seconds, evaluating = tokens / tokens_per_second, evaluation_seconds(config, data, tokens_per_second, steps)
    length, epochs = config.batch.sequence_length, None
    if data.train_tokens is not None:
        epochs = tokens / (num_blocks(data.train_tokens, length) * length)
    dollars = None if price_per_hour is None else (seconds + (evaluating or 0.0)) / 3600 * price_per_hour
    return Length(steps, tokens, epochs, seconds, evaluating, dollars)


def evaluation_seconds(config: RunConfig, data: TokenCounts, tokens_per_second: float, steps: int) -> float | None:
    """Return the seconds of all evaluations; None if the tokens are not counted.

    Per token, an evaluation takes a third of the work of a training step (only the forward pass).
    """
    if data.val_tokens is None:
        return None
    budgets = config.eval_tokens, config.final_eval_tokens(steps * config.batch.tokens_per_step)
    each, final = (min(budget or data.val_tokens, data.val_tokens) for budget in budgets)
    tokens, _ = evaluated_tokens(config, each, final, steps)
    return tokens / (3 * tokens_per_second)


def milestone_steps(config: RunConfig, data: TokenCounts) -> dict[str, int | None]:
    """Return {name: step} of train.milestones; None for one of words, if the text is not tokenized yet."""
    milestones, read_words = [milestone(entry) for entry in config.train.milestones], None
    if data.train_tokens is not None and any(one.unit == "words" for one in milestones):
        tokens = token_cache.load_tokens(config.data, config.tokenizer)
        read_words = count_words(tokens, config.batch.sequence_length).read
    known = [one for one in milestones if one.unit == "tokens" or read_words is not None]
    steps = dict.fromkeys([one.name for one in milestones], None)
    return steps | due_steps(known, config.batch, TrainState(), read_words)


def affordable_steps(config: RunConfig, data: TokenCounts, tokens_per_second: float, seconds: float) -> int:
    """Return the number of steps that fit into a time, including their evaluations.

    Raises UserError if not even one step fits.
    """
    per_step = config.batch.tokens_per_step / tokens_per_second

    def total(steps: int) -> float:
        return steps * per_step + (evaluation_seconds(config, data, tokens_per_second, steps) or 0.0)

    max_steps = math.floor(min(seconds / per_step, 1e15)) + 1
    # 1 + 1e-9: rounding must not cost a step
    steps = bisect.bisect_right(range(1, max_steps + 1), seconds * (1 + 1e-9), key=total)
    if steps < 1:
        raise UserError(
            f"train.max_minutes: {seconds:,.3g} s is too short for one step of {config.batch.tokens_per_step:,} tokens"
            f" ({per_step:,.3g} s at {tokens_per_second:,.0f} tokens/s) with its evaluation"
            f" ({total(1) - per_step:,.3g} s); allow more, or choose a smaller model, batch.tokens_per_step or"
            " train.eval_tokens."
        )
    return steps
