"""Score a stream chunk by chunk, and let an adapter train on each chunk after it was scored (test-time training).

The order is fixed here: score a chunk without gradients, commit it, then adapt on tokens of that chunk and before it.
An adapter is handed nothing else, so training on what is still to be scored cannot be written by accident. The last
chunk is not trained on. legality.py tests any scorer, also one that goes around this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hfgolf.evaluate.windows import IGNORED, Plan, as_fp64, batches, plan_windows

Read = Callable[[np.ndarray], np.ndarray]
Logits = Callable[[Tensor], Tensor]
"""Input ids (B, T) -> logits (B, T, V), causally."""
Commits = Iterator[tuple[np.ndarray, Tensor]]
"""Target indices (n,), ascending, and their log-probabilities (n, V), in the order in which they are final."""


class Adapter(AbstractContextManager[Any], Protocol):
    """Changes the model between chunks. Leaving its `with` block restores the model."""

    def start_document(self) -> None:
        """Forget what may not be carried into another document. Called before the first chunk, too."""

    def adapt(self, tokens: np.ndarray, windows: np.ndarray) -> None:
        """Train on a chunk that was scored. windows: those that scored it (see Plan), as places in `tokens`."""


class Chunk(NamedTuple):
    """Windows that are scored with the same weights, and whether a document starts with them."""

    windows: np.ndarray
    starts_document: bool


def stream_chunks(plan: Plan, chunk_tokens: int) -> list[Chunk]:
    """Cut a plan into chunks of about chunk_tokens targets; a window belongs to the chunk of its first target."""
    chunk = (plan.windows[:, 1] - 1) // chunk_tokens
    parts = np.split(plan.windows, np.flatnonzero(np.diff(chunk)) + 1)
    return [Chunk(part, number == 0) for number, part in enumerate(parts)]


def document_chunks(
    num_tokens: int, length: int, chunk_tokens: int, separators: np.ndarray
) -> tuple[Plan, list[Chunk]]:
    """Plan chunks of chunk_tokens targets inside each document, each from up to `length` tokens that end with it.

    Unlike `plan_windows`, the first `length` targets of a document are several chunks, from shorter windows.
    """
    documents = plan_windows("documents", num_tokens, num_tokens, num_tokens, separators)
    chunks = []
    for begin, _, last in documents.windows.tolist():
        for first in range(begin + 1, last + 1, chunk_tokens):
            end = min(first + chunk_tokens - 1, last)
            chunks.append(Chunk(np.array([[max(begin, end - length), first, end]]), first == begin + 1))
    windows = np.concatenate([chunk.windows for chunk in chunks])
    plan = dataclasses.replace(documents, length=length, stride=chunk_tokens, windows=windows)
    return plan, chunks


def score_first(
    logits: Logits,
    read: Read,
    plan: Plan,
    chunks: Sequence[Chunk],
    *,
    batch_size: int,
    device: torch.device | str = "cpu",
    adapter: Adapter | None = None,
) -> Generator[tuple[np.ndarray, Tensor], None, None]:
    """Yield (targets, log-probabilities) of each batch of windows, chunk by chunk; adapt after each chunk but the last.

    A document's last chunk is not trained on either: nothing of that document is left to score.
    """
    with adapter or nullcontext():
        for number, chunk in enumerate(chunks):
            if adapter is not None and chunk.starts_document:
                adapter.start_document()
            width = int((chunk.windows[:, 2] - chunk.windows[:, 0]).max())
            part = dataclasses.replace(plan, mode="sliding", length=width, windows=chunk.windows)  # in this order
            targets = part.targets()
            for inputs, labels in batches(read, part, min(batch_size, len(chunk.windows))):
                with torch.no_grad():
                    log_probs = logits(inputs.to(device))[labels.to(device) != IGNORED].float().log_softmax(-1)
                yield targets[: len(log_probs)], log_probs
                targets = targets[len(log_probs) :]
            has_more = number + 1 < len(chunks) and not chunks[number + 1].starts_document
            if adapter is not None and has_more:
                begin, end = int(chunk.windows[0, 0]), int(chunk.windows[-1, 2])
                adapter.adapt(read(np.arange(begin, end + 1)), chunk.windows - begin)


def total_nats(commits: Commits, read: Read) -> float:
    """Return the total nats of the tokens that were committed, summed in fp64."""
    nats = 0.0
    for targets, log_probs in commits:
        ids = torch.from_numpy(read(targets).astype(np.int64)).to(log_probs.device)
        nats -= as_fp64(log_probs.gather(1, ids[:, None])).sum().item()
    return nats
