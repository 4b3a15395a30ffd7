"""pack: any model of linear and embedding layers as two files of a stated size, which need only torch and numpy.

Owns the sequence: curvature, rounding, coding, the files, and the proof that they hold what was evaluated. Each step is
another module's. Does not know runs or text.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hfgolf.golf.artifact import Encoded, encode
from hfgolf.golf.curvature import grid_layers, measure_curvature, place, total_loss
from hfgolf.golf.ledger import ARTIFACT, UNPACK, run_alone
from hfgolf.golf.quantize import (
    Curvatures,
    Grids,
    QuantizedModel,
    Weights,
    fitting,
    num_changes,
    on_own_grid,
    quantize_model,
    require_room,
    stored,
)
from hfgolf.golf.script import packed_unpack
from hfgolf.golf.tuning import tune
from hfgolf.golf.unpack import EXACT, STORED, TRANSPOSED, state_sha256, unpack
from hfgolf.system.durable import write_bytes
from hfgolf.system.errors import UserError, writing
from hfgolf.system.wording import one_line, shortened

_MAX_HALF = 65_280  # from here on, 8 significant bits round to infinity in fp16


@dataclass(frozen=True)
class Packed:
    """What `pack` made. num_bytes: of artifact.bin and unpack.py together. num_weights: of all tensors, tied ones once.

    loss_before, loss_after: nats per target of the held-out batches; of the batches without any (is_held_out). kept:
    the bytes of each matrix that is not on a grid, by name: it has 8 significant bits, because its layer is of a kind
    that `pack` does not know, or what it does could not be seen. sha256: of the state dict, see unpack.py. findings:
    what you should know, one sentence each.
    """

    folder: Path
    num_bytes: int
    num_weights: int
    loss_before: float
    loss_after: float
    is_held_out: bool
    kept: dict[str, int]
    sha256: str
    findings: list[str]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights


def pack(
    model: nn.Module,
    batches: Iterable[Any],
    budget_bytes: int,
    folder: str | Path,
    *,
    held_out: Iterable[Any] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Packed:
    """Write a model to a folder as artifact.bin and unpack.py, which together take 98 to 100 % of budget_bytes.

    Anywhere, `unpack("artifact.bin")` of unpack.py returns the state dict: the same names, dtypes, tied weights and
    buffers as here, and the weights that were evaluated here, to the bit. torch.compile(model) puts `_orig_mod.` into
    the names; for plain ones, pack the model itself. The model is left as it is.

    Args:
        model: any module whose weights are mostly nn.Linear, nn.Embedding or transformers' Conv1D. Their matrices are
            rounded. Buffers are stored exactly, other parameters with 8 significant bits in the range of fp16.
        batches: some 65,536 tokens of the kind of text that the model was trained on, in about 128 batches: after
            rounding, the model is trained by one step for each, and fewer than 20 hardly change it. Each batch is what
            the model takes: a mapping of keyword arguments, a tuple of positional ones, or input ids (B, T). The loss
            is the model's own (`.loss`, or the scalar of a tuple) if it returns one, as for batches with labels. Else
            it is the cross-entropy of the next token by the logits (B, T, V), where attention_mask is not 0.
        held_out: batches to evaluate the model on, before and after. Without them, that is done on `batches`, on which
            it was tuned.
        progress: called with one line per step.

    Raises UserError if the budget is too small (from the shapes alone, if zeros would not fit), a weight is not finite,
    a batch gives no loss, or the folder can't be written.
    """
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / UNPACK).is_file():
        raise UserError(f"folder: {folder} exists and pack did not write it; name a new folder.")
    if not isinstance(model, nn.Module) or not grid_layers(model):
        raise UserError(f"model: {shortened(model)} is no nn.Module with linear layers or embeddings; pass one.")
    if not (isinstance(budget_bytes, int | float) and math.isfinite(budget_bytes)):
        raise UserError(f"budget_bytes: {shortened(budget_bytes)} is no number of bytes, such as 500_000.")
    with _run_on_batches(model):
        calibration, scored = list(batches), list(held_out)
    if not calibration:
        raise UserError("batches: there are none; give some 65,536 tokens of the kind that the model was trained on.")
    coding, program = StateCoding(model), packed_unpack()
    budget = {"budget_bytes": int(budget_bytes), "overhead_bytes": len(program)}
    require_room(coding.weights, size_of=lambda on_grids: len(coding.encode(on_grids).data), **budget)
    with _run_on_batches(model):
        loss_before = _mean_loss(model, scored or calibration)
        progress(f"loss before: {loss_before:.4f} nats per target")
        curvature = measure_curvature(model, calibration)
    if not curvature:
        raise UserError("model: no linear layer or embedding of it ran on the batches, so there is nothing to round.")
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        encoder = lambda: StateCoding(model).encode  # noqa: E731
        quantized, encoded = fill(model, coding.weights, curvature, encoder, calibration, progress=progress, **budget)
        with writing("folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / UNPACK, program)
            write_bytes(folder / ARTIFACT, encoded.data)
        state = unpacked(folder)
        model.load_state_dict(state)
        loss_after = _mean_loss(model, scored or calibration)
    finally:
        model.load_state_dict(own)
    return Packed(
        folder,
        num_bytes=len(program) + len(encoded.data),
        num_weights=sum(tensor.numel() for tensor in coding.tensors.values()),
        loss_before=loss_before,
        loss_after=loss_after,
        is_held_out=bool(scored),
        kept=coding.kept(quantized.tensors, encoded),
        sha256=state_sha256(state),
        findings=quantized.findings,
    )


def unpacked(folder: Path) -> dict[str, Tensor]:
    """Return the state dict in a folder. Raises UserError unless a process without hfgolf reads the same there."""
    state = unpack(str(folder / ARTIFACT))
    try:
        said = run_alone([str((folder / name).resolve()) for name in (UNPACK, ARTIFACT)], folder).strip()
    except ValueError as error:
        raise UserError(f"{folder / UNPACK} does not run: {one_line(error)}.") from None
    if said != (here := state_sha256(state)):
        raise UserError(f"{folder / UNPACK} reads other weights in its own process ({said}) than here ({here}).")
    return state


class StateCoding:
    """How the state dict of a model is stored: what unpack.py describes.

    tensors: those that are not stored exactly, tied ones once, by their first name. weights: those of them that go on a
    grid, as `matrices` has them. layers: of these.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = {place(layer.get_parameter("weight")): layer for layer in grid_layers(model)}
        names: dict[Any, list[str]] = {}
        state = model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
                raise UserError(
                    f"model: {name} of its state dict is no dense tensor with values; only such are packed."
                )
            tensor = state[name] = tensor.resolve_conj().resolve_neg()  # such a view has other values than its memory
            names.setdefault(place(tensor) if tensor.numel() else name, []).append(name)
        self.tensors: dict[str, Tensor] = {}
        self.weights: dict[str, NDArray[np.float32]] = {}
        self.layers: dict[str, nn.Module] = {}
        self._arrays: dict[str, NDArray[np.float32]] = {}
        entries, exact = [], list[bytes]()
        for key, tied in names.items():
            tensor, layer = state[tied[0]], layers.get(key)
            kind = TRANSPOSED if isinstance(layer, Conv1D) else STORED
            if layer is not None and not _fits_half(tensor):
                raise UserError(f"model: {tied[0]} has values that are nonfinite or not below {_MAX_HALF:,}.")
            if layer is None and not _fits_half(tensor):
                kind = EXACT
                exact.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                self.tensors[tied[0]], self._arrays[tied[0]] = tensor, stored(layer, tensor)
            if layer is not None:
                self.weights[tied[0]], self.layers[tied[0]] = self._arrays[tied[0]], layer
            entries.append((tied, str(tensor.dtype).removeprefix("torch."), [*tensor.shape], kind))
        listed = json.dumps(entries, separators=(",", ":")).encode()
        self._header = lzma.compress(
            listed + b"\0" + b"".join(exact), lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME
        )

    def encode(self, on_grids: Grids) -> Encoded:
        """Return the artifact, given matrices on their grids."""
        return encode(self._header, {**self._arrays, **on_grids})

    def kept(self, on_grids: Grids, encoded: Encoded) -> dict[str, int]:
        """Return the bytes of each matrix that is not on a grid."""
        names = [name for name, tensor in self.tensors.items() if tensor.ndim > 1 and name not in on_grids]
        return {name: round(encoded.tensors[name].weights) for name in names}


