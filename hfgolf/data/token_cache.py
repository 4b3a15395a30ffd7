"""The token cache: a corpus as Arrow files of token ids, looked up by our own fingerprint.

Owns the key, the folder, and building a cache only once even if several processes ask for it. Does not know batches.

A split is one stream of tokens: for each document, an end-of-text token and then the document's ids. So end-of-text
separates documents and gives each document's first token a context. A second file stores each piece's number of tokens
(including end-of-text) and raw UTF-8 bytes, so that an evaluation on some of the pieces knows their exact bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerFast

from hfgolf.config import DataConfig, TokenizerConfig
from hfgolf.data.case_operators import has_case_operators
from hfgolf.data.chat import chat_template, encoded_conversations, sample_texts
from hfgolf.data.corpus import SPLITS, Corpus, identity_changes, load_corpus
from hfgolf.data.files import cache_folder
from hfgolf.data.lock import locked
from hfgolf.data.manifest import NAME as MANIFEST
from hfgolf.data.manifest import DamagedCacheError, Verification, note_damage, read_manifest, write_manifest
from hfgolf.data.pieces import ROWS_PER_BATCH, num_text_bytes, sample_evenly, texts
from hfgolf.data.ready_ids import encoded_rows, find_other_encoding
from hfgolf.data.shards import ShardStream, open_shards
from hfgolf.data.token_stream import StreamPart, TokenStream, open_stream, pieces_path, write_arrow
from hfgolf.data.tokenizer import (
    Encoded,
    Encoder,
    build_encoder,
    build_tokenizer,
    decode_texts,
    find_tokenizer,
    find_tokenizer_loss,
    tokenizer_sha256,
)
from hfgolf.durable import replace_folder
from hfgolf.errors import UserError
from hfgolf.hardware import free_memory_bytes

if TYPE_CHECKING:
    from datasets import Dataset

_log = logging.getLogger(__name__)
_FORMAT_VERSION = 1
_PROGRESS_SECONDS = 10
_ROUND_TRIP_BYTES = 2**18  # evenly sampled validation text to decode once, in about a tenth of a second
MAX_TABLES_IN_FLIGHT = 2
VERIFIED_BEFORE_USE_BYTES = 2**27  # takes a quarter of a second; larger caches are verified while training starts
_RAM_SHARE = 0.25  # the share of free memory that the tokens may take under data.in_memory auto


@dataclass(frozen=True)
class TokenCache:
    """The tokens of a corpus, the tokenizer that made them, and the folder they are in."""

    train: TokenStream | ShardStream
    val: TokenStream | ShardStream
    tokenizer: PreTrainedTokenizerFast
    path: Path
    is_hit: bool
    identity: dict[str, Any]
    """Identity of the corpus: changes whenever the text or its split changes."""
    tokenizer_sha256: str
    verification: Verification
    tokenizer_loss: str | None
    """Why the tokenizer is not lossless. None if it is, or if an earlier version of hfgolf did not check."""

    def check(self, wait: bool = False) -> None:
        """Raise DamagedCacheError if the verification thread has found damage. Cheap: the thread does the work.

        wait: wait for the thread to verify all files.
        """
        problem = self.verification.problem(wait)
        if problem is not None:
            raise note_damage(self.path, problem)


def load_tokens(
    data: DataConfig,
    tokenizer_config: TokenizerConfig,
    corpus: Corpus | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> TokenCache:
    """Return the tokens of the corpus, from the cache or tokenized now.

    Logs a cache hit or miss, and on a miss what changed. Concurrent processes build a cache only once. A damaged cache
    is rebuilt. A large cache is verified while training starts; call `TokenCache.check` to learn the result.

    corpus, tokenizer: pass them if they are already known, as when a run resumes.

    Raises UserError if the text, split or tokenizer is unusable (see corpus and tokenizer), or if a cache must be built
    but its folder cannot be written.
    """
    corpus = corpus or load_corpus(data)
    cache_dir = cache_folder(data)
    # load it only once: a large tokenizer loads slowly
    tokenizer = tokenizer or find_tokenizer(tokenizer_config, corpus.identity, cache_dir / "tokenizers")
    if data.source == "shards" and tokenizer is not None:
        return _open_shards(corpus, tokenizer)
    tokens = _find_tokens(corpus, tokenizer_config, cache_dir, tokenizer)
    if tokens is None:
        try:
            with locked(cache_dir / "build.lock", "builds the token cache"):
                # another process may have built it while this one waited
                tokens = _find_tokens(corpus, tokenizer_config, cache_dir, tokenizer)
                if tokens is None:
                    built = _build(corpus, tokenizer_config, cache_dir, tokenizer)
                    return _open_cache(*built, corpus, is_hit=False)
        except OSError as error:
            raise UserError(
                f"data.cache_dir: cannot write the tokens of this corpus to {cache_dir} ({error.strerror or error});"
                " free up space there, or set another folder."
            ) from error
    sizes = f"{len(tokens.train):,} train tokens, {len(tokens.val):,} validation tokens"
    _log.info("cache hit: %s (%s)", tokens.path, sizes)
    return tokens


def _open_shards(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> TokenCache:
    """Return the tokens of shards, mapped where they are."""
    train, val = open_shards(corpus, tokenizer)
    tokens = TokenCache(
        train,
        val,
        tokenizer,
        train.paths[0].parent,
        is_hit=True,
        identity=corpus.identity,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        verification=Verification({"files": {}}, lambda: iter(())),  # identified by their hashes already
        tokenizer_loss=None,
    )
    _log.info("shards: %s (%s train tokens, %s validation tokens)", tokens.path, f"{len(train):,}", f"{len(val):,}")
    return tokens


def _find_tokens(
    corpus: Corpus, config: TokenizerConfig, cache_dir: Path, tokenizer: PreTrainedTokenizerFast | None
) -> TokenCache | None:
    found = find_cache(corpus, config, cache_dir, tokenizer)
    if found is None:
        return None
    try:
        tokens = _open_cache(*found, corpus, is_hit=True)
        if sum(path.stat().st_size for path in tokens.path.glob("*.arrow")) <= VERIFIED_BEFORE_USE_BYTES:
            tokens.check(wait=True)
    except (OSError, ValueError) as error:
        note_damage(found[0], str(error))
        return None
    except DamagedCacheError:
        return None
    return tokens


def find_cache(
    corpus: Corpus, config: TokenizerConfig, cache_dir: Path, tokenizer: PreTrainedTokenizerFast | None = None
) -> tuple[Path, PreTrainedTokenizerFast] | None:
    """Return the matching cache's (folder, tokenizer), or None. tokenizer: pass it if it is already known."""
    tokenizer = tokenizer or find_tokenizer(config, corpus.identity, cache_dir / "tokenizers")
    if tokenizer is None:
        return None
    key = _key(corpus, config, tokenizer)
    folder = _folder(cache_dir, key)
    return (folder, tokenizer) if _problem(folder, key) is None else None


