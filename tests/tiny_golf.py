"""Tiny Golf models with random weights, and their artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hfgolf.golf import artifact
from hfgolf.golf.curvature import Curvature, measure_curvature
from hfgolf.golf.decoder import read_config, read_tensors
from hfgolf.golf.grid import round_nearest, row_codes_of
from hfgolf.golf.script import config_differences
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.layers_golf import GolfNetwork
from hfgolf.model.modeling_golf import GolfForCausalLM

VOCABULARY = 97
MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "gpt2": {
        "norm": "layernorm",
        "position_embedding": "learned",
        "activation": "gelu_new",
        "use_bias": True,
        "qk_norm": False,
        "embedding_norm": False,
    },
    "grouped": {"num_key_value_heads": 1, "logit_soft_cap": 5.0, "activation": "swiglu"},
    "untied": {"tie_word_embeddings": False, "position_embedding": "none", "intermediate_size": 48, "norm_eps": 1e-3},
    "baseline": {
        "norm_weight": False,
        "query_gain": 1.5,
        "branch_scale": True,
        "embedding_residual": True,
        "unet_skips": "add",
        "logit_soft_cap": 30.0,
        "num_key_value_heads": 1,
    },
    "record": {
        "num_hidden_layers": 5,
        "norm_weight": False,
        "norm_depth_scale": True,
        "rope_dims": 8,
        "activation": "leaky_relu2",
        "activation_slope": 0.3,
        "query_gain": 5.0,
        "branch_scale": True,
        "embedding_residual": True,
        "unet_skips": "gated",
        "exclude_self_value": 5,
        "parallel_from": 3,
        "lanes": True,
        "loop": [1, 2, 3],
        "head_gate": 12,
        "head_gate_scale": 0.5,
        "smear_gate": 12,
        "attention_span": "document",
        "bos_token_id": 3,
        "logit_soft_cap": 30.0,
        "logit_soft_cap_negative": 20.0,
    },
    "others": {
        "parallel_from": 1,
        "bigram_buckets": 50,
        "bigram_size": 8,
        "value_embedding_layers": 1,
        "value_embedding_size": 8,
        "embedding_size": 16,
        "logit_soft_cap": 10.0,
        "soft_cap_form": "poly5",
    },
    "dropout": {"dropout": 0.5, "attention_dropout": 0.5, "rope_theta": 100.0},
}


def build_model(**changes: Any) -> GolfForCausalLM:
    """Return a model in which every weight matters: output projections and head are nonzero."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "eos_token_id": 0,
    }
    model = GolfForCausalLM(GolfConfig(**(shape | changes)))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model.eval()


def decode(data: bytes, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Any], dict[str, artifact.Tensor]]:
    """Return the config of an artifact, and its tensors by name. shapes: of the state dict, in its order."""
    return read_config(data), dict(zip(shapes, read_tensors(data, list(shapes.values())), strict=True))


def encode_model(model: GolfForCausalLM) -> bytes:
    """Round a model's matrices to the nearest grid points of 0.2 standard deviations, load them back, and encode it."""
    state = model.state_dict()
    order = list(GolfNetwork(model.config).state_dict())
    tensors: dict[str, Any] = {}
    for name in order:
        weight = state[name].numpy()
        if weight.ndim == 2:
            tensors[name] = round_nearest(weight, row_codes_of(np.full(len(weight), 0.2 * weight.std())))
        else:
            tensors[name] = weight
    data = artifact.encode(artifact.config_header(config_differences(model.config)), tensors).data
    _, decoded = decode(data, {name: state[name].shape for name in order})
    with torch.no_grad():
        for name, tensor in decoded.items():
            state[name].copy_(torch.from_numpy(getattr(tensor, "dequantized", lambda tensor=tensor: tensor)()))
    return data


def measured_model(std: float, rows: int) -> tuple[GolfForCausalLM, dict[str, Curvature]]:
    """Return a model with random weights, and its curvature on some rows of 32 random tokens."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = GolfForCausalLM(GolfConfig(**shape, max_position_embeddings=32)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    ids = torch.randint(96, (rows, 33), generator=torch.Generator().manual_seed(1))
    return model, measure_curvature(model, [{"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:]}])
