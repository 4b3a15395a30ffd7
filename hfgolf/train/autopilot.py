"""Choose what trains best in the minutes at hand: `hfgolf train my.txt --minutes 10`.

Owns the candidates, the timed steps and the choice. What a model of a shape learns from a text is law.py's; what a
person states is kept. Does not know checkpoints: a run that resumes keeps what its first start chose.
"""

from __future__ import annotations

import itertools
import lzma
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hfgolf.config.parse import AUTOPILOT, ResolvedConfig
from hfgolf.config.sections import RunConfig
from hfgolf.data.corpus import load_corpus
from hfgolf.data.tokenizer import embedding_rows, find_tokenizer, tokens_per_byte
from hfgolf.measure.memory import choose_micro_batch_size
from hfgolf.optim.groups import build_optimizer
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import peak_flops, seconds_of
from hfgolf.system.ranks import decide, gather
from hfgolf.system.wording import count_of, duration, labeled, rounded
from hfgolf.train.build import build_model
from hfgolf.train.decisions import free_bytes
from hfgolf.train.law import Shape, Text, bits_per_byte, decay_of, heads_of, layers_of, rates_of, tokens_per_step_of
from hfgolf.train.successor import has_time_to_teach

WIDTHS = (128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536)
VOCABULARIES = (512, 1024, 2048, 4096, 8192, 16384)
LENGTHS = tuple(round(2_000 * 1.25**power) for power in range(90))  # of a training, in tokens
SHARE_OF_STEPS = 0.93  # of the minutes; evaluations and saves take the rest
EVALUATIONS, EVALUATION_SECONDS = 10, 8.0  # at most so many, so far apart: one with its sample takes half a second
FEW_WEIGHTS, TOKENS_PER_WEIGHT = 5_000_000, 10  # the law knows no larger models: with more, as many tokens for each
MIN_STEPS = 100  # the law knows no shorter training: if the minutes allow no more, it is the smallest shape
TAUGHT = 0.98  # of the bits per byte of its teacher, a model ends at: docs/experiments.md
MAX_KNOWN = 0.5  # more or fewer bits per byte than the choice: beyond, the law has left what it was fitted to
READ_BYTES = 20_000_000
SAMPLE_BYTES = 2_000_000
MAX_TIMED, TIMED_SECONDS, MAX_TIMES = 4, 1.0, 50  # shapes, and of each
ASSUMED_MFU = 0.3  # of the first shape that is timed
OFTEN = 3  # epochs, from which averaged weights know more, segments do harm, and a model can teach: docs/experiments.md


@dataclass(frozen=True)
class Choice:
    """A shape, how long it trains, and what the law expects of it."""

    shape: Shape
    tokens_per_step: int
    tokens: float
    epochs: float
    seconds: float
    """Of all its steps."""
    is_whole: bool
    """Whether the training takes all of the minutes."""
    bits_per_byte: float
    teaches: bool
    """Whether its model is to teach another one, in the minutes that it leaves."""

    @property
    def rank(self) -> tuple[float, float]:
        """The lower, the better: what it or the model that it teaches ends at; of what is too slow, its size."""
        return self.bits_per_byte * (TAUGHT if self.teaches else 1), self.shape.flops_per_token(0)


@dataclass(frozen=True)
class Chosen:
    """What `choose` decides, and what is said of it."""

    values: dict[str, Any]
    """{section__key: value} of the open keys."""
    lines: list[str]
    """What was chosen, and what else there was."""
    tokens_per_second: float


