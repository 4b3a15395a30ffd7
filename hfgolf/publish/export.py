"""The exported model: a folder that loads with AutoModelForCausalLM, even if hfgolf is not installed.

Owns the content of that folder. Does not know the run that made the model.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from hfgolf.data.chat import stop_ids
from hfgolf.data.tokenizer import text_start
from hfgolf.system.durable import new_folder
from hfgolf.system.errors import writing


def export_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str, pictures: Sequence[Path] = ()
) -> None:
    """Write weights, config, tokenizer, generation config and the card to `folder`; for Golf, also the modeling files.

    pictures: image files that the card shows; they are copied next to it. The folder is replaced in one step, so nobody
    can load a mixture of two exports.
    """
    with new_folder(folder) as partial:
        model.save_pretrained(partial)  # also copies the modeling files, because of their _auto_class
        for weights in partial.glob("*.safetensors"):
            shutil.copymode(partial / "config.json", weights)  # safetensors makes files that only their owner can read
        _save_all_but_weights(model, tokenizer, partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        for picture in pictures:
            shutil.copyfile(picture, partial / picture.name)


def supporting_files(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return {file name: content} of everything needed to load the weights, except the weights themselves.

    The same model and tokenizer give the same bytes. Raises UserError if temporary files cannot be written.
    """
    with writing("TMPDIR", Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as folder:
        _save_all_but_weights(model, tokenizer, Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _save_all_but_weights(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    config = copy.deepcopy(model.config)  # save_pretrained adds fields that the model should not keep
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)  # type: ignore[arg-type]  # its docstring also allows a config
    config.save_pretrained(folder)
    _remove_nulls(folder / "config.json", config)
    _generation_config(model, tokenizer).save_pretrained(folder)
    tokenizer = copy.deepcopy(tokenizer)
    for key in ("is_local", "local_files_only"):  # otherwise the file records how this tokenizer was loaded
        tokenizer.init_kwargs.pop(key, None)
    # An appended end of text is one token, as fine-tuning needs it to learn where to stop. hfgolf's own tokenizers take
    # it as plain text, because a corpus may spell it.
    tokenizer.init_kwargs.pop("split_special_tokens", None)
    if isinstance(tokenizer.chat_template, dict):  # others would need a folder of their own
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    tokenizer.save_pretrained(folder)


def _remove_nulls(path: Path, config: PreTrainedConfig) -> None:
    """Remove the fields of a config.json that are null by default: some programs take null for a value."""
    null_by_default = {field.name for field in dataclasses.fields(config) if field.default is None}
    fields = json.loads(path.read_bytes())
    kept = {name: value for name, value in fields.items() if value is not None or name not in null_by_default}
    path.write_text(f"{json.dumps(kept, indent=2)}\n")


def _generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return the defaults of generate() and pipeline(). They sample, because small models repeat with greedy search.

    They set a length only if there is a hard limit: max_new_tokens would override the caller's max_length.
    """
    eos, stops = tokenizer.eos_token_id, stop_ids(tokenizer)
    # beside this file, generate() does not ask config.json
    no_cache = {"use_cache": False} if getattr(model.config, "use_cache", None) is False else {}
    return GenerationConfig(
        **no_cache,
        bos_token_id=text_start(tokenizer)[0],
        eos_token_id=stops if len(stops) > 1 else eos,
        pad_token_id=eos,
        do_sample=True,
        temperature=0.8,
        top_k=50,
        max_length=position_limit(model),
    )


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the number of learned positions, which no text can exceed; None if there is no such limit."""
    config: Any = model.config
    if hasattr(config, "position_embedding"):  # Golf, whose other tables are not for positions
        is_learned = config.position_embedding == "learned"
    else:
        limit, ids = getattr(config, "max_position_embeddings", math.inf), model.get_input_embeddings()
        tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not ids)
        is_learned = any(table.num_embeddings >= limit for table in tables)
    return int(config.max_position_embeddings) if is_learned else None
