"""Export the model at each of train.milestones, and push it to a branch of its own.

The step of a milestone is a pure function of what the training has read, and its export ends before the checkpoint of
that step begins. So a resume loses none: what a kill undoes is exported again, to the same folder.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hfgolf.checkpoint.state import TrainState
from hfgolf.config.milestones import Milestone, milestone
from hfgolf.config.sections import BatchSection
from hfgolf.data.words import Words, count_words
from hfgolf.hooks.push import export_now
from hfgolf.publish.hub import HubPusher
from hfgolf.system.errors import UserError
from hfgolf.system.ranks import decide
from hfgolf.system.wording import count_of, join_words, labeled
from hfgolf.train.hooks import Hook
from hfgolf.train.meter import StepResult
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)

_FAR_BLOCKS = 2**62  # no training reads so many


class Milestones(Hook):
    """Exports, and pushes what an earlier session of the run exported and did not get to push."""

    def __init__(self, entries: Sequence[str], pusher: HubPusher | None) -> None:
        self._milestones, self._pusher = [milestone(entry) for entry in entries], pusher
        self._words: Words | None = None
        self._read_words: Callable[[int], float] | None = None
        self._due: dict[str, int] = {}
        self._state: dict[str, Any] = {}

    def start(self, run: Run) -> None:
        """Count words if a milestone is of words, and say when each is due."""
        batch, state = run.config.batch, run.state
        if any(one.unit == "words" for one in self._milestones):
            words = self._words = self._words or decide(lambda: count_words(run.tokens, batch.sequence_length))
            of_this_text = words.read(state.blocks)
            if "words" not in self._state and state.tokens != state.blocks * batch.sequence_length:
                raise UserError(
                    "train.milestones: the words of the text before this one were not counted; state milestones in"
                    " tokens."
                )
            before = self._state.get("words", of_this_text) - of_this_text  # of texts that a resume has replaced
            self._read_words = lambda more_blocks: before + words.read(run.state.blocks + more_blocks)
        self._due = due_steps(self._milestones, batch, state, self._read_words)
        if not run.accelerator.is_main_process:
            return
        announce(self._due, run.step_limit)
        for folder in (run.folder.milestones / one.name for one in self._milestones if one.name not in self._due):
            if not (folder / "config.json").is_file():
                logger.warning("milestone %s is of a step before this start, and was not exported then", folder.name)
            elif self._pusher is not None and folder.name not in self._pusher.pushed:
                self._pusher.push_branch(folder, f"{folder.name}, exported before")

    def after_step(self, run: Run, result: StepResult) -> None:
        names = [name for name, step in self._due.items() if step == run.state.step]
        if not names or not (run.accelerator.is_main_process or run.is_sharded):
            return
        step, tokens = run.state.step, run.state.tokens
        words = None if self._read_words is None else round(self._read_words(0))
        folders = [run.folder.milestones / name for name in names]
        problem = export_now(run, folders, milestone={"tokens": tokens, "words": words})
        for folder in folders if run.accelerator.is_main_process else ():
            if problem:
                logger.warning("milestone %s, at step %d, was not exported: %s", folder.name, step, problem)
                continue
            read = f"{tokens:,} tokens{'' if words is None else f', {words:,} words'}"
            logger.info("milestone %s: step %d, %s; %s", folder.name, step, read, folder)
            run.event("milestone", name=folder.name, tokens=tokens, words=words)
            if self._pusher is not None:
                self._pusher.push_branch(folder, f"{folder.name}: step {step}, {read}")
        run.clock.signals.save = 1  # a checkpoint, so that a resume need not train these steps again

    def state_dict(self) -> dict[str, Any]:
        words = {} if self._read_words is None else {"words": self._read_words(0)}
        return words | ({"pushed": sorted(self._pusher.pushed)} if self._pusher is not None else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state
        if self._pusher is not None:
            self._pusher.pushed = {*self._pusher.pushed, *state.get("pushed", [])}


def due_steps(
    milestones: Sequence[Milestone], batch: BatchSection, state: TrainState, read_words: Callable[[int], float] | None
) -> dict[str, int]:
    """Return {name: the first step after which so much has been read} of the milestones that are ahead, by step.

    read_words: returns the words read so far and in so many more blocks; None if no milestone is of words.
    """

    def is_read(one: Milestone, steps: int) -> bool:
        if one.unit == "tokens" or read_words is None:
            return state.tokens + steps * batch.tokens_per_step >= one.amount
        return read_words(steps * batch.sequences_per_step) >= one.amount

    far = range(_FAR_BLOCKS // batch.tokens_per_step)
    ahead = [one for one in milestones if not is_read(one, 0)]
    due = {one.name: state.step + bisect_left(far, True, key=partial(is_read, one)) for one in ahead}
    return dict(sorted(due.items(), key=lambda item: item[1]))


def announce(due: dict[str, int], last_step: float) -> None:
    """Say when milestones are due, and which come after the last step. last_step: infinity if nobody knows it."""
    places = [f"{name} at step {step:,}" for name, step in due.items()]
    if places:
        shown = join_words(places) if len(places) < 4 else f"{places[0]} to {places[-1]}"
        logger.info("%s", labeled("keep", f"{count_of(len(places), 'milestone')}: {shown}"))
    missed = [name for name, step in due.items() if step > last_step]
    if missed:
        text = "milestone %s is not reached by the last step, %s; train longer, or leave it out"
        logger.warning(text, join_words(missed, maximum=5), f"{last_step:,.0f}")
