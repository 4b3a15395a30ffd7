"""What a run has to remember beside weights and optimizer; everything else follows from the config and the step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass
class TrainState:
    """The loop's memory, saved in every checkpoint as plain Python (accelerate loads it with weights_only).

    Data position, learning rate and momentum are functions of `step`, so they are not here.
    """

    step: int = 0
    """Optimizer updates completed."""
    elapsed_seconds: float = 0.0
    """Seconds of training so far, over all the sessions of the run."""
    best_val_loss: float = float("inf")
    """Lowest validation loss (nats a token) of the evaluations so far."""
    best_step: int = 0
    """Step of that evaluation; 0 before the first."""
    wandb_id: str | None = None
    """So that a resumed run continues its wandb run."""

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])
