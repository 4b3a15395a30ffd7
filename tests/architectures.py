"""Tiny models of architectures other than Golf, built the way a run builds them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hfgolf.config.sections import BatchSection, ModelSection, RunConfig, TrainSection
from hfgolf.train.build import build_model

MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt2": {},
    "mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "olmo2": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "mixtral": MIXTURE,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "rwkv": {},
    "phi": {},
    "opt": {},
    "gpt_neox": {},
    "bloom": {},
    "granite": {"logits_scaling": 2.0},
}
"""{model type: what its tiny model needs beside the shape}."""
VOCABULARY = 61


def tiny_config(name: str, overrides: dict[str, Any] | None = None, **section: Any) -> RunConfig:
    """Return the config of a run that trains a tiny model of this architecture."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ModelSection(architecture=name, overrides=OVERRIDES.get(name, {}) | (overrides or {}), **shape | section)
    return RunConfig(
        model=model,
        batch=BatchSection(sequence_length=16, tokens_per_step=64),
        train=TrainSection(max_steps=1, mixed_precision="no"),
    )


def tiny_model(name: str, overrides: dict[str, Any] | None = None, **section: Any) -> PreTrainedModel:
    """Return such a model."""
    config = tiny_config(name, overrides, **section)
    return build_model(config, VOCABULARY, "cpu", bos_token_id=0, eos_token_id=0, pad_token_id=0)
