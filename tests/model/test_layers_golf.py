"""The plain torch model equals the transformers model."""

from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from hfgolf.model.layers_golf import GolfNetwork


def test_plain_network_loads_a_saved_model_with_equal_logits(build_golf, option, token_ids, tmp_path):
    golf = build_golf(**option)
    golf.save_pretrained(tmp_path)
    network = GolfNetwork(SimpleNamespace(**golf.config.to_dict())).eval()
    weights = load_file(tmp_path / "model.safetensors")
    network.load_state_dict(weights)  # strict: the same names, and none beside them
    assert list(network.state_dict()) == [name for name in golf.state_dict() if name in weights]
    with torch.no_grad():
        torch.testing.assert_close(network(token_ids), golf(token_ids).logits, rtol=0, atol=1e-6)
