"""View weights as the matrices they consist of, and bucket equal matrices for batched matmuls.

Does not know what is done with them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache

import torch
from torch import Tensor

Split = tuple[int, ...] | None


def matrix_views(tensors: list[Tensor], splits: list[Split], in_out: bool) -> list[Tensor]:
    """Return each tensor as one matrix view, (out, rest) or (in, out), or as one view per matrix fused in it.

    A one-dimensional tensor holds one value per output.
    """
    views: list[Tensor] = []
    for tensor, split in zip(tensors, splits, strict=True):
        matrix = tensor if tensor.ndim <= 2 else tensor.view(len(tensor), -1)  # a view: updates to a copy would be lost
        views += matrix.split(split, dim=1 if in_out and matrix.ndim == 2 else 0) if split else (matrix,)
    return views


@lru_cache(maxsize=64)
def bucket_by_shape(
    shapes_and_devices: tuple[tuple[torch.Size, torch.device], ...], max_elements: int, ranks: int
) -> list[list[int]]:
    """Divide the indices of the given matrices into buckets of one shape on one device.

    max_elements: elements per rank in one bucket, which `ranks` ranks share; at least one matrix per rank always fits.
    """
    equal: dict[tuple[torch.Size, torch.device], list[int]] = defaultdict(list)
    for index, shape_and_device in enumerate(shapes_and_devices):
        equal[shape_and_device].append(index)
    buckets = []
    for (shape, _), indices in equal.items():
        max_matrices = ranks * max(1, max_elements // shape.numel())
        size = math.ceil(len(indices) / math.ceil(len(indices) / max_matrices))
        buckets += [indices[start : start + size] for start in range(0, len(indices), size)]
    return buckets
