"""Helpers for the tests of publish/: a tiny model, its figures, and its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hfgolf.config.sections import RunConfig, TokenizerSection
from hfgolf.data.tokenizer import find_tokenizer
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.load import load_exported
from hfgolf.publish.model_card import model_card

ROOT = Path(__file__).parents[1]
SUMMARY = {
    "step": 5,
    "steps": 6,
    "tokens": 24576,
    "val_loss": 3.25,
    "val_perplexity": 25.79,
    "val_bits_per_byte": 1.5,
    "val_tokens": 1000,
    "val_bytes": 3126,
    "parameters": 27456,
    "device": "an abacus",
    "commit": "0123abc",
    "model": "runs/tiny/model",
    "sample": "def f():\n    ```\n{{ summary }}\n---",
}

USE = """
import json, sys, warnings
sys.modules["hfgolf"] = None  # makes importing it fail, even if it is installed
import torch, transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

name, folder = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)  # otherwise transformers asks
ids = load_file(folder + "/ids.safetensors")["ids"]
with torch.no_grad():
    save_file({"logits": model(ids).logits}, folder + "/logits.safetensors")
write = pipeline("text-generation", model=name, trust_remote_code=True)
greedy = write("naïve 🌍", max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
default = tokenizer(write("a")[0]["generated_text"])["input_ids"]
text = tokenizer.decode(tokenizer("é <|endoftext|>")["input_ids"])
print(json.dumps({"greedy": greedy, "num_default": len(default), "text": text}))
"""
"""What somebody without hfgolf does with an exported folder, whose name comes first, and tensors in another folder."""


def build_tiny(**changes: Any) -> tuple[Any, Any]:
    tokenizer = find_tokenizer(TokenizerSection(kind="byte"), {}, Path("unused"))
    assert tokenizer is not None
    tokenizer.model_max_length = 32
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    } | changes
    model = GolfForCausalLM(
        GolfConfig(
            **{"vocab_size": len(tokenizer), "bos_token_id": eos, "eos_token_id": eos, "pad_token_id": eos} | shape
        )
    )
    for parameter in model.parameters():  # output projections start at zero, which would hide the blocks
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval(), tokenizer


def card_of(config: RunConfig, summary: dict[str, Any]) -> str:
    return model_card(config, summary, build_tiny()[0])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def exported_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of an exported folder under Golf's names, whatever its form."""
    return load_exported(str(folder))[0].cpu().state_dict()
