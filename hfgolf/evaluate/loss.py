"""The loss of a model on a token stream. Each token is predicted exactly once, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfgolf.data.batches import IGNORE_INDEX, evaluation_extent, evaluation_windows
from hfgolf.evaluate.bits_per_byte import Evaluation
from hfgolf.evaluate.context import evaluation_mode
from hfgolf.model.modeling_golf import GolfForCausalLM

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hfgolf.data.batches import Stream


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    stream: Stream,
    accelerator: Accelerator,
    *,
    sequence_length: int,
    batch_size: int,
    budget_tokens: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate a model on the start of a stream, in non-overlapping rows of sequence_length tokens.

    Args:
        model: any causal language model, unwrapped and on the accelerator's device. It runs uncompiled, in evaluation
            mode, and returns to its mode afterwards.
        sequence_length: tokens per row.
        batch_size: rows per batch and rank.
        budget_tokens: evaluate as many whole pieces of text as fit in this many tokens. None: all.
        before_batch: called before each batch, equally often on every rank. An exception from it ends the evaluation.

    The ranks share the rows and add up their losses in fp64. No row counts twice, as it would with even_batches.
    """
    nats = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    rank, world = accelerator.process_index, accelerator.num_processes
    with evaluation_mode(model):
        for batch in evaluation_windows(stream, sequence_length, budget_tokens, batch_size, rank, world):
            before_batch()
            batch = {name: values.to(accelerator.device) for name, values in batch.items()}
            with accelerator.autocast():
                nats += summed_nats(model, **batch)
    num_tokens, num_bytes = evaluation_extent(stream, budget_tokens)
    return Evaluation(accelerator.reduce(nats, "sum").item(), num_tokens, num_bytes)


def summed_nats(model: nn.Module, input_ids: Tensor, shift_labels: Tensor) -> Tensor:
    """Return the summed loss of all targets in nats, a scalar. input_ids, shift_labels: (B, T); labels are shifted."""
    # .forward, because a compiled __call__ would compile again for evaluation
    if isinstance(model, GolfForCausalLM):  # chunked loss; num_items_in_batch=1 gives the sum instead of the mean
        return model.forward(
            input_ids, shift_labels=shift_labels, num_items_in_batch=1, return_logits=False, use_cache=False
        ).loss
    logits = model.forward(input_ids=input_ids, use_cache=False).logits.float().flatten(0, 1)
    return F.cross_entropy(logits, shift_labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
