"""The plan for a budget: exact parameters, bits that fill the bytes, a fit that finds what made the runs."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hfgolf.commands.golf_plan import (
    DEFAULT_SCALING,
    Budget,
    Scaling,
    Shape,
    Throughput,
    best_shapes,
    bits_for,
    fit_law,
    fit_scaling,
    fit_throughput,
    shape_of,
    shapes,
)
from hfgolf.measure.flops import training_flops_per_token
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.system.errors import UserError

SHAPES = [Shape(257, 64, 2, 4, 2, 2), Shape(1024, 96, 3, 3, 3, 3), Shape(4096, 256, 5, 2, 4, 2)]


def meta_model(shape: Shape) -> GolfForCausalLM:
    fields = {name: value for name, value in vars(shape).items() if name != "mlp_ratio"}
    with torch.device("meta"):
        return GolfForCausalLM(GolfConfig(**fields, intermediate_size=shape.mlp_ratio * shape.hidden_size))


@pytest.mark.parametrize("shape", SHAPES)
def test_counts_match_the_model(shape):
    model = meta_model(shape)
    matrices = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    assert shape.parameters == model.num_parameters()
    assert shape.embedding + shape.blocks == sum(weight.numel() for weight in matrices.values())
    assert shape.rows == sum(len(weight) for weight in matrices.values())
    assert shape.flops_per_token(256) == training_flops_per_token(model, 256)


def test_every_shape_can_be_built():
    found = list(shapes([257]))
    assert len(set(found)) == len(found) > 1900
    for shape in found:
        assert shape.hidden_size % shape.num_attention_heads == 0
        assert shape.num_attention_heads % shape.num_key_value_heads == 0
        assert (shape.hidden_size // shape.num_attention_heads) % 2 == 0


def test_bits_fill_the_budget():
    for shape, num_bytes in itertools.product(SHAPES, (60_000, 500_000, 2_000_000, 16_000_000)):
        filled = bits_for(shape, Budget(num_bytes, 600.0))
        if filled is None:
            assert num_bytes < (shape.embedding + shape.blocks) * 1.5 / 8 + shape.embedding * 1.1 / 8 + 60_000
            continue
        bits, embedding_bits, parts = filled
        assert 1.5 <= bits <= embedding_bits <= 8
        assert sum(parts.values()) <= num_bytes
        if embedding_bits < 8:
            assert sum(parts.values()) > num_bytes - 4
    small = Shape(4096, 256, 5, 4, 4, 4)  # configs/small.yaml: 2,000,000 bytes are 3.2 bits per weight
    filled = bits_for(small, Budget(2_000_000, 600.0))
    assert filled is not None and small.embedding + small.blocks == 4_980_736
    bits, embedding_bits, _ = filled
    mean = (bits * small.blocks + embedding_bits * small.embedding) / 4_980_736
    assert mean == pytest.approx(3.2, abs=0.1)


def test_best_shapes_balance_bytes_and_training():
    speed = Throughput(1e11, 0.0, "")
    scaling = Scaling(0.8, 30.0, 0.3, 300.0, 0.4)

    def best(num_bytes: int, minutes: float) -> Shape:
        found = best_shapes(Budget(num_bytes, 60 * minutes), scaling, speed, {257: 1.0, 1024: 2.4}, 256)
        scores = [candidate.bits_per_byte for candidate in found]
        assert scores == sorted(scores) and len(found) == 10
        first = found[0]
        nats = scaling.loss(first.shape.blocks, first.tokens * {257: 1.0, 1024: 2.4}[first.shape.vocab_size])
        assert first.bits_per_byte == pytest.approx((nats + scaling.gap(first.bits)) / math.log(2))
        return first.shape

    few_bytes, more_bytes = best(100_000, 1000), best(1_000_000, 1000)
    assert few_bytes.parameters < more_bytes.parameters
    assert best(1_000_000, 1).blocks < more_bytes.blocks
    with pytest.raises(UserError, match="too few for any shape"):
        best_shapes(Budget(11_000, 60.0), scaling, speed, {257: 1.0}, 256)


def finished(shape: Shape, tokens: float, loss: float, tokens_per_second: float = 1e4) -> SimpleNamespace:
    """Return what the fit reads of a finished run. Its text has 2 bytes per token; loss: nats per byte."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    config = {f"model.{name}": getattr(shape, name) for name in names} | {"batch.sequence_length": 256}
    config |= {"model.num_key_value_heads": None, "model.intermediate_size": None}
    summary = {"tokens": tokens, "parameters": shape.parameters, "tokens_per_second": tokens_per_second}
    curve = [SimpleNamespace(final_loss=loss * 2)]
    return SimpleNamespace(config=config, summary=summary, curve=curve, evaluated_on=(1000, 2000))


