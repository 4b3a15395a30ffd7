"""The loss of a model on a token stream. Each token is predicted at most once, on any number of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hfgolf.data.batches import Batch, device_prefetch, evaluation_extent
from hfgolf.data.mixture import MixedStream
from hfgolf.data.token_stream import Stream
from hfgolf.data.tokenizer import document_start, text_start
from hfgolf.evaluate.bits_per_byte import Evaluation
from hfgolf.evaluate.context import evaluation_mode, uncompiled
from hfgolf.evaluate.token_bytes import bytes_per_token
from hfgolf.evaluate.windows import IGNORED, Plan, batches, plan_windows, zero_nats
from hfgolf.model.causal_lm import takes_shift_labels
from hfgolf.system.errors import UserError


def evaluate_loss(
    model: nn.Module,
    stream: Stream,
    accelerator: Accelerator,
    *,
    sequence_length: int,
    batch_size: int,
    budget_tokens: int | None = None,
    before_batch: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Evaluate a model on the start of a stream, in non-overlapping rows of sequence_length tokens.

    sequence_length: tokens per row. budget_tokens: evaluate as many whole pieces of text as fit in this many tokens, or
    all for None. The other arguments are those of `evaluate_plan`. Each text of a mixture is evaluated by itself, on
    its share of the budget.
    """
    if isinstance(stream, MixedStream):
        evaluate = partial(
            evaluate_loss, model, accelerator=accelerator, sequence_length=sequence_length, batch_size=batch_size
        )
        texts = {
            name: evaluate(part, budget_tokens=budget, before_batch=before_batch)
            for name, part, budget in zip(stream.names, stream.parts, stream.budgets(budget_tokens), strict=True)
        }
        nats, num_tokens, num_bytes = (
            sum(getattr(text, name) for text in texts.values()) for name in ("nats", "num_tokens", "num_bytes")
        )
        return Evaluation(nats, num_tokens, num_bytes, texts)
    num_targets, num_bytes = evaluation_extent(stream, budget_tokens)
    plan = plan_windows("flat", num_targets + 1, sequence_length)
    return evaluate_plan(model, stream, accelerator, plan, num_bytes, batch_size=batch_size, before_batch=before_batch)


def plan_evaluation(
    stream: Stream,
    tokenizer: PreTrainedTokenizerBase,
    mode: str,
    length: int,
    stride: int | None = None,
    *,
    drop_tail: bool = False,
    skip_separators: bool = False,
) -> tuple[Plan, int]:
    """Plan the evaluation of a whole stream; return the plan and the raw UTF-8 bytes of the text of its targets.

    stream: without a mask. `windows.plan_windows` explains the arguments. A stream shorter than `length` is one window.

    Raises UserError if nothing is left to score, or if the bytes of a dropped tail cannot be counted.
    """
    tokens = stream.tokens
    if not drop_tail:
        length = min(length, max(1, len(tokens) - 1))
        stride = None if stride is None else min(stride, length)
    separators = np.flatnonzero(tokens == text_start(tokenizer)[0]) if mode == "documents" else None
    num_skipped = skip_separators * min(2, len(document_start(tokenizer)))  # with <s>, that and the end before it
    try:
        plan = plan_windows(mode, len(tokens), length, stride, separators, drop_tail, num_skipped)
    except ValueError as error:
        advice = "; without --drop_tail, it is scored" if drop_tail and len(tokens) > 1 else ""
        raise UserError(f"Evaluation {mode}: {error}{advice}.") from None
    if plan.tail == "scored":
        return plan, evaluation_extent(stream)[1]
    first, last = int(plan.windows[0, 1]), int(plan.windows[-1, 2])
    fast = cast("PreTrainedTokenizerFast", tokenizer)  # streams come from no other
    return plan, int(bytes_per_token(stream, fast)[first : last + 1].sum(dtype=np.int64))


