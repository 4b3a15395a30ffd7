"""The exported model: a folder that loads with AutoModelForCausalLM where hfgolf was never installed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export_model(model: GolfForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str) -> None:
    """Write safetensors, config with auto_map, modelling files, tokenizer, generation config and the card to `folder`.

    The folder is replaced as a whole, so that nobody loads a mixture of two exports.
    """
    GolfConfig.register_for_auto_class()  # what makes save_pretrained copy the modelling files
    GolfForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