@dataclass
class Speed:
    """Seconds of a step of any shape, from the steps that were timed and the FLOPs of both."""

    assumed_flops: float
    """FLOP/s until the first step is timed."""
    sequence_length: int
    timed: dict[tuple[Shape, int], float] = field(default_factory=dict)
    """{(shape, tokens of a step): its seconds}; infinity if it does not fit."""

    def seconds(self, shape: Shape, tokens_per_step: int) -> float:
        """Return what was timed, or what follows from the two timed steps that are nearest in FLOPs.

        A step takes a fixed time, and the rest of it grows with its FLOPs. With one timed step, a third is fixed.
        """
        if (known := self.timed.get((shape, tokens_per_step))) is not None:
            return known
        flops = self._flops(shape, tokens_per_step)
        steps = [(self._flops(*step), seconds) for step, seconds in self.timed.items() if seconds < math.inf]
        steps.sort(key=lambda step: abs(math.log(step[0] / flops)))
        if not steps:
            return flops / self.assumed_flops
        near, seconds = steps[0]
        fixed = seconds / 3
        if len(steps) > 1 and steps[1][0] != near:
            other, other_seconds = steps[1]
            slope = (other_seconds - seconds) / (other - near)
            fixed = min(max(seconds - slope * near, 0.0), 0.9 * seconds)
        return fixed + (seconds - fixed) * flops / near

    def untimed(self, best: Choice, choices: list[Choice]) -> Choice | None:
        """Return the choice whose step should be timed next: the best, or one of another width; None if none should.

        Two widths at least: from one alone, the others' steps, and so the choice, would follow from what is assumed.
        """
        if (best.shape, best.tokens_per_step) not in self.timed:
            return best
        possible = [choice for choice in choices if choice.bits_per_byte < math.inf]
        others = [choice for choice in possible if choice.shape.width != best.shape.width]
        return _best(others) if others and len({shape.width for shape, _ in self.timed}) == 1 else None

    def _flops(self, shape: Shape, tokens_per_step: int) -> float:
        return tokens_per_step * shape.flops_per_token(self.sequence_length)


def choose(said: ResolvedConfig, device: torch.device, num_processes: int, may_teach: bool) -> Chosen:
    """Return values for the open keys.

    said: the config, with its precision decided, in which these keys hold no choice yet. may_teach: whether another
    model can follow, as in api.train_once. All ranks call it, and each times the same steps. Raises UserError if no
    shape goes with what is stated, or fits into the free memory.
    """
    config, minutes = said.config, said.config.train.max_minutes or math.inf
    open_keys = {key for key in AUTOPILOT if said.sources.get(key) == "auto"}
    text = decide(lambda: measure_text(config, open_keys))
    question = Question(config, open_keys, text, num_processes, may_teach)
    shapes = question.shapes()
    peak = decide(lambda: peak_flops(device, str(config.train.mixed_precision))) * num_processes
    speed = Speed(ASSUMED_MFU * peak, config.batch.sequence_length)
    while True:
        choices = list(question.choices(shapes, speed))
        best = _best(choices)
        untimed = speed.untimed(best, choices) if len(speed.timed) < MAX_TIMED else None
        if untimed is None:
            break
        timed = config.replace(**question.values(untimed))
        seconds = seconds_per_step(timed, untimed.shape.vocabulary, device, num_processes)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next shape, and the run, count what is free
        speed.timed[untimed.shape, untimed.tokens_per_step] = seconds
    if all(seconds == math.inf for seconds in speed.timed.values()):
        raise UserError("train.max_minutes: no shape fits into the free memory; end other programs, or use a --config.")
    others = _others(best, choices)
    for name, times in (("half the time", 0.5), ("twice the time", 2)):
        longer = replace(question, config=config.replace(train__max_minutes=times * minutes))
        others[name] = _best(longer.choices(shapes, speed))
    seconds = speed.seconds(best.shape, best.tokens_per_step)
    values = question.values(best)
    is_averaged = values.get("optim__ema_export", False)
    unknown = "dropout" if config.model.dropout else f"text so {text.strange}" if text.strange else ""
    lines = _described(best, others, unknown, is_averaged)
    return Chosen(values, lines, best.tokens_per_step / seconds)


def _best(choices: Iterable[Choice]) -> Choice:
    """Return the choice that ends lowest; of those that can't be trained in the minutes, the smallest."""
    return min(choices, key=lambda choice: choice.rank)