def _key(corpus: Corpus, config: TokenizerConfig, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return everything the tokens depend on. Its hash names the cache folder."""
    settings = {
        "tokenizer": f"{config.kind}, {len(tokenizer)} entries",
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "end_of_text_id": tokenizer.eos_token_id,
        "format_version": _FORMAT_VERSION,
    }
    if corpus.data.messages_column is not None:
        settings["chat_template_sha256"] = hashlib.sha256(chat_template(tokenizer).encode()).hexdigest()
    return {**corpus.identity, **settings}


def _folder(cache_dir: Path, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir / "tokens" / digest[:16]


def _problem(folder: Path, key: dict[str, Any]) -> str | None:
    """Return what is wrong with the cache in `folder`, or None."""
    try:
        is_ours = read_manifest(folder).get("key") == key
    except ValueError as error:
        return str(error)
    return None if is_ours else f"{MANIFEST} describes another cache"


def _build(
    corpus: Corpus, config: TokenizerConfig, cache_dir: Path, tokenizer: PreTrainedTokenizerFast | None
) -> tuple[Path, PreTrainedTokenizerFast]:
    """Build the cache, and the tokenizer if it is not known.

    The caller holds the lock, so it is safe to delete what an interrupted build left behind.
    """
    building = cache_dir / "building"
    tokens_dir = cache_dir / "tokens"
    for leftover in (building, *tokens_dir.glob(".*")):
        shutil.rmtree(leftover, ignore_errors=True)
    (cache_dir / "tokenizers").mkdir(exist_ok=True)
    pieces = cache(lambda: corpus.write_pieces(building / "text"))
    try:
        if tokenizer is None:
            tokenizer = build_tokenizer(config, corpus.identity, lambda: pieces()["train"], cache_dir / "tokenizers")
        key = _key(corpus, config, tokenizer)
        folder = _folder(cache_dir, key)
        problem = _problem(folder, key)
        if problem is None:  # only the tokenizer was damaged or lost
            return folder, tokenizer
        if folder.exists():
            _log.info("cache damaged: %s (%s); rebuilding it", folder, problem)
        else:
            _log.info("cache miss: %s", _what_changed(key, cache_dir))
        partial = folder.with_name(f".partial-{folder.name}")
        partial.mkdir(parents=True)
        encode = build_encoder(tokenizer, config.kind)
        if corpus.data.ids_column is not None:
            for split in SPLITS:
                _write_stream(split, encoded_rows(corpus, split, tokenizer, building), len(tokenizer), partial)
            tokenizer_loss = find_other_encoding(corpus, tokenizer, encode, building)
        elif corpus.data.messages_column is not None:
            for split in SPLITS:
                _write_stream(split, encoded_conversations(corpus, split, tokenizer, building), len(tokenizer), partial)
            sample = sample_texts(corpus, building)
            tokenizer_loss = find_tokenizer_loss(tokenizer, sample, encode(sample))
        else:
            for split in SPLITS:
                encoded = _encode(split, pieces()[split], tokenizer, encode)
                _write_stream(split, encoded, len(tokenizer), partial)
            sample = list(texts(sample_evenly(pieces()["val"], _ROUND_TRIP_BYTES)))
            tokenizer_loss = find_tokenizer_loss(tokenizer, sample, encode(sample))
        write_manifest(partial, key=key, built_at=time.time(), tokenizer_loss=tokenizer_loss)
        replace_folder(partial, folder)
    finally:
        for leftover in (building, *tokens_dir.glob(".*")):
            shutil.rmtree(leftover, ignore_errors=True)
    return folder, tokenizer


def _what_changed(key: dict[str, Any], cache_dir: Path) -> str:
    """Describe how `key` differs from the most similar cache."""
    candidates = []
    for path in (cache_dir / "tokens").glob(f"*/{MANIFEST}"):
        with suppress(OSError, ValueError, KeyError):
            changes = identity_changes(json.loads(path.read_text("utf-8"))["key"], key)
            if changes:  # no change: a copy of the cache under another name
                candidates.append((len(changes), path.parent.name, changes))
    if not candidates:
        return f"no cache in {cache_dir} yet"
    _, name, changes = min(candidates)
    return f"{', '.join(changes)} changed since {name}"


def _write_stream(split: str, parts: Iterator[StreamPart], vocab_size: int, folder: Path) -> None:
    """Write the two Arrow files of a split.

    The ids and the mask first go to raw binary files. The Arrow file must be a single record batch, because only that
    maps to one contiguous array, and memory must stay bounded. Raises UserError if an id is outside the vocabulary.
    """
    path, raw, raw_mask = folder / f"{split}.arrow", folder / "ids.bin", folder / "mask.bin"
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    num_tokens, num_bytes = [], []
    with open(raw, "wb") as file, open(raw_mask, "wb") as mask_file:
        for part in parts:
            if part.ids.max(initial=0) >= vocab_size:
                raise UserError(
                    f"The tokenizer returned id {part.ids.max()}, but its vocabulary has only {vocab_size} entries."
                    " Its files are inconsistent: load or train another tokenizer."
                )
            file.write(part.ids.astype(dtype).data)  # tofile does not report why a write failed
            if part.is_target is not None:
                mask_file.write(part.is_target.astype(np.uint8).data)
            num_tokens.append(part.piece_tokens)
            num_bytes.append(part.piece_bytes)
    columns = {"input_ids": _mapped(raw, dtype)}
    if raw_mask.stat().st_size:
        columns["is_target"] = _mapped(raw_mask, np.dtype(np.uint8))
    write_arrow(path, columns)
    write_arrow(pieces_path(path), {"num_tokens": np.concatenate(num_tokens), "num_bytes": np.concatenate(num_bytes)})
    raw.unlink()
    raw_mask.unlink()


def _mapped(path: Path, dtype: np.dtype) -> pa.Array:
    values = np.memmap(path, dtype, "r")
    return pa.Array.from_buffers(pa.from_numpy_dtype(dtype), len(values), [None, pa.py_buffer(values)])


def _encode(split: str, pieces: Dataset, tokenizer: PreTrainedTokenizerFast, encode: Encoder) -> Iterator[StreamPart]:
    """Yield the tokens of the text, one table of pieces at a time.

    Raises UserError if case operators don't restore a piece.
    """
    is_transformed = has_case_operators(json.loads(tokenizer.backend_tokenizer.to_str()))
    progress = _Progress(f"tokenizing {split}", num_text_bytes(pieces))
    for table, (ids, num_ids) in encode_ahead(pieces, encode):
        if is_transformed and decode_texts(tokenizer, (ids, num_ids)) != table["text"].to_pylist():
            raise UserError("tokenizer.case_operators: true does not restore this text exactly; set it to false.")
        is_start = table["is_start"].to_numpy()
        num_tokens = np.array(num_ids, np.uint32)
        ends = np.cumsum(num_tokens, dtype=np.int64)
        ids = np.insert(ids, (ends - num_tokens)[is_start], tokenizer.eos_token_id)
        num_bytes = pc.binary_length(table["text"]).to_numpy()  # of the raw UTF-8 text, not of decoded tokens
        yield StreamPart(ids, num_tokens + is_start, num_bytes.astype(np.uint32))
        progress.add(int(num_bytes.sum()))
    progress.end()


def encode_ahead(pieces: Dataset, encode: Encoder) -> Iterator[tuple[pa.Table, Encoded]]:
    """Yield tables of pieces with their encodings, in order, while the next tables are being encoded."""
    waiting: deque[tuple[pa.Table, Future[Encoded]]] = deque()
    # Two at once: while one table keeps the cores busy, the ids of the other are extracted, which holds the GIL.
    with ThreadPoolExecutor(MAX_TABLES_IN_FLIGHT) as threads:
        for table in pieces.with_format("arrow").iter(batch_size=ROWS_PER_BATCH):
            waiting.append((table, threads.submit(encode, table["text"].to_pylist())))
            if len(waiting) > MAX_TABLES_IN_FLIGHT:  # bounds the memory
                done, encoded = waiting.popleft()
                yield done, encoded.result()
        for done, encoded in waiting:
            yield done, encoded.result()


class _Progress:
    """Log the progress of a long pass over text every few seconds, and its speed at the end."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self.name = name
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.started_at = self.logged_at = time.perf_counter()

    def add(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        now = time.perf_counter()
        if now - self.logged_at >= _PROGRESS_SECONDS:
            self.logged_at = now
            speed = self.done_bytes / (now - self.started_at)
            left_seconds = (self.total_bytes - self.done_bytes) / speed
            done, total = self.done_bytes / 1e6, self.total_bytes / 1e6
            _log.info("%s: %.0f of %.0f MB, %.1f MB/s, %.0f s left", self.name, done, total, speed / 1e6, left_seconds)

    def end(self) -> None:
        seconds = time.perf_counter() - self.started_at
        megabytes = self.done_bytes / 1e6
        _log.info("%s: %.1f MB in %.1f s (%.1f MB/s)", self.name, megabytes, seconds, megabytes / seconds)


def _open_cache(folder: Path, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, is_hit: bool) -> TokenCache:
    data = corpus.data
    num_bytes = sum((folder / f"{split}.arrow").stat().st_size for split in SPLITS)
    free_bytes = free_memory_bytes(torch.device("cpu"))
    is_in_memory = num_bytes <= _RAM_SHARE * free_bytes if data.in_memory == "auto" else data.in_memory
    manifest = read_manifest(folder)
    train, val = (open_stream(folder / f"{split}.arrow", is_in_memory, len(tokenizer)) for split in SPLITS)
    if data.in_memory == "auto":
        where = "copied into memory" if is_in_memory else "memory-mapped"
        why = f"data.in_memory auto: {num_bytes / 1e6:,.1f} MB, {free_bytes / 1e6:,.0f} MB free"
        _log.info("tokens: %s (%s)", where, why)
    if train.is_target is not None:
        share = np.count_nonzero(train.is_target) / len(train)
        _log.info("targets: the assistant's tokens, %.1f %% of the train tokens; the rest is only context", 100 * share)
    verification = Verification(manifest, lambda: itertools.chain(val.hashes(), train.hashes()))
    sha256, tokenizer_loss = manifest["key"]["tokenizer_sha256"], manifest.get("tokenizer_loss")
    if tokenizer_loss:
        _log.warning("%s", tokenizer_loss)
    return TokenCache(train, val, tokenizer, folder, is_hit, corpus.identity, sha256, verification, tokenizer_loss)
