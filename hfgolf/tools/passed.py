"""Objects of the user's own that a run reads from files: text and weights, written once to the cache.

Their folders have the hash of their content as names, so that a run that resumes finds what it began with.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hfgolf.config import DataConfig
from hfgolf.data.files import cache_folder
from hfgolf.durable import replace_folder
from hfgolf.errors import UserError
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.train.init_from import weights_sha256


def text_file(data: Any, stated: Mapping[str, Any]) -> Path:
    """Write a Dataset, or one string per document, to a Parquet file and return its path.

    stated: values of the config. Raises UserError for other objects, or a Dataset without the column of text.
    """
    from datasets import Dataset

    column = stated.get("data.text_column") or DataConfig.text_column
    if not isinstance(data, Dataset):
        texts = [] if isinstance(data, str | bytes) else list(data)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UserError("data: must be a Dataset, a list with a string for each document, or a section as a dict.")
        data = Dataset.from_dict({column: texts})
    if not {column, stated.get("data.messages_column"), stated.get("data.ids_column")} & {*data.column_names}:
        raise UserError(
            f"data: the Dataset has no column {column}; name one of its own, data.text_column:"
            f" {', '.join(data.column_names)}."
        )
    digest = hashlib.sha256()
    for batch in data.with_format("arrow").iter(batch_size=1000):
        digest.update(repr([batch[name].to_pylist() for name in batch.column_names]).encode())
    return _once(stated, digest.hexdigest(), lambda folder: data.to_parquet(folder / "data.parquet")) / "data.parquet"


def weights_folder(model: Any, tokenizer: Any, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Write a model and its tokenizer to a folder; return the values of the config that start training from it.

    A class that transformers does not know is registered, in this process only. Raises UserError for other objects.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model: {type(model).__name__} is not a PreTrainedModel; subclass that of transformers.")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError("tokenizer: must be the model's own, a PreTrainedTokenizerFast; pass it beside the model.")
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not isinstance(model, GolfForCausalLM):
        AutoConfig.register(model.config.model_type, type(model.config), exist_ok=True)
        AutoModelForCausalLM.register(type(model.config), type(model), exist_ok=True)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    key = [weights_sha256(model), model.config.to_dict(), tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
    folder = _once(stated, hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest(), write)
    values: dict[str, Any] = {"model.init_from": str(folder)}
    return values if isinstance(model, GolfForCausalLM) else values | {"model.architecture": model.config.model_type}


def _once(stated: Mapping[str, Any], digest: str, write: Callable[[Path], Any]) -> Path:
    """Return the folder of the cache that a hash names; `write` fills it if it is not there."""
    data = DataConfig(**{"cache_dir": stated["data.cache_dir"]} if "data.cache_dir" in stated else {})
    folder = cache_folder(data).absolute() / "passed" / digest[:16]
    if not folder.is_dir():
        partial = folder.with_name(f".partial-{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        replace_folder(partial, folder)
    return folder
