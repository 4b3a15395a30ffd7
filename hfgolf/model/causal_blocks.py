"""Causal attention by plain products over blocks of queries: the faster kernel for training in bf16 on a CPU.

Each block of queries meets the keys up to its own end in one batched product, so that nearly half of the scores are
never computed and a block's scores stay in the cache: 1.8 to 3.0 times as fast as torch's flash kernel on two cores
with AVX512-BF16 (benchmarks/cpu_kernels.py). Importing this file registers it with transformers, as attn_implementation
"causal_blocks".

Shapes: B batch, T time, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .configuration_golf import GolfConfig
from .modeling_golf import apply_dropout

NAME = "causal_blocks"
QUERIES_PER_BLOCK = 128
LONGEST_SEQUENCE = 1024  # the blocks are unrolled: beyond, the gain falls and the time to compile rises


def attend_fastest(model: PreTrainedModel, device: torch.device, precision: str | None, sequence_length: int) -> None:
    """Have a Golf model attend in blocks where benchmarks/cpu_kernels.py measured that to be faster than SDPA.

    precision: no, bf16 or fp16, of autocast. sequence_length: the longest that it will be trained or evaluated with.
    """
    is_faster = device.type == "cpu" and precision == "bf16" and sequence_length <= LONGEST_SEQUENCE
    if is_faster and model.config.model_type == GolfConfig.model_type:
        model.set_attn_implementation(NAME)


def causal_blocks(query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
    """Return softmax(query @ key.T * scaling, causal) @ value, (B, H, T, D); all three have that shape.

    Scores and weights are kept in the operands' dtype, the softmax between them computes in fp32: in bf16 a third of
    the memory that fp32 weights beside their bf16 copy take, and faster. dropout: rate on the weights.
    """
    key, value = key.contiguous(), value.contiguous()  # or each block would copy its part of them, and keep that
    outputs = []
    for start in range(0, query.shape[2], QUERIES_PER_BLOCK):
        queries = query[:, :, start : start + QUERIES_PER_BLOCK]
        end = start + queries.shape[2]
        scores = queries @ key[:, :, :end].mT * scaling
        places = torch.arange(end, device=query.device)
        scores = scores.masked_fill(places > places[start:, None], float("-inf"))
        weights = apply_dropout(scores.softmax(dim=-1), dropout)
        outputs.append(weights @ value[:, :, :end])
    return torch.cat(outputs, dim=2)


def causal_blocks_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks an attention function to, (B, T, H, D); with a mask or a cache, through SDPA."""
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = query.shape[1] // key.shape[1]
    output = causal_blocks(query, repeat_kv(key, groups), repeat_kv(value, groups), scaling, dropout)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, causal_blocks_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
