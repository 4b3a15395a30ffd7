"""The matrices that weights consist of, as views, and the batches in which they are worked on.

Refuses to know what is done with them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache

import torch
from torch import Tensor

Split = tuple[int, ...] | None


def pieces(tensors: list[Tensor], splits: list[Split], in_out: bool) -> list[Tensor]:
    """Return views: each tensor as a matrix, (out, rest) or (in, out), or the blocks of outputs it is fused from.

    A tensor of one dimension holds a value for each output.
    """
    views: list[Tensor] = []
    for tensor, split in zip(tensors, splits, strict=True):
        matrix = tensor if tensor.ndim <= 2 else tensor.view(len(tensor), -1)  # an update of a copy would be lost
        views += matrix.split(split, dim=1 if in_out and matrix.ndim == 2 else 0) if split else (matrix,)
    return views


@lru_cache(maxsize=64)
def batches(kinds: tuple[tuple[torch.Size, torch.device], ...], max_elements: int, ranks: int) -> list[list[int]]:
    """Divide the positions in `kinds` into batches of one shape on one device.

    max_elements: of a batch's matrices for each of the ranks that share it; one matrix each there is always room for.
    """
    alike: dict[tuple[torch.Size, torch.device], list[int]] = defaultdict(list)
    for position, kind in enumerate(kinds):
        alike[kind].append(position)
    divided = []
    for (shape, _), positions in alike.items():
        most = ranks * max(1, max_elements // shape.numel())
        size = math.ceil(len(positions) / math.ceil(len(positions) / most))
        divided += [positions[start : start + size] for start in range(0, len(positions), size)]
    return divided
