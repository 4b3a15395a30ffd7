"""Assign each parameter to an optimizer rule.

Owns the kind of each parameter (of Golf by a table of name patterns, which must match every parameter exactly once; of
any other causal language model of transformers by its modules), how matrices are laid out, and the optimizer settings
of each kind. Sees names and modules, and imports no model.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

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


def parameter_kinds(model: Any) -> dict[str, str]:
    """Return {name: matrix, embedding, head or vector} of every parameter. PATTERNS decide for Golf, else the modules:

    - matrix: a weight of a linear layer, or a stack of matrices, such as the experts of a mixture.
    - embedding: a table that ids or positions look up, and with it a tied head.
    - head: the output matrix, or what else is linear outside of the base model, such as the head of a classifier.
    - vector: everything else, whatever its shape: norms, biases, convolutions over time, decay rates, most routers.

    Raises UserError for a model that is not one of transformers, or of peft around it.
    """
    if _is_golf(model):
        return {name: parameter_kind(name) for name, _ in model.named_parameters()}
    of_weight: dict[int, str] = {}
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft wraps it
    if not hasattr(inner, "get_output_embeddings"):
        raise UserError(f"{type(inner).__name__} is no model of transformers, so hfgolf does not know its head.")
    head = inner.get_output_embeddings()
    body = {*inner.base_model.modules()} - {*(head.modules() if head is not None else ())}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                of_weight[id(parameter)] = "embedding"  # also if it is the head, too
            elif id(parameter) not in of_weight:
                is_weight = isinstance(module, nn.Linear | Conv1D) and key == "weight"
                is_stack = not isinstance(module, nn.modules.conv._ConvNd) and parameter.squeeze().ndim == 3
                kind = "matrix" if module in body else "head"
                of_weight[id(parameter)] = kind if is_weight or is_stack else "vector"
    return {name: of_weight[id(parameter)] for name, parameter in model.named_parameters()}


def _is_golf(model: Any) -> bool:
    return hasattr(type(model), "fused_projections")  # not through the wrapper of peft, which renames the parameters


def parameter_groups(model: Any, optim: OptimSection) -> list[dict[str, Any]]:
    """Return one group for each kind of parameter present, in the order of KINDS; without frozen ones.

    Muon takes weights of two dimensions; a stack of matrices is a group of its own, which follows AdamW. Matrices that
    are stored as (in, out) are one, too. Those that are fused in a weight are orthogonalized separately ("splits").

    Raises UserError if a parameter does not have exactly one kind.
    """
    kinds = parameter_kinds(model)
    layers = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    in_out = {name: layer for name, layer in layers.items() if kinds[name] == "matrix"}
    # GPT-2's c_attn is q, k and v side by side. Other fused projections are not told apart: some interleave the heads.
    c_attn = [name for name, module in in_out.items() if name.endswith("c_attn.weight") and module.nf == 3 * module.nx]
    fused = model.fused_projections() if _is_golf(model) else {name: (in_out[name].nx,) * 3 for name in c_attn}
    members: dict[tuple[str, bool, bool], list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_stack = kinds[name] == "matrix" and parameter.ndim > 2
            members.setdefault((kinds[name], is_stack, name in in_out), []).append((name, parameter))
    groups = []
    for kind, is_stack, is_in_out in sorted(members, key=lambda key: (KINDS.index(key[0]), *key[1:])):
        params = members[kind, is_stack, is_in_out]
        layout = {"splits": [fused.get(name) for name, _ in params], "in_out": is_in_out}
        groups.append({"params": params, **group_settings(kind, optim, is_stack), **layout})
    return groups


def group_settings(kind: str, optim: OptimSection, is_stack: bool = False) -> dict[str, Any]:
    """Return the rule and rates of a kind of parameter. "initial_..." are the peaks that the schedule multiplies."""
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
        "kind": kind,
        "rule": rule,
        "lr": learning_rate,
        "initial_lr": learning_rate,
        "weight_decay": weight_decay,
        "initial_weight_decay": weight_decay,
    }


def build_optimizer(model: Any, optim: OptimSection) -> Muon:
    """Build the one optimizer of a run, before `accelerator.prepare`.

    If torch.distributed is initialized, its processes must hold replicas or shards of this one model; they share Muon's
    work. Raises UserError as `parameter_groups` does, and if all parameters are frozen.
    """
    settings = {name: getattr(optim, name) for name in _SETTINGS}
    process_group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    groups = parameter_groups(model, optim)
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
