"""Tokens that another program wrote, in shards: mapped where they are, checked, never copied to the cache.

Owns three formats: uint16 ids after 256 int32 (magic 20240520, version 1, number of tokens, zeros); uint16 ids and
nothing else, as nanoGPT writes them; and NumPy's .npy. Owns the bytes of text that validation tokens stand for, too.
Does not know text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hfgolf.data.corpus import Corpus
from hfgolf.data.files import SourceFile
from hfgolf.data.sentencepiece_model import SPACE
from hfgolf.data.tokenizer import embedding_rows, entry_bytes
from hfgolf.errors import UserError
from hfgolf.wording import first_line

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024


@dataclass(frozen=True, eq=False)
class ShardStream:
    """The tokens of some shards, one after the other, memory-mapped. Reads like a TokenStream.

    piece_tokens, piece_bytes: (num_pieces,) tokens and raw UTF-8 bytes of each document, which a separator begins; of
    training tokens, one piece whose bytes are not counted (0).
    token_bytes: (num_tokens,) uint16 bytes that each token stands for, if they are known; of validation only.
    """

    paths: tuple[Path, ...]
    vocab_size: int
    piece_tokens: np.ndarray
    piece_bytes: np.ndarray
    token_bytes: np.ndarray | None = None
    is_target: np.ndarray | None = None
    parts: tuple[np.ndarray, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(map(open_shard, self.paths)))

    @cached_property
    def ends(self) -> np.ndarray:
        """Return the number of tokens up to the end of each shard, (num_shards,) int64."""
        return np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return all tokens as one array, (num_tokens,) uint16: a copy if there are several shards."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)

    @property
    def num_bytes(self) -> int:
        """Raw UTF-8 bytes of the text; 0 if they were not counted."""
        return int(self.piece_bytes.sum(dtype=np.int64))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens at `indices`, an array of any shape. Indices past the end wrap around.

        Raises UserError for an id outside the vocabulary, and for a shard that is no longer as long as it was (a read
        past its end would kill the process).
        """
        indices = indices % len(self)
        shards = np.searchsorted(self.ends, indices, side="right")
        ids = np.empty(indices.shape, np.uint16)
        for shard in np.unique(shards):
            path, part = self.paths[shard], self.parts[shard]
            if path.stat().st_size < part.nbytes:
                raise UserError(
                    f"data.files: {path} was truncated while it was being read; restore it and start again."
                )
            is_here = shards == shard
            ids[is_here] = part[indices[is_here] - (self.ends[shard] - len(part))]
            require_vocabulary(ids[is_here], self.vocab_size, path)
        return ids

    def hashes(self) -> Iterator[tuple[str, str]]:
        """Yield nothing: the corpus was hashed when it was identified."""
        return iter(())

    def __reduce__(self) -> tuple[Any, ...]:
        # a DataLoader worker that is spawned maps the shards again
        arguments = (self.paths, self.vocab_size, self.piece_tokens, self.piece_bytes, self.token_bytes)
        return ShardStream, arguments


def open_shard(path: Path) -> np.ndarray:
    """Map the values of a shard, (num_values,) uint16.

    Raises UserError if its magic number, version, count, size or type is wrong.
    """
    if path.suffix == ".npy":
        return _open_array(path)
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    if len(header) == HEADER_BYTES // 4 and header[0] != MAGIC and not header[3:].any():  # ids are not all 0
        raise UserError(
            f"data.files: {path} has the magic number {header[0]} in its header; only {MAGIC}, of 16-bit ids, is known."
        )
    if not len(header) or header[0] != MAGIC:
        if size < 2 or size % 2:
            raise UserError(f"data.files: {path} has {size} bytes, not a whole number of 16-bit ids; write it again.")
        return np.memmap(path, "<u2", "r")
    if len(header) < HEADER_BYTES // 4 or header[1] != VERSION:
        version = header[1] if len(header) > 1 else "none"
        raise UserError(f"data.files: {path} has version {version} in its header; only {VERSION} is known.")
    count = int(header[2])
    if count < 1 or size != HEADER_BYTES + 2 * count:
        raise UserError(
            f"data.files: {path} states {count:,} tokens, {HEADER_BYTES + 2 * count:,} bytes with its header, but has"
            f" {size:,} bytes; copy it again."
        )
    return np.memmap(path, "<u2", "r", offset=HEADER_BYTES, shape=count)


