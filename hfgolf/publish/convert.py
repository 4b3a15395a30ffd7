"""An exported folder in the other format: Golf's own, or native, which needs no code from its repository.

Owns the choice for a push. native.py converts, export.py writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from hfgolf.errors import UserError
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import export_model, position_limit
from hfgolf.publish.gguf import gguf_fields
from hfgolf.publish.load import load_exported
from hfgolf.publish.model_card import CHAT_SECTION, read_card, usage, with_usage
from hfgolf.publish.native import converted


def convert_folder(model: str, output: Path, to: str, xielu: bool = False, location: str | None = None) -> str:
    """Convert an exported model, a folder or a name on the Hub, to `to`: "golf" or "native"; write it to `output`.

    Returns a sentence that says what it became and how far the logits are apart. xielu: see `to_native`. location: in
    the card's example; None: `output`. Raises UserError if it cannot be loaded, converted or written.
    """
    folder = Path(model)
    original, tokenizer = load_exported(model)
    card = read_card(folder)
    ids = tokenizer(card, verbose=False)["input_ids"]  # it may be longer than the model's longest text
    result, sentence = converted(original.cpu(), to, ids, xielu)
    pictures = [path for path in [folder / "loss.png"] if path.is_file()]
    card = with_usage(card, _usage(result, tokenizer, location or str(output), is_chat=CHAT_SECTION in card))
    try:
        export_model(result, tokenizer, output, card, pictures)
    except OSError as error:
        raise UserError(f"{output}: cannot write the model ({error}).") from None
    return sentence


def in_format(folder: Path, wanted: str, scratch: Path, location: str) -> tuple[Path, str | None]:
    """Return the folder to push, and what it holds if that was a choice: this folder, or a conversion in `scratch`.

    wanted: "golf" or "native", or "auto": native if an architecture of transformers computes the same.
    Raises UserError if the folder cannot be converted to the format that is wanted.
    """
    is_golf = _model_type(folder) == GolfConfig.model_type
    if wanted == "golf" or not is_golf:
        return folder, None
    try:
        return scratch, convert_folder(str(folder), scratch, "native", location=location)
    except UserError as error:
        if wanted == "native":
            raise
        return folder, f"GolfForCausalLM: {error}"


def _model_type(folder: Path) -> Any:
    try:
        return json.loads((folder / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None


def _usage(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, location: str, is_chat: bool) -> str:
    try:
        gguf_fields(model, tokenizer)
        has_gguf = True
    except UserError:
        has_gguf = False
    config: Any = model.config
    linear = [name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    return usage(
        location,
        needs_code=isinstance(model, GolfForCausalLM),
        is_limited=position_limit(model) is not None,
        num_tokens=config.max_position_embeddings,
        has_gguf=has_gguf,
        targets=[name for name in dict.fromkeys(linear) if name != "lm_head"],
        is_chat=is_chat,
    )
