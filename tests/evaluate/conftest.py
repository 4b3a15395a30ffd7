"""A tiny model with random weights, a byte tokenizer, and a stream of two documents in three pieces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from hfgolf.config import TokenizerConfig
from hfgolf.data.tokenizer import find_tokenizer
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM


@dataclass(frozen=True)
class ListedStream:
    tokens: np.ndarray
    piece_tokens: np.ndarray
    piece_bytes: np.ndarray

    def read(self, places: np.ndarray) -> np.ndarray:
        return self.tokens[places]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return find_tokenizer(TokenizerConfig(kind="byte"), {}, Path("unused"))


@pytest.fixture
def build_model(tokenizer):
    def build(**changes: Any) -> GolfForCausalLM:
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
        eos = tokenizer.eos_token_id
        model = GolfForCausalLM(GolfConfig(**{"vocab_size": 257, "eos_token_id": eos, **shape, **changes}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return model

    return build


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture
def stream() -> ListedStream:
    """Pieces of 20, 33 and 11 tokens. The first and the last start with end-of-text, which counts no bytes."""
    tokens = np.random.default_rng(0).integers(0, 256, 64).astype(np.uint16)
    tokens[[0, 53]] = 256
    return ListedStream(tokens, np.array([20, 33, 11], np.uint32), np.array([19, 40, 10], np.uint32))