def plan_documents(stream: Stream, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[Plan, int]:
    """Plan the evaluation of each document by itself, as loglikelihood_rolling of lm-eval has it.

    A window follows where the one before ends, with one token of context, and the last one of a document reads back to
    `length` tokens. Separators are context, not targets. Returns as `plan_evaluation` does, and raises the same.
    """
    plan, num_bytes = plan_evaluation(stream, tokenizer, "documents", length, length, skip_separators=True)
    begin, first, last = plan.windows.T
    is_start = stream.tokens[begin] == text_start(tokenizer)[0]
    windows = np.stack([np.where(is_start, begin, last - plan.length), first, last], 1)
    return dataclasses.replace(plan, windows=windows), num_bytes


def describe_coverage(plan: Plan) -> str:
    """Return the coverage of a plan in words, in one line."""
    coverage = plan.coverage()
    stride = "" if plan.mode == "flat" else f", stride {plan.stride:,}"
    excluded = " (tail dropped)" * (plan.tail == "dropped") + " (separators skipped)" * (plan.separators == "skipped")
    return (
        f"{plan.mode}{stride}: {plan.num_scored:,} of {plan.num_tokens:,} tokens scored once,"
        f" {coverage['first_target']:,} to {coverage['last_target']:,}{excluded}"
    )


@torch.no_grad()
def evaluate_plan(
    model: nn.Module,
    stream: Stream,
    accelerator: Accelerator,
    plan: Plan,
    num_bytes: int,
    *,
    batch_size: int,
    before_batch: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Evaluate a model on the targets of a plan, each once.

    Args:
        model: any causal language model, unwrapped and on the accelerator's device. It runs uncompiled, in evaluation
            mode, and returns to its mode afterwards.
        num_bytes: raw UTF-8 bytes of the text of the plan's targets. Of a stream with a mask, only those that the mask
            includes are scored and counted.
        batch_size: windows per batch and rank.
        before_batch: called before each batch, equally often on every rank. An exception from it ends the evaluation.

    The ranks share the windows and add up their losses in fp64. No window counts twice, as it would with even_batches.
    """
    nats = zero_nats(accelerator.device)
    rank, world = accelerator.process_index, accelerator.num_processes
    with evaluation_mode(model), uncompiled(model):
        rows = _labeled_batches(stream, plan, batch_size, rank, world, accelerator.device)
        for batch in device_prefetch(rows, accelerator.device):
            before_batch()
            with accelerator.autocast():
                nats += summed_nats(model, **batch).to(nats.device)
    num_tokens = plan.num_scored if stream.is_target is None else int(stream.is_target[plan.targets()].sum())
    return Evaluation(accelerator.reduce(nats, "sum").item(), num_tokens, num_bytes)


def _labeled_batches(
    stream: Stream, plan: Plan, batch_size: int, rank: int, world: int, device: torch.device
) -> Iterator[Batch]:
    """Yield this rank's inputs and labels of a plan, pinned for a GPU. What the stream's mask excludes is IGNORED."""
    rows = batches(stream.read, plan, batch_size, rank, world)
    if stream.is_target is not None:
        masks = batches(stream.is_target.take, plan, batch_size, rank, world)
        rows = (
            (input_ids, labels.masked_fill(is_target == 0, IGNORED))
            for (input_ids, labels), (_, is_target) in zip(rows, masks, strict=True)
        )
    for row in rows:
        input_ids, labels = (tensor.pin_memory() for tensor in row) if device.type == "cuda" else row
        yield {"input_ids": input_ids, "shift_labels": labels}


def summed_nats(model: nn.Module, input_ids: Tensor, shift_labels: Tensor) -> Tensor:
    """Return the summed loss of all targets in nats, a scalar. input_ids, shift_labels: (B, T); labels are shifted."""
    if takes_shift_labels(model):  # chunked loss; num_items_in_batch=1 gives the sum instead of the mean
        return model(
            input_ids, shift_labels=shift_labels, num_items_in_batch=1, return_logits=False, use_cache=False
        ).loss
    logits = model(input_ids=input_ids, use_cache=False).logits.float().flatten(0, 1)
    return F.cross_entropy(logits, shift_labels.flatten(), ignore_index=IGNORED, reduction="sum")
