"""Golf configs: defaults, derived sizes, and rejected values."""

from typing import Any

import pytest

from hfgolf.model.configuration_golf import GolfConfig


def test_omitted_sizes_are_derived_and_saved(tmp_path):
    config = GolfConfig(hidden_size=48, num_attention_heads=6, logit_soft_cap=30, dropout=0)  # integers are numbers
    assert (config.num_key_value_heads, config.intermediate_size, config.head_dim) == (6, 192, 8)
    config.save_pretrained(tmp_path)
    assert GolfConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_the_names_of_other_models_set_the_fields_of_golf(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0}
    others: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-3}
    config = GolfConfig(**others, rope_parameters=rope | {"rope_theta": 5.0})
    assert (config.activation, config.norm_eps, config.rope_theta) == ("silu", 1e-3, 5.0)
    config.save_pretrained(tmp_path)
    loaded = GolfConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict() and loaded.rope_parameters == rope | {"rope_theta": 5.0}
    plain = GolfConfig(rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    assert (plain.rope_theta, plain.rope_parameters) == (5.0, {})


# 4 heads of 64 channels, in which rope needs an even number; 5 layers
BAD: dict[str, list[object]] = {
    "hidden_size": ["64", 64.0, True, 0, 254, 12],
    "num_key_value_heads": [3, 8],
    "norm": ["batchnorm", ["rmsnorm"]],
    "qk_norm": [1],
    "dropout": [1.0, -0.1, "0.1", float("nan")],
    "attention_dropout": [1.0],
    "rope_theta": [0, float("inf")],
    "logit_soft_cap": [0.0, False],
    "eos_token_id": [4096, [0, 4096]],
    "pad_token_id": [[0]],
    "activation_slope": [-0.5],
    "rope_dims": [3, 66],
    "rope_parameters": [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "yarn"}, {"partial_rotary_factor": 0.5}],
    "exclude_self_value": [6, "every"],
    "parallel_from": [5, -1],
    "lanes": [True],  # without parallel_from
    "loop": [[0, 5, 2], [2, 1, 2], [1, 2, 1], [1, 2, 10**9], [1, 2], 3],
    "num_hidden_layers": [10**9],
    "head_gate": [0, 257],
    "smear_gate": [257],
    "bigram_buckets": [1],
    "value_embedding_layers": [6],
}


OTHER_TYPES = [(name, "other") for name, kind in GolfConfig.__annotations__.items() if "ClassVar" not in kind]
OTHER_TYPES += [(name, None) for name, kind in GolfConfig.__annotations__.items() if kind in ("bool", "str", "float")]


@pytest.mark.parametrize(
    ("field", "value"), [*OTHER_TYPES, *((field, value) for field, values in BAD.items() for value in values)]
)
def test_bad_value_error_names_field_value_and_allowed_values(field, value):
    with pytest.raises(ValueError) as caught:
        GolfConfig(**{field: value})
    message = str(caught.value)
    assert f"{field}: {value!r} is not allowed; allowed: " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loop": [1, 3, 2], "parallel_from": 3, "lanes": True}, "layers from 0 to 2 (below parallel_from)"),
        ({"soft_cap_form": "poly5"}, "logit_soft_cap: None is not allowed; allowed: a number"),
        ({"logit_soft_cap_negative": 5.0}, "logit_soft_cap: None is not allowed; allowed: a number"),
        ({"tied_embedding_std": 0.005, "tie_word_embeddings": False}, "None without tie_word_embeddings"),
        ({"rope_dims": 16, "position_embedding": "none"}, 'with position_embedding="rope"'),
        ({"rope_dims": 16, "rope_parameters": {"rope_type": "linear", "factor": 2}}, "without rope_dims"),
        ({"hidden_act": "relu"}, "activation: 'relu' is not allowed"),
    ],
)
def test_conflicting_switches_are_rejected(options, message):
    with pytest.raises(ValueError) as caught:
        GolfConfig(**options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_switches_survive_saving(tmp_path):
    config = GolfConfig(exclude_self_value="all", loop=(1, 2, 3), smear_gate=12)
    assert (config.exclude_self_value, config.loop, config.use_cache) == (5, [1, 2, 3], False)
    config.loop_active = False
    config.save_pretrained(tmp_path)
    assert GolfConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_odd_head_size_is_allowed_without_rope():
    assert GolfConfig(hidden_size=12, position_embedding="learned").head_dim == 3
