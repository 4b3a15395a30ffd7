"""Causal attention in blocks of queries: the faster kernel for bf16 training on a CPU, registered with transformers.

Nearly half of the scores are never computed, and a block's scores stay in the cache. On two cores it is 1.9 to 3.4
times as fast as torch's flash kernel with AVX512-BF16, and with AMX 1.3 to 2.9 times, up to 512 tokens
(benchmarks/cpu_kernels.py).

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
from .layers_golf import apply_dropout

NAME = "causal_blocks"
QUERIES_PER_BLOCK = 128
MAX_SEQUENCE_LENGTH = 1024  # the block loop is unrolled: beyond this, the speedup falls and compile time rises
MAX_SEQUENCE_LENGTH_WITH_AMX = 512  # torch's flash kernel uses AMX: 1.1 to 1.5 times as fast at 1,024, uncompiled


def choose_attention(model: PreTrainedModel, device: torch.device, precision: str | None, sequence_length: int) -> None:
    """Switch a Golf model to causal blocks if benchmarks/cpu_kernels.py measured them to be faster than SDPA.

    precision: of autocast: no, bf16 or fp16. sequence_length: the longest in training and evaluation, in tokens.
    """
    if model.config.model_type != GolfConfig.model_type or device.type != "cpu" or precision != "bf16":
        return
    # with dropout, SDPA has no flash kernel
    has_fast_sdpa = torch.cpu._is_amx_tile_supported() and not model.config.attention_dropout
    if sequence_length <= (MAX_SEQUENCE_LENGTH_WITH_AMX if has_fast_sdpa else MAX_SEQUENCE_LENGTH):
        model.set_attn_implementation(NAME)


def causal_blocks(query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
    """Return softmax(query @ key.T * scaling + causal mask) @ value, (B, H, T, D), the shape of all three operands.

    One batched matmul multiplies each block of queries by the keys up to the end of that block.
    Scores and weights are stored in the operands' dtype; softmax computes in fp32 internally. In bf16 this takes a
    third of the memory of fp32 weights plus their bf16 copy, and is faster. dropout: rate on the weights.
    """
    B, H, T, D = query.shape
    query, key, value = (x.contiguous().flatten(0, 1) for x in (query, key, value))  # else each block copies its slice
    outputs = []
    for start in range(0, T, QUERIES_PER_BLOCK):
        queries = query[:, start : start + QUERIES_PER_BLOCK]
        end = start + queries.shape[1]
        positions = torch.arange(end, device=query.device)
        mask = query.new_zeros(end - start, end).masked_fill_(positions > positions[start:, None], float("-inf"))
        scores = torch.baddbmm(mask, queries, key[:, :end].mT, alpha=scaling)  # scaled and masked in the product
        weights = apply_dropout(scores.softmax(dim=-1), dropout)
        outputs.append(weights @ value[:, :end])
    return torch.cat(outputs, dim=1).view(B, H, T, D)


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
    """Implement transformers' attention interface, (B, T, H, D). With a mask or a KV cache, fall back to SDPA."""
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = query.shape[1] // key.shape[1]
    output = causal_blocks(query, repeat_kv(key, groups), repeat_kv(value, groups), scaling, dropout)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, causal_blocks_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
