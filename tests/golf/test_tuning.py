"""Vectors that are trained after rounding: the loss on other text is lower, or nothing has changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hfgolf.golf import tuning
from hfgolf.golf.curvature import grid_layers, measure_curvature, total_loss
from hfgolf.golf.export import unread_batches
from hfgolf.golf.grid import round_nearest, row_codes_of
from hfgolf.golf.packing import StateCoding, fill
from hfgolf.golf.quantize import stored
from hfgolf.golf.source import run_source
from hfgolf.golf.tuning import HELD_OUT, tune_vectors
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM

VOCABULARY = 37


def batches(count, seed):
    """Return batches (4, 16) of rows in which a token determines the next one, mostly."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCABULARY, (count, 4, 16))
    for t in range(1, 16):
        follows = random.random((count, 4)) < 0.9
        tokens[..., t] = np.where(follows, (3 * tokens[..., t - 1] + 1) % VOCABULARY, tokens[..., t])
    return [torch.from_numpy(each) for each in tokens]


@pytest.fixture(scope="module", params=["golf", "gpt2"])
def trained(request):
    """Return a trained model and its matrices, rounded coarsely."""
    torch.manual_seed(0)
    if request.param == "golf":
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
        model = GolfForCausalLM(GolfConfig(vocab_size=VOCABULARY, **shape))
    else:
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches(100, seed=1):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    layers = {name: layer for layer, name in grid_layers(model).items()}
    rounded = {}
    for name, parameter in model.named_parameters():
        if name in layers:
            weight = stored(layers[name], parameter)
            rounded[name] = round_nearest(weight, row_codes_of(np.full(len(weight), 2 * weight.std()))).dequantized()
    return model.eval(), rounded


@pytest.fixture
def model(trained):
    """Return the trained model, which is afterwards what it was."""
    own = {name: tensor.clone() for name, tensor in trained[0].state_dict().items()}
    yield trained[0]
    trained[0].load_state_dict(own)


def put(model, rounded):
    assert not tune_vectors(model, rounded, [])  # without text, the weights are put in and no more


def test_tuned_vectors_lower_the_loss_on_other_text(model, trained):
    rounded, other = trained[1], batches(50, seed=2)
    exact, count = total_loss(model, other)
    put(model, rounded)
    before = total_loss(model, other)[0]
    assert before > exact + 0.1 * count
    matrices = {name: parameter.clone() for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert tune_vectors(model, rounded, batches(64, seed=3))
    assert total_loss(model, other)[0] < before - 0.1 * (before - exact)
    for name, value in matrices.items():
        assert torch.equal(model.get_parameter(name), value)
    for name, weight in rounded.items():
        layer = model.get_submodule(name.rpartition(".")[0])
        np.testing.assert_array_equal(stored(layer, model.get_parameter(name)), weight)


@pytest.mark.parametrize("rate", [1e3, float("nan")])
def test_vectors_that_are_no_better_are_not_kept(model, trained, rate, monkeypatch):
    monkeypatch.setattr(tuning, "RATE", rate)
    put(model, trained[1])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not tune_vectors(model, trained[1], batches(64, seed=3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("count", [HELD_OUT - 1, 64])
def test_what_is_frozen_or_in_training_mode_stays_so(model, trained, count):
    frozen = [name for name, parameter in model.named_parameters() if parameter.ndim < 2][::2]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    model.train()
    assert tune_vectors(model, trained[1], batches(count, seed=3)) == (count == 64)
    assert model.training and all(module.training for module in model.modules())
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    model.requires_grad_().eval()


def test_a_model_without_vectors_is_left_alone():
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY, bias=False))
    assert not tune_vectors(model, {}, batches(16, seed=3))


def test_vectors_are_tuned_on_unread_text_and_the_artifact_has_them(model, trained):
    batch = batches(8, seed=4)
    curvature = measure_curvature(model, batch)
    options = {"budget_bytes": 4500, "overhead_bytes": 500, "progress": lambda line: None}
    weights = StateCoding(model).weights
    vectors = {name: parameter.clone() for name, parameter in model.named_parameters() if parameter.ndim < 2}
    artifacts = []
    for unread in ((), batches(64, seed=3)):
        quantized, encoded = fill(model, weights, curvature, lambda: StateCoding(model).encode, unread, **options)
        assert 0.99 * 4500 <= 500 + len(encoded.data) == quantized.size_bytes <= 4500
        is_tuned = any(not torch.equal(model.get_parameter(name), value) for name, value in vectors.items())
        assert is_tuned == bool(unread)
        artifacts.append(encoded.data)
    assert artifacts[0] != artifacts[1]


def test_only_text_that_the_run_has_not_read_is_trained_on(shared_run):
    source = run_source(shared_run())
    length, tokens = source.sequence_length, len(source.tokens.train)
    assert source.train_split == "training" and 0 < source.blocks_read * length < tokens - 64
    text = list(unread_batches(source, 64))
    assert sum(batch["input_ids"].numel() for batch in text) == 64 // length * length
    assert list(unread_batches(source, tokens)) == []
    assert list(unread_batches(replace(source, blocks_read=tokens // length), 64)) == []
    assert list(unread_batches(replace(source, train_split=None), 64)) == []
