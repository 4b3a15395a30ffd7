"""Score a stream chunk by chunk, and let an adapter train on each chunk after it was scored (test-time training).

The order is fixed here: score a chunk without gradients, commit it, then adapt on tokens of that chunk and before it.
An adapter is handed nothing else, so training on what is still to be scored cannot be written by accident.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfgolf.data.batches import Stream, evaluation_extent
from hfgolf.evaluate.bits_per_byte import Evaluation
from hfgolf.evaluate.context import evaluation_mode
from hfgolf.evaluate.windows import IGNORED, Plan, batches, plan_windows
from hfgolf.golf.legality import Predict, Reader, guarded
from hfgolf.system.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

Logits = Callable[[Tensor], Tensor]
"""Input ids (B, T) -> logits (B, T, V), causally."""


class Adapter(AbstractContextManager[Any]):
    """Changes the model between chunks. Leaving its `with` block restores the model."""

    optimizer: torch.optim.Optimizer

    def __init__(self, model: nn.Module, logits: Logits, learning_rate: float) -> None:
        self.model, self.logits, self.learning_rate = model, logits, learning_rate

    def start_document(self) -> None:
        """Forget what may not be carried into another document. Called before the first chunk, too."""

    def adapt(self, tokens: np.ndarray, windows: np.ndarray) -> None:
        """Train on a chunk that was scored. windows: those that scored it (see Plan), as places in `tokens`."""
        raise NotImplementedError

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        """Take one optimizer step on the mean loss of the labels, with the gradient clipped to norm 1.

        Raises UserError if the gradient is not finite.
        """
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        device = weights[0].device
        self.optimizer.zero_grad()
        with torch.enable_grad():
            predicted = self.logits(inputs.to(device)).float().flatten(0, 1)
            F.cross_entropy(predicted, labels.to(device).flatten(), ignore_index=IGNORED).backward()
        if not torch.nn.utils.clip_grad_norm_(weights, 1.0).isfinite():
            raise UserError("The gradient of test-time training is not finite; lower its learning rate.")
        self.optimizer.step()


class SgdAdapter(Adapter):
    """Train all weights with SGD on each scored chunk, in rows of `length` tokens, `epochs` times.

    The learning rate falls to 0 along a cosine over the chunks. What was learned is carried on to later documents.
    Momentum 0.9 and gradients clipped to norm 1, as in Parameter Golf's record of 6 April 2026 (rate 0.005, three
    epochs, chunks of 32,768 tokens, 32 rows per step).
    """

    def __init__(
        self, model: nn.Module, logits: Logits, *, length: int, num_chunks: int, learning_rate: float, epochs: int = 1
    ) -> None:
        super().__init__(model, logits, learning_rate)
        self.length, self.num_chunks, self.epochs = length, num_chunks, epochs

    def __enter__(self) -> SgdAdapter:
        self.saved = [(weight, weight.detach().clone()) for weight in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate, momentum=0.9)
        self.chunks_done = 0
        return self

    def __exit__(self, *exception: object) -> None:
        with torch.no_grad():
            for weight, before in self.saved:
                weight.copy_(before)
        self.optimizer.zero_grad()
        del self.saved, self.optimizer

    def adapt(self, tokens: np.ndarray, windows: np.ndarray) -> None:
        done = self.chunks_done / self.num_chunks
        self.optimizer.param_groups[0]["lr"] = self.learning_rate * (1 + math.cos(math.pi * done)) / 2
        self.chunks_done += 1
        chunk = tokens[windows[0, 1] - 1 :]
        rows = plan_windows("flat", len(chunk), min(self.length, len(chunk) - 1))
        for _ in range(self.epochs):
            for inputs, labels in batches(chunk.__getitem__, rows, min(32, len(rows.windows))):
                self.step(inputs, labels)


class LoraAdapter(Adapter):
    """Train low-rank corrections of all linear layers inside each document (Hu et al. 2021, arXiv:2106.09685).

    A layer's output gains 1.8 B A x, with A (rank, in) and B (out, rank). B starts at 0 with each document; A is
    kept. One AdamW step follows each chunk, on the mean loss of that chunk's targets, with betas (0, 0.99), eps 1e-10
    and weight decay 0.5, as in Parameter Golf's record of 27 April 2026 (rank 80, rate 1e-4, chunks of 48).
    """

    def __init__(self, model: nn.Module, logits: Logits, *, rank: int = 8, learning_rate: float = 1e-3) -> None:
        super().__init__(model, logits, learning_rate)
        self.rank = rank

    def __enter__(self) -> LoraAdapter:
        layers = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        if not layers:
            raise UserError("LoRA needs linear layers (torch.nn.Linear), but this model has none; use sgd.")
        random = torch.Generator().manual_seed(0)
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.hooks = []
        for layer in layers:
            bound = layer.in_features**-0.5
            initial = (torch.rand(self.rank, layer.in_features, generator=random) * 2 - 1) * bound
            down = nn.Parameter(initial.to(layer.weight.device))
            up = nn.Parameter(torch.zeros(layer.out_features, self.rank, device=layer.weight.device))
            self.pairs.append((down, up))
            self.hooks.append(layer.register_forward_hook(self._corrected(down, up)))
        self.needed_gradients = [(weight, weight.requires_grad) for weight in self.model.parameters()]
        self.model.requires_grad_(False)
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self.hooks:
            hook.remove()
        for weight, needed in self.needed_gradients:
            weight.requires_grad_(needed)
        del self.pairs, self.hooks, self.needed_gradients

    def _corrected(self, down: Tensor, up: Tensor) -> Any:
        return lambda layer, inputs, output: output + 1.8 * F.linear(F.linear(inputs[0], down), up)

    def start_document(self) -> None:
        with torch.no_grad():
            for _, up in self.pairs:
                up.zero_()
        weights = [weight for pair in self.pairs for weight in pair]
        rate = self.learning_rate
        self.optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.0, 0.99), eps=1e-10, weight_decay=0.5)

    def adapt(self, tokens: np.ndarray, windows: np.ndarray) -> None:
        ids = torch.from_numpy(tokens.astype(np.int64))
        for begin, first, last in windows.tolist():
            labels = ids[begin + 1 : last + 1].clone()
            labels[: first - begin - 1] = IGNORED
            self.step(ids[None, begin:last], labels[None])


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
    """Plan chunks of chunk_tokens targets inside each document, each from a window of up to `length` tokens.

    Unlike `plan_windows`, the first `length` targets of a document are several chunks, from shorter windows. A chunk is
    at most one window.
    """
    chunk_tokens = min(chunk_tokens, length)
    documents = plan_windows("documents", num_tokens, num_tokens, num_tokens, separators)
    chunks = []
    for begin, _, last in documents.windows.tolist():
        for first in range(begin + 1, last + 1, chunk_tokens):
            end = min(first + chunk_tokens - 1, last)
            context = max(begin, first + chunk_tokens - 1 - length)  # which the end of the document does not move
            chunks.append(Chunk(np.array([[context, first, end]]), first == begin + 1))
    windows = np.concatenate([chunk.windows for chunk in chunks])
    plan = dataclasses.replace(documents, length=length, stride=chunk_tokens, windows=windows)
    return plan, chunks


def score_first(
    reader: Reader,
    logits: Logits,
    plan: Plan,
    chunks: Sequence[Chunk],
    *,
    batch_size: int,
    device: torch.device | str = "cpu",
    adapter: Adapter | None = None,
) -> None:
    """Commit each batch of windows, chunk by chunk; adapt after each chunk but the last.

    A document's last chunk is not trained on either: nothing of that document is left to score.
    """
    with adapter or nullcontext():
        for number, chunk in enumerate(chunks):
            if adapter is not None and chunk.starts_document:
                adapter.start_document()
            width = int((chunk.windows[:, 2] - chunk.windows[:, 0]).max())
            for start in range(0, len(chunk.windows), batch_size):
                windows = chunk.windows[start : start + batch_size]
                part = dataclasses.replace(plan, mode="sliding", length=width, windows=windows)  # in this order
                reader.commit(_predictor(logits, part, device), part.num_scored)
            has_more = number + 1 < len(chunks) and not chunks[number + 1].starts_document
            if adapter is not None and has_more:
                begin, end = int(chunk.windows[0, 0]), int(chunk.windows[-1, 2])
                adapter.adapt(reader.seen[begin : end + 1], chunk.windows - begin)


def _predictor(logits: Logits, plan: Plan, device: torch.device | str) -> Predict:
    """Return what predicts the targets of a plan's windows in one forward pass."""

    def predict(tokens: np.ndarray) -> Tensor:
        # of the last target, which is unknown, the labels only say that it is one
        read = partial(tokens.take, mode="clip")
        ((inputs, labels),) = batches(read, plan, len(plan.windows))
        with torch.no_grad():
            return logits(inputs.to(device))[labels.to(device) != IGNORED].float().log_softmax(-1)

    return predict


