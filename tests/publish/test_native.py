"""Native architectures as oracles: transformers' own classes give the logits of the Golf models they stand for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hfgolf.model.configuration_golf import _CHOICES, MODEL_FIELDS, SWITCHES, GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.native import (
    ARCHITECTURES,
    XIELU_OF_RELU2,
    as_trained,
    compare,
    converted,
    find_architecture,
    from_native,
    golf_shape,
    to_native,
)
from hfgolf.system.errors import UserError

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LEARNED = {"norm": "layernorm", "position_embedding": "learned", "qk_norm": False, "embedding_norm": False}
LEARNED |= {"num_key_value_heads": 4}
LAYERNORM = {"norm": "layernorm", "qk_norm": False}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# (class, options of Golf): what issue and docs promise
PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("Apertus", {}),
    ("Apertus", {"activation": "gelu"}),
    ("Apertus", {"activation": "gelu_new"}),
    ("Apertus", {"activation": "silu"}),
    ("Apertus", {"num_key_value_heads": 1}),
    ("Apertus", {"tie_word_embeddings": False}),
    ("Apertus", {"embedding_norm": False}),
    ("Apertus", {"position_embedding": "none"}),
    ("Apertus", {"norm_weight": False, "rope_theta": 500.0, "norm_eps": 1e-5}),
    ("Apertus", {"rope_parameters": YARN}),
    ("Qwen3", {"activation": "swiglu"}),
    ("Qwen3", {"activation": "swiglu", "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 99.0}}),
    ("Qwen3", {"activation": "swiglu", "position_embedding": "none", "embedding_norm": False}),
    ("Llama", {"activation": "swiglu", "qk_norm": False}),
    ("Llama", {"activation": "swiglu", "qk_norm": False, "use_bias": True}),
    ("Arcee", {"qk_norm": False}),
    ("Arcee", {"qk_norm": False, "use_bias": True, "activation": "gelu"}),
    ("NanoChat", {"norm_weight": False, "logit_soft_cap": 5.0}),
    ("NanoChat", {"norm_weight": False, "logit_soft_cap": 5.0, "tie_word_embeddings": False, "activation": "gelu"}),
    ("Starcoder2", LAYERNORM),
    ("Starcoder2", LAYERNORM | {"activation": "gelu_new", "use_bias": True, "position_embedding": "none"}),
    ("Starcoder2", LAYERNORM | {"activation": "silu", "embedding_norm": False}),
    ("GPT2", LEARNED | {"activation": "gelu_new", "use_bias": True}),
    ("GPT2", LEARNED | {"activation": "relu2"}),
    ("GPT2", LEARNED | {"activation": "gelu", "norm_weight": False}),
]


def build(**options: Any) -> GolfForCausalLM:
    """Return a model in which every weight matters and none is zero or one."""
    torch.manual_seed(0)
    golf = GolfForCausalLM(GolfConfig(**SHAPE | options))
    with torch.no_grad():
        for parameter in golf.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return golf.eval()


def token_ids() -> torch.Tensor:
    return torch.randint(1, 61, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "options"), PAIRS, ids=str)
def test_native_logits_and_cached_greedy_tokens_are_golfs_there_and_back(name, options):
    golf = build(**options)
    native = to_native(golf)
    assert type(native).__module__.startswith("transformers.models.") and type(native).__name__.startswith(name)
    ids = token_ids()
    with torch.no_grad():
        expected = golf(ids).logits
        torch.testing.assert_close(native(ids).logits, expected, rtol=0, atol=5e-6)
        greedy = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "eos_token_id": None}
        assert torch.equal(native.generate(ids[:1, :5], **greedy), golf.generate(ids[:1, :5], **greedy))
        back = from_native(native)
        assert isinstance(back, GolfForCausalLM)
        torch.testing.assert_close(back(ids).logits, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("name", "options"), PAIRS[::3], ids=str)
def test_loss_and_left_padding_are_golfs(name, options):
    golf = build(**options)
    native = to_native(golf)
    ids = token_ids()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        expected = golf(ids, attention_mask=mask, labels=labels)
        actual = native(ids, attention_mask=mask, position_ids=positions, labels=labels)
    torch.testing.assert_close(actual.logits[mask.bool()], expected.logits[mask.bool()], rtol=0, atol=5e-6)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("name", "options"), PAIRS, ids=str)
def test_the_config_alone_gives_the_shape(name, options):
    native = to_native(build(**options))
    del native.config.golf  # as if it had never been Golf
    shape, expected = (config.to_dict() for config in (golf_shape(native.config), from_native(native).config))
    has_biases = any(name.endswith("bias") for name, _ in native.named_parameters())
    assert shape.pop("use_bias") == has_biases >= expected.pop("use_bias")  # zero biases count as biases
    assert {**shape, "dtype": None} == {**expected, "dtype": None}


def with_xielu(native: Any) -> Any:
    """Return an Apertus with squared ReLU as hfgolf once wrote it."""
    config = copy.deepcopy(native.config)
    config.hidden_act = "xielu"
    other: Any = type(native)(config).eval()
    other.load_state_dict(native.state_dict(), strict=False)
    with torch.no_grad():
        for layer in other.model.layers:
            for name, value in XIELU_OF_RELU2.items():
                getattr(layer.mlp.act_fn, name).fill_(value)
    return other


def test_xielu_with_fixed_constants_is_squared_relu():
    native = with_xielu(to_native(build()))
    assert as_trained(native).config.activation == "relu2"
    act = native.model.layers[0].mlp.act_fn
    with torch.no_grad():
        act.alpha_n.fill_(-100)  # as hfgolf wrote it before that
    assert from_native(native).config.activation == "relu2"
    with torch.no_grad():
        act.alpha_p += 0.01
    with pytest.raises(UserError, match="its xIELU was trained"):
        from_native(native)
    assert as_trained(native) is native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_constants_make_xielu_squared_relu_to_the_bit_without_denormal_numbers(dtype):
    """Apertus computes in its own dtype, its constants included."""
    native = to_native(build())
    act = nn.Module.to(with_xielu(native), dtype=dtype).model.layers[0].mlp.act_fn
    x = (3 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))).to(dtype)
    with torch.no_grad():
        assert torch.equal(act(x), torch.relu(x).square())


@pytest.mark.parametrize(("name", "options"), [*PAIRS, ("Apertus", {"dropout": 0.1, "matrix_init": "orthogonal"})])
def test_a_native_model_becomes_the_golf_model_that_it_was(name, options):
    """To the last bit, its norms and tied matrices included; the native config alone tells its config."""
    golf = build(**options)
    native = to_native(golf)
    again = as_trained(native)
    assert isinstance(again, GolfForCausalLM)
    is_lost = golf.config.embedding_norm and name != "NanoChat"
    is_lost = is_lost and (not golf.config.tie_word_embeddings or (name == "Starcoder2" and golf.config.use_bias))
    if is_lost:  # the lengths of the rows, or a bias: folded for good
        assert not again.config.embedding_norm and not again.config.tie_word_embeddings
        return
    assert again.config.to_dict() == golf.config.to_dict()
    shape = golf_shape(native.config)
    assert all(getattr(shape, key) == getattr(golf.config, key) for key in MODEL_FIELDS)
    assert again.state_dict().keys() == golf.state_dict().keys()
    for key, tensor in golf.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_a_native_model_that_was_trained_since_stays_what_it_is():
    native: Any = to_native(build())
    with torch.no_grad():
        native.model.embed_tokens.weight[3] += 0.01
        assert as_trained(native) is native
        golf = from_native(native)
        torch.testing.assert_close(golf(token_ids()).logits, native(token_ids()).logits, rtol=0, atol=5e-6)
    assert not golf.config.embedding_norm and not golf.config.tie_word_embeddings


@pytest.mark.parametrize(
    "written", [{"bigram_buckets": 10**9}, {"vocab_size": 10**9}, {"norm_eps": "much"}, {"of_tomorrow": 1}, "golf", []]
)
def test_what_somebody_wrote_for_golf_into_a_config_is_ignored_if_it_cannot_be(written):
    """Before anything of that size is built."""
    native: Any = to_native(build())
    native.config.golf = written
    assert as_trained(native) is native
    assert not from_native(native).config.embedding_norm


def test_a_conversion_leaves_the_random_state_and_the_model_where_they_were():
    golf = build()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    native, _ = converted(golf, "native", [1, 2])
    converted(native, "golf", [1, 2])
    assert torch.equal(torch.get_rng_state(), before)


def test_each_architecture_of_the_table_is_tested():
    assert {row.name for row in ARCHITECTURES} == {name for name, _ in PAIRS}
    for name, options in PAIRS:
        assert find_architecture(GolfConfig(**SHAPE | options)).name == name


@pytest.mark.parametrize("activation", _CHOICES["activation"])
def test_an_activation_is_compared_with_its_architecture_or_refused(activation):
    if all(options.get("activation", "relu2") != activation for _, options in PAIRS):
        with pytest.raises(UserError, match=rf"model\.activation .* \(now {activation}\)"):
            find_architecture(GolfConfig(activation=activation))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_soft_cap": 15.0}, r"NanoChat needs model\.overrides\.norm_weight false \(now true\)\."),
        ({"position_embedding": "learned"}, r"model\.position_embedding rope or none \(now learned\)"),
        ({"use_bias": True}, r"model\.use_bias false \(now true\)"),
        ({"activation": "swiglu", "use_bias": True}, r"model\.use_bias false"),
        (LAYERNORM | {"qk_norm": True}, r"model\.(norm rmsnorm|qk_norm false)"),
        (LEARNED | {"num_key_value_heads": 2}, r"model\.num_key_value_heads 4 \(now 2\)"),
        ({"loop": [0, 0, 2]}, r"model\.overrides\.loop null \(now \[0, 0, 2\]\)"),
    ],
    ids=str,
)
def test_what_no_architecture_computes_is_one_line(options, message):
    with pytest.raises(UserError, match=message) as caught:
        to_native(build(**options))
    assert "\n" not in str(caught.value)


def test_every_switch_is_refused_unless_it_is_at_its_default():
    """Each field that the table does not know by name, by changing it: a switch of tomorrow is refused, too."""
    known = {name for row in ARCHITECTURES for name in row.options}
    switches = [name for name in SWITCHES if name not in known]
    assert set(SWITCHES) - set(switches) == {"norm_weight"}
    for name in switches:
        config = GolfConfig(**SHAPE)
        setattr(config, name, "changed")
        with pytest.raises(UserError, match=rf"model\.overrides\.{name} .* \(now changed\)"):
            find_architecture(config)


NATIVE: dict[str, Any] = {name: value for name, value in SHAPE.items() if not name.endswith("token_id")}


def test_a_native_model_that_golf_never_made_becomes_golf():
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**NATIVE, rms_norm_eps=1e-5)).eval()
    golf = from_native(llama)
    assert (golf.config.activation, golf.config.norm_eps, golf.config.qk_norm) == ("swiglu", 1e-5, False)
    ids = token_ids()
    with torch.no_grad():
        torch.testing.assert_close(golf(ids).logits, llama(ids).logits, rtol=0, atol=5e-6)


def build_gpt2(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options)).eval()
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return gpt2


def test_token_ids_beyond_the_vocabulary_stand_for_nothing():
    """GPT2Config begins and ends with 50,256 whatever the vocabulary is."""
    config = from_native(GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4))).config
    assert config.bos_token_id is config.eos_token_id is None
    assert from_native(build_gpt2()).config.bos_token_id == 0


def test_no_token_is_taken_for_padding_when_logits_are_compared(monkeypatch):
    """Without a mask, transformers would say in five lines that the ids may be padded."""
    masks: list[Any] = []
    check = "warn_if_padding_and_no_attention_mask"
    monkeypatch.setattr(GPT2Model, check, lambda model, input_ids, mask: masks.append(mask))
    gpt2 = build_gpt2(pad_token_id=0)
    assert compare(gpt2, from_native(gpt2), [0, 1, 2])[0] < 1e-5
    assert masks and all(mask is not None for mask in masks)


@pytest.mark.parametrize(
    "options",
    [
        {"attn_pdrop": 0.3, "n_ctx": 64, "task_specific_params": {"text-generation": {"max_length": 50}}},  # as gpt2
        {"n_inner": 40, "activation_function": "gelu_pytorch_tanh"},
        {"activation_function": "gelu", "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_gpt2_becomes_golf_and_gpt2_again(options):
    gpt2, ids = build_gpt2(**options), token_ids()
    golf = from_native(gpt2)
    with torch.no_grad():
        torch.testing.assert_close(golf(ids).logits, gpt2(ids).logits, rtol=0, atol=1e-5)
    assert golf.num_parameters() == gpt2.num_parameters()
    back = to_native(golf)
    for rate in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert getattr(back.config, rate) == getattr(gpt2.config, rate)
    assert back.state_dict().keys() == gpt2.state_dict().keys()
    for name, tensor in gpt2.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_gradients_match_gpt2():
    gpt2 = build_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
    golf, ids = from_native(gpt2).train(), token_ids()
    gpt2(ids, labels=ids).loss.backward()
    golf(ids, labels=ids).loss.backward()
    theirs, ours = gpt2.transformer.h[1], golf.model.layers[1]
    torch.testing.assert_close(ours.self_attn.qkv_proj.weight.grad.T, theirs.attn.c_attn.weight.grad)
    torch.testing.assert_close(ours.mlp.down_proj.bias.grad, theirs.mlp.c_proj.bias.grad)
    torch.testing.assert_close(golf.lm_head.weight.grad, gpt2.lm_head.weight.grad)


@pytest.mark.parametrize(
    ("native", "message"),
    [
        (lambda: Qwen3ForCausalLM(Qwen3Config(**NATIVE, head_dim=16)), "head_dim is 16; Golf has only 8"),
        (lambda: LlamaForCausalLM(LlamaConfig(**NATIVE, rope_parameters=DYNAMIC)), "rope_parameters: .*'dynamic'.* is"),
        (lambda: MistralForCausalLM(MistralConfig(**NATIVE)), "MistralForCausalLM cannot become a Golf model"),
        (lambda: build_gpt2(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True; Golf has"),
        (lambda: build_gpt2(embd_pdrop=0.3), r"embd_pdrop is 0\.3; Golf has only 0\.1 for it"),
    ],
    ids=["head_dim", "rope", "mistral", "inverse_layer", "embedding_dropout"],
)
def test_what_golf_does_not_have_is_one_line(native, message):
    with pytest.raises(UserError, match=message) as caught:
        from_native(native())
    assert "\n" not in str(caught.value)


def test_a_conversion_says_what_it_did_and_how_exact_it_is():
    golf = build()
    native, said = converted(golf, "native", [1, 2, 3])
    untied = f"which unties it: {native.num_parameters():,} parameters instead of {golf.num_parameters():,}"
    assert said.startswith(f"ApertusForCausalLM, its embedding's norm folded into the table, {untied}: logits within ")
    assert said.endswith(" of GolfForCausalLM's on 131 tokens, random and real")
    assert compare(golf, native, [1, 2, 3])[0] < 5e-6
    assert converted(native, "golf", [1, 2, 3])[1].startswith("GolfForCausalLM: logits within ")
    assert converted(golf, "golf", [])[0] is golf
    assert ", without its dropout for further training: logits" in converted(build(dropout=0.1), "native", [])[1]
    assert "dropout" not in converted(build(**LAYERNORM, activation="gelu", dropout=0.1), "native", [])[1]


def test_logits_that_differ_stop_a_conversion(monkeypatch):
    from hfgolf.publish import native as module

    def wrong(golf: GolfForCausalLM) -> Any:
        native = to_native(golf)
        with torch.no_grad():
            native.get_input_embeddings().weight[5] += 0.01
        return native

    monkeypatch.setattr(module, "to_native", wrong)
    with pytest.raises(UserError, match="ApertusForCausalLM has other logits than GolfForCausalLM: they differ by"):
        converted(build(), "native", [])
