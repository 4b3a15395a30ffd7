"""The count of FLOPs against torch's own counter, and the peak against arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hfgolf.measure.flops import measured_peak_flops, peak_flops, training_flops_per_token
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM


@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": False}, {"activation": "swiglu"}, {"num_key_value_heads": 1}]
)
def test_flops_are_those_torch_counts(options):
    config = GolfConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, **options)
    config._attn_implementation = "eager"  # plain products, which the counter sees
    model = GolfForCausalLM(config).train()
    B, T = 3, 16
    ids = torch.randint(0, 97, (B, T))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, shift_labels=ids).loss.backward()
    upper_half = 6 * config.num_hidden_layers * config.hidden_size * T  # eager computes what the mask throws away
    assert training_flops_per_token(model, T) + upper_half == counter.get_total_flops() / (B * T)


def test_a_known_gpu_takes_its_peak_from_the_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda"), "bf16") == 989e12
    assert peak_flops(torch.device("cuda"), "no") == 494e12


def test_the_measured_peak_leaves_the_generators_alone():
    state = torch.get_rng_state()
    measured = measured_peak_flops(torch.device("cpu"), torch.float32, size=128)
    assert torch.equal(torch.get_rng_state(), state)
    assert 1e8 < measured < 1e14
