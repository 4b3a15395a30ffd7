"""The loss of a model on a token stream, each token predicted once whatever the number of processes."""

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
    """Evaluate on the stream's first `budget_tokens` tokens (whole pieces of text; None: all), in non-overlapping rows.

    model: any causal language model, unwrapped and on the accelerator's device; called eagerly and in evaluation mode,
    and left in the mode it was in. The ranks share the rows; sums of nats are added up, in fp64, so no row counts twice
    (even_batches would).

    before_batch: called before each batch, as often on every rank; what it raises ends the evaluation.
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
    """Return the nats of all targets, a scalar. input_ids, shift_labels: (B, T), the labels one token ahead."""
    # .forward: a compiled __call__ would compile once more for evaluation
    if isinstance(model, GolfForCausalLM):  # in chunks; num_items 1: the sum, not the mean
        return model.forward(
            input_ids, shift_labels=shift_labels, num_items_in_batch=1, return_logits=False, use_cache=False
        ).loss
    logits = model.forward(input_ids=input_ids, use_cache=False).logits.float().flatten(0, 1)
    return F.cross_entropy(logits, shift_labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
