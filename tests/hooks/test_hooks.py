"""Hooks of one's own: they keep state over a resume, add columns and change the weights of a pass, and are checked."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import losses, rows

import hfgolf
from hfgolf.train.hooks import Hooks


class Shrinking(hfgolf.Hook):
    """Multiplies the embedding in each pass by less and less; counts what it does, and notes what it reads."""

    def __init__(self, last_step: int | None = None) -> None:
        self.passes = 0
        self.last_step = last_step
        self.lines: list[Mapping[str, Any]] = []
        self.earlier: list[int] = []

    def start(self, run: Any) -> None:
        self.earlier = [row["step"] for row in run.earlier.rows]

    @contextmanager
    def weights(self, run: Any) -> Iterator[None]:
        weight = run.raw_model.get_input_embeddings().weight
        kept = weight.data
        weight.data = kept * 0.9**self.passes
        try:
            yield
        finally:
            weight.data = kept

    def after_step(self, run: Any, result: Any) -> None:
        torch.rand(3)  # leaves no trace
        self.passes += 1
        if run.state.step == self.last_step:
            signal.raise_signal(signal.SIGTERM)

    def wants_row(self, run: Any, is_last: bool) -> bool:
        return bool(run.state.step == 3)

    def columns(self, run: Any, is_last: bool) -> Mapping[str, Any]:
        return {"passes": self.passes}

    def logged(self, run: Any, line: Mapping[str, Any]) -> None:
        self.lines.append(line)

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state.get("passes", 0)


def test_a_hook_keeps_its_state_and_adds_columns_also_over_a_resume(tiny_run, reset_accelerate):
    options = {"train__max_steps": 6, "train__log_every_steps": 2, "train__eval_every_steps": 6, "model__dropout": 0.1}
    straight = Shrinking()
    summary = hfgolf.train(hfgolf.load_config(tiny_run(run__name="straight", **options)), hooks=[straight])
    alone = hfgolf.load_config(tiny_run(run__name="alone", **options))
    reset_accelerate()
    assert hfgolf.train(alone)["val_loss"] != summary["val_loss"]
    arguments = tiny_run(run__name="stopped", **options, train__resume="auto")
    reset_accelerate()
    with pytest.raises(SystemExit):
        hfgolf.train(hfgolf.load_config(arguments), hooks=[Shrinking(4)])
    reset_accelerate()
    resumed = Shrinking()
    assert hfgolf.train(hfgolf.load_config(arguments), hooks=[resumed])["val_loss"] == summary["val_loss"]
    folders = [Path(alone.config.run.output_dir) / name for name in ("straight", "stopped")]
    told = [[(row["step"], row["passes"]) for row in rows(folder) if "event" not in row] for folder in folders]
    assert told == [[(step, step) for step in (1, 2, 3, 4, 6)]] * 2
    assert losses(folders[0]) == losses(folders[1])
    assert resumed.earlier == [1, 2, 3, 4] and [line["step"] for line in resumed.lines if "event" not in line] == [6]
    assert [line["event"] for line in resumed.lines if "event" in line] == ["resumed", "sample"]


def test_two_hooks_of_one_class_keep_a_state_each():
    before, after = ([Shrinking(), Shrinking(), Shrinking()] for _ in range(2))
    for passes, hook in enumerate(before):
        hook.passes = passes
    states = Hooks(before).state_dict()
    Hooks(after).load_state_dict(states)
    assert [hook.passes for hook in after] == [0, 1, 2] and len(states) == 3


class Failing(hfgolf.Hook):
    def after_step(self, run: Any, result: Any) -> None:
        raise ZeroDivisionError("why the run failed")

    def end(self, run: Any, summary: dict[str, Any] | None) -> None:
        raise KeyError("its own fault")


def test_a_hook_that_fails_at_the_end_does_not_hide_why_the_run_failed(tiny_run, caplog):
    config = hfgolf.load_config(tiny_run(train__max_steps=3))
    with pytest.raises(ZeroDivisionError, match="why the run failed"):
        hfgolf.train(config, hooks=[Failing(), Failing()])
    assert caplog.messages.count("hook Failing failed in `end`: KeyError: 'its own fault'") == 2
