"""Curvature against gradients taken one by one, the loss's own second derivatives, and losses that really rose."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hfgolf.data.batches import build_loader
from hfgolf.golf import curvature as module
from hfgolf.golf.curvature import (
    ROW_FLOOR,
    Curvature,
    added,
    calibrated_curvature,
    calibration_batches,
    measure_curvature,
    token_counts,
)
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM


def tiny(**changes):
    torch.manual_seed(0)
    shape = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = GolfForCausalLM(GolfConfig(**(shape | {"max_position_embeddings": 32} | changes)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def text(rows=4, length=12, vocabulary=37, seed=0):
    ids = torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:]}


def floored(weights):
    return np.maximum(weights, ROW_FLOOR * weights.mean())


def test_hidden_layer_curvature_is_input_and_gradient_moments():
    model, batch = tiny(), text()
    name = "model.layers.1.mlp.down_proj"
    module, seen = model.get_submodule(name), {}

    def offset(module, inputs, output):
        seen["inputs"] = inputs[0].detach()
        seen["offset"] = torch.zeros_like(output, requires_grad=True)
        return output + seen["offset"]

    handle = module.register_forward_hook(offset)
    nats = F.cross_entropy(
        model(input_ids=batch["input_ids"]).logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum"
    )
    nats.backward()
    handle.remove()
    gradients, inputs = seen["offset"].grad.flatten(0, 1).double(), seen["inputs"].flatten(0, 1).double()
    halves = [{key: value[i : i + 2] for key, value in batch.items()} for i in (0, 2)]  # sums over batches
    curvature = measure_curvature(model, halves)[f"{name}.weight"]
    np.testing.assert_allclose(curvature.hessian, inputs.T @ inputs / len(inputs), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(curvature.row_weights, floored(gradients.square().mean(0).numpy()), rtol=1e-4)
    moments = (gradients.T @ gradients / len(gradients)).numpy()
    np.testing.assert_allclose(curvature.output_hessian, moments, rtol=1e-4, atol=1e-6 * moments.max())


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_head_curvature_is_the_expected_squared_gradient(soft_cap):
    """Over labels drawn from the model's own distribution, which is also its expected second derivative."""
    model, batch = tiny(tie_word_embeddings=False, logit_soft_cap=soft_cap), text()
    uncapped = model.lm_head(model.model(batch["input_ids"]).last_hidden_state).detach().flatten(0, 1)
    expected = torch.zeros(37, dtype=torch.float64)
    for label in range(37):
        point = uncapped.double().requires_grad_()
        logs = (point if soft_cap is None else soft_cap * torch.tanh(point / soft_cap)).log_softmax(-1)[:, label]
        (gradients,) = torch.autograd.grad(logs.sum(), point)
        expected += (logs.detach().exp()[:, None] * gradients.square()).mean(0)
    weights = measure_curvature(model, [batch])["lm_head.weight"].row_weights
    np.testing.assert_allclose(weights, floored(expected.numpy()), rtol=1e-4)


def test_embedding_curvature_weighs_tokens_by_the_whole_stream():
    model, batch = tiny(tie_word_embeddings=False), text()
    counts = np.zeros(37, dtype=np.int64)
    counts[[3, 5]] = 300, 700
    measured = measure_curvature(model, [batch], counts)["model.embed_tokens.weight"]
    np.testing.assert_allclose(measured.row_weights, floored((counts + 0.5) / 1000), rtol=1e-9)
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    nats = F.cross_entropy(
        model(inputs_embeds=embedded).logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum"
    )
    (gradients,) = torch.autograd.grad(nats, embedded)
    gradients = gradients.flatten(0, 1).double()
    np.testing.assert_allclose(measured.hessian, gradients.T @ gradients / len(gradients), rtol=1e-3, atol=1e-6)
    own = measure_curvature(model, [batch])["model.embed_tokens.weight"]
    occurrences = np.bincount(batch["input_ids"].flatten(), minlength=37)
    np.testing.assert_allclose(own.row_weights, floored((occurrences + 0.5) / 48), rtol=1e-9)


def test_tied_embedding_curvature_sums_both_sides():
    generator = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        vectors = generator.standard_normal((20, 5))
        sides.append(Curvature(vectors.T @ vectors, generator.uniform(0, 1, 9)))
    both = added(*sides)
    errors = generator.standard_normal((4000, 9, 5))
    separately = np.mean([sides[0].loss_increase(e) + sides[1].loss_increase(e) for e in errors])
    assert np.mean([both.loss_increase(e) for e in errors]) == pytest.approx(separately, rel=0.02)
    for row in range(9):  # the same for each row
        one = np.zeros((9, 5))
        one[row] = 1
        alike = sum(side.row_weights[row] * np.trace(side.hessian) for side in sides)
        assert both.row_weights[row] * np.trace(both.hessian) == pytest.approx(alike)
    tied = measure_curvature(tiny(), [text()])
    assert "lm_head.weight" not in tied and tied["model.embed_tokens.weight"].row_weights.shape == (37,)


