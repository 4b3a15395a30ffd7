"""Hooks: all that takes part in a run without being the loop, such as trackers, the doctor, golf's rounding or yours.

The loop calls them in order and knows none of them by name. What they keep is in each checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hfgolf.system.errors import UserError

if TYPE_CHECKING:
    from hfgolf.train.meter import StepResult
    from hfgolf.train.run import Run


class Hook:
    """Base class of hooks: override any of the methods.

        class StopAt(hfgolf.Hook):
            def after_evaluate(self, run, row):
                if row["val_bits_per_byte"] < 1.5:
                    run.stop()

        hfgolf.fit("my.txt", hooks=[StopAt()])

    Every process calls every method, except `logged`; in what only one should do, ask
    run.accelerator.is_main_process. torch's random generators and the model's mode are restored after each call. An
    exception ends the run like any other error. What is not overridden costs nothing.
    """

    def start(self, run: Run) -> None:
        """Begin: the run is built. Called in each session, and again after a rollback.

        run.earlier has the rows and events so far, on the main process.
        """

    def before_step(self, run: Run, expected_steps: float) -> None:
        """Act before each step. expected_steps: of the whole run."""

    def weights(self, run: Run) -> AbstractContextManager[None]:
        """Return a context in which the model has other weights: for passes of training and of evaluation, and exports.

        It must put the old ones back bit for bit.
        """
        return nullcontext()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Act after each step, also one that is repeated later because its gradient was not finite."""

    def wants_row(self, run: Run, is_last: bool) -> bool:
        """Return whether this step needs a row of metrics.jsonl for `columns`: the same on all processes."""
        return False

    def columns(self, run: Run, is_last: bool) -> Mapping[str, Any]:
        """Return columns to add to a row of metrics.jsonl: numbers by name."""
        return {}

    def logged(self, run: Run, line: Mapping[str, Any]) -> None:
        """Read a line of metrics.jsonl that was just written: a row, or an event. On the main process only."""

    def after_evaluate(self, run: Run, row: Mapping[str, Any]) -> None:
        """Act after each evaluation. row: of metrics.jsonl, with val_loss and val_bits_per_byte."""

    def after_save(self, run: Run, checkpoint: Path) -> None:
        """Act after each checkpoint. The run waits until it is on disk, instead of going on while it is written."""

    def before_export(self, run: Run, summary: dict[str, Any]) -> None:
        """Act on the main process before the export of a complete run; the model has the weights to export."""

    def end(self, run: Run, summary: dict[str, Any] | None) -> None:
        """End. summary: of the run, whose model is exported; None if it was stopped, or failed with run.error."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep, as plain JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what state_dict returned; {} at the beginning, or if the checkpoint has nothing."""


class Hooks:
    """The hooks of a run, called as one. Raises UserError for an object that is none."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        for one in hooks:
            if not isinstance(one, Hook):
                raise UserError(f"hooks: {one!r} is not one; make a subclass of hfgolf.Hook and pass an object.")
        self._hooks = hooks
        kinds = [type(one).__name__ for one in hooks]
        self._names = [f"{kind}-{n}" if (n := kinds[:i].count(kind)) else kind for i, kind in enumerate(kinds)]

    def overriding(self, method: str) -> list[Any]:
        """Return that method of each hook that overrides it, in order."""
        return [getattr(one, method) for one in self._hooks if getattr(type(one), method) is not getattr(Hook, method)]

    def call(self, method: str, run: Run, *arguments: Any) -> list[Any]:
        """Call a method of all hooks; return what they return."""
        methods = self.overriding(method)
        if not methods:
            return []
        model, was_training = run.raw_model, run.raw_model.training
        devices = [run.accelerator.device] if run.accelerator.device.type == "cuda" else []
        with run.stopwatch.charge("other"), torch.random.fork_rng(devices):
            answers = [one(run, *arguments) for one in methods]
        model.train(was_training)
        return answers

    @contextmanager
    def weights(self, run: Run) -> Iterator[None]:
        """Give the model the weights that the hooks want inside a `with` block."""
        with ExitStack() as stack:
            for one in self.overriding("weights"):
                stack.enter_context(one(run))
            yield

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return {class name: state} of the hooks that have any; the second of a class is NAME-1, and so on."""
        states = {name: one.state_dict() for name, one in zip(self._names, self._hooks, strict=True)}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Give each hook its state, {} if there is none."""
        for name, one in zip(self._names, self._hooks, strict=True):
            one.load_state_dict(states.get(name, {}))
