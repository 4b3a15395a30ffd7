"""A tokenizer as the fields of a GGUF file, for which llama.cpp returns the same ids.

Owns what llama.cpp can express: byte-level BPE with a pre-tokenizer that it knows, and the byte and char tokenizers.
Does not know the package gguf, or models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hfgolf.system.errors import UserError

# GGUF's token types
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
_SPACE = "\u2581"  # what llama.cpp writes for a space in a SentencePiece vocabulary
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES_WITH_REGEX, _BYTES = ("ByteLevel", False, True), ("ByteLevel", False, False)
# llama.cpp's names of pre-tokenizers, by their steps in tokenizer.json
_PRE_TOKENIZERS: dict[tuple[Any, ...], str] = {
    (_BYTES_WITH_REGEX,): "gpt-2",
    (("Digits", True), _BYTES_WITH_REGEX): "smollm",
    (("Split", rf"{_CONTRACTIONS}\p{{N}}{{1,3}}{_REST}"), _BYTES): "llama-bpe",
    (("Split", rf"{_CONTRACTIONS}\p{{N}}{_REST}"), _BYTES): "qwen2",
}
_IGNORES_MERGES = ("llama-bpe",)


@dataclass(frozen=True)
class GgufTokenizer:
    """The fields of a tokenizer, named like those of GGUF without `tokenizer.ggml.`; types: one per token."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]


def gguf_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> GgufTokenizer:
    """Return a tokenizer as llama.cpp reads it, with an unused entry for each row of the embedding beyond it.

    Raises UserError if llama.cpp has nothing like it, or if it has more than vocab_size entries.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise _inexpressible("it has no tokenizer.json")
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    model = rules["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("unk_token") is not None:
        raise _inexpressible(f"it is {model['type']}, not byte-level BPE")
    if rules["normalizer"] is not None and rules["normalizer"]["type"] != "NFC":  # which llama.cpp leaves out, too
        raise _inexpressible("it rewrites the text, with case operators or another normalizer")
    if len(tokenizer) > vocab_size:
        raise UserError(f"--model: its tokenizer has {len(tokenizer)} entries, but its embedding only {vocab_size}.")
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for entry, number in model["vocab"].items():
        tokens[number], types[number] = entry, _NORMAL
    for added in rules["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    if not model["merges"]:
        return _without_merges(tokens, types)
    pre = _PRE_TOKENIZERS.get(_steps(rules["pre_tokenizer"]))
    if pre is None or bool(model.get("ignore_merges")) != (pre in _IGNORES_MERGES):
        raise _inexpressible("it splits text into words in its own way")
    return GgufTokenizer(
        "gpt2", pre, tokens, types, [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    )


def _without_merges(tokens: list[str], types: list[int]) -> GgufTokenizer:
    """Return a byte tokenizer as BPE, and a char tokenizer as SentencePiece, which takes whole characters or bytes."""
    if all(len(token) == 1 for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL):
        impossible = next(token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL)
        # the list must not be empty, and no text is made of this symbol
        return GgufTokenizer("gpt2", "gpt-2", tokens, types, [f"{impossible} {impossible}"])
    byte_of = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    for number, kind in enumerate(types):
        if kind == _NORMAL:
            text = bytes(byte_of[symbol] for symbol in tokens[number])
            is_byte = len(text) == 1 and text != b" "
            tokens[number] = f"<0x{text[0]:02X}>" if is_byte else text.decode().replace(" ", _SPACE)
            types[number] = _BYTE if is_byte else _NORMAL
    if tokens.count(_SPACE) > 1:
        raise _inexpressible(f"it has an entry for {_SPACE} (U+2581), which llama.cpp takes for a space")
    return GgufTokenizer("llama", "default", tokens, types, [])


def _steps(pre_tokenizer: dict[str, Any] | None) -> tuple[Any, ...]:
    """Return the steps of a pre-tokenizer with what decides where it splits."""
    if pre_tokenizer is None:
        return ()
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return tuple(step for part in pre_tokenizer["pretokenizers"] for step in _steps(part))
    if kind == "ByteLevel":
        return ((kind, pre_tokenizer["add_prefix_space"], pre_tokenizer.get("use_regex", True)),)
    if kind == "Digits":
        return ((kind, pre_tokenizer["individual_digits"]),)
    if kind == "Split" and pre_tokenizer["behavior"] == "Isolated" and not pre_tokenizer["invert"]:
        return ((kind, pre_tokenizer["pattern"].get("Regex")),)
    return ((kind,),)


def _inexpressible(reason: str) -> UserError:
    return UserError(f"--to gguf: llama.cpp has no tokenizer like this one: {reason}; export it as native.")
