"""Functions of the user's own that a run calls while it trains.

Only the main process calls them, between two steps. They see the run and may end it; they do not change what it
computes: the random generators and the model's mode are restored after each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hfgolf.checkpoint.store import step_folder
from hfgolf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hfgolf.train.clock import Clock
    from hfgolf.train.meter import StepResult
    from hfgolf.train.run import Run


@dataclass(frozen=True)
class Moment:
    """What a callback sees of a run."""

    step: int
    """Updates so far."""
    folder: Path
    """The run's folder; metrics.jsonl in it has the rows so far."""
    model: PreTrainedModel
    """The model itself, without a wrapper such as DDP. Under FSDP2, only the shards of the main process."""
    tokenizer: PreTrainedTokenizerBase
    stop: Callable[[], None]
    """Ends the run after this step, as if it were the last: with an evaluation, a checkpoint and the exported model."""
    loss: float | None = None
    """on_step: of this step on this process, mean nats per token."""
    row: Mapping[str, Any] | None = None
    """on_evaluate: the row of metrics.jsonl, with val_loss and val_bits_per_byte. on_end: the run's summary."""
    checkpoint: Path | None = None
    """on_save: the complete checkpoint."""


class Callback:
    """Base class of callbacks: override any of the methods.

        class StopAt(hfgolf.Callback):
            def on_evaluate(self, moment):
                if moment.row["val_bits_per_byte"] < 1.5:
                    moment.stop()

        hfgolf.fit("my.txt", callbacks=[StopAt()])

    An exception ends the run like any other error. What a method does not override costs nothing.
    """

    def on_start(self, moment: Moment) -> None:
        """Before the first step of a run, or of its continuation."""

    def on_step(self, moment: Moment) -> None:
        """After each step, also one that is repeated later because its gradient was not finite."""

    def on_evaluate(self, moment: Moment) -> None:
        """After each evaluation on the validation text."""

    def on_save(self, moment: Moment) -> None:
        """After each checkpoint. The run waits until it is on disk, instead of going on while it is written."""

    def on_end(self, moment: Moment) -> None:
        """After the export of a complete run; the model has the exported weights."""


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise UserError for an object that is not a callback."""
    for one in callbacks:
        if not isinstance(one, Callback):
            raise UserError(f"callbacks: {one!r} is not one; make a subclass of hfgolf.Callback and pass an object.")


class Callbacks:
    """Calls the callbacks of a run. Every process has one, with the same callbacks."""

    def __init__(self, run: Run, clock: Clock, callbacks: Sequence[Callback]) -> None:
        self._run, self._clock = run, clock
        self._is_main = run.accelerator.is_main_process
        self._methods: dict[str, list[Callable[[Moment], None]]] = {}
        for name in ("on_start", "on_step", "on_evaluate", "on_save", "on_end"):
            overridden = [one for one in callbacks if getattr(type(one), name) is not getattr(Callback, name)]
            self._methods[name] = [getattr(one, name) for one in overridden]

    def start(self) -> None:
        self._call("on_start")

    def step(self, result: StepResult) -> None:
        self._call("on_step", loss=result.loss)

    def evaluate(self, row: Mapping[str, Any]) -> None:
        """All processes call it: they agree at once whether the run ends here."""
        self._call("on_evaluate", row=row)
        if self._methods["on_evaluate"]:
            self._clock.synchronize()

    def save(self) -> None:
        if self._methods["on_save"]:
            self._run.checkpoints.wait()
            checkpoint = step_folder(self._run.folder.checkpoints, self._run.state.step)
            if checkpoint.is_dir():  # else the disk is full, which the run reports
                self._call("on_save", checkpoint=checkpoint)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._call("on_end", row=summary)

    def _call(self, name: str, **seen: Any) -> None:
        if not (self._methods[name] and self._is_main):
            return
        run = self._run
        moment = Moment(run.state.step, run.folder.path, run.raw_model, run.tokens.tokenizer, self._clock.end, **seen)
        was_training = run.raw_model.training
        devices = [run.accelerator.device] if run.accelerator.device.type == "cuda" else []
        with run.stopwatch.charge("other"), torch.random.fork_rng(devices):
            for method in self._methods[name]:
                method(moment)
        run.raw_model.train(was_training)
