"""The tokens of a corpus in parts: tokenized by many tasks, and joined to the cache that one process would have built.

Owns which files a task takes, its part, and the join. Does not know who runs the tasks, or where.

A task takes whole files, as they follow each other. So the parts in order are the tokens in order, and a document
belongs to the split that its name alone decides.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from hfgolf.config import TokenizerConfig
from hfgolf.data.corpus import SPLITS, Corpus
from hfgolf.data.manifest import NAME as MANIFEST
from hfgolf.data.manifest import read_manifest, write_manifest
from hfgolf.data.stream_writer import write_stream, write_streams
from hfgolf.data.token_cache import cache_key, cache_path
from hfgolf.data.token_stream import StreamPart, TokenStream, open_stream
from hfgolf.data.tokenizer import embedding_rows, find_tokenizer
from hfgolf.durable import find_damage, replace_folder
from hfgolf.errors import UserError
from hfgolf.wording import join_words

_BLOCK_TOKENS = 2**24  # read at once: 32 MB


@dataclass(frozen=True)
class Plan:
    """A corpus cut for a number of tasks. key: that of the cache (cache_key)."""

    corpus: Corpus
    tokenizer: TokenizerConfig
    cache_dir: Path
    key: dict[str, Any]
    tasks: int

    @property
    def folder(self) -> Path:
        """Return the folder of everything that the tasks write."""
        return self.cache_dir / "tasks" / f"{cache_path(self.cache_dir, self.key).name}-{self.tasks}"

    def part(self, task: int) -> Path:
        """Return the folder of a task's tokens, which is complete or absent."""
        return self.folder / "parts" / f"{task:05d}"

    def share(self, task: int) -> Corpus:
        """Return what a task tokenizes: whole files, as even in bytes as their order allows."""
        sizes = np.array([state[0] for state in self.corpus.states], np.float64)
        middles = np.cumsum(sizes) - sizes / 2
        tasks = np.floor(middles / sizes.sum() * self.tasks)
        start, end = np.searchsorted(tasks, [task, task + 1])
        return self.corpus.share(int(start), int(end))

    def missing(self) -> list[int]:
        """Return the tasks whose part is not there."""
        return [task for task in range(self.tasks) if not (self.part(task) / MANIFEST).is_file()]


def write_part(plan: Plan, task: int) -> None:
    """Tokenize a task's share to its part. Does nothing if the part is there.

    Any number of processes may do this at once. Raises UserError like load_tokens, or if this machine's tokenizer is
    not the one that the tasks were planned with.
    """
    part = plan.part(task)
    if (part / MANIFEST).is_file():
        return
    corpus, folder = plan.corpus, plan.cache_dir / "tokenizers"
    tokenizer = find_tokenizer(plan.tokenizer, corpus.identity, folder)
    if tokenizer is None or cache_key(corpus, plan.tokenizer, tokenizer) != plan.key:
        raise UserError(
            f"tokenizer: {socket.gethostname()} finds another one than the machine that planned this task; let both see"
            f" the same {folder if tokenizer is None else plan.tokenizer.name_or_path}."
        )
    # the name is this process's own: a task that was thought dead may still write
    partial = part.with_name(f".partial-{part.name}-{socket.gethostname()}-{os.getpid()}")
    scratch = partial / "scratch"
    shutil.rmtree(partial, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        share = plan.share(task)
        pieces = cache(lambda: share.write_pieces(scratch / "text"))
        tokenizer_loss = write_streams(share, plan.tokenizer.kind, tokenizer, pieces, partial, scratch)
        shutil.rmtree(scratch)
        write_manifest(partial, tokenizer_loss=tokenizer_loss)
        replace_folder(partial, part)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def open_part(plan: Plan, task: int) -> dict[str, TokenStream]:
    """Return the streams of a part: of both splits, one or none. Raises ValueError if they are damaged."""
    paths = {split: plan.part(task) / f"{split}.arrow" for split in SPLITS}
    return {split: open_stream(path) for split, path in paths.items() if path.is_file()}


def join_parts(plan: Plan, folder: Path, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Write the parts, one after the other, as the streams in `folder`. Return why the tokenizer is not lossless.

    Each task looks for a loss in a sample of its own share; the first that found one is believed. Raises UserError if a
    part is missing or damaged (it is then removed), or if a split is empty.
    """
    if missing := plan.missing():
        names = join_words(map(str, missing), maximum=5)
        raise UserError(
            f"--executor: {len(missing)} of {plan.tasks} tasks have not finished ({names}); their logs are in"
            f" {plan.folder}. Run the same command again for them."
        )
    losses = []
    for task in range(plan.tasks):
        part = plan.part(task)
        try:
            manifest = read_manifest(part)
            damages = (find_damage(part, name, stated) for name, stated in manifest["files"].items())
            if damage := next(filter(None, damages), None):
                raise ValueError(damage)
        except ValueError as error:
            shutil.rmtree(part)
            raise UserError(
                f"--executor: {part} is damaged ({error}); run the same command again, which repeats this task."
            ) from None
        losses.append(manifest["tokenizer_loss"])
    for split in SPLITS:
        streams = (open_part(plan, task).get(split) for task in range(plan.tasks))
        blocks = itertools.chain.from_iterable(_blocks(stream) for stream in streams if stream)
        write_stream(split, blocks, embedding_rows(tokenizer), folder)
        plan.corpus.require_text(split, (folder / f"{split}.arrow").is_file())
    return next(filter(None, losses), None)


def _blocks(stream: TokenStream) -> Iterator[StreamPart]:
    """Yield a stream in blocks that fit into memory; the first has the counts of all pieces."""
    piece_tokens, piece_bytes = stream.piece_tokens, stream.piece_bytes
    for start in range(0, len(stream), _BLOCK_TOKENS):
        block = slice(start, start + _BLOCK_TOKENS)
        is_target = None if stream.is_target is None else stream.is_target[block]
        yield StreamPart(stream.tokens[block], piece_tokens, piece_bytes, is_target)
        piece_tokens, piece_bytes = piece_tokens[:0], piece_bytes[:0]
