"""Tiny Golf models with random weights, and their artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hfgolf.golf import artifact
from hfgolf.golf.grid import round_nearest, row_codes_of
from hfgolf.golf.script import config_differences, packed_script
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.layers_golf import GolfNetwork
from hfgolf.model.modeling_golf import GolfForCausalLM

VOCABULARY = 97


def build_model(**changes: Any) -> GolfForCausalLM:
    """Return a model whose every weight matters: output projections and head are not zero."""
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
    data = artifact.encode(config_differences(model.config), tensors, order).data
    _, decoded = artifact.decode(data, {name: state[name].shape for name in order})
    with torch.no_grad():
        for name, tensor in decoded.items():
            state[name].copy_(torch.from_numpy(getattr(tensor, "dequantized", lambda tensor=tensor: tensor)()))
    return data


@pytest.fixture
def golf_files(tmp_path: Path) -> Path:
    """Return a folder with score.py, an artifact, and 500 tokens of 0 to 3 bytes in documents of about 40."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCABULARY, 500)
    tokens[random.integers(0, 500, 12)] = 0
    tokens[0] = 0
    token_bytes = np.where(tokens == 0, 0, random.integers(0, 4, 500))
    (tmp_path / "score.py").write_bytes(packed_script(build_model().config))
    (tmp_path / "artifact.bin").write_bytes(encode_model(build_model()))
    (tmp_path / "tokens.bin").write_bytes(tokens.astype("<u2").tobytes())
    (tmp_path / "bytes.bin").write_bytes(token_bytes.astype("<u2").tobytes())
    return tmp_path
