"""The loss of a model on a token stream, each token predicted once whatever the number of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hfgolf.data.batches import evaluation_extent, evaluation_windows
from hfgolf.evaluate.bits_per_byte import Evaluation

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from hfgolf.data.token_cache import TokenStream


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    stream: TokenStream,
    accelerator: Accelerator,
    *,
    sequence_length: int,
    batch_size: int,
    budget_tokens: int | None = None,
) -> Evaluation:
    """Evaluate on the stream's first `budget_tokens` tokens (whole pieces of text; None: all), in non-overlapping rows.

    model: unwrapped and on the accelerator's device; called eagerly and in evaluation mode, and left in the mode it
    was in. The ranks share the rows; sums of nats are added up, in fp64, so no row counts twice (even_batches would).
    """
    was_training = model.training
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    rank, world = accelerator.process_index, accelerator.num_processes
    for batch in evaluation_windows(stream, sequence_length, budget_tokens, batch_size, rank, world):
        batch = {name: values.to(accelerator.device) for name, values in batch.items()}
        with accelerator.autocast():
            # .forward: a compiled __call__ would compile once more for evaluation; num_items 1: the sum, not the mean
            nats += model.forward(**batch, num_items_in_batch=1, return_logits=False, use_cache=False).loss
    model.train(was_training)
    num_tokens, num_bytes = evaluation_extent(stream, budget_tokens)
    return Evaluation(accelerator.reduce(nats, "sum").item(), num_tokens, num_bytes)