def _open_array(path: Path) -> np.ndarray:
    """Map a NumPy file, which states its own type and shape."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"data.files: {path} is not a NumPy file ({first_line(error)}); copy it again.") from error
    if array.dtype != np.dtype("<u2") or array.ndim != 1 or not array.size:
        shape = "x".join(map(str, array.shape)) or "a single value"
        raise UserError(f"data.files: {path} holds {array.dtype} ({shape}), not a list of 16-bit ids (uint16).")
    return array


def require_vocabulary(ids: np.ndarray, vocab_size: int, path: Path) -> None:
    """Raise UserError if an id is not in the vocabulary."""
    if (largest := ids.max(initial=0)) >= vocab_size:
        raise UserError(
            f"data.files: {path} contains id {largest}, but the tokenizer has {vocab_size} entries; name the tokenizer"
            " that the shards were written with."
        )


def open_shards(corpus: Corpus, tokenizer: Any) -> tuple[ShardStream, ShardStream]:
    """Return the training and the validation tokens of shards.

    The validation tokens stand for the bytes in data.val_bytes_files, or else for what their vocabulary entries spell.
    If data.separator_id is a special token, it becomes the tokenizer's end of text, in the exported model too. Raises
    UserError if a file is damaged, an id is not in the vocabulary, or the bytes do not belong to the tokens.
    """
    data, vocab_size = corpus.data, embedding_rows(tokenizer)
    train_paths, val_paths = (_paths(corpus, split) for split in (None, "val"))
    separator = tokenizer.eos_token_id if data.separator_id is None else data.separator_id
    if separator >= vocab_size:
        raise UserError(f"data.separator_id: {separator} is not in the tokenizer, which has {vocab_size} entries.")
    known = tokenizer.added_tokens_decoder.get(separator)
    if known is not None and known.special:  # text that the model sees later is separated by the same token
        tokenizer.eos_token = known.content
    stream = ShardStream(val_paths, vocab_size, np.zeros(0), np.zeros(0))
    tokens = stream.tokens
    require_vocabulary(tokens, vocab_size, val_paths[0].parent)
    if corpus.bytes_files:
        counts = np.concatenate([open_shard(file.path) for file in corpus.bytes_files])
    else:
        counts = _spelled_bytes(tokenizer, tokens, np.flatnonzero(tokens == separator))
    if len(counts) != len(tokens):
        raise UserError(
            f"data.val_bytes_files: they hold {len(counts):,} values, but data.val_files {len(tokens):,} tokens; name"
            " one for each validation shard."
        )
    separators = np.flatnonzero(tokens == separator)
    if counts[separators].any():
        place = separators[counts[separators] > 0][0]
        raise UserError(
            f"data.val_bytes_files: token {place} is a separator, but stands for {counts[place]} bytes, not 0."
        )
    counts = np.array(counts, np.uint16)
    counts[0] = 0  # the first token is only context, never a target
    starts = np.union1d([0], separators)
    piece_tokens = np.diff(np.append(starts, len(tokens))).astype(np.uint32)
    piece_bytes = np.add.reduceat(counts, starts, dtype=np.int64)
    val = ShardStream(val_paths, vocab_size, piece_tokens, piece_bytes, counts)
    train = ShardStream(train_paths, vocab_size, np.zeros(1, np.int64), np.zeros(1, np.int64))
    train.piece_tokens[0] = len(train)
    return train, val


def _spelled_bytes(tokenizer: Any, tokens: np.ndarray, separators: np.ndarray) -> np.ndarray:
    """Return the bytes that the entries of a vocabulary spell, (num_tokens,) uint16; 0 for separators.

    A space that a SentencePiece entry adds in front of a document's first word is not counted: it is not in the text.
    """
    counts = entry_bytes(tokenizer)[tokens]
    counts[separators] = 0
    spaced = [number for entry, number in tokenizer.get_vocab().items() if entry.startswith(SPACE)]
    firsts = separators[separators + 1 < len(tokens)] + 1
    counts[firsts[np.isin(tokens[firsts], spaced)]] -= 1
    return counts.astype(np.uint16)


def _paths(corpus: Corpus, split: str | None) -> tuple[Path, ...]:
    files: tuple[SourceFile, ...] = tuple(file for file in corpus.files if file.split == split)
    return tuple(file.path for file in files)
