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


def _leaky_relu2(x: Tensor, slope: float = 0.0) -> Tensor:
    y = F.leaky_relu(x, slope) if slope else F.relu(x)
    # not y.square(): CUDA's autocast would square in fp32, with two casts, and keep both copies
    return y * y


def _gelu_new(x: Tensor) -> Tensor:
    """Return GELU by its tanh formula (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # 0.5 (1 + tanh u) = sigmoid(2 u), and the compiler's exp is 2.3 times as fast on a CPU as its tanh
    return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": _leaky_relu2,
    "gelu": F.gelu,
    "gelu_new": _gelu_new,
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


def _vector(is_on: Any, *shape: int) -> nn.Parameter | None:
    """Return a gain, gate or scale, or None if it is off; modeling_golf.py initializes it by its name."""
    return nn.Parameter(torch.empty(shape)) if is_on else None


class GolfRMSNorm(nn.Module):
    """Divide by the root mean square over the last dimension, then scale (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, has_weight: bool = True) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = _vector(has_weight, size)

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast, x may be bf16 and the weight fp32. The fused kernel needs one dtype; it still sums in fp32.
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.shape, weight, self.eps)


def _build_norm(config: Any) -> nn.Module:
    if config.norm == "rmsnorm":
        return GolfRMSNorm(config.hidden_size, config.norm_eps, config.norm_weight)
    if config.norm != "layernorm":
        raise ValueError(config.norm)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, config.norm_weight, bias=config.use_bias)


def _rotation(position_ids: Tensor, config: Any) -> Rotation:
    """Return cos and sin of the RoPE angles, (B or 1, 1, T, rope_dims / 2) in fp32 (Su et al. 2021, arXiv:2104.09864).

    They are recomputed in every forward pass because a non-persistent buffer holds garbage after from_pretrained.
    """
    size = config.rope_dims or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, device=position_ids.device, dtype=torch.float32) / size
    return cos_and_sin(position_ids[:, None, :, None].float() * config.rope_theta**-exponents)


def cos_and_sin(angles: Tensor) -> Rotation:
    # as_strided makes the compiler store them: fused, each kernel that rotates would compute cos, sin and powers again,
    # 15 % of a step of GPT-2 124M on an H200
    cos, sin = angles.cos(), angles.sin()
    return cos.as_strided(cos.shape, cos.stride()), sin.as_strided(sin.shape, sin.stride())


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _without_self(output: Tensor, value: Tensor) -> Tensor:
    """Remove from each head's output its part along the token's own value: y - (y . v) v, with v of length 1.

    output: (B, T, H, D). value: (B, K, T, D).
    """
    B, T, H, D = output.shape
    unit = F.normalize(value.to(torch.promote_types(value.dtype, torch.float32)), dim=-1)
    unit = unit.transpose(1, 2)[:, :, :, None]  # (B, T, K, 1, D): one for all heads of a group
    grouped = output.view(B, T, unit.shape[2], -1, D)
    return (grouped - (grouped * unit).sum(-1, keepdim=True) * unit).to(output.dtype).view(B, T, H, D)


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


