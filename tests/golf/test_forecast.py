"""Forecasts against exports: predicted prices, and bytes that a real search finds, too."""

from __future__ import annotations

import pytest
from tiny_golf import measured_model

from hfgolf.config.sections import GolfSection
from hfgolf.golf.grid import entropy_bits
from hfgolf.golf.hooks import TOLERATED_NATS, forecast
from hfgolf.golf.quantize import matrices, quantize_model


@pytest.fixture(scope="module")
def model_and_curvature():
    return measured_model(std=0.4, rows=16)


def size_of(tensors):
    return 100 + round(sum(entropy_bits(one.integers) * one.integers.size / 8 for one in tensors.values()))


@pytest.mark.parametrize(("method", "allocation"), [("gptq", "curvature"), ("nearest", "sdclip")])
def test_export_takes_the_forecast_bytes_at_the_forecast_loss(model_and_curvature, method, allocation):
    model, curvature = model_and_curvature
    weights, options = matrices(model), {"method": method, "allocation": allocation}
    seen = forecast(weights, curvature, GolfSection(**options), overhead_bytes=500, size_of=size_of)
    assert seen["golf_step"] is seen["golf_loss"] is None
    exported = quantize_model(
        matrices(model), curvature, budget_bytes=seen["golf_bytes"], overhead_bytes=500, size_of=size_of, **options
    )
    errors = {name: one.dequantized() - weights[name] for name, one in exported.tensors.items()}
    price = sum(curvature[name].loss_increase(error) for name, error in errors.items())
    assert price == pytest.approx(TOLERATED_NATS, rel=0.2)
    golf = GolfSection(budget_bytes=seen["golf_bytes"], **options)
    again = forecast(weights, curvature, golf, overhead_bytes=500, size_of=size_of)
    assert again["golf_bytes"] == pytest.approx(seen["golf_bytes"], rel=0.02)
    assert again["golf_loss"] == pytest.approx(TOLERATED_NATS, rel=0.2)
    assert again["golf_step"] == pytest.approx(exported.scale, rel=0.03)


@pytest.mark.parametrize("share", [0.8, 1.25])
def test_the_step_at_the_budget_is_that_of_an_export_whatever_the_coder_takes(model_and_curvature, share):
    """The first attempt aims at predicted bytes; the rest of the way to the real ones is by a rule."""
    model, curvature = model_and_curvature
    weights, options = matrices(model), {"method": "nearest", "allocation": "curvature"}
    budget, coder = 30_000, lambda tensors: round(share * size_of(tensors))
    seen = forecast(weights, curvature, GolfSection(budget_bytes=budget, **options), overhead_bytes=0, size_of=coder)
    exported = quantize_model(
        matrices(model), curvature, budget_bytes=budget, overhead_bytes=0, size_of=coder, **options
    )
    assert seen["golf_step"] == pytest.approx(exported.scale, rel=0.15)
    plain = forecast(weights, curvature, GolfSection(budget_bytes=budget, **options), overhead_bytes=0, size_of=size_of)
    # half the step is a quarter of the price
    assert seen["golf_loss"] / plain["golf_loss"] == pytest.approx((seen["golf_step"] / plain["golf_step"]) ** 2)
