"""What holds for every option of the model: causality, gradients, first loss, and agreement between its paths."""

import math
import pickle

import pytest
import torch
from torch.nn import functional as F

from hfgolf.model import causal_blocks
from hfgolf.model.causal_lm import checkpoint_layers
from hfgolf.model.layers_golf import apply_dropout
from hfgolf.model.modeling_golf import GolfForCausalLM

DROPOUTS = ("dropout", "attention_dropout")


def test_changing_a_token_leaves_earlier_logits_unchanged(build_golf, option, token_ids):
    golf = build_golf(**option)
    changed = token_ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    with torch.no_grad():
        before, after = golf(token_ids).logits, golf(changed).logits
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 1e-4  # every later logit changes


def test_every_parameter_gets_a_finite_gradient(build_golf, option, token_ids):
    golf = build_golf(**option).train()
    golf(token_ids, labels=token_ids).loss.backward()
    for name, parameter in golf.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("activation", ["relu2", "leaky_relu2", "gelu", "gelu_new", "silu", "swiglu"])
def test_a_model_can_be_pickled(build_golf, activation, token_ids):
    model = build_golf(activation=activation)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(token_ids).logits, model(token_ids).logits)


def test_first_loss_is_near_ln_v(build_golf, option):
    golf = build_golf(fresh=True, **{"vocab_size": 512, "hidden_size": 256, **option})
    token_ids = torch.randint(512, (4, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        loss = golf(token_ids, labels=token_ids, return_logits=False).loss
    assert loss.item() == pytest.approx(math.log(512), abs=0.1)


def test_fresh_block_is_the_identity(build_golf):
    state = build_golf(fresh=True, use_bias=True).state_dict()
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
            assert not tensor.any(), name
        else:
            assert tensor.any(), name


def test_both_label_conventions_give_the_plain_loss(build_golf, option, token_ids):
    golf = build_golf(**option)
    output = golf(token_ids, labels=token_ids)
    following = F.pad(token_ids[:, 1:], (0, 1), value=-100)
    plain = F.cross_entropy(output.logits.flatten(0, 1), following.flatten())
    torch.testing.assert_close(output.loss, plain)
    torch.testing.assert_close(golf(token_ids, shift_labels=following).loss, plain)
    total = golf(token_ids, shift_labels=following, num_items_in_batch=1).loss
    torch.testing.assert_close(total, plain * (following >= 0).sum())
    share = golf(token_ids, shift_labels=following, num_items_in_batch=torch.tensor(100)).loss
    torch.testing.assert_close(share, total / 100)


def test_loss_is_zero_if_all_targets_are_ignored(build_golf, token_ids):
    golf = build_golf().train()
    loss = golf(token_ids, shift_labels=torch.full_like(token_ids, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in golf.parameters())


def test_logits_are_returned_except_when_training_with_labels(build_golf, token_ids):
    golf = build_golf()
    assert golf(token_ids, labels=token_ids).logits.shape == (3, 17, 61)
    assert golf(token_ids, labels=token_ids, return_logits=False).logits is None
    assert golf(token_ids, logits_to_keep=1).logits.shape == (3, 1, 61)
    golf.train()
    assert golf(token_ids).logits.shape == (3, 17, 61)
    trained = golf(token_ids, labels=token_ids)
    assert trained.logits is None
    assert trained.past_key_values is None
    assert golf(token_ids, shift_labels=token_ids, return_logits=True).logits.shape == (3, 17, 61)


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("implementation", ["eager", causal_blocks.NAME])
def test_each_attention_agrees_with_sdpa(build_golf, token_ids, monkeypatch, implementation, key_value_heads, padding):
    monkeypatch.setattr(causal_blocks, "QUERIES_PER_BLOCK", 5)
    golf = build_golf(num_key_value_heads=key_value_heads)
    mask = torch.ones_like(token_ids)
    mask[0, :padding] = 0
    expected = golf(token_ids, attention_mask=mask).logits
    golf.set_attn_implementation(implementation)
    output = golf(token_ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(output.logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)
    if implementation == "eager":
        assert [tuple(weights.shape) for weights in output.attentions] == [(3, 4, 17, 17)] * 2
    assert [tuple(states.shape) for states in output.hidden_states] == [(3, 17, 32)] * 3


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values(build_golf, token_ids):
    grouped, full = build_golf(num_key_value_heads=2), build_golf(num_key_value_heads=4)
    state = grouped.state_dict()
    for name, sizes in grouped.fused_projections().items():
        assert sizes == (32, 16, 16)
        query, key, value = state[name].split(sizes)
        repeated = [rows.view(2, 8, 32).repeat_interleave(2, dim=0).flatten(0, 1) for rows in (key, value)]
        state[name] = torch.cat([query, *repeated])
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(token_ids).logits, full(token_ids).logits)


def test_rope_depends_only_on_distances(build_golf, token_ids):
    golf = build_golf()
    positions = torch.arange(17)[None]
    shifted = golf(token_ids, position_ids=positions + 23).logits
    torch.testing.assert_close(golf(token_ids, position_ids=positions).logits, shifted, rtol=1e-4, atol=1e-4)
    stretched = golf(token_ids, position_ids=positions * 2).logits
    assert (stretched - shifted).abs().max() > 1e-2


def test_linear_scaling_at_load_time_reads_each_position_between_the_trained_ones(build_golf, token_ids, tmp_path):
    golf = build_golf()
    golf.save_pretrained(tmp_path)
    rope = {"rope_type": "linear", "factor": 2.0}
    scaled = GolfForCausalLM.from_pretrained(tmp_path, rope_parameters=rope).eval()
    positions = torch.arange(token_ids.shape[1])[None]
    expected = golf(token_ids, position_ids=positions).logits
    torch.testing.assert_close(scaled(token_ids, position_ids=2 * positions).logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scaled(token_ids).logits, expected, atol=1e-2)
    with pytest.raises(ValueError, match=r"'dynamic'.* is not allowed; allowed: "):
        GolfForCausalLM.from_pretrained(tmp_path, rope_parameters=rope | {"rope_type": "dynamic"})


def test_gradient_checkpointing_changes_neither_loss_nor_gradients(build_golf, token_ids):
    results = []
    for is_checkpointed in (False, True):
        golf = build_golf(**dict.fromkeys(DROPOUTS, 0.2)).train()
        if is_checkpointed:
            checkpoint_layers(golf)
            assert all(layer.gradient_checkpointing for layer in golf.model.layers)
            # a non-reentrant checkpoint: the reentrant one breaks DDP and ignores keyword arguments
            assert golf.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}
        torch.manual_seed(3)
        loss = golf(token_ids, labels=token_ids).loss
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in golf.parameters())])
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_acts_only_in_training(build_golf, token_ids, name):
    golf, without = build_golf(**{name: 0.5}), build_golf()
    torch.testing.assert_close(golf(token_ids).logits, without(token_ids).logits)
    golf.train()
    assert (golf(token_ids).logits - golf(token_ids).logits).abs().max() > 1e-2


