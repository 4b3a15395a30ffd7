"""Collect the figures of a metrics.jsonl row: losses, gradient norms, sample hashes, speed and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hfgolf.measure.memory import gpu_memory_bytes, gpu_utilization, process_memory_bytes, used_memory_bytes
from hfgolf.system.stopwatch import Stopwatch


@dataclass
class StepResult:
    """The result of one optimizer step."""

    loss: float
    """Mean nats per token on this process."""
    grad_norm: float
    """Global norm of the gradient before clipping, equal on all processes."""
    nonfinite_parameter: str | None
    """The first parameter with a nonfinite gradient; None if all were finite and the update was made."""
    sample_hash: Tensor
    """Hash of the blocks this process read, () int64 on the device; the sum over processes is the step's hash."""


@dataclass
class Meter:
    """Collects the steps since the last row; `row()` summarizes them and starts over."""

    device: torch.device
    tokens_per_step: int
    flops_per_token: float
    peak_flops: float
    """FLOP/s of all processes at their peak."""
    stopwatch: Stopwatch
    max_grad_norm: float | None = None
    """Limit to which gradients are clipped; None: they are not."""
    _steps: list[StepResult] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    """The stopwatch's seconds when the first of these steps began."""

    def __post_init__(self) -> None:
        self.restart()

    @property
    def flops_per_second_of_peak(self) -> float:
        """FLOPs per token divided by the peak FLOP/s; times tokens/s, this is the MFU."""
        return self.flops_per_token / self.peak_flops

    def add(self, result: StepResult) -> None:
        """Add one optimizer step."""
        self._steps.append(result)

    def row(self, reduce: Callable[[Tensor, str], Tensor]) -> dict[str, Any]:
        """Return the figures since the last row. reduce: takes the "mean" or "sum" of a tensor over all processes."""
        local_losses = torch.tensor([step.loss for step in self._steps], device=self.device)
        losses = reduce(local_losses, "mean").tolist()
        hashes = reduce(torch.stack([step.sample_hash for step in self._steps]), "sum").tolist()
        grad_norms = [step.grad_norm for step in self._steps]
        seconds = self.stopwatch.seconds()
        data_seconds, train_seconds = (seconds[kind] - self._seconds[kind] for kind in ("data", "train"))
        tokens_per_second = self.tokens_per_step * len(losses) / (data_seconds + train_seconds)
        row = {
            "train_loss": _mean(losses),
            "grad_norm": _mean(grad_norms),
            "clipped_share": self._clipped_share(grad_norms),
            "tokens_per_second": tokens_per_second,
            "mfu": tokens_per_second * self.flops_per_second_of_peak,
            "data_seconds": data_seconds,
            "compute_seconds": train_seconds,
            "memory_bytes": used_memory_bytes(self.device),
            "process_memory_bytes": process_memory_bytes(),
            "gpu_memory_bytes": gpu_memory_bytes(self.device),
            "gpu_utilization": gpu_utilization(self.device),
            "train_losses": losses,
            "grad_norms": grad_norms,
            "sample_hashes": [f"{number % 2**64:016x}" for number in hashes],
        }
        self.restart()
        return row

    def _clipped_share(self, grad_norms: list[float]) -> float | None:
        """Return the share of the finite gradient norms that are above the limit; None if nothing could be clipped."""
        limit, finite = self.max_grad_norm, [norm for norm in grad_norms if math.isfinite(norm)]
        return None if limit is None or not finite else sum(norm > limit for norm in finite) / len(finite)

    def restart(self) -> None:
        """Discard the steps so far: the next row starts now."""
        self._steps = []
        self._seconds = self.stopwatch.seconds()


def _mean(values: list[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
