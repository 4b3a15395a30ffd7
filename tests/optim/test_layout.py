"""The kinds of the parameters of any architecture, and the rules they follow."""

from __future__ import annotations

import pytest
from architectures import OVERRIDES, tiny_model
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.pytorch_utils import Conv1D

from hfgolf.config.sections import OptimSection
from hfgolf.optim.groups import build_optimizer, group_rows, parameter_groups
from hfgolf.optim.layout import layout, parameter_kinds


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", OVERRIDES)
def test_each_parameter_is_in_exactly_one_group(name, is_tied):
    model = tiny_model(name, tie_word_embeddings=is_tied)
    groups = parameter_groups(model.named_parameters(), OptimSection(), **layout(model))
    members = [member for group in groups for member, _ in group["params"]]
    assert sorted(members) == sorted(name for name, _ in model.named_parameters())
    kinds = parameter_kinds(model)
    assert list(kinds) == [key for key, _ in model.named_parameters()]
    weights = {id(p): kinds[key] for key, p in model.named_parameters()}
    assert weights[id(model.get_input_embeddings().weight)] == "embedding"
    head = model.get_output_embeddings().weight
    assert weights[id(head)] == ("embedding" if head is model.get_input_embeddings().weight else "head")
    for group in groups:
        assert (group["rule"] == "muon") == (group["kind"] == "matrix" and group["params"][0][1].ndim == 2)
        assert (group["weight_decay"] > 0) == (group["kind"] == "matrix")
    linear = {
        key for key, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D) and part.weight is not head
    }
    assert {f"{key}.weight" for key in linear} <= {key for key, kind in kinds.items() if kind == "matrix"}


@pytest.mark.parametrize(
    ("name", "ends", "kind"),
    [
        ("mamba", ("A_log", ".D", "conv1d.weight", "dt_proj.bias", "norm.weight"), "vector"),
        ("mamba", ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight"), "matrix"),
        ("rwkv", ("time_decay", "time_mix_key", "time_first"), "vector"),
        ("mixtral", ("gate_up_proj", "down_proj"), "matrix"),
        ("mixtral", ("mlp.gate.weight",), "vector"),
        ("gpt2", ("wpe.weight", "wte.weight"), "embedding"),
        ("gpt2", ("c_attn.weight", "c_fc.weight"), "matrix"),
        ("bloom", ("word_embeddings_layernorm.weight", "query_key_value.bias"), "vector"),
    ],
)
def test_kinds_follow_the_structure(name, ends, kind):
    kinds = parameter_kinds(tiny_model(name))
    for end in ends:
        found = {found for key, found in kinds.items() if key.endswith(end)}
        assert found == {kind}, end


def test_a_classifiers_head_is_a_head():
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    kinds = parameter_kinds(LlamaForSequenceClassification(config))
    assert [name for name, kind in kinds.items() if kind == "head"] == ["score.weight"]


def test_experts_follow_adamw():
    model = tiny_model("mixtral")
    rows = group_rows(build_optimizer(model.named_parameters(), OptimSection(), **layout(model)))
    (row,) = [row for row in rows if "experts.down_proj" in row["parameters of"]]
    assert list(row.values())[3:] == ["adamw", 0.003, 0.1]


def test_gpt2_stores_weights_as_in_out_and_q_k_v_side_by_side():
    found, layers = layout(tiny_model("gpt2")), [f"transformer.h.{i}." for i in range(2)]
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert found["in_out"] == {f"{layer}{part}.weight" for layer in layers for part in parts}
    assert found["fused"] == {f"{layer}attn.c_attn.weight": (32, 32, 32) for layer in layers}