RUN_SHAPES = [Shape(257, width, depth, 4, 2, 2) for width, depth in ((32, 2), (64, 2), (96, 3), (128, 4))]


def test_fit_recovers_the_law_and_the_speed_behind_the_runs():
    law = Scaling(0.9, 25.0, 0.325, 200.0, 0.4)
    runs = [
        finished(shape, tokens, law.loss(shape.blocks, 2 * tokens), 1 / (2e-5 + shape.flops_per_token(256) / 5e10))
        for shape in RUN_SHAPES
        for tokens in (1e6, 4e6, 2e7)
    ]
    fitted = fit_scaling(runs)
    assert (fitted.size_power, fitted.data_power) == pytest.approx((0.325, 0.4))
    assert (fitted.floor, fitted.size_scale, fitted.data_scale) == pytest.approx((0.9, 25.0, 200.0), rel=1e-3)
    assert "fitted to 12 runs, off by 0.0000 nats" in fitted.source
    assert shape_of(runs[0]) == RUN_SHAPES[0]
    speed = fit_throughput(runs)
    assert (speed.flops_per_second, speed.seconds_per_token) == pytest.approx((5e10, 2e-5))
    assert speed.tokens(RUN_SHAPES[0], 256, 10.0) == pytest.approx(10 * runs[0].summary["tokens_per_second"])


def test_too_few_different_runs_are_rejected():
    same_data = [finished(shape, 1e6, 1.0 + shape.blocks**-0.3) for shape in RUN_SHAPES]
    with pytest.raises(UserError, match="three amounts of training text or more"):
        fit_scaling(same_data)
    rising = [finished(s, tokens, tokens * s.blocks / 1e12) for s in RUN_SHAPES for tokens in (1e6, 4e6, 2e7)]
    with pytest.raises(UserError, match="do not fall with size and data"):
        fit_scaling(rising)


# Runs of configs/shakespeare_char.yaml without dropout and averages, decay 0.1: (weights in the blocks, characters of
# training, bits per byte on the whole validation part)
NINE_RUNS = [
    (38_400, 1_024_000, 2.9689), (38_400, 2_048_000, 2.5619), (38_400, 4_096_000, 2.3022),
    (98_304, 1_024_000, 2.8066), (98_304, 2_048_000, 2.3838), (98_304, 4_096_000, 2.1786),
    (331_776, 1_024_000, 2.5363), (331_776, 2_048_000, 2.1919), (331_776, 4_096_000, 2.0476),
]  # fmt: skip


# Rounding with steps by curvature: (bits per weight, added bits per byte) of four small models
ROUNDINGS = [(3.6, 0.0651), (3.6, 0.0196), (2.0, 0.3349), (5.5, 0.0007), (1.2, 1.1861), (3.2, 0.0102)]


