"""Curvature: how much the loss rises if a weight moves, from calibration text in one forward and backward pass.

For a layer y = W x, moving W by E raises the loss per token by about

    1/2 sum over rows r of  row_weights[r] * E[r] @ hessian @ E[r]

with hessian the mean of x x^T and row_weights[r] the mean square of g[r] = d nats / d y[r], the diagonal of the output
hessian, the mean of g g^T. With all of it, the loss rises by 1/2 trace(output_hessian E hessian E^T): K-FAC's two
factors (Martens & Grosse 2015, arXiv:1503.05671). Three cases need care, and have no output hessian.

- The head. Squared gradients on a sample call every token worthless that did not occur in it. The second derivative of
  the loss is known exactly, so take that: p (1 - p). With capped logits z = f(u) it is f'(u)**2 p (1 - p), and a term
  (p - y) f''(u) whose mean is zero if the model is right.
- The embedding's input side has the factors swapped: x is one-hot, so tokens weigh their frequency in the whole stream,
  and the hessian is the mean of g g^T with g the gradient of an occurrence. Half an occurrence more for each token
  keeps those that never occur from being worthless.
- A tied embedding is both. The two terms are added, see `added`.

Knows models as torch modules. Does not know rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hfgolf.data.batches import Batch, MicroBatches, Stream, stream_positions
from hfgolf.evaluate.context import evaluation_mode
from hfgolf.model.modeling_golf import IGNORE_INDEX
from hfgolf.system.errors import UserError

ROW_FLOOR = 1e-3  # of the mean: what looks worthless in a sample still gets bits
MAX_ROWS = 8192
"""Of a layer whose output hessian is measured: 512 MiB."""
_COUNTED_TOKENS, _COUNTED_PARTS = 2**24, 64
_LAYERS: tuple[Any, ...] = (nn.Linear, nn.Embedding, Conv1D)
_LOGITS_PER_PASS = 2**22  # 16 MiB in fp32, and about ten times that in the backward pass


@dataclass(frozen=True)
class Curvature:
    """The curvature of the loss, in nats per token, along one matrix (see the module).

    hessian: (columns, columns) fp64. row_weights: (rows,) fp64, above zero unless all gradients were zero.
    output_hessian: (rows, rows) fp64, or None.
    """

    hessian: NDArray[np.float64]
    row_weights: NDArray[np.float64]
    output_hessian: NDArray[np.float64] | None = None

    def loss_increase(self, error: NDArray[np.floating]) -> float:
        """Return the predicted increase of the loss in nats per token. error: (rows, columns)."""
        error = error.astype(np.float64)
        by_output = self.row_weights[:, None] * error if self.output_hessian is None else self.output_hessian @ error
        return float(0.5 * ((error @ self.hessian) * by_output).sum())


def added(first: Curvature, second: Curvature) -> Curvature:
    """Return one Curvature for the sum of two, with one hessian for all rows.

    The hessian is that of the mean row. The weights give each row what it has of both, counted by traces: exact for
    errors that are alike in all directions.
    """
    hessian = first.row_weights.mean() * first.hessian + second.row_weights.mean() * second.hessian
    traces = first.row_weights * np.trace(first.hessian) + second.row_weights * np.trace(second.hessian)
    return Curvature(hessian, traces / max(np.trace(hessian), np.finfo(np.float64).tiny))


def calibration_batches(
    stream: Stream, *, seed: int | None, sequence_length: int, blocks_read: int, num_tokens: int, batch_size: int = 8
) -> Iterator[Batch]:
    """Yield about num_tokens of calibration text: the blocks that a run would have read next.

    stream: the training part. blocks_read: by the run, so that the text is not what it ended on.
    """
    blocks = MicroBatches(stream, sequence_length, seed)
    positions = stream_positions(blocks_read, max(1, num_tokens // sequence_length))
    for start in range(0, len(positions), batch_size):
        batch = blocks[positions[start : start + batch_size]]
        del batch["sample_hash"]  # of the loop's order, and no argument of a model
        yield batch


def calibrated_curvature(
    model: PreTrainedModel, stream: Stream, *, sequence_length: int, batch_size: int = 8, **options: Any
) -> dict[str, Curvature]:
    """Measure the curvature on the blocks that a run reads next. Arguments as in calibration_batches.

    With fewer tokens, the predicted loss is too low: with 4,096, configs/small.yaml seems to need 6 to 11 % fewer
    bytes.
    """
    vocab_size = model.config.vocab_size
    batch_size = max(1, min(batch_size, _LOGITS_PER_PASS // (sequence_length * vocab_size)))
    batches = calibration_batches(stream, sequence_length=sequence_length, batch_size=batch_size, **options)
    return measure_curvature(model, batches, token_counts(stream, vocab_size))


def token_counts(stream: Stream, vocab_size: int) -> NDArray[np.int64]:
    """Return how often each token occurs in a stream, (vocab_size,); of a long one, in evenly spaced parts of it."""
    num_parts = 1 if len(stream) <= _COUNTED_TOKENS else _COUNTED_PARTS
    length = min(len(stream), _COUNTED_TOKENS // num_parts)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in np.linspace(0, len(stream) - length, num_parts).astype(np.int64):
        counts += np.bincount(stream.read(np.arange(start, start + length)), minlength=vocab_size)
    return counts


def grid_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers whose weights go on a grid, with the name of the weight; layers with a tied weight share it.

    They are nn.Linear, nn.Embedding and transformers' Conv1D, with a floating-point weight of their own.
    """
    names: dict[Any, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            names.setdefault(place(parameter), name)
    layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
    return {layer: names[place(layer.weight)] for layer in layers if place(layer.weight) in names}


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor is: tied weights are one parameter, or several that read the same memory alike."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def summed_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int, Tensor | None]:
    """Return a batch's summed loss in nats, the number of its targets, and the logits (B, T, V); None: the model's own
    loss came without them.

    batch: what the model takes: a mapping of keyword arguments, a tuple of positional ones, or the input ids (B, T).
    Without a loss of the model's own, the targets are the next tokens, or shift_labels (B, T) of a mapping. Raises
    UserError if the model returns neither a loss nor logits for each token.
    """
    device = next(model.parameters()).device
    named = {key: _moved(value, device) for key, value in batch.items()} if isinstance(batch, Mapping) else {}
    positional = [_moved(each, device) for each in batch] if isinstance(batch, tuple | list) else []
    positional = [batch.to(device)] if isinstance(batch, Tensor) else positional
    targets = named.pop("shift_labels", None)
    if "use_cache" in inspect.signature(model.forward).parameters:
        named["use_cache"] = False
    loss, logits = _loss_and_logits(model.forward(*positional, **named))
    stated = named.get("labels", named.get("targets", positional[1] if len(positional) > 1 else None))
    if targets is None and loss is not None:
        count = 1 if logits is None else logits.shape[:-1].numel()
        count = int((stated != IGNORE_INDEX).sum()) if isinstance(stated, Tensor) else count
        nats = loss.float() * count  # its mean over the targets, which is NaN without any
        return nats if count else nats.nan_to_num(), count, logits
    ids = positional[0] if positional else named.get("input_ids", next(iter(named.values()), None))
    if targets is None and isinstance(ids, Tensor) and ids.ndim == 2:
        targets = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)
        if isinstance(mask := named.get("attention_mask"), Tensor) and mask.shape == ids.shape:
            targets = targets.masked_fill(F.pad(mask[:, 1:], (0, 1)) == 0, IGNORE_INDEX)
    if targets is None or logits is None or logits.shape[:-1] != targets.shape:
        raise UserError(
            f"batches: {type(model).__name__} returned neither a loss nor logits (batch, time, vocabulary) for each"
            " token; give batches with its labels, or let it return logits."
        )
    flat = logits.float().flatten(0, -2), targets.flatten()
    nats = F.cross_entropy(*flat, ignore_index=IGNORE_INDEX, reduction="sum")
    return nats, int((targets != IGNORE_INDEX).sum()), logits