def test_bf16_autocast_stays_close_to_fp32(build_golf, token_ids, option):
    golf = build_golf(**option).train()
    exact = golf(token_ids, labels=token_ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = golf(token_ids, labels=token_ids).loss
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)


def test_input_errors_name_the_problem(build_golf, token_ids):
    golf = build_golf(position_embedding="learned")
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        golf()
    with pytest.raises(ValueError, match="max_position_embeddings=64"):
        golf(token_ids.repeat(1, 4))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_zeroes_its_share_independently_and_keeps_the_mean(rate):
    torch.manual_seed(0)
    x = torch.full((1000, 1001), 3.0, dtype=torch.bfloat16, requires_grad=True)  # not a multiple of eight
    dropped = apply_dropout(x, rate)
    rounded = round(256 * rate) / 256
    is_zero = dropped == 0
    assert abs(is_zero.double().mean() - rounded) < 0.002
    assert abs(dropped.double().mean() - 3) < 0.01 and dropped.dtype == x.dtype
    for shift in (1, 2, 7, 8, 1001):  # neighbors in the same draw and in different draws are independent
        both = (is_zero.flatten()[shift:] & is_zero.flatten()[:-shift]).double().mean()
        assert abs(both - rounded**2) < 0.002
    dropped.sum().backward()
    assert torch.equal(x.grad == 0, is_zero) and abs(x.grad.max() * (1 - rounded) - 1) < 0.01
    assert apply_dropout(x, rate, training=False) is x and apply_dropout(x, 0.0) is x


