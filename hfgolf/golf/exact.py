"""A Golf model whose logits are the same bits on every machine, and in every order of its sums.

What differs between machines is the order in which they add numbers, and their exp, cos and pow. So each sum here is
one of integers below 2**53 in fp64, which no order, thread or fused multiplication can change: activations and weights
are rounded to integers times a power of two first. exp and cos are polynomials of single IEEE operations, which are
correctly rounded everywhere. The layers are those of layers_golf.py; a mode replaces the functions that they call.

A pass reads a window in parts of any length, and the logits do not depend on the parts. Ships inside archives, so it
imports only torch, the standard library and layers_golf.py. archive.py checks the operations as they run.

Shapes: B lanes, T tokens of this part, S tokens of the window so far, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hfgolf.model.layers_golf import GolfNetwork, GolfStack, document_numbers

TOTAL_BITS = 24
"""Frequencies of tokens sum to 2**24: each of 2,048 tokens gets at least one, which costs 0.0002 bits per token."""
WEIGHT_BITS = 30  # of exp() in a softmax: the sum of 2**22 of them is exact


def fixed(x: Tensor, terms: int, factors: int = 2) -> tuple[Tensor, Tensor]:
    """Return integers (..., n) in fp64 and their scale (..., 1), a power of two: x is about integers / scale.

    A sum of `terms` products of `factors` such integers is below 2**52, so all its partial sums are exact.
    """
    bits = (52 - terms.bit_length()) // factors
    size = x.abs().amax(-1, keepdim=True).clamp_min(2.0**-60)
    scale = torch.frexp(size)[0] / size * 2.0**bits  # the mantissa, from 1/2 to 1, by its number is a power of two
    return (x * scale).round(), scale


def exp(x: Tensor) -> Tensor:
    """Return e**x, x limited to +-700: a power of two times a Taylor polynomial on [-0.35, 0.35]."""
    x = x.clamp(-700, 700)
    octaves = (x * 1.4426950408889634).round()
    rest, total = x - octaves * 0.6931471805599453, torch.zeros_like(x)
    for power in range(12, -1, -1):  # in place: what is large is the memory
        total = total.mul_(rest).add_(1 / math.factorial(power))
    return total.mul_((octaves.long() + 1023 << 52).view(torch.float64))  # the bits of 2**octaves


def _cos(x: Tensor) -> Tensor:
    x = x - (x * (0.5 / math.pi)).round() * (2 * math.pi)
    square, total = x * x, torch.ones_like(x)
    for power in range(28, 0, -2):
        total = 1 - total * square * (1 / (power * (power - 1)))
    return total


def _sum(x: Tensor, dim: int = -1, keepdim: bool = True) -> Tensor:
    assert (dim, keepdim) == (-1, True)
    integers, scale = fixed(x, x.shape[-1], 1)
    return integers.sum(-1, keepdim=True) / scale


def _squares(x: Tensor) -> Tensor:
    integers, scale = fixed(x, x.shape[-1])
    return (integers * integers).sum(-1, keepdim=True) / (scale * scale)


def _rms_norm(x: Tensor, size: int, weight: Tensor | None, eps: float) -> Tensor:
    x = x / (_squares(x) * (1 / size) + eps).sqrt()
    return x if weight is None else x * weight


def _sigmoid(x: Tensor) -> Tensor:
    return torch.ones_like(x) / (1 + exp(-x))  # not 1 / ...: some machines estimate reciprocals


_EXACT: dict[str, Callable[..., Tensor]] = {
    # lambdas, whose arguments keep their names when the program is packed
    "rms_norm": lambda x, shape, weight, eps: _rms_norm(x, shape[0], weight, eps),
    "normalize": lambda x, **_: x / _squares(x).sqrt().clamp_min(1e-12),
    "sum": _sum,
    "cos": _cos,
    "sin": lambda x: _cos(x - math.pi / 2),
    # RoPE's frequencies. ln() of Decimal is correctly rounded
    "__rpow__": lambda x, base: exp(x.double() * float(Decimal(base).ln())),
    "sigmoid": _sigmoid,
    "tanh": lambda x: 2 * _sigmoid(2 * x) - 1,
    "silu": lambda x, **_: x * _sigmoid(x),
}
"""{name of a function of torch: what computes it here}. All others that layers call are exact on each element."""


class Exact(TorchFunctionMode):
    """Within this context, the layers of a model compute what this file says."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exact = self._linear if func.__name__ == "linear" else _EXACT.get(func.__name__, func)
        return exact(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight not in self.weights:
            self.weights[weight] = fixed(weight, weight.shape[1])
        (integers, scale), (rows, row_scale) = fixed(x, weight.shape[1]), self.weights[weight]
        y = integers @ rows.mT / (scale * row_scale.mT)
        return y if bias is None else y + bias


class Window:
    """One window: the tokens (B, S) that it has read, and the keys and values of each pass through a layer."""

    def __init__(self, network: GolfNetwork, exact: Exact) -> None:
        self.network, self.exact = network, exact
        self.ids = torch.empty(0, 0, dtype=torch.long)
        self.kept: dict[int, list[Tensor]] = {}

    def extend(self, ids: Tensor, num_kept: int) -> Tensor:
        """Read ids (B, T); return the logits of its last positions, (B, num_kept, V) in fp64."""
        stack: Any = self.network.model
        self.num_kept = num_kept
        self.ids = torch.cat((self.ids, ids), 1) if self.kept else ids
        stack.run, stack._embed = self._run, self._embed
        with torch.no_grad(), self.exact:
            return self.network(ids)

    def _run(self, embeddings: Tensor, positions: Tensor, ids: Tensor, **_: Any) -> Tensor:
        stack, config = self.network.model, self.network.model.config
        places = torch.arange(self.ids.shape[1])
        mask = (places <= places[-ids.shape[1] :, None])[None]  # (1 or B, T, S)
        if config.attention_span == "document":
            documents = document_numbers(self.ids, config)
            mask = mask & (documents[:, -ids.shape[1] :, None] == documents[:, None])
        arguments = {"attention_mask": mask, "past_key_values": self, "attend": exact_attention}
        return GolfStack.run(stack, embeddings, places[None, -ids.shape[1] :], ids, **arguments)[:, -self.num_kept :]

    def _embed(self, embeddings: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        """Embed with the token before: smear and bigram read it."""
        stack, start = self.network.model, max(0, self.ids.shape[1] - ids.shape[1] - 1)
        positions = torch.arange(start, self.ids.shape[1])[None]
        ids = self.ids[:, start:]
        return GolfStack._embed(stack, stack.embed_tokens(ids), positions, ids)[:, -embeddings.shape[1] :]

    def update(self, key: Tensor, value: Tensor, layer: int, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Add keys and values (B, K, T, D); return those of the window so far, each as integers and scales."""
        config, end = self.network.model.config, self.ids.shape[1]
        parts = [*fixed(key, key.shape[-1]), *fixed(value, config.max_position_embeddings)]
        if layer not in self.kept:
            room = config.max_position_embeddings
            self.kept[layer] = [part.new_zeros(*part.shape[:2], room, part.shape[3]) for part in parts]
            # what belongs together in a product of one token, the values of all tokens, is together in memory
            self.kept[layer][2] = self.kept[layer][2].mT.contiguous().mT
        for kept, part in zip(self.kept[layer], parts, strict=True):
            kept[:, :, end - part.shape[2] : end] = part
        kept_here = [kept[:, :, :end] for kept in self.kept[layer]]
        return kept_here[:2], kept_here[2:]


def exact_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention (see layers_golf.Attend) on what Window.update returns. attention_mask: (1 or B, T, S)."""
    (keys, key_scale), (values, value_scale) = key, value
    B, H, T, D = query.shape
    K, S = keys.shape[1:3]
    integers, scale = fixed(query, D)
    # of one token, such products are twice as fast in this order
    scores = (keys @ integers.reshape(B, K, -1, D).mT).mT.reshape(B, K, -1, T, S) / key_scale.mT[:, :, None]
    scores = scores / scale.view(B, K, -1, T, 1) * (1 / math.sqrt(D))  # `scaling` is a power, which may differ
    mask = attention_mask[:, None, None]
    scores = scores.masked_fill(~mask, -1e9)
    weights = (exp(scores - scores.amax(-1, keepdim=True)) * 2.0**WEIGHT_BITS).round() * mask
    integers, scale = fixed(weights / value_scale.mT[:, :, None], module.config.max_position_embeddings)
    output = (values.mT @ integers.view(B, K, -1, S).mT).mT.reshape(B, K, -1, T, D) / scale / _sum(weights)
    return output.view(B, H, T, D).transpose(1, 2), None


def load_exact(network: GolfNetwork) -> GolfNetwork:
    """Return the network in fp64, without the powers that Python took when it was built."""
    config = network.model.config
    if config.norm_depth_scale:
        layers: Any = network.model.layers
        for index, layer in enumerate(layers):
            layer.norm_scale = 1 / math.sqrt(index + 1)
    return network.double()


def cumulated(logits: Tensor) -> Tensor:
    """Return the sums of the frequencies of all tokens before each, (..., V + 1) int64, from 0 to 2**24.

    Each frequency is at least 1.
    """
    sizes = (exp(logits - logits.amax(-1, keepdim=True)) * 2.0**WEIGHT_BITS).round().cumsum(-1)
    V = logits.shape[-1]
    sums = (sizes / sizes[..., -1:] * (2**TOTAL_BITS - V)).floor().long() + torch.arange(1, V + 1)
    return torch.cat((torch.zeros_like(sums[..., :1]), sums), -1)


def spans(num_targets: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield the windows of a lane: first input, first target, last target; inputs end before it. Target 0 is known.

    Each window but the first begins with the half of a window that the one before has decoded.
    """
    stride, end = max(1, length // 2), 0
    while end < num_targets:
        begin = end - length + stride if end else 0
        yield begin, end + 1, min(begin + length, num_targets)
        end = begin + length
