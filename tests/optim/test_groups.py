"""The groups have each parameter of any architecture once, with the rule and rates from the config."""

from types import SimpleNamespace

import pytest
from architectures import OVERRIDES, tiny_model
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.pytorch_utils import Conv1D

from hfgolf.config.sections import OptimSection
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim import groups
from hfgolf.optim.groups import (
    KINDS,
    build_optimizer,
    group_rows,
    parameter_groups,
    parameter_kind,
    parameter_kinds,
)
from hfgolf.system.errors import UserError


def build_golf(*, is_gpt2: bool = False, is_tied: bool = True, layers: int = 2) -> GolfForCausalLM:
    """Models that together have every parameter name: biases and positions, or gates, q/k norms and embedding norm."""
    options = {"activation": "swiglu"}
    if is_gpt2:
        options = {"norm": "layernorm", "position_embedding": "learned", "use_bias": True}
        options |= {"qk_norm": False, "embedding_norm": False}
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 32, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1}
    return GolfForCausalLM(GolfConfig(**sizes, **heads, **options, tie_word_embeddings=is_tied))


@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
@pytest.mark.parametrize("is_gpt2", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_each_parameter_is_in_exactly_one_group(name, is_gpt2, is_tied):
    golf = build_golf(is_gpt2=is_gpt2, is_tied=is_tied)
    groups = parameter_groups(golf, OptimSection(name=name))
    members = [member for group in groups for member, _ in group["params"]]
    assert sorted(members) == sorted(member for member, _ in golf.named_parameters())
    for group in groups:
        for member, parameter in group["params"]:
            is_matrix = "_proj.weight" in member
            assert (group["kind"] == "matrix") == is_matrix
            assert (group["weight_decay"] > 0) == is_matrix
            assert parameter.ndim == 2 or group["kind"] == "vector"


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.router", "module.model.norm.weight", "lm_head.bias", "model.layers.0.self_attn.gain"]
)
def test_unmatched_parameter_is_rejected(name):
    with pytest.raises(UserError, match=f"parameter {name} matches no pattern"):
        parameter_kind(name)


def test_parameter_matched_twice_is_rejected(monkeypatch):
    monkeypatch.setattr("hfgolf.optim.groups.PATTERNS", (("lm_head.*", "head"), ("*.weight", "matrix")))
    with pytest.raises(UserError, match=r"lm_head.\* and \*.weight"):
        parameter_kind("lm_head.weight")


@pytest.mark.parametrize("is_record", [True, False])
def test_each_parameter_of_the_golf_switches_is_in_exactly_one_group(is_record):
    """Golf's gates and scales are vectors, regardless of shape; tables are embeddings, projections matrices."""
    switches = {"branch_scale": True, "embedding_residual": True, "query_gain": 2.0, "head_gate": 4, "smear_gate": 4}
    skips = {"unet_skips": "gated", "parallel_from": 2, "lanes": True} if is_record else {"unet_skips": "add"}
    factors = {} if is_record else {"embedding_size": 8, "bigram_buckets": 9, "value_embedding_layers": 1}
    shape = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    golf = GolfForCausalLM(GolfConfig(**shape, **switches, **skips, **factors))
    groups = parameter_groups(golf, OptimSection())
    members = [member for group in groups for member, _ in group["params"]]
    assert sorted(members) == sorted(name for name, _ in golf.named_parameters())
    for name in members:
        kind = {"proj.weight": "matrix", "table.weight": "embedding", "tokens.weight": "embedding"}
        assert parameter_kind(name) == next((kind[end] for end in kind if name.endswith(end)), "vector"), name


