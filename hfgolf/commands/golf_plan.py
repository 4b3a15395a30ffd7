"""What to train for a number of bytes: hfgolf golf plan --budget_bytes 500000 --minutes 10

Tries every shape and gives each the bits per weight that fill the budget; prints the ten that should score best, what
their bytes go to, and the options to train the first. --runs fits the prediction to your own finished runs. Without
them it rests on characters of Shakespeare and models of up to 0.4 M weights, and is an assumption anywhere else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfgolf.commands.options import ScriptParser, bounded
from hfgolf.run.folder import RunFolder
from hfgolf.system.errors import UserError

if TYPE_CHECKING:
    from hfgolf.compare.outcome import Outcome

WIDTHS, DEPTHS, MLP_RATIOS = range(32, 1025, 32), range(1, 17), (2, 3, 4)
MAX_BITS, MIN_BITS = 8.0, 1.5
EMBEDDING_BITS = 1.1  # more than the blocks: the records spend 4.2 to 4.7 on the embedding and 3.3 on the blocks
CODE_BYTES = 10_000  # the packed program
TABLE_BYTES = 1_500  # header, histograms
ROW_BYTES = 1.6  # a step in one byte, and a class of some 4 bits, for each row
MIN_RUNS = 6
# Bytes of English web text per token of a BPE vocabulary, as Parameter Golf's validation split has them
BYTES_PER_TOKEN = {257: 1.0, 1024: 2.436, 4096: 3.320, 8192: 3.727}


def main() -> None:
    parser = ScriptParser(__doc__)
    parser.add_argument("--budget_bytes", required=True, **bounded(1, 10**12, "bytes of the artifact and its code"))
    training = parser.add_mutually_exclusive_group(required=True)
    training.add_argument("--minutes", **bounded(1e-6, 1e9, "minutes of training"))
    training.add_argument("--tokens", **bounded(1, 10**15, "tokens of training, if time does not matter"))
    parser.add_argument("--runs", nargs="+", type=Path, help="six or more finished runs to fit loss and speed to")
    parser.add_argument("--device", help="a GPU to plan for instead of this machine, such as H100")
    parser.add_argument("--processes", **bounded(1, 65536, "devices that train together", 1))
    parser.add_argument("--mfu", **bounded(1e-6, 1.0, "fraction of the peak to assume as speed (0.4)"))
    parser.add_argument("--sequence_length", **bounded(1, 2**24, "tokens of context", 256))
    parser.add_argument(
        "--bytes_per_token",
        nargs="+",
        metavar="ENTRIES=BYTES",
        help="vocabularies to consider, and the bytes of your text per token, such as 257=1 4096=3.27; see"
        " benchmarks/vocabulary_study.py (default: those of English web text)",
    )
    parser.add_argument("--code_bytes", **bounded(0, 10**9, "bytes of the packed program", CODE_BYTES))
    parser.add_argument("--count", **bounded(1, 1000, "shapes to print", 10))
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()

    runs = read_runs(arguments.runs) if arguments.runs else []
    scaling = fit_scaling(runs) if runs else DEFAULT_SCALING
    speed = Throughput(math.inf, 1.0, "") if arguments.tokens else _find_speed(arguments, runs)
    seconds = arguments.tokens or 60 * arguments.minutes
    vocabularies = _parse_vocabularies(arguments.bytes_per_token) if arguments.bytes_per_token else BYTES_PER_TOKEN

    def best(num_bytes: int, seconds: float) -> list[Candidate]:
        budget = Budget(num_bytes, seconds, arguments.code_bytes)
        return best_shapes(budget, scaling, speed, vocabularies, arguments.sequence_length, arguments.count)

    found = best(arguments.budget_bytes, seconds)
    more = best(int(1.1 * arguments.budget_bytes), seconds), best(arguments.budget_bytes, 1.1 * seconds)
    gains = [found[0].bits_per_byte - others[0].bits_per_byte for others in more]
    if arguments.json:
        figures = [asdict(candidate) | {"options": candidate.shape.options()} for candidate in found]
        gain = dict(zip(("bytes", "training"), gains, strict=True))
        sources = {"loss": scaling.source, "speed": speed.source or None}
        print(json.dumps({"candidates": figures, "gain_of_10_percent_more": gain, "sources": sources}))
        return
    _print_plan(found, gains)
    print(f"loss: {scaling.source}")
    if len(vocabularies) > 1:
        print("vocabularies: told apart by their weights and their bytes per token only; train the best of each")
    if speed.source:
        print(f"speed: {speed.source}")
    print(f"\n{found[0].shape.options()} --golf.budget_bytes {arguments.budget_bytes}")


def _find_speed(arguments: argparse.Namespace, runs: Sequence[Outcome]) -> Throughput:
    """Return the speed that runs had, or that is assumed of a device."""
    from hfgolf.commands.needs import ASSUMED_MFU, machine_with, this_machine

    if runs and arguments.device:
        raise UserError("--device: --runs have a speed of their own; leave one out.")
    if runs:
        return fit_throughput(runs)
    mfu = arguments.mfu or ASSUMED_MFU
    if arguments.device is None:
        machine = this_machine("bf16", arguments.processes)
    else:
        machine, _ = machine_with(arguments.device, None, arguments.processes)
    return Throughput(mfu * machine.peak_flops, 0.0, machine.assumed(mfu))


def _parse_vocabularies(texts: Sequence[str]) -> dict[int, float]:
    """Return {entries: bytes per token}."""
    found = {}
    for text in texts:
        entries, _, num_bytes = text.partition("=")
        try:
            found[int(entries)] = float(num_bytes)
            if int(entries) < 257 or not 0 < float(num_bytes) < math.inf:
                raise ValueError
        except ValueError:
            raise UserError(
                f"--bytes_per_token: {text!r} is not ENTRIES=BYTES, such as 4096=3.27; allowed: 257 entries or more."
            ) from None
    return found


def _print_plan(found: Sequence[Candidate], gains: Sequence[float]) -> None:
    """Print the candidates, the bytes of the first, and what more bytes or more training would gain."""
    row = "{:>9} {:>8} {:>8} {:>6} {:>6} {:>4} {:>6} {:>12} {:>6} {:>15}"
    print(row.format("bits/byte", "(gap)", "entries", "width", "layers", "mlp", "kv", "weights", "bits", "tokens"))
    for each in found:
        shape = each.shape
        cells = [f"{each.bits_per_byte:.4f}", f"{each.gap:.4f}", f"{shape.vocab_size:,}", shape.hidden_size]
        cells += [shape.num_hidden_layers, f"{shape.mlp_ratio}x"]
        cells += [f"{shape.num_key_value_heads}/{shape.num_attention_heads}", f"{shape.parameters:,}"]
        print(row.format(*cells, f"{each.bits:.2f}", f"{each.tokens:,.0f}"))
    best = found[0]
    print(f"\nbytes of the first: {', '.join(f'{part} {size:,}' for part, size in best.num_bytes.items())}", end="")
    print(f"; {sum(best.num_bytes.values()):,} in all, {best.embedding_bits:.2f} bits per weight of the embedding")
    binds = "bytes" if gains[0] > gains[1] else "training"
    print(f"10 % more bytes: -{gains[0]:.4f}; 10 % more training: -{gains[1]:.4f} bits per byte; what binds is {binds}")


@dataclass(frozen=True)
class Shape:
    """A Golf model with its other settings at their defaults: tied embedding, RMS norms, normed queries and keys."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    mlp_ratio: int
    num_attention_heads: int
    num_key_value_heads: int

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all values."""
        return self.hidden_size * self.num_key_value_heads // self.num_attention_heads

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def blocks(self) -> int:
        """Weights in the matrices of the blocks."""
        per_channel = 2 * self.hidden_size + 2 * self.keys + 2 * self.mlp_ratio * self.hidden_size
        return self.num_hidden_layers * self.hidden_size * per_channel

    @property
    def vectors(self) -> int:
        """Weights of the norms."""
        head_size = self.hidden_size // self.num_attention_heads
        return 2 * self.hidden_size + 2 * self.num_hidden_layers * (self.hidden_size + head_size)

    @property
    def rows(self) -> int:
        """Rows of all matrices, each with a step of its own."""
        return self.vocab_size + self.num_hidden_layers * (self.hidden_size * (3 + self.mlp_ratio) + 2 * self.keys)

    @property
    def parameters(self) -> int:
        return self.embedding + self.blocks + self.vectors

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs, as measure/flops.py counts them."""
        attention = self.num_hidden_layers * self.hidden_size * sequence_length
        return 6.0 * (self.blocks + attention + self.embedding)

    def options(self) -> str:
        """Return the options of hfgolf train for this shape."""
        options = {"num_hidden_layers": self.num_hidden_layers, "intermediate_size": self.mlp_ratio * self.hidden_size}
        options |= {"num_attention_heads": self.num_attention_heads}
        if self.num_key_value_heads < self.num_attention_heads:
            options["num_key_value_heads"] = self.num_key_value_heads
        kind = "byte" if self.vocab_size == 257 else f"bpe --tokenizer.vocab_size {self.vocab_size}"
        stated = "".join(f" --model.{name} {value}" for name, value in options.items())
        return f"--tokenizer.kind {kind} --model.hidden_size {self.hidden_size}{stated}"


