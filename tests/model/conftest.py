"""Tiny models without zero weights, so that every branch contributes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2_STYLE = {
    "norm": "layernorm",
    "position_embedding": "learned",
    "activation": "gelu_new",
    "use_bias": True,
    "qk_norm": False,
    "embedding_norm": False,
}
# One entry per config option that differs from the modern default, then the combinations that interact.
OPTIONS = {
    "modern": {},
    "layernorm": {"norm": "layernorm"},
    "learned": {"position_embedding": "learned"},
    "no_positions": {"position_embedding": "none"},
    "gelu": {"activation": "gelu"},
    "gelu_new": {"activation": "gelu_new"},
    "silu": {"activation": "silu"},
    "swiglu": {"activation": "swiglu", "intermediate_size": 48},
    "biases": {"use_bias": True},
    "layernorm_biases": {"norm": "layernorm", "use_bias": True},
    "no_qk_norm": {"qk_norm": False},
    "no_embedding_norm": {"embedding_norm": False},
    "soft_cap": {"logit_soft_cap": 5.0},
    "untied": {"tie_word_embeddings": False},
    "untied_learned_no_norm": {
        "tie_word_embeddings": False,
        "position_embedding": "learned",
        "embedding_norm": False,
    },
    "grouped": {"num_key_value_heads": 2},
    "one_key_value_head": {"num_key_value_heads": 1},
    "initializer_range": {"initializer_range": 0.1},
    "gpt2": GPT2_STYLE,
}


@pytest.fixture(params=list(OPTIONS.values()), ids=list(OPTIONS))
def option(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture
def all_options() -> dict[str, dict[str, Any]]:
    return OPTIONS


@pytest.fixture
def gpt2_style() -> dict[str, Any]:
    return GPT2_STYLE


@pytest.fixture
def build_golf() -> Callable[..., GolfForCausalLM]:
    def build(*, fresh: bool = False, **options: Any) -> GolfForCausalLM:
        torch.manual_seed(0)
        golf = GolfForCausalLM(GolfConfig(**{**TINY, **options}))
        if not fresh:  # as after training: no weight is exactly zero or one
            with torch.no_grad():
                for parameter in golf.parameters():
                    parameter.add_(0.4 * torch.randn_like(parameter))
        return golf.eval()

    return build


@pytest.fixture
def token_ids() -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], (3, 17), generator=torch.Generator().manual_seed(1))