def _others(best: Choice, choices: list[Choice]) -> dict[str, Choice]:
    """Return {what is different: the best choice with it}: the next widths, and the second-best vocabulary."""
    widths = sorted({choice.shape.width for choice in choices})
    place = widths.index(best.shape.width)
    near = [*widths[max(0, place - 1) : place], *widths[place + 1 : place + 2]]
    others = {f"width {width}": _best(choice for choice in choices if choice.shape.width == width) for width in near}
    if rest := [choice for choice in choices if choice.shape.vocabulary != best.shape.vocabulary]:
        others[_vocabulary(_best(rest).shape)] = _best(rest)
    return others


def measure_text(config: RunConfig, open_keys: set[str]) -> Text:
    """Return what the law has to know of the training text. Reads at most READ_BYTES of it."""
    with tempfile.TemporaryDirectory() as scratch:
        blocks, num_bytes = load_corpus(config.data).train_start(READ_BYTES, Path(scratch))
    sample = blocks[:: max(1, math.ceil(sum(map(len, blocks)) / SAMPLE_BYTES))]
    with ThreadPoolExecutor(1) as pool:  # LZMA takes as long as the vocabularies
        found_density = pool.submit(density, "".join(sample))
        ratios = _tokens_per_byte(config, blocks, sample, "tokenizer.vocab_size" in open_keys)
    return Text(num_bytes, found_density.result(), ratios).without_idle_entries()


def _tokens_per_byte(config: RunConfig, blocks: list[str], sample: list[str], is_any: bool) -> dict[int, float]:
    """Return {entries: tokens per byte} of the vocabularies that the config allows. is_any: BPE of any size, or bytes.

    Bytes are for texts that support no BPE. Of 200 kB of German, Shakespeare and docstrings, they end at 1.755, 2.043
    and 2.121 bits per byte (5 layers of width 256), and taught by such a model at 2.001 and 2.096 of the last two; 512
    entries end at 1.753, 2.032 (4 layers of 192) and 2.190, and taught at 1.678, 1.977 and 2.112 (one seed, not kept).
    And with bytes, a model sees half as much text at a time.
    """
    tokenizer, joined = config.tokenizer, "".join(sample)
    sample_bytes = len(joined.encode())
    if tokenizer.kind == "char":
        return {256 + len({c for block in blocks for c in block if c > "\x7f"}): len(joined) / sample_bytes}
    if tokenizer.kind == "pretrained" and (found := find_tokenizer(tokenizer, {}, Path())):
        ids = found(sample, add_special_tokens=False, verbose=False)["input_ids"]
        return {embedding_rows(found): sum(map(len, ids)) / sample_bytes}
    size = tokenizer.max_vocab_size
    ratios = {} if tokenizer.kind == "byte" else tokens_per_byte(sample, VOCABULARIES if is_any else (size,))
    if not ratios and (is_any or tokenizer.kind == "byte"):
        return {256: 1.0}
    return ratios or {size: 0.5}  # which the text does not support, as the tokenizer will say


def density(text: str) -> float:
    """Return the bits per byte of a text that LZMA has compressed."""
    raw = text.encode()
    return 8 * len(lzma.compress(raw)) / len(raw)