def shapes(vocab_sizes: Sequence[int]) -> Iterator[Shape]:
    """Yield every shape that is considered. Heads have 64 channels, or 32 in a width that 64 does not divide."""
    for vocab_size, width, depth, ratio in itertools.product(vocab_sizes, WIDTHS, DEPTHS, MLP_RATIOS):
        heads = width // (32 if width % 64 else 64)
        yield Shape(vocab_size, width, depth, ratio, heads, heads)
        if heads % 2 == 0:
            yield Shape(vocab_size, width, depth, ratio, heads, heads // 2)


@dataclass(frozen=True)
class Scaling:
    """Predicted loss in nats per byte: floor + size_scale / N^size_power + data_scale / D^data_power + the gap.

    N: weights in the blocks. D: bytes of text that training read. The form is that of Hoffmann et al. 2022
    (arXiv:2203.15556). The gap of rounding to R bits per weight is gap_scale * gap_base^-R.
    """

    floor: float
    size_scale: float
    size_power: float
    data_scale: float
    data_power: float
    gap_scale: float = 6.0  # fitted to six roundings of four small models, 1.2 to 5.5 bits; off by up to 4 times
    gap_base: float = 5.4
    source: str = ""

    def loss(self, weights: float, num_bytes: float) -> float:
        """Return the loss before rounding, in nats per byte."""
        size = self.size_scale * weights**-self.size_power
        return self.floor + size + self.data_scale * num_bytes**-self.data_power

    def gap(self, bits: float) -> float:
        """Return what rounding adds, in nats per byte."""
        return self.gap_scale * self.gap_base**-bits


DEFAULT_SCALING = Scaling(
    **{"floor": 0.216, "size_scale": 3.623, "size_power": 0.1, "data_scale": 288_500.0, "data_power": 0.95},
    source="assumed: nine short runs on characters of Shakespeare, up to 0.33 M weights, off by 0.022 nats per byte",
)


@dataclass(frozen=True)
class Throughput:
    """Training seconds per token: a fixed part, and the FLOPs at an effective rate."""

    flops_per_second: float
    seconds_per_token: float
    source: str

    def tokens(self, shape: Shape, sequence_length: int, seconds: float) -> float:
        """Return the tokens that a training of so many seconds reads."""
        return seconds / (self.seconds_per_token + shape.flops_per_token(sequence_length) / self.flops_per_second)


@dataclass(frozen=True)
class Candidate:
    """A shape with the bits per weight that fill the budget, and what it should reach.

    num_bytes: {part: bytes} of the artifact. gap: what rounding adds in bits per byte, part of bits_per_byte.
    """

    shape: Shape
    bits: float
    embedding_bits: float
    num_bytes: Mapping[str, int]
    tokens: float
    bits_per_byte: float
    gap: float


@dataclass(frozen=True)
class Budget:
    """What may be spent."""

    num_bytes: int
    seconds: float
    code_bytes: int = CODE_BYTES


def bits_for(shape: Shape, budget: Budget) -> tuple[float, float, dict[str, int]] | None:
    """Return (bits per weight of the blocks, of the embedding, {part: bytes}) that fill a budget; None if too few.

    No weight gets more than 8 bits: beyond that rounding costs nothing.
    """
    other = {
        "code": budget.code_bytes,
        "vectors": 2 * shape.vectors,
        "rows and tables": int(ROW_BYTES * shape.rows) + TABLE_BYTES,
    }
    left = 8 * (budget.num_bytes - sum(other.values()))
    bits = (left - EMBEDDING_BITS * shape.embedding) / (shape.embedding + shape.blocks)
    if bits < MIN_BITS:
        return None
    bits = min(bits, MAX_BITS)
    embedding_bits = min(bits + EMBEDDING_BITS, MAX_BITS)
    parts = {"embedding": int(shape.embedding * embedding_bits / 8), "blocks": int(shape.blocks * bits / 8)}
    return bits, embedding_bits, parts | other


def best_shapes(
    budget: Budget,
    scaling: Scaling,
    throughput: Throughput,
    bytes_per_token: Mapping[int, float],
    sequence_length: int,
    count: int = 10,
) -> list[Candidate]:
    """Return the candidates with the lowest predicted bits per byte, best first.

    Raises UserError if no shape fits the bytes.
    """
    found = []
    for shape in shapes(sorted(bytes_per_token)):
        if (filled := bits_for(shape, budget)) is None:
            continue
        bits, embedding_bits, parts = filled
        tokens, gap = throughput.tokens(shape, sequence_length, budget.seconds), scaling.gap(bits)
        nats = scaling.loss(shape.blocks, tokens * bytes_per_token[shape.vocab_size]) + gap
        found.append(Candidate(shape, bits, embedding_bits, parts, tokens, nats / math.log(2), gap / math.log(2)))
    if not found:
        raise UserError(
            f"--budget_bytes: {budget.num_bytes:,} bytes are too few for any shape after {budget.code_bytes:,} bytes"
            " of code; allow more."
        )
    return sorted(found, key=lambda candidate: candidate.bits_per_byte)[:count]


def read_runs(paths: Sequence[Path]) -> list[Outcome]:
    """Read finished runs for a fit. Raises UserError for fewer than six, or for runs that are not finished."""
    from hfgolf.compare.outcome import read_outcome  # late: it imports torch

    if len(paths) < MIN_RUNS:
        raise UserError(f"--runs: {len(paths)} runs are too few for a fit; give {MIN_RUNS} or more, of several sizes.")
    return [read_outcome(RunFolder(path)) for path in paths]


def fit_scaling(runs: Sequence[Outcome]) -> Scaling:
    """Fit the floor, sizes and powers to finished runs by least squares; the gap stays as it is.

    Raises UserError if the runs have fewer than three sizes or three amounts of text, or if their losses do not fall
    with both.
    """
    points = []
    for run in runs:
        num_tokens, num_bytes = run.evaluated_on
        bytes_read = run.summary["tokens"] * num_bytes / num_tokens
        points.append((shape_of(run).blocks, bytes_read, run.curve[-1].final_loss * num_tokens / num_bytes))
    weights, num_bytes_read, losses = np.array(points).T
    for values, what in ((weights, "model sizes"), (num_bytes_read, "amounts of training text")):
        if len(set(values.tolist())) < 3:
            raise UserError(f"--runs: a fit needs three {what} or more; train other sizes, for other numbers of steps.")
    return fit_law(weights, num_bytes_read, losses, f"fitted to {len(runs)} runs")


def fit_law(weights: np.ndarray, num_bytes: np.ndarray, losses: np.ndarray, source: str) -> Scaling:
    """Fit the law to points: weights in the blocks, bytes of training text, nats per byte, each (number,).

    The powers are searched on a grid; the other three follow linearly, and none may be negative. Raises UserError if
    they all are for any powers.
    """
    best: tuple[float, Scaling] | None = None
    powers = np.arange(0.05, 1.001, 0.025).tolist()
    for size_power, data_power in itertools.product(powers, powers):
        size, data = (weights / weights.min()) ** -size_power, (num_bytes / num_bytes.min()) ** -data_power
        columns = np.stack([np.ones_like(losses), size, data], 1)
        (floor, size_scale, data_scale), *_ = np.linalg.lstsq(columns, losses, rcond=None)
        error = float(((columns @ [floor, size_scale, data_scale] - losses) ** 2).mean())
        if min(floor, size_scale, data_scale) >= 0 and (best is None or error < best[0]):
            scales = size_scale * weights.min() ** size_power, data_scale * num_bytes.min() ** data_power
            fitted = Scaling(float(floor), float(scales[0]), size_power, float(scales[1]), data_power)
            best = error, replace(fitted, source=f"{source}, off by {math.sqrt(error):.4f} nats per byte")
    if best is None:
        raise UserError("--runs: the losses do not fall with size and data, so nothing can be fitted; check the runs.")
    return best[1]


def shape_of(run: Outcome) -> Shape:
    """Return the shape of a finished run. Its vocabulary follows from its parameters."""
    config: dict[str, Any] = run.config
    width, heads = config["model.hidden_size"], config["model.num_attention_heads"]
    ratio = (config["model.intermediate_size"] or 4 * width) // width
    keys = config["model.num_key_value_heads"] or heads
    shape = Shape(0, width, config["model.num_hidden_layers"], ratio, heads, keys)
    return replace(shape, vocab_size=round((run.summary["parameters"] - shape.parameters) / width))


def fit_throughput(runs: Sequence[Outcome]) -> Throughput:
    """Fit seconds per token to runs: a fixed part plus FLOPs at a rate, neither negative."""
    flops = np.array([shape_of(run).flops_per_token(run.config["batch.sequence_length"]) for run in runs])
    seconds = np.array([1 / run.summary["tokens_per_second"] for run in runs])
    (fixed, per_flop), *_ = np.linalg.lstsq(np.stack([np.ones_like(flops), flops], 1), seconds, rcond=None)
    if fixed < 0 or per_flop <= 0:
        fixed, per_flop = 0.0, float((seconds * flops).sum() / (flops**2).sum())
    return Throughput(1 / float(per_flop), float(fixed), f"fitted to {len(runs)} runs")
