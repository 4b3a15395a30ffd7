"""The token cache: a corpus as a dataset of token ids, looked up by our own fingerprint.

Owns the key, building a cache only once even if several processes ask for it, and the count of validation documents
that also train. Does not know how text becomes tokens (stream_writer). `datasets.load_from_disk` opens the folder, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerFast

from hfgolf.config.mixture import mean_shares, of_text, stages
from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.cache_folder import (
    MANIFEST,
    DamagedCacheError,
    cache_folder,
    find_wrong_hash,
    locked,
    note_damage,
    read_manifest,
    write_manifest,
)
from hfgolf.data.chat import chat_template
from hfgolf.data.corpus import SPLITS, Corpus, identity_changes, load_corpus
from hfgolf.data.mixture import MixedStream
from hfgolf.data.shards import ShardStream, open_shards
from hfgolf.data.stream_writer import in_daemon, write_streams
from hfgolf.data.token_stream import TokenStream, open_stream, stream_path
from hfgolf.data.tokenizer import (
    build_tokenizer,
    document_start,
    embedding_rows,
    find_tokenizer,
    mixed_pieces,
    tokenizer_sha256,
)
from hfgolf.system.durable import replace_folder
from hfgolf.system.errors import writing
from hfgolf.system.hardware import free_memory_bytes
from hfgolf.system.wording import describe_overlap

_log = logging.getLogger(__name__)
_FORMAT_VERSION = 2
BUILDING = ".hfgolf-building-"
"""Begins the name of a folder in the cache for what one text's build needs for a while; no name that users give."""
_LEFTOVER = re.compile(rf"(\.partial-|\.replaced-|{re.escape(BUILDING)})([0-9a-f]{{16}})")
VERIFIED_BEFORE_USE_BYTES = 2**27  # takes a quarter of a second; larger caches are verified while training starts
_RAM_SHARE = 0.25  # the share of free memory that the tokens may take under data.in_memory auto


@dataclass(frozen=True)
class TokenCache:
    """The tokens of a corpus, the tokenizer that made them, and the folder they are in."""

    train: TokenStream | ShardStream | MixedStream
    val: TokenStream | ShardStream | MixedStream
    tokenizer: PreTrainedTokenizerFast
    path: Path
    is_hit: bool
    identity: dict[str, Any]
    """Identity of the corpus: changes whenever the text or its split changes."""
    tokenizer_sha256: str
    tokenizer_loss: str | None = None
    """Why the tokenizer is not lossless, or None if it is."""
    verification: Future[str | None] | None = None
    """What differs from its hashes. None for shards, which their hashes identify, and for a mixture of such caches."""
    overlap: dict[str, Any] = field(default_factory=dict)
    """How many validation documents also train (count_overlap). Empty for shards, of which that is not counted."""
    texts: dict[str, TokenCache] = field(default_factory=dict)
    """Of a mixture: the tokens of each text, by its name."""

    @property
    def val_notes(self) -> dict[str, Any]:
        """What a reader of the validation figures must know of their text, for summary.json and the card."""
        return ({"tokenizer_loss": self.tokenizer_loss} if self.tokenizer_loss else {}) | self.overlap

    def check(self, wait: bool = False) -> None:
        """Raise DamagedCacheError if the verification thread has found damage. Cheap: the thread does the work.

        wait: wait for the thread to verify all files.
        """
        for text in self.texts.values():
            text.check(wait)
        found = self.verification
        if found is not None and (wait or found.done()) and (problem := found.result()):
            raise note_damage(self.path, problem)