class FusedLinear(nn.Linear):
    """Several matrices in one, which initialization and Muon treat one by one."""


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
        self.qkv_proj = FusedLinear(config.hidden_size, sum(self.head_counts) * self.head_dim, bias=config.use_bias)
        self.o_proj = OutputLinear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        if config.qk_norm:
            self.q_norm = GolfRMSNorm(self.head_dim, config.norm_eps, config.norm_weight)
            self.k_norm = GolfRMSNorm(self.head_dim, config.norm_eps, config.norm_weight)
        layers_after = config.num_hidden_layers - layer_idx
        self.excludes_self_value = layers_after <= config.exclude_self_value
        self.query_gain = _vector(config.query_gain, heads)
        self.head_gate = _vector(config.head_gate, heads, config.head_gate or 0)
        self.value_embedding_scale = _vector(layers_after <= config.value_embedding_layers, 1)

    def forward(
        self,
        hidden_states: Tensor,
        rotation: Rotation | None,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        cache_layer: int = 0,
        value_embedding: Tensor | None = None,
        attend: Attend = sdpa,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        B, T, _ = hidden_states.shape
        qkv = self.qkv_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H + 2K, T, D)
        query, key, value = qkv.split(self.head_counts, dim=1)
        if self.value_embedding_scale is not None and value_embedding is not None:
            value = value + (0.1 * self.value_embedding_scale * value_embedding).to(value.dtype)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        if self.query_gain is not None:
            query = query * self.query_gain[:, None, None]
        # RoPE returns fp32, and so do norms under autocast on some devices. Attention kernels need one dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        own_value = value
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, cache_layer, kwargs=kwargs)  # a paged cache changes them
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        if self.excludes_self_value:
            output = _without_self(output, own_value)
        if self.head_gate is not None:
            gate = F.linear(hidden_states[..., : self.config.head_gate], self.head_gate)  # (B, T, H)
            gate = self.config.head_gate_peak * torch.sigmoid(self.config.head_gate_scale * gate)
            output = output * gate[..., None]
        return self.o_proj(output.reshape(B, T, -1)), weights


class GolfMLP(nn.Module):
    """Project up, apply the activation (gated for swiglu), project down."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        is_leaky, slope = config.activation == "leaky_relu2", config.activation_slope
        self.activation = partial(_leaky_relu2, slope=slope) if is_leaky else ACTIVATIONS[config.activation]
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
    """One pre-norm block: attention, then MLP, each added to the residual stream; or both at once (see GolfConfig)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.is_parallel = config.parallel_from is not None and layer_idx >= config.parallel_from and not config.lanes
        self.norm_scale = (layer_idx + 1) ** -0.5 if config.norm_depth_scale else None
        self.input_layernorm = _build_norm(config)
        self.self_attn = GolfAttention(config, layer_idx)
        if not self.is_parallel:
            self.post_attention_layernorm = _build_norm(config)
        self.mlp = GolfMLP(config)
        width = config.hidden_size
        self.attention_scale = _vector(config.branch_scale, width)
        self.mlp_scale = _vector(config.branch_scale, width)
        self.residual_mix = _vector(config.embedding_residual, 2, width)

    def forward(
        self,
        hidden_states: Any,
        embedded: Tensor | None = None,
        lane_mix: Tensor | None = None,
        **attention_arguments: Any,
    ) -> Any:
        """Return the residual stream (B, T, C), or both lanes if lane_mix (2, 3) is given."""
        stream = hidden_states if lane_mix is None else hidden_states[0]
        mixed = stream
        if self.residual_mix is not None and embedded is not None:
            mixed = self.residual_mix[0] * stream + self.residual_mix[1] * embedded
        normed = self._scaled(self.input_layernorm(mixed), self.norm_scale)
        attended = self._scaled(self.self_attn(normed, **attention_arguments)[0], self.attention_scale)
        attended = apply_dropout(attended, self.dropout, self.training)
        if lane_mix is not None:
            transformed = self._transform(hidden_states[1])
            return tuple(
                keep * lane + from_attention * attended + from_mlp * transformed
                for lane, (keep, from_attention, from_mlp) in zip(hidden_states, lane_mix.unbind(), strict=True)
            )
        if self.is_parallel:
            return mixed + attended + self._transform(normed, is_normed=True)
        hidden_states = mixed + attended
        return hidden_states + self._transform(hidden_states)

    def _transform(self, hidden_states: Tensor, is_normed: bool = False) -> Tensor:
        if not is_normed:
            hidden_states = self._scaled(self.post_attention_layernorm(hidden_states), self.norm_scale)
        return apply_dropout(self._scaled(self.mlp(hidden_states), self.mlp_scale), self.dropout, self.training)

    @staticmethod
    def _scaled(x: Tensor, scale: Any) -> Tensor:
        return x if scale is None else x * scale


