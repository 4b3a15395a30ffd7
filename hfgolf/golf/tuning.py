"""After rounding: train the integers, and what is not on a grid, so that they make up for what rounding has changed.

The rounded model learns from the exact one, and a little from the text, so that it does not matter much whether it has
read that. Integers are trained by straight-through rounding (Bengio et al. 2013, arXiv:1308.3432), each from the point
of its cell next to the exact weight; of a hundred, one or two change. Norms, biases and gates are a thousandth of the
weights, but each scales a whole channel (norm tweaking: Li et al. 2023, arXiv:2309.02784). Knows models as torch
modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from hfgolf.evaluate.context import evaluation_mode
from hfgolf.golf.curvature import grid_layers, place, summed_loss
from hfgolf.golf.grid import MAX_INTEGER, Quantized
from hfgolf.golf.quantize import Grids, Weights
from hfgolf.system.hardware import fast_product_dtype

RATE = 0.01  # of Adam, as a share of the RMS of each vector, falling linearly to 0
INTEGER_RATE = 0.001  # the same of integers
REACH = 0.49  # how far from its integer a weight can begin: a few steps in the same direction change it
TEXT = 0.3  # weight of the loss on the text, beside the divergence from the exact model
HELD_OUT = 8  # one batch of so many tells whether it helped


def tune(model: nn.Module, weights: Weights, tensors: Grids, batches: Iterable[Any]) -> dict[str, Quantized] | None:
    """Train matrices on their grids and the vectors of a model, one step per batch. Return the matrices.

    weights, tensors: {parameter name: (outputs, inputs)}, before and after rounding. Their steps stay as they are.
    batches: as `summed_loss` takes them. Afterwards, the model has the new vectors; its matrices are not touched.

    Of every HELD_OUT batches, the last is not trained on. Returns None, and leaves the vectors as they are, if the loss
    on these is not lower afterwards, or if the model returns no logits.
    """
    every = list(batches)
    test = every[HELD_OUT - 1 :: HELD_OUT]
    if not test:
        return None
    student = _Student(model, weights, tensors)
    with torch.compiler.set_stance("force_eager"), evaluation_mode(model):
        before = student.total(test)
        training = [batch for number, batch in enumerate(every) if number % HELD_OUT != HELD_OUT - 1]
        device = next(model.parameters()).device
        dtype = fast_product_dtype(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            student.train(training)
        if not student.total(test) < before:  # nor if one of them is not a number
            return None
    student.keep_vectors()
    integers = {
        name: latent.detach().round().clamp(-MAX_INTEGER, MAX_INTEGER).cpu().numpy().astype(np.int32)
        for name, latent in student.latents.items()
    }
    return {name: replace(one, integers=integers[name]) for name, one in tensors.items()}


class _Loss(nn.Module):
    """The loss of a model as a module, so that it can be called with other weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, int, Tensor | None]:
        return summed_loss(self.model, batch)


class _Student:
    """A model whose matrices are on grids and whose vectors are being trained; the model itself is its teacher.

    latents: {parameter name: (outputs, inputs)}, which are the integers once they are rounded. vectors: {parameter
    name: in fp32}, as bf16 would lose small steps.
    """

    def __init__(self, model: nn.Module, weights: Weights, tensors: Grids) -> None:
        self._loss = _Loss(model)
        layers = {name: layer for layer, name in grid_layers(model).items()}
        self._transposed = {name for name in tensors if isinstance(layers[name], Conv1D)}
        self._parameters = dict(model.named_parameters())
        names = {place(parameter): name for name, parameter in reversed(self._parameters.items())}
        every = model.named_parameters(remove_duplicate=False)
        self._tied = {name: names[place(parameter)] for name, parameter in every}
        self.vectors = {
            name: parameter.detach().float().clone().requires_grad_()
            for name, parameter in self._parameters.items()
            if parameter.ndim < 2 and parameter.is_floating_point()
        }
        self._steps, self.latents = dict[str, Tensor](), dict[str, Tensor]()
        for name, one in tensors.items():
            device = self._parameters[name].device
            integers, steps = torch.from_numpy(one.integers), torch.from_numpy(one.steps())
            reached = (torch.from_numpy(weights[name]) / steps).clamp(integers - REACH, integers + REACH)
            self._steps[name], self.latents[name] = steps.to(device), reached.to(device).requires_grad_()

    def _values(self) -> dict[str, Tensor]:
        """Return what is trained as the model's parameters, {parameter name: value}."""
        values = dict(self.vectors)
        for name, latent in self.latents.items():
            weight = (latent + (latent.round() - latent).detach()) * self._steps[name]
            values[name] = weight.T if name in self._transposed else weight
        return {name: value.to(self._parameters[name].dtype) for name, value in values.items()}

    def loss(self, batch: Any) -> tuple[Tensor, int, Tensor | None]:
        """Return what `summed_loss` does, of the student."""
        values = self._values()
        given = {f"model.{name}": values[first] for name, first in self._tied.items() if first in values}
        result: tuple[Tensor, int, Tensor | None] = functional_call(self._loss, given, (batch,))
        return result

    @torch.no_grad()
    def total(self, batches: Sequence[Any]) -> float:
        """Return the summed loss of batches, in nats."""
        return sum(self.loss(batch)[0].item() for batch in batches)

    def train(self, batches: Sequence[Any]) -> None:
        """Train, one step per batch."""
        groups: list[dict[str, Any]] = [{"params": [*self.latents.values()], "lr": INTEGER_RATE}]
        for one in self.vectors.values():
            groups.append({"params": [one], "lr": RATE * float(one.detach().square().mean().sqrt())})
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, len(batches)))
        leaves = [*self.latents.values(), *self.vectors.values()]
        for batch in batches:
            with torch.no_grad():
                of_teacher = self._loss(batch)[2]
            with torch.enable_grad():
                nats, count, logits = self.loss(batch)
            if logits is None or of_teacher is None or not logits.requires_grad:
                return
            # The slope of the divergence along the logits. By autograd, it would take several times their memory.
            pull = logits.detach().float().softmax(-1).sub_(of_teacher.float().softmax(-1)).div_(logits[..., 0].numel())
            slopes = [torch.full_like(nats, TEXT / max(1, count)), pull.to(logits.dtype)]
            gradients = torch.autograd.grad([nats, logits], leaves, slopes, allow_unused=True, materialize_grads=True)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def keep_vectors(self) -> None:
        """Put the vectors into the model."""
        for name, one in self.vectors.items():
            self._parameters[name].copy_(one)
