"""Climb from a naive training loop to hfgolf's: python benchmarks/ladder.py --config configs/small.yaml

Measures a step of each rung on this machine: tokenize every batch, stored tokens, tokens in RAM, vectorized batches,
torch.compile, mixed precision, SDPA, hfgolf. All rungs use the same model, data, optimizer and learning rates, and
their first losses must agree. Writes ladder.png and ladder.json and prints a table. Holds one copy of the model and
the optimizer state per rung; dropout is 0.

Each rung keeps the improvements of the rungs below it. The code is meant to be read: a few small functions each make a
batch in one way, and `plain_step` around them is a training loop as in a tutorial. The last rung is hfgolf's
train_step(), which adds a loss that never holds all logits of a batch, and the fastest attention for this device.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfgolf import palette
from hfgolf.commands.options import ScriptParser, check_output, within
from hfgolf.commands.scratch import scratch_run
from hfgolf.config.parse import load_config
from hfgolf.data.batches import block_starts, gather
from hfgolf.data.token_cache import TokenCache
from hfgolf.data.token_stream import TokenStream, open_stream
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import build_optimizer
from hfgolf.optim.schedule import apply_schedule
from hfgolf.run.provenance import run_metadata
from hfgolf.system.command import run_command
from hfgolf.system.durable import write_text
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import accelerator_name, measured_peak_flops, missing_compiler, synchronize
from hfgolf.train.console import show_log
from hfgolf.train.feed import blocks_per_epoch, is_out_of_memory
from hfgolf.train.loop import train_step
from hfgolf.train.run import Run

Blocks = Callable[[np.ndarray], Tensor]
"""Maps the starts of blocks in the training stream to (B, T + 1) int64 tokens."""

# The largest allowed difference between the losses of two rungs, in nats per token: in fp32, and if one of them uses 16
# bits. A step changes the loss by more than this, and a wrong batch by far more.
TOLERANCES = {"no": 1e-3, "bf16": 5e-2}
MIN_GAIN = 1.2  # of bf16 over fp32; below it, the ladder says why
MAX_OTHERS_SHARE = 0.1  # of the cores, taken by other programs while the ladder climbed


@dataclass
class Rung:
    """One way to make a step, or the reason why this machine skips it."""

    name: str
    what: str
    """What is new in this rung."""
    step: Callable[[], float] | None
    """Makes the next step, waits for the device, and returns the loss in nats per token."""
    precision: str = "no"
    skipped: str = ""


class TextFiles:
    """The text of the first steps as files, which the naive loop tokenizes again for each batch.

    Each file has the text of one piece of the token cache, decoded before the measurement.
    """

    def __init__(self, tokens: TokenCache, sequence_length: int, starts: np.ndarray, folder: Path) -> None:
        self.sequence_length = sequence_length
        self.tokenizer = tokens.tokenizer
        self.folder = folder
        self.ends = np.cumsum(tokens.train.piece_tokens, dtype=np.int64)
        self.starts = self.ends - tokens.train.piece_tokens
        self.begins_document: dict[int, bool] = {}
        """Whether an end-of-text token precedes each piece."""
        for start in starts.tolist():
            for piece in self.pieces(start):
                ids = tokens.train.tokens[self.starts[piece] : self.ends[piece]].tolist()
                self.begins_document[piece] = ids[0] == self.tokenizer.eos_token_id
                text = self.tokenizer.decode(ids[self.begins_document[piece] :], clean_up_tokenization_spaces=False)
                (folder / f"{piece}.txt").write_text(str(text), encoding="utf-8", newline="")

    def pieces(self, start: int) -> range:
        """Return the indices of the pieces that the block starting at token `start` spans."""
        first, last = np.searchsorted(self.ends, [start, start + self.sequence_length], side="right").tolist()
        return range(first, last + 1)

    def read(self, starts: np.ndarray) -> Tensor:
        """Read the text of each sequence, tokenize it and cut out the sequence."""
        rows = []
        for start in starts.tolist():
            ids: list[int] = []
            for piece in self.pieces(start):
                text = (self.folder / f"{piece}.txt").read_bytes().decode("utf-8")
                ids += [self.tokenizer.eos_token_id] if self.begins_document[piece] else []
                ids += self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            first = start - int(self.starts[self.pieces(start)[0]])
            rows.append(torch.tensor(ids[first : first + self.sequence_length + 1]))
        return torch.stack(rows)


def from_disk(path: Path, sequence_length: int) -> Blocks:
    """Return a reader that opens the file of token ids for each sequence and cuts out the sequence."""

    def read(starts: np.ndarray) -> Tensor:
        return torch.stack(
            [torch.tensor(open_stream(path).tokens[s : s + sequence_length + 1].tolist()) for s in starts.tolist()]
        )

    return read


def from_memory(tokens: np.ndarray, sequence_length: int) -> Blocks:
    """Return a reader that cuts each sequence out of an array in memory."""

    def read(starts: np.ndarray) -> Tensor:
        return torch.stack([torch.tensor(tokens[s : s + sequence_length + 1].tolist()) for s in starts.tolist()])

    return read


def vectorized(stream: TokenStream, sequence_length: int) -> Blocks:
    """Return a reader that reads all sequences of a batch at once."""
    return lambda starts: gather(stream, starts, sequence_length)


def plain_step(run: Run, blocks: Blocks, attention: str, is_compiled: bool, precision: str) -> Callable[[], float]:
    """Return a plain training step on a copy of the run's model: forward, backward, clip, update.

    attention: transformers' name for it; eager means plain matmuls. Data, optimizer and learning rates are the run's.
    """
    config, device = run.config, run.accelerator.device
    model = fp32_copy(run.golf_model, attention)
    optimizer = build_optimizer(model, config.optim)
    if is_compiled:
        model.compile()
    autocast = nullcontext() if precision == "no" else torch.autocast(device.type, torch.bfloat16)
    numbers = itertools.count()

    def step() -> float:
        number = next(numbers)
        total = torch.zeros((), device=device)
        for part in np.split(step_starts(run, number), run.accumulation_steps):
            tokens = blocks(part).to(device)
            with autocast:
                logits = model(input_ids=tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            (loss / run.accumulation_steps).backward()
            total += loss.detach() / run.accumulation_steps
        if config.train.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        apply_schedule(optimizer, number, math.inf, config.optim, config.schedule)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def step_starts(run: Run, step: int) -> np.ndarray:
    """Return the token index at which each block of a step starts."""
    batch = run.config.batch
    positions = step * batch.sequences_per_step + np.arange(batch.sequences_per_step)
    return block_starts(run.config.run.seed, positions, blocks_per_epoch(run), batch.sequence_length)


def fp32_copy(model: GolfForCausalLM, attention: str) -> GolfForCausalLM:
    """Return an independent, uncompiled fp32 copy of the model."""
    with model.device:
        duplicate = GolfForCausalLM(copy.deepcopy(model.config))
    duplicate.load_state_dict(model.state_dict())
    duplicate.set_attn_implementation(attention)
    return duplicate.train()


def hfgolf_step(run: Run) -> Callable[[], float]:
    """Return hfgolf's own step, on the run itself."""

    def step() -> float:
        loss = train_step(run, math.inf).loss
        run.state.step += 1
        if run.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return loss

    return step