@pytest.mark.parametrize(
    ("options", "expected"),  # (rule, learning rate, weight decay) of matrix, embedding, head and vector
    [
        (
            {"learning_rate": 0.02, "adamw_learning_rate": 0.004, "embedding_learning_rate": 0.3},
            [("muon", 0.02, 0.1), ("adamw", 0.3, 0.0), ("adamw", 0.004, 0.0), ("adamw", 0.004, 0.0)],
        ),
        (
            {
                "embedding_weight_decay": 0.085,
                "head_weight_decay": 0.03,
                "vector_weight_decay": 0.02,
                "vector_learning_rate": 0.05,
            },
            [("muon", 0.02, 0.1), ("adamw", 0.003, 0.085), ("adamw", 0.003, 0.03), ("adamw", 0.05, 0.02)],
        ),
        *(
            (
                {"name": name, "learning_rate": 0.01, "adamw_learning_rate": 9.0, "embedding_learning_rate": 0.05},
                [(name, 0.01, 0.1), (name, 0.05, 0.0), (name, 0.01, 0.0), (name, 0.01, 0.0)],
            )
            for name in ("adamw", "sgd")
        ),
    ],
    ids=["muon", "own rates and decays", "adamw", "sgd"],
)
def test_each_kind_has_its_rule_rate_and_decay(options, expected):
    groups = parameter_groups(build_golf(is_gpt2=True, is_tied=False), OptimSection(**options))
    assert tuple(group["kind"] for group in groups) == KINDS
    assert [(group["rule"], group["lr"], group["weight_decay"]) for group in groups] == expected
    for group in groups:
        assert (group["initial_lr"], group["initial_weight_decay"]) == (group["lr"], group["weight_decay"])


def test_config_reaches_the_groups():
    optim = OptimSection(
        momentum=0.9,
        betas=(0.8, 0.97),
        eps=1e-10,
        muon_every_steps=2,
        newton_schulz_steps=4,
        newton_schulz_coefficients="classic",
        newton_schulz_dtype="fp32",
        update_scale="match_rms_adamw",
        row_equilibration=False,
        normuon_beta2=0.9,
        cautious_weight_decay=True,
        state_dtype="bf16",
    )
    optimizer = build_optimizer(build_golf(), optim)
    for group in optimizer.param_groups:
        keys = type(optim).model_fields.keys() & group.keys() - {"weight_decay"}  # of matrices only
        assert len(keys) == 12
        for key in keys:
            assert group[key] == getattr(optim, key) != getattr(OptimSection(), key)


def test_rows_count_every_parameter():
    golf = build_golf(is_gpt2=True, is_tied=False, layers=3)
    rows = group_rows(build_optimizer(golf, OptimSection(embedding_learning_rate=0.25)))
    assert sum(row["tensors"] for row in rows) == len(list(golf.parameters()))
    assert sum(row["parameters"] for row in rows) == golf.num_parameters()
    cells = {row["parameters of"]: list(row.values())[1:] for row in rows}
    assert cells["model.layers.*.self_attn.qkv_proj.weight"] == [3, 384, "muon in 3 parts", 0.02, 0.1]
    assert cells["model.embed_tokens.weight"] == [1, 256, "adamw", 0.25, 0.0]


@pytest.mark.parametrize("is_initialized", [False, True])
def test_the_processes_of_a_run_share_the_work_of_muon(monkeypatch, is_initialized):
    world = object()
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(groups.dist, "group", SimpleNamespace(WORLD=world))
    optimizer = build_optimizer(build_golf(), OptimSection())
    assert optimizer._process_group is (world if is_initialized else None)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", OVERRIDES)
def test_each_parameter_of_another_architecture_is_in_exactly_one_group(name, is_tied):
    model = tiny_model(name, tie_word_embeddings=is_tied)
    groups = parameter_groups(model, OptimSection())
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
    rows = group_rows(build_optimizer(tiny_model("mixtral"), OptimSection()))
    (row,) = [row for row in rows if "experts.down_proj" in row["parameters of"]]
    assert list(row.values())[3:] == ["adamw", 0.003, 0.1]


def test_gpt2_stores_weights_as_in_out_and_q_k_v_side_by_side():
    matrices, *others = parameter_groups(tiny_model("gpt2"), OptimSection())
    assert matrices["in_out"] and not any(group["in_out"] for group in others)
    names = [name for name, _ in matrices["params"]]
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert sorted(names) == [f"transformer.h.{i}.{part}.weight" for i in range(2) for part in parts]
    for name, split in zip(names, matrices["splits"], strict=True):
        assert split == ((32, 32, 32) if "c_attn" in name else None)
