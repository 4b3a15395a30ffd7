"""One optimizer whose groups follow Muon, AdamW or SGD.

Owns the arithmetic of an update and the optimizer's state. Refuses to know which parameter belongs to which rule
(groups.py) and how a learning rate moves over a run (schedule.py): it reads plain numbers from its groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from hfgolf.hardware import fast_product_dtype
from hfgolf.optim.matrices import Split, batches, pieces
from hfgolf.optim.orthogonalize import (
    SMALLEST_NORM,
    newton_schulz_polynomials,
    orthogonalize,
)
from hfgolf.optim.shards import is_sharded, local, shard, whole
from hfgolf.optim.state import Group, State, matched_state, new_state, num_outputs, state_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
PRODUCT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SMALLEST_ROOT = 1e-8  # NorMuon's epsilon
# Of the matrices that are multiplied at once. A CPU is faster where they stay in its caches: 1.04 times with those of
# GPT-2 124M. Elsewhere it bounds the memory that a step takes, about 12 bytes an element.
MAX_ELEMENTS = {"cpu": 2**21}
MAX_ELEMENTS_ELSEWHERE = 2**26


def update_scale(rule: str, rows: int, cols: int) -> float:
    """Return what an orthogonal update of this shape is multiplied by.

    original: sqrt(max(1, rows/cols)), Jordan 2024. match_rms_adamw: 0.2 sqrt(max(rows, cols)), the root mean square
    of AdamW's updates, so that its learning rate fits: Liu et al., "Muon is Scalable", arXiv 2502.16982, section 2.2.

    Whatever the rows, the second is 0.2 sqrt(cols) times the first. So a learning rate l and decay d under original are
    l / (0.2 sqrt(cols)) and d * 0.2 sqrt(cols) under match_rms_adamw: 0.02 and 0.1 become 0.0036 and 0.55 at 768
    columns. One number can not be right for matrices of several widths: choose the width of the residual stream.
    """
    if rule == "original":
        return math.sqrt(max(1.0, rows / cols))
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    raise ValueError(f"update_scale is {rule!r}; it must be original or match_rms_adamw")


class Muon(torch.optim.Optimizer):
    """Update each group by its "rule": muon, adamw or sgd, all with decoupled weight decay.

    A muon group holds weights of two or more dimensions, (out, ...), flattened to (out, rest). Its "splits", by
    position, say into which numbers of rows a fused weight falls (q, k, v): each piece is orthogonalised apart and
    scaled by its own shape. None, for the group or for one weight, means whole. With "in_out" its weights are stored
    (in, out), as those of GPT-2's Conv1D, and all of this holds for their transposes.

    row_equilibration: rows are divided by their norms before they are orthogonalised (MuonEq-R).
    normuon_beta2: afterwards each row is divided by the root of the running mean, at this rate, of its mean square, and
    the matrix brought back to its norm (NorMuon, Li et al., arXiv 2510.05491); None: not, and there is no such state.
    cautious_weight_decay: only the entries that a step moves towards 0 are decayed, under every rule (Chen et al.,
    arXiv 2510.12402); it takes a copy of the group's parameters while the step lasts.

    Every number in a group may be changed between two steps. The state is fp32 (or wider) and exists for every
    parameter from the first step on. Half-precision parameters are updated in fp32 and rounded once.

    process_group: ranks that hold the same parameters and gradients, as under DDP. Each orthogonalises its share of
    the matrices and all exchange the results, so all of them have to step; momentum is the same everywhere. Parameters
    may be sharded DTensors, as under FSDP2: their state is sharded alike, and Muon gathers their directions, which
    takes room for two copies of the group's parameters. None: this rank does all by itself.
    """

    _process_group: ProcessGroup | None = None  # a copy by deepcopy works alone

    def __init__(
        self,
        params: Iterable[Any],
        rule: str = "muon",
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        newton_schulz_steps: int = 5,
        newton_schulz_coefficients: str = "polar_express",
        newton_schulz_dtype: str = "auto",
        update_scale: str = "original",
        row_equilibration: bool = False,
        normuon_beta2: float | None = None,
        cautious_weight_decay: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._process_group = process_group
        super().__init__(
            params,
            {
                "rule": rule,
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "newton_schulz_steps": newton_schulz_steps,
                "newton_schulz_coefficients": newton_schulz_coefficients,
                "newton_schulz_dtype": newton_schulz_dtype,
                "update_scale": update_scale,
                "row_equilibration": row_equilibration,
                "normuon_beta2": normuon_beta2,
                "cautious_weight_decay": cautious_weight_decay,
                "betas": betas,
                "eps": eps,
                "splits": None,
                "in_out": False,
            },
        )

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; ValueError where its rule can not hold one of its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["rule"] not in RULES:
            raise ValueError(f"rule is {group['rule']!r}; it must be one of {', '.join(RULES)}")
        if group["rule"] == "muon":
            newton_schulz_polynomials(group["newton_schulz_coefficients"], group["newton_schulz_steps"])
            update_scale(group["update_scale"], 1, 1)
            _product_dtype(group, torch.device("cpu"))
            for param, split in zip(group["params"], _splits(group), strict=True):
                if param.ndim < 2 or (group["in_out"] and param.ndim > 2):
                    raise ValueError(f"muon needs matrices, and one parameter has shape {tuple(param.shape)}")
                if split is not None and sum(split) != num_outputs(group, param):
                    raise ValueError(
                        f"splits {split} do not add up to the {num_outputs(group, param)} outputs of their weight"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure` returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.create_state()
        for group in self.param_groups:
            present = [i for i, param in enumerate(group["params"]) if param.grad is not None]
            if present:
                self._update(group, present)
        return loss

    def create_state(self) -> None:
        """Make the state of every parameter that has none; step() would do it, and leave less memory than was there.

        For all parameters, with a gradient or not: a sharded save needs the same state on every rank. Call it after
        `accelerator.prepare`, which may exchange the parameters.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param] = new_state(group, param)

    def _update(self, group: Group, present: list[int]) -> None:
        params = [group["params"][i] for i in present]
        states = [self.state[param] for param in params]
        wide = [param.to(state_dtype(param)) for param in params]  # the parameter itself where it is fp32
        grads = [param.grad.to(master.dtype) for param, master in zip(params, wide, strict=True)]
        layout = ([_splits(group)[i] for i in present], self._process_group)
        if group["cautious_weight_decay"] and group["weight_decay"]:
            before = [master.clone() for master in local(wide)]
            RULES[group["rule"]](wide, grads, states, {**group, "weight_decay": 0.0}, *layout)
            _decay_cautiously(local(wide), before, group["lr"] * group["weight_decay"])
        else:
            RULES[group["rule"]](wide, grads, states, group, *layout)
        for param, master in zip(params, wide, strict=True):
            if param is not master:
                param.copy_(master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, matched by parameter name where both sides have names, else by position.

        Numbers such as learning rates come with it; names, order and splits stay this optimizer's own. UserError
        where names, shapes, rules or the contents of the state differ; nothing has been changed then.
        torch's own method ignores names and casts the state to the parameters' dtype.
        """
        groups, states = matched_state(self.param_groups, state_dict)
        super().load_state_dict({"state": {}, "param_groups": groups})
        for group, group_states in zip(self.param_groups, states, strict=True):
            for param, state in zip(group["params"], group_states, strict=True):
                self.state[param] = {name: value.to(param.device) for name, value in state.items()}


def _decay_cautiously(params: list[Tensor], before: list[Tensor], rate: float) -> None:
    """Subtract rate * before where the step from `before` to `params` went towards 0."""
    is_towards_zero = torch._foreach_mul(torch._foreach_sub(before, params), before)
    torch._foreach_sign_(is_towards_zero)
    torch._foreach_clamp_min_(is_towards_zero, 0.0)  # 1 or 0
    torch._foreach_addcmul_(params, before, is_towards_zero, value=-rate)


def _muon(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[State],
    group: Group,
    splits: list[Split],
    process_group: ProcessGroup | None,
) -> None:
    momentum = group["momentum"]
    buffers = [state["momentum_buffer"] for state in states]
    mean_squares = [] if group["normuon_beta2"] is None else [state["row_mean_square"] for state in states]
    torch._foreach_lerp_(local(buffers), local(grads), 1 - momentum)
    if group["weight_decay"]:
        torch._foreach_mul_(local(params), 1 - group["lr"] * group["weight_decay"])
    if not any(is_sharded(param) for param in params):
        sources = (grads, buffers) if group["nesterov"] else (buffers, [])
        _add_orthogonal(params, *sources, mean_squares, group, splits, process_group)
        return

    if group["nesterov"]:
        buffers = [torch.lerp(grad, buffer, momentum) for grad, buffer in zip(grads, buffers, strict=True)]
    directions = [whole(buffer) for buffer in buffers]
    moves = [torch.zeros_like(direction) for direction in directions]
    whole_mean_squares = [whole(mean_square) for mean_square in mean_squares]
    _add_orthogonal(moves, directions, [], whole_mean_squares, group, splits, process_group)
    torch._foreach_add_(local(params), [shard(move, like=param) for move, param in zip(moves, params, strict=True)])
    for mean_square, new in zip(mean_squares, whole_mean_squares, strict=True):
        local([mean_square])[0].copy_(shard(new, like=mean_square))


def _add_orthogonal(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    mean_squares: list[Tensor],
    group: Group,
    splits: list[Split],
    process_group: ProcessGroup | None,
) -> None:
    """Add the orthogonal updates to params. buffers: the momentum to mix into grads, or none at all."""
    in_out = group["in_out"]
    all_pieces = (
        pieces(tensors, splits, in_out) if tensors else [] for tensors in (params, grads, buffers, mean_squares)
    )
    param_pieces, grad_pieces, buffer_pieces, mean_pieces = all_pieces
    rank, ranks = (dist.get_rank(process_group), dist.get_world_size(process_group)) if process_group else (0, 1)
    max_elements = MAX_ELEMENTS.get(params[0].device.type, MAX_ELEMENTS_ELSEWHERE)
    for positions in batches(tuple((piece.shape, piece.device) for piece in param_pieces), max_elements, ranks):
        share = math.ceil(len(positions) / ranks)
        own = (positions + positions[-1:] * share * ranks)[rank * share : (rank + 1) * share]  # padded with the last
        directions = [grad_pieces[i] for i in own]
        if buffer_pieces:
            directions = list(torch._foreach_lerp(directions, [buffer_pieces[i] for i in own], group["momentum"]))
        updates = _orthogonal(directions, group)  # (K, out, in), or (K, in, out)
        if share < len(positions):
            updates = _gathered(updates, ranks, process_group)[: len(positions)]
        updates = updates.to(directions[0].dtype)
        rows = updates.mT if in_out else updates
        if mean_pieces:
            _even_out(rows, [mean_pieces[i] for i in positions], group["normuon_beta2"])
        scale = update_scale(group["update_scale"], *rows.shape[1:])
        torch._foreach_add_([param_pieces[i] for i in positions], updates.unbind(), alpha=-group["lr"] * scale)


def _orthogonal(directions: list[Tensor], group: Group) -> Tensor:
    first = directions[0]
    matrices = torch.empty(
        len(directions), *first.shape, dtype=_product_dtype(group, first.device), device=first.device
    )
    torch._foreach_copy_(matrices.unbind(), directions)
    if group["row_equilibration"]:
        rows = matrices.mT if group["in_out"] else matrices
        rows.div_(torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=SMALLEST_NORM))
    return orthogonalize(matrices, group["newton_schulz_steps"], group["newton_schulz_coefficients"])


def _gathered(own: Tensor, ranks: int, process_group: ProcessGroup | None) -> Tensor:
    """Return the matrices of all ranks, (ranks * K, ...), of the K that each rank has."""
    gathered = own.new_empty(ranks * len(own), *own.shape[1:])
    dist.all_gather(list(gathered.chunk(ranks)), own, group=process_group)
    return gathered


def _even_out(rows: Tensor, mean_squares: list[Tensor], beta2: float) -> None:
    """Apply NorMuon in place. rows: (K, rows, cols); mean_squares: K running means, (rows,)."""
    former_norm = torch.linalg.vector_norm(rows, dim=(-2, -1), keepdim=True)
    torch._foreach_lerp_(mean_squares, rows.square().mean(dim=-1).unbind(), 1 - beta2)
    rows.div_(torch.stack(mean_squares).sqrt().add_(SMALLEST_ROOT)[..., None])
    norm = torch.linalg.vector_norm(rows, dim=(-2, -1), keepdim=True)
    rows.mul_(former_norm / norm.clamp(min=SMALLEST_NORM))


def _product_dtype(group: Group, device: torch.device) -> torch.dtype:
    name = group["newton_schulz_dtype"]
    if name == "auto":
        return fast_product_dtype(device)
    if name in PRODUCT_DTYPES:
        return PRODUCT_DTYPES[name]
    raise ValueError(f"newton_schulz_dtype is {name!r}; it must be auto, {' or '.join(PRODUCT_DTYPES)}")


def _adamw(params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, *_: object) -> None:
    adamw(
        local(params),
        local(grads),
        local(state["exp_avg"] for state in states),
        local(state["exp_avg_sq"] for state in states),
        [],
        [state["step"] for state in states],
        fused=all(param.device.type in FUSED_DEVICES for param in params),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _sgd(params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, *_: object) -> None:
    torch._foreach_mul_(local(params), 1 - group["lr"] * group["weight_decay"])
    sgd(
        local(params),
        local(grads),
        [*local(state["momentum_buffer"] for state in states)],
        foreach=True,
        weight_decay=0.0,  # decoupled above, as in the other rules, instead of added to the gradient
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=False,
    )


RULES: dict[str, Callable[..., None]] = {"muon": _muon, "adamw": _adamw, "sgd": _sgd}


def _splits(group: Group) -> list[Split]:
    return group["splits"] or [None] * len(group["params"])
