"""What is trained after rounding: the loss on other text is lower, or nothing has changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from hfgolf.golf import tuning
from hfgolf.golf.curvature import calibration_batches, grid_layers, measure_curvature, total_loss
from hfgolf.golf.export import tuning_batches
from hfgolf.golf.grid import round_nearest, row_codes_of
from hfgolf.golf.packing import StateCoding, fill
from hfgolf.golf.quantize import matrices
from hfgolf.golf.source import run_source
from hfgolf.golf.tuning import HELD_OUT, tune
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
    """Return a trained model, and its matrices before and after coarse rounding."""
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
    weights = matrices(model)
    rounded = {
        name: round_nearest(weight, row_codes_of(np.full(len(weight), 2 * weight.std())))
        for name, weight in weights.items()
    }
    return model.eval(), weights, rounded


@pytest.fixture
def model(trained):
    """Return the trained model, which is afterwards what it was."""
    own = {name: tensor.clone() for name, tensor in trained[0].state_dict().items()}
    yield trained[0]
    trained[0].load_state_dict(own)


def loss_with(model, tensors, text):
    """Return the mean loss with these matrices."""
    layers = {name: layer for layer, name in grid_layers(model).items()}
    own = {name: model.get_parameter(name).clone() for name in tensors}
    with torch.no_grad():
        for name, one in tensors.items():
            weight = torch.from_numpy(one.dequantized())
            model.get_parameter(name).copy_(weight.T if isinstance(layers[name], Conv1D) else weight)
        nats, count = total_loss(model, text)
        for name, weight in own.items():
            model.get_parameter(name).copy_(weight)
    return nats / count


@pytest.mark.parametrize("part", ["both", "integers", "vectors"])
def test_tuning_lowers_the_loss_on_other_text(model, trained, part, monkeypatch):
    _, weights, rounded = trained
    other, before = batches(50, seed=2), {name: one.clone() for name, one in model.state_dict().items()}
    nats, count = total_loss(model, other)
    added = loss_with(model, rounded, other) - nats / count
    assert added > 0.1
    monkeypatch.setattr(tuning, "RATE", 0 if part == "integers" else tuning.RATE)
    monkeypatch.setattr(tuning, "INTEGER_RATE", 0 if part == "vectors" else tuning.INTEGER_RATE)
    tuned = tune(model, weights, rounded, batches(64, seed=3))
    assert loss_with(model, tuned, other) - nats / count < 0.9 * added
    moves = np.concatenate([(tuned[name].integers - one.integers).ravel() for name, one in rounded.items()])
    assert np.abs(moves).max() == (0 if part == "vectors" else 1) and (moves != 0).mean() < 0.2
    for name, value in before.items():  # a tied head has another name in the state than among the parameters
        is_tuned = not torch.equal(model.state_dict()[name], value)
        assert not is_tuned or (value.ndim < 2 and part != "integers"), name


@pytest.mark.parametrize("rate", [1e3, float("nan")])
def test_what_is_no_better_is_not_kept(model, trained, rate, monkeypatch):
    monkeypatch.setattr(tuning, "RATE", rate)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, weights, rounded = trained
    assert tune(model, weights, rounded, batches(64, seed=3)) is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("count", [HELD_OUT - 1, 64])
def test_what_is_frozen_or_in_training_mode_stays_so(model, trained, count):
    frozen = [name for name, parameter in model.named_parameters() if parameter.ndim < 2][::2]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    model.train()
    _, weights, rounded = trained
    assert (tune(model, weights, rounded, batches(count, seed=3)) is not None) == (count == 64)
    assert model.training and all(module.training for module in model.modules())
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    model.requires_grad_().eval()


def test_weights_in_two_layers_and_two_parameters_are_tuned_as_one():
    """Two parameters may read the same memory, as in a model whose head was tied by hand."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY, bias=False))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach())
    weights = matrices(model)
    assert list(weights) == ["0.weight"]
    rounded = {"0.weight": round_nearest(weights["0.weight"], row_codes_of(np.full(VOCABULARY, 1.0)))}
    text = batches(64, seed=3)
    tuned = tune(model, weights, rounded, text)

    def loss(tensors):
        with torch.no_grad():
            model[0].weight.copy_(torch.from_numpy(tensors["0.weight"].dequantized()))
            return total_loss(model, text)[0]

    assert loss(tuned) < loss(rounded)


def test_a_model_without_logits_is_left_alone(model, trained):
    class OnlyLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, batch):
            return self.inner(input_ids=batch, labels=batch).loss

    weights, rounded = ({f"inner.{name}": one for name, one in each.items()} for each in trained[1:])
    assert tune(OnlyLoss(), weights, rounded, batches(16, seed=3)) is None


def test_the_artifact_has_what_was_tuned(model):
    batch = batches(8, seed=4)
    curvature = measure_curvature(model, batch)
    options = {"budget_bytes": 4500, "overhead_bytes": 500, "progress": lambda line: None}
    weights = StateCoding(model).weights
    vectors = {name: parameter.clone() for name, parameter in model.named_parameters() if parameter.ndim < 2}
    artifacts = []
    for text in ((), batches(64, seed=3)):
        quantized, encoded = fill(model, weights, curvature, lambda: StateCoding(model).encode, text, **options)
        least = 0.97 if text else 0.99  # tuned integers are smaller, too
        assert least * 4500 <= 500 + len(encoded.data) == quantized.size_bytes <= 4500
        is_tuned = any(not torch.equal(model.get_parameter(name), value) for name, value in vectors.items())
        assert is_tuned == bool(text)
        artifacts.append(encoded.data)
    assert artifacts[0] != artifacts[1]


def test_a_run_is_tuned_on_the_text_of_the_curvature_and_as_much_after_it(shared_run):
    source = run_source(shared_run())
    count = 2 * source.sequence_length
    options = {"seed": source.seed, "sequence_length": source.sequence_length, "blocks_read": source.blocks_read}
    calibration = calibration_batches(source.tokens.train, num_tokens=count, **options)
    measured, text = (
        torch.cat([batch["input_ids"] for batch in each]) for each in (calibration, tuning_batches(source, count))
    )
    assert len(text) == 4 and torch.equal(text[:2], measured)
