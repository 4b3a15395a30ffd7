"""What to train for a number of bytes: hfgolf golf plan --budget_bytes 500000 --minutes 10

Tries every shape and gives each the bits per weight that fill the budget; prints the ten that should score best, what
their bytes go to, and the options to train the first. The prediction rests on characters of Shakespeare and models of
up to 0.33 M weights, and is an assumption anywhere else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from hfgolf.commands.options import Answer, ScriptParser, bounded, bounded_bytes
from hfgolf.system.errors import UserError

WIDTHS, DEPTHS, MLP_RATIOS = range(32, 1025, 32), range(1, 17), (2, 3, 4)
MAX_BITS, MIN_BITS = 8.0, 1.5
EMBEDDING_BITS = 1.1  # more than the blocks: the records spend 4.2 to 4.7 on the embedding and 3.3 on the blocks
CODE_BYTES = 10_000  # the packed program
TABLE_BYTES = 1_500  # header, histograms
ROW_BYTES = 1.6  # a step in one byte, and a class of some 4 bits, for each row
# Bytes of English web text per token of a BPE vocabulary, as Parameter Golf's validation split has them
BYTES_PER_TOKEN = {257: 1.0, 1024: 2.436, 4096: 3.320, 8192: 3.727}
LAW = "assumed: nine short runs on characters of Shakespeare, up to 0.33 M weights, off by 0.022 nats per byte"


def main() -> Answer:
    parser = ScriptParser(__doc__)
    parser.add_argument("--budget_bytes", required=True, **bounded_bytes(1, 10**12, "of the artifact and its code"))
    training = parser.add_mutually_exclusive_group(required=True)
    training.add_argument("--minutes", **bounded(1e-6, 1e9, "minutes of training"))
    training.add_argument("--tokens", **bounded(1, 10**15, "tokens of training, if time does not matter"))
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
    arguments = parser.parse_args()
    for name in ("device", "processes", "mfu", "sequence_length") if arguments.tokens else ():
        if getattr(arguments, name) != parser.get_default(name):
            raise UserError(f"--{name}: only with --minutes; it says how many tokens a machine reads in them.")
    vocabularies = _parse_vocabularies(arguments.bytes_per_token) if arguments.bytes_per_token else BYTES_PER_TOKEN
    flops, speed = 0.0, None
    if arguments.minutes:
        from hfgolf.commands.needs import ASSUMED_MFU, machine_with, this_machine

        device, processes, mfu = arguments.device, arguments.processes, arguments.mfu or ASSUMED_MFU
        machine = machine_with(device, None, processes)[0] if device else this_machine("bf16", processes)
        flops, speed = 60 * arguments.minutes * mfu * machine.peak_flops, machine.assumed(mfu)

    def tokens(shape: Shape) -> float:
        return float(arguments.tokens or flops / shape.flops_per_token(arguments.sequence_length))

    def best(more_bytes: float, more_training: float) -> list[Candidate]:
        num_bytes = int(more_bytes * arguments.budget_bytes)
        return best_shapes(num_bytes, lambda shape: more_training * tokens(shape), vocabularies)

    found = best(1.0, 1.0)
    gains = [found[0].bits_per_byte - more[0].bits_per_byte for more in (best(1.1, 1.0), best(1.0, 1.1))]
    lines = [*_table(found, gains), f"loss: {LAW}"]
    if len(vocabularies) > 1:
        lines.append("vocabularies: told apart by their weights and their bytes per token only; train the best of each")
    if speed:
        lines.append(f"speed: {speed}")
    lines.append(f"\n{found[0].shape.options()} --golf.budget_bytes {arguments.budget_bytes}")
    candidates = [asdict(candidate) | {"options": candidate.shape.options()} for candidate in found]
    gain = dict(zip(("bytes", "training"), gains, strict=True))
    figures = {"candidates": candidates, "gain_of_10_percent_more": gain, "sources": {"loss": LAW, "speed": speed}}
    return Answer(figures, "\n".join(lines))


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


def _table(found: Sequence[Candidate], gains: Sequence[float]) -> list[str]:
    """Return the candidates, the bytes of the first, and what more bytes or more training would gain."""
    row = "{:>9} {:>8} {:>8} {:>6} {:>6} {:>4} {:>6} {:>12} {:>6} {:>15}"
    lines = [row.format("bits/byte", "(gap)", "entries", "width", "layers", "mlp", "kv", "weights", "bits", "tokens")]
    for each in found:
        shape = each.shape
        cells = [f"{each.bits_per_byte:.4f}", f"{each.gap:.4f}", f"{shape.vocab_size:,}", shape.hidden_size]
        cells += [shape.num_hidden_layers, f"{shape.mlp_ratio}x"]
        cells += [f"{shape.num_key_value_heads}/{shape.num_attention_heads}", f"{shape.parameters:,}"]
        lines.append(row.format(*cells, f"{each.bits:.2f}", f"{each.tokens:,.0f}"))
    best, binds = found[0], "bytes" if gains[0] > gains[1] else "training"
    return [
        *lines,
        f"\nbytes of the first: {', '.join(f'{part} {size:,}' for part, size in best.num_bytes.items())};"
        f" {sum(best.num_bytes.values()):,} in all, {best.embedding_bits:.2f} bits per weight of the embedding",
        f"10 % more bytes: -{gains[0]:.4f}; 10 % more training: -{gains[1]:.4f} bits per byte; what binds is {binds}",
    ]


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
        options = {name: getattr(self, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        options["intermediate_size"] = self.mlp_ratio * self.hidden_size
        if self.num_key_value_heads < self.num_attention_heads:
            options["num_key_value_heads"] = self.num_key_value_heads
        kind = "byte" if self.vocab_size == 257 else f"bpe --tokenizer.vocab_size {self.vocab_size}"
        stated = "".join(f" --model.{name} {value}" for name, value in options.items())
        return f"--tokenizer.kind {kind}{stated}"


def shapes(vocab_sizes: Sequence[int]) -> Iterator[Shape]:
    """Yield every shape that is considered. Heads have 64 channels, or 32 in a width that 64 does not divide."""
    for vocab_size, width, depth, ratio in itertools.product(vocab_sizes, WIDTHS, DEPTHS, MLP_RATIOS):
        heads = width // (32 if width % 64 else 64)
        yield Shape(vocab_size, width, depth, ratio, heads, heads)
        if heads % 2 == 0:
            yield Shape(vocab_size, width, depth, ratio, heads, heads // 2)


def predicted_loss(weights: float, num_bytes: float) -> float:
    """Return the loss before rounding in nats per byte, given the weights in the blocks and the bytes of training text.

    A floor, a power of each: the form of Hoffmann et al. 2022 (arXiv:2203.15556).
    """
    return 0.216 + 3.623 * weights**-0.1 + 288_500.0 * num_bytes**-0.95


def rounding_loss(bits: float) -> float:
    """Return what rounding to so many bits per weight adds, in nats per byte.

    Fitted to six roundings of four small models, 1.2 to 5.5 bits; off by up to 4 times.
    """
    return 6.0 * 5.4**-bits


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


def bits_for(shape: Shape, num_bytes: int) -> tuple[float, float, dict[str, int]] | None:
    """Return (bits per weight of the blocks, of the embedding, {part: bytes}) that fill a budget; None if too few.

    No weight gets more than 8 bits: beyond that rounding costs nothing.
    """
    rows = int(ROW_BYTES * shape.rows) + TABLE_BYTES
    other = {"code": CODE_BYTES, "vectors": 2 * shape.vectors, "rows and tables": rows}
    left = 8 * (num_bytes - sum(other.values()))
    bits = (left - EMBEDDING_BITS * shape.embedding) / (shape.embedding + shape.blocks)
    if bits < MIN_BITS:
        return None
    bits = min(bits, MAX_BITS)
    embedding_bits = min(bits + EMBEDDING_BITS, MAX_BITS)
    parts = {"embedding": int(shape.embedding * embedding_bits / 8), "blocks": int(shape.blocks * bits / 8)}
    return bits, embedding_bits, parts | other


def best_shapes(
    num_bytes: int, tokens_of: Callable[[Shape], float], bytes_per_token: Mapping[int, float]
) -> list[Candidate]:
    """Return the ten candidates with the lowest predicted bits per byte, best first.

    tokens_of: the tokens that the training of a shape reads. Raises UserError if no shape fits the bytes.
    """
    found = []
    for shape in shapes(sorted(bytes_per_token)):
        if (filled := bits_for(shape, num_bytes)) is None:
            continue
        tokens, gap = tokens_of(shape), rounding_loss(filled[0])
        nats = predicted_loss(shape.blocks, tokens * bytes_per_token[shape.vocab_size]) + gap
        found.append(Candidate(shape, *filled, tokens, nats / math.log(2), gap / math.log(2)))
    if not found:
        raise UserError(
            f"--budget_bytes: {num_bytes:,} bytes are too few for any shape after {CODE_BYTES:,} bytes"
            " of code; allow more."
        )
    return sorted(found, key=lambda candidate: candidate.bits_per_byte)[:10]
