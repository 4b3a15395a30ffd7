"""Loading a model to use it: any causal model with its tokenizer, from a folder or the Hub.

Owns the question of trust: code that lies beside the weights is never executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from hfgolf.command_line import one_line
from hfgolf.config import join_words
from hfgolf.errors import UserError
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM

_JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_MAX_LAYERS = 1000  # transformers builds them before it looks at the weights; 10^9 take hours


def load_exported(name_or_path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, in evaluation mode on the GPU where there is one.

    Golf models run with the classes of this installation, others with those of transformers.
    Of its generation config only the end of a text is kept: who generates says how.
    Raises UserError if there is no such model, a file of it is damaged, only foreign code could run it, or its weights
    are not those that its config asks for, or not finite.
    """
    _check_json_files(Path(name_or_path))
    AutoConfig.register(GolfConfig.model_type, GolfConfig, exist_ok=True)
    AutoModelForCausalLM.register(GolfConfig, GolfForCausalLM, exist_ok=True)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its table of missing weights; one line below says it
    loading_what = ""
    try:
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
        layers = getattr(config, "num_hidden_layers", 1)
        if layers > _MAX_LAYERS:
            raise ValueError(f"config.json: num_hidden_layers {layers} is out of range; allowed: 1 to {_MAX_LAYERS}")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name_or_path, trust_remote_code=False, output_loading_info=True
        )
        loading_what = "the tokenizer of "
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
        tokenizer("a text")  # or a vocabulary of another kind would fail at the first word
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError, ...: depends on what is broken
        raise UserError(f"--model: cannot load {loading_what}{name_or_path}: {_reason(error)}.") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, loading = loaded
    absent = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    if absent:  # transformers would go on with random weights in their place
        raise UserError(
            f"--model: {name_or_path} lacks weights that its config.json asks for: {join_words(absent[:3])}"
            f"{f' and {len(absent) - 3} more' if len(absent) > 3 else ''}; copy or export the model again."
        )
    unused = sorted(loading["unexpected_keys"]) if isinstance(model, GolfForCausalLM) else []
    if unused:  # of others, transformers knows better what may be left over
        raise UserError(
            f"--model: {name_or_path} holds weights that its config.json has no place for: {join_words(unused[:3])}"
            f"{f' and {len(unused) - 3} more' if len(unused) > 3 else ''}; copy or export the model again."
        )
    sick = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if sick:
        raise UserError(f"--model: {sick} of {name_or_path} holds values that are not finite; export a sound model.")
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _check_json_files(folder: Path) -> None:
    """Raise UserError if a file of a model's folder is not the JSON object that it should be."""
    for path in (folder / name for name in _JSON_FILES):
        try:
            is_object = not path.is_file() or isinstance(json.loads(path.read_bytes()), dict)
        except (OSError, ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise UserError(f"--model: {path} is not a JSON object; copy or export the model again.")


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs the code in its repository, which hfgolf never executes"
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config.json says; copy or export the model again"
    folders = join_words(sorted(str(path) for path in Path("runs").glob("*/model"))) or "none"
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return f"{kind}{one_line(error)[:200]} (exported models here: {folders})"
