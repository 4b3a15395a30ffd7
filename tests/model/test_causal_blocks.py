"""Attention in blocks agrees with SDPA on every path that transformers may take."""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from hfgolf.model import causal_blocks


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(causal_blocks, "QUERIES_PER_BLOCK", 5)


@pytest.mark.parametrize("length", [1, 5, 13])
def test_causal_blocks_match_softmax_attention_and_its_gradients(length):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    gradient = torch.randn(2, 3, length, 4, dtype=torch.float64)
    results = []
    for output in (
        causal_blocks.causal_blocks(query, key, value, 0.5),
        F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5),
    ):
        results.append((output, *torch.autograd.grad(output, (query, key, value), gradient)))
    for blocks, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(blocks, sdpa, rtol=1e-6, atol=1e-6)  # the softmax is in fp32


def test_attention_dropout_zeroes_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    query = key = torch.zeros(2000, 1, 11, 11)  # the last query attends to all eleven equally
    weights = causal_blocks.causal_blocks(query, key, torch.eye(11).expand_as(query), 1.0, 0.3)[:, 0, -1]
    assert abs((weights == 0).double().mean() - 0.3) < 0.02
    assert abs(weights.mean() - 1 / 11) < 0.002


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_model_with_causal_blocks_generates_the_same(build_golf, token_ids, cache):
    golf = build_golf()
    options = {"attention_mask": torch.ones_like(token_ids), "pad_token_id": 0, "eos_token_id": None}
    options |= {"cache_implementation": cache, "max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    expected = golf.generate(token_ids, **options)
    golf.set_attn_implementation(causal_blocks.NAME)
    assert torch.equal(golf.generate(token_ids, **options), expected)


def test_saved_model_does_not_mention_causal_blocks(build_golf, tmp_path):
    golf = build_golf()
    golf.set_attn_implementation(causal_blocks.NAME)
    golf.save_pretrained(tmp_path)
    assert causal_blocks.NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert not (tmp_path / "causal_blocks.py").exists()


@pytest.mark.parametrize(
    ("device", "precision", "length", "has_amx", "dropout", "expected"),
    [
        ("cpu", "bf16", 1024, False, 0.0, True),
        ("cpu", "bf16", 1025, False, 0.0, False),
        ("cpu", "bf16", 512, True, 0.0, True),
        ("cpu", "bf16", 513, True, 0.0, False),
        ("cpu", "bf16", 1024, True, 0.1, True),
        ("cpu", "no", 256, False, 0.0, False),
        ("cuda", "bf16", 256, False, 0.0, False),
    ],
)
def test_causal_blocks_are_chosen_where_they_are_faster(
    build_golf, monkeypatch, device, precision, length, has_amx, dropout, expected
):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    golf = build_golf(attention_dropout=dropout)
    causal_blocks.choose_attention(golf, torch.device(device), precision, length)
    assert (golf.config._attn_implementation == causal_blocks.NAME) is expected


def test_foreign_model_keeps_its_attention():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8))
    causal_blocks.choose_attention(gpt2, torch.device("cpu"), "bf16", 8)
    assert gpt2.config._attn_implementation == "sdpa"