@torch.no_grad()
def total_loss(model: nn.Module, batches: Iterable[Any]) -> tuple[float, int]:
    """Return the summed loss of batches in nats, without dropout, and the number of their targets."""
    with evaluation_mode(model):
        losses = [summed_loss(model, batch) for batch in batches]
    return sum(nats.item() for nats, _, _ in losses), sum(count for _, count, _ in losses)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _loss_and_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the loss and the logits in what a model returned: by their names, or by their dimensions."""
    if isinstance(output, Mapping):
        return output.get("loss"), output.get("logits")
    if hasattr(output, "logits"):
        return getattr(output, "loss", None), output.logits
    each = [one for one in (output if isinstance(output, tuple | list) else [output]) if isinstance(one, Tensor)]
    return next((one for one in each if not one.ndim), None), next((one for one in each if one.ndim > 1), None)


def measure_curvature(
    model: nn.Module, batches: Iterable[Any], token_counts: NDArray[np.integer] | None = None
) -> dict[str, Curvature]:
    """Measure the curvature along each matrix of a model, {parameter name: Curvature}.

    Args:
        model: its matrices are those of `grid_layers`. Its head is the linear layer whose outputs become the logits.
        batches: calibration text, as `summed_loss` takes it.
        token_counts: (V,) how often each token occurs in the training stream. None: in the calibration text.

    A layer that runs several times per pass has the mean hessian and the summed row weights of its passes. A weight is
    missing in the result if what it does cannot be seen: if one of its layers never ran, ran without a gradient, or
    does something else than its kind, or if an embedding is also the head without a layer of its own.
    """
    probes = [_Probe(name, layer) for layer, name in grid_layers(model).items()]
    hidden = {probe.name for probe in probes}
    others = [parameter for name, parameter in model.named_parameters() if name not in hidden]
    others = [parameter for parameter in others if parameter.is_floating_point()]
    num_tokens, unseen = 0, set[str]()
    try:
        eager = torch.compiler.set_stance("force_eager")  # hooks see no gradients inside a compiled graph
        with eager, evaluation_mode(model), torch.enable_grad(), _all_trainable(model):
            for batch in batches:
                nats, count, logits = summed_loss(model, batch)
                num_tokens += count
                unseen |= _backward(nats, logits, probes, others)
    finally:
        for probe in probes:
            probe.handle.remove()
    if not num_tokens:
        raise ValueError("measure_curvature: no calibration text")
    unseen |= {probe.name for probe in probes if not (probe.vectors and probe.is_known and probe.has_gradient)}
    result: dict[str, Curvature] = {}
    for probe in probes:
        if probe.name in unseen:
            continue
        is_tokens = token_counts is not None and probe.module is model.get_input_embeddings()  # type: ignore[operator]
        measured = probe.curvature(num_tokens, token_counts if is_tokens else None)
        result[probe.name] = added(result[probe.name], measured) if probe.name in result else measured
    return result


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    """Let gradients pass each layer, also those of a model that is frozen."""
    frozen = [each for each in model.parameters() if each.is_floating_point() and not each.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_()
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _backward(nats: Tensor, logits: Tensor | None, probes: Sequence[_Probe], others: Sequence[Tensor]) -> set[str]:
    """Let the probes see the gradients of a pass. Return the embeddings that must be the head, too, without a layer."""
    head, unseen = None, set[str]()
    if logits is not None:
        head = next((probe for probe in reversed(probes) if probe.add_logits(logits)), None)
        entries = [probe for probe in probes if len(probe.row_sums) == logits.shape[-1]]
        if head is None and not any(probe.output is not None for probe in entries):
            unseen = {probe.name for probe in entries if probe.kind is nn.Embedding}
    for probe in probes:
        probe.is_hidden = probe is not head
    # No gradients of matrices: the hooks see those of the layers' outputs, on the way to where each path begins.
    begins = [edge for probe in probes for edge in probe.edges]
    torch.autograd.grad(nats, [*begins, *map(get_gradient_edge, others)], allow_unused=True)
    for probe in probes:
        probe.edges, probe.output, probe.is_hidden = [], None, False
    return unseen


class _Probe:
    """Collect the sums of one layer over the calibration text.

    edges: where the graph of a pass begins, if it begins with this layer. output: of a linear layer, in this pass.
    is_hidden: whether the gradients that pass now are those of the loss, at a layer that is not the head. is_known:
    whether each output was seen, and is what a layer of this kind makes of its inputs, up to a factor. has_gradient:
    whether a gradient came through any output, be it zero, or the curvature of the logits.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.is_hidden, self.is_known, self.has_gradient = False, True, False
        self.kind = next(kind for kind in _LAYERS if isinstance(module, kind))
        rows, columns = module.weight.T.shape if self.kind is Conv1D else module.weight.shape  # type: ignore[misc]
        self.hessian = torch.zeros(columns, columns, dtype=torch.float64)
        self.row_sums = torch.zeros(rows, dtype=torch.float64)
        self.output_hessian: Tensor | None = None
        self.vectors = 0
        self.edges: list[GradientEdge] = []
        self.output: Tensor | None = None
        self.factor = 1.0
        self.handle = module.register_forward_hook(self.hook, with_kwargs=True)

    def hook(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        read = (*inputs, *kwargs.values())[0]
        self.is_known &= isinstance(output, Tensor) and output.requires_grad and self._is_of_its_kind(read, output)
        if not self.is_known:
            return
        if not read.requires_grad:
            self.edges.append(get_gradient_edge(output))  # now: the output may be changed in place
        if self.kind is nn.Embedding:
            output.register_hook(partial(self.add_occurrences, read))
        else:
            self.add_products(read)
            self.output = output
            output.register_hook(self.add_gradient)

    def _is_of_its_kind(self, read: Tensor, output: Tensor) -> bool:
        """Return whether the output is a multiple of what this kind of layer returns; note the factor."""
        if type(self.module).forward is self.kind.forward:
            return True
        with torch.no_grad():
            plain = self.kind.forward(self.module, read).float()
            result = output.detach().float()
            if plain.shape != result.shape:
                return False
            self.factor = float((plain * result).sum() / plain.square().sum().clamp(min=1e-30))
            return bool((result - self.factor * plain).norm() <= 0.01 * result.norm())

    def add_products(self, vectors: Tensor) -> None:
        vectors = vectors.detach().flatten(0, -2).float()
        # One product in fp32 and the sum over passes in fp64: within 1e-6, and several times as fast as all in fp64.
        # Accelerate's forward turns autocast on; a product in bf16 would not be positive definite.
        with torch.autocast(vectors.device.type, enabled=False):
            self.hessian += (vectors.T @ vectors).cpu().double()
        self.vectors += len(vectors)

    def add_occurrences(self, token_ids: Tensor, gradient: Tensor) -> None:
        self.has_gradient = True
        self.add_products(self.factor * gradient)
        self.row_sums += torch.bincount(token_ids.flatten(), minlength=len(self.row_sums)).cpu()

    def add_gradient(self, gradient: Tensor) -> None:
        if not self.is_hidden:
            return
        self.has_gradient = True
        gradients = (self.factor * gradient).flatten(0, -2).float()
        self.row_sums += gradients.square().sum(0).cpu().double()
        if gradients.shape[1] <= MAX_ROWS:
            with torch.autocast(gradients.device.type, enabled=False):
                products = (gradients.T @ gradients).cpu().double()
            self.output_hessian = products if self.output_hessian is None else self.output_hessian + products

    def add_logits(self, logits: Tensor) -> bool:
        """Return whether the logits are this layer's outputs, or a function of each; if so, add their curvature."""
        if self.output is None or self.output.shape != logits.shape:
            return False
        slopes: Tensor | float = 1.0
        if logits is not self.output:
            gradient = partial(torch.autograd.grad, inputs=self.output, retain_graph=True, materialize_grads=True)
            (of_first,) = gradient(logits[..., 0].sum())
            if not of_first[..., 0].any() or of_first[..., 1:].any():
                return False
            (slopes,) = gradient(logits.sum())  # elementwise, so this is the slope of each
        self.has_gradient = True
        shares = logits.detach().float().softmax(-1)
        curvatures = shares * (1 - shares) * (self.factor * slopes) ** 2
        self.row_sums += curvatures.flatten(0, -2).sum(0).cpu().double()
        return True

    def curvature(self, num_tokens: int, counts: NDArray[np.integer] | None) -> Curvature:
        """Return what was measured. counts: of an embedding's tokens in the whole stream, if they are known."""
        weights = (self.row_sums / num_tokens).numpy()
        if self.kind is nn.Embedding:
            occurrences = self.row_sums.numpy() if counts is None else np.asarray(counts, dtype=np.float64)
            passes = self.vectors / num_tokens
            weights = (occurrences + 0.5) / max(1, occurrences.sum()) * passes
        floored = np.maximum(weights, ROW_FLOOR * weights.mean())
        hessian, of_outputs = (self.hessian / max(1, self.vectors)).numpy(), self.output_hessian
        return Curvature(hessian, floored, None if of_outputs is None else (of_outputs / num_tokens).numpy())
