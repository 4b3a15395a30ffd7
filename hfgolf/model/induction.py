"""Let heads of the first two layers start as induction heads, which find what followed the same token before.

A model learns to copy late and all at once, as it takes two heads in a row (Olsson et al. 2022, "In-context Learning
and Induction Heads", arXiv 2209.11895): one writes the token before into the residual stream, and one of the next layer
looks there for the present token. A small model that reads few tokens may never find them. Here they are first values
of its ordinary weights, of which all are trained as before, as in Trockman and Kolter 2023, "Mimetic Initialization of
Self-Attention Layers", arXiv 2305.09828. benchmarks/learning/averages.py has what it gains.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hfgolf.model.modeling_golf import GolfForCausalLM

FAST = 0.3  # radians per token, at least, of the dimensions by which a head finds the token before
SLOW = 2.5  # radians in a whole context, at most, of those by which it finds a token wherever it stands
SHARPNESS = 2.0  # by which the scores of these two layers start larger
STRENGTH = 1.5  # of the token before, beside the token itself
NOISE = 0.3  # what remains of the random weights of queries and keys
SCALE = 0.5  # length of a row of an input matrix, as `_init_weights` makes them


def has_room(model: GolfForCausalLM) -> bool:
    """Return whether the architecture can have induction heads: two layers, and RoPE on whole heads that are normed."""
    config = model.config
    has_rope = config.position_embedding == "rope" and config.rope_dims is None
    is_normed = config.qk_norm and config.norm_weight
    return has_rope and is_normed and config.embedding_size is None and config.num_hidden_layers > 1


@torch.no_grad()
def start_induction(model: GolfForCausalLM, heads: int, context: int) -> None:
    """Give the first heads of the first two layers their start. Draws from torch's generator.

    heads: at most as many as there are of keys and values. context: the longest distance to find a token at.
    """
    config, embedding = model.config, model.model.embed_tokens.weight
    width = config.hidden_size
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    size, (queries, keys, _) = first.head_dim, first.head_counts
    one, two = (attention.qkv_proj.weight.view(-1, size, width) for attention in (first, second))
    angles = config.rope_theta ** (-torch.arange(0, size, 2) / size)
    slow = (angles * context <= SLOW).repeat(2).nonzero()[:, 0]
    common = F.normalize(torch.randn(width), dim=0)  # all tokens have it, so a query can ask for any neighbor
    embedding += embedding.std() * width**0.5 * common
    fast = (angles >= FAST).float()
    before = torch.cat([angles.cos() * fast, -angles.sin() * fast])  # a rotation by one token
    rooms = _orthogonal(width, width)
    for head in range(min(heads, keys)):  # the first query of each group of keys
        query, key, value = head * (queries // keys), queries + head, queries + keys + head
        own = slice(query * size, (query + 1) * size)
        room, content, copied = rooms[:, head * size :][:, :size], _orthogonal(size, width), _orthogonal(size, width)
        for place, vector in ((query, before), (key, torch.cat([fast, 0 * fast]))):
            one[place] = NOISE * one[place] + 2 * SCALE * vector[:, None] * common
        one[value] = SCALE * content
        first.o_proj.weight[:, own] = STRENGTH / SCALE * room
        for place, found in ((query, content), (key, room.T)):
            two[place] *= NOISE
            two[place, slow] = SCALE * found[: len(slow)]
        two[value] = SCALE * copied
        second.o_proj.weight[:, own] = copied.T / SCALE
    for attention in (first, second):
        attention.q_norm.weight *= SHARPNESS


def _orthogonal(rows: int, columns: int) -> Tensor:
    """Return (rows, columns) with rows of length 1 at right angles to each other."""
    return torch.linalg.qr(torch.randn(columns, rows))[0].T