@dataclass(frozen=True)
class Question:
    """What there is to choose: the open keys of a config, for a text and so many processes."""

    config: RunConfig
    open_keys: set[str]
    text: Text
    num_processes: int
    may_teach: bool

    def shapes(self) -> list[Shape]:
        """Return the shapes that go with what is stated, smaller widths first. Raises UserError if there are none."""
        model, refused = self.config.model, None
        widths = WIDTHS if "model.hidden_size" in self.open_keys else (model.hidden_size,)
        possible, step = list[Shape](), self.step_of()
        for width, vocabulary in itertools.product(widths, self.text.tokens_per_byte):
            is_deep = "model.num_hidden_layers" in self.open_keys
            shape = Shape(width, layers_of(width) if is_deep else model.num_hidden_layers, vocabulary)
            whole = Choice(shape, step, step, 0.0, math.inf, True, math.inf, False)
            try:
                self.config.replace(**self.values(whole))
                possible.append(shape)
            except UserError as error:
                refused = refused or error
        if not possible:
            raise UserError(f"train.max_minutes: no shape that would be chosen goes with what is stated; {refused}")
        return possible

    def step_of(self, tokens: float = 0.0) -> int:
        """Return the tokens of a step of a training of so many, which micro-batches divide."""
        batch = self.config.batch
        if "batch.tokens_per_step" not in self.open_keys:
            return batch.tokens_per_step
        micro_batch = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 1
        multiple = micro_batch * batch.sequence_length * self.num_processes
        return multiple * max(1, round(tokens_per_step_of(tokens) / multiple))

    def _stated_tokens(self, step: int, text_tokens: float) -> float:
        """Return the tokens after which the config ends the training, apart from the minutes."""
        train = self.config.train
        stated = None if "train.max_tokens" in self.open_keys else train.max_tokens
        limits = train.max_steps and train.max_steps * step, train.max_epochs and train.max_epochs * text_tokens, stated
        return min(filter(None, limits), default=math.inf)

    def _longest(self, shape: Shape, speed: Speed, text_tokens: float) -> tuple[float, int]:
        """Return the most tokens that a shape sees in the minutes or that the config allows, and those of a step."""
        seconds = SHARE_OF_STEPS * 60 * (self.config.train.max_minutes or math.inf)
        larger, step = self.step_of(), 0
        while larger > step:  # larger steps see more tokens in the time, and with more tokens go larger steps
            step = larger
            affordable = seconds / speed.seconds(shape, step) * step
            tokens = min(affordable, self._stated_tokens(step, text_tokens))
            larger = self.step_of(tokens)
        return tokens, step

    def choices(self, shapes: list[Shape], speed: Speed) -> Iterator[Choice]:
        """Yield all of these shapes, with all lengths of a training that are worth a thought."""
        lengths = LENGTHS[::-1] if "train.max_tokens" in self.open_keys else ()
        minutes = self.config.train.max_minutes or math.inf
        for shape in shapes:
            text_tokens = self.text.num_bytes * self.text.tokens_per_byte[shape.vocabulary]
            whole, step_of_whole = self._longest(shape, speed, text_tokens)
            shorter = [(tokens, self.step_of(tokens)) for tokens in lengths if tokens < whole]
            for tokens, step in ((whole, step_of_whole), *shorter):
                is_whole = tokens == whole
                is_small = shape.body_parameters <= max(FEW_WEIGHTS, tokens / TOKENS_PER_WEIGHT)
                is_last_resort = is_whole and shape.width == shapes[0].width
                is_known = is_last_resort or (is_small and tokens >= MIN_STEPS * step)
                loss = bits_per_byte(self.text, shape, tokens, step) if is_known and tokens >= step else math.inf
                spent = tokens / step * speed.seconds(shape, step)
                epochs = tokens / text_tokens
                is_used_up = not is_whole and epochs >= OFTEN
                teaches = self.may_teach and is_used_up and has_time_to_teach(spent / SHARE_OF_STEPS, minutes)
                yield Choice(shape, step, max(tokens, step), epochs, spent, is_whole, loss, teaches)

    def values(self, choice: Choice) -> dict[str, Any]:
        """Return {section__key: value} of the open keys."""
        config, shape, step = self.config, choice.shape, choice.tokens_per_step
        steps = choice.tokens / step
        has_size = config.tokenizer.kind in ("bpe", "byte")  # others have the entries that they have
        repeated = values_of_repeats(choice.epochs, steps)
        if config.golf.qat_fraction or not {"optim.ema_decay", "optim.ema_export"} <= self.open_keys:
            repeated = {key: value for key, value in repeated.items() if not key.startswith("optim.ema")}
        muon, adamw = rates_of(shape.width, "optim.ema_export" in repeated)
        evaluations = min(EVALUATIONS, max(1, choice.seconds / EVALUATION_SECONDS))
        values = {
            "tokenizer.kind": "byte" if shape.vocabulary == 256 else "bpe",
            "tokenizer.vocab_size": "auto" if shape.vocabulary == 256 or not has_size else shape.vocabulary,
            "model.hidden_size": shape.width,
            "model.num_hidden_layers": shape.layers,
            "model.num_attention_heads": heads_of(shape.width, config.model.num_key_value_heads or 1),
            "batch.tokens_per_step": step,
            "optim.learning_rate": float(f"{muon:.2g}"),
            "optim.adamw_learning_rate": float(f"{adamw:.2g}"),
            "batch.segment_length": config.batch.segment_length,
            "optim.ema_decay": None,
            "optim.ema_export": False,
            "train.max_tokens": None if choice.is_whole else round(choice.tokens / step) * step,
            "schedule.warmup_steps": min(20, int(steps / 10)),
            "train.eval_every_steps": max(1, round(steps / evaluations)),
        }
        return {key.replace(".", "__"): value for key, value in (values | repeated).items() if key in self.open_keys}


