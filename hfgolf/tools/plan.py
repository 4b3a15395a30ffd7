"""A run before it is run: what it consists of, what it takes, how long it lasts and what it costs.

Owns the arithmetic from a config to those figures. The model exists on the meta device only, where it takes no memory,
unless its speed is to be measured. Does not know how long the config wants to train, nor who pays.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from hfgolf.config import RunConfig
from hfgolf.data import token_cache
from hfgolf.data.corpus import cache_folder, load_corpus
from hfgolf.data.token_stream import open_stream
from hfgolf.data.tokenizer import find_tokenizer
from hfgolf.errors import UserError
from hfgolf.hardware import Device, device_name, free_memory_bytes, peak_flops
from hfgolf.measure.flops import TokenFlops, token_flops
from hfgolf.measure.memory import (
    USABLE_SHARE,
    TrainingMemory,
    choose_micro_batch_size,
    run_memory,
)
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import build_optimizer, parameter_groups
from hfgolf.train.build import build_golf

# Of the peak, in training, uncompiled, where nobody measured: configs/small.yaml reaches 0.6 in fp32 on two CPU cores;
# small GPTs on a GPU are published between 0.3 and 0.5.
ASSUMED_MFU = 0.4
MAX_CHEAP_BYTES = 20_000_000  # of text, to tokenise only to count it
VOCABULARIES = {"byte": 257, "char": 257}  # bytes and the end of text; with char, also what is not ASCII in the text
PARTS = {"norms": "norm", "embedding": "embed_", "attention": ".self_attn.", "mlp": ".mlp.", "head": "lm_head"}
MEASURED_STEPS = 5


@dataclass(frozen=True)
class Data:
    """What is known of the tokens without a run."""

    vocabulary: int
    train_tokens: int | None = None
    val_tokens: int | None = None
    note: str = ""
    """Why the tokens are not counted, or the vocabulary is assumed."""


@dataclass(frozen=True)
class Machine:
    """Where a run is to take place."""

    name: str
    device: str
    """cuda or cpu."""
    processes: int
    peak_flops: float
    """Of all processes, in the run's precision."""
    free_bytes: int
    """Of each process."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second of all processes, and how that is known."""

    tokens_per_second: float
    source: str


@dataclass(frozen=True)
class Plan:
    """What a config takes on a machine. Bytes are those of one process."""

    parameters: dict[str, int]
    """By part of the model; a tied head is the embedding."""
    rules: dict[str, int]
    """Parameters by the optimizer's rule."""
    flops: TokenFlops
    """Of a token."""
    micro_batch_size: int
    accumulation_steps: int
    memory: TrainingMemory
    memory_with_checkpointing: TrainingMemory
    memory_without_checkpointing: TrainingMemory
    usable_bytes: int
    largest_micro_batch: int | None
    """That fits; None: not even one sequence does."""

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.usable_bytes


@dataclass(frozen=True)
class Length:
    """How long a run is; None: not known."""

    steps: int
    tokens: int
    epochs: float | None
    seconds: float
    """Of the steps; evaluations are apart, and starting, compiling and saving come on top."""
    evaluation_seconds: float | None
    dollars: float | None


def meta_model(config: RunConfig, vocabulary: int, device: str) -> GolfForCausalLM:
    """Build the model of a config, its precision decided, without its weights, as it would attend on a device."""
    with torch.device("meta"):
        return build_golf(config, vocabulary, device)


