"""The optimizer's state for each parameter, and the check that a saved state fits this optimizer.

Knows the names, shapes and dtypes of the state of each rule, but not the rules' arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfgolf.optim.shards import copy_full, is_sharded, zeros_along
from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words

Group = dict[str, Any]
State = dict[str, Tensor]

STATE_NAMES = {
    "muon": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}
LAYOUT_KEYS = ("param_names", "splits", "in_out", "state_dtype")  # what a group knows of its own parameters and state
STORED_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def state_dtype(param: Tensor) -> torch.dtype:
    """Return fp32, or the parameter's dtype if that is wider."""
    return torch.promote_types(param.dtype, torch.float32)


def stored_dtype(group: Group, param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's moments between steps."""
    return STORED_DTYPES[group["state_dtype"]] or state_dtype(param)


def num_outputs(group: Group, param: Tensor) -> int:
    """Return the number of outputs of a weight: its rows, or its columns if the group stores weights as (in, out)."""
    return param.shape[_output_dim(group)]


def _output_dim(group: Group) -> int:
    return 1 if group["in_out"] else 0


def state_shapes(group: Group, param: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a parameter's optimizer state, by name."""
    shapes: dict[str, tuple[int, ...]] = {name: tuple(param.shape) for name in STATE_NAMES[group["rule"]]}
    if group["rule"] == "adamw":
        shapes["step"] = ()
    if group["rule"] == "muon" and group["normuon_beta2"] is not None:
        shapes["row_mean_square"] = (num_outputs(group, param),)
    return shapes


def new_state(group: Group, param: Tensor) -> State:
    """Return a parameter's state before its first update: zeros on its device, sharded like the parameter."""
    # Only tensors, even for the step: accelerate loads the state with weights_only, and the fused kernel needs them
    dtype = stored_dtype(group, param)
    state = {name: torch.zeros_like(param, dtype=dtype) for name in STATE_NAMES[group["rule"]]}
    if group["rule"] == "adamw":
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    if group["rule"] == "muon" and group["normuon_beta2"] is not None:
        state["row_mean_square"] = zeros_along(_output_dim(group), param, state_dtype(param))
    return state


def placed_state(group: Group, param: Tensor, state: State) -> State:
    """Return a saved state on the parameter's device, in its dtype, and sharded like it if the saved one is whole."""
    if not is_sharded(param) or any(is_sharded(value) for value in state.values()):
        dtypes = dict.fromkeys(STATE_NAMES[group["rule"]], stored_dtype(group, param))
        return {name: value.to(param.device, dtypes.get(name, value.dtype)) for name, value in state.items()}
    placed = new_state(group, param)
    for name, value in state.items():
        copy_full(placed[name], value)
    return placed


def matched_state(groups: list[Group], state_dict: dict[str, Any]) -> tuple[list[Group], list[list[State]]]:
    """Return a saved optimizer's groups and states in the order of `groups`, without changing either argument.

    Parameters match by name if both sides have names, otherwise by position. Order, names and layout come from
    `groups`; all other settings come from the saved state. Raises UserError if names, rules, shapes or contents differ.
    """
    by_name = all("param_names" in group for group in [*groups, *state_dict["param_groups"]])
    own, saved = _places(groups, by_name), _places(state_dict["param_groups"], by_name)
    if own.keys() != saved.keys():
        missing, unknown = sorted(own.keys() - saved.keys(), key=str), sorted(saved.keys() - own.keys(), key=str)
        lacks, has = (join_words(names, maximum=1) or "nothing" for names in (missing, unknown))
        raise _mismatch(f"lacks {lacks} and has {has}, which this model lacks")

    new_groups: list[Group] = [{} for _ in groups]
    states: list[list[State]] = [[] for _ in groups]
    origins: dict[int, int] = {}
    for name, (own_group, own_index) in own.items():
        saved_group, saved_index = saved[name]
        group, source = groups[own_group], state_dict["param_groups"][saved_group]
        if source.get("rule") != group["rule"]:
            raise _mismatch(f"updates {name} by {source.get('rule')!r}, but here it is {group['rule']!r}")
        if origins.setdefault(own_group, saved_group) != saved_group:
            raise _mismatch(f"has {name} in a different group than here")
        state = state_dict["state"].get(source["params"][saved_index], {})
        if (source.get("normuon_beta2") is None) != (group["normuon_beta2"] is None) and group["rule"] == "muon":
            raise _mismatch(f"has normuon_beta2 {source.get('normuon_beta2')}, but here it is {group['normuon_beta2']}")
        _check_state(name, state_shapes(group, group["params"][own_index]), state)
        states[own_group].append(state)
        layout: Group = {key: group[key] for key in LAYOUT_KEYS if key in group}
        new_groups[own_group] = {**group, **source, **layout, "params": list(range(len(group["params"])))}
    return new_groups, states


def _places(groups: list[Group], by_name: bool) -> dict[Any, tuple[int, int]]:
    """Map each parameter's name, or its (group, index) if there are no names, to its (group, index)."""
    places = [(i, j) for i, group in enumerate(groups) for j in range(len(group["params"]))]
    return {groups[i]["param_names"][j] if by_name else (i, j): (i, j) for i, j in places}


def _check_state(name: object, expected: dict[str, tuple[int, ...]], state: State) -> None:
    found = {key: tuple(value.shape) for key, value in state.items()}
    if found and found != expected:  # empty if saved before the first step
        raise _mismatch(f"holds {_shapes(found)} for {name}, but here it is {_shapes(expected)}")


def _shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {shape}" for key, shape in sorted(shapes.items()))


def _mismatch(difference: str) -> UserError:
    return UserError(f"the saved optimizer state {difference}; load it with the model and config that saved it")
