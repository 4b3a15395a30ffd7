"""After rounding: train what is not on a grid, so that it makes up for what rounding has changed.

Norms, biases and gates are a thousandth of the weights, but each scales a whole channel (norm tweaking: Li et al. 2023,
arXiv:2309.02784, which matches the means and variances of each layer instead). Knows models as torch modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hfgolf.evaluate.context import evaluation_mode
from hfgolf.golf.curvature import grid_layers, summed_loss, total_loss

RATE = 0.01  # of Adam, as a share of the RMS of each vector, falling linearly to 0
HELD_OUT = 8  # one batch of so many tells whether it helped


def tune_vectors(model: nn.Module, weights: Mapping[str, NDArray[np.float32]], batches: Iterable[Any]) -> bool:
    """Put weights {parameter name: (outputs, inputs)} into a model and train its vectors, one step per batch.

    batches: as `summed_loss` takes them. Of every HELD_OUT, the last is not trained on; the vectors stay as they were
    unless the loss on these is lower with the new ones. Returns whether it is. The weights stay in the model.
    """
    layers = {name: layer for layer, name in grid_layers(model).items()}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            value = torch.from_numpy(weight)
            parameters[name].copy_(value.T if isinstance(layers[name], Conv1D) else value)
    vectors = [one for one in parameters.values() if one.ndim < 2 and one.is_floating_point()]
    every = list(batches)
    test = every[HELD_OUT - 1 :: HELD_OUT]
    if not vectors or not test:
        return False
    training = [batch for number, batch in enumerate(every) if number % HELD_OUT != HELD_OUT - 1]
    former, frozen = [one.detach().clone() for one in vectors], [not one.requires_grad for one in vectors]
    try:
        with torch.compiler.set_stance("force_eager"), evaluation_mode(model):
            before, _ = total_loss(model, test)
            for one in vectors:
                one.requires_grad_()
            _train(model, vectors, training)
            if total_loss(model, test)[0] < before:  # not if one of them is not a number
                return True
    finally:
        for one, was_frozen in zip(vectors, frozen, strict=True):
            one.requires_grad_(not was_frozen)
    with torch.no_grad():
        for one, value in zip(vectors, former, strict=True):
            one.copy_(value)
    return False


def _train(model: nn.Module, vectors: Sequence[Tensor], batches: Sequence[Any]) -> None:
    exact = [one.detach().float().clone() for one in vectors]  # bf16 would lose small steps
    groups = [{"params": [one], "lr": RATE * float(one.square().mean().sqrt())} for one in exact]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, len(batches)))
    for batch in batches:
        with torch.enable_grad():
            nats, count, _ = summed_loss(model, batch)
            if not nats.requires_grad:  # no vector plays a part
                return
            gradients = torch.autograd.grad(nats / max(1, count), vectors, allow_unused=True, materialize_grads=True)
        for one, gradient in zip(exact, gradients, strict=True):
            one.grad = gradient.float()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for one, value in zip(vectors, exact, strict=True):
                one.copy_(value)
