"""The state of a run: how evaluations and new data change it, and that only a valid one is loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hfgolf.checkpoint.state import TrainState


def used_state() -> TrainState:
    return TrainState(
        step=40,
        tokens=10_240,
        blocks=320,
        seconds={"train": 1.5},
        best_val_loss=2.0,
        best_step=30,
        patience_loss=2.1,
        evals_without_improvement=2,
        skipped_steps=3,
        rollbacks=1,
        excluded_blocks=[[8, 24]],
        learning_rate_scale=0.5,
    )


def test_new_data_resets_only_the_state_of_the_data():
    state, fresh = used_state(), TrainState()
    state.begin_data()
    kept = {"step", "tokens", "seconds", "skipped_steps", "rollbacks", "learning_rate_scale"}
    expected = fresh.state_dict() | {name: value for name, value in used_state().state_dict().items() if name in kept}
    assert state.state_dict() == expected


def test_ties_keep_the_first_best_and_small_improvements_add_up():
    state, told = TrainState(), []
    for state.step, loss in ((2, 2.5), (4, 2.5), (6, 2.25), (8, 2.125)):
        state.judge(loss, min_improvement=0.25)
        told.append((state.best_step, state.evals_without_improvement))
    assert told == [(2, 0), (2, 1), (6, 2), (8, 0)]


def test_state_survives_json():
    state = TrainState()
    state.load_state_dict(json.loads(json.dumps(used_state().state_dict())))
    assert state == used_state()


@pytest.mark.parametrize(
    "damage",
    [
        {"wandb_id": 3},
        {"seconds": {"train": "long"}},
        {"step": True},
        {"rollbacks": 1.0},
        {"excluded_blocks": [[None]]},
    ],
)
def test_invalid_state_is_rejected_and_changes_nothing(damage: dict[str, Any]):
    state = TrainState()
    with pytest.raises(ValueError, match=f"^{next(iter(damage))} is "):
        state.load_state_dict(used_state().state_dict() | damage)
    assert state == TrainState()
