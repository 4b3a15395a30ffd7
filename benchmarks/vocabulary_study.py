"""Compare vocabulary sizes on your text: python benchmarks/vocabulary_study.py --files a.txt b.txt

Trains a BPE tokenizer of each size, like a run does, on evenly spaced slices of the files, and measures it on held-out
slices: tokens per character, bytes per token, the context tokens that cover some text, the embedding's share of the
model's parameters, and encoding speed. Size 256 means plain bytes (257 with the end-of-text token). Writes
vocabulary.md, vocabulary.json and vocabulary.png, and prints the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from datasets import Dataset

from hfgolf import palette
from hfgolf.commands.options import MARK, ScriptParser, check_output, within
from hfgolf.config.parse import load_config
from hfgolf.config.sections import RunConfig, TokenizerSection
from hfgolf.data.pieces import ROWS_PER_BATCH, PieceWriter, num_text_bytes
from hfgolf.data.tokenizer import (
    Encoded,
    Encoder,
    TooFewEntriesError,
    build_encoder,
    build_tokenizer,
    find_tokenizer_loss,
)
from hfgolf.run.provenance import run_metadata
from hfgolf.system.command import run_command
from hfgolf.system.durable import write_text
from hfgolf.system.errors import UserError
from hfgolf.system.signals import Signals
from hfgolf.train.build import build_model
from hfgolf.train.console import show_log

DEFAULT = Path(__file__).parents[1] / "configs" / "small.yaml"
NUM_BYTES = 256
"""The size that means the untrained byte vocabulary; the end-of-text token is extra."""
MIN_BYTES = 1000  # of a sample; with less, a slice is only a few words
SLICE_BYTES = 2**16
_MIN_SLICES = 20
_HELD_OUT = 10  # hold out every tenth slice
_CONTINUATION = bytes(range(0x80, 0xC0))  # UTF-8 bytes that do not start a character
_PASSES = 3  # timed passes over the text; the first fills the tokenizer's word cache


def main() -> None:
    parser = ScriptParser(
        __doc__, "Also takes the options of hfgolf train: --config FILE (configs/small.yaml) --section.key value."
    )
    sizes = [256, 1024, 4096, 16384, 50257]
    parser.add_argument("--files", nargs="+", type=Path, required=True, help="plain text files in UTF-8")
    parser.add_argument(
        "--vocab_sizes",
        nargs="+",
        type=within(256, 2**24 - 1),
        default=sizes,
        help="vocabulary sizes (256 1024 4096 16384 50257)",
    )
    parser.add_argument("--hidden_size", help="width of the model (default: the config's, 256)")
    parser.add_argument(
        "--context", type=within(1, 10**9), default=256, help="characters that the context should cover (256)"
    )
    parser.add_argument(
        "--max_bytes", type=within(1, 10**15), default=20_000_000, help="bytes of text to sample (20000000)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/vocabulary"), help="folder to write to (runs/vocabulary)"
    )
    arguments, run_options = parser.parse_known_args()
    if not any(option.split("=")[0] == "--config" for option in run_options):
        run_options = ["--config", str(DEFAULT), *run_options]
    if arguments.hidden_size is not None:
        run_options += ["--model.hidden_size", arguments.hidden_size]
    resolved = load_config(run_options)

    show_log(True)
    folder = arguments.output
    check_output("--output", folder, besides=[folder / f"vocabulary.{kind}" for kind in ("json", "md", "png")])
    rows: list[dict[str, Any]] = []
    with Signals("before the end; nothing was written"), tempfile.TemporaryDirectory() as scratch:
        sample = write_sample(arguments.files, arguments.max_bytes, Path(scratch))
        for size in sorted(set(arguments.vocab_sizes)):
            found = measure_vocabulary(size, sample, resolved.config, arguments.context, Path(scratch))
            rows.append({"size": size} | ({"entries": found} if isinstance(found, int) else dataclasses.asdict(found)))
        train_bytes, held_out_bytes = num_text_bytes(sample.train), num_text_bytes(sample.held_out)
    model = resolved.config.model
    record = {
        "files": [str(path) for path in arguments.files],
        "file_bytes": sample.file_bytes,
        "train_bytes": train_bytes,
        "held_out_bytes": held_out_bytes,
        "context_characters": arguments.context,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "vocabularies": rows,
        "metadata": run_metadata(resolved),
    }
    about = (
        f"{megabytes(train_bytes + held_out_bytes)} of {megabytes(sample.file_bytes)} in {len(arguments.files)}"
        f" file{'s' if len(arguments.files) > 1 else ''}: BPE is trained on {megabytes(train_bytes)}, and everything is"
        f" measured on {megabytes(held_out_bytes)} of held-out text. The model has width {model.hidden_size} and"
        f" {model.num_hidden_layers} layers. Encoding speed is measured on {os.cpu_count()} cores."
    )
    page = f"# Vocabularies\n\n{about}\n\n{markdown(rows, arguments.context)}\n\n![Vocabularies](vocabulary.png)"
    write_text(folder / "vocabulary.json", json.dumps(record, indent=1))
    write_text(folder / "vocabulary.md", f"{page}\n\n{MARK}\n")
    draw(rows, f"{model.hidden_size} wide, {model.num_hidden_layers} layers", folder / "vocabulary.png")
    print(f"\n{about}\n\n{table(rows, arguments.context)}\nwrote vocabulary.md, .json and .png in {folder}")


def table(rows: Sequence[dict[str, Any]], context: int) -> str:
    """Return the table as text, one line per vocabulary."""
    columns = [heads(context), *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*(row for row in columns if len(row) > 2), strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)) for row in columns)


def markdown(rows: Sequence[dict[str, Any]], context: int) -> str:
    """Return the table as Markdown."""
    lines = [heads(context), ["---:"] * len(heads(context)), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def heads(context: int) -> list[str]:
    return [
        "vocabulary",
        "tokens/character",
        "bytes/token",
        f"tokens for {context:,} characters",
        "embedding",
        "of the model",
        "encoding",
        "decodes exactly",
    ]


def cells(row: dict[str, Any]) -> list[str]:
    if "bytes_per_token" not in row:
        return [f"{row['size']:,}", f"the text yields only {row['entries']:,} entries"]
    return [
        f"{row['entries']:,}",
        f"{row['tokens_per_character']:.3f}",
        f"{row['bytes_per_token']:.3f}",
        f"{row['context_tokens']:,}",
        f"{row['embedding_parameters']:,}",
        f"{row['embedding_share']:.1%}",
        f"{row['bytes_per_second'] / 1e6:,.1f} MB/s",
        "yes" if row["is_exact"] else "NO",
    ]


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"


@palette.style()
def draw(rows: Sequence[dict[str, Any]], model: str, path: Path) -> None:
    """Write the picture: tokens per character and the embedding's share of the model, over the vocabulary size."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if "bytes_per_token" in row]
    entries = [row["entries"] for row in measured]
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    panels = (
        ("tokens_per_character", "tokens per character", "held-out text", "o-", "{:.2f}", "left"),
        ("embedding_share", "share of the parameters", f"embedding, {model}", "s--", "{:.0%}", "right"),
    )
    for axes, color, (key, label, title, style, form, side) in zip(
        figure.subplots(1, 2), palette.LINES, panels, strict=False
    ):
        values = [row[key] for row in measured]
        axes.plot(entries, values, style, color=color, linewidth=1.6, markersize=6)
        for x, y in zip(entries, values, strict=True):
            offset = (6 if side == "left" else -6, 5)  # points; away from the line
            axes.annotate(form.format(y), (x, y), offset, textcoords="offset points", ha=side, fontsize="small")
        axes.set(
            xscale="log",
            xlabel="vocabulary (entries)",
            ylabel=label,
            title=title,
            ylim=(0, 1.15 * max(values, default=1)),
        )
        axes.set_xticks(entries, [f"{number:,}" for number in entries], rotation=30)
        axes.minorticks_off()
        axes.margins(x=0.12)
    palette.save(figure, path)


