"""Saving and loading the optimizer: by name, in fp32, rejected if it does not fit, and through accelerate."""

import copy
import io

import pytest
import torch

from hfgolf.optim.muon import Muon
from hfgolf.system.errors import UserError

SHAPES = {"a": (6, 6), "b": (6, 6), "c": (12, 6), "norm": (6,), "bias": (6,)}
MATRICES, VECTORS = ("a", "b", "c"), ("norm", "bias")


def new_parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()
    }


def new_optimizer(
    params: dict[str, torch.nn.Parameter], *, is_reversed: bool = False, is_named: bool = True, **options: object
) -> Muon:
    order = -1 if is_reversed else 1
    groups = []
    for rule, names in (("muon", MATRICES), ("adamw", VECTORS)):
        members = [(name, params[name]) if is_named else params[name] for name in names[::order]]
        splits = [(6, 6) if name == "c" else None for name in names[::order]]
        groups.append({"params": members, "rule": rule, "splits": splits})
    return Muon(groups[::order], lr=0.03, **options)


def take_steps(optimizer: Muon, params: dict[str, torch.nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 + step)
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def on_disk_and_back(state_dict: dict) -> dict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("steps_before", [0, 4])
@pytest.mark.parametrize("options", [{}, {"normuon_beta2": 0.9}, {"muon_every_steps": 3}], ids=str)
def test_reloaded_optimizer_continues_bitwise(steps_before, is_named, options, dtype):
    """With muon_every_steps, the turns of the matrices go on, too; and the state of bf16 weights stays fp32."""
    params = new_parameters(dtype)
    optimizer = new_optimizer(params, is_named=is_named, **options)
    take_steps(optimizer, params, 0, steps_before)
    optimizer.param_groups[0]["lr"] = 0.01

    resumed_params = copy.deepcopy(params)
    resumed = new_optimizer(resumed_params, is_named=is_named, **options)
    resumed.load_state_dict(on_disk_and_back(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == 0.01
    take_steps(optimizer, params, steps_before, 6)
    take_steps(resumed, resumed_params, steps_before, 6)
    assert all(torch.equal(params[name], resumed_params[name]) for name in params)


def test_state_loads_by_name_in_any_order():
    params = new_parameters()
    optimizer = new_optimizer(params)
    take_steps(optimizer, params, 0, 3)
    reordered = new_optimizer(params, is_reversed=True)
    reordered.load_state_dict(on_disk_and_back(optimizer.state_dict()))
    assert reordered.param_groups[1]["param_names"] == ["c", "b", "a"]
    assert reordered.param_groups[1]["splits"] == [(6, 6), None, None]
    assert [group["rule"] for group in reordered.param_groups] == ["adamw", "muon"]
    for param in params.values():
        for name, value in optimizer.state[param].items():
            assert torch.equal(value, reordered.state[param][name])


def rename(state_dict: dict) -> None:
    state_dict["param_groups"][0]["param_names"][0] = "elsewhere"


def reshape(state_dict: dict) -> None:
    state_dict["state"][2]["momentum_buffer"] = torch.zeros(13, 6)


def swap_rule(state_dict: dict) -> None:
    state_dict["param_groups"][1]["rule"] = "sgd"


def drop_moment(state_dict: dict) -> None:
    del state_dict["state"][3]["exp_avg_sq"]


def move_to_another_group(state_dict: dict) -> None:
    first = state_dict["param_groups"][0]
    other = {**first, "params": [first["params"].pop()], "param_names": [first["param_names"].pop()]}
    state_dict["param_groups"].append(other)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rename, r"lacks a and has elsewhere"),
        (reshape, r"\(13, 6\).* for c, but here it is .*\(12, 6\)"),
        (swap_rule, r"norm by 'sgd', but here it is 'adamw'"),
        (drop_moment, r"for norm"),
        (move_to_another_group, r"has c in a different group"),
    ],
)
def test_mismatched_state_is_rejected_and_changes_nothing(spoil, message):
    params = new_parameters()
    optimizer = new_optimizer(params)
    take_steps(optimizer, params, 0, 2)
    spoilt = copy.deepcopy(optimizer.state_dict())
    spoilt["param_groups"][0]["lr"] = 7.0
    spoil(spoilt)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match=message) as error:
        optimizer.load_state_dict(spoilt)
    assert "\n" not in str(error.value)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


@pytest.mark.parametrize(("saved", "here"), [(None, 0.9), (0.9, None)])
@pytest.mark.parametrize("steps", [0, 1])
def test_state_without_normuon_is_rejected_with_normuon(saved, here, steps):
    params = new_parameters()
    optimizer = new_optimizer(params, normuon_beta2=saved)
    take_steps(optimizer, params, 0, steps)
    message = rf"^the saved optimizer state has normuon_beta2 {saved}, but here it is {here}; load it with [^\n]*$"
    with pytest.raises(UserError, match=message):
        new_optimizer(params, normuon_beta2=here).load_state_dict(optimizer.state_dict())


def test_state_loads_with_another_normuon_rate_or_layout():
    params = new_parameters()
    optimizer = new_optimizer(params, normuon_beta2=0.9)
    take_steps(optimizer, params, 0, 1)
    saved = on_disk_and_back(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["in_out"] = True
    resumed = new_optimizer(params, normuon_beta2=0.5)
    resumed.load_state_dict(saved)
    assert [group["normuon_beta2"] for group in resumed.param_groups] == [0.9, 0.9]  # loaded like any other number
    assert [group["in_out"] for group in resumed.param_groups] == [False, False]


def test_state_from_before_these_options_loads():
    params = new_parameters()
    optimizer = new_optimizer(params)
    take_steps(optimizer, params, 0, 1)
    saved = on_disk_and_back(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in ("normuon_beta2", "row_equilibration", "cautious_weight_decay", "newton_schulz_dtype", "in_out"):
            del group[key]
    resumed = new_optimizer(copy.deepcopy(params), row_equilibration=True)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["row_equilibration"] and not resumed.param_groups[0]["in_out"]
