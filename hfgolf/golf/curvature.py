"""Curvature: how much the loss rises if a weight moves, from calibration text in one forward and backward pass.

For a layer y = W x, moving W by E raises the loss per token by about

    1/2 sum over rows r of  row_weights[r] * E[r] @ hessian @ E[r]

with hessian the mean of x x^T and row_weights[r] the mean square of d nats / d y[r] (K-FAC's two factors, of which the
second only on its diagonal: Martens & Grosse 2015, arXiv:1503.05671). Three cases need care.

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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hfgolf.data.batches import Batch, MicroBatches, Stream, stream_positions
from hfgolf.evaluate.context import evaluation_mode
from hfgolf.model.modeling_golf import IGNORE_INDEX

ROW_FLOOR = 1e-3  # of the mean: what looks worthless in a sample still gets bits
_COUNTED_TOKENS, _COUNTED_PARTS = 2**24, 64
_LOGITS_PER_PASS = 2**24  # 64 MiB in fp32, and a few times that in the backward pass


@dataclass(frozen=True)
class Curvature:
    """The curvature of the loss, in nats per token, along one matrix (see the module).

    hessian: (columns, columns) fp64. row_weights: (rows,) fp64, above zero unless all gradients were zero.
    """

    hessian: NDArray[np.float64]
    row_weights: NDArray[np.float64]

    def loss_increase(self, error: NDArray[np.floating]) -> float:
        """Return the predicted increase of the loss in nats per token. error: (rows, columns)."""
        error = error.astype(np.float64)
        return float(0.5 * (self.row_weights * ((error @ self.hessian) * error).sum(axis=1)).sum())


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
    model: PreTrainedModel,
    stream: Stream,
    *,
    seed: int | None,
    sequence_length: int,
    blocks_read: int,
    num_tokens: int,
    batch_size: int = 8,
) -> dict[str, Curvature]:
    """Measure the curvature on the blocks that a run reads next. Arguments as in calibration_batches.

    With fewer tokens, the predicted loss is too low: with 4,096, configs/small.yaml seems to need 6 to 11 % fewer
    bytes.
    """
    batches = calibration_batches(
        stream,
        seed=seed,
        sequence_length=sequence_length,
        blocks_read=blocks_read,
        num_tokens=num_tokens,
        batch_size=batch_size,
    )
    return measure_curvature(model, batches, token_counts(stream, model.config.vocab_size))


def token_counts(stream: Stream, vocab_size: int) -> NDArray[np.int64]:
    """Return how often each token occurs in a stream, (vocab_size,); of a long one, in evenly spaced parts of it."""
    num_parts = 1 if len(stream) <= _COUNTED_TOKENS else _COUNTED_PARTS
    length = min(len(stream), _COUNTED_TOKENS // num_parts)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in np.linspace(0, len(stream) - length, num_parts).astype(np.int64):
        counts += np.bincount(stream.read(np.arange(start, start + length)), minlength=vocab_size)
    return counts


def measure_curvature(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]], token_counts: NDArray[np.integer] | None = None
) -> dict[str, Curvature]:
    """Measure the curvature along each matrix of a model, {parameter name: Curvature}.

    Args:
        model: a causal language model whose matrices are nn.Linear and nn.Embedding, with `lm_head` as head.
        batches: calibration text, {"input_ids": (B, T), "shift_labels": (B, T)} on any device.
        token_counts: (V,) how often each token occurs in the training stream. None: in the calibration text.

    A layer that runs several times per pass has the mean hessian and the summed row weights of its passes.
    """
    device = next(model.parameters()).device
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # a tied weight once
    head = getattr(model, "lm_head", None)
    probes = [
        _Probe(names[id(module.weight)], module, is_head=module is head)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    ]
    num_tokens = 0
    try:
        with evaluation_mode(model), torch.enable_grad():
            for batch in batches:
                ids, labels = (batch[key].to(device) for key in ("input_ids", "shift_labels"))
                rows = max(1, _LOGITS_PER_PASS // (ids.shape[1] * model.config.vocab_size))
                for part, targets in zip(ids.split(rows), labels.split(rows), strict=True):
                    _one_pass(model, part, targets, probes)
                    num_tokens += part.numel()
    finally:
        for probe in probes:
            probe.handle.remove()
    if not num_tokens:
        raise ValueError("measure_curvature: no calibration text")
    result: dict[str, Curvature] = {}
    for probe in probes:
        is_tokens = probe.module is model.get_input_embeddings()
        measured = probe.curvature(num_tokens, token_counts if is_tokens else None)
        result[probe.name] = added(result[probe.name], measured) if probe.name in result else measured
    return result


def _one_pass(model: PreTrainedModel, ids: Tensor, labels: Tensor, probes: list[_Probe]) -> None:
    logits = model.forward(input_ids=ids, use_cache=False).logits
    for probe in probes:
        if probe.is_head:
            probe.add_logits(logits)
    nats = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    outputs = [output for probe in probes for _, output in probe.occurrences]
    gradients = iter(torch.autograd.grad(nats, outputs))  # no gradients of weights; the hooks see the layers' outputs
    for probe in probes:
        for token_ids, _ in probe.occurrences:
            probe.add_products(next(gradients))
            probe.row_sums += torch.bincount(token_ids.flatten(), minlength=len(probe.row_sums)).cpu()
        probe.occurrences.clear()


class _Probe:
    """Collect the sums of one module over the calibration text; of an embedding, its occurrences in a pass."""

    def __init__(self, name: str, module: nn.Linear | nn.Embedding, is_head: bool) -> None:
        self.name, self.module, self.is_head = name, module, is_head
        rows, columns = module.weight.shape
        self.hessian = torch.zeros(columns, columns, dtype=torch.float64)
        self.row_sums = torch.zeros(rows, dtype=torch.float64)
        self.vectors = 0
        self.occurrences: list[tuple[Tensor, Tensor]] = []
        self.handle = module.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Embedding):
            self.occurrences.append((inputs[0], output))
            return
        self.add_products(inputs[0])
        if self.is_head:
            self.uncapped = output
        else:
            output.register_hook(self.add_gradient)

    def add_products(self, vectors: Tensor) -> None:
        vectors = vectors.detach().flatten(0, -2).float()
        # One product in fp32 and the sum over passes in fp64: within 1e-6, and several times as fast as all in fp64.
        # Accelerate's forward turns autocast on; a product in bf16 would not be positive definite.
        with torch.autocast(vectors.device.type, enabled=False):
            self.hessian += (vectors.T @ vectors).cpu().double()
        self.vectors += len(vectors)

    def add_gradient(self, gradient: Tensor) -> None:
        self.row_sums += gradient.flatten(0, -2).float().square().sum(0).cpu().double()

    def add_logits(self, logits: Tensor) -> None:
        slopes: Tensor | float = 1.0
        if logits is not self.uncapped:  # elementwise, so the gradient of the sum is each one's slope
            (slopes,) = torch.autograd.grad(logits.sum(), self.uncapped, retain_graph=True)
        shares = logits.detach().float().softmax(-1)
        self.row_sums += (shares * (1 - shares) * slopes**2).flatten(0, -2).sum(0).cpu().double()

    def curvature(self, num_tokens: int, counts: NDArray[np.integer] | None) -> Curvature:
        """Return what was measured. counts: of an embedding's tokens in the whole stream, if they are known."""
        weights = (self.row_sums / num_tokens).numpy()
        if isinstance(self.module, nn.Embedding):
            occurrences = self.row_sums.numpy() if counts is None else np.asarray(counts, dtype=np.float64)
            passes = self.vectors / num_tokens
            weights = (occurrences + 0.5) / max(1, occurrences.sum()) * passes
        floored = np.maximum(weights, ROW_FLOOR * weights.mean())
        return Curvature((self.hessian / max(1, self.vectors)).numpy(), floored)
