"""Two adapters for test-time training: SGD on all weights over a stream, and LoRA inside each document.

Owns what a chunk that was scored changes in the model, and putting the model back. score_first.py owns the order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfgolf.evaluate.windows import IGNORED, batches, plan_windows
from hfgolf.golf.score_first import Logits
from hfgolf.system.errors import UserError


class SgdAdapter:
    """Train all weights with SGD on each scored chunk, in rows of `length` tokens.

    The learning rate falls to 0 along a cosine over the chunks. Momentum 0.9 and gradients clipped to norm 1, as in
    Parameter Golf's record of 6 April 2026 (rate 0.005, three epochs, chunks of 32,768 tokens, 32 rows per step).
    """

    def __init__(
        self,
        model: nn.Module,
        logits: Logits,
        *,
        length: int,
        num_chunks: int,
        learning_rate: float,
        epochs: int = 1,
        rows_per_step: int = 32,
    ) -> None:
        self.model, self.logits, self.length = model, logits, length
        self.num_chunks, self.learning_rate = num_chunks, learning_rate
        self.epochs, self.rows_per_step = epochs, rows_per_step

    def __enter__(self) -> SgdAdapter:
        self.saved = [(weight, weight.detach().clone()) for weight in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate, momentum=0.9)
        self.chunks_done = 0
        return self

    def __exit__(self, *exception: object) -> None:
        with torch.no_grad():
            for weight, before in self.saved:
                weight.copy_(before)
        self.optimizer.zero_grad()
        del self.saved, self.optimizer

    def start_document(self) -> None:
        """Do nothing: what was learned from scored text may be carried on."""

    def adapt(self, tokens: np.ndarray, windows: np.ndarray) -> None:
        """Train `epochs` times on the targets of a chunk."""
        done = self.chunks_done / self.num_chunks
        self.optimizer.param_groups[0]["lr"] = self.learning_rate * (1 + math.cos(math.pi * done)) / 2
        self.chunks_done += 1
        chunk = tokens[windows[0, 1] - 1 :]
        rows = plan_windows("flat", len(chunk), min(self.length, len(chunk) - 1))
        for _ in range(self.epochs):
            for inputs, labels in batches(chunk.__getitem__, rows, min(self.rows_per_step, len(rows.windows))):
                _step(self.optimizer, self.logits, inputs, labels)


class LoraAdapter:
    """Train low-rank corrections of all linear layers inside each document (Hu et al. 2021, arXiv:2106.09685).

    A layer's output gains scale x B A x, with A (rank, in) and B (out, rank). B starts at 0 with each document; A is
    kept. One AdamW step follows each chunk, on the mean loss of that chunk's targets, with betas (0, 0.99), eps 1e-10
    and weight decay 0.5, as in Parameter Golf's record of 27 April 2026 (rank 80, rate 1e-4, scale 1.8, chunks of 48).
    """

    def __init__(
        self, model: nn.Module, logits: Logits, *, rank: int = 8, learning_rate: float = 1e-3, scale: float = 1.8
    ) -> None:
        self.model, self.logits = model, logits
        self.rank, self.learning_rate, self.scale = rank, learning_rate, scale

    def __enter__(self) -> LoraAdapter:
        layers = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        if not layers:
            raise UserError("LoRA needs linear layers (torch.nn.Linear), but this model has none; use sgd.")
        random = torch.Generator().manual_seed(0)
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.hooks = []
        for layer in layers:
            bound = layer.in_features**-0.5
            initial = (torch.rand(self.rank, layer.in_features, generator=random) * 2 - 1) * bound
            down = nn.Parameter(initial.to(layer.weight.device))
            up = nn.Parameter(torch.zeros(layer.out_features, self.rank, device=layer.weight.device))
            self.pairs.append((down, up))
            self.hooks.append(layer.register_forward_hook(self._corrected(down, up)))
        self.needed_gradients = [(weight, weight.requires_grad) for weight in self.model.parameters()]
        self.model.requires_grad_(False)
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self.hooks:
            hook.remove()
        for weight, needed in self.needed_gradients:
            weight.requires_grad_(needed)
        del self.pairs, self.hooks, self.needed_gradients

    def _corrected(self, down: Tensor, up: Tensor) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            return output + self.scale * F.linear(F.linear(inputs[0], down), up)

        return hook

    def start_document(self) -> None:
        """Start again from the model's own function, and from a fresh optimizer."""
        with torch.no_grad():
            for _, up in self.pairs:
                up.zero_()
        self.optimizer = torch.optim.AdamW(
            [weight for pair in self.pairs for weight in pair],
            lr=self.learning_rate,
            betas=(0.0, 0.99),
            eps=1e-10,
            weight_decay=0.5,
        )

    def adapt(self, tokens: np.ndarray, windows: np.ndarray) -> None:
        """Take one step on the targets that the chunk's windows scored."""
        ids = torch.from_numpy(tokens.astype(np.int64))
        for begin, first, last in windows.tolist():
            labels = ids[begin + 1 : last + 1].clone()
            labels[: first - begin - 1] = IGNORED
            _step(self.optimizer, self.logits, ids[None, begin:last], labels[None])


def _step(optimizer: torch.optim.Optimizer, logits: Logits, inputs: Tensor, labels: Tensor) -> None:
    """Take one optimizer step on the mean loss of the labels, with the gradient clipped to norm 1.

    Raises UserError if the gradient is not finite.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    device = weights[0].device
    optimizer.zero_grad()
    with torch.enable_grad():
        predicted = logits(inputs.to(device)).float().flatten(0, 1)
        F.cross_entropy(predicted, labels.to(device).flatten(), ignore_index=IGNORED).backward()
    if not torch.nn.utils.clip_grad_norm_(weights, 1.0).isfinite():
        raise UserError("The gradient of test-time training is not finite; lower its learning rate.")
    optimizer.step()
