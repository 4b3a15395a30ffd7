"""Assign each parameter to an optimizer rule.

Owns the table of Golf's name patterns, which must match every parameter exactly once, and the optimizer settings of
each kind of parameter. Does not know the model: it sees names and shapes. layout.py has the kinds of other models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hfgolf.optim.muon import Muon
from hfgolf.system.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from hfgolf.config.sections import OptimSection

# The keys of the config's section optim that are arguments of Muon.
_SETTINGS = (
    *("momentum", "newton_schulz_steps", "newton_schulz_coefficients", "newton_schulz_dtype"),
    *("update_scale", "row_equilibration", "normuon_beta2", "cautious_weight_decay", "betas", "eps", "state_dtype"),
    "muon_every_steps",
)
KINDS = ("matrix", "embedding", "head", "vector")
ALL_FROZEN = "model: all of its parameters are frozen (requires_grad is False); set it for those to train."
PATTERNS = (
    ("model.layers.*.self_attn.*_proj.weight", "matrix"),
    ("model.layers.*.mlp.*_proj.weight", "matrix"),
    ("model.*.proj.weight", "matrix"),  # of the bigrams and the value embedding
    ("model.embed_proj.weight", "matrix"),
    ("head_proj.weight", "matrix"),
    ("model.embed_tokens.weight", "embedding"),
    ("model.*.table.weight", "embedding"),
    ("model.embed_positions.weight", "embedding"),
    ("lm_head.weight", "head"),
    ("model.*norm.weight", "vector"),
    ("model.*.bias", "vector"),
    ("model.layers.*.self_attn.query_gain", "vector"),
    ("model.layers.*_gate", "vector"),
    ("model.*_scale", "vector"),
    ("model.layers.*.residual_mix", "vector"),
    ("model.skip_gate", "vector"),
    ("model.lane_mix", "vector"),
    ("model.smear.*", "vector"),
    ("model.bigram.scale", "vector"),
)


def parameter_kind(name: str) -> str:
    """Return matrix, embedding, head or vector. Raises UserError unless exactly one row of PATTERNS matches."""
    matches = [(pattern, kind) for pattern, kind in PATTERNS if fnmatchcase(name, pattern)]
    if len(matches) != 1:
        found = " and ".join(pattern for pattern, _ in matches) or "no pattern"
        raise UserError(
            f"parameter {name} matches {found}; it must match exactly one row of PATTERNS in hfgolf/optim/groups.py"
        )
    return matches[0][1]


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    optim: OptimSection,
    fused: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str] | None = None,
    in_out: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return one group for each kind of parameter present, in the order of KINDS; without frozen ones.

    "initial_lr" and "initial_weight_decay" are the peaks that the schedule multiplies. Muon takes weights of two
    dimensions; a stack of matrices is a group of its own, which follows AdamW.

    fused: maps the name of a weight that stacks several matrices to the row count of each. Muon orthogonalizes them
    separately. kinds: the kind of each parameter by name; None: the rows of PATTERNS. in_out: the names of matrices
    that are stored as (in, out); they are a group of their own.

    Raises UserError if a parameter does not have exactly one kind.
    """
    members: dict[tuple[str, bool, bool], list[tuple[str, Tensor]]] = {}
    for name, parameter in named_parameters:
        kind = parameter_kind(name) if kinds is None else kinds[name]
        if not parameter.requires_grad:
            continue
        is_stack = kind == "matrix" and parameter.ndim > 2
        members.setdefault((kind, is_stack, name in in_out), []).append((name, parameter))
    ordered = sorted(members, key=lambda key: (KINDS.index(key[0]), *key[1:]))
    return [_group(*key, members[key], optim, fused) for key in ordered]


def _group(
    kind: str,
    is_stack: bool,
    in_out: bool,
    members: list[tuple[str, Tensor]],
    optim: OptimSection,
    fused: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    rule = optim.name if (kind == "matrix" and not is_stack) or optim.name != "muon" else "adamw"
    learning_rate = optim.adamw_learning_rate if rule != optim.name else optim.learning_rate
    stated, weight_decay = {
        "matrix": (None, optim.weight_decay),
        "embedding": (optim.embedding_learning_rate, optim.embedding_weight_decay),
        "head": (None, optim.head_weight_decay),
        "vector": (optim.vector_learning_rate, optim.vector_weight_decay),
    }[kind]
    learning_rate = learning_rate if stated is None else stated
    return {
        "params": members,
        "kind": kind,
        "rule": rule,
        "lr": learning_rate,
        "initial_lr": learning_rate,
        "weight_decay": weight_decay,
        "initial_weight_decay": weight_decay,
        "splits": [fused.get(name) for name, _ in members],
        "in_out": in_out,
    }


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    optim: OptimSection,
    fused: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str] | None = None,
    in_out: Collection[str] = (),
) -> Muon:
    """Build the one optimizer of a run, before `accelerator.prepare`. Arguments and errors as in `parameter_groups`.

    Raises UserError also if all parameters are frozen.

    If torch.distributed is initialized, its processes must hold replicas or shards of this one model; they share Muon's
    work.
    """
    settings = {name: getattr(optim, name) for name in _SETTINGS}
    process_group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    groups = parameter_groups(named_parameters, optim, fused, kinds, in_out)
    if not groups:
        raise UserError(ALL_FROZEN)
    return Muon(groups, **settings, process_group=process_group)


def group_rows(optimizer: Any) -> list[dict[str, Any]]:
    """Return one row per parameter name (layer numbers as *), with its rule and rates, as in metadata.json.

    optimizer: from `build_optimizer`, prepared or not.
    """
    rows = []
    for group in optimizer.param_groups:
        sizes: dict[tuple[str, int], list[int]] = {}
        for name, parameter, split in zip(group["param_names"], group["params"], group["splits"], strict=True):
            pattern = re.sub(r"\.\d+\.", ".*.", name)
            parts = len(split) if split and group["rule"] == "muon" else 1
            sizes.setdefault((pattern, parts), []).append(parameter.numel())
        for (pattern, parts), numbers in sizes.items():
            rule = group["rule"] if parts == 1 else f"{group['rule']} in {parts} parts"
            row = {"parameters of": pattern, "tensors": len(numbers), "parameters": sum(numbers), "rule": rule}
            rows.append(row | {"learning rate": group["initial_lr"], "weight decay": group["weight_decay"]})
    return rows
