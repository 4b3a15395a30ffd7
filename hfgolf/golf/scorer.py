"""Build the scorer of a model: windows over a stream, with or without test-time training.

A scorer yields full distributions, which legality.py can test. Without test-time training evaluate/loss.py gives the
same total at a lower cost, on any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from hfgolf.data.batches import Stream, evaluation_extent
from hfgolf.evaluate.bits_per_byte import Evaluation
from hfgolf.evaluate.context import evaluation_mode
from hfgolf.evaluate.windows import Plan, plan_windows
from hfgolf.golf.adapters import LoraAdapter, SgdAdapter
from hfgolf.golf.legality import Scorer
from hfgolf.golf.score_first import Chunk, document_chunks, score_first, stream_chunks, total_nats
from hfgolf.system.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator


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


def build_scorer(model: nn.Module, accelerator: Accelerator, settings: ScorerSettings) -> Scorer:
    """Return the scorer of a model on the accelerator's device, in its precision. The model should be in eval mode."""

    def logits(inputs: Tensor) -> Tensor:
        with accelerator.autocast():
            output: Tensor = model.forward(input_ids=inputs, use_cache=False).logits
        return output

    def scorer(tokens: np.ndarray) -> Any:
        plan, chunks = settings.plan(tokens)
        rate = settings.learning_rate
        adapter: SgdAdapter | LoraAdapter | None = None
        if settings.adapter == "sgd":
            schedule = {"num_chunks": len(chunks), "epochs": settings.epochs}
            adapter = SgdAdapter(model, logits, length=settings.length, learning_rate=rate, **schedule)
        elif settings.adapter == "lora":
            adapter = LoraAdapter(model, logits, rank=settings.rank, learning_rate=rate)
        options = {"batch_size": settings.batch_size, "device": accelerator.device}
        return score_first(logits, tokens.__getitem__, plan, chunks, adapter=adapter, **options)

    return scorer


def evaluate_adapting(
    model: nn.Module, stream: Stream, accelerator: Accelerator, settings: ScorerSettings
) -> Evaluation:
    """Evaluate a model on a whole stream with test-time training. Its weights and its mode are as before afterwards.

    Raises UserError with more than one process (each chunk depends on the one before it) and in fp16.
    """
    if accelerator.num_processes > 1 or accelerator.mixed_precision == "fp16":
        raise UserError("Test-time training runs on one process, in bf16 or fp32; start it with plain python.")
    plan, _ = settings.plan(stream.tokens)
    with evaluation_mode(model):
        nats = total_nats(build_scorer(model, accelerator, settings)(stream.tokens), stream.read)
    return Evaluation(nats, plan.num_scored, evaluation_extent(stream)[1])


def legality_slice(settings: ScorerSettings, tokens: np.ndarray) -> np.ndarray:
    """Return the start of a stream that a legality test needs: four windows, and four chunks of an adapter."""
    chunk = settings.chunk_tokens if settings.adapter else 0
    return np.array(tokens[: 1 + 4 * max(settings.length, chunk)])
