"""Tokens that another program wrote, in shards: mapped where they are, checked, never copied to the cache.

Owns the formats (docs/data.md has them), and the bytes of text that validation tokens stand for. The width of an id is
what the file states or, if it states nothing, what its values prove.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hfgolf.data.corpus import Corpus
from hfgolf.data.files import SHARDS
from hfgolf.data.sentencepiece_model import SPACE
from hfgolf.data.token_stream import Stream
from hfgolf.data.tokenizer import embedding_rows, entry_bytes
from hfgolf.system.errors import UserError
from hfgolf.system.wording import first_line, join_words

HEADER_BYTES = 1024
_HEADERS = {20240520: (1, 2), 20240801: (7, 4)}
"""{magic number: (version, bytes per id)}: llm.c's for GPT-2, which the golf challenge has, and for Llama 3."""
_SAMPLE_BYTES = 2**21  # of each part of a file that tells the width of its ids
_MIN_EVIDENCE = 16  # values
_PROVEN, _DOUBTFUL = 0.99, 0.25  # shares of values; a few ids may be wrong, which is an error when they are read


@dataclass(frozen=True, eq=False)
class ShardStream(Stream):
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

    @cached_property
    def chunks(self) -> tuple[np.ndarray, ...]:  # type: ignore[override]
        """The shards, mapped. A DataLoader worker that is spawned maps them again."""
        return tuple(open_shard(path, self.vocab_size) for path in self.paths)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens at `indices`, an array of any shape. Indices past the end wrap around.

        Raises UserError for an id outside the vocabulary, and for a shard that is gone or was truncated: a read past
        its end would kill the process.
        """
        indices = indices % len(self)
        shards = np.searchsorted(self.ends, indices, side="right")
        ids = np.empty(indices.shape, np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        for shard in np.unique(shards):
            path, chunk = self.paths[shard], self.chunks[shard]
            if not path.is_file() or path.stat().st_size < chunk.offset + chunk.nbytes:
                raise _refusal(path, "was truncated or removed while it was being read; restore it and start again")
            is_here = shards == shard
            found = chunk[indices[is_here] - (self.ends[shard] - len(chunk))]
            require_vocabulary(found, self.vocab_size, path)
            ids[is_here] = found
        return ids

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.paths, self.vocab_size, self.piece_tokens, self.piece_bytes, self.token_bytes)
        return ShardStream, arguments


def _refusal(path: Path, problem: str) -> UserError:
    return UserError(f"data.files: {path} {problem}.")


def open_shard(path: Path, vocab_size: int = 2**16) -> np.ndarray:
    """Map the values of a shard, (num_values,), whole numbers of the width that the file states or proves.

    vocab_size: all values should be below it. Raises UserError if the header, size or type is wrong, or if the width
    cannot be told.
    """
    if path.suffix == ".npy":
        return _open_array(path)
    if path.suffix not in SHARDS:
        raise _refusal(path, f"is not a shard; allowed: {', '.join(SHARDS)} (rename raw token ids to .bin)")
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    magic = int(header[0]) if len(header) else 0
    if magic in _HEADERS:
        known, width = _HEADERS[magic]
        if len(header) < HEADER_BYTES // 4 or header[1] != known:
            version = header[1] if len(header) > 1 else "none"
            raise _refusal(path, f"has version {version} in its header; only {known} is known")
        count = int(header[2])
        expected = HEADER_BYTES + width * count
        if count < 1 or size != expected:
            stated = f"{count:,} tokens, {expected:,} bytes with its header"
            raise _refusal(path, f"states {stated}, but has {size:,} bytes; copy it again")
        return np.memmap(path, f"<u{width}", "r", offset=HEADER_BYTES, shape=count)
    if len(header) == HEADER_BYTES // 4 and magic and not header[3:].any():  # ids are not all 0
        raise _refusal(
            path, f"has the magic number {magic} in its header; known are {join_words(_HEADERS, last=' and ')}"
        )
    width = _stated_width(path) or (_proven_width(path, size, vocab_size) if size else 2)
    if not size or size % width:
        raise _refusal(path, f"has {size} bytes, not a whole number of {8 * width}-bit ids; write it again")
    return np.memmap(path, f"<u{width}", "r")


def _stated_width(path: Path) -> int | None:
    """Return the bytes per id that datatrove wrote beside its .ds file, "tokenizer|bytes"; None without that file."""
    beside = path.with_name(f"{path.name}.metadata")
    if path.suffix != ".ds" or not beside.is_file():
        return None
    first = beside.read_text("utf-8", "replace").partition("\n")[0]
    stated = first.rpartition("|")[2].strip()
    if stated not in ("2", "4"):
        raise _refusal(beside, "states no bytes per id (2 or 4) in its first line; copy it again")
    return int(stated)


def _proven_width(path: Path, size: int, vocab_size: int) -> int:
    """Return the bytes per id of a file that does not state it: 2, as nanoGPT writes, or 4 or 8 if its values prove it.

    If ids are wider than they are read, every second value is 0, or as good as. Text has nothing like it. Raises
    UserError if the values leave it open.
    """
    places = {0, size // 2 // 8 * 8, max(0, size // 8 * 8 - _SAMPLE_BYTES)} if size > 3 * _SAMPLE_BYTES else {0}
    count = (_SAMPLE_BYTES if len(places) > 1 else size) // 2
    values, found = np.concatenate([np.fromfile(path, "<u2", count, offset=place) for place in sorted(places)]), []
    pairs = values[: len(values) // 2 * 2].reshape(-1, 2)
    pairs = pairs[pairs.any(axis=1)]
    is_big_endian = len(pairs) >= _MIN_EVIDENCE and np.mean(pairs[:, 0] == 0) > _DOUBTFUL  # and of 32 bits
    has_16_bits = vocab_size <= 2**16 and not is_big_endian
    for width in (8, 4, 2):
        wide = values[: len(values) // (width // 2) * (width // 2)].view(f"<u{width}")
        wide = wide[wide != 0]  # zeros, such as padding, are zeros at any width
        share = np.mean(wide < vocab_size) if len(wide) else 0.0
        is_evident = has_16_bits if width == 2 else len(wide) >= _MIN_EVIDENCE
        if share >= _PROVEN and is_evident:
            return width
        found.append(f"as {8 * width} bits {share:.0%}")
        if share > _DOUBTFUL:
            break
    problem = (
        f"does not tell the width of its ids: {', '.join(found)} of its values are in the vocabulary ({vocab_size:,})"
    )
    raise _refusal(
        path, f"{problem}; they may be big-endian, or of another tokenizer; numpy.save as .npy tells the width"
    )


def _open_array(path: Path) -> np.ndarray:
    """Map a NumPy file, which states its own type and shape: row after row of two dimensions. Reads no pickles."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise _refusal(path, f"is not a NumPy file ({first_line(error)}); copy it again") from error
    if array.dtype.kind not in "ui" or array.ndim not in (1, 2) or not array.size:
        shape = "x".join(map(str, array.shape)) or "a single value"
        held = f"holds {array.dtype} ({shape}), not a list of token ids"
        raise _refusal(path, f"{held}; save whole numbers in one dimension, or in rows that are full")
    if array.ndim == 1:
        return array
    for name, ends in (("begin", array[:, :2]), ("end", array[:, -2:])) if array.shape[1] > 2 else ():
        sample = ends[:: -(-len(array) // 1000)]
        _, counts = np.unique(sample[sample[:, 0] == sample[:, -1], -1], return_counts=True)
        if counts.max(initial=0) > (0.5 * len(sample) if len(sample) > 3 else 0):
            advice = "so they are padded; save the ids without the padding"
            if len(sample) <= 3:
                advice = "which may be padding; save the ids without it, in one dimension"
            raise _refusal(path, f"has rows that {name} in the same ids, {advice}")
    if not array.flags.c_contiguous:
        raise _refusal(path, "stores its columns one after the other; save numpy.ascontiguousarray of it")
    return array.reshape(-1)


def require_vocabulary(ids: np.ndarray, vocab_size: int, path: Path) -> None:
    """Raise UserError if an id is not in the vocabulary."""
    smallest, largest = int(ids.min(initial=0)), int(ids.max(initial=0))
    if smallest < 0 or largest >= vocab_size:
        wrong = f"contains id {smallest if smallest < 0 else largest}, but the tokenizer has {vocab_size} entries"
        raise _refusal(path, f"{wrong}; name the tokenizer that the shards were written with")


def open_shards(corpus: Corpus, tokenizer: Any) -> tuple[ShardStream, ShardStream]:
    """Return the training and the validation tokens of shards.

    The validation tokens stand for the bytes in data.val_bytes_files, or else for what their vocabulary entries spell.
    If data.separator_id is a special token, it becomes the tokenizer's end of text, in the exported model too. Raises
    UserError if a file is damaged, an id is not in the vocabulary, or the bytes do not belong to the tokens.
    """
    data, vocab_size = corpus.data, embedding_rows(tokenizer)
    train_paths, val_paths = (tuple(f.path for f in corpus.files if f.split == split) for split in (None, "val"))
    corpus.require_text("train", len(train_paths))
    separator = tokenizer.eos_token_id if data.separator_id is None else data.separator_id
    if separator >= vocab_size:
        raise UserError(f"data.separator_id: {separator} is not in the tokenizer, which has {vocab_size} entries.")
    known = tokenizer.added_tokens_decoder.get(separator)
    if known is not None and known.special:  # text that the model sees later is separated by the same token
        tokenizer.eos_token = known.content
    stream = ShardStream(val_paths, vocab_size, np.zeros(0), np.zeros(0))
    tokens = stream.tokens
    require_vocabulary(tokens, vocab_size, val_paths[0].parent)
    separators = np.flatnonzero(tokens == separator)
    if corpus.bytes_files:
        counts = np.concatenate([open_shard(file.path) for file in corpus.bytes_files])
    else:
        counts = _spelled_bytes(tokenizer, tokens, separators)
    if len(counts) != len(tokens):
        raise UserError(
            f"data.val_bytes_files: they hold {len(counts):,} values, but data.val_files {len(tokens):,} tokens; name"
            " one for each validation shard."
        )
    if counts[separators].any():
        place = separators[counts[separators] > 0][0]
        raise UserError(
            f"data.val_bytes_files: token {place} is a separator, but stands for {counts[place]} bytes, not 0."
        )
    if counts.min(initial=0) < 0 or counts.max(initial=0) >= 2**16:
        raise UserError("data.val_bytes_files: a token stands for 0 to 65,535 bytes; check what the files hold.")
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
