"""The plan for a budget: exact parameters, bits that fill the bytes, a law that matches what was measured."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from hfgolf.commands.golf_plan import Shape, best_shapes, bits_for, predicted_loss, rounding_loss, shapes
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
        filled = bits_for(shape, num_bytes)
        if filled is None:
            assert num_bytes < (shape.embedding + shape.blocks) * 1.5 / 8 + shape.embedding * 1.1 / 8 + 60_000
            continue
        bits, embedding_bits, parts = filled
        assert 1.5 <= bits <= embedding_bits <= 8
        assert sum(parts.values()) <= num_bytes
        if embedding_bits < 8:
            assert sum(parts.values()) > num_bytes - 4
    small = Shape(4096, 256, 5, 4, 4, 4)  # configs/small.yaml: 2,000,000 bytes are 3.2 bits per weight
    filled = bits_for(small, 2_000_000)
    assert filled is not None and small.embedding + small.blocks == 4_980_736
    bits, embedding_bits, _ = filled
    mean = (bits * small.blocks + embedding_bits * small.embedding) / 4_980_736
    assert mean == pytest.approx(3.2, abs=0.1)


def test_best_shapes_balance_bytes_and_training():
    def best(num_bytes: int, minutes: float) -> Shape:
        def tokens_of(shape: Shape) -> float:
            return 60 * minutes * 1e11 / shape.flops_per_token(256)

        found = best_shapes(num_bytes, tokens_of, {257: 1.0, 1024: 2.4})
        scores = [candidate.bits_per_byte for candidate in found]
        assert scores == sorted(scores) and len(found) == 10
        first = found[0]
        nats = predicted_loss(first.shape.blocks, first.tokens * {257: 1.0, 1024: 2.4}[first.shape.vocab_size])
        assert first.bits_per_byte == pytest.approx((nats + rounding_loss(first.bits)) / math.log(2))
        return first.shape

    few_bytes, more_bytes = best(100_000, 1000), best(1_000_000, 1000)
    assert few_bytes.parameters < more_bytes.parameters
    assert best(1_000_000, 0.1).blocks < more_bytes.blocks
    with pytest.raises(UserError, match="too few for any shape"):
        best_shapes(11_000, lambda shape: 1e6, {257: 1.0})


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
        assert 0.25 < rounding_loss(rounded_bits) / math.log(2) / added < 4
    errors = [predicted_loss(n, d) - bits * math.log(2) for n, d, bits in NINE_RUNS]
    assert math.sqrt(sum(error**2 for error in errors) / 9) == pytest.approx(0.022, abs=1e-3)


def test_assumptions_rank_models_as_measured():
    """500 steps of 8,192 characters, rounded to fit: four models at two budgets, by their measured scores."""
    four = {
        "A": Shape(257, 40, 2, 4, 2, 2), "B": Shape(257, 64, 2, 4, 2, 2), "C": Shape(257, 72, 3, 4, 3, 3),
        "D": Shape(257, 96, 3, 4, 3, 3),
    }  # fmt: skip
    for num_bytes, best_first in ((60_000, "BAC"), (150_000, "DCB")):
        found = {}
        for name in best_first:
            filled = bits_for(four[name], num_bytes)
            assert filled is not None
            found[name] = predicted_loss(four[name].blocks, 4_096_000) + rounding_loss(filled[0])
        assert sorted(found, key=found.__getitem__) == [*best_first]


def test_script_prints_ten_shapes_and_valid_training_options(hfgolf):
    from hfgolf.config.parse import load_config

    arguments = ("--budget_bytes", 150_000, "--minutes", 10, "--bytes_per_token", "257=1")
    status, printed, error = hfgolf("golf plan", *arguments)
    assert (status, error) == (0, "")
    lines = printed.splitlines()
    assert len(lines[1:11]) == 10 and all(line.split()[2] == "257" for line in lines[1:11])
    assert "what binds is " in printed and "loss: assumed: " in printed and "speed: assumed: 40% of" in printed
    config = load_config([*lines[-1].split(), "--train.max_steps", "1"]).config
    assert config.model.hidden_size == int(lines[1].split()[3])
    assert config.golf.budget_bytes == 150_000
    status, printed, _ = hfgolf("golf plan", *arguments, "--json")
    figures = json.loads(printed)
    assert status == 0 and len(figures["candidates"]) == 10
    first = figures["candidates"][0]
    assert sum(first["num_bytes"].values()) <= 150_000
    by_device = ("--budget_bytes", 16_000_000, "--minutes", 10, "--device", "H100", "--processes", 8, "--json")
    large = json.loads(hfgolf("golf plan", *by_device).out)["candidates"][0]
    assert large["shape"]["hidden_size"] > first["shape"]["hidden_size"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--budget_bytes", 100), "is required"),
        (("--budget_bytes", 100, "--minutes", 1), "100 bytes are too few for any shape"),
        (("--budget_bytes", 10**6, "--minutes", 1, "--bytes_per_token", "4096"), "'4096' is not ENTRIES=BYTES"),
        (("--budget_bytes", 10**6, "--minutes", 1, "--bytes_per_token", "9=1"), "allowed: 257 entries or more"),
        (("--budget_bytes", 10**6, "--minutes", 1, "--device", "abacus"), "abacus is not in the table; known: "),
        (("--budget_bytes", 10**6, "--minutes", 1, "--runs", "a"), "--runs a; `hfgolf golf plan --help`"),
        (("--budget_bytes", 10**6, "--tokens", 10**6, "--device", "H100"), "--device: only with --minutes"),
    ],
)
def test_a_mistake_is_one_line(hfgolf, tmp_path: Path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    status, printed, error = hfgolf("golf plan", *arguments)
    assert (status, printed, error.count("\n")) == (2, "", 1) and says in error, error
