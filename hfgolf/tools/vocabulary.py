"""Measure the trade-off of vocabulary sizes: fewer tokens for the text against more embedding parameters.

Owns the sample of the text, part of which is held out from tokenizer training, and the figures of each size. Reads only
plain text files. Neither draws nor recommends.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import torch

from hfgolf.config import RunConfig, TokenizerConfig
from hfgolf.data.pieces import ROWS_PER_BATCH, PieceWriter, num_text_bytes
from hfgolf.data.tokenizer import (
    Encoded,
    Encoder,
    TooFewEntriesError,
    build_encoder,
    build_tokenizer,
    find_tokenizer_loss,
)
from hfgolf.errors import UserError
from hfgolf.train.build import build_model

if TYPE_CHECKING:
    from datasets import Dataset

NUM_BYTES = 256
"""The size that means the untrained byte vocabulary; the end-of-text token is extra."""
MIN_BYTES = 1000  # of a sample; with less, a slice is only a few words
SLICE_BYTES = 2**16
_MIN_SLICES = 20
_HELD_OUT = 10  # hold out every tenth slice
_CONTINUATION = bytes(range(0x80, 0xC0))  # UTF-8 bytes that do not start a character
_PASSES = 3  # timed passes over the text; the first fills the tokenizer's word cache


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
    from datasets import Dataset

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
    tokenizer_config = TokenizerConfig("byte")
    if size != NUM_BYTES:
        tokenizer_config = TokenizerConfig("bpe", size, case_operators=config.tokenizer.case_operators)
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