def build_rungs(run: Run, num_steps: int, folder: Path, may_compile: bool) -> list[Rung]:
    """Return the rungs from the bottom up, for a run that has made no step and is not compiled.

    num_steps: the most steps that a rung will make. folder: for the text files of the lowest rung. may_compile: compile
    if this device has a compiler.
    """
    config, stream, length = run.config, run.tokens.train, run.config.batch.sequence_length
    if num_steps * config.batch.sequences_per_step > blocks_per_epoch(run):
        raise UserError(
            f"--repetitions: {num_steps} steps would read the text more than once; use fewer repetitions or more text."
        )
    if not isinstance(stream, TokenStream):
        raise UserError("data.source: the ladder begins at text, which shards do not have; use another source.")
    starts = [step_starts(run, step) for step in range(num_steps)]
    gathered = vectorized(stream, length)
    texts = TextFiles(run.tokens, length, np.unique(np.concatenate(starts)), folder)
    is_same = torch.equal(texts.read(starts[0]), gathered(starts[0]))
    precision, source = run.decisions.precision, run.decisions.sources["train.mixed_precision"]
    skipped = {
        "naive": "" if is_same else "this tokenizer does not reproduce its own tokens from decoded text",
        "in RAM": "" if stream.is_in_memory else "data.in_memory is false, or the tokens do not fit in memory",
        "compiled": "" if may_compile else "train.compile is false",
        "mixed precision": "" if precision != "no" else f"train.mixed_precision is no ({source})",
    }
    if precision == "no" and source == "auto":
        device = run.accelerator.device
        gain = measured_peak_flops(device, torch.bfloat16, 512) / measured_peak_flops(device, torch.float32, 512)
        skipped["mixed precision"] = f"bf16 products are {gain:.2f}x as fast as fp32 here ({bf16_instructions(device)})"
    if may_compile and missing_compiler(run.accelerator.device):
        skipped["compiled"] = "this device has no compiler"
    is_compiled = not skipped["compiled"]
    stored, in_memory = from_disk(stream.path, length), from_memory(stream.tokens, length)
    rungs: list[tuple[str, str, Blocks, str, bool, str]] = [
        ("naive", "tokenize the text of each batch", texts.read, "eager", False, "no"),
        ("tokenized", "token ids from a file", stored, "eager", False, "no"),
        ("in RAM", "token ids from memory", in_memory, "eager", False, "no"),
        ("vectorized", "all sequences of a batch in one read", gathered, "eager", False, "no"),
        ("compiled", "torch.compile", gathered, "eager", is_compiled, "no"),
        ("mixed precision", precision, gathered, "eager", is_compiled, precision),
        ("SDPA", "scaled_dot_product_attention", gathered, "sdpa", is_compiled, precision),
    ]
    built = []
    for name, what, blocks, attention, compiling, rung_precision in rungs:
        reason = skipped.get(name, "")
        step = None if reason else plain_step(run, blocks, attention, compiling, rung_precision)
        built.append(Rung(name, what, step, rung_precision, reason))
    if is_compiled:
        run.raw_model.compile()
    what = f"train_step(): chunked loss, {run.raw_model.config._attn_implementation} attention"
    return [*built, Rung("hfgolf", what, hfgolf_step(run), precision)]


