"""GPT-2 as oracle: copied weights give the same logits, in both directions."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hfgolf.model.convert_gpt2 import golf_from_gpt2, gpt2_from_golf

SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}

PDROPS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def build_gpt2(**options):
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0, **options)).eval()
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return gpt2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_inner": 40},
        {"activation_function": "gelu_pytorch_tanh"},
        {"activation_function": "gelu"},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_copied_weights_give_gpt2_logits(options, token_ids):
    gpt2 = build_gpt2(**options)
    golf = golf_from_gpt2(gpt2)
    with torch.no_grad():
        torch.testing.assert_close(golf(token_ids).logits, gpt2(token_ids).logits, rtol=0, atol=1e-5)
    assert golf.num_parameters() == gpt2.num_parameters()


def test_padded_logits_and_loss_match_gpt2(token_ids):
    gpt2 = build_gpt2()
    golf = golf_from_gpt2(gpt2)
    mask = torch.ones_like(token_ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # GPT-2's forward does not derive them from the mask
    labels = token_ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        expected = gpt2(token_ids, attention_mask=mask, position_ids=positions, labels=labels)
        actual = golf(token_ids, attention_mask=mask, labels=labels)
    shown = mask.bool()
    torch.testing.assert_close(actual.logits[shown], expected.logits[shown], rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=1e-5)


def test_gradients_match_gpt2(token_ids):
    gpt2 = build_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
    golf = golf_from_gpt2(gpt2).train()
    gpt2(token_ids, labels=token_ids).loss.backward()
    golf(token_ids, labels=token_ids).loss.backward()
    theirs, ours = gpt2.transformer.h[1], golf.model.layers[1]
    torch.testing.assert_close(ours.self_attn.qkv_proj.weight.grad.T, theirs.attn.c_attn.weight.grad)
    torch.testing.assert_close(ours.mlp.down_proj.bias.grad, theirs.mlp.c_proj.bias.grad)
    torch.testing.assert_close(golf.lm_head.weight.grad, gpt2.lm_head.weight.grad)


def test_converting_there_and_back_restores_every_weight_and_rate():
    gpt2 = build_gpt2(attn_pdrop=0.3)
    back = gpt2_from_golf(golf_from_gpt2(gpt2))
    assert all(getattr(back.config, name) == getattr(gpt2.config, name) for name in PDROPS)
    assert back.state_dict().keys() == gpt2.state_dict().keys()
    for name, tensor in gpt2.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_golf_model_with_gpt2_options_becomes_gpt2(build_golf, gpt2_style, token_ids):
    golf = build_golf(**gpt2_style)
    with torch.no_grad():
        expected, actual = golf(token_ids).logits, gpt2_from_golf(golf)(token_ids).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_inexpressible_options_are_rejected(build_golf, gpt2_style):
    with pytest.raises(ValueError, match="norm='rmsnorm'; only 'layernorm'"):
        gpt2_from_golf(build_golf())
    with pytest.raises(ValueError, match="num_key_value_heads=2; only 4"):
        gpt2_from_golf(build_golf(**gpt2_style, num_key_value_heads=2))
    for switch, value in {"loop": [0, 1, 2], "norm_depth_scale": True, "exclude_self_value": 1}.items():
        with pytest.raises(ValueError, match=f"{switch}=.* only .* can be converted"):
            gpt2_from_golf(build_golf(**gpt2_style, **{switch: value}))
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx=True"):
        golf_from_gpt2(build_gpt2(scale_attn_by_inverse_layer_idx=True))
    with pytest.raises(ValueError, match=r"embd_pdrop=0\.3; only 0\.1"):
        golf_from_gpt2(build_gpt2(embd_pdrop=0.3))