@dataclass(frozen=True)
class ScorerSettings:
    """How a stream is scored. adapter: sgd, over the stream; lora, inside each document; or None.

    mode, stride, skip_separators: see windows.plan_windows. lora's windows follow from chunk_tokens instead.
    chunk_tokens, learning_rate, epochs, rank: of the adapter.
    """

    mode: str
    length: int
    stride: int
    separator: int
    batch_size: int = 8
    skip_separators: bool = False
    adapter: str | None = None
    chunk_tokens: int = 1024
    learning_rate: float = 0.02
    epochs: int = 1
    rank: int = 8

    def plan(self, tokens: np.ndarray) -> tuple[Plan, Sequence[Chunk]]:
        """Return the plan for a stream, and its chunks; without an adapter one chunk."""
        separators = np.flatnonzero(tokens == self.separator)
        if self.adapter == "lora":
            return document_chunks(len(tokens), self.length, self.chunk_tokens, separators)
        plan = plan_windows(
            self.mode, len(tokens), self.length, self.stride, separators, skip_separators=self.skip_separators
        )
        return plan, stream_chunks(plan, self.chunk_tokens if self.adapter else len(tokens))

    def describe(self) -> dict[str, Any]:
        """Return what a score with test-time training must state about it."""
        names = {"sgd": ("epochs",), "lora": ("rank",), None: ()}[self.adapter]
        return {name: getattr(self, name) for name in ("adapter", "chunk_tokens", "learning_rate", *names)}


