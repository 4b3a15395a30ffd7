"""What a run has to remember beside weights and optimizer; everything else follows from the config and the step."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hfgolf.config import BatchConfig
from hfgolf.data.batches import as_ranges, stream_positions


@dataclass
class TrainState:
    """The loop's memory, saved in every checkpoint as plain Python (accelerate loads it with weights_only).

    Learning rate, momentum and the next batch are functions of these and of the config.
    """

    step: int = 0
    """Optimizer updates completed, skipped ones included."""
    tokens: int = 0
    """Training tokens that these updates read."""
    blocks: int = 0
    """Blocks of the present text that they read: the position in the data. `excluded_blocks` are not among them."""
    elapsed_seconds: float = 0.0
    """Seconds of training so far, over all the sessions of the run."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Those of the process by kind of work, setup included, over all the sessions of the run (Stopwatch)."""
    best_val_loss: float = float("inf")
    """Lowest validation loss (nats a token) of the evaluations so far."""
    best_step: int = 0
    """Step of that evaluation; 0 before the first."""
    patience_loss: float = float("inf")
    """Validation loss that an evaluation must undercut, by train.min_improvement, to count as an improvement."""
    evals_without_improvement: int = 0
    """Evaluations since the last that did."""
    skipped_steps: int = 0
    """Steps without an update, because the gradient was not finite; those of fp16's search for a scale included."""
    rollbacks: int = 0
    """Times the run went back to its last good checkpoint."""
    excluded_blocks: list[list[int]] = field(default_factory=list)
    """Positions [start, end) of the data that a rollback excluded; disjoint and in order."""
    learning_rate_scale: float = 1.0
    """What rollbacks made of the learning rates: a factor on all of them."""
    unfinished_row: dict[str, Any] | None = None
    """Row of metrics.jsonl whose evaluation a signal cut short: the next session evaluates again, and writes it."""
    wandb_id: str | None = None
    """So that a resumed run continues its wandb run."""

    def count_step(self, batch: BatchConfig) -> None:
        """Note an update: one more step, and the global batch that it read."""
        self.step += 1
        self.tokens += batch.tokens_per_step
        self.blocks += batch.sequences_per_step

    def next_positions(self, count: int) -> np.ndarray:
        """Return the positions of the next `count` blocks of the data, (count,) int64."""
        return stream_positions(self.blocks, count, self.excluded_blocks)

    def begin_data(self) -> None:
        """Begin other data: neither the blocks read nor the validation losses so far are of it."""
        self.blocks, self.excluded_blocks = 0, []
        self.best_val_loss, self.best_step = float("inf"), 0
        self.patience_loss, self.evals_without_improvement = float("inf"), 0

    def judge(self, val_loss: float, min_improvement: float) -> None:
        """Note an evaluation at the present step: is it the best, and did it improve enough to go on."""
        if val_loss < self.best_val_loss:
            self.best_val_loss, self.best_step = val_loss, self.step
        self.evals_without_improvement += 1
        if val_loss < self.patience_loss - min_improvement:
            self.patience_loss, self.evals_without_improvement = val_loss, 0

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what state_dict returned. Raises KeyError, TypeError or ValueError, and changes nothing, if it isn't."""
        for name, kind in typing.get_type_hints(TrainState).items():
            if not _fits(state[name], kind):
                raise ValueError(f"{name} is {state[name]!r}"[:100])
        for key in dataclasses.fields(self):
            setattr(self, key.name, state[key.name])


def rolled_back(saved: TrainState, current: TrainState, bad_positions: np.ndarray, rate_factor: float) -> TrainState:
    """Return the state in which a run goes on from a checkpoint after a rollback.

    saved: as the checkpoint holds it. current: of the run just before. bad_positions: (n,) int64, positions of blocks
    that no later step may read. rate_factor: on all learning rates from here on.
    """
    next_position = stream_positions(saved.blocks, 1, current.excluded_blocks)[0]
    # bad blocks before the checkpoint are behind it anyway: to exclude them would move good ones past it
    new_ranges = as_ranges(bad_positions[bad_positions >= next_position])
    return dataclasses.replace(
        saved,
        skipped_steps=current.skipped_steps,
        rollbacks=current.rollbacks + 1,
        excluded_blocks=sorted(current.excluded_blocks + new_ranges),
        learning_rate_scale=current.learning_rate_scale * rate_factor,
    )


def _fits(value: Any, kind: Any) -> bool:
    """Say whether plain JSON is of an annotated type."""
    arguments = typing.get_args(kind)
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if arguments:  # a union
        return any(_fits(value, argument) for argument in arguments)
    return type(value) is kind