def test_assumed_law_matches_nine_runs_and_its_gap_six_roundings():
    for rounded_bits, added in ROUNDINGS:
        assert 0.25 < DEFAULT_SCALING.gap(rounded_bits) / math.log(2) / added < 4
    errors = [DEFAULT_SCALING.loss(n, d) - bits * math.log(2) for n, d, bits in NINE_RUNS]
    assert math.sqrt(sum(error**2 for error in errors) / 9) == pytest.approx(0.022, abs=1e-3)
    weights, num_bytes, bits = (np.array(column, float) for column in zip(*NINE_RUNS, strict=True))
    fitted = fit_law(weights, num_bytes, bits * math.log(2), "fitted")
    assert (fitted.size_power, fitted.data_power) == pytest.approx((0.1, 0.95))
    for name in ("floor", "size_scale", "data_scale"):
        assert getattr(DEFAULT_SCALING, name) == pytest.approx(getattr(fitted, name), rel=0.02)


def test_assumptions_rank_models_as_measured():
    """500 steps of 8,192 characters, rounded to fit: four models at two budgets, by their measured scores."""
    four = {
        "A": Shape(257, 40, 2, 4, 2, 2), "B": Shape(257, 64, 2, 4, 2, 2), "C": Shape(257, 72, 3, 4, 3, 3),
        "D": Shape(257, 96, 3, 4, 3, 3),
    }  # fmt: skip
    for num_bytes, best_first in ((60_000, "BAC"), (150_000, "DCB")):
        found = {}
        for name in best_first:
            filled = bits_for(four[name], Budget(num_bytes, 4_096_000, 7_500))
            assert filled is not None
            found[name] = DEFAULT_SCALING.loss(four[name].blocks, 4_096_000) + DEFAULT_SCALING.gap(filled[0])
        assert sorted(found, key=found.__getitem__) == [*best_first]


def test_script_prints_ten_shapes_and_valid_training_options(run_script):
    from hfgolf.config.parse import load_config

    arguments = ("--budget_bytes", 150_000, "--minutes", 10, "--bytes_per_token", "257=1")
    status, printed, error = run_script("golf_plan.py", *arguments)
    assert (status, error) == (0, "")
    lines = printed.splitlines()
    assert len(lines[1:11]) == 10 and all(line.split()[2] == "257" for line in lines[1:11])
    assert "what binds is " in printed and "loss: assumed: " in printed and "speed: assumed: 40% of" in printed
    config = load_config([*lines[-1].split(), "--train.max_steps", "1"]).config
    assert config.model.hidden_size == int(lines[1].split()[3])
    assert config.golf.budget_bytes == 150_000
    status, printed, _ = run_script("golf_plan.py", *arguments, "--json")
    figures = json.loads(printed)
    assert status == 0 and len(figures["candidates"]) == 10
    first = figures["candidates"][0]
    assert sum(first["num_bytes"].values()) <= 150_000
    by_device = ("--budget_bytes", 16_000_000, "--minutes", 10, "--device", "H100", "--processes", 8, "--json")
    large = json.loads(run_script("golf_plan.py", *by_device).out)["candidates"][0]
    assert large["shape"]["hidden_size"] > first["shape"]["hidden_size"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--budget_bytes", 100), "is required"),
        (("--budget_bytes", 100, "--minutes", 1), "100 bytes are too few for any shape"),
        (("--budget_bytes", 10**6, "--minutes", 1, "--bytes_per_token", "4096"), "'4096' is not ENTRIES=BYTES"),
        (("--budget_bytes", 10**6, "--minutes", 1, "--bytes_per_token", "9=1"), "allowed: 257 entries or more"),
        (("--budget_bytes", 10**6, "--minutes", 1, "--device", "abacus"), "abacus is not in the table; known: "),
        (("--budget_bytes", 10**6, "--minutes", 1, "--runs", "a", "b"), "2 runs are too few for a fit; give 6"),
        (("--budget_bytes", 10**6, "--minutes", 1, "--runs", *"abcdef"), "a holds no complete run"),
    ],
)
def test_a_mistake_is_one_line(run_script, tmp_path: Path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    status, printed, error = run_script("golf_plan.py", *arguments)
    assert (status, printed, error.count("\n")) == (2, "", 1) and says in error, error
