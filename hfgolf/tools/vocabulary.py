"""What the size of a vocabulary costs and buys: tokens for the text against parameters for the embedding.

Owns the sample, a part of which no tokenizer is trained on, and the figures of a size. Knows plain text files only, and
neither draws nor recommends.
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
from hfgolf.data.tokenizer import Encoded, Encoder, TooFewEntriesError, build_encoder, build_tokenizer, find_loss
from hfgolf.errors import UserError
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.train.build import golf_config

if TYPE_CHECKING:
    from datasets import Dataset

NUM_BYTES = 256
"""The vocabulary that is the bytes, without training; the end of text comes on top."""
MIN_BYTES = 1000  # of a sample: below, a slice is a few words
_SLICE_BYTES = 2**16
_MIN_SLICES = 20
_HELD_OUT = 10  # one slice of so many
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
_PASSES = 3  # over the text, to time it: the first fills the tokenizer's cache of words


@dataclass(frozen=True)
class Sample:
    """Slices of some files, as pieces on the disk: those for training a tokenizer and those held out from it."""

    train: Dataset
    held_out: Dataset
    file_bytes: int
    """Of the files that the slices are from."""


@dataclass(frozen=True)
class Vocabulary:
    """The figures of one vocabulary, on text that its tokenizer was not trained on."""

    entries: int
    """The end of text included."""
    tokens_per_character: float
    """A character is a Unicode code point."""
    bytes_per_token: float
    """Of UTF-8."""
    context_tokens: int
    """Tokens that cover the stated number of characters."""
    embedding_parameters: int
    """Of the embedding, and of the head where it has a matrix of its own."""
    embedding_share: float
    """Of all parameters of the model."""
    bytes_per_second: float
    """Of encoding, on all cores."""
    is_exact: bool
    """Whether the tokens of each piece decode to exactly its text."""


def write_sample(files: Sequence[Path], max_bytes: int, folder: Path) -> Sample:
    """Take slices of at most `max_bytes` together, evenly from the files, and write them below `folder` as pieces.

    Reads no more than the slices, which begin and end between two characters. The files count as one text, in order,
    each once; every tenth slice is held out.

    Raises UserError for a file that cannot be read, is empty or not UTF-8, and for too little text.
    """
    sizes = {path: _size(path) for path in dict.fromkeys(file.resolve() for file in files)}
    total = sum(sizes.values())
    taken = min(total, max_bytes)
    if taken < MIN_BYTES:
        raise UserError(f"--files: a sample of {taken:,} bytes is too small; allowed: {MIN_BYTES:,} or more.")
    count = max(_MIN_SLICES, math.ceil(taken / _SLICE_BYTES))
    starts = [number * total // count for number in range(count + 1)]
    longest = math.ceil(taken / count)
    paths = [folder / f"{part}.arrow" for part in ("train", "held-out")]
    train, held_out = map(PieceWriter, paths)
    ends = itertools.accumulate(sizes.values())
    with train, held_out:
        for (path, size), file_end in zip(sizes.items(), ends, strict=True):
            file_start = file_end - size
            with path.open("rb") as file:
                # the slices that this file may have a part in
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
    """Return the figures of a vocabulary of `size` entries; where the text gives fewer, their number.

    Trains BPE as a run would, on the sample's train part; NUM_BYTES is the bytes. config: the model's shape. folder:
    keeps trained tokenizers, of one sample only.

    Raises UserError for a size that is no vocabulary.
    """
    tokenizer_config = TokenizerConfig("byte") if size == NUM_BYTES else TokenizerConfig("bpe", size)
    try:
        tokenizer = build_tokenizer(tokenizer_config, {}, lambda: sample.train, folder)
    except TooFewEntriesError as error:
        return error.reached
    tokens, characters, seconds, is_exact = 0, 0, 0.0, True
    for texts, encoded, batch_seconds in _encode(sample.held_out, build_encoder(tokenizer, tokenizer_config.kind)):
        tokens += len(encoded[0])
        characters += sum(map(len, texts))
        seconds += batch_seconds
        is_exact = is_exact and find_loss(tokenizer, texts, encoded) is None
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
    """Return the parameters that a vocabulary takes in the model of a config, and their share of all."""
    with torch.device("meta"):
        model = GolfForCausalLM(golf_config(config, entries))
    matrices = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}  # one, where they are tied
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
    """Return the text of a file whose characters begin in the bytes from `start` to `end`."""
    start, end = _next_character(file, start), _next_character(file, end)
    file.seek(start)
    try:
        return file.read(end - start).decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {start + error.start}: {error.reason}"
        raise UserError(f"--files: {file.name} is not UTF-8 ({where}); convert it or leave it out.") from None


def _next_character(file: BinaryIO, offset: int) -> int:
    """Return where the first character at or behind `offset` begins."""
    file.seek(offset)
    ahead = file.read(3)  # a character has at most so many bytes behind its first
    return offset + len(ahead) - len(ahead.lstrip(_CONTINUATION))


def _encode(pieces: Dataset, encode: Encoder) -> Iterator[tuple[list[str], Encoded, float]]:
    """Yield (texts, their ids, seconds of the fastest pass) batch by batch."""
    for batch in pieces.iter(batch_size=ROWS_PER_BATCH):
        texts, passes = batch["text"], []
        for _ in range(_PASSES):
            started_at = time.perf_counter()
            encoded = encode(texts)
            passes.append(time.perf_counter() - started_at)
        yield texts, encoded, min(passes)
