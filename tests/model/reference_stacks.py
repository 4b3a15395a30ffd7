"""The challenge's baseline and record stacks, written down from their descriptions: slow, explicit, one sequence.

Knows nothing of the model's code: it takes weights by name and numbers from a config. Each function follows the order
of its description, one head and one layer at a time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)


def rotated(x: Tensor, dims: int, theta: float) -> Tensor:
    """Rotate pairs (i, i + dims / 2) of the first `dims` dimensions of x (T, D) by position * theta^(-2 i / dims)."""
    result = x.clone()
    for position in range(len(x)):
        for i in range(dims // 2):
            angle = torch.tensor(position * theta ** (-2 * i / dims), dtype=torch.float64)
            a, b = x[position, i], x[position, i + dims // 2]
            result[position, i] = a * torch.cos(angle) - b * torch.sin(angle)
            result[position, i + dims // 2] = b * torch.cos(angle) + a * torch.sin(angle)
    return result


def attention(x: Tensor, w: Weights, c: Any, allowed: Tensor, rope_dims: int, is_record: bool) -> Tensor:
    """Return the attention of one layer on its normed input x (T, C). w: the layer's weights. allowed: (T, T)."""
    heads, groups, size = c.num_attention_heads, c.num_key_value_heads, c.hidden_size // c.num_attention_heads
    qkv = w["self_attn.qkv_proj.weight"]
    wq, wk, wv = qkv[: heads * size], qkv[heads * size : (heads + groups) * size], qkv[(heads + groups) * size :]
    outputs = []
    for head in range(heads):
        group = head // (heads // groups)
        rows, group_rows = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
        q = rotated(rms_norm(x @ wq[rows].T, c.norm_eps), rope_dims, c.rope_theta) * w["self_attn.query_gain"][head]
        k = rotated(rms_norm(x @ wk[group_rows].T, c.norm_eps), rope_dims, c.rope_theta)
        v = x @ wv[group_rows].T
        scores = (q @ k.T / size**0.5).masked_fill(~allowed, float("-inf"))
        y = scores.softmax(-1) @ v
        if is_record:
            unit = v / v.norm(dim=-1, keepdim=True)
            y = y - (y * unit).sum(-1, keepdim=True) * unit
            gate = w["self_attn.head_gate"][head]
            y = y * torch.sigmoid(0.5 * (x[:, : len(gate)] @ gate))[:, None]
        outputs.append(y)
    return torch.cat(outputs, dim=-1) @ w["self_attn.o_proj.weight"].T


def capped_logits(x: Tensor, embedding: Tensor, c: Any) -> Tensor:
    return 30 * torch.tanh(rms_norm(x, c.norm_eps) @ embedding.T / 30)


def layers_of(weights: Weights, count: int) -> list[Weights]:
    found: list[Weights] = []
    for i in range(count):
        prefix = f"model.layers.{i}."
        found.append({name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)})
    return found


def baseline_logits(weights: Weights, ids: Tensor, c: SimpleNamespace) -> Tensor:
    """Return the logits (T, V) of the baseline for one sequence of ids (T,)."""
    e, layers = weights["model.embed_tokens.weight"], layers_of(weights, c.num_hidden_layers)
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    head_dim = c.hidden_size // c.num_attention_heads

    def block(x: Tensor, w: Weights) -> Tensor:
        a, b = w["residual_mix"]
        x = a * x + b * x0
        x = x + w["attention_scale"] * attention(rms_norm(x, c.norm_eps), w, c, causal, head_dim, is_record=False)
        hidden = torch.relu(rms_norm(x, c.norm_eps) @ w["mlp.up_proj.weight"].T) ** 2
        return x + w["mlp_scale"] * (hidden @ w["mlp.down_proj.weight"].T)

    x = x0 = rms_norm(e[ids], c.norm_eps)
    encoders = len(layers) // 2
    stack = []
    for w in layers[:encoders]:
        x = block(x, w)
        stack.append(x)
    for i, w in enumerate(layers[encoders:]):
        if stack:
            x = x + weights["model.skip_scale"][i] * stack.pop()
        x = block(x, w)
    return capped_logits(x, e, c)


def record_logits(weights: Weights, ids: Tensor, c: SimpleNamespace, encoder: list[int], decoder: list[int]) -> Tensor:
    """Return the logits (T, V) of the record stack. encoder, decoder: the physical layers in their order."""
    e, layers = weights["model.embed_tokens.weight"], layers_of(weights, c.num_hidden_layers)
    T = len(ids)
    begins = [max([s for s in range(t + 1) if ids[s] == c.bos_token_id], default=0) for t in range(T)]
    allowed = torch.tensor([[key <= query and begins[query] <= key for key in range(T)] for query in range(T)])

    x = e[ids].clone()
    gate, strength = weights["model.smear.gate"], weights["model.smear.strength"]
    for t in range(1, T):
        if ids[t] != c.bos_token_id:
            x[t] = e[ids[t]] + strength * torch.sigmoid(gate @ e[ids[t]][: len(gate)]) * e[ids[t - 1]]
    x = x0 = rms_norm(x, c.norm_eps)

    def attend(x: Tensor, i: int) -> Tensor:
        w = layers[i]
        mixed = w["residual_mix"][0] * x + w["residual_mix"][1] * x0
        normed = rms_norm(mixed, c.norm_eps) / (i + 1) ** 0.5
        return mixed, w["attention_scale"] * attention(normed, w, c, allowed, c.rope_dims, is_record=True)

    def transform(x: Tensor, i: int) -> Tensor:
        w = layers[i]
        hidden = rms_norm(x, c.norm_eps) / (i + 1) ** 0.5 @ w["mlp.up_proj.weight"].T
        hidden = torch.where(hidden > 0, hidden, 0.5 * hidden) ** 2
        return w["mlp_scale"] * (hidden @ w["mlp.down_proj.weight"].T)

    def skipped(x: Tensor, place: int) -> Tensor:
        g = torch.sigmoid(weights["model.skip_gate"][place])
        return g * x + (1 - g) * (weights["model.skip_scale"][place] * stack.pop())

    stack = []
    for i in encoder:
        mixed, attended = attend(x, i)
        x = mixed + attended
        x = x + transform(x, i)
        stack.append(x)
    lanes = None
    for place, i in enumerate(decoder):
        if i < c.parallel_from:
            if stack:
                x = skipped(x, place)
            mixed, attended = attend(x, i)
            x = mixed + attended
            x = x + transform(x, i)
            continue
        lane0, lane1 = lanes or (x, x)
        if stack:
            lane0 = skipped(lane0, place)
        attended, transformed = attend(lane0, i)[1], transform(lane1, i)
        (r0, p00, p10), (r1, p01, p11) = weights["model.lane_mix"][i]
        lanes = (r0 * lane0 + p00 * attended + p10 * transformed, r1 * lane1 + p01 * attended + p11 * transformed)
    return capped_logits((lanes[0] + lanes[1]) / 2, e, c)
