"""Steps by curvature, SDClip and uniform steps, and the search for the number that a budget allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_golf import measured_model

from hfgolf.golf.artifact import model_encoder
from hfgolf.golf.curvature import Curvature, measure_curvature
from hfgolf.golf.gptq import error_feedback
from hfgolf.golf.grid import MAX_INTEGER, entropy_bits, gaussian_bits, round_nearest, steps_of
from hfgolf.golf.quantize import (
    allocate,
    matrices,
    mean_relative_step,
    predicted_bytes,
    quantize_model,
    scale_for_bytes,
)
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.system.errors import UserError


def random_curvature(generator, rows, columns):
    vectors = generator.standard_normal((3 * columns, columns)) @ generator.standard_normal((columns, columns))
    return Curvature(vectors.T @ vectors / len(vectors), np.exp(generator.standard_normal(rows)))


@pytest.fixture(scope="module")
def two_matrices():
    generator = np.random.default_rng(0)
    shapes = {"wide": (40, 96), "tall": (300, 24)}
    weights = {
        name: (generator.standard_normal(shape) * np.exp(generator.standard_normal((shape[0], 1)))).astype(np.float32)
        for name, shape in shapes.items()
    }
    return weights, {name: random_curvature(generator, *shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("has_feedback", [False, True])
def test_curvature_steps_give_every_row_the_same_loss(two_matrices, has_feedback):
    weights, curvature = two_matrices
    feedback = {name: error_feedback(one.hessian) for name, one in curvature.items()} if has_feedback else None
    plan = allocate(weights, "curvature", curvature, feedback)
    costs = []
    for name, unit in plan.items():
        columns = feedback[name].weights() if feedback else np.diag(curvature[name].hessian)
        costs.append(curvature[name].row_weights[:, None] * columns * unit.row_steps[:, None] ** 2)
    np.testing.assert_allclose(np.concatenate([one.mean(axis=1) for one in costs]), 1, rtol=1e-6)


def test_sdclip_spends_the_same_bits_on_every_row(two_matrices):
    weights, _ = two_matrices
    plan = allocate(weights, "sdclip", {}, None)
    for name, unit in plan.items():
        rms = np.sqrt(np.square(weights[name].astype(np.float64)).mean(axis=1))
        np.testing.assert_allclose(steps_of(unit.row_codes(12.85 / 31)) / rms, 12.85 / 31, rtol=2 ** (1 / 16) - 1)
    assert mean_relative_step(plan) == pytest.approx(1)
    sizes = sum(w.size for w in weights.values()) * float(gaussian_bits(12.85 / 31)) / 8
    side = sum(w.shape[0] + w.shape[1] / 2 for w in weights.values())
    assert predicted_bytes(plan, 12.85 / 31) == pytest.approx(sizes + side, rel=0.005)


@pytest.mark.parametrize("allocation", ["curvature", "sdclip", "uniform"])
def test_predicted_bytes_match_the_entropy_of_gaussian_rows(two_matrices, allocation):
    weights, curvature = two_matrices
    plan = allocate(weights, allocation, curvature, None)
    scale = scale_for_bytes(plan, 4000)
    assert predicted_bytes(plan, scale) == pytest.approx(4000, rel=0.005)
    bits = side = 0.0
    for name, unit in plan.items():
        rounded = round_nearest(weights[name], unit.row_codes(scale))
        relative = steps_of(rounded.row_codes) / unit.row_rms
        assert not np.isnan(relative).any()
        # what a coder that knows each row's scale reaches: the entropy of Gaussian draws on the same grid
        draws = np.random.default_rng(1).standard_normal((len(relative), 4000)) / relative[:, None]
        bits += sum(entropy_bits(np.rint(row).astype(np.int32)) for row in draws) * weights[name].shape[1]
        side += weights[name].shape[0] + weights[name].shape[1] / 2
    assert bits / 8 + side == pytest.approx(4000, rel=0.01)


@pytest.mark.parametrize("allocation", ["curvature", "uniform"])
def test_rows_that_share_a_step_change_their_codes_one_after_the_other(allocation):
    """As those of tokens that never occur; else the size would jump, and budgets near the jump could not be filled."""
    weights = {name: np.ones((500, 4), np.float32) for name in ("first", "second")}
    curvature = {name: Curvature(np.eye(4), np.ones(500)) for name in weights}
    plan = allocate(weights, allocation, curvature, None)
    for octaves in np.linspace(-3, -2, 7):
        before, after = (
            np.concatenate([unit.row_codes(2 ** (octaves + more)) for unit in plan.values()]).astype(int)
            for more in (0, 1 / 64)
        )
        assert (after - before).mean() == pytest.approx(8 / 64, abs=0.01)


def test_outlier_makes_its_row_coarser_instead_of_being_clipped():
    weight = np.full((2, 50), 1e-3, dtype=np.float32)
    weight[1, 7] = 1e3
    unit = allocate({"w": weight}, "uniform", {}, None)["w"]
    rounded = round_nearest(weight, unit.row_codes(1e-4))
    assert np.abs(rounded.integers).max() <= MAX_INTEGER
    assert rounded.dequantized()[1, 7] == pytest.approx(1e3, rel=1e-4)
    assert steps_of(rounded.row_codes)[0] == pytest.approx(1e-4, rel=0.1)


@pytest.fixture(scope="module")
def small_model():
    return measured_model(std=0.15, rows=4)


def size_of(tensors):
    return 100 + round(0.9 * sum(entropy_bits(one.integers) * one.integers.size / 8 for one in tensors.values()))


def fill(small_model, budget, overhead=0, size_of=size_of, **options):
    model, curvature = small_model
    return quantize_model(
        matrices(model), curvature, budget_bytes=budget, overhead_bytes=overhead, size_of=size_of, **options
    )


@pytest.mark.parametrize("allocation", ["curvature", "sdclip", "uniform"])
@pytest.mark.parametrize("method", ["gptq", "nearest"])
@pytest.mark.parametrize("bits", [1.5, 7])
def test_quantized_model_fills_the_budget(small_model, allocation, method, bits):
    model, _ = small_model
    budget = 3000 + round(sum(w.size for w in matrices(model).values()) * bits / 8)
    codings = list[str]()
    quantized = fill(small_model, budget, 3000, method=method, allocation=allocation, progress=codings.append)
    assert 0.995 * budget <= quantized.size_bytes <= budget
    assert quantized.size_bytes == 3000 + size_of(quantized.tensors)
    assert len(codings) <= 5
    assert quantized.findings == []
    assert set(quantized.tensors) == set(matrices(model))


@pytest.mark.slow
def test_a_real_artifact_of_half_a_bit_per_weight_lands_in_the_last_half_percent_of_the_budget(small_model):
    model, _ = small_model
    encode = model_encoder(model)
    budget = 7000 + round(sum(weight.size for weight in matrices(model).values()) * 0.5 / 8)
    quantized = fill(small_model, budget, 7000, lambda tensors: len(encode(tensors).data))
    assert 0.995 * budget <= quantized.size_bytes <= budget
    assert quantized.size_bytes == 7000 + len(encode(quantized.tensors).data)


@pytest.mark.parametrize("bits", [0.3, 1, 3])
def test_curvature_and_passing_errors_on_lower_the_predicted_loss_at_any_size(small_model, bits):
    model, curvature = small_model
    weights = matrices(model)
    budget = round(sum(weight.size for weight in weights.values()) * bits / 8)

    def loss(method: str, allocation: str) -> float:
        tensors = fill(small_model, budget, method=method, allocation=allocation).tensors
        return sum(curvature[name].loss_increase(one.dequantized() - weights[name]) for name, one in tensors.items())

    least = loss("gptq", "curvature")
    assert least < loss("nearest", "curvature") < loss("nearest", "sdclip") and least < loss("gptq", "sdclip")


def test_too_small_budget_error_names_the_bytes_needed(small_model):
    with pytest.raises(UserError, match=r"^budget_bytes: 5,650 is too small: .* still takes \S+ bytes") as said:
        fill(small_model, 5650, 5500)
    needed = int(str(said.value).split("takes ")[1].split(" ")[0].replace(",", ""))
    assert fill(small_model, round(1.05 * needed), 5500).size_bytes <= 1.05 * needed


def test_too_large_budget_reports_the_free_bytes(small_model):
    quantized = fill(small_model, 10**6)
    assert len(quantized.findings) == 1 and f"{10**6 - quantized.size_bytes:,} bytes stay free" in quantized.findings[0]
    for name, weight in matrices(small_model[0]).items():
        error = quantized.tensors[name].dequantized() - weight
        assert np.sqrt(np.square(error).mean()) < 2e-2 * np.sqrt(np.square(weight).mean())


def test_no_step_is_coded_twice_when_the_size_jumps_over_the_budget(small_model):
    codings = list[str]()
    jumping = lambda tensors: size_of(tensors) + 300 * (size_of(tensors) > 8850)  # noqa: E731
    quantized = fill(small_model, 9000, size_of=jumping, progress=codings.append)
    assert len({line.partition(": ")[2] for line in codings}) == len(codings)
    free = 9000 - quantized.size_bytes
    assert quantized.findings == [f"No step came closer to the budget: {free:,} bytes stay free."]


def test_fresh_model_with_zero_projections_can_be_rounded():
    model = GolfForCausalLM(GolfConfig(vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=2))
    ids = torch.arange(96).view(2, 48)
    curvature = measure_curvature(model, [{"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:]}])
    for allocation in ("curvature", "sdclip", "uniform"):
        quantized = fill((model, curvature), 4000, allocation=allocation)
        assert quantized.size_bytes <= 4000
        assert not quantized.tensors["model.layers.0.self_attn.o_proj.weight"].integers.any()
        if allocation == "curvature":  # no gradient gets past a projection that is zero
            assert not quantized.tensors["model.layers.0.self_attn.qkv_proj.weight"].integers.any()


def test_error_variances_are_those_of_rounding():
    """Of uniform weights, by rounding them: step^2 / 12 while steps are fine, then all of the weight."""
    weight = np.random.default_rng(0).uniform(-1, 1, (4, 50_000)).astype(np.float32)
    weight *= np.array([[1], [2], [4], [8]], np.float32)
    unit = allocate({"w": weight}, "uniform", {}, None)["w"]
    for scale, is_fine in ((0.01, True), (0.05, True), (100.0, False)):
        steps = steps_of(unit.row_codes(scale))[:, None]
        errors = weight - np.rint(weight / steps) * steps
        np.testing.assert_allclose(unit.error_variances(scale), np.square(errors).mean(axis=1), rtol=0.03)
        assert (unit.error_variances(scale) < 0.01 * unit.row_rms**2).all() == is_fine