def fill(
    model: nn.Module,
    weights: Weights,
    curvature: Curvatures,
    encoder: Callable[[], Callable[[Grids], Encoded]],
    batches: Iterable[Any],
    *,
    budget_bytes: int,
    overhead_bytes: int,
    progress: Callable[[str], None],
    **options: Any,
) -> tuple[QuantizedModel, Encoded]:
    """Return the matrices that have a curvature, rounded so that they fill a budget, and the artifact.

    Unless they were trained on a grid, they are tuned on batches, and so are the vectors of the model (see tune), which
    leaves a hundredth of the budget free, or two. encoder: returns what encodes the model as it is now, given matrices
    on their grids. options: of quantize_model. Raises UserError as quantize_model does, and for a curvature that is not
    finite.
    """
    if not all(np.isfinite(each.hessian).all() and np.isfinite(each.row_weights).all() for each in curvature.values()):
        raise UserError(
            "model: its loss on the calibration text is not finite, or has no finite gradients, so nothing says how to"
            " round it."
        )
    encode = encoder()
    last: tuple[Grids, Encoded] | None = None

    def size_of(on_grids: Grids) -> int:
        nonlocal last  # the result to keep, as a rule
        last = on_grids, encode(on_grids)
        return len(last[1].data)

    def encoded(tensors: Grids) -> Encoded:
        return last[1] if last is not None and last[0] is tensors else encode(tensors)

    measured = {name: weight for name, weight in weights.items() if name in curvature}
    budget: dict[str, Any] = {"budget_bytes": budget_bytes, "overhead_bytes": overhead_bytes, "size_of": size_of}
    if (kept := on_own_grid(measured, curvature, **budget)) is not None:
        return kept, encoded(kept.tensors)
    quantized = quantize_model(measured, curvature, progress=progress, **budget, **options)
    untuned = quantized, encoded(quantized.tensors)
    own = {name: one.detach().clone() for name, one in model.named_parameters() if one.ndim < 2}
    if (tuned := tune(model, measured, quantized.tensors, batches)) is None:
        return untuned
    encode = encoder()
    tensors, size = fitting(tuned, curvature, **budget)
    progress(f"tuned: {num_changes(quantized.tensors, tensors):,} integers changed, {size:,} bytes")
    if size > budget_bytes:
        model.load_state_dict(own, strict=False)
        return untuned
    return replace(quantized, tensors=tensors, size_bytes=size), encoded(tensors)


def _fits_half(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter whose values fp16 has. Buffers may be tables of angles: they need all."""
    is_real = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return is_real and bool((tensor.isfinite() & (tensor.abs() < _MAX_HALF)).all())


@contextmanager
def _run_on_batches(model: nn.Module) -> Iterator[None]:
    """Say in one line that a model does not run on the batches; what it raised is the cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever a model raises for what it does not take
        raise UserError(
            f"batches: {type(model).__name__} does not run on one ({type(error).__name__}: {one_line(error)[:200]});"
            " give a list of what it takes: dicts of keyword arguments, tuples, or input ids (B, T)."
        ) from error


def _mean_loss(model: nn.Module, batches: Iterable[Any]) -> float:
    nats, num_targets = total_loss(model, batches)
    if not num_targets:
        raise UserError("batches: no token in them is a target; give batches of more than one token each.")
    return nats / num_targets
