"""Every key that takes one of a few names: each name does something of its own, and an unknown one is refused where it
is used, not taken for another.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_origin

import numpy as np
import pytest
import torch
from datasets import Dataset

from hfgolf.config.parse import KEY_TYPES
from hfgolf.config.sections import OptimSection, ScheduleSection, TokenizerSection
from hfgolf.data.tokenizer import build_tokenizer
from hfgolf.evaluate.windows import plan_windows
from hfgolf.golf.curvature import Curvature
from hfgolf.golf.quantize import allocate, plan_steps
from hfgolf.model.configuration_golf import _CHOICES, GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import build_optimizer
from hfgolf.optim.muon import _product_dtype, update_scale
from hfgolf.optim.orthogonalize import newton_schulz_polynomials
from hfgolf.optim.schedule import learning_rate_multiplier, weight_decay_multiplier
from hfgolf.optim.state import new_state
from hfgolf.system.errors import UserError


def names_of(kind: Any) -> list[str]:
    """Return the names that a type has besides numbers, true, false and null; [] for one that takes any text."""
    found = [part for part in typing.get_args(kind) if isinstance(part, str)] if get_origin(kind) is Literal else []
    inner = () if get_origin(kind) is Literal else typing.get_args(kind)
    return [*found, *(name for part in inner for name in names_of(part))]


CHOICES = {key: names for key, kind in KEY_TYPES.items() if (names := names_of(kind))}
UNKNOWN = "unheard-of"


def scheduled(key: str) -> Callable[[str], Any]:
    def outcome(name: str) -> Any:
        schedule = ScheduleSection(**{"name": "wsd", "floor": 0.1, "warmup_steps": 2} | {key: name})
        both = (learning_rate_multiplier, weight_decay_multiplier)
        return [multiplier(step, 20, schedule) for step in range(20) for multiplier in both]

    return outcome


def of_model(field: str) -> Callable[[Any], Any]:
    """Return what a model of this choice computes, with its initial weights and with others."""

    def outcome(name: Any) -> Any:
        torch.manual_seed(0)
        shape = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
        known = {} if name == UNKNOWN else {field: name}
        config = GolfConfig(**shape, bos_token_id=0, logit_soft_cap=2.0, **known)
        setattr(config, field, name)  # past its checks, as if only those knew the name
        model = GolfForCausalLM(config).eval()
        weights = [parameter.sum().item() for parameter in model.parameters()]
        torch.manual_seed(1)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        with torch.no_grad():
            return weights, model(torch.tensor([[3, 4, 5, 0, 6, 7, 8]])).logits.tolist()

    return outcome


def rules(name: str) -> Any:
    model = GolfForCausalLM(GolfConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    optimizer = build_optimizer(model, OptimSection(name=name))
    optimizer.create_state()
    return [group["rule"] for group in optimizer.param_groups]


def tokenizer(kind: str) -> Any:
    config = TokenizerSection(kind=kind, name_or_path="nowhere/at-all", vocab_size=258)
    pieces = Dataset.from_dict({"text": ["ab ä"] * 9})
    with TemporaryDirectory() as folder:
        try:
            return sorted(build_tokenizer(config, {"text": 1}, lambda: pieces, Path(folder)).get_vocab())
        except UserError as error:
            return str(error)


def quantized(key: str) -> Callable[[str], Any]:
    def outcome(name: str) -> Any:
        weights = {"a": np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)}
        curvature = {"a": Curvature(np.diag(np.arange(1.0, 9.0)), np.arange(1.0, 5.0))}
        if key == "allocation":
            return allocate(weights, name, curvature, None)["a"].row_steps.tolist()
        return plan_steps(weights, curvature, 40, name, "curvature")[1] is None

    return outcome


OUTCOMES: dict[str, Callable[[Any], Any]] = {
    "schedule.name": scheduled("name"),
    "schedule.weight_decay": scheduled("weight_decay"),
    "optim.name": rules,
    "optim.update_scale": lambda name: update_scale(name, 4, 9),
    "optim.newton_schulz_coefficients": lambda name: newton_schulz_polynomials(name, 5),
    "optim.newton_schulz_dtype": lambda name: _product_dtype({"newton_schulz_dtype": name}, torch.device("cpu")),
    "optim.state_dtype": lambda name: new_state({"rule": "sgd", "state_dtype": name}, torch.zeros(1)),
    "tokenizer.kind": tokenizer,
    "golf.allocation": quantized("allocation"),
    "golf.method": quantized("method"),
    "golf.evaluation": lambda name: plan_windows(name, 12, 4, 2, np.array([5])).windows.tolist(),
} | {f"model.{field}": of_model(field) for field in _CHOICES}
# What only reads its name once, or is checked by its own tests; test_command_line.py has the config refuse all others.
ELSEWHERE = {"data.source", "data.split", "data.order", "train.mixed_precision", "train.resume_with_other"}
ELSEWHERE |= {"train.rollback_on", "hub.format", "golf.count"}
ONLY_AUTO = {key for key, names in CHOICES.items() if names in (["auto"], ["all"])}


def test_the_tables_of_this_test_are_complete():
    of_model = {f"model.{field}" for field in _CHOICES}
    assert OUTCOMES.keys() | ELSEWHERE | ONLY_AUTO == CHOICES.keys() | of_model
    assert KEY_TYPES.keys() >= CHOICES.keys()


@pytest.mark.parametrize("key", OUTCOMES)
def test_each_name_does_something_of_its_own(key):
    names = _CHOICES.get(key.removeprefix("model.")) or CHOICES[key]
    outcomes = [repr(OUTCOMES[key](name)) for name in names]
    assert len({*outcomes}) == len(names) - (key == "optim.newton_schulz_dtype")  # auto is one of the others


OFF = {"model.position_embedding", "model.unet_skips", "model.attention_span"}  # what they do not know, they leave out


@pytest.mark.parametrize("key", sorted(OUTCOMES.keys() - OFF))
def test_an_unknown_name_is_refused_where_it_is_used(key):
    with pytest.raises((ValueError, KeyError, AssertionError, UserError)):
        OUTCOMES[key](UNKNOWN)