def climb(rungs: list[Rung], num_losses: int, repetitions: int) -> list[dict[str, Any]]:
    """Run all rungs and return a row for each: its first losses, seconds and ratios, or why it was skipped.

    The rungs take turns, one step each, so that other work on the machine affects all of them alike. "faster" (than the
    previous rung) and "faster_than_first" are medians over the pairs of a turn.
    """
    losses = {rung.name: first_losses(rung, num_losses) for rung in rungs}
    seconds: dict[str, list[float]] = {rung.name: [] for rung in rungs if rung.step}
    for _ in range(repetitions):
        for rung in rungs:
            if rung.step:
                started_at = time.perf_counter()
                rung.step()
                seconds[rung.name].append(time.perf_counter() - started_at)
    rows = []
    before = first = next(iter(seconds))
    for rung in rungs:
        row: dict[str, Any] = {"rung": rung.name, "what": rung.what, "precision": rung.precision}
        if rung.step:
            own = seconds[rung.name]
            row |= {
                "losses": losses[rung.name],
                "milliseconds": 1e3 * statistics.median(own),
                "faster": statistics.median(a / b for a, b in zip(seconds[before], own, strict=True)),
                "faster_than_first": statistics.median(a / b for a, b in zip(seconds[first], own, strict=True)),
                "seconds": own,
            }
            before = rung.name
        else:
            row["skipped"] = rung.skipped
        rows.append(row)
    return rows


def first_losses(rung: Rung, num_losses: int) -> list[float]:
    """Make a rung's first steps and return their losses. A rung that runs out of memory is marked as skipped."""
    try:
        return [rung.step() for _ in range(num_losses)] if rung.step else []
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        rung.step, rung.skipped = None, "out of memory"
        return []


def busy_seconds() -> tuple[float, float]:
    """Return the seconds that the cores have worked for other programs, or been taken by a hypervisor, and the time."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)  # a guest's are in user, too
    return sum(times) - waiting - getattr(times, "guest_nice", 0.0) - own.user - own.system, time.perf_counter()


def others_share(since: tuple[float, float]) -> float:
    """Return the share of this machine's cores that other programs took since `busy_seconds` returned this."""
    spent, seconds = (now - before for now, before in zip(busy_seconds(), since, strict=True))
    return max(0.0, spent / (seconds * (psutil.cpu_count() or 1)))


