"""From model.architecture to the config of a model of transformers.

Owns which keys of the config reach another architecture, and by which names. Does not know Golf's own keys.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfgolf.config import ModelSection, RunConfig
from hfgolf.errors import UserError
from hfgolf.wording import nearest, one_line

_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
# Names of the config's fields that attribute_map does not translate. Each is set if the config has it.
_ALSO = {"intermediate_size": ("n_inner", "ffn_dim"), "hidden_size": ("word_embed_proj_dim", "attention_hidden_size")}


def other_config(config: RunConfig, vocab_size: int, **token_ids: Any) -> PreTrainedConfig:
    """Return the config of a model that is not Golf. token_ids: bos_token_id, eos_token_id, pad_token_id.

    Raises UserError if there is no such architecture, or it has no such field.
    """
    section = config.model
    sizes = {"vocab_size": embedding_rows(config, vocab_size), "max_position_embeddings": config.max_positions}
    of_run: dict[str, Any] = sizes | token_ids
    name, shape = section.architecture, {}
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        cls: Any = CONFIG_MAPPING[name]
        names = _field_names(cls)
        values = _shape(section) | of_run
        if "num_attention_heads" not in names:
            del values["head_dim"]  # of something else, as in Mamba-2
        fields = {
            field: value for key, value in values.items() for field in (key, *_ALSO.get(key, ())) if field in names
        }
    else:
        base = _load(name)
        cls, names = type(base), _field_names(type(base))
        not_of_run = ("architectures", "auto_map", "dtype", "quantization_config")
        shape = {key: value for key, value in base.to_dict().items() if key not in not_of_run}
        fields = {key: value for key, value in of_run.items() if key in names}
    fields |= {field: rate for field in names if (rate := _dropout(section, field)) is not None}
    for field in section.overrides:
        if field not in names:
            raise UserError(
                f"model.overrides: {field} is no field of {cls.__name__}; did you mean {nearest(field, names)}?"
            )
    fields |= section.overrides
    fields = shape | {cls.attribute_map.get(key, key): value for key, value in fields.items()}
    try:
        result = cls.from_dict(fields)
    except Exception as error:  # a config may check itself in any way
        raise UserError(f"model.architecture: {name} rejects this shape ({one_line(error)[:200]}).") from None
    if result.is_encoder_decoder:
        raise UserError(f"model.architecture: {name} is an encoder and a decoder; choose a decoder alone.")
    return result


def embedding_rows(config: RunConfig, vocab_size: int) -> int:
    """Return the rows of the embedding for a tokenizer with so many entries. Raises UserError if they are too few."""
    rows = config.model.vocab_size or vocab_size
    if rows < vocab_size and config.data.messages_column is not None:
        return vocab_size  # the tokens of a chat template joined the vocabulary of model.init_from
    if rows < vocab_size:
        raise UserError(
            f"model.vocab_size: an embedding with {rows} rows is too small for a tokenizer with {vocab_size} entries."
        )
    return rows


def _field_names(cls: Any) -> dict[str, None]:
    """Return the names that a config takes, in order: its fields, and their common names."""
    return dict.fromkeys([*(field.name for field in dataclasses.fields(cls)), *cls.attribute_map])


def _shape(section: ModelSection) -> dict[str, Any]:
    """Return the common keys of the section. Those that are null have Golf's meaning."""
    shape = {key: getattr(section, key) for key in (*_SHAPE, "tie_word_embeddings")}
    shape["num_key_value_heads"] = section.num_key_value_heads or section.num_attention_heads
    shape["intermediate_size"] = section.intermediate_size or 4 * section.hidden_size
    return shape | {"head_dim": section.hidden_size // section.num_attention_heads}


def _dropout(section: ModelSection, field: str) -> float | None:
    """Return the rate for a field of a config that is one: resid_pdrop, attention_dropout, ...; None for others."""
    if not field.endswith(("dropout", "pdrop")) or "classifier" in field or "summary" in field:
        return None
    return section.attention_dropout if field.startswith("att") else section.dropout


def _load(name: str) -> PreTrainedConfig:
    """Load the config of a folder or of a repository on the Hub, without running code from there."""
    if not Path(name).is_dir() and "/" not in name:
        types = ["golf", *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
        raise UserError(
            f"model.architecture: {name} is no architecture of transformers; did you mean {nearest(name, types)}?"
            " A folder or a Hub name works, too."
        )
    try:
        result = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError: depends on what is wrong
        reason = (
            "it needs code from its repository, which hfgolf never executes"
            if "trust_remote_code" in str(error)
            else one_line(error)[:200]
        )
        raise UserError(f"model.architecture: cannot read the config of {name}: {reason}.") from None
    if result.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"model.architecture: {name} holds a {result.model_type}, which is no causal language model.")
    return result
