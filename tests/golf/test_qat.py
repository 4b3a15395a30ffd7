"""Rounding while a model runs, against autograd with a straight-through function, and grids read off weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_golf import measured_model
from torch.nn import functional as F

from hfgolf.golf.curvature import measure_curvature
from hfgolf.golf.grid import Quantized, entropy_bits, grid_of, round_nearest, row_codes_of
from hfgolf.golf.hooks import Rounding, packed_codes
from hfgolf.golf.quantize import _shrunk, matrices, on_own_grid, quantize_model


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, rounded):
        return rounded

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.fixture
def model():
    return measured_model(std=0.2, rows=4)[0]


@pytest.fixture
def batch():
    ids = torch.randint(96, (4, 33), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:]}


def codes_of(model, step=0.5):
    """Steps of half a standard deviation, finer by row."""
    return {
        name: row_codes_of(np.full(len(weight), 0.2 * step) * np.geomspace(1, 0.5, len(weight)))
        for name, weight in matrices(model).items()
    }


def test_rounded_pass_has_straight_through_gradients(model, batch):
    codes = codes_of(model)
    rounding = Rounding(model, packed_codes(codes))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    saved = model.state_dict()  # as a checkpoint that is written in the background
    with rounding.applied():
        assert all(torch.equal(saved[name], value) for name, value in before.items())
        for name, one in codes.items():
            expected = round_nearest(before[name].numpy(), one).dequantized()
            np.testing.assert_array_equal(model.get_parameter(name).detach().numpy(), expected)
        model(**batch).loss.backward()
    assert rounding.num_rounded == len(codes)
    with pytest.raises(RuntimeError), rounding.applied():  # and after an error
        raise RuntimeError("out of memory")
    rounded = dict(model.named_parameters())
    for name, one in codes.items():
        values = torch.from_numpy(round_nearest(before[name].numpy(), one).dequantized())
        rounded[name] = StraightThrough.apply(rounded[name], values)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = torch.func.functional_call(model, rounded, (), {"input_ids": batch["input_ids"]}, tie_weights=True).logits
    F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])  # bit for bit
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_compiled_graph_sees_the_rounding(model, batch):
    compiled = torch.compile(model, backend="eager")
    plain = compiled(**batch).loss.item()
    with Rounding(model, packed_codes(codes_of(model, 4.0))).applied():
        rounded = compiled(**batch).loss.item()
        assert rounded == pytest.approx(model.forward(**batch).loss.item(), rel=1e-5)
    assert abs(rounded - plain) > 0.01
    assert compiled(**batch).loss.item() == plain


def test_grid_is_recognized_from_the_weights():
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((30, 64)).astype(np.float32)
    assert grid_of(weight) is None
    codes = row_codes_of(generator.uniform(0.01, 1, 30))
    weight[7] = 0
    rounded = round_nearest(weight, codes)
    found = grid_of(rounded.dequantized())
    np.testing.assert_array_equal(found.dequantized(), rounded.dequantized())
    has_odd = (rounded.integers % 2 != 0).any(axis=1)  # else a coarser grid does, too
    np.testing.assert_array_equal(found.row_codes[has_odd], codes[has_odd])
    assert not found.integers[7].any()
    almost = rounded.dequantized()
    almost[3, 3] = np.nextafter(almost[3, 3], np.float32(9))
    assert grid_of(almost) is None


def test_export_keeps_the_grid_of_a_rounded_model(model, batch):
    def size_of(tensors):
        return round(sum(entropy_bits(one.integers) * one.integers.size / 8 for one in tensors.values()))

    codes = codes_of(model)
    curvature = measure_curvature(model, [batch])
    with Rounding(model, packed_codes(codes)).applied():
        rounded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(rounded)
    weights = matrices(model)
    size = 500 + size_of({name: round_nearest(weight, codes[name]) for name, weight in weights.items()})
    options = {"overhead_bytes": 500, "size_of": size_of}
    kept = on_own_grid(weights, curvature, budget_bytes=size + 100, **options)
    assert kept.size_bytes <= size and "on a grid already" in kept.findings[0]
    assert kept.scale == pytest.approx(0.5, rel=0.4)
    for name, weight in weights.items():
        np.testing.assert_array_equal(kept.tensors[name].dequantized(), weight)
    almost = on_own_grid(weights, curvature, budget_bytes=size - 40, **options)
    assert size - 120 <= almost.size_bytes <= size - 40
    changes = [np.abs(one.integers) - np.abs(kept.tensors[name].integers) for name, one in almost.tensors.items()]
    count = sum(int((change == -1).sum()) for change in changes)
    assert 0 < count < 0.02 * sum(change.size for change in changes) and all(
        np.isin(one, (0, -1)).all() for one in changes
    )
    assert f"{count:,} integers" in almost.findings[0]
    assert on_own_grid(weights, curvature, budget_bytes=size - 3000, **options) is None
    smaller = quantize_model(weights, curvature, budget_bytes=size - 3000, **options)
    assert smaller.size_bytes <= size - 3000 and smaller.findings == []


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_of_one_sign_can_go_nearer_to_zero(sign):
    integers = sign * np.array([[2, 1, 1, 1, 3, 2, 1, 1]] * 8, dtype=np.int32)
    tensors = {"w": Quantized(integers, np.full(8, 190, np.uint8))}
    shrunk = _shrunk(tensors, {}, 1.0)["w"].integers
    assert entropy_bits(shrunk) < entropy_bits(integers) and set((np.abs(integers) - np.abs(shrunk)).flat) == {0, 1}
