"""Distillation: a model learns from the text and from what models of other runs say of each next token.

What a model says that has been through a text is a better target than the one token that stands there. So another one
of the same size learns from it what it would not learn from the text: Hinton et al. 2015, "Distilling the Knowledge in
a Neural Network", arXiv 1503.02531, section 2; Furlanello et al. 2018, "Born-Again Neural Networks", arXiv 1805.04770.
benchmarks/learning/distill.py measures it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from hfgolf.checkpoint.identity import text_changes
from hfgolf.config.parse import DISTILL_FROM
from hfgolf.data.tokenizer import tokenizer_sha256
from hfgolf.evaluate.context import max_positions
from hfgolf.model.causal_blocks import choose_attention
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.layers_golf import cap_logits
from hfgolf.model.modeling_golf import IGNORE_INDEX, MAX_ROWS_FP16, GolfForCausalLM, default_chunk_elements
from hfgolf.publish.load import load_exported
from hfgolf.run.folder import RunFolder
from hfgolf.run.record import read_json
from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words, labeled
from hfgolf.train.hooks import Hook
from hfgolf.train.init_from import weights_sha256
from hfgolf.train.process import processes
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)

SHARE = 0.5
"""Of the loss. 0.8 was as good (benchmarks/learning/distill.jsonl)."""


class Distillation(Hook):
    """Makes SHARE of the training loss the cross-entropy to the mean of what the models of earlier runs say."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Load the models. Raises UserError for what is not a complete run of a Golf model."""
        self._folders = [RunFolder(Path(os.path.expanduser(folder))) for folder in folders]
        self._teachers, tokenizers = zip(*map(_load, self._folders), strict=True)
        self._tokenizers = [tokenizer_sha256(tokenizer) for tokenizer in tokenizers]
        self._sha256 = [*map(weights_sha256, self._teachers)]
        self._sha256_before: list[str] = []

    def start(self, run: Run) -> None:
        """Raise UserError if the models are not of this text and tokenizer, or not those that the run began with."""
        if run.is_sharded or not isinstance(run.raw_model, GolfForCausalLM):
            raise UserError(f"{DISTILL_FROM}: only a golf model learns from others, and not under FSDP2; leave it out.")
        if isinstance(run.raw_model.cross_entropy, DistillationLoss):  # after a rollback
            return
        if self._sha256_before not in ([], self._sha256):
            raise UserError(
                f"{DISTILL_FROM}: the run began with other weights; restore them, or choose another --run.name."
            )
        corpus = run.checkpoints.identity["corpus"]
        for folder, tokenizer in zip(self._folders, self._tokenizers, strict=True):
            if changes := text_changes(read_json(folder.metadata).get("corpus") or {}, corpus):
                raise UserError(
                    f"{DISTILL_FROM}: {folder.path} was trained on other text ({join_words(changes)}), so it may know"
                    " what this run is evaluated on; name runs on the same text with the same split."
                )
            if tokenizer != run.tokens.tokenizer_sha256:
                raise UserError(f"{DISTILL_FROM}: {folder.path} has another tokenizer; state that of its config.yaml.")
        device, precision = run.accelerator.device, run.config.train.mixed_precision
        rows, length = run.raw_model.config.vocab_size, run.config.batch.sequence_length
        for folder, teacher in zip(self._folders, self._teachers, strict=True):
            if teacher.config.vocab_size != rows:
                size = f"{teacher.config.vocab_size} rows in its embedding, and this run {rows}"
                raise UserError(f"{DISTILL_FROM}: {folder.path} has {size}; state model.vocab_size.")
            if length > (max_positions(teacher) or length):
                raise UserError(
                    f"{DISTILL_FROM}: {folder.path} has positions for {max_positions(teacher)} tokens, but"
                    f" batch.sequence_length is {length}; make it shorter."
                )
            choose_attention(teacher.to(device), device, precision, length)
        loss: Any = DistillationLoss(run.raw_model, self._teachers)
        run.raw_model.cross_entropy = loss
        names = join_words([str(folder.path) for folder in self._folders])
        logger.info("%s", labeled("teachers", f"{names}; {SHARE:.0%} of the loss is what they say of each next token"))

    def state_dict(self) -> dict[str, Any]:
        return {"sha256": self._sha256}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sha256_before = state.get("sha256", [])


