"""The format of an exported folder: native, which needs no code from its repository, or Golf's own.

Owns the choice for an export and for a push, and converts folders. native.py converts models, export.py writes.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedModel

from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import export_model
from hfgolf.publish.gguf import has_gguf
from hfgolf.publish.load import file_beside, load_exported, read_card
from hfgolf.publish.model_card import CHAT_SECTION, usage, with_usage
from hfgolf.publish.native import converted
from hfgolf.system.errors import UserError, writing


def in_best_form(model: PreTrainedModel, real_ids: list[int]) -> tuple[PreTrainedModel, str]:
    """Return a model as a folder is to hold it: native if an architecture of transformers computes the same, else as it
    is; and what it is, for a Golf model with the reason. real_ids: of a text that the model may be asked about.
    """
    if not isinstance(model, GolfForCausalLM):
        return model, type(model).__name__
    try:
        return converted(model, "native", real_ids)
    except UserError as error:
        return model, f"GolfForCausalLM, which needs trust_remote_code: {error}"


def convert_folder(model: str, output: Path, to: str, location: str | None = None) -> str:
    """Convert an exported model, a folder or a name on the Hub, to `to`: "golf" or "native"; write it to `output`.

    Returns a sentence that says what it became and how far the logits are apart. location: in the card's example; None:
    `output`. Raises UserError if it cannot be loaded, converted or written.
    """
    original, tokenizer = load_exported(model)  # as Golf, if it was
    card = read_card(model)
    ids = tokenizer(card, verbose=False)["input_ids"]  # it may be longer than the model's longest text
    result, sentence = converted(original.cpu(), to, ids)
    sections = usage(result, location or str(output), CHAT_SECTION in card, has_gguf(result, tokenizer))
    picture = file_beside(model, "loss.png")
    with writing("the model", output):
        export_model(result, tokenizer, output, with_usage(card, sections), [picture] if picture else [])
    return sentence


def in_format(folder: Path, wanted: str, scratch: Path, location: str) -> tuple[Path, str | None]:
    """Return the folder to push, and what it holds if that was a choice: this folder, or a conversion in `scratch`.

    wanted: "golf", "native", or "auto": native if an architecture of transformers computes the same.
    Raises UserError if the folder cannot be converted to the format that is wanted.
    """
    config = json.loads((folder / "config.json").read_bytes())
    is_golf = config.get("model_type") == "golf"
    if is_golf == (wanted == "golf") or not (is_golf or "golf" in config):
        return folder, None
    try:
        return scratch, convert_folder(str(folder), scratch, "native" if is_golf else "golf", location=location)
    except UserError as error:
        if wanted != "auto":
            raise
        return folder, f"GolfForCausalLM: {error}"