@pytest.mark.parametrize("rate", [0.001, 0.999])
def test_dropout_at_extreme_rates_drops_some_and_keeps_some(rate):
    torch.manual_seed(0)
    dropped = apply_dropout(torch.ones(10**5), rate)
    assert 0 < (dropped == 0).sum() < 10**5 and dropped.isfinite().all()


@pytest.mark.parametrize("name", ["lanes", "golf_baseline", "value_embedding", "modern"])
def test_reentrant_checkpointing_is_right_or_refused(build_golf, all_options, token_ids, name):
    golf = build_golf(**all_options[name]).train()
    golf(token_ids, labels=token_ids).loss.backward()
    expected = [parameter.grad for parameter in golf.parameters()]
    golf.zero_grad()
    if name != "modern":
        with pytest.raises(ValueError, match="use_reentrant must be False"):
            golf.activation_checkpointing_enable({"use_reentrant": True})
        golf.activation_checkpointing_enable({"use_reentrant": False})
    else:
        golf.activation_checkpointing_enable({"use_reentrant": True})
        golf.enable_input_require_grads()
    golf(token_ids, labels=token_ids).loss.backward()
    for parameter, gradient in zip(golf.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_labels_of_another_shape_are_refused(build_golf, token_ids):
    golf = build_golf()
    embedded = golf.get_input_embeddings()(torch.cat([token_ids, token_ids], dim=1))
    with torch.no_grad():
        for given in ({"labels": token_ids}, {"shift_labels": token_ids}):
            with pytest.raises(ValueError, match=r"labels have the shape \(3, 17\), but the input has \(3, 34\)"):
                golf(inputs_embeds=embedded, **given)


class Adapted(torch.nn.Module):
    """A head with something added to it, as PEFT has it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.added = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.added(hidden)


def test_the_loss_is_that_of_the_logits_whatever_the_head_is(build_golf, token_ids, tmp_path):
    golf = build_golf(tie_word_embeddings=False)
    golf.save_pretrained(tmp_path / "model")
    adapted = build_golf(tie_word_embeddings=False)
    adapted.lm_head = Adapted(adapted.lm_head)
    places = {"device_map": {"model": "cpu", "lm_head": "disk"}, "offload_folder": tmp_path / "offloaded"}
    offloaded = GolfForCausalLM.from_pretrained(tmp_path / "model", **places)
    for model in (golf, adapted, offloaded):
        with torch.no_grad():
            result = model(token_ids, labels=token_ids)
        expected = F.cross_entropy(result.logits[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten())
        torch.testing.assert_close(result.loss, expected)
    adapted.train()(token_ids, labels=token_ids).loss.backward()
    assert adapted.lm_head.added.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["modern", "value_embedding", "embedding_size_untied", "bigram"])
def test_a_model_with_more_tokens_says_the_same_of_the_old_ones(build_golf, all_options, token_ids, tmp_path, name):
    golf = build_golf(**all_options[name])
    with torch.no_grad():
        before = golf(token_ids).logits
        golf.resize_token_embeddings(70)
        torch.testing.assert_close(golf(token_ids).logits[..., :61], before)
        longer = torch.cat([token_ids, torch.full((3, 1), 69)], dim=1)
        golf.save_pretrained(tmp_path)
        again = GolfForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(again(longer).logits, golf(longer).logits)