def product_seconds(model: nn.Module, num_tokens: int) -> dict[str, float]:
    """Measure the products of all linear layers for so many tokens, forward and backward, in each precision."""
    device = next(model.parameters()).device
    counts = Counter(tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear))
    total = {}
    for precision, dtype in (("no", torch.float32), ("bf16", torch.bfloat16)):
        total[precision] = 0.0
        for (rows, columns), count in counts.items():
            inputs = torch.randn(num_tokens, columns, device=device).to(dtype)
            weight = torch.randn(rows, columns, device=device).to(dtype)
            outputs = inputs @ weight.T  # the first of each product is a warm-up
            fastest = math.inf
            for _ in range(4):
                synchronize(device)
                started_at = time.perf_counter()
                outputs = inputs @ weight.T
                outputs @ weight
                outputs.T @ inputs
                synchronize(device)
                fastest = min(fastest, time.perf_counter() - started_at)
            total[precision] += count * fastest
    return total


@dataclass(frozen=True)
class Bf16Facts:
    """What was measured to explain the gain of the rung of mixed precision."""

    step_seconds: dict[str, float]
    """Of a step in each precision ("no", "bf16"), the median."""
    product_seconds: dict[str, float]
    """Of the products of a step's linear layers, alone."""
    peak_flops: dict[str, float]
    """FLOP/s of large square products."""
    instructions: str
    """What the processor has for bf16."""
    others_share: float
    """Share of the cores that other programs took meanwhile."""


def measure_bf16(rows: list[dict[str, Any]], run: Run, others: float) -> Bf16Facts | None:
    """Measure what explains a small gain of the rung of mixed precision; None if it is skipped or gains enough."""
    climbed = [row for row in rows if "losses" in row]
    pairs = [pair for pair in pairwise(climbed) if pair[1]["rung"] == "mixed precision"]
    if not pairs or pairs[0][1]["faster"] >= MIN_GAIN:
        return None
    device, config = run.accelerator.device, run.config
    products = product_seconds(run.raw_model, run.micro_batch_size * config.batch.sequence_length)
    return Bf16Facts(
        step_seconds={row["precision"]: 1e-3 * row["milliseconds"] for row in pairs[0]},
        product_seconds={name: run.accumulation_steps * seconds for name, seconds in products.items()},
        peak_flops={
            "no": measured_peak_flops(device, torch.float32),
            "bf16": measured_peak_flops(device, torch.bfloat16),
        },
        instructions=bf16_instructions(device),
        others_share=others if device.type == "cpu" else 0.0,
    )


def bf16_instructions(device: torch.device) -> str:
    """Return what a device has to multiply in bf16, in words."""
    if device.type == "cpu":
        found = {"AMX": torch.cpu._is_amx_tile_supported(), "AVX512-BF16": torch.cpu._is_avx512_bf16_supported()}
        return " and ".join(name for name, has in found.items() if has) or "neither AMX nor AVX512-BF16"
    is_native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "native bf16" if is_native else "no native bf16"


def why_no_gain(facts: Bf16Facts) -> str:
    """Return one line that says why bf16 is less than MIN_GAIN times as fast as fp32, from what was measured."""
    step, products, peak = facts.step_seconds, facts.product_seconds, facts.peak_flops
    of_products, of_peak = products["no"] / products["bf16"], peak["bf16"] / peak["no"]
    share = products["no"] / step["no"]
    reasons = []
    if facts.others_share > MAX_OTHERS_SHARE:
        taken = f"other programs took {facts.others_share:.0%} of the cores meanwhile"
        reasons.append(f"{taken}, so measure again on a quiet machine")
    if of_peak < MIN_GAIN:
        reasons.append(f"this hardware ({facts.instructions}) multiplies large matrices {of_peak:.2f}x as fast in bf16")
    elif of_products < MIN_GAIN:
        reasons.append(
            f"this model's products are too small: {of_products:.2f}x as fast in bf16, large ones {of_peak:.2f}x"
        )
    elif (at_most := 1 / (1 - share + share / of_products)) < MIN_GAIN:
        reasons.append(
            f"products are only {share:.0%} of the step in fp32, so that they are {of_products:.2f}x as fast in bf16"
            f" gains {at_most:.2f}x at most"
        )
    rest = {name: step[name] - products[name] for name in step}
    if not reasons:
        reasons.append(
            f"the products are {of_products:.2f}x as fast, but the rest of the step, casts included, takes"
            f" {1e3 * rest['bf16']:,.0f} ms in bf16 and {1e3 * rest['no']:,.0f} ms in fp32"
        )
    return f"bf16 is only {step['no'] / step['bf16']:.2f}x as fast as fp32: {'; and '.join(reasons)}"