class GolfSmear(nn.Module):
    """Mix each token but the first with the one before: x_t + strength * sigmoid(gate . x_t[:size]) * x_(t-1)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.separator = config.bos_token_id
        self.gate = nn.Parameter(torch.empty(config.smear_gate))
        self.strength = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        gate = self.strength * torch.sigmoid((x[..., : len(self.gate)] * self.gate).sum(-1, keepdim=True))
        gate = gate * (position_ids > 0)[..., None]  # before the first token, a row may have padding
        if self.separator is not None:  # a document must not begin with the end of the one before
            gate = gate * (input_ids != self.separator)[..., None]
        return x + gate * F.pad(x[:, :-1], (0, 0, 1, 0))


class GolfBigram(nn.Module):
    """Add a hashed embedding of the last two tokens: scale * proj(table[(36313 t_i XOR 27191 t_(i-1)) mod (rows - 1)]).

    The first token, at position 0, has the last row. The table starts at zero and the projection does not: with both at
    zero, neither would ever get a gradient.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(config.bigram_buckets, config.bigram_size)
        self.proj = nn.Linear(config.bigram_size, config.hidden_size, bias=False)
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        rows = self.table.num_embeddings - 1
        hashed = torch.bitwise_xor(36313 * input_ids, 27191 * F.pad(input_ids[:, :-1], (1, 0))) % rows
        return self.scale * self.proj(self.table(torch.where(position_ids > 0, hashed, rows)))