def look_at_data(config: RunConfig) -> Data:
    """Count the tokens where they are cached, or few enough to be tokenised now; else say why not.

    Raises UserError where the tokenizer that the config names cannot be loaded.
    """
    tokenizer, found = config.tokenizer, None
    try:
        corpus = load_corpus(config.data)
        listed = [*corpus.identity.get("files", []), *corpus.identity.get("val_files", [])]
        num_bytes = sum(size for _, size, _ in listed)
        if 0 < num_bytes <= MAX_CHEAP_BYTES:
            tokens = token_cache.load_tokens(config.data, tokenizer)
            return Data(len(tokens.tokenizer), len(tokens.train), len(tokens.val))
        found = token_cache.find_cache(corpus, tokenizer, cache_folder(config.data))
        reason = "not tokenised yet" + (f": {num_bytes / 1e6:,.0f} MB of text" if listed else "")
    except UserError as error:
        reason = str(error)
    if found:
        folder, known = found
        try:
            train, val = (len(open_stream(Path(folder) / f"{split}.arrow", False)) for split in ("train", "val"))
            return Data(len(known), train, val)
        except (OSError, ValueError) as error:
            reason = f"the token cache is damaged: {error}"
    if tokenizer.kind == "pretrained":
        loaded = find_tokenizer(tokenizer, {}, Path())
        return Data(len(loaded) if loaded else 0, note=reason)
    return Data(VOCABULARIES.get(tokenizer.kind, tokenizer.vocab_size), note=reason)


