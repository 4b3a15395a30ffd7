"""Any causal language model of transformers, called the way a Golf model is: with shifted labels, and a chunked loss.

The loss is the same if the head is plain: one matrix without a bias, whose result is the logits. Else the logits of the
batch exist, as they do in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .modeling_golf import IGNORE_INDEX, ChunkedCrossEntropy, GolfForCausalLM

_PROBE_TOKENS = 8
_TOLERANCE = 1e-4  # of the largest hidden value or loss: kernels may round another length or path differently


def takes_shift_labels(model: nn.Module) -> bool:
    """Return whether a model computes its loss from shift_labels: a Golf model does, others after `add_loss`."""
    return isinstance(model, GolfForCausalLM) or hasattr(model, "head_is_plain")


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let a model keep only the inputs of its layers and compute the rest again in the backward pass, non-reentrantly.

    Raises ValueError if the model does not support it.
    """
    renamed = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.17 has only the older name
    (renamed or model.gradient_checkpointing_enable)()


def add_loss(model: PreTrainedModel) -> None:
    """Let a model take shift_labels and num_items_in_batch as a Golf model does, and return the loss alone.

    Without shift_labels, the call is the model's own. model.head_is_plain says whether the loss is computed in chunks.
    The tensors may be fake.
    """
    own_forward: Callable[..., Any] = model.forward
    model.head_is_plain = _has_plain_head(model)  # type: ignore[assignment]  # a module takes any attribute
    cross_entropy = model.cross_entropy = ChunkedCrossEntropy()

    @wraps(own_forward)
    def forward(
        *args: Any,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        if shift_labels is None:
            return own_forward(*args, **kwargs)
        kwargs = {"use_cache": False, "return_dict": True} | kwargs
        targets = shift_labels.flatten()
        if model.head_is_plain:
            hidden = model.base_model(*args, **kwargs).last_hidden_state
            nats = cross_entropy(hidden.flatten(0, 1), model.get_output_embeddings().weight, targets)
        else:
            logits = own_forward(*args, **kwargs).logits.flatten(0, 1).float()
            nats = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        if num_items_in_batch is None:
            num_items_in_batch = (targets != IGNORE_INDEX).sum().clamp(min=1)
        return CausalLMOutput(loss=nats / num_items_in_batch)

    model.forward = forward  # as accelerate does for autocast


def check_causal_lm(model: PreTrainedModel) -> None:
    """Check a model after `add_loss` on a few tokens. If its loss in chunks is not the loss of its logits, use these.

    Raises ValueError if the model is not causal: if a token changes what the model says of earlier ones.
    """
    ids = _probe_ids(model)
    changed = ids.clone()
    changed[:, -1] = ids[:, 0]
    with _probing(model):
        logits, other = (model(x, use_cache=False, return_dict=True).logits for x in (ids, changed))
        own = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(), reduction="sum")
        ours = model(ids, shift_labels=ids, num_items_in_batch=1).loss
    if (logits - other)[:, :-1].abs().max() > _TOLERANCE * logits.abs().max():
        raise ValueError("it is not causal: a token changes what the model says of earlier ones")
    if model.head_is_plain and not torch.isclose(ours, own, rtol=_TOLERANCE):
        model.head_is_plain = False  # type: ignore[assignment]  # its base model needs arguments that only the whole model knows


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether the head is a matrix that reads the last hidden state, and whose result is the logits.

    Follows the storages through one pass: numbers could agree by chance, because a soft cap hardly bends small logits.
    """
    head = model.get_output_embeddings()
    if model.base_model is model or type(head) is not nn.Linear or head.bias is not None:
        return False
    seen: list[tuple[Tensor, int]] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        values = [output.last_hidden_state] if module is model.base_model else [inputs[0], output]
        seen.extend((value, value._version) for value in values)

    handles = [module.register_forward_hook(note) for module in (model.base_model, head)]
    try:
        with _probing(model):
            logits = model(_probe_ids(model), use_cache=False, return_dict=True).logits
    except AttributeError:  # the base model returns something else
        return False
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) != 3:
        return False
    (hidden, version), (read, version_read), (result, version_of_result) = seen
    is_unchanged = hidden._version == version == version_read and result._version == version_of_result
    return is_unchanged and _is_same(hidden, read) and _is_same(result, logits)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are views of the same memory."""
    same_storage = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same_storage and one.shape == other.shape and one.stride() == other.stride()


def _probe_ids(model: PreTrainedModel) -> Tensor:
    config: Any = model.config
    length = min(_PROBE_TOKENS, getattr(config, "max_position_embeddings", None) or _PROBE_TOKENS)
    return (1 + torch.arange(length, device=model.device)[None]) % config.vocab_size


@contextmanager
def _probing(model: PreTrainedModel) -> Iterator[None]:
    """Run passes that leave no trace: no gradients, no dropout, the same random numbers afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            yield
    finally:
        model.train(was_training)
