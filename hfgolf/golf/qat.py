"""Quantization-aware training: matrices that are on the export's grid while the model runs.

In a forward and backward pass the matrices hold their rounded values; the optimizer updates the unrounded ones. That is
the straight-through gradient (Bengio et al. 2013, arXiv:1308.3432), without a hook in the model: a compiled graph reads
the weights that it is given, so no compiler can fold the rounding away. Does not know when a run rounds.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hfgolf.golf.grid import MAX_INTEGER, MAX_ROW_CODE, Quantized, round_nearest, steps_of


class Rounding:
    """Round the matrices of a model to fixed grids while it runs.

    codes: {parameter name: its row codes}, from packed_codes. num_rounded: matrices rounded in the last pass, for the
    log.
    """

    def __init__(self, model: nn.Module, codes: Mapping[str, str]) -> None:
        self.codes = codes
        self.num_rounded = 0
        self._weights = [model.get_parameter(name) for name in codes]
        self._steps = [
            torch.from_numpy(steps_of(np.frombuffer(base64.b64decode(text), dtype=np.uint8)))[:, None].to(weight.device)
            for weight, text in zip(self._weights, codes.values(), strict=True)
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the parameters their rounded values inside the `with` block, and restore them bit for bit after it.

        Gradients that the block computes stay. Enter autocast inside the block, because it caches what it has cast.
        """
        # Swap storages, not contents: a checkpoint in the background may still be reading these.
        kept = [weight.data for weight in self._weights]
        try:
            for weight, steps in zip(self._weights, self._steps, strict=True):
                weight.data = _rounded(weight.data, steps)
            self.num_rounded = len(self._weights)
            yield
        finally:
            for weight, values in zip(self._weights, kept, strict=True):
                weight.data = values


def _rounded(weight: Tensor, steps: Tensor) -> Tensor:
    return (weight / steps).round_().clamp_(-MAX_INTEGER, MAX_INTEGER).mul_(steps)


def packed_codes(row_codes: Mapping[str, NDArray[np.uint8]]) -> dict[str, str]:
    """Return row codes, (rows,) uint8 for each matrix, in a form that JSON holds: base64."""
    return {name: base64.b64encode(codes.tobytes()).decode() for name, codes in row_codes.items()}


def grid_of(weight: NDArray[np.float32]) -> Quantized | None:
    """Return a matrix (rows, columns) that is on a grid as integers and row codes; None if some row is on none.

    A row's grid is the coarsest whose points are its values, bit for bit. Weights that were never rounded are on none.
    """
    sizes = np.abs(weight)
    smallest = np.where(sizes > 0, sizes, np.inf).min(axis=1)
    codes = np.full(len(weight), MAX_ROW_CODE, dtype=np.uint8)  # any grid has a row of zeros
    left = np.flatnonzero(np.isfinite(smallest))
    for code in range(MAX_ROW_CODE, -1, -1):
        step = steps_of(np.array(code))
        quotients = np.rint(smallest[left] / step)
        fits = (quotients >= 1) & (quotients <= MAX_INTEGER) & (quotients * step == smallest[left])
        candidates = left[fits]
        if len(candidates):
            rounded = round_nearest(weight[candidates], np.full(len(candidates), code, dtype=np.uint8))
            found = candidates[(rounded.dequantized() == weight[candidates]).all(axis=1)]
            codes[found] = code
            left = np.setdiff1d(left, found, assume_unique=True)
    return None if len(left) else round_nearest(weight, codes)