def this_machine(precision: str, processes: int) -> Machine:
    """Describe the machine this process is on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = peak_flops(device, precision) * processes
    free_bytes = free_memory_bytes(device) // (processes if device.type == "cpu" else 1)
    return Machine(device_name(device), device.type, processes, peak, free_bytes)


def machine_of(device: Device, precision: str, processes: int) -> Machine:
    """Describe a machine with devices of the table, nothing else running on them."""
    return Machine(device.name, "cuda", processes, device.peak_flops(precision) * processes, device.memory_gb * 10**9)


def assumed_speed(flops: TokenFlops, machine: Machine, mfu: float, recomputes: bool) -> Speed:
    """Return the speed at a share of the peak, which recomputation takes its part of."""
    each = flops.useful + (flops.recomputation if recomputes else 0)
    source = f"assumed: {mfu:.0%} of the peak of {machine.name}, {machine.peak_flops / 1e12:,.4g} TFLOP/s"
    return Speed(mfu * machine.peak_flops / each, source)


def measured_speed(config: RunConfig, vocabulary: int, micro_batch_size: int, machine: Machine) -> Speed:
    """Measure passes and updates of the real model, uncompiled, on random tokens; medians of MEASURED_STEPS.

    One process; the others are taken to be as fast, and to wait for nobody.
    """
    device, precision, length = torch.device(machine.device), config.train.mixed_precision, config.batch.sequence_length
    with device:
        model = build_golf(config, vocabulary, machine.device).train()
    optimizer = build_optimizer(model.named_parameters(), config.optim, model.fused_projections())
    ids = torch.randint(vocabulary, (micro_batch_size, length), device=device)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16

    def run_pass() -> None:
        with torch.autocast(device.type, dtype, enabled=precision != "no"):
            loss = model(input_ids=ids, shift_labels=ids).loss
        loss.backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()

    times = [(_seconds(run_pass, device), _seconds(update, device)) for _ in range(1 + MEASURED_STEPS)]
    of_pass, of_update = (median(column) for column in zip(*times[1:], strict=True))
    accumulation = config.batch.accumulation_steps(micro_batch_size, machine.processes)
    speed = config.batch.tokens_per_step / (accumulation * of_pass + of_update)
    return Speed(speed, f"measured: {MEASURED_STEPS} steps on {machine.name}, uncompiled")


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    started_at = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_at


def parameter_parts(model: GolfForCausalLM) -> dict[str, int]:
    """Count the parameters by part of the model; UserError for one that belongs to none."""
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
    for name, parameter in model.named_parameters():
        part = next((part for part, word in PARTS.items() if word in name), None)
        if part is None:
            raise UserError(f"parameter {name} belongs to no part of the model: give it a row in PARTS of {__name__}")
        counts[part] += parameter.numel()
    return counts


def make_plan(config: RunConfig, model: GolfForCausalLM, machine: Machine) -> Plan:
    """Work out what a config, its precision decided, takes on a machine; UserError where no micro-batch could divide
    its step."""
    size, largest = _micro_batch(config, model, machine)
    with_, without = (
        run_memory(config.replace(model__gradient_checkpointing=on), model, size, machine.processes, machine.device)
        for on in (True, False)
    )
    rules: Counter[str] = Counter()
    for group in parameter_groups(model.named_parameters(), config.optim, model.fused_projections()):
        rules[group["rule"]] += sum(parameter.numel() for _, parameter in group["params"])
    return Plan(
        parameters=parameter_parts(model),
        rules=dict(rules),
        flops=token_flops(model, config.batch.sequence_length),
        micro_batch_size=size,
        accumulation_steps=config.batch.accumulation_steps(size, machine.processes),
        memory=with_ if config.model.gradient_checkpointing else without,
        memory_with_checkpointing=with_,
        memory_without_checkpointing=without,
        usable_bytes=int(machine.free_bytes * USABLE_SHARE),
        largest_micro_batch=largest,
    )


def _micro_batch(config: RunConfig, model: GolfForCausalLM, machine: Machine) -> tuple[int, int | None]:
    """Return the sequences a process would run at once, and the most that fit; None: not even one does."""
    config.batch.accumulation_steps(1, machine.processes)  # or raise
    largest: int | None = None
    with suppress(UserError):
        largest = choose_micro_batch_size(config, model, machine.processes, machine.device, machine.free_bytes)
    stated = config.batch.micro_batch_size
    return (largest or 1) if stated == "auto" else stated, largest


def run_length(config: RunConfig, data: Data, speed: Speed, steps: int, price_per_hour: float | None) -> Length:
    """Return what so many steps come to. price_per_hour: dollars, None where it is not known."""
    tokens = steps * config.batch.tokens_per_step
    seconds, evaluating = tokens / speed.tokens_per_second, evaluation_seconds(config, data, speed, steps)
    return Length(
        steps=steps,
        tokens=tokens,
        epochs=tokens / data.train_tokens if data.train_tokens else None,
        seconds=seconds,
        evaluation_seconds=evaluating,
        dollars=None if price_per_hour is None else (seconds + (evaluating or 0.0)) / 3600 * price_per_hour,
    )


def evaluation_seconds(config: RunConfig, data: Data, speed: Speed, steps: int) -> float | None:
    """Return what the evaluations take, at a third of a training step's work a token; None: tokens not counted."""
    if data.val_tokens is None:
        return None
    train = config.train
    times = math.ceil(steps / train.eval_every_steps)
    each = min(train.eval_tokens or data.val_tokens, data.val_tokens)
    at_the_end = data.val_tokens if train.eval_tokens is not None else 0  # all of it, if no evaluation was
    tokens = times * each * (2 if config.optim.has_ema else 1) + at_the_end
    return tokens / (3 * speed.tokens_per_second)


def affordable_steps(config: RunConfig, data: Data, speed: Speed, seconds: float, budget: str) -> int:
    """Return the steps that can be made in so many seconds, evaluations included.

    budget: how the person stated it, for the UserError where that is not a single one.
    """
    per_step = config.batch.tokens_per_step / speed.tokens_per_second

    def total(steps: int) -> float:
        return steps * per_step + (evaluation_seconds(config, data, speed, steps) or 0.0)

    most = math.floor(min(seconds / per_step, 1e15)) + 1
    steps = bisect.bisect_right(range(1, most + 1), seconds * (1 + 1e-9), key=total)  # rounding must not cost a step
    if steps < 1:
        raise UserError(
            f"{budget}: {seconds:,.3g} s do not pay for one step of {config.batch.tokens_per_step:,} tokens"
            f" ({per_step:,.3g} s at {speed.tokens_per_second:,.0f} tokens/s) with its evaluation"
            f" ({total(1) - per_step:,.3g} s); allow more, or take a smaller model, batch.tokens_per_step or"
            " train.eval_tokens."
        )
    return steps
