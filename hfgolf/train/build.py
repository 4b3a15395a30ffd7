"""Build the model from the config of a run.

Owns which keys define the architecture, and how a model is prepared for a device. Does not load weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from hfgolf.config import RunConfig
from hfgolf.errors import UserError
from hfgolf.model.causal_blocks import choose_attention
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM


def golf_config(config: RunConfig, vocab_size: int, **token_ids: Any) -> GolfConfig:
    """Return the model's config. token_ids: bos_token_id, eos_token_id, pad_token_id; none if the model is measured."""
    if config.model.attention_span == "document" and not token_ids:
        token_ids = {"bos_token_id": vocab_size - 1}  # it needs a separator, and any id costs the same
    shape = dataclasses.asdict(config.model)
    del shape["gradient_checkpointing"], shape["init_from"]
    rows = config.model.vocab_size or vocab_size
    if rows < vocab_size and config.data.messages_column is not None:
        rows = vocab_size  # the tokens of a chat template joined the vocabulary of model.init_from
    if rows < vocab_size:
        raise UserError(
            f"model.vocab_size: an embedding with {rows} rows is too small for a tokenizer with {vocab_size} entries."
        )
    return GolfConfig(**shape | {"vocab_size": rows, "max_position_embeddings": config.max_positions}, **token_ids)


def build_golf(config: RunConfig, vocab_size: int, device: str, **token_ids: Any) -> GolfForCausalLM:
    """Build the model for training on a device type (cuda, cpu). train.mixed_precision must be decided.

    The weights are on torch's default device: the CPU, or that of an enclosing `with torch.device`.
    """
    model = GolfForCausalLM(golf_config(config, vocab_size, **token_ids))
    choose_attention(model, torch.device(device), config.train.mixed_precision, config.batch.sequence_length)
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()  # non-reentrant
    return model
