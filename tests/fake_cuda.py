"""Count what a training step would launch on a GPU, on fake CUDA tensors: no GPU and no CUDA build of torch.

`python tests/fake_cuda.py` prints one JSON object per part of a step. It is a program of its own because registering a
CUDA device cannot be undone in a process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_DEVICE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(%s, NoOpDeviceGuardImpl<DeviceType::%s>); }
"""
_NO_LAUNCH = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "promote_types", "_unsafe_view")


def reason_to_skip() -> str | None:
    """Return why this machine cannot fake CUDA tensors, None if it can."""
    if torch.version.cuda or torch.version.hip:
        return "torch is built for a GPU; its own tests run there"
    return None if shutil.which("g++") else "needs a C++ compiler, g++"


def register_device(kind: str) -> None:
    """Compile and load the device, CUDA or MPS. Takes some seconds."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake_device.so"
        options = ["-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
        command = ["g++", *options, "-x", "c++", "-", "-o", str(library), "-lc10"]
        subprocess.run(command, input=_DEVICE % (kind, kind), text=True, check=True)
        torch.ops.load_library(library)


class Launches(TorchDispatchMode):
    """Count the operations that launch a kernel, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation.__name__.partition(".")[0]
        if operation.namespace != "aten" or operation.is_view or name in _NO_LAUNCH:
            return result
        self.counts[name] += 1
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return result

    def row(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        casts = self.counts["_to_copy"]
        return {"launches": self.counts.total(), "casts": casts, "gigabytes": self.bytes / 1e9, "each": self.counts}


@contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """Do what torch.autocast("cuda", dtype) does; without a GPU, it disables itself."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


def measure_step(batch: int = 16, sequence: int = 1024) -> dict[str, Any]:
    """Return the launches of the parts of one step with 124M parameters in bf16 on an H200, uncompiled.

    The parts are blocks, loss, update and average.

    An operation that needs a value on the host raises, so a step that ends has not waited for the device. Clipping is
    run for that alone: torch does not take its foreach kernels for fake tensors.
    """
    from hfgolf.config.sections import OptimSection
    from hfgolf.measure.memory import chunk_elements
    from hfgolf.model.configuration_golf import GolfConfig
    from hfgolf.model.modeling_golf import GolfForCausalLM, chunked_cross_entropy
    from hfgolf.optim.ema import Ema
    from hfgolf.optim.groups import build_optimizer
    from hfgolf.system.hardware import find_device
    from hfgolf.train.loop import gradient_norm

    F.scaled_dot_product_attention = _flash_attention
    config = GolfConfig(
        vocab_size=50257,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=sequence,
    )
    card = find_device("H200")
    assert card
    blocks, loss, update, average = (Launches() for _ in range(4))
    with FakeTensorMode(), torch.device("cuda"):
        model = GolfForCausalLM(config).train()
        optimizer = build_optimizer(model, OptimSection())
        ema = Ema(model.named_parameters(), 0.99)
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        with autocast(torch.bfloat16):
            with blocks:
                hidden = model.model(ids).last_hidden_state
            with loss:
                nats = chunked_cross_entropy(
                    hidden.flatten(0, 1),
                    model.lm_head.weight,
                    ids.flatten(),
                    chunk_elements=chunk_elements("cuda", card.memory_gb * 10**9),
                )
        assert nats.requires_grad and nats.device.type == "cuda" and nats.dtype == torch.float32
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.create_state()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, gradient_norm(model.parameters()))
        with update:
            optimizer.step()
        with average:
            ema.update(1)
        devices = {value.device.type for state in optimizer.state.values() for value in state.values()}
    parts = {"blocks": blocks, "loss": loss, "update": update, "average": average}
    return {name: part.row() for name, part in parts.items()} | {"state_devices": sorted(devices)}


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """Call the kernel that a GPU would choose; a build without CUDA would choose plain products."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(query, key, value, kwargs["dropout_p"], kwargs["is_causal"], scale=kwargs["scale"])[0]


def sync_is_refused() -> bool:
    """Return whether reading a value of a fake CUDA tensor raises, without which the above would prove nothing."""
    with FakeTensorMode(), torch.device("cuda"):
        try:
            torch.zeros(()).item()
        except DataDependentOutputException:
            return True
    return False


if __name__ == "__main__":
    register_device("CUDA")
    json.dump(measure_step() | {"sync_is_refused": sync_is_refused()}, sys.stdout)
