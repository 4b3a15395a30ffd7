"""The layers of a Golf model and the pass over them, in plain torch.

Owns what turns token ids into logits: modules, parameter names, formulas. Knows nothing about initialization, the loss,
caches or transformers; modeling_golf.py wraps it for those. Saving a model copies this file next to the weights, and a
scoring program is built from it, so it imports only torch and reads only plain fields of its config. `GolfNetwork` is
the whole model for such a program.

Shapes: B batch, T time (queries), H heads, K key-value heads, D head size, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Rotation = tuple[Tensor, Tensor]
Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""(module, query, key, value, attention_mask, dropout=, scaling=) -> output (B, T, H, D), and maybe the weights."""


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": _relu_squared,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "swiglu": F.silu,  # applied to the gate
}


def apply_dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Zero a fraction `rate` of the elements and scale up the rest (Srivastava et al. 2014, JMLR 15).

    On a CPU, one random number per element can cost as much as the rest of the step. The CPU path therefore uses one
    random byte per element, eight bytes per draw, and rounds the rate to a multiple of 1/256.
    """
    if not training or rate == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, rate)
    dropped = min(max(1, round(256 * rate)), 255)  # how many of a byte's 256 values drop
    draws = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 8),), dtype=torch.int64, device=x.device)
    kept = draws.view(torch.uint8)[: x.numel()].view(x.shape) >= dropped
    return torch.where(kept, x * (256 / (256 - dropped)), 0.0)


class GolfRMSNorm(nn.Module):
    """Divide by the root mean square over the last dimension, then scale (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast, x may be bf16 and the weight fp32. The fused kernel needs one dtype; it still sums in fp32.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def build_norm(config: Any) -> nn.Module:
    """Build a norm of the residual stream."""
    if config.norm == "rmsnorm":
        return GolfRMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.use_bias)


def _rotation(position_ids: Tensor, config: Any) -> Rotation:
    """Return cos and sin of the RoPE angles, both (B or 1, 1, T, D / 2) in fp32 (Su et al. 2021, arXiv:2104.09864).

    They are recomputed in every forward pass because a non-persistent buffer holds garbage after from_pretrained.
    """
    size = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, device=position_ids.device, dtype=torch.float32) / size
    angles = position_ids[:, None, :, None].float() * config.rope_theta**-exponents
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with torch's kernel: causal if there is no mask."""
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, attention_mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


class OutputLinear(nn.Linear):
    """A projection back into the residual stream, initialized to zero so that every block starts as the identity."""


class GolfAttention(nn.Module):
    """Causal self-attention with one fused projection, whose rows are [q: H*D | k: K*D | v: K*D]."""

    is_causal = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx  # of the KV cache
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // heads
        self.head_counts = (heads, keys, keys)
        self.num_key_value_groups = heads // keys
        self.scaling = self.head_dim**-0.5
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.head_counts) * self.head_dim, bias=config.use_bias)
        self.o_proj = OutputLinear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        if config.qk_norm:
            self.q_norm = GolfRMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = GolfRMSNorm(self.head_dim, config.norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        rotation: Rotation | None,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        attend: Attend = sdpa,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        B, T, _ = hidden_states.shape
        qkv = self.qkv_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H + 2K, T, D)
        query, key, value = qkv.split(self.head_counts, dim=1)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        # RoPE returns fp32, and so do norms under autocast on some devices. Attention kernels need one dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(B, T, -1)), weights


class GolfMLP(nn.Module):
    """Project up, apply the activation (gated for swiglu), project down."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.gate_proj = None
        if config.activation == "swiglu":
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.down_proj = OutputLinear(config.intermediate_size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(
            self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(x)) * up
        )


class GolfBlock(nn.Module):
    """One pre-norm block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.input_layernorm = build_norm(config)
        self.self_attn = GolfAttention(config, layer_idx)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = GolfMLP(config)

    def forward(self, hidden_states: Tensor, **attention_arguments: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **attention_arguments)
        hidden_states = hidden_states + apply_dropout(attended, self.dropout, self.training)
        transformed = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + apply_dropout(transformed, self.dropout, self.training)


class GolfStack(nn.Module):
    """The transformer without its head. `build` adds the modules, `run` takes embeddings to normed hidden states.

    It has no __init__ of its own, so that GolfModel can also be a PreTrainedModel.
    """

    def build(self, config: Any, block: Callable[[Any, int], nn.Module]) -> None:
        """Add the modules that a config asks for; `block` makes one layer from the config and its index."""
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        if config.embedding_norm:
            self.embed_norm = build_norm(config)
        self.layers = nn.ModuleList(block(config, index) for index in range(config.num_hidden_layers))
        self.norm = build_norm(config)

    def run(self, token_embeddings: Tensor, position_ids: Tensor, **attention_arguments: Any) -> Tensor:
        """Return hidden states (B, T, C). position_ids: (B or 1, T)."""
        hidden_states = self._embed(token_embeddings, position_ids)
        rotation = _rotation(position_ids, self.config) if self.config.position_embedding == "rope" else None
        for layer in self.layers:
            hidden_states = layer(hidden_states, rotation=rotation, position_ids=position_ids, **attention_arguments)
        return self.norm(hidden_states)

    def _embed(self, token_embeddings: Tensor, position_ids: Tensor) -> Tensor:
        hidden_states = token_embeddings
        if self.config.position_embedding == "learned":
            hidden_states = hidden_states + self.embed_positions(position_ids)
        if self.config.embedding_norm:
            hidden_states = self.embed_norm(hidden_states)
        return apply_dropout(hidden_states, self.config.dropout, self.training)


def cap_logits(logits: Tensor, config: Any) -> Tensor:
    """Return cap * tanh(logits / cap), or the logits if the config has no cap."""
    cap = config.logit_soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


class GolfNetwork(nn.Module):
    """A Golf model in plain torch: ids (B, T) to logits (B, T, V).

    config: any object with the fields of a GolfConfig, such as SimpleNamespace(**GolfConfig().to_dict()). The weights
    are not initialized: load them. The state dict has the names and the order of a saved GolfForCausalLM; a tied head
    is not in it.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = GolfStack()
        self.model.build(config, GolfBlock)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        config, embedding = self.model.config, self.model.embed_tokens
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden_states = self.model.run(embedding(input_ids), positions, attention_mask=None)
        head = embedding if config.tie_word_embeddings else self.lm_head
        return cap_logits(F.linear(hidden_states, head.weight), config)