def test_repeated_layer_curvature_covers_all_passes():
    twice, batch = tiny(), text()
    shared = twice.model.layers[0]
    twice.model.layers = torch.nn.ModuleList([shared, shared])
    both = measure_curvature(twice, [batch])["model.layers.0.mlp.up_proj.weight"]
    passes = []
    handle = shared.mlp.up_proj.register_forward_hook(lambda module, inputs, output: passes.append(inputs[0].detach()))
    twice(batch["input_ids"], use_cache=False)
    handle.remove()
    inputs = torch.cat([x.flatten(0, 1) for x in passes]).double()
    assert len(passes) == 2 and len(inputs) == 2 * batch["input_ids"].numel()
    np.testing.assert_allclose(both.hessian, inputs.T @ inputs / len(inputs), rtol=1e-4, atol=1e-6)


def test_measuring_curvature_leaves_the_model_unchanged():
    model = tiny().train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        measure_curvature(model, [text()])
    assert model.training and not any(module._forward_hooks for module in model.modules())
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and parameter.requires_grad
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)
    with pytest.raises(ValueError, match="no calibration text"):
        measure_curvature(model, [])


def test_curvature_sums_are_exact_under_autocast():
    """Accelerate wraps a model's forward in autocast."""
    model, batch = tiny(), text()
    exact = measure_curvature(model, [batch])
    real = model.forward
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(real)
    for name, one in measure_curvature(model, [batch]).items():
        assert np.linalg.eigvalsh(one.hessian)[0] > -1e-6 * np.diag(one.hessian).mean()
        np.testing.assert_allclose(np.trace(one.hessian), np.trace(exact[name].hessian), rtol=0.05)


def test_large_vocabularies_are_measured_in_small_batches(monkeypatch):
    stream = Stream(np.random.default_rng(0).integers(0, 37, 500))
    settings = {"seed": 3, "sequence_length": 12, "blocks_read": 0, "num_tokens": 96}
    whole = calibrated_curvature(tiny(), stream, **settings)
    monkeypatch.setattr(module, "_LOGITS_PER_PASS", 37 * 12)  # one row per pass
    model, rows = tiny(), []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    parts = calibrated_curvature(model, stream, **settings)
    assert rows == [1] * 8
    for name, one in whole.items():
        np.testing.assert_allclose(parts[name].row_weights, one.row_weights, rtol=1e-4)
        np.testing.assert_allclose(parts[name].hessian, one.hessian, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"]
)
def test_curvature_predicts_the_rise_of_the_loss(name):
    """On labels that the model draws itself, where the curvature of the loss is that of its KL divergence."""
    model = tiny(tie_word_embeddings=False)
    ids = text(rows=64)["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits.flatten(0, 1)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(1)).view_as(ids)
    curvature = measure_curvature(model, [{"input_ids": ids, "shift_labels": labels}])[name]
    weight, generator = model.get_parameter(name), torch.Generator().manual_seed(2)
    before = weight.detach().clone()
    measured, predicted = [], []
    for _ in range(8):
        noise = 0.02 * torch.randn(weight.shape, generator=generator)
        with torch.no_grad():
            weight.copy_(before + noise)
            moved = model(ids).logits.flatten(0, 1)
            measured.append(
                F.kl_div(moved.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="batchmean")
            )
            predicted.append(curvature.loss_increase(noise.numpy()))
    assert math.log2(np.mean(predicted) / np.mean(measured)) == pytest.approx(0, abs=0.5)


class Stream:
    """Blocks are read in any order, past the end from its beginning."""

    is_target = None

    def __init__(self, tokens):
        self.tokens = tokens.astype(np.uint16)

    def __len__(self):
        return len(self.tokens)

    def read(self, indices):
        return self.tokens.take(indices, mode="wrap")


def test_calibration_text_is_what_the_run_would_read_next():
    stream, settings = Stream(np.arange(1000)), {"seed": 3, "sequence_length": 10, "blocks_read": 40}
    batches = list(calibration_batches(stream, **settings, num_tokens=205, batch_size=8))
    assert [len(batch["input_ids"]) for batch in batches] == [8, 8, 4]
    loader = build_loader(stream, **settings, micro_batch_size=20, accumulation=1, rank=0, world=1, num_steps=1)
    (expected,) = loader
    for key in ("input_ids", "shift_labels"):
        assert torch.equal(torch.cat([batch[key] for batch in batches]), expected[key])


def test_long_streams_are_counted_in_evenly_spaced_parts(monkeypatch):
    stream = Stream(np.repeat(np.arange(8), 1000))
    np.testing.assert_array_equal(token_counts(stream, 10), [1000] * 8 + [0, 0])
    monkeypatch.setattr(module, "_COUNTED_TOKENS", 640)
    counted = token_counts(stream, 10)
    assert counted.sum() == 640 and counted[8:].sum() == 0
    np.testing.assert_allclose(counted[:8], 80, atol=10)
