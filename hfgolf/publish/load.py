"""Load a model for inference: any causal language model and its tokenizer, from a folder or the Hub.

Owns the trust policy: code stored next to the weights is never executed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from hfgolf.data.downloads import is_cached_only
from hfgolf.model.configuration_golf import MAX_LAYERS, GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.run.find_model import find_model, models_here
from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words, one_line

logger = logging.getLogger(__name__)

_JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def load_exported(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer in evaluation mode, on a GPU if there is one.

    A native form that was made from a Golf model becomes that Golf model again (see `as_trained`).

    name: what `find_model` takes; the model's `name_or_path` is what it meant. Only the special token ids of the
    generation config are kept: the caller decides how to generate. Raises UserError like `find_model` and `load_model`,
    or if the tokenizer cannot be loaded.
    """
    while True:
        found = find_model(name)
        try:
            return _load(found)
        except UserError:
            if found == name or Path(found).is_dir():
                raise
            # a run that trains has deleted this checkpoint, because it has newer ones


def _load(name_or_path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = load_model(name_or_path)
    with _loading(name_or_path, "--model", "the tokenizer of "):
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, trust_remote_code=False, local_files_only=is_cached_only(name_or_path)
        )
        tokenizer("a text")  # an invalid vocabulary fails only when it is used
    if getattr(model.config, "golf", None) is not None:
        from hfgolf.publish.native import as_trained  # late: it imports seven architectures

        model = as_trained(model)
    if isinstance(model, GolfForCausalLM):
        tokenizer.split_special_tokens = True  # like in training, text that spells a special token is text
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_model(name_or_path: str, key: str = "--model") -> Any:
    """Load a model in evaluation mode, on the CPU. key: what named it, for error messages.

    Golf models use the classes of this installation; others use those of transformers. Raises UserError if the model
    does not exist, one of its files is damaged, it needs code from its repository, its weights do not match its config,
    or a weight is not finite.
    """
    load_model_config(name_or_path, key)
    with _loading(name_or_path, key):  # without transformers' table of missing weights; one line below replaces it
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            trust_remote_code=False,
            local_files_only=is_cached_only(name_or_path),
            output_loading_info=True,
        )
    model, loading = loaded
    # transformers would replace missing weights by random ones
    missing = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    # for other models, transformers knows which leftover weights are harmless
    unused = loading["unexpected_keys"] if isinstance(model, GolfForCausalLM) else []
    for problem, names in (
        ("lacks weights that its config.json asks for", sorted(missing)),
        ("has weights that its config.json does not use", sorted(unused)),
    ):
        if names:
            shown = join_words(names, maximum=3)
            raise UserError(f"{key}: {name_or_path} {problem}: {shown}; copy or export the model again.")
    nonfinite = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if nonfinite:
        raise UserError(f"{key}: {nonfinite} of {name_or_path} has nonfinite values; export another checkpoint.")
    code = Path(name_or_path) / "modeling_golf.py"
    if code.is_file() and b"CACHE = " not in code.read_bytes():
        logger.warning(
            "%s holds code of an older hfgolf. Here it works; loaded with trust_remote_code on transformers 5.24 or"
            " newer, it writes wrong text. To renew it, export or push the model again.",
            name_or_path,
        )
    return model.eval()


def load_model_config(name_or_path: str, key: str = "--model") -> PreTrainedConfig:
    """Load a model's config without its weights. Raises UserError like `load_model`."""
    for path in (Path(name_or_path, name) for name in _JSON_FILES):
        try:
            is_object = not path.is_file() or isinstance(json.loads(path.read_bytes()), dict)
        except (OSError, ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise UserError(f"{key}: {path} is not a JSON object; copy or export the model again.")
    AutoConfig.register(GolfConfig.model_type, GolfConfig, exist_ok=True)
    AutoModelForCausalLM.register(GolfConfig, GolfForCausalLM, exist_ok=True)
    with _loading(name_or_path, key):
        cached_only = is_cached_only(name_or_path)
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=False, local_files_only=cached_only)
        layers = getattr(config, "num_hidden_layers", 1)
        if layers > MAX_LAYERS:
            raise ValueError(f"config.json: num_hidden_layers {layers} is out of range; allowed: 1 to {MAX_LAYERS}")
    return config


def read_card(name_or_path: str) -> str:
    """Return the card of a model, a folder or a name on the Hub; a title if there is none."""
    readme = file_beside(name_or_path, "README.md")
    return readme.read_text(encoding="utf-8") if readme else f"# {Path(name_or_path).name}\n"


def file_beside(name_or_path: str, file: str) -> Path | None:
    """Return a file that lies beside the weights of a model, a folder or a name on the Hub; None if there is none."""
    if Path(name_or_path).is_dir():
        path = Path(name_or_path, file)
        return path if path.is_file() else None
    with suppress(OSError, HfHubHTTPError):
        return Path(hf_hub_download(name_or_path, file, local_files_only=is_cached_only(name_or_path)))
    return None


@contextmanager
def _loading(name: str, key: str, part: str = "") -> Iterator[None]:
    """Silence transformers, and turn its errors into a UserError."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError, ...: depends on what is broken
        if Path(name).is_dir():
            raise UserError(f"{key}: cannot load {part}{name}: {_reason(error)}.") from None
        on_hub = f"no such folder here, and from the Hub: {_reason(error)}"
        raise UserError(f"{key}: cannot load {part}{name}: {on_hub}; {models_here(name)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs code from its repository, which hfgolf never executes"
    if "ignore_mismatched_sizes" in str(error):
        return "the shapes of its weights do not match its config.json; copy or export the model again"
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return f"{kind}{one_line(error)[:200]}"
