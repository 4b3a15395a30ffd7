"""Loading a model to use it: any causal model with its tokenizer, from a folder or the Hub.

Owns the question of trust: code that lies beside the weights is never executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from hfgolf.command_line import one_line
from hfgolf.config import join_words
from hfgolf.errors import UserError
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM


def load_exported(name_or_path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, in evaluation mode on the GPU where there is one.

    Golf models run with the classes of this installation, others with those of transformers.
    Raises UserError if there is no such model, only foreign code could run it, or weights are missing or not finite.
    """
    AutoConfig.register(GolfConfig.model_type, GolfConfig, exist_ok=True)
    AutoModelForCausalLM.register(GolfConfig, GolfForCausalLM, exist_ok=True)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its table of missing weights; one line below says it
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name_or_path, trust_remote_code=False, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError, ...: depends on what is broken
        raise UserError(f"--model: cannot load {name_or_path}: {_reason(error)}.") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, loading = loaded
    absent = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    if absent:  # transformers would go on with random weights in their place
        raise UserError(
            f"--model: {name_or_path} lacks weights that its config.json asks for: {join_words(absent[:3])}"
            f"{f' and {len(absent) - 3} more' if len(absent) > 3 else ''}; copy or export the model again."
        )
    sick = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if sick:
        raise UserError(f"--model: {sick} of {name_or_path} holds values that are not finite; export a sound model.")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs the code in its repository, which hfgolf never executes"
    folders = join_words(sorted(str(path) for path in Path("runs").glob("*/model"))) or "none"
    return f"{one_line(error)[:200]} (exported models here: {folders})"