class GolfValueEmbedding(nn.Module):
    """A second embedding of each token, which attention adds to its values: (B, K, T, D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.table = nn.Embedding(config.vocab_size, config.value_embedding_size)
        self.proj = OutputLinear(config.value_embedding_size, config.num_key_value_heads * self.head_dim, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.proj(self.table(input_ids)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def layer_order(config: Any) -> list[int]:
    """Return the layers in the order of a pass: 0, 1, ..., with those of an active loop several times in a row."""
    order = list(range(config.num_hidden_layers))
    if config.loop and config.loop_active:
        first, last, times = config.loop
        order[first : last + 1] *= times
    return order


def document_numbers(input_ids: Tensor, config: Any) -> Tensor:
    """Return which document of its row each token is in, (B, T). A document begins with its separator."""
    return (input_ids == config.bos_token_id).cumsum(dim=1)


class GolfStack(nn.Module):
    """The transformer without its head. `build` adds the modules, `run` takes embeddings to normed hidden states.

    It has no __init__ of its own, so that GolfModel can also be a PreTrainedModel.
    """

    def build(self, config: Any, block: Callable[[Any, int], nn.Module]) -> None:
        """Add the modules that a config asks for; `block` makes one layer from the config and its index."""
        self.config = config
        width, layers = config.hidden_size, config.num_hidden_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size or width)
        if config.embedding_size:
            self.embed_proj = nn.Linear(config.embedding_size, width, bias=False)
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, width)
        if config.bigram_buckets:
            self.bigram = GolfBigram(config)
        if config.smear_gate:
            self.smear = GolfSmear(config)
        if config.value_embedding_layers:
            self.value_embedding = GolfValueEmbedding(config)
        if config.embedding_norm:
            self.embed_norm = _build_norm(config)
        self.layers = nn.ModuleList(block(config, index) for index in range(layers))
        self.norm = _build_norm(config)
        looped = (config.loop[1] - config.loop[0] + 1) * (config.loop[2] - 1) if config.loop else 0
        skips = (layers + looped) // 2  # for a pass with its loop
        self.skip_scale = _vector(config.unet_skips, skips, width)
        self.skip_gate = _vector(config.unet_skips == "gated", skips, width)
        # of all layers, as the record counts them; each lane: [what it keeps, from attention, from the MLP]
        self.lane_mix = _vector(config.lanes, layers, 2, 3)

    def run(
        self, token_embeddings: Tensor, position_ids: Tensor, input_ids: Tensor | None = None, **arguments: Any
    ) -> Tensor:
        """Return hidden states (B, T, C). position_ids: (B or 1, T). arguments: of attention, and its rotation."""
        config, order = self.config, layer_order(self.config)
        hidden_states: Any = self._embed(token_embeddings, position_ids, input_ids)
        rotation = _rotation(position_ids, config) if config.position_embedding == "rope" else None
        arguments = {"rotation": rotation, "position_ids": position_ids} | arguments
        if config.embedding_residual:
            arguments["embedded"] = hidden_states
        if config.value_embedding_layers:
            arguments["value_embedding"] = self.value_embedding(input_ids)
        first_half = len(order) // 2
        kept: list[Tensor] = []
        for place, index in enumerate(order):
            if self.lane_mix is not None and index >= config.parallel_from:
                if not isinstance(hidden_states, tuple):
                    hidden_states = (hidden_states, hidden_states)
                arguments["lane_mix"] = self.lane_mix[index]
            if place >= first_half and kept:
                hidden_states = self._add_skip(hidden_states, kept.pop(), place - first_half)
            hidden_states = self.layers[index](hidden_states, cache_layer=place, **arguments)
            if config.unet_skips and place < first_half:
                kept.append(hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states)
        return self.norm(sum(hidden_states) / 2 if isinstance(hidden_states, tuple) else hidden_states)

    def _add_skip(self, hidden_states: Any, skip: Tensor, place: int) -> Any:
        if isinstance(hidden_states, tuple):
            return self._add_skip(hidden_states[0], skip, place), hidden_states[1]
        assert self.skip_scale is not None
        skip = self.skip_scale[place] * skip
        if self.skip_gate is None:
            return hidden_states + skip
        gate = torch.sigmoid(self.skip_gate[place])
        return gate * hidden_states + (1 - gate) * skip

    def _embed(self, token_embeddings: Tensor, position_ids: Tensor, input_ids: Tensor | None) -> Tensor:
        hidden_states = token_embeddings
        if self.config.embedding_size:
            hidden_states = self.embed_proj(hidden_states)
        if self.config.position_embedding == "learned":
            hidden_states = hidden_states + self.embed_positions(position_ids)
        if self.config.bigram_buckets:
            hidden_states = hidden_states + self.bigram(input_ids, position_ids)
        if self.config.smear_gate:
            hidden_states = self.smear(hidden_states, input_ids, position_ids)
        if self.config.embedding_norm:
            hidden_states = self.embed_norm(hidden_states)
        return apply_dropout(hidden_states, self.config.dropout, self.training)


def squash(x: Tensor, form: str) -> Tensor:
    """Return tanh(x), or poly5: x (1 - x^2/3 + x^4/15) for x in [-2, 2], clipped to [-1, 1]."""
    if form == "tanh":
        return torch.tanh(x)
    if form != "poly5":
        raise ValueError(form)
    x = x.clamp(-2, 2)
    square = x * x
    return (x * (1 - square / 3 + square * square / 15)).clamp(-1, 1)


def soft_caps(logits: Tensor, cap: float, negative: float | None) -> Tensor | float:
    """Return the cap of each logit: `cap`, or `negative` for those below 0 if it is not None."""
    return cap if negative is None else torch.where(logits > 0, cap, negative).to(logits.dtype)


def cap_logits(logits: Tensor, config: Any) -> Tensor:
    """Return cap * squash(logits / cap), or the logits if the config has no cap."""
    if config.logit_soft_cap is None:
        return logits
    cap = soft_caps(logits, config.logit_soft_cap, config.logit_soft_cap_negative)
    return cap * squash(logits / cap, config.soft_cap_form)


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
        size = config.embedding_size or config.hidden_size
        if config.embedding_size:
            self.head_proj = nn.Linear(config.hidden_size, size, bias=False)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        config, embedding = self.model.config, self.model.embed_tokens
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        mask = None
        if config.attention_span == "document":
            documents = document_numbers(input_ids, config)
            mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (positions.mT >= positions)
        hidden_states = self.model.run(embedding(input_ids), positions, input_ids, attention_mask=mask)
        if config.embedding_size:
            hidden_states = self.head_proj(hidden_states)
        head = embedding if config.tie_word_embeddings else self.lm_head
        return cap_logits(F.linear(hidden_states, head.weight), config)
