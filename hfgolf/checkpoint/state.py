"""The state of a run beyond weights and optimizer; everything else follows from the config and the step."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from hfgolf.config.sections import BatchSection, Index, has_type
from hfgolf.data.batches import as_ranges, stream_positions

_Number = Annotated[float, Field(ge=0)]  # no NaN
_NEWER = (
    *("loop_active", "hooks", "bad_steps", "suspect_step"),
    *("usual_losses", "recent_losses", "first_loss", "lowest_level", "lowest_level_step"),
)
"""Fields that the checkpoints of older versions lack."""


@dataclass
class TrainState:
    """The loop's state, saved in every checkpoint as plain JSON.

    Learning rate, momentum and the next batch are functions of this state and the config.
    """

    step: Index = 0
    """Completed optimizer steps, including skipped ones."""
    tokens: Index = 0
    """Training tokens read by these steps."""
    blocks: Index = 0
    """Blocks of the current text read by these steps: the position in the data, not counting `excluded_blocks`."""
    elapsed_seconds: _Number = 0.0
    """Seconds of training, over all sessions of the run."""
    seconds: dict[str, _Number] = field(default_factory=dict)
    """{kind of work: seconds}, including setup, over all sessions of the run (see Stopwatch)."""
    best_val_loss: _Number = float("inf")
    """Lowest validation loss so far, nats per token."""
    best_step: Index = 0
    """Step of that evaluation; 0 before the first evaluation."""
    patience_loss: _Number = float("inf")
    """To count as an improvement, a validation loss must be below this. Nats per token."""
    evals_without_improvement: Index = 0
    """Evaluations since the last improvement."""
    skipped_steps: Index = 0
    """Steps without an update because the gradient was not finite, including overflows of fp16's loss scaling."""
    rollbacks: Index = 0
    """Number of rollbacks to a checkpoint."""
    excluded_blocks: list[list[Index]] = field(default_factory=list)
    """Positions [start, end) in the data that rollbacks excluded; disjoint and sorted."""
    learning_rate_scale: _Number = 1.0
    """Factor on all learning rates, set by rollbacks."""
    loop_active: bool = True
    """Whether the model's loop, if it has one, ran in the last of these steps (schedule.loop_start)."""
    unfinished_row: dict[str, Any] | None = None
    """Row of metrics.jsonl whose evaluation a signal interrupted; the next session evaluates again and writes it."""
    bad_steps: list[list[list[Index]]] = field(default_factory=list)
    """For each bad step since the last good one, the positions [start, end) of its blocks (see train/recovery.py)."""
    suspect_step: Index | None = None
    """Step of the checkpoint of the last rollback, until a good step follows: its weights may be the problem."""
    usual_losses: list[_Number] = field(default_factory=list)
    """Under train.rollback_on, recent training losses without spikes (see train/recovery.py)."""
    recent_losses: list[_Number] = field(default_factory=list)
    """Those since the last rollback."""
    first_loss: _Number | None = None
    """The first training loss that the watch saw."""
    lowest_level: _Number = float("inf")
    """The lowest median of recent_losses so far."""
    lowest_level_step: Index = 0
    """Its step; a divergence began after it."""
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{name: state} of the hooks that keep any (see train/hooks.py)."""

    def count_step(self, batch: BatchSection) -> None:
        """Count one optimizer step and the global batch that it read."""
        self.step += 1
        self.tokens += batch.tokens_per_step
        self.blocks += batch.sequences_per_step

    @property
    def next_position(self) -> int:
        """Return the position of the next block of the data; excluded blocks count."""
        return int(stream_positions(self.blocks, 1, self.excluded_blocks)[0])

    def begin_data(self) -> None:
        """Reset the data position, the losses and the bad steps, which belong to the previous data."""
        self.blocks, self.excluded_blocks, self.bad_steps, self.suspect_step = 0, [], [], None
        self.usual_losses, self.recent_losses, self.first_loss = [], [], None
        self.lowest_level, self.lowest_level_step = float("inf"), 0
        self.forget_best()

    def forget_best(self) -> None:
        """Reset the validation losses, if those to come cannot be compared with them."""
        self.best_val_loss, self.best_step = float("inf"), 0
        self.patience_loss, self.evals_without_improvement = float("inf"), 0

    def judge(self, val_loss: float) -> None:
        """Record an evaluation at the current step: whether it is the best, and whether it is an improvement."""
        self.evals_without_improvement = self.evals_after(val_loss)
        if val_loss < self.best_val_loss:
            self.best_val_loss, self.best_step = val_loss, self.step
        if not self.evals_without_improvement:
            self.patience_loss = val_loss

    def evals_after(self, val_loss: float) -> int:
        """Return what evals_without_improvement will be after an evaluation."""
        return 0 if val_loss < self.patience_loss else self.evals_without_improvement + 1

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what state_dict returned. Raises KeyError, TypeError or ValueError, with no change, if malformed."""
        newer = {name: value for name, value in TrainState().state_dict().items() if name in _NEWER}
        older: dict[str, dict[str, Any]] = {}  # before hooks kept their own state
        if state.get("grid"):
            older["QuantizationAwareTraining"] = state["grid"]
        if state.get("wandb_id"):
            older["Trackers"] = {"id": state["wandb_id"]}
        state = newer | {"hooks": older} | state
        for name, kind in typing.get_type_hints(TrainState, include_extras=True).items():
            if not has_type(state[name], kind):
                raise ValueError(f"{name} is {state[name]!r}"[:100])
        for key in dataclasses.fields(self):
            setattr(self, key.name, state[key.name])


def rolled_back(saved: TrainState, current: TrainState) -> TrainState:
    """Return the state in which a run continues from a checkpoint after a rollback; no later step reads bad blocks.

    From now on, all learning rates are halved. saved: the state in the checkpoint. current: that before the rollback.
    """
    next_position = stream_positions(saved.blocks, 1, current.excluded_blocks)[0]
    bad_positions = np.concatenate([np.arange(*ends) for step in current.bad_steps for ends in step])
    # only blocks after the checkpoint's position: excluding earlier ones would shift good blocks past it
    new_ranges = as_ranges(bad_positions[bad_positions >= next_position])
    return dataclasses.replace(
        saved,
        skipped_steps=current.skipped_steps,
        rollbacks=current.rollbacks + 1,
        excluded_blocks=sorted(current.excluded_blocks + new_ranges),
        learning_rate_scale=current.learning_rate_scale / 2,
        bad_steps=[],
        suspect_step=saved.step,
        usual_losses=current.usual_losses,  # the usual level stays; the steps that are undone are forgotten
        recent_losses=[],
        first_loss=current.first_loss,
        lowest_level=current.lowest_level,
        lowest_level_step=current.lowest_level_step,
    )
