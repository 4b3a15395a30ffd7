"""One optimizer whose parameter groups use Muon, AdamW or SGD.

Owns the arithmetic of an update and the optimizer's state. Does not know which rule a parameter gets (groups.py) or how
the learning rate changes during a run (schedule.py): it reads plain numbers from its groups.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from hfgolf.optim.orthogonalize import MIN_NORM, newton_schulz_polynomials, orthogonalize
from hfgolf.optim.shards import full_tensor, is_sharded, local_shards, shard_like
from hfgolf.optim.state import (
    STATE_NAMES,
    Group,
    State,
    matched_state,
    new_state,
    num_outputs,
    placed_state,
    state_dtype,
)
from hfgolf.system.hardware import fast_product_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Split = tuple[int, ...] | None
Piece = tuple[Tensor, Tensor, State, Split]
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
PRODUCT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NORMUON_EPS = 1e-8
# Elements per batched matmul. On a CPU, smaller buckets stay in its caches: 1.04 times as fast on GPT-2 124M. On other
# devices the limit bounds the memory of a step, about 12 bytes per element.
MAX_BUCKET_ELEMENTS = {"cpu": 2**21}
DEFAULT_MAX_BUCKET_ELEMENTS = 2**26
PIECE_ELEMENTS = 2**22  # elements whose bf16 state AdamW and SGD widen at once, 16 MB for each moment


def update_scale(rule: str, rows: int, cols: int) -> float:
    """Return the factor by which to multiply an orthogonal update of this shape.

    original: sqrt(max(1, rows / cols)) (Jordan 2024).
    match_rms_adamw: 0.2 sqrt(max(rows, cols)). The update then has the root mean square of AdamW's updates, so AdamW's
    learning rate works (Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.2).

    For any number of rows, match_rms_adamw is 0.2 sqrt(cols) times original. To convert from original to
    match_rms_adamw, divide the learning rate by 0.2 sqrt(cols) and multiply the weight decay by it: at 768 columns,
    0.02 and 0.1 become 0.0036 and 0.55. No single factor is exact for matrices of different widths; use the width of
    the residual stream.

    Raises ValueError for any other rule.
    """
    if rule == "original":
        return math.sqrt(max(1.0, rows / cols))
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    raise ValueError(f"update_scale is {rule!r}; it must be original or match_rms_adamw")


class Muon(torch.optim.Optimizer):
    """Update each group by its "rule": muon, adamw or sgd, all with decoupled weight decay; momentum is Nesterov's.

    A muon group holds weights of two or more dimensions, (out, ...), flattened to (out, rest). Its "splits" hold one
    entry per weight: the row counts of the matrices fused in it (q, k, v), or None for a single matrix. Each matrix is
    orthogonalized separately and scaled by its own shape. splits=None means that no weight is fused. With "in_out",
    weights are stored as (in, out), like GPT-2's Conv1D, and all of this applies to their transposes.

    Args:
        newton_schulz_dtype: of the products that orthogonalize: bf16, fp32, or auto for bf16 if the hardware is fast at
            it. bf16 rounds an update to two digits, so a gradient that differs in its last bit, because its sum was
            taken in another order, changes the update by up to a hundredth.
        row_equilibration: divide each row by its norm before orthogonalizing (MuonEq-R, Chang et al., arXiv
            2603.28254).
        normuon_beta2: after orthogonalizing, divide each row by the root of an exponential moving average of its mean
            square, with this decay, then restore the norm of the matrix (NorMuon, Li et al., arXiv 2510.05491).
            None: skip this, and keep no state for it.
        state_dtype: fp32, or bf16 to keep momentum and moments in half the memory. Every step widens them, a few
            matrices or rows at a time, and rounds them once. With a decay above 0.98, a step may change them by less
            than bf16 can represent.
        cautious_weight_decay: decay only the entries that the step moves toward 0, under every rule (Chen et al.,
            arXiv 2510.12402). Takes a temporary copy of the group's parameters.
        muon_every_steps: N updates each matrix only in every Nth step, with N times the learning rate. Its momentum
            follows every gradient. The matrices take turns: in order, each goes to the turn with the fewest elements,
            so that steps take about the same time, and each updates some matrices of almost every block.
        process_group: ranks that hold the same parameters and gradients, as under DDP. Each rank orthogonalizes its
            share of the matrices, and then all ranks exchange the results, so every rank must call step(). Momentum is
            identical on all ranks. With sharded DTensors, as under FSDP2, the state is sharded like the parameters,
            and Muon gathers the full update directions, which takes two copies of the group's parameters. None: this
            rank does all the work.

    You may change any number in a group between steps. Arithmetic and state are fp32 (or wider) unless state_dtype says
    otherwise, and from the first step on the state exists for every parameter. Half-precision parameters are updated in
    fp32 and rounded once.
    """

    _process_group: ProcessGroup | None = None  # deepcopy drops the group: a copy works alone

    def __init__(
        self,
        params: Iterable[Any],
        rule: str = "muon",
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        newton_schulz_steps: int = 5,
        newton_schulz_coefficients: str = "polar_express",
        newton_schulz_dtype: str = "auto",
        muon_every_steps: int = 1,
        update_scale: str = "original",
        row_equilibration: bool = False,
        normuon_beta2: float | None = None,
        state_dtype: str = "fp32",
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
                "newton_schulz_steps": newton_schulz_steps,
                "newton_schulz_coefficients": newton_schulz_coefficients,
                "newton_schulz_dtype": newton_schulz_dtype,
                "muon_every_steps": muon_every_steps,
                "step": 0,
                "update_scale": update_scale,
                "row_equilibration": row_equilibration,
                "normuon_beta2": normuon_beta2,
                "state_dtype": state_dtype,
                "cautious_weight_decay": cautious_weight_decay,
                "betas": betas,
                "eps": eps,
                "splits": None,
                "in_out": False,
            },
        )

    def add_param_group(self, param_group: Group) -> None:
        """Add a group. Raises ValueError if its rule or a setting is unknown, or does not fit one of its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["state_dtype"] not in ("fp32", "bf16"):
            raise ValueError(f"state_dtype is {group['state_dtype']!r}; it must be fp32 or bf16")
        if group["rule"] not in STATE_NAMES:
            raise ValueError(f"rule is {group['rule']!r}; it must be one of {', '.join(STATE_NAMES)}")
        if group["rule"] == "muon":
            newton_schulz_polynomials(group["newton_schulz_coefficients"], group["newton_schulz_steps"])
            update_scale(group["update_scale"], 1, 1)
            _product_dtype(group, torch.device("cpu"))
            if group["muon_every_steps"] < 1:
                raise ValueError(f"muon_every_steps is {group['muon_every_steps']}; it must be at least 1")
            for param, split in zip(group["params"], _splits(group), strict=True):
                if param.ndim < 2 or (group["in_out"] and param.ndim > 2):
                    raise ValueError(f"muon needs matrices, but one parameter has shape {tuple(param.shape)}")
                if split is not None and sum(split) != num_outputs(group, param):
                    raise ValueError(
                        f"splits {split} do not add up to the {num_outputs(group, param)} outputs of their weight"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Return the result of `closure`, or None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.create_state()
        for group in self.param_groups:
            present = [i for i, param in enumerate(group["params"]) if param.grad is not None]
            every = group["muon_every_steps"] if group["rule"] == "muon" else 1
            due = _due(group["params"], group["step"], every) if every > 1 else set(present)
            resting = {**group, "rule": "momentum", "weight_decay": 0.0}
            self._update(resting, [i for i in present if i not in due])
            self._update({**group, "lr": every * group["lr"]}, [i for i in present if i in due])
            group["step"] += 1
        return loss

    def create_state(self) -> None:
        """Create the missing state of every parameter, so that its memory is allocated before the first step.

        This includes parameters without a gradient: a sharded save needs the same state on every rank. Call it after
        `accelerator.prepare`, which may replace the parameters.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param] = new_state(group, param)

    def _update(self, group: Group, present: list[int]) -> None:
        if not present:
            return
        params = [group["params"][i] for i in present]
        grads = [param.grad for param in params]
        states, splits = [self.state[param] for param in params], [_splits(group)[i] for i in present]
        if group["rule"] != "muon":  # the other rules go element by element; and rows of a DTensor would be copies
            params, grads = local_shards(params), local_shards(grads)
            states = [dict(zip(state, local_shards(state.values()), strict=True)) for state in states]
        if group["state_dtype"] == "fp32":
            self._apply(group, params, grads, states, splits)
            return
        for portion in _portions(group, params, grads, states, splits):
            pieces, gradients, stored, of_pieces = zip(*portion, strict=True)
            wide = [{name: value.to(torch.float32, copy=True) for name, value in state.items()} for state in stored]
            self._apply(group, list(pieces), list(gradients), wide, list(of_pieces))
            for state, new in zip(stored, wide, strict=True):
                for name, value in state.items():
                    value.copy_(new[name])

    def _apply(
        self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State], splits: list[Split]
    ) -> None:
        wide = [param.to(state_dtype(param)) for param in params]  # an fp32 parameter is its own master copy
        grads = [grad.to(master.dtype) for grad, master in zip(grads, wide, strict=True)]
        layout = (splits, self._process_group)
        if group["cautious_weight_decay"] and group["weight_decay"]:
            before = [master.clone() for master in local_shards(wide)]
            RULES[group["rule"]](wide, grads, states, {**group, "weight_decay": 0.0}, *layout)
            _decay_cautiously(local_shards(wide), before, group["lr"] * group["weight_decay"])
        else:
            RULES[group["rule"]](wide, grads, states, group, *layout)
        for param, master in zip(params, wide, strict=True):
            if param is not master:
                param.copy_(master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, matching parameters by name if both sides have names, otherwise by position.

        Numbers such as learning rates come from the saved state. Names, order and splits stay as they are here.
        torch's own method ignores names and casts the state to the parameters' dtype.

        Raises UserError, and changes nothing, if names, shapes, rules or the contents of the state differ.
        """
        groups, states = matched_state(self.param_groups, state_dict)
        super().load_state_dict({"state": {}, "param_groups": groups})
        for group, group_states in zip(self.param_groups, states, strict=True):
            for param, state in zip(group["params"], group_states, strict=True):
                if state:  # FSDP2 replaces the parameters: an empty entry would keep the unsharded ones alive
                    self.state[param] = placed_state(group, param, state)


def _due(params: list[Tensor], step: int, every: int) -> set[int]:
    """Return which parameters a step updates if they take turns, so that each is updated in every `every`th step."""
    updated = [0] * every  # elements in each turn
    due = set()
    for i, param in enumerate(params):
        turn = updated.index(min(updated))
        updated[turn] += param.numel()
        if turn == step % every:
            due.add(i)
    return due


def _portions(
    group: Group, params: list[Tensor], grads: list[Tensor], states: list[State], splits: list[Split]
) -> list[list[Piece]]:
    """Divide a group into portions whose state may be widened at once: whole weights for Muon, rows for other rules."""
    limit = PIECE_ELEMENTS
    if group["rule"] == "muon":
        limit = MAX_BUCKET_ELEMENTS.get(params[0].device.type, DEFAULT_MAX_BUCKET_ELEMENTS)
    portions: list[list[Piece]] = []
    room = 0
    for weight in zip(params, grads, states, splits, strict=True):
        for piece in [weight] if group["rule"] == "muon" else _row_pieces(*weight, limit):
            room -= piece[0].numel()
            if room < 0 or not portions:
                portions.append([])
                room = limit - piece[0].numel()
            portions[-1].append(piece)
    return portions


def _row_pieces(param: Tensor, grad: Tensor, state: State, split: Split, limit: int) -> list[Piece]:
    if param.numel() <= limit:
        return [(param, grad, state, split)]
    rows = max(1, limit * len(param) // param.numel())
    pieces = []
    for start in range(0, len(param), rows):
        some = slice(start, start + rows)
        # every piece counts the same step: all but the last count it in a copy
        is_last = start + rows >= len(param)
        views = {
            name: value[some] if value.ndim else value if is_last else value.clone() for name, value in state.items()
        }
        pieces.append((param[some], grad[some], views, split))
    return pieces


def _decay_cautiously(params: list[Tensor], before: list[Tensor], rate: float) -> None:
    """Decay each entry, by rate * before, that the step from `before` to `params` moved toward 0."""
    mask = torch._foreach_mul(torch._foreach_sub(before, params), before)
    torch._foreach_sign_(mask)
    torch._foreach_clamp_min_(mask, 0.0)  # 1 if the entry moved toward 0, otherwise 0
    torch._foreach_addcmul_(params, before, mask, value=-rate)


def _momentum(params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, *_: object) -> None:
    """Let the momentum of Muon follow the gradients, and change no weight."""
    buffers = local_shards(state["momentum_buffer"] for state in states)
    torch._foreach_lerp_(buffers, local_shards(grads), 1 - group["momentum"])


def _muon(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[State],
    group: Group,
    splits: list[Split],
    process_group: ProcessGroup | None,
) -> None:
    _momentum(params, grads, states, group)
    buffers = [state["momentum_buffer"] for state in states]
    mean_squares = [] if group["normuon_beta2"] is None else [state["row_mean_square"] for state in states]
    if group["weight_decay"]:
        torch._foreach_mul_(local_shards(params), 1 - group["lr"] * group["weight_decay"])
    if not any(is_sharded(param) for param in params):
        _add_orthogonal(params, grads, buffers, mean_squares, group, splits, process_group)
        return

    buffers = [torch.lerp(grad, buffer, group["momentum"]) for grad, buffer in zip(grads, buffers, strict=True)]
    directions = [full_tensor(buffer) for buffer in buffers]
    updates = [torch.zeros_like(direction) for direction in directions]
    full_mean_squares = [full_tensor(mean_square) for mean_square in mean_squares]
    _add_orthogonal(updates, directions, [], full_mean_squares, group, splits, process_group)
    shards = [shard_like(param, update) for param, update in zip(params, updates, strict=True)]
    torch._foreach_add_(local_shards(params), shards)
    for mean_square, new in zip(mean_squares, full_mean_squares, strict=True):
        local_shards([mean_square])[0].copy_(shard_like(mean_square, new))


def _add_orthogonal(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    mean_squares: list[Tensor],
    group: Group,
    splits: list[Split],
    process_group: ProcessGroup | None,
) -> None:
    """Add the orthogonal updates to params. buffers: momentum to interpolate with grads, or [] to use grads alone."""
    in_out = group["in_out"]
    param_views, grad_views, buffer_views, mean_square_views = (
        _matrix_views(tensors, splits, in_out) if tensors else [] for tensors in (params, grads, buffers, mean_squares)
    )
    rank, ranks = (dist.get_rank(process_group), dist.get_world_size(process_group)) if process_group else (0, 1)
    max_elements = MAX_BUCKET_ELEMENTS.get(params[0].device.type, DEFAULT_MAX_BUCKET_ELEMENTS)
    for bucket in _bucket_by_shape(tuple((view.shape, view.device) for view in param_views), max_elements, ranks):
        share = math.ceil(len(bucket) / ranks)
        own = (bucket + bucket[-1:] * share * ranks)[rank * share : (rank + 1) * share]  # padded with the last
        directions = [grad_views[i] for i in own]
        if buffer_views:
            directions = list(torch._foreach_lerp(directions, [buffer_views[i] for i in own], group["momentum"]))
        updates = _orthogonal(directions, group)  # (K, out, in), or (K, in, out) under in_out
        if share < len(bucket):
            updates = _all_gather(updates, ranks, process_group)[: len(bucket)]
        rows = updates.mT if in_out else updates
        scale = update_scale(group["update_scale"], *rows.shape[1:])
        updates = updates.to(directions[0].dtype)
        if mean_square_views:
            factors = _row_factors(rows, [mean_square_views[i] for i in bucket], group["normuon_beta2"])
            updates.mul_(factors.mT if in_out else factors)
        torch._foreach_add_([param_views[i] for i in bucket], updates.unbind(), alpha=-group["lr"] * scale)
        del updates, rows  # before the next bucket needs memory


def _matrix_views(tensors: list[Tensor], splits: list[Split], in_out: bool) -> list[Tensor]:
    """Return each tensor as one matrix view, (out, rest) or (in, out), or as one view per matrix fused in it.

    A one-dimensional tensor holds one value per output.
    """
    views: list[Tensor] = []
    for tensor, split in zip(tensors, splits, strict=True):
        matrix = tensor if tensor.ndim <= 2 else tensor.view(len(tensor), -1)  # a view: updates to a copy would be lost
        views += matrix.split(split, dim=1 if in_out and matrix.ndim == 2 else 0) if split else (matrix,)
    return views


@lru_cache(maxsize=64)
def _bucket_by_shape(
    shapes_and_devices: tuple[tuple[torch.Size, torch.device], ...], max_elements: int, ranks: int
) -> list[list[int]]:
    """Divide the indices of the given matrices into buckets of one shape on one device.

    max_elements: elements per rank in one bucket, which `ranks` ranks share; at least one matrix per rank always fits.
    """
    equal: dict[tuple[torch.Size, torch.device], list[int]] = defaultdict(list)
    for index, shape_and_device in enumerate(shapes_and_devices):
        equal[shape_and_device].append(index)
    buckets = []
    for (shape, _), indices in equal.items():
        max_matrices = ranks * max(1, max_elements // shape.numel())
        size = math.ceil(len(indices) / math.ceil(len(indices) / max_matrices))
        buckets += [indices[start : start + size] for start in range(0, len(indices), size)]
    return buckets


def _orthogonal(directions: list[Tensor], group: Group) -> Tensor:
    first = directions[0]
    matrices = torch.empty(
        len(directions), *first.shape, dtype=_product_dtype(group, first.device), device=first.device
    )
    torch._foreach_copy_(matrices.unbind(), directions)
    if group["row_equilibration"]:
        rows = matrices.mT if group["in_out"] else matrices
        rows.div_(torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=MIN_NORM))
    return orthogonalize(matrices, group["newton_schulz_steps"], group["newton_schulz_coefficients"])


def _all_gather(own: Tensor, ranks: int, process_group: ProcessGroup | None) -> Tensor:
    """Return the matrices of all ranks, (ranks * K, ...), given this rank's K."""
    gathered = own.new_empty(ranks * len(own), *own.shape[1:])
    # into one tensor: a list would be gathered elsewhere and copied. torch 2.13 warns of the older name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own, group=process_group)
    return gathered


def _row_factors(rows: Tensor, mean_squares: list[Tensor], beta2: float) -> Tensor:
    """Return the factors (K, rows, 1) of NorMuon, after updating the K moving averages, each (rows,), in place.

    rows: (K, rows, cols). They are read only once: what their norm becomes follows from their mean squares.
    """
    # in the rows' dtype: bf16 rounds a norm by 0.4 % at most, and on a CPU takes a quarter of the time
    now = torch.linalg.vector_norm(rows, dim=-1).to(mean_squares[0].dtype).square() / rows.shape[-1]
    torch._foreach_lerp_(mean_squares, now.unbind(), 1 - beta2)
    inverse = 1 / (torch.stack(mean_squares).sqrt() + NORMUON_EPS)
    squares = (now * inverse.square()).sum(-1, keepdim=True)
    restoring = (now.sum(-1, keepdim=True) / squares.clamp(min=MIN_NORM**2)).sqrt()
    return (inverse * restoring)[..., None]


def _product_dtype(group: Group, device: torch.device) -> torch.dtype:
    name = group["newton_schulz_dtype"]
    if name == "auto":
        return fast_product_dtype(device)
    if name in PRODUCT_DTYPES:
        return PRODUCT_DTYPES[name]
    raise ValueError(f"newton_schulz_dtype is {name!r}; it must be auto, {' or '.join(PRODUCT_DTYPES)}")


def _adamw(params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, *_: object) -> None:
    adamw(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
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
    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    sgd(
        params,
        grads,
        [state["momentum_buffer"] for state in states],
        foreach=True,
        weight_decay=0.0,  # decoupled above, as in the other rules, not added to the gradient
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=True,
        maximize=False,
    )


RULES: dict[str, Callable[..., None]] = {"muon": _muon, "adamw": _adamw, "sgd": _sgd, "momentum": _momentum}


def _splits(group: Group) -> list[Split]:
    return group["splits"] or [None] * len(group["params"])