def values_of_repeats(epochs: float, steps: float) -> dict[str, Any]:
    """Return {section.key: value} of what goes with a text that is read so often: averages, and no segments."""
    averages = {"optim.ema_decay": decay_of(steps), "optim.ema_export": True}
    return averages | {"batch.segment_length": None} if epochs >= OFTEN else {}


def seconds_per_step(config: RunConfig, vocabulary: int, device: torch.device, num_processes: int) -> float:
    """Return the seconds of an uncompiled step of this config on the slowest rank; infinity if it does not fit.

    config: its precision must be decided. All ranks call it.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(config.train.mixed_precision))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        model = build_model(config, vocabulary, device.type).train()
        try:
            fitting = choose_micro_batch_size(config, model, num_processes, device.type, free_bytes(device))
        except UserError:
            fitting = 0
        if (size := min(gather(fitting))) == 0:
            return math.inf
        optimizer = build_optimizer(model, config.optim)
        optimizer.create_state()
        ids = torch.randint(vocabulary, (size, config.batch.sequence_length), device=device)

        def step() -> None:
            for _ in range(config.batch.accumulation_steps(size, num_processes)):
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    loss = model(input_ids=ids, shift_labels=ids.clone()).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return max(gather(_median_seconds(step, device)))


def _median_seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the median of its seconds over TIMED_SECONDS, and at least three times, after two times.

    All ranks do it as often: in a step, they exchange Muon's updates.
    """
    work()
    second = seconds_of(work, device)
    times = decide(lambda: min(max(3, round(TIMED_SECONDS / second)), MAX_TIMES))
    return statistics.median(seconds_of(work, device) for _ in range(times))


def _described(best: Choice, others: Mapping[str, Choice], unknown: str, is_averaged: bool) -> list[str]:
    """Return three lines: what was chosen, with what the law expects of it; what else there was; how to change it.

    others: {what is different: the best choice with it}. unknown: what the law was not fitted to. is_averaged: whether
    the model has the average of its weights.
    """
    shape = best.shape
    what = f"{count_of(shape.layers, 'layer')} of width {shape.width}, {_vocabulary(shape)}"
    what += ", averaged weights" if is_averaged else ""
    length = f"{rounded(best.tokens)} tokens in steps of {best.tokens_per_step:,}"
    length += "" if best.is_whole else f", which use up this text in {duration(best.seconds)}"
    length += "; then it teaches another model" if best.teaches else ""
    found = [
        f"{name} {more:+.1%}" if abs(more) < MAX_KNOWN else f"{name} unknown"
        for name, other in others.items()
        if max(other.bits_per_byte, best.bits_per_byte) < math.inf
        for more in (other.rank[0] / best.rank[0] - 1,)
    ]
    is_short = best.tokens < MIN_STEPS * best.tokens_per_step
    unknown = unknown or ("training so short" if is_short else "")
    known = f"the law knows no {unknown}" if unknown else "the law is off by 2%"
    instead = [labeled("instead", f"{', '.join(found)} (bits per byte; {known})")] if found else []
    return [
        labeled("chosen", f"{what}; about {length}"),
        *instead,
        labeled("yours", "what you state stays, such as --model.hidden_size; config.yaml has all"),
    ]


def _vocabulary(shape: Shape) -> str:
    return "bytes" if shape.vocabulary == 256 else f"vocabulary {shape.vocabulary:,}"
