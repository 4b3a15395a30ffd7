"""Convert to and from GPT-2: a Golf model with GPT-2's options computes the same function.

Owns the table of names and the check that both models can express a config. Knows nothing about files or the Hub.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedConfig

from .configuration_golf import SWITCHES, GolfConfig
from .modeling_golf import GolfForCausalLM

_OUTER_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.wpe": "model.embed_positions",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}
_LAYER_NAMES = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attn.qkv_proj",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_GOLF_ACTIVATIONS = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu": "gelu",
    "silu": "silu",
    "relu2": "relu2",
}
# The values that the source's config must have for both models to compute the same function.
_REQUIRED_OF_GPT2: dict[str, tuple[Any, ...]] = {
    "activation_function": tuple(_GOLF_ACTIVATIONS),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_REQUIRED_OF_GOLF: dict[str, tuple[Any, ...]] = {
    "norm": ("layernorm",),
    "position_embedding": ("learned",),
    "activation": ("gelu_new", "gelu", "silu", "relu2"),
    "qk_norm": (False,),
    "embedding_norm": (False,),
    "logit_soft_cap": (None,),
    **{switch: (getattr(GolfConfig, switch),) for switch in SWITCHES if switch != "norm_weight"},
}


def golf_from_gpt2(gpt2: GPT2LMHeadModel) -> GolfForCausalLM:
    """Convert a GPT-2 model to a Golf model with the same logits and dtype, in evaluation mode.

    Raises:
        ValueError: the GPT-2 model uses an option that Golf does not have.
    """
    config = golf_config_from_gpt2(gpt2.config)
    golf = GolfForCausalLM(config).eval()
    nn.Module.to(golf, device=gpt2.device, dtype=gpt2.dtype)
    _copy_parameters(gpt2, golf, {theirs: ours for ours, theirs in _gpt2_names(config.num_hidden_layers).items()})
    return golf


def golf_config_from_gpt2(theirs: GPT2Config) -> GolfConfig:
    """Return the config of `golf_from_gpt2`'s model. Raises ValueError like it."""
    _require("golf_from_gpt2", theirs, _REQUIRED_OF_GPT2)
    _require("golf_from_gpt2", theirs, {"embd_pdrop": (theirs.resid_pdrop,)})
    return GolfConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.n_embd,
        num_hidden_layers=theirs.n_layer,
        num_attention_heads=theirs.n_head,
        intermediate_size=theirs.n_inner or 4 * theirs.n_embd,
        max_position_embeddings=theirs.n_positions,
        norm="layernorm",
        position_embedding="learned",
        activation=_GOLF_ACTIVATIONS[theirs.activation_function],
        use_bias=True,
        qk_norm=False,
        embedding_norm=False,
        tie_word_embeddings=theirs.tie_word_embeddings,
        dropout=theirs.resid_pdrop,
        attention_dropout=theirs.attn_pdrop,
        norm_eps=theirs.layer_norm_epsilon,
        initializer_range=theirs.initializer_range,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
    )


def gpt2_from_golf(golf: GolfForCausalLM) -> GPT2LMHeadModel:
    """Convert a Golf model with GPT-2's options to a GPT-2 model with the same logits and dtype, in evaluation mode.

    Zero biases stand in for none, and norm weights of one for norms without weights.

    Raises:
        ValueError: the Golf model uses an option that GPT-2 does not have.
    """
    ours = golf.config
    _require("gpt2_from_golf", ours, {**_REQUIRED_OF_GOLF, "num_key_value_heads": (ours.num_attention_heads,)})
    config = GPT2Config(
        vocab_size=ours.vocab_size,
        n_embd=ours.hidden_size,
        n_layer=ours.num_hidden_layers,
        n_head=ours.num_attention_heads,
        n_inner=ours.intermediate_size,
        n_positions=ours.max_position_embeddings,
        activation_function=ours.activation,
        resid_pdrop=ours.dropout,
        embd_pdrop=ours.dropout,
        attn_pdrop=ours.attention_dropout,
        layer_norm_epsilon=ours.norm_eps,
        initializer_range=ours.initializer_range or 0.02,
        tie_word_embeddings=ours.tie_word_embeddings,
        bos_token_id=ours.bos_token_id,
        eos_token_id=ours.eos_token_id,
        pad_token_id=ours.pad_token_id,
    )
    gpt2 = GPT2LMHeadModel(config).eval()
    nn.Module.to(gpt2, device=golf.device, dtype=golf.dtype)
    _copy_parameters(golf, gpt2, _gpt2_names(ours.num_hidden_layers))
    return gpt2


def _gpt2_names(num_layers: int) -> dict[str, str]:
    """Map Golf's module names to GPT-2's."""
    names = {ours: theirs for theirs, ours in _OUTER_NAMES.items()}
    for i in range(num_layers):
        names |= {f"model.layers.{i}.{ours}": f"transformer.h.{i}.{theirs}" for theirs, ours in _LAYER_NAMES.items()}
    return names


@torch.no_grad()
def _copy_parameters(source: nn.Module, target: nn.Module, names: dict[str, str]) -> None:
    targets = dict(target.named_parameters())
    for name, parameter in source.named_parameters():
        module, _, kind = name.rpartition(".")
        # GPT-2 stores linear weights as (in, out), but embeddings and the head as (out, in)
        is_transposed = kind == "weight" and parameter.ndim == 2 and ".h." in f"{name} {names[module]}"
        targets.pop(f"{names[module]}.{kind}").copy_(parameter.T if is_transposed else parameter)
    for name in targets:
        if not name.endswith((".bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
            raise ValueError(f"convert_gpt2: the source has no {name}.")
        targets[name].fill_(float(name.endswith(".weight")))


def _require(converter: str, config: PreTrainedConfig, required: dict[str, tuple[Any, ...]]) -> None:
    for name, allowed in required.items():
        if (value := getattr(config, name)) not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise ValueError(f"{converter}: the source has {name}={value!r}; only {choices} can be converted.")
