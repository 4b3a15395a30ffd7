"""The state of a run: how evaluations and new data change it, and that only a valid one is loaded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hfgolf.checkpoint.state import TrainState, rolled_back
from hfgolf.train.recovery import judge


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
        bad_steps=[[[304, 312]], [[312, 320]]],
        suspect_step=36,
        usual_losses=[2.5, 2.4],
        recent_losses=[2.4],
        first_loss=5.5,
        lowest_level=2.4,
        lowest_level_step=38,
    )


def test_new_data_resets_only_the_state_of_the_data():
    state, fresh = used_state(), TrainState()
    state.begin_data()
    kept = {"step", "tokens", "seconds", "skipped_steps", "rollbacks", "learning_rate_scale"}
    expected = fresh.state_dict() | {name: value for name, value in used_state().state_dict().items() if name in kept}
    assert state.state_dict() == expected


def test_ties_keep_the_first_best_and_are_no_improvement():
    state, told = TrainState(), []
    for state.step, loss in ((2, 2.5), (4, 2.5), (6, 2.25), (8, 2.125)):
        state.judge(loss)
        told.append((state.best_step, state.evals_without_improvement))
    assert told == [(2, 0), (2, 1), (6, 0), (8, 0)]


@pytest.mark.parametrize(
    "damage",
    [
        {"hooks": {"Trackers": 3}},
        {"seconds": {"train": "long"}},
        {"step": True},
        {"excluded_blocks": [[8, -1]]},
        {"blocks": 10**30},
        {"seconds": {"train": -1.0}},
        {"elapsed_seconds": float("nan")},
        {"bad_steps": [[304, 312]]},
    ],
)
def test_invalid_state_is_rejected_and_changes_nothing(damage: dict[str, Any]):
    state = TrainState()
    with pytest.raises(ValueError, match=f"^{next(iter(damage))} is "):
        state.load_state_dict(used_state().state_dict() | damage)
    assert state == TrainState()


@pytest.mark.parametrize("symptom", ["spike", "divergence"])
def test_a_watch_that_starts_again_at_random_steps_judges_as_one_that_goes_on(symptom):
    """Losses with noise, spikes and a rise at the end, over a save and a load of the state."""
    random = np.random.default_rng(0)
    losses = 2 + 3 * np.exp(-np.arange(150) / 30) + random.normal(0, 0.02, 150)
    losses[[60, 90, 91]] += 3
    losses[110:] += 2

    def verdicts(restarts: set[int]) -> list[tuple[str | None, str]]:
        state, found = TrainState(), []
        for step, loss in enumerate(losses.tolist(), 1):
            if step in restarts:
                saved, state = json.dumps(state.state_dict()), TrainState()
                state.load_state_dict(json.loads(saved))
            state.step = step
            found.append(judge(loss, state, {symptom}))
        return found

    straight = verdicts(set())
    assert {verdict for verdict, _ in straight} == {None, symptom}
    for _ in range(20):
        restarts = set(random.integers(1, 150, 5).tolist())
        assert verdicts(restarts) == straight, restarts


def test_the_state_of_an_older_version_is_loaded():
    """The first versions knew neither loops nor grids, and their loss watch began again with each session."""
    newer = {"loop_active", "hooks", "bad_steps", "suspect_step"}
    newer |= {"usual_losses", "recent_losses", "first_loss", "lowest_level", "lowest_level_step"}
    state, saved = used_state(), used_state().state_dict()
    state.load_state_dict({name: value for name, value in saved.items() if name not in newer})
    assert state.state_dict() == saved | {
        name: value for name, value in TrainState().state_dict().items() if name in newer
    }


def test_a_rollback_excludes_the_bad_blocks_from_the_checkpoint_on_and_keeps_the_usual_level():
    """At the checkpoint, 296 blocks were read and 16 excluded, so the next position is 312."""
    saved, current = TrainState(step=37, tokens=9_472, blocks=296, best_step=30), used_state()
    current.bad_steps = [[[300, 312]], [[312, 320], [400, 404]]]
    state = rolled_back(saved, current)
    assert state.excluded_blocks == [[8, 24], [312, 320], [400, 404]], "311 was read before the checkpoint"
    assert (state.learning_rate_scale, state.rollbacks, state.skipped_steps) == (0.25, 2, 3)
    assert (state.step, state.blocks, state.best_step) == (37, 296, 30)
    assert (state.bad_steps, state.suspect_step, state.recent_losses) == ([], 37, [])
    for name in ("usual_losses", "first_loss", "lowest_level", "lowest_level_step"):
        assert getattr(state, name) == getattr(current, name)
