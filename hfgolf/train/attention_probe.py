"""Which attention kernel runs and what it gets, seen in a pass: below autocast, and whatever the model casts itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hfgolf.model.modeling_golf import GolfForCausalLM

SDPA_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
}
"""{operator that SDPA may end in: the backend's name in PyTorch}; if none of them runs, it is plain products, math."""


def describe_attention(model: GolfForCausalLM, accelerator: Accelerator, sequence_length: int) -> str:
    """Return the attention implementation, SDPA's backend if it ran, and the dtypes of q, k and v in its products."""
    ids = torch.zeros(1, sequence_length, dtype=torch.long, device=accelerator.device)
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    was_training = model.training
    seen = _Products()
    model.train()  # dropout on the attention weights decides about the backend
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), accelerator.autocast(), seen:
            model.forward(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        model.train(was_training)
    name = model.config._attn_implementation
    if seen.backend or name == "sdpa":
        name = f"{name}, SDPA's {seen.backend or 'math'} kernel"
    dtypes = " and ".join(sorted({str(dtype) for dtype in seen.dtypes}))
    return f"{name}, q, k and v in {dtypes or 'no product that was seen'}"


class _Products(TorchDispatchMode):
    """Notes the operands of the first attention: of a fused kernel, or of the batched products q k^T and p v."""

    def __init__(self) -> None:
        super().__init__()
        self.backend: str | None = None
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not self.dtypes and name in SDPA_KERNELS:
            self.backend, self.dtypes = SDPA_KERNELS[name], [tensor.dtype for tensor in args[:3]]
        elif not self.dtypes and name == "bmm":  # projections are no batched products
            self.dtypes = [tensor.dtype for tensor in args[:2]]
        return func(*args, **(kwargs or {}))
