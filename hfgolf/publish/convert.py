"""An exported folder in the other format: Golf's own, or native, which needs no code from its repository.

Owns the choice for a push. native.py converts, export.py writes.
"""

from __future__ import annotations

from pathlib import Path

from hfgolf.publish.export import export_model
from hfgolf.publish.gguf import gguf_fields
from hfgolf.publish.load import load_exported
from hfgolf.publish.model_card import CHAT_SECTION, read_card, usage, with_usage
from hfgolf.publish.native import converted
from hfgolf.system.errors import UserError, writing


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
    try:
        gguf_fields(result, tokenizer)
        has_gguf = True
    except UserError:
        has_gguf = False
    sections = usage(result, location or str(output), CHAT_SECTION in card, has_gguf, was_golf=to == "native")
    pictures = [path for path in [folder / "loss.png"] if path.is_file()]
    with writing("the model", output):
        export_model(result, tokenizer, output, with_usage(card, sections), pictures)
    return sentence


def in_format(folder: Path, wanted: str, scratch: Path, location: str) -> tuple[Path, str | None]:
    """Return the folder to push, and what it holds if that was a choice: this folder, or a conversion in `scratch`.

    wanted: "native", or "auto": native if an architecture of transformers computes the same.
    Raises UserError if the folder cannot be converted to the format that is wanted.
    """
    if b'"model_type": "golf"' not in (folder / "config.json").read_bytes():
        return folder, None
    try:
        return scratch, convert_folder(str(folder), scratch, "native", location=location)
    except UserError as error:
        if wanted == "native":
            raise
        return folder, f"GolfForCausalLM: {error}"
