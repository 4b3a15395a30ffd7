"""Find out which attention kernel runs, and in which dtypes, from a real pass: below autocast and the model's casts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfgolf.measure.flops import attention_contexts
from hfgolf.optim.shards import reshard

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

SDPA_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
}
"""{operator that SDPA may dispatch to: PyTorch's name of the backend}; if none of them runs, the backend is math."""


def describe_attention(model: PreTrainedModel, accelerator: Accelerator, sequence_length: int) -> str:
    """Describe the attention implementation, SDPA's backend if it ran, and the dtypes of q, k and v in its products."""
    if not attention_contexts(model.config, sequence_length):
        return "none"
    ids = torch.zeros(1, sequence_length, dtype=torch.long, device=accelerator.device)
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    was_training = model.training
    seen = _Products()
    model.train()  # attention dropout affects SDPA's choice of backend
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), accelerator.autocast(), seen:
            model(input_ids=ids, shift_labels=ids.clone())  # as in training: FSDP2 gathers weights for no other call
    finally:
        model.train(was_training)
        reshard(model)
    name = model.config._attn_implementation
    if seen.backend or name == "sdpa":
        name = f"{name}, SDPA's {seen.backend or 'math'} kernel"
    dtypes = " and ".join(sorted({str(dtype) for dtype in seen.dtypes}))
    return f"{name}, q, k and v in {dtypes or 'unknown dtypes (no product seen)'}"


class _Products(TorchDispatchMode):
    """Records the operand dtypes of the first attention: of a fused kernel, or of the batched product q k^T."""

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
        elif not self.dtypes and name == "bmm":  # projections are not batched products
            self.dtypes = [tensor.dtype for tensor in args[:2]]
        return func(*args, **(kwargs or {}))
