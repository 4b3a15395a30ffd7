"""Evaluate a stream in order: a window is committed, and then it may be learned from (test-time training), or guarded.

The order is fixed here: predict a window, commit it, then learn from what the reader has shown. A learner is handed
nothing else, so training on what is still to be scored cannot be written by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hfgolf.data.batches import Stream, evaluation_extent
from hfgolf.evaluate.bits_per_byte import Evaluation
from hfgolf.evaluate.context import evaluation_mode
from hfgolf.evaluate.windows import IGNORED, Plan, batches
from hfgolf.golf.learner import Learner
from hfgolf.golf.legality import Predict, Reader, guarded
from hfgolf.system.errors import UserError

Logits = Callable[[Tensor], Tensor]
"""Input ids (B, T) -> logits (B, T, V), causally."""


def score_first(reader: Reader, learner: Learner, plan: Plan) -> None:
    """Commit each window, then learn from it. Afterwards the weights are what they were, also after an error.

    Raises UserError if a step was too large for the model.
    """
    try:
        for window in plan.windows.tolist():
            with torch.no_grad():
                reader.commit(partial(learner.predict, window=window), window[2] - window[1] + 1)
            learner.learn(reader.seen, window)
    except ValueError as error:
        raise UserError(f"--adapt_rate: {error}.") from None
    finally:
        learner.restore()


def score_in_order(
    reader: Reader, logits: Logits, plan: Plan, batch_size: int, device: torch.device | str = "cpu"
) -> None:
    """Commit a plan in blocks of batch_size windows, each from one forward pass."""
    for start in range(0, len(plan.windows), batch_size):
        windows = plan.windows[start : start + batch_size]
        width = int((windows[:, 2] - windows[:, 0]).max())
        part = replace(plan, mode="sliding", length=width, windows=windows)  # in this order
        reader.commit(_predictor(logits, part, device), part.num_scored)


def _predictor(logits: Logits, plan: Plan, device: torch.device | str) -> Predict:
    """Return what predicts the targets of a plan's windows in one forward pass."""

    def predict(tokens: np.ndarray) -> Tensor:
        # of the last target, which is unknown, the labels only say that it is one
        read = partial(tokens.take, mode="clip")
        ((inputs, labels),) = batches(read, plan, len(plan.windows))
        with torch.no_grad():
            return logits(inputs.to(device))[labels.to(device) != IGNORED].float().log_softmax(-1)

    return predict


def evaluate_in_order(
    model: nn.Module,
    stream: Stream,
    accelerator: Accelerator,
    plan: Plan,
    vocab_size: int,
    *,
    batch_size: int,
    adapt_rate: float = 0.0,
    is_guarded: bool = False,
) -> tuple[Evaluation, dict[str, Any] | None]:
    """Evaluate a model on a whole stream, with test-time training (learner.py) or under guard (legality.py) or both.

    adapt_rate: of test-time training; 0: without, so batch_size windows are one forward pass. Under guard, each such
    pass is checked at one place, so few windows are many checks. Where documents end is told beforehand, to place
    windows. Also returns what the guard did.

    Weights and mode of the model are as before afterwards. Raises UserError with more than one process (each window
    depends on the one before it) and in fp16, and IllegalScorer if the model is not causal.
    """
    if accelerator.num_processes > 1 or accelerator.mixed_precision == "fp16":
        what = "The legality check" if is_guarded else "Test-time training"
        raise UserError(f"{what} runs on one process, in bf16 or fp32; start it with plain python.")

    def logits(inputs: Tensor) -> Tensor:
        with accelerator.autocast():
            output: Tensor = model.forward(input_ids=inputs, use_cache=False).logits
        return output

    def scorer(reader: Reader) -> None:
        if adapt_rate:
            score_first(reader, Learner(logits, [*model.parameters()], adapt_rate), plan)
        else:
            score_in_order(reader, logits, plan, batch_size, accelerator.device)

    with evaluation_mode(model):
        if is_guarded:
            reader = guarded(scorer, stream.tokens, vocab_size)
        else:
            scorer(reader := Reader(stream.tokens, vocab_size, check=None))
    evaluation = Evaluation(reader.nats, plan.num_scored, evaluation_extent(stream)[1])
    return evaluation, reader.describe() if is_guarded else None