def load_tokens(
    data: DataSection,
    tokenizer_config: TokenizerSection,
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
    if corpus.texts:
        return _load_mixture(corpus, tokenizer_config, tokenizer)
    tokenizer = tokenizer or _find_tokenizer(corpus, tokenizer_config)  # only once: a large one takes a while to load
    if data.source == "shards" and tokenizer is not None:
        train, val = open_shards(corpus, tokenizer)
        folder, sha256 = train.paths[0].parent, tokenizer_sha256(tokenizer)
        tokens = TokenCache(train, val, tokenizer, folder, True, corpus.identity, sha256)
    else:
        found = _find_tokens(corpus, tokenizer_config, tokenizer)
        if found is None:
            with _building(corpus) as scratch:
                # another process may have built it while this one waited
                found = _find_tokens(corpus, tokenizer_config, tokenizer)
                if found is None:
                    folder, tokenizer = _build_cache(corpus, tokenizer_config, scratch, tokenizer)
                    return _open_cache(folder, tokenizer, corpus, is_hit=False)
        tokens = found
    sizes = f"{len(tokens.train):,} train tokens, {len(tokens.val):,} validation tokens"
    _log.debug("%s: %s (%s)", "shards" if data.source == "shards" else "cache hit", tokens.path, sizes)
    return tokens


def _load_mixture(corpus: Corpus, config: TokenizerSection, tokenizer: PreTrainedTokenizerFast | None) -> TokenCache:
    """Return the tokens of a mixture: of each text from a cache of its own, all by one tokenizer."""
    tokenizer = tokenizer or _find_tokenizer(corpus, config)
    if tokenizer is None:
        with _building(corpus) as scratch:
            tokenizer = _train_tokenizer(corpus, config, scratch)
    texts: dict[str, TokenCache] = {}
    for name, text in corpus.texts.items():
        with of_text(name):
            texts[name] = load_tokens(text.data, config, text, tokenizer)
    all_stages, caches = stages(corpus.data.mixture), [*texts.values()]
    losses = (f"{name}: {one.tokenizer_loss}" for name, one in texts.items() if one.tokenizer_loss)
    return TokenCache(
        train=MixedStream(tuple(one.train for one in caches), tuple(texts), all_stages),
        val=MixedStream(tuple(one.val for one in caches), tuple(texts), all_stages),
        tokenizer=tokenizer,
        path=cache_folder(corpus.data) / "tokens",
        is_hit=all(one.is_hit for one in caches),
        identity=corpus.identity,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        tokenizer_loss=next(losses, None),
        overlap=_summed_overlap(caches),
        texts=texts,
    )


def _train_tokenizer(corpus: Corpus, config: TokenizerSection, scratch: Path) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a mixture on all of its texts."""

    def pieces() -> Any:
        found = []
        for number, (name, one) in enumerate(corpus.texts.items()):
            with of_text(name):
                found.append(one.write_pieces(scratch / str(number))["train"])
        return mixed_pieces(found, mean_shares(corpus.data.mixture), config)

    return build_tokenizer(config, corpus.identity, pieces, _tokenizers(corpus))


def _summed_overlap(texts: list[TokenCache]) -> dict[str, Any]:
    """Return the columns of count_overlap of all texts, each of which was compared with itself."""
    if not all(text.overlap for text in texts):
        return {}
    counts = {key: sum(text.overlap[key] for text in texts) for key in ("val_documents", "val_documents_in_train")}
    repeated = sum(text.overlap["val_share_in_train"] * text.val.num_bytes for text in texts)
    return counts | {"val_share_in_train": repeated / max(1, sum(text.val.num_bytes for text in texts))}


def _tokenizers(corpus: Corpus) -> Path:
    return cache_folder(corpus.data) / "tokenizers"


def _find_tokenizer(corpus: Corpus, config: TokenizerSection) -> PreTrainedTokenizerFast | None:
    return find_tokenizer(config, corpus.identity, _tokenizers(corpus))


def _find_tokens(
    corpus: Corpus, config: TokenizerSection, tokenizer: PreTrainedTokenizerFast | None
) -> TokenCache | None:
    tokenizer = tokenizer or _find_tokenizer(corpus, config)
    folder = find_cache(corpus, config, tokenizer) if tokenizer else None
    if tokenizer is None or folder is None:
        return None
    try:
        tokens = _open_cache(folder, tokenizer, corpus, is_hit=True)
        if sum(path.stat().st_size for path in tokens.path.glob("*/*.arrow")) <= VERIFIED_BEFORE_USE_BYTES:
            tokens.check(wait=True)
        return tokens
    except DamagedCacheError:
        return None
    except (OSError, ValueError) as error:
        note_damage(folder, str(error))
        return None


def find_cache(corpus: Corpus, config: TokenizerSection, tokenizer: PreTrainedTokenizerFast) -> Path | None:
    """Return the folder of the matching cache, or None."""
    folder, key = _cache_path(corpus, config, tokenizer)
    return folder if _problem(folder, key) is None else None


def _cache_path(
    corpus: Corpus, config: TokenizerSection, tokenizer: PreTrainedTokenizerFast
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the cache, and its key: everything the tokens depend on."""
    key = {
        **corpus.identity,
        **corpus.reading,
        "tokenizer": f"{config.kind}, {embedding_rows(tokenizer)} entries",
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "end_of_text_id": tokenizer.eos_token_id,
        "format_version": _FORMAT_VERSION,
    }
    if len(start := document_start(tokenizer)) > 1:
        key["document_start"] = start
    if corpus.data.messages_column is not None:
        template = chat_template(tokenizer)
        key["chat_template_sha256"] = hashlib.sha256(template.encode()).hexdigest()
        named = tokenizer.special_tokens_map.items()
        key |= {f"chat_{name}": str(token) for name, token in named if name in template}
    return cache_folder(corpus.data) / "tokens" / _digest(key), key


def _digest(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _building(corpus: Corpus) -> Iterator[Path]:
    """Hold the lock of all builds from one text, and yield a folder for what they need for a while.

    Its tokenizers and tokens may be the same. With the lock, it is safe to delete what an interrupted build left.
    """
    text, cache_dir = _digest(corpus.identity), cache_folder(corpus.data)
    with writing("data.cache_dir", cache_dir):
        for folder in ("locks", "tokenizers"):
            (cache_dir / folder).mkdir(exist_ok=True)
        with locked(_lock(cache_dir, text), "builds the token cache of the same text"):
            _remove_leftovers(cache_dir, text)
            try:
                yield cache_dir / f"{BUILDING}{text}"
            finally:
                _remove_leftovers(cache_dir, text)


def _lock(cache_dir: Path, text: str) -> Path:
    return cache_dir / "locks" / f"{text}.lock"


def _problem(folder: Path, key: dict[str, Any]) -> str | None:
    try:
        is_ours = read_manifest(folder).get("key") == key
    except ValueError as error:
        return str(error)
    return None if is_ours else f"{MANIFEST} describes another cache"


def _build_cache(
    corpus: Corpus, config: TokenizerSection, scratch: Path, tokenizer: PreTrainedTokenizerFast | None
) -> tuple[Path, PreTrainedTokenizerFast]:
    """Build the cache, and the tokenizer if it is not known. Return the cache's folder and the tokenizer."""
    pieces = cache(lambda: corpus.write_pieces(scratch / "text"))
    if tokenizer is None:
        tokenizer = build_tokenizer(config, corpus.identity, lambda: pieces()["train"], _tokenizers(corpus))
    folder, key = _cache_path(corpus, config, tokenizer)
    problem = _problem(folder, key)
    if problem is None:  # only the tokenizer was damaged or lost
        return folder, tokenizer
    if folder.exists():
        _log.info("cache damaged: %s (%s); rebuilding it", folder, problem)
    else:
        _log.debug("cache miss: %s", _what_changed(key, cache_folder(corpus.data)))
    partial = folder.with_name(f".partial-{_digest(corpus.identity)}")
    partial.mkdir(parents=True)
    tokenizer_loss = write_streams(corpus, config.kind, tokenizer, pieces, partial, scratch, folder.name)
    train, val = (open_stream(stream_path(partial, split)) for split in SPLITS)
    overlap = count_overlap(train, val, int(tokenizer.eos_token_id))
    write_manifest(partial, key=key, built_at=time.time(), tokenizer_loss=tokenizer_loss, overlap=overlap)
    replace_folder(partial, folder)
    return folder, tokenizer


def _remove_leftovers(cache_dir: Path, text: str) -> None:
    """Remove what builds of this text left, and dead builds of others. text: its digest; the caller has its lock.

    Only names that hfgolf gives: the user may have files beside them.
    """
    for leftover in [*cache_dir.glob(".*"), *(cache_dir / "tokens").glob(".*")]:
        if (name := _LEFTOVER.fullmatch(leftover.name)) is None:
            continue
        # what is replaced has the name of a cache, and is deleted in any case
        is_free = name[2] == text or name[1] == ".replaced-"
        with suppress(Timeout), nullcontext() if is_free else FileLock(_lock(cache_dir, name[2]), timeout=0):
            shutil.rmtree(leftover, ignore_errors=True)


def _what_changed(key: dict[str, Any], cache_dir: Path) -> str:
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


def _open_cache(folder: Path, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, is_hit: bool) -> TokenCache:
    data = corpus.data
    num_bytes = sum(stream_path(folder, split).stat().st_size for split in SPLITS)
    free_bytes = free_memory_bytes(torch.device("cpu"))
    is_in_memory = num_bytes <= _RAM_SHARE * free_bytes if data.in_memory == "auto" else data.in_memory
    manifest = read_manifest(folder)
    rows = embedding_rows(tokenizer)
    train, val = (open_stream(stream_path(folder, split), is_in_memory, rows) for split in SPLITS)
    if data.in_memory == "auto":
        where = "copied into memory" if is_in_memory else "memory-mapped"
        why = f"data.in_memory auto: {num_bytes / 1e6:,.1f} MB, {free_bytes / 1e6:,.0f} MB free"
        _log.debug("tokens: %s (%s)", where, why)
    if train.is_target is not None:
        share = np.count_nonzero(train.is_target) / len(train)
        _log.info("targets: the assistant's tokens, %.1f %% of the train tokens; the rest is only context", 100 * share)
    hashes = ((stream.name, stream.sha256()) for stream in (val, train))  # computed in the thread
    verification = in_daemon(lambda: find_wrong_hash(manifest, hashes))
    sha256, tokenizer_loss = manifest["key"]["tokenizer_sha256"], manifest.get("tokenizer_loss")
    counted = manifest.get("overlap")
    overlap = {k: v for k, v in counted.items() if isinstance(v, int | float)} if isinstance(counted, dict) else {}
    for warning in filter(None, (tokenizer_loss, describe_overlap(overlap))):
        _log.warning("%s", warning)
    return TokenCache(
        train, val, tokenizer, folder, is_hit, corpus.identity, sha256, tokenizer_loss, verification, overlap
    )


def count_overlap(train: TokenStream, val: TokenStream, separator: int) -> dict[str, Any]:
    """Return columns of a summary: how many validation documents there are, how many train, and their share of bytes.

    Documents are the same if all their tokens are. separator: the token that begins each document, and nothing else: a
    text file, a row, a conversation, or one of the two parts that data.split contiguous cuts a document into.
    """
    documents = list(_documents(val, separator))
    trained = {digest for digest, _ in documents}.intersection(digest for digest, _ in _documents(train, separator))
    sizes = [size for digest, size in documents if digest in trained]
    return {
        "val_documents": len(documents),
        "val_documents_in_train": len(sizes),
        "val_share_in_train": sum(sizes) / max(1, sum(size for _, size in documents)),
    }


def _documents(stream: TokenStream, separator: int) -> Iterator[tuple[bytes, int]]:
    """Yield a 64-bit hash of the tokens of each document, and its raw UTF-8 bytes."""
    pieces = zip(map(int, stream.piece_tokens), map(int, stream.piece_bytes), strict=True)
    digest: Any = None
    document_bytes = 0
    for chunk in stream.chunks:  # each holds whole pieces
        end = 0
        while end < len(chunk):
            num_tokens, num_bytes = next(pieces)
            ids, end = chunk[end : end + num_tokens], end + num_tokens
            if num_tokens and ids[0] == separator:  # the tokenizer may drop all of a piece
                if digest is not None:
                    yield digest.digest(), document_bytes
                digest, document_bytes = hashlib.blake2b(digest_size=8), 0
            digest.update(ids.data)
            document_bytes += num_bytes
    yield digest.digest(), document_bytes + sum(num_bytes for _, num_bytes in pieces)
