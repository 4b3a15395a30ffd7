"""Build the model from the config of a run: Golf, or any causal language model of transformers.

Owns how a config becomes that of a model, and how a model is prepared for a device. Every model that it builds takes
the call of a Golf model. Does not load weights.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfgolf.config.parse import as_yaml
from hfgolf.config.sections import ModelSection, RunConfig, model_key
from hfgolf.model.causal_blocks import choose_attention
from hfgolf.model.causal_lm import add_loss, check_causal_lm, checkpoint_layers
from hfgolf.model.configuration_golf import MODEL_FIELDS, GolfConfig
from hfgolf.model.induction import has_room, start_induction
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.load import load_model_config
from hfgolf.run.find_model import find_model
from hfgolf.system.errors import UserError
from hfgolf.system.wording import nearest, one_line

_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
# Names of the config's fields that attribute_map does not translate. Each is set if the config has it.
_ALSO = {"intermediate_size": ("n_inner", "ffn_dim"), "hidden_size": ("word_embed_proj_dim", "attention_hidden_size")}


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


def check_other(config: RunConfig) -> None:
    """Raise UserError for another model than Golf that can't be, or has no such dropout, before any data is read."""
    rates = {_rate_key(field) for field in _field_names(other_config(config, vocab_size=1))}
    for key in ("dropout", "attention_dropout"):
        if getattr(config.model, key) and key not in rates:
            raise UserError(f"model.{key}: {config.model.architecture} has none; set it to 0.")


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
        golf = GolfForCausalLM(golf_config(config, vocab_size, **token_ids))
        if config.model.induction_heads and golf.device.type != "meta" and has_room(golf):
            start_induction(golf, config.model.induction_heads, config.batch.sequence_length)
        model: PreTrainedModel = golf
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


def other_config(config: RunConfig, vocab_size: int, **token_ids: Any) -> PreTrainedConfig:
    """Return the config of a model that is not Golf. token_ids: bos_token_id, eos_token_id, pad_token_id.

    Raises UserError if there is no such architecture, or it has no such field.
    """
    section, name = config.model, config.model.architecture
    base: Any
    sizes = {"vocab_size": embedding_rows(config, vocab_size), "max_position_embeddings": config.max_positions}
    # no padding: a model may keep the embedding of that id at 0, and here it is the end of text
    ids = {"bos_token_id": None, "eos_token_id": None} | token_ids | {"pad_token_id": None}
    if section.init_from is not None:
        base = _config_of_weights(config, vocab_size)
        shape, fields = _fields(base), ids
    elif name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        base = CONFIG_MAPPING[name]
        shape, fields = {}, _shape(section, base) | sizes | ids
    else:
        base = _load(name)
        shape, fields = _fields(base), sizes | ids
    names, translated = _field_names(base), base.attribute_map
    fields |= {field: getattr(section, key) for field in names if (key := _rate_key(field))}
    for field in section.overrides:
        if field not in names:
            raise UserError(
                f"model.overrides: {field} is not a field of {base.model_type}; did you mean {nearest(field, names)}?"
            )
    fields = {key: value for key, value in (fields | section.overrides).items() if key in names}
    try:
        result = base.from_dict(shape | {translated.get(key, key): value for key, value in fields.items()})
    except Exception as error:  # a config may check itself in any way
        raise UserError(f"model.architecture: {name} rejects this shape ({one_line(error)[:200]}).") from None
    if result.is_encoder_decoder:
        raise UserError(f"model.architecture: {name} is an encoder and a decoder; choose a decoder alone.")
    return result


def _config_of_weights(config: RunConfig, vocab_size: int) -> PreTrainedConfig:
    """Return the config of model.init_from. Raises UserError if it is not what the run's config says."""
    source = find_model(str(config.model.init_from), "model.init_from", is_final=True)
    base: Any = load_model_config(source, "model.init_from")
    if base.model_type != config.model.architecture:
        raise UserError(
            f"model.init_from: {config.model.init_from} is a {base.model_type}, but model.architecture is"
            f" {config.model.architecture}; set {base.model_type}."
        )
    if config.data.messages_column is not None:  # the tokens of a chat template may have joined the vocabulary
        base.vocab_size = max(base.vocab_size, vocab_size)
    for key, size, limit in (
        ("tokenizer", vocab_size, base.vocab_size),
        ("batch.sequence_length", config.batch.sequence_length, getattr(base, "max_position_embeddings", math.inf)),
    ):
        if size > limit:
            raise UserError(f"{key}: {size} is more than the {limit} that the weights of model.init_from are for.")
    return base


def _fields(base: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a loaded config, without those of the checkpoint that it came with."""
    not_of_model = ("architectures", "auto_map", "dtype", "quantization_config")
    return {key: value for key, value in base.to_dict().items() if key not in not_of_model}


def embedding_rows(config: RunConfig, vocab_size: int) -> int:
    """Return the rows of the embedding for a tokenizer with so many entries. Raises UserError if they are too few."""
    rows = config.model.vocab_size or vocab_size
    if rows < vocab_size and config.data.messages_column is not None:
        return vocab_size  # the tokens of a chat template joined the vocabulary of model.init_from
    if rows < vocab_size:
        key, way_out = "model.vocab_size", "leave the key out"
        if config.model.init_from:
            key, way_out = f"model.init_from: {config.model.init_from}", "name weights and the tokenizer they are for"
        raise UserError(
            f"{key}: an embedding with {rows} rows is too small for a tokenizer with {vocab_size} entries; {way_out}."
        )
    return rows


def _field_names(config: Any) -> dict[str, None]:
    """Return the names that a config takes, in order: its fields, and their common names."""
    return dict.fromkeys([*(field.name for field in dataclasses.fields(config)), *config.attribute_map])


def _shape(section: ModelSection, config: Any) -> dict[str, Any]:
    """Return the common keys of the section, also by other names. Those that are null have Golf's meaning."""
    shape = {key: getattr(section, key) for key in (*_SHAPE, "tie_word_embeddings")}
    shape["num_key_value_heads"] = section.num_key_value_heads or section.num_attention_heads
    shape["intermediate_size"] = section.intermediate_size or 4 * section.hidden_size
    if "num_attention_heads" in _field_names(config):  # else head_dim is of something else, as in Mamba-2
        shape["head_dim"] = section.hidden_size // section.num_attention_heads
    return shape | {name: shape[key] for key, names in _ALSO.items() for name in names}


def _rate_key(field: str) -> str | None:
    """Return the key for a field of a config that is a rate: resid_pdrop, attention_dropout, ...; None for others."""
    is_rate = field.endswith(("dropout", "pdrop", "dropout_prob", "dropout_p"))
    if not is_rate or "classifier" in field or "summary" in field:
        return None
    return "attention_dropout" if "att" in field else "dropout"


def _load(name: str) -> PreTrainedConfig:
    """Load the config of a folder or of a repository on the Hub, without running code from there."""
    if not Path(name).is_dir() and "/" not in name:
        types = ["golf", *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
        raise UserError(
            f"model.architecture: {name} is not an architecture of transformers; did you mean {nearest(name, types)}?"
            " A folder or a Hub name works, too."
        )
    result = load_model_config(name, "model.architecture")
    if result.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"model.architecture: {name} holds a {result.model_type}, which is not a causal language model."
        )
    return result
