"""Build the model from the config of a run: Golf, or any causal language model of transformers.

Owns how a config becomes that of a Golf model, and how a model is prepared for a device. Every model that it builds
takes the call of a Golf model. Does not load weights.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hfgolf.config.parse import as_yaml
from hfgolf.config.sections import ModelSection, RunConfig, model_key
from hfgolf.model.causal_blocks import choose_attention
from hfgolf.model.causal_lm import add_loss, check_causal_lm, checkpoint_layers
from hfgolf.model.configuration_golf import MODEL_FIELDS, GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.system.errors import UserError
from hfgolf.system.wording import nearest, one_line
from hfgolf.train.architectures import embedding_rows, other_config


def golf_config(config: RunConfig, vocab_size: int, **token_ids: Any) -> GolfConfig:
    """Return the model's config. token_ids: bos_token_id, eos_token_id, pad_token_id; none if the model is measured.

    Raises UserError if GolfConfig does not allow it.
    """
    overrides = golf_overrides(config.model)
    if overrides.get("attention_span") == "document" and not token_ids:
        token_ids = {"bos_token_id": vocab_size - 1}  # it needs a separator, and any id costs the same
    shape = {name: value for name, value in config.model if name in MODEL_FIELDS} | overrides
    sizes = {"vocab_size": embedding_rows(config, vocab_size), "max_position_embeddings": config.max_positions}
    try:
        return GolfConfig(**shape | sizes, **token_ids)
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        problem = re.sub(r"\b(None|True|False)\b", lambda match: as_yaml(ast.literal_eval(match[0])), problem)
        raise UserError(f"{model_key(name)}: {problem}") from None


def golf_overrides(section: ModelSection) -> dict[str, Any]:
    """Return model.overrides of a Golf model. Raises UserError if GolfConfig has no such field."""
    names = [name for name in MODEL_FIELDS if model_key(name).startswith("model.overrides.")]
    for name in section.overrides:
        if name in MODEL_FIELDS and name not in names:
            raise UserError(f"model.overrides.{name}: the key is model.{name}; set that.")
        if name not in names:
            raise UserError(f"model.overrides.{name}: golf has no such field; did you mean {nearest(name, names)}?")
    return section.overrides


def check_golf(config: RunConfig) -> None:
    """Raise UserError for a Golf model that can't be, before any data is read. model.init_from has its own check."""
    if config.model.architecture == "golf" and config.model.init_from is None:
        golf_config(config, config.model.vocab_size or 1)


def build_model(
    config: RunConfig, vocab_size: int, device: str, frozen: Collection[str] = (), **token_ids: Any
) -> PreTrainedModel:
    """Build the model for training on a device type (cuda, cpu). train.mixed_precision must be decided.

    frozen: the names of parameters that are not trained. token_ids: as in `golf_config`. The weights are on torch's
    default device: the CPU, or that of an enclosing `with torch.device`. On the meta device, an architecture other than
    Golf does not get its loss.

    Raises UserError if the config does not describe a model that can be trained.
    """
    if config.model.architecture == "golf":
        model: PreTrainedModel = GolfForCausalLM(golf_config(config, vocab_size, **token_ids))
        choose_attention(model, torch.device(device), config.train.mixed_precision, config.batch.sequence_length)
    else:
        model = _build_other(config, vocab_size, **token_ids)
    if config.model.gradient_checkpointing:
        checkpoint_layers(model)
    _freeze(model, frozen)
    return model


def _freeze(model: PreTrainedModel, names: Collection[str]) -> None:
    parameters = dict(model.named_parameters())
    if unknown := [name for name in names if name not in parameters]:
        raise UserError(
            f"model.init_from: {unknown[0]} is frozen, and {type(model).__name__} has no such parameter; set"
            " model.architecture to that of the weights."
        )
    for name in names:
        parameters[name].requires_grad_(False)


def _build_other(config: RunConfig, vocab_size: int, **token_ids: Any) -> PreTrainedModel:
    name = config.model.architecture
    model_config = other_config(config, vocab_size, **token_ids)
    try:
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32, trust_remote_code=False)
        if config.model.gradient_checkpointing and not model.supports_gradient_checkpointing:
            raise ValueError("it does not support model.gradient_checkpointing")
        if model.device.type != "meta":
            add_loss(model)
            check_causal_lm(model)
    except Exception as error:  # whatever a model raises for a shape that it cannot have
        raise UserError(f"model.architecture: cannot train {name}: {one_line(error)[:300]}.") from None
    return model