@dataclass(frozen=True)
class Sample:
    """Slices of files, stored on disk as pieces: one part trains the tokenizer, the other is held out."""

    train: Dataset
    held_out: Dataset
    file_bytes: int
    """Total size of the files that the slices come from."""


@dataclass(frozen=True)
class Vocabulary:
    """The figures of one vocabulary, measured on held-out text."""

    entries: int
    """Number of entries, including the end-of-text token."""
    tokens_per_character: float
    """A character is a Unicode code point."""
    bytes_per_token: float
    """UTF-8 bytes per token."""
    context_tokens: int
    """Tokens that cover the requested number of characters."""
    embedding_parameters: int
    """Parameters of the embedding, and of the head if it is untied."""
    embedding_share: float
    """Their fraction of all parameters of the model."""
    bytes_per_second: float
    """Encoding speed, on all cores."""
    is_exact: bool
    """Whether the tokens of each piece decode to exactly its text."""


def write_sample(files: Sequence[Path], max_bytes: int, folder: Path) -> Sample:
    """Write evenly spaced slices of the files, at most `max_bytes` in total, to `folder` as pieces.

    Reads only the slices, which start and end between characters. The files count as one text, in order, each once.
    Every tenth slice is held out.

    Raises UserError if a file cannot be read, is empty or is not UTF-8, or if there is too little text.
    """
    sizes = {path: _size(path) for path in dict.fromkeys(file.resolve() for file in files)}
    total = sum(sizes.values())
    taken = min(total, max_bytes)
    if taken < MIN_BYTES:
        raise UserError(f"--files: a sample of {taken:,} bytes is too small; allowed: {MIN_BYTES:,} or more.")
    count = max(_MIN_SLICES, math.ceil(taken / SLICE_BYTES))
    starts = [number * total // count for number in range(count + 1)]
    longest = math.ceil(taken / count)
    paths = [folder / f"{part}.arrow" for part in ("train", "held-out")]
    train, held_out = map(PieceWriter, paths)
    ends = itertools.accumulate(sizes.values())
    with train, held_out:
        for (path, size), file_end in zip(sizes.items(), ends, strict=True):
            file_start = file_end - size
            with path.open("rb") as file:
                # the slices that overlap this file
                for number in range(file_start * count // total, (file_end * count - 1) // total + 1):
                    start = max(starts[number], file_start)
                    end = max(start, min(starts[number] + longest, starts[number + 1], file_end))
                    text = _read(file, start - file_start, end - file_start)
                    (held_out if number % _HELD_OUT == _HELD_OUT - 1 else train).add_document([text])
    train_pieces, held_out_pieces = (cast(Dataset, Dataset.from_file(str(path))) for path in paths)
    return Sample(train_pieces, held_out_pieces, total)


def measure_vocabulary(
    size: int, sample: Sample, config: RunConfig, context_characters: int, folder: Path
) -> Vocabulary | int:
    """Return the figures of a vocabulary of `size` entries; if the text yields fewer entries, their number.

    Trains BPE like a run, on the sample's training part; NUM_BYTES means plain bytes. config: the model's architecture
    and whether to use case operators. folder: a cache for trained tokenizers of this sample.

    Raises UserError for an impossible size.
    """
    tokenizer_config = TokenizerSection(kind="byte")
    if size != NUM_BYTES:
        tokenizer_config = TokenizerSection(kind="bpe", vocab_size=size, case_operators=config.tokenizer.case_operators)
    try:
        tokenizer = build_tokenizer(tokenizer_config, {}, lambda: sample.train, folder)
    except TooFewEntriesError as error:
        return error.reached
    tokens, characters, seconds, is_exact = 0, 0, 0.0, True
    for texts, encoded, batch_seconds in _encode(sample.held_out, build_encoder(tokenizer, tokenizer_config.kind)):
        tokens += len(encoded[0])
        characters += sum(map(len, texts))
        seconds += batch_seconds
        is_exact = is_exact and find_tokenizer_loss(tokenizer, texts, encoded) is None
    num_bytes = num_text_bytes(sample.held_out)
    embedding, share = embedding_parameters(config, len(tokenizer))
    return Vocabulary(
        entries=len(tokenizer),
        tokens_per_character=tokens / characters,
        bytes_per_token=num_bytes / tokens,
        context_tokens=math.ceil(context_characters * tokens / characters),
        embedding_parameters=embedding,
        embedding_share=share,
        bytes_per_second=num_bytes / seconds,
        is_exact=is_exact,
    )


def embedding_parameters(config: RunConfig, entries: int) -> tuple[int, float]:
    """Return the embedding parameters of a config's model with this many entries, and their fraction of all."""
    with torch.device("meta"):
        model = build_model(config, entries, "cpu")
    matrices = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}  # one element if tied
    number = sum(matrix.numel() for matrix in matrices)
    return number, number / model.num_parameters()


def _size(path: Path) -> int:
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise UserError(f"--files: cannot read {path} ({error.strerror}); name a text file.") from None
    if size == 0:
        raise UserError(f"--files: {path} is empty; leave it out, or fill it with text.")
    return size


def _read(file: BinaryIO, start: int, end: int) -> str:
    """Return the characters of a file that start at bytes from `start` up to `end`."""
    start, end = _next_character(file, start), _next_character(file, end)
    file.seek(start)
    try:
        return file.read(end - start).decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"byte {start + error.start}: {error.reason}"
        raise UserError(f"--files: {file.name} is not UTF-8 ({problem}); convert it or leave it out.") from None


def _next_character(file: BinaryIO, offset: int) -> int:
    """Return the offset of the first character that starts at or after `offset`."""
    file.seek(offset)
    ahead = file.read(3)  # a character has at most three continuation bytes
    return offset + len(ahead) - len(ahead.lstrip(_CONTINUATION))


def _encode(pieces: Dataset, encode: Encoder) -> Iterator[tuple[list[str], Encoded, float]]:
    """Yield (texts, encoded texts, seconds of the fastest pass) per batch."""
    for batch in pieces.iter(batch_size=ROWS_PER_BATCH):
        texts, passes = batch["text"], []
        for _ in range(_PASSES):
            started_at = time.perf_counter()
            encoded = encode(texts)
            passes.append(time.perf_counter() - started_at)
        yield texts, encoded, min(passes)


if __name__ == "__main__":
    run_command(main)
