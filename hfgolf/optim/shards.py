"""Tensors that may be sharded over ranks, as under FSDP2: the local shard, the full tensor, and back.

An unsharded tensor is its own shard and its own full tensor. Does not know what the tensors are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


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


def copy_full(to: Any, full: Tensor) -> None:
    """Copy a full tensor into a tensor that may be sharded. Every rank holds it, so nothing is communicated."""
    with torch.no_grad():
        local_shards([to])[0].copy_(shard_like(to, full.to(to.device)))


def on_any_rank(flag: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Return whether a flag, read off these tensors, is true: on any rank if they are sharded; then all ranks call."""
    if any(is_sharded(tensor) for tensor in tensors):
        flag = flag.to(torch.int32)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)


def reshard(model: nn.Module) -> None:
    """Drop the whole weights that FSDP2 keeps after a pass without gradients; the next pass gathers them again.

    Otherwise that pass, and named_parameters(), would not see what has changed in the shards.
    """
    package = sys.modules.get("torch.distributed.fsdp")  # as in is_sharded
    if package is not None:
        for module in model.modules():
            if isinstance(module, package.FSDPModule):
                module.reshard()


def zeros_along(dim: int, param: Any, dtype: torch.dtype) -> Tensor:
    """Return a vector with one zero per index of a parameter's dimension, sharded if that dimension is."""
    if not is_sharded(param):
        return torch.zeros(param.shape[dim], dtype=dtype, device=param.device)
    from torch.distributed.tensor import Replicate, zeros

    placements = [type(p)(0) if p.is_shard(dim) else Replicate() for p in param.placements]
    return zeros(param.shape[dim], dtype=dtype, device_mesh=param.device_mesh, placements=placements)
