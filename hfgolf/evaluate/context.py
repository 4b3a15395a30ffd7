"""Evaluation mode, and the limits that a model sets on its input: positions and token ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hfgolf.system.errors import UserError


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode for the `with` block, then restore its mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run the model eagerly inside this context: other shapes would compile it again."""
    calls = {module: module._compiled_call_impl for module in compiled_modules(model)}
    undo_compilation(model)
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call


def undo_compilation(model: nn.Module) -> None:
    """Make the model eager again: generate() would recompile it for every length."""
    for module in compiled_modules(model):
        module._compiled_call_impl = None


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules on which compile() was called: the model itself, or its layers and loss."""
    return [module for module in model.modules() if module._compiled_call_impl is not None]


def max_positions(model: nn.Module) -> int | None:
    """Return the number of positions of a model, or None if it has no limit."""
    config = model.config
    if getattr(config, "position_embedding", "learned") != "learned":  # a Golf model with rope, or with none
        return None
    return getattr(config, "max_position_embeddings", None)


def require_embedded(max_id: int, vocab_size: int) -> None:
    """Raise UserError if the largest id from a tokenizer is outside the model's embedding."""
    if max_id >= vocab_size:
        raise UserError(
            f"--model: its tokenizer returned id {max_id}, but its embedding has only {vocab_size} entries; tokenizer"
            " and weights do not belong together."
        )


def evaluation_length(model: nn.Module, stated: int | None) -> int:
    """Return the context length for evaluation, in tokens: the stated one, or else max_position_embeddings.

    Raises UserError if the model has no max_position_embeddings, or fewer positions than stated.
    """
    limit = max_positions(model)
    if stated is not None and (stated < 1 or (limit is not None and stated > limit)):
        allowed = "1 or more" if limit is None else f"1 to {limit}"
        raise UserError(f"--sequence_length: {stated} is out of range for this model; allowed: {allowed}.")
    length = stated or getattr(model.config, "max_position_embeddings", None)
    if length is None:
        raise UserError("--sequence_length: this model's config has no maximum length; give one, such as 1024.")
    return length
