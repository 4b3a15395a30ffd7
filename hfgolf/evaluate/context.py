"""What a model may be asked while it is judged: in evaluation mode for a while, and within its positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hfgolf.errors import UserError


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and back into the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def max_positions(model: nn.Module) -> int | None:
    """Return the tokens after which a model has no more positions; None: it may go on beyond those of its training."""
    config = model.config
    if getattr(config, "position_embedding", "learned") != "learned":  # a Golf model with rope, or without positions
        return None
    return getattr(config, "max_position_embeddings", None)


def require_embedded(max_id: int, vocab_size: int) -> None:
    """Raise UserError if the highest id that a tokenizer gave is beyond the entries of the model's embedding."""
    if max_id >= vocab_size:
        raise UserError(
            f"--model: its tokenizer gave id {max_id}, but it embeds only {vocab_size} entries; tokenizer and weights"
            " do not belong together."
        )


def evaluation_length(model: nn.Module, stated: int | None) -> int:
    """Return the tokens of context to evaluate with: those stated, else the most the model was made for.

    Raises UserError where the model has no such figure, or fewer positions than were stated.
    """
    limit = max_positions(model)
    if stated is not None and (stated < 1 or (limit is not None and stated > limit)):
        allowed = "1 or more" if limit is None else f"1 to {limit}"
        raise UserError(f"--sequence_length: {stated} is out of range for this model; allowed: {allowed}.")
    length = stated or getattr(model.config, "max_position_embeddings", None)
    if length is None:
        raise UserError("--sequence_length: this model states no longest sequence; name one, such as 1024.")
    return length
