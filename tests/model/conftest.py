"""Tiny models without zero weights, so that every branch contributes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM

TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY["max_position_embeddings"] = 64
GPT2_STYLE: dict[str, Any] = {"norm": "layernorm", "position_embedding": "learned", "activation": "gelu_new"}
GPT2_STYLE |= {"use_bias": True, "qk_norm": False, "embedding_norm": False}
# with the proportions of configs/golf_baseline.yaml
BASELINE: dict[str, Any] = {"num_hidden_layers": 5, "num_key_value_heads": 2, "intermediate_size": 64}
BASELINE |= {"norm_weight": False, "norm_eps": 1.1920929e-07, "query_gain": 1.5, "branch_scale": True}
BASELINE |= {"embedding_residual": True, "unet_skips": "add", "matrix_init": "uniform"}
BASELINE |= {"tied_embedding_std": 0.005, "logit_soft_cap": 30.0}
# with those of configs/golf_record.yaml
RECORD = BASELINE | {"num_hidden_layers": 6, "intermediate_size": None, "query_gain": 5.0, "unet_skips": "gated"}
RECORD |= {"matrix_init": "orthogonal", "activation": "leaky_relu2", "rope_dims": 2, "norm_depth_scale": True}
RECORD |= {"exclude_self_value": "all", "parallel_from": 4, "lanes": True, "loop": [2, 3, 3], "head_gate": 12}
RECORD |= {"head_gate_scale": 0.5, "smear_gate": 12, "attention_span": "document", "bos_token_id": 7}
# Each option that differs from the modern default, alone or in a combination.
OPTIONS = {
    "modern": {},
    "learned": {"position_embedding": "learned"},
    "no_positions": {"position_embedding": "none"},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu"},
    "swiglu": {"activation": "swiglu", "intermediate_size": 48},
    "biases": {"use_bias": True},
    "soft_cap": {"logit_soft_cap": 5.0},
    "untied_learned_no_norm": {"tie_word_embeddings": False, "position_embedding": "learned", "embedding_norm": False},
    "grouped": {"num_key_value_heads": 2},
    "one_key_value_head": {"num_key_value_heads": 1},
    "initializer_range": {"initializer_range": 0.1},
    "gpt2": GPT2_STYLE,
    # golf: its switches as far as they are not in the two stacks of the challenge, then these in small
    "layernorm_without_weight": {"norm": "layernorm", "norm_weight": False},
    "exclude_self_value": {"exclude_self_value": 1, "num_key_value_heads": 2},
    "parallel": {"parallel_from": 1},
    "lanes": {"parallel_from": 1, "lanes": True},
    "loop_of_the_middle": {"loop": [1, 1, 3], "num_hidden_layers": 3, "unet_skips": "gated"},
    "loop_not_active": {"loop": [0, 0, 2], "loop_active": False},
    "head_gate": {"head_gate": 12, "head_gate_scale": 0.5, "num_key_value_heads": 2},
    "transparent_head_gate": {"head_gate": 12, "head_gate_peak": 2.0},
    "smear_gate": {"smear_gate": 12, "bos_token_id": 7},
    "document": {"attention_span": "document", "bos_token_id": 7},
    "bigram": {"bigram_buckets": 50, "bigram_size": 6},
    "value_embedding": {"value_embedding_layers": 1, "value_embedding_size": 6, "num_key_value_heads": 2},
    "embedding_size": {"embedding_size": 12},
    "embedding_size_untied": {"embedding_size": 12, "tie_word_embeddings": False},
    "poly5": {"logit_soft_cap": 5.0, "soft_cap_form": "poly5"},
    "two_caps": {"logit_soft_cap": 5.0, "logit_soft_cap_negative": 3.0},
    "golf_baseline": BASELINE,
    "golf_record": RECORD,
}


@pytest.fixture(params=list(OPTIONS.values()), ids=list(OPTIONS))
def option(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture
def all_options() -> dict[str, dict[str, Any]]:
    return OPTIONS


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
