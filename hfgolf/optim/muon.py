"""One optimizer whose groups follow Muon, AdamW or SGD.

Owns the arithmetic of an update and the optimizer's state. Refuses to know which parameter belongs to which rule
(groups.py) and how a learning rate moves over a run (schedule.py): it reads plain numbers from its groups.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from hfgolf.optim.state import Group, State, matched_state, new_state, state_dtype

CLASSIC = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SMALLEST_NORM = 1e-7  # as torch.optim.Muon: a matrix of zeros stays zeros
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def newton_schulz_polynomials(coefficients: str, steps: int) -> tuple[tuple[float, float, float], ...]:
    """Return the (a, b, c) of each of `steps` iterations; ValueError for a name or a number of steps there is not.

    classic: Jordan, "Muon: an optimizer for hidden layers", 2024. polar_express: Amsel et al., "The Polar Express",
    arXiv 2505.16932, whose five polynomials differ and have an order.
    """
    if coefficients == "classic":
        return (CLASSIC,) * steps
    if coefficients == "polar_express" and steps <= len(POLAR_EXPRESS):
        return POLAR_EXPRESS[:steps]
    raise ValueError(f"no {steps} steps of {coefficients!r}: classic, or polar_express with at most 5 steps")


def fast_product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the hardware multiplies it natively, else float32: emulated, it is several times slower."""
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if is_fast else torch.float32


def orthogonalize(
    matrices: Tensor, steps: int = 5, coefficients: str = "polar_express", dtype: torch.dtype | None = None
) -> Tensor:
    """Bring every singular value of each matrix close to 1 by Newton-Schulz iterations.

    matrices: (K, rows, cols), or (rows, cols); the result has the same shape and dtype, and the same bits on every
    call. dtype: what the products are computed in, by default `fast_product_dtype`. With 5 steps and a condition
    number up to 100 the singular values end in [0.8, 1.16] (polar_express) or [0.6, 1.25] (classic).
    """
    if matrices.ndim == 2:
        return orthogonalize(matrices[None], steps, coefficients, dtype)[0]
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices  # the Gram matrix is that of the short side
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    if coefficients == "polar_express":
        norm = norm * 1.02  # the headroom its coefficients were computed with: rounding must not pass 1
    # contiguous: into a transposed bf16 buffer, oneDNN falls back to a product that is 500 times slower
    x = (x / norm.clamp(min=SMALLEST_NORM)).to(dtype or fast_product_dtype(matrices.device)).contiguous()
    spare = torch.empty_like(x)
    gram = x.new_empty(*x.shape[:-1], x.shape[-2])  # (K, short, short)
    polynomial = torch.empty_like(gram)
    for a, b, c in newton_schulz_polynomials(coefficients, steps):  # into four buffers: 10 % faster on a CPU
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=spare)
        x, spare = spare, x
    return (x.mT if is_tall else x).to(matrices.dtype)


def update_scale(rule: str, rows: int, cols: int) -> float:
    """Return what an orthogonal update of this shape is multiplied by.

    original: sqrt(max(1, rows/cols)), Jordan 2024. match_rms_adamw: 0.2 sqrt(max(rows, cols)), the root mean square
    of AdamW's updates, so that its learning rate fits: Liu et al., "Muon is Scalable", arXiv 2502.16982, section 2.2.
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
    scaled by its own shape. None, for the group or for one weight, means whole.

    Every number in a group may be changed between two steps. The state is fp32 (or wider) and exists for every
    parameter from the first step on. Half-precision parameters are updated in fp32 and rounded once.
    """

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
        update_scale: str = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
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
                "update_scale": update_scale,
                "betas": betas,
                "eps": eps,
                "splits": None,
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
            for param, split in zip(group["params"], _splits(group), strict=True):
                if param.ndim < 2:
                    raise ValueError(f"muon needs matrices, and one parameter has shape {tuple(param.shape)}")
                if split is not None and sum(split) != param.shape[0]:
                    raise ValueError(f"splits {split} do not add up to the {param.shape[0]} rows of their weight")

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
                    self.state[param] = new_state(group["rule"], param)

    def _update(self, group: Group, present: list[int]) -> None:
        params = [group["params"][i] for i in present]
        states = [self.state[param] for param in params]
        wide = [param.to(state_dtype(param)) for param in params]  # the parameter itself where it is fp32
        grads = [param.grad.to(master.dtype) for param, master in zip(params, wide, strict=True)]
        splits = _splits(group)
        RULES[group["rule"]](wide, grads, states, group, [splits[i] for i in present])
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


def _muon(
    params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, splits: list[tuple[int, ...] | None]
) -> None:
    lr, momentum = group["lr"], group["momentum"]
    buffers = [state["momentum_buffer"] for state in states]
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    if group["weight_decay"]:
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])

    same_shape = defaultdict(list)
    for pieces in zip(*(_pieces(tensors, splits) for tensors in (params, grads, buffers)), strict=True):
        same_shape[pieces[0].shape, pieces[0].device].append(pieces)
    for (shape, _), batch in same_shape.items():
        param_pieces, grad_pieces, buffer_pieces = zip(*batch, strict=True)
        updates = torch.stack(buffer_pieces)  # (K, rows, cols)
        if group["nesterov"]:
            updates = torch.stack(grad_pieces).lerp_(updates, momentum)
        updates = orthogonalize(updates, group["newton_schulz_steps"], group["newton_schulz_coefficients"])
        scale = update_scale(group["update_scale"], *shape)
        torch._foreach_add_(param_pieces, updates.unbind(), alpha=-lr * scale)


def _adamw(params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, _: object) -> None:
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


def _sgd(params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, _: object) -> None:
    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    sgd(
        params,
        grads,
        [state["momentum_buffer"] for state in states],
        foreach=True,
        weight_decay=0.0,  # decoupled above, as in the other rules, instead of added to the gradient
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=False,
    )


RULES: dict[str, Callable[..., None]] = {"muon": _muon, "adamw": _adamw, "sgd": _sgd}


def _splits(group: Group) -> list[tuple[int, ...] | None]:
    return group["splits"] or [None] * len(group["params"])


def _pieces(tensors: list[Tensor], splits: list[tuple[int, ...] | None]) -> Iterator[Tensor]:
    """Yield views: each tensor as a matrix (out, rest), or the blocks of rows it is fused from."""
    for tensor, split in zip(tensors, splits, strict=True):
        matrix = tensor.view(tensor.shape[0], -1)  # never reshape: an update of a copy would be lost
        yield from matrix.split(split) if split else (matrix,)
