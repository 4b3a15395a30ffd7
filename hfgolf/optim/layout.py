"""How the parameters of a model are laid out: read off its modules, for any causal language model of transformers.

Owns the kind of each parameter of a model that is not Golf (groups.py has Golf's table), the matrices that are fused in
one weight, and the weights that are stored as (in, out). Sees modules, and imports no model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hfgolf.optim.groups import parameter_kind
from hfgolf.system.errors import UserError


def layout(model: Any) -> dict[str, Any]:
    """Return the arguments of `build_optimizer` that depend on the model: fused, and kinds and in_out if not Golf."""
    if hasattr(type(model), "fused_projections"):  # not through the wrapper of peft, which renames the parameters
        return {"fused": model.fused_projections()}
    kinds = parameter_kinds(model)
    in_out = {
        f"{prefix}.weight": module
        for prefix, module in model.named_modules()
        if isinstance(module, Conv1D) and kinds[f"{prefix}.weight"] == "matrix"
    }
    # GPT-2's c_attn is q, k and v side by side. Other fused projections are not told apart: some interleave the heads.
    thirds = {
        name: (module.nx,) * 3
        for name, module in in_out.items()
        if name.endswith("c_attn.weight") and module.nf == 3 * module.nx
    }
    return {"fused": thirds, "kinds": kinds, "in_out": frozenset(in_out)}


def parameter_kinds(model: Any) -> dict[str, str]:
    """Return {name: matrix, embedding, head or vector} of every parameter.

    - matrix: a weight of a linear layer, or a stack of matrices, such as the experts of a mixture.
    - embedding: a table that ids or positions look up, and with it a tied head.
    - head: the output matrix, or what else is linear outside of the base model, such as the head of a classifier.
    - vector: everything else, whatever its shape: norms, biases, convolutions over time, decay rates, most routers.

    Raises UserError for a model that is not one of transformers, or of peft around it.
    """
    if hasattr(type(model), "fused_projections"):
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