def _load(folder: RunFolder) -> tuple[GolfForCausalLM, PreTrainedTokenizerFast]:
    if not folder.summary.is_file():
        raise UserError(f"{DISTILL_FROM}: {folder.path} is not a complete run; name folders such as runs/small.")
    model, tokenizer = load_exported(str(folder.path))
    if not isinstance(model, GolfForCausalLM) or not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{DISTILL_FROM}: {folder.path} holds a {type(model).__name__}; a golf model is needed.")
    return model.to(processes().device).float().requires_grad_(False), tokenizer


class DistillationLoss(nn.Module):
    """The loss of a model with teachers: in training with SHARE of what they say, in evaluation without."""

    def __init__(self, model: GolfForCausalLM, teachers: Sequence[GolfForCausalLM]) -> None:
        super().__init__()
        self.plain = model.cross_entropy
        self._config: GolfConfig = model.config
        self._teachers = tuple(teachers)  # of which a module would save the weights
        self._input_ids: Tensor | None = None
        model.register_forward_pre_hook(self._keep_ids, with_kwargs=True)

    def _keep_ids(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._input_ids = named.get("input_ids", arguments[0] if arguments else None)

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> Tensor:
        """Return the loss, summed over targets in nats. Arguments as of `chunked_cross_entropy`."""
        if not self.training:
            nats: Tensor = self.plain(hidden, weight, targets, *settings)
            return nats
        return self._with_teachers(hidden, weight, targets, settings[-1])

    @torch.compiler.disable
    def _with_teachers(self, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_elements: int | None) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.no_grad():
            said = [
                (last_hidden(teacher, self._input_ids).flatten(0, 1).to(dtype), teacher.lm_head.weight.to(dtype))
                for teacher in self._teachers
            ]

        def nats(chunk: Tensor, head: Tensor, part: slice) -> Tensor:
            with torch.no_grad():
                mean = torch.zeros((), device=device)
                for teacher, (each, own_head) in zip(self._teachers, said, strict=True):
                    logits = cap_logits(F.linear(each[part], own_head).float(), teacher.config)
                    mean = mean + logits.softmax(-1) / len(said)
            logarithms = cap_logits(F.linear(chunk, head).float(), self._config).log_softmax(-1)
            counted = targets[part] != IGNORE_INDEX
            plain = F.nll_loss(logarithms, targets[part], ignore_index=IGNORE_INDEX, reduction="sum")
            return (1 - SHARE) * plain - SHARE * ((mean * logarithms).sum(-1) * counted).sum()

        elements = chunk_elements or default_chunk_elements(device)
        # of a chunk, ten tensors are kept at once, and three of the plain loss, which memory.py predicts
        rows = max(1, elements // 4 // weight.shape[0])
        rows = min(rows, MAX_ROWS_FP16) if dtype == torch.float16 else rows
        total: Tensor = _SumOverChunks.apply(hidden, weight, rows, dtype, nats)
        return total


class _SumOverChunks(torch.autograd.Function):
    """A loss, summed over chunks of rows. Like the plain one, it has a chunk's logits once, and its gradients then."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: int, dtype: torch.dtype, nats: Callable[..., Tensor]
    ) -> Tensor:
        head = weight.detach().to(dtype).requires_grad_()
        total = torch.zeros((), device=hidden.device)
        hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.zeros_like(weight)  # fp32, as autograd's sum
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            chunk = hidden[part].detach().to(dtype).requires_grad_()
            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                loss = nats(chunk, head, part)
            hidden_gradient[part], of_head = torch.autograd.grad(loss, (chunk, head))
            weight_gradient += of_head
            total += loss.detach()
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient = (gradient * scale.to(gradient.dtype) for gradient in ctx.saved_tensors)
        return hidden_gradient, weight_gradient, None, None, None


def last_hidden(model: GolfForCausalLM, input_ids: Tensor | None) -> Tensor:
    """Return what the head of a model reads: (B, T, size of the embedding)."""
    hidden: Tensor = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    return model.head_proj(hidden) if model.config.embedding_size else hidden
