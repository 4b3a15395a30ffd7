"""Tensors that may be sharded over ranks, as under FSDP2: the local shard, the full tensor, and back.

An unsharded tensor is its own shard and its own full tensor. Does not know what the tensors are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes seconds; before that, none can exist
    return module is not None and isinstance(tensor, module.DTensor)


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shards, which share the tensors' memory. Some may be empty."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. Every rank must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(like: Any, full: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, sharded like `like`. All ranks hold it, so nothing is communicated."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def zeros_along(dim: int, param: Any, dtype: torch.dtype) -> Tensor:
    """Return a vector with one zero per index of a parameter's dimension, sharded if that dimension is."""
    if not is_sharded(param):
        return torch.zeros(param.shape[dim], dtype=dtype, device=param.device)
    from torch.distributed.tensor import Replicate, zeros

    placements = [type(p)(0) if p.is_shard(dim) else Replicate() for p in param.placements]
    return zeros(param.shape[dim], dtype=dtype, device_mesh=param.device_mesh, placements=placements)
