"""Tensors that are spread over ranks, as the parameters of FSDP2: this rank's shard, the whole, and back.

A tensor that is not spread is its own shard and its own whole. Owns nothing; refuses to know what the tensors are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Say whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor before its import, which takes seconds
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shards, in the memory of the tensors; some may be empty."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank, which all have to call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's shard of a whole tensor that all ranks hold, cut as `like` is; nothing is communicated."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def zeros_along(dim: int, param: Any, dtype: torch.dtype) -> Tensor:
    """Return a zero for each index of one dimension of a parameter, sharded where that dimension is."""
    if not is_sharded(param):
        return torch.zeros(param.shape[dim], dtype=dtype, device=param.device)
    from torch.distributed.tensor import Replicate, zeros

    placements = [type(p)(0) if p.is_shard(dim) else Replicate() for p in param.placements]
    return zeros(param.shape[dim], dtype=dtype, device_mesh=param.device_mesh, placements=placements)