def evaluate_in_order(
    model: nn.Module,
    stream: Stream,
    accelerator: Accelerator,
    settings: ScorerSettings,
    vocab_size: int,
    *,
    is_guarded: bool = False,
) -> tuple[Evaluation, dict[str, Any] | None]:
    """Evaluate a model on a whole stream, with test-time training or under guard (legality.py) or both.

    Each token is committed in order, from a forward pass of settings.batch_size windows; under guard, each such pass
    is checked at one place, so few windows are many checks. Where documents end is told beforehand, to place windows.
    Also returns what the guard did.

    Weights and mode of the model are as before afterwards. Raises UserError with more than one process (each chunk
    depends on the one before it) and in fp16, and IllegalScorer if the model is not causal.
    """
    if accelerator.num_processes > 1 or accelerator.mixed_precision == "fp16":
        what = "The legality check" if is_guarded else "Test-time training"
        raise UserError(f"{what} runs on one process, in bf16 or fp32; start it with plain python.")
    plan, chunks = settings.plan(stream.tokens)
    rate = settings.learning_rate

    def logits(inputs: Tensor) -> Tensor:
        with accelerator.autocast():
            output: Tensor = model.forward(input_ids=inputs, use_cache=False).logits
        return output

    adapter: Adapter | None = None
    if settings.adapter == "sgd":
        schedule = {"num_chunks": len(chunks), "epochs": settings.epochs}
        adapter = SgdAdapter(model, logits, length=settings.length, learning_rate=rate, **schedule)
    elif settings.adapter == "lora":
        adapter = LoraAdapter(model, logits, rank=settings.rank, learning_rate=rate)
    options = {"batch_size": settings.batch_size, "device": accelerator.device, "adapter": adapter}

    def scorer(reader: Reader) -> None:
        score_first(reader, logits, plan, chunks, **options)

    with evaluation_mode(model):
        if is_guarded:
            reader = guarded(scorer, stream.tokens, vocab_size)
        else:
            scorer(reader := Reader(stream.tokens, vocab_size, check=None))
    evaluation = Evaluation(reader.nats, plan.num_scored, evaluation_extent(stream)[1])
    return evaluation, reader.describe() if is_guarded else None
