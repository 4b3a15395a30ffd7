"""From the config of a run to its model.

Owns which keys make the shape, and how a model is made ready for a device. Does not know weights that exist already.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from hfgolf.config import RunConfig
from hfgolf.model.causal_blocks import attend_fastest
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM


def golf_config(config: RunConfig, vocab_size: int, **token_ids: Any) -> GolfConfig:
    """Return the model's own config. token_ids: bos_token_id and the like."""
    shape = dataclasses.asdict(config.model)
    del shape["gradient_checkpointing"]
    limit = config.batch.sequence_length
    return GolfConfig(vocab_size=vocab_size, max_position_embeddings=limit, **shape, **token_ids)


def build_golf(config: RunConfig, vocab_size: int, device: str, **token_ids: Any) -> GolfForCausalLM:
    """Build the model of a config whose precision is decided, for training on a type of device (cuda, cpu).

    Its weights are where torch puts tensors by default: on the CPU, or as a `with torch.device` says.
    """
    model = GolfForCausalLM(golf_config(config, vocab_size, **token_ids))
    attend_fastest(model, torch.device(device), config.train.mixed_precision, config.batch.sequence_length)
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()  # non-reentrant
    return model
