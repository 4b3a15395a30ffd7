"""A model with its tokenizer as one GGUF file, for llama.cpp and the programs built on it.

Owns which architectures and tokenizers llama.cpp computes as transformers does, and the names, shapes and types of
their tensors. native.py converts a Golf model to one of them first.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hfgolf.data.chat import stop_ids
from hfgolf.publish.load import load_exported, read_card
from hfgolf.publish.native import XIELU_OF_RELU2, converted
from hfgolf.system.durable import replace_file
from hfgolf.system.errors import UserError, writing
from hfgolf.system.wording import join_words, size

if TYPE_CHECKING:
    from gguf import GGUFWriter

_BLOCK = 32  # weights of a row that share a scale in q8_0
_MAX_F16 = 65504.0
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
_GENERATION_TAG = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp's architecture of this name has."""

    activations: tuple[str, ...]
    has_biases: bool = False
    rotates_pairs: bool = False
    """It rotates neighboring pairs of a head, transformers its two halves: rows of q and k move."""
    can_tie: bool = True
    """Else the head is a copy of the embedding."""


_ARCHITECTURES = {
    "apertus": _Architecture(("relu2", "xielu"), can_tie=False),  # which computes squared ReLU as xIELU
    "qwen3": _Architecture(("silu",)),
    "arcee": _Architecture(("relu2",), rotates_pairs=True),
    "llama": _Architecture(("silu",), has_biases=True, rotates_pairs=True),
}


def export_gguf(model: str, output: Path, quantization: str) -> str:
    """Write an exported model, a folder or a name on the Hub, with its tokenizer to a GGUF file.

    quantization: "f32", "f16", or "q8_0", which has 8 bits per weight and a scale for every 32; matrices whose rows are
    no multiple of 32 remain f16. Norms, biases and other vectors are always f32.

    Returns a sentence that says what it became. Raises UserError if the package gguf is missing, or if llama.cpp has no
    such architecture or tokenizer.
    """
    if find_spec("gguf") is None:
        raise UserError("--to gguf: needs the package gguf; run `pip install gguf`.")
    from gguf import GGUFWriter

    original, tokenizer = load_exported(model)
    card = read_card(model)
    native, sentence = converted(original.cpu(), "native", tokenizer(card, verbose=False)["input_ids"])
    fields = gguf_fields(native, tokenizer)
    partial = output.with_name(f".partial-{output.name}")
    try:
        with writing("--output", output):
            writer = GGUFWriter(partial, native.config.model_type)
            writer.add_name(output.stem)
            _add_shape(writer, native, quantization)
            _add_tokenizer(writer, fields, tokenizer, native.config.bos_token_id)
            for name, tensor in _tensors(native).items():
                _add_tensor(writer, name, tensor, quantization)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            replace_file(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return f"{sentence}; {quantization}, {size(output.stat().st_size)}"


def has_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether `export_gguf` can write a native model."""
    try:
        gguf_fields(model, tokenizer)
    except UserError:
        return False
    return True


def gguf_fields(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GgufTokenizer:
    """Return the tokenizer for the GGUF file of a native model. Raises UserError if llama.cpp can't express them."""
    config: Any = model.config
    known = _ARCHITECTURES.get(config.model_type)
    if known is None:
        names = join_words(_ARCHITECTURES, last=" and ")
        raise UserError(f"--to gguf: hfgolf writes only {names}; this model is {type(model).__name__}.")
    has_biases = any(name.endswith(".bias") for name in model.state_dict())
    rope = config.rope_parameters
    for setting, is_known in (
        (f"hidden_act {config.hidden_act}", config.hidden_act in known.activations),
        ("biases", known.has_biases or not has_biases),
        (f"rope_type {rope['rope_type']}", rope["rope_type"] in ("default", "linear")),
        ("rotation of a part of each head", rope.get("partial_rotary_factor", 1.0) == 1.0),
        ("a sliding window", "sliding_attention" not in (getattr(config, "layer_types", None) or ())),
    ):
        if not is_known:
            raise UserError(f"--to gguf: llama.cpp has no {config.model_type} with {setting}.")
    return gguf_tokenizer(tokenizer, config.vocab_size)


def _add_shape(writer: GGUFWriter, model: PreTrainedModel, quantization: str) -> None:
    import gguf

    config: Any = model.config
    head_dim = _head_dim(config)
    kinds = gguf.LlamaFileType
    writer.add_file_type({"f32": kinds.ALL_F32, "f16": kinds.MOSTLY_F16, "q8_0": kinds.MOSTLY_Q8_0}[quantization])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    if config.model_type == "apertus":
        state, layers = model.state_dict(), range(config.num_hidden_layers)
        for constant, of_relu2 in XIELU_OF_RELU2.items():
            values = [of_relu2] * len(layers)  # one per layer
            if config.hidden_act == "xielu":
                values = [state[f"model.layers.{layer}.mlp.act_fn.{constant}"].item() for layer in layers]
            getattr(writer, f"add_xielu_{constant}")(values)


def _add_tokenizer(
    writer: GGUFWriter, fields: GgufTokenizer, tokenizer: PreTrainedTokenizerBase, bos_of_model: int | None
) -> None:
    writer.add_tokenizer_model(fields.model)
    writer.add_tokenizer_pre(fields.pre)
    writer.add_token_list(fields.tokens)
    writer.add_token_types(fields.types)
    writer.add_token_merges(fields.merges)
    if fields.model == "llama":
        writer.add_token_scores([0.0] * len(fields.tokens))
        writer.add_add_space_prefix(False)
    ids = tokenizer("a")["input_ids"]
    eos = tokenizer.eos_token_id
    # one token for both is the separator of documents, which a prompt follows, as in generate.py
    bos = eos if bos_of_model == eos else tokenizer.bos_token_id
    for number, add in ((bos, writer.add_bos_token_id), (eos, writer.add_eos_token_id)):
        if number is not None:
            add(number)
    writer.add_add_bos_token(bos is not None and (bos == eos or ids[0] == bos))
    writer.add_add_eos_token(False)
    for number in stop_ids(tokenizer)[1:2] if eos is not None else []:
        writer.add_eot_token_id(number)
    if isinstance(tokenizer.chat_template, str):
        # comments, which trim spaces alike: {% generation %} is for training, and not every program knows it
        writer.add_chat_template(_GENERATION_TAG.sub(r"{#\1 \2#}", tokenizer.chat_template))


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights under GGUF's names, in fp32."""
    import gguf

    config: Any = model.config
    known = _ARCHITECTURES[config.model_type]
    architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if "act_fn" in name or (name == "lm_head.weight" and config.tie_word_embeddings and known.can_tie):
            continue
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if renamed is None:
            raise UserError(f"--to gguf: llama.cpp's {config.model_type} has no {name}.")
        if known.rotates_pairs and (".q_proj." in name or ".k_proj." in name):
            tensor = tensor.unflatten(0, (-1, 2, _head_dim(config) // 2)).transpose(1, 2).flatten(0, 2)
        tensors[renamed] = tensor.float().contiguous()
    return tensors


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, quantization: str) -> None:
    import gguf

    if tensor.dim() == 1 or quantization == "f32":
        writer.add_tensor(name, tensor.numpy())
    elif quantization == "q8_0" and tensor.shape[-1] % _BLOCK == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    else:
        largest = tensor.abs().max().item()
        if largest > _MAX_F16:
            raise UserError(f"--quantization: {name} holds {largest:g}, beyond {_MAX_F16:g}; use f32.")
        writer.add_tensor(name, tensor.numpy().astype(np.float16))


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


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
