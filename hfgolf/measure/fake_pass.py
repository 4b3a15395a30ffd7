"""The memory of one forward and backward pass, from running it on torch's fake tensors: shapes without numbers.

For architectures that have no formula. It takes 0.3 to 10 s per size, but none of the memory that it predicts.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hfgolf.config.sections import RunConfig
from hfgolf.measure.flops import attention_contexts
from hfgolf.model.causal_lm import add_loss, checkpoint_layers
from hfgolf.system.wording import first_line

logger = logging.getLogger(__name__)

_ROW_OF_RECURRENT_LAYERS = 32  # tokens: they loop over a row in Python, and each token keeps as much in any row


class LiveBytes(TorchDispatchMode):
    """Track the bytes of live storages and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        return result


def pass_bytes(config: RunConfig, model: PreTrainedModel, batch: int, device: str) -> tuple[int, int]:
    """Return the bytes of a pass over `batch` sequences that live between forward and backward pass, and the peak.

    They are those of one sequence and of two, continued on a line, without weights and earlier gradients; the peak is
    with new gradients.

    config: its precision must be decided. device: cuda or cpu; a GPU that torch was not built for is predicted as a
    CPU. If the model cannot run on fake tensors, warns once and returns 0 bytes.
    """
    device = device if device == "cpu" or torch.cuda.is_available() else "cpu"
    rows, sequence = 1, config.batch.sequence_length
    row = getattr(model.config, "chunk_size", _ROW_OF_RECURRENT_LAYERS)  # Mamba-2 pads shorter rows
    if not attention_contexts(model.config, sequence) and sequence > row:
        rows, sequence = -(-sequence // row), row
    shape = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    frozen = tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    settings = str(config.train.mixed_precision), config.model.gradient_checkpointing, device, frozen
    one = _measure(shape, (rows, sequence), *settings)
    if batch == 1:
        return one
    two = _measure(shape, (2 * rows, sequence), *settings)
    kept, peak = (first + (batch - 1) * (second - first) for first, second in zip(one, two, strict=True))
    return kept, peak


@lru_cache(maxsize=32)
def _measure(
    shape: str, tokens: tuple[int, int], precision: str, checkpointing: bool, device: str, frozen: tuple[str, ...]
) -> tuple[int, int]:
    fields = json.loads(shape)
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    live = LiveBytes()
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    try:
        with _quiet(), FakeTensorMode(), torch.device(device), torch.random.fork_rng([]):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).train()
            add_loss(model)
            if checkpointing:
                checkpoint_layers(model)
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
            for tensor in (*model.parameters(), *model.buffers()):
                live.note(tensor)
            weights, ids = live.now, torch.zeros(tokens, dtype=torch.long)
            with live:
                with torch.autocast(device, dtype, enabled=precision != "no"):
                    loss = model(ids, shift_labels=ids.clone()).loss
                kept = live.now
                loss.backward()
    except Exception as error:  # whatever an operator without fake tensors raises
        _warn(config.model_type, first_line(error)[:150])
        return 0, 0
    return kept - weights, live.peak - weights


@cache
def _warn(model_type: str, reason: str) -> None:
    """Warn once: a plan asks for several sizes."""
    logger.warning("memory: the activations of %s are unknown, counted as 0 (%s)", model_type, reason)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the traceback that torch logs for an operator without a fake version; one line replaces it."""
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_logger.level
    torch_logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torch_logger.setLevel(level)
