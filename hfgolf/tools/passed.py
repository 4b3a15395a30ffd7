"""Objects of the user's own that a run reads from files: text and weights, written once to the cache.

Their folders have the hash of their content as names, so that a run that resumes finds what it began with.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
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
from hfgolf.publish.load import load_model
from hfgolf.train.init_from import FROZEN, weights_sha256
from hfgolf.wording import join_words, one_line, shortened

if TYPE_CHECKING:
    from datasets import Dataset

_ALLOWED = "pass a Dataset, a DataFrame, a list with a string for each document, or a section as a dict"


def text_file(data: Any, stated: Mapping[str, Any]) -> Path:
    """Write a table, or one string per document, to a Parquet file and return its path.

    data: a Dataset, a DataFrame, a Table or another object with Arrow's stream protocol, of which the column of text is
    read; or strings or rows as dicts in a list, a Series, an array or a generator. stated: values of the config. Raises
    UserError for other objects, or for a table without the column of text.
    """
    from datasets import Dataset

    column = stated.get("data.text_column") or DataConfig.text_column
    if not isinstance(data, Dataset):
        data = _dataset(data, column)
    if not len(data):
        raise UserError(f"data: there is nothing in it; {_ALLOWED}.")
    if not {column, stated.get("data.messages_column"), stated.get("data.ids_column")} & {*data.column_names}:
        names = join_words(data.column_names, maximum=9) or "it has none"
        raise UserError(f"data: there is no column {column}; rename one to it, or name it in a config ({names}).")
    digest = hashlib.sha256()
    for batch in data.with_format("arrow").iter(batch_size=1000):
        digest.update(repr([batch[name].to_pylist() for name in batch.column_names]).encode())
    return _once(stated, digest.hexdigest(), lambda folder: data.to_parquet(folder / "data.parquet")) / "data.parquet"


def _dataset(data: Any, column: str) -> Dataset:
    """Return the rows of an object that is no Dataset; strings and arrays are the column of text."""
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

    kind = type(data).__name__
    if is_splits(data):
        raise UserError(f"data: {kind} has {join_words(data)}; pass one of them, as in data[{next(iter(data))!r}].")
    if isinstance(data, str | bytes | os.PathLike) or hasattr(data, "read"):
        raise UserError(f"data: {shortened(data)} is one {kind}; pass paths as files, or a list of texts as data.")
    if isinstance(data, Mapping | Set | IterableDataset):
        raise UserError(f"data: {kind} has no order or no known end; {_ALLOWED}.")
    try:
        if (names := getattr(data, "column_names", getattr(data, "columns", None))) is not None:
            if column in [*names]:  # what is in the others does not matter
                data = data.select([column]) if hasattr(data, "select") else data[[column]]
            return Dataset(pa.table(data))
        items = data.to_pylist() if hasattr(data, "to_pylist") else list(data)
        wanted = Mapping if items and isinstance(items[0], Mapping) else str
        for number, item in enumerate(items):
            if not isinstance(item, wanted):
                raise TypeError(f"item {number} is {shortened(item)}")
        if wanted is str and items and all(len(item) < 1000 and os.path.exists(item) for item in items):
            raise TypeError(f"{shortened(items[0])} is a file; pass paths as files")
        if wanted is str:
            return Dataset.from_dict({column: items})
        return Dataset.from_list([{column: row.get(column)} for row in items] if column in items[0] else items)
    except UnicodeEncodeError as error:
        raise UserError(f"data: {shortened(error.object)} is not text ({one_line(error)}); remove that.") from None
    except (TypeError, ValueError, NotImplementedError, pa.ArrowException) as error:
        raise UserError(f"data: {kind} cannot be read: {one_line(error)[:200]}; {_ALLOWED}.") from None


def is_splits(data: Any) -> bool:
    """Return whether an object is a dict of tables, such as a DatasetDict."""
    return isinstance(data, Mapping) and any(
        hasattr(value, "column_names") or hasattr(value, "columns") for value in data.values()
    )


def weights_folder(model: Any, tokenizer: Any, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Write a model and its tokenizer to a folder; return the values of the config that start training from it.

    Parameters without requires_grad stay as they are. Weights of 16 bits become fp32. A class that transformers does
    not know is registered, in this process only. Raises UserError for other objects, and for a model that computes
    something else than what its class makes of its config and its weights.
    """
    if not isinstance(model, PreTrainedModel):
        advice = (
            ' name weights as model={"init_from": ...}' if isinstance(model, str) else " subclass transformers' own"
        )
        raise UserError(f"model: {type(model).__name__} is not a PreTrainedModel;{advice}.")
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if len(frozen) == len([*model.parameters()]):
        raise UserError("model: all of its parameters are frozen (requires_grad is False); set it for those to train.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("model: it is on the meta device, without weights; pass one that has some.")
    if getattr(model, "is_quantized", False) or getattr(model, "_hf_peft_config_loaded", False):
        raise UserError("model: it is quantized or has adapters; pass a plain model, with its adapters merged.")
    _require_tokenizer(tokenizer)
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not isinstance(model, GolfForCausalLM):
        AutoConfig.register(model.config.model_type, type(model.config), exist_ok=True)
        AutoModelForCausalLM.register(type(model.config), type(model), exist_ok=True)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if frozen:
            (folder / FROZEN).write_text(json.dumps(frozen))

    buffers = {name: str(buffer.tolist()) for name, buffer in model.named_buffers()}
    digest = _hash(weights_sha256(model), model.config.to_dict(), *_tokenizer_key(tokenizer), buffers, frozen)
    folder = _once(stated, digest, write)
    _require_same(model, load_model(str(folder), "model"))
    values: dict[str, Any] = {"model.init_from": str(folder)}
    return values if isinstance(model, GolfForCausalLM) else values | {"model.architecture": model.config.model_type}


@torch.no_grad()
def _require_same(model: Any, again: Any) -> None:
    """Raise UserError if a model, saved and loaded again, has other logits: it has hooks, say, or replaced modules."""
    was_training = {module for module in model.modules() if module.training}
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        logits = model.eval()(input_ids=ids).logits.float().cpu()
    except Exception as error:  # whatever a model raises that is no causal language model
        reason = f"{type(error).__name__}: {one_line(error)[:200]}"
        raise UserError(f"model: {type(model).__name__} computes no logits from input_ids ({reason}).") from None
    finally:
        for module in was_training:
            module.training = True
    difference = (again.to(model.dtype)(input_ids=ids.cpu()).logits.float() - logits).abs().max().item()
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.1) * max(1.0, logits.abs().max().item())
    if not difference <= tolerance:
        raise UserError(
            f"model: saved and loaded again, its logits differ by {difference:.2g}; what is not in its config and its"
            " weights would be lost, such as hooks or replaced modules. Make it a class of its own."
        )


def tokenizer_folder(tokenizer: Any, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Write a tokenizer to a folder; return the values of the config that name it. Raises UserError for others."""
    _require_tokenizer(tokenizer)
    folder = _once(stated, _hash(*_tokenizer_key(tokenizer)), tokenizer.save_pretrained)
    return {"tokenizer.kind": "pretrained", "tokenizer.name_or_path": str(folder)}


def _require_tokenizer(tokenizer: Any) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError("tokenizer: must be a PreTrainedTokenizerFast, and the model's own if a model is passed.")


def _tokenizer_key(tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    return [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map]


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


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
