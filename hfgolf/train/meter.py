"""Figures between two rows of metrics.jsonl: losses, gradient norms and where the time went.

Losses and norms stay on the device until a row is due, so that no step waits for them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hfgolf.measure.memory import gpu_utilization, used_memory_bytes


@dataclass
class Meter:
    """Collect the steps since the last row; `row()` reads them off the device and starts anew."""

    device: torch.device
    tokens_per_step: int
    flops_per_second_of_peak: float
    """FLOPs of one token divided by the peak FLOP/s of all processes: tokens/s times this is the MFU."""
    _losses: list[Tensor] = field(default_factory=list)
    _grad_norms: list[Tensor] = field(default_factory=list)
    _data_seconds: float = 0.0
    _started_at: float = field(default_factory=time.perf_counter)

    def add(self, loss: Tensor, grad_norm: Tensor, data_seconds: float) -> None:
        """Note one optimizer step; the tensors are scalars on the device."""
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)
        self._data_seconds += data_seconds

    def row(self, reduce_mean: Any) -> dict[str, Any]:
        """Return the figures since the last row. reduce_mean averages a tensor over the processes."""
        losses = reduce_mean(torch.stack(self._losses)).tolist()  # waits for the device
        grad_norms = torch.stack(self._grad_norms).tolist()
        seconds = time.perf_counter() - self._started_at
        tokens_per_second = self.tokens_per_step * len(losses) / seconds
        row = {
            "train_loss": sum(losses) / len(losses),
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "tokens_per_second": tokens_per_second,
            "mfu": tokens_per_second * self.flops_per_second_of_peak,
            "data_seconds": self._data_seconds,
            "compute_seconds": seconds - self._data_seconds,
            "memory_bytes": used_memory_bytes(self.device),
            "gpu_utilization": gpu_utilization(self.device),
            "train_losses": losses,
            "grad_norms": grad_norms,
        }
        self.restart()
        return row

    def restart(self) -> None:
        """Forget what came before: the next row starts now. Called after anything that is not training."""
        self._losses, self._grad_norms, self._data_seconds = [], [], 0.0
        self._started_at = time.perf_counter()