def check_losses(rows: list[dict[str, Any]]) -> None:
    """Add "losses_off_by" to each row: the largest difference from the first rung's losses, in nats per token.

    Raises ValueError if that exceeds TOLERANCES, because the rung then trains something else.
    """
    climbed = [row for row in rows if "losses" in row]
    for row in climbed:
        pairs = zip(row["losses"], climbed[0]["losses"], strict=True)
        row["losses_off_by"] = max(abs(loss - first) for loss, first in pairs)
        if not row["losses_off_by"] <= TOLERANCES[row["precision"]]:
            raise ValueError(f"{row['rung']}: its losses {row['losses']} differ from those of {climbed[0]['rung']}")


def main() -> None:
    parser = ScriptParser(
        __doc__,
        "Also takes the options of hfgolf train: --config FILE --section.key value. --train.compile false skips the\n"
        "rung of torch.compile, --train.mixed_precision no the rung of mixed precision.",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/ladder"), help="folder to write to (runs/ladder)")
    parser.add_argument("--repetitions", type=within(1, 10**4), default=9, help="timed steps per rung (9)")
    parser.add_argument("--losses", type=within(1, 10**4), default=4, help="first steps, whose losses are compared (4)")
    arguments, run_options = parser.parse_known_args()
    resolved = load_config(run_options)
    may_compile = resolved.config.train.compile is not False

    show_log(True)
    folder = arguments.output
    check_output("--output", folder, besides=[folder / "ladder.json", folder / "ladder.png"])
    changes = {"model__dropout": 0.0, "model__attention_dropout": 0.0, "train__compile": False}
    # without segments: the naive rungs read whole sequences
    with scratch_run(resolved, "ladder", **changes, batch__segment_length=None) as run:
        if run.accelerator.num_processes > 1:
            raise UserError("ladder.py measures one process; start it with python, not accelerate launch.")
        if run.config.train.mixed_precision == "fp16":
            raise UserError("train.mixed_precision: fp16 has no rung; allowed: no, bf16.")
        rungs = build_rungs(run, arguments.losses + arguments.repetitions, run.folder.path, may_compile)
        print(f"\nclimbing: {arguments.losses} + {arguments.repetitions} steps per rung")
        before = busy_seconds()
        rows = climb(rungs, arguments.losses, arguments.repetitions)
        facts = measure_bf16(rows, run, others_share(before))
    check_losses(rows)
    record = {
        "rungs": rows,
        "bf16": asdict(facts) if facts else None,
        "threads": torch.get_num_threads(),
        "metadata": run_metadata(run.resolved),
    }
    write_text(folder / "ladder.json", json.dumps(record, indent=1))
    draw(rows, f"{run.config.run.name} on {accelerator_name()}", folder / "ladder.png")
    print(f"\n{table(rows)}")
    if facts:
        print(why_no_gain(facts))
    print(f"wrote {folder / 'ladder.png'} and {folder / 'ladder.json'}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return one row per rung: its time, its speedup, its last loss, and the difference from the first rung's."""
    lines = [f"{'rung':<17}{'ms/step':>11}{'faster':>8}{'total':>8}{'loss':>9}{'off by':>9}  what is new"]
    for row in rows:
        if "skipped" in row:
            lines.append(f"{row['rung']:<17}skipped: {row['skipped']}")
            continue
        lines.append(
            f"{row['rung']:<17}{row['milliseconds']:>11,.1f}{row['faster']:>7.2f}x{row['faster_than_first']:>7.2f}x"
            f"{row['losses'][-1]:>9.4f}{row['losses_off_by']:>9.0e}  {row['what']}"
        )
    lines.append("all rungs have the same losses, within the tolerance of their precision")
    return "\n".join(lines)


@palette.style()
def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write the picture: one bar per measured rung, with its time and speedup."""
    from matplotlib.figure import Figure

    climbed = [row for row in rows if "skipped" not in row]
    figure = Figure(figsize=(8, 1 + 0.5 * len(climbed)), dpi=120, layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row["rung"] for row in climbed], [row["milliseconds"] for row in climbed], color=palette.BLUE)
    labels = [f" {row['milliseconds']:,.0f} ms, {row['faster_than_first']:.2f}x" for row in climbed]
    axes.bar_label(bars, labels)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set(xlabel="milliseconds per step (median)", title=title)
    axes.grid(visible=False)
    palette.save(figure, path)


if __name__ == "__main__":
    run_command(main)
