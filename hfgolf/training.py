"""Train a run with all that takes part in it: the loop, the standard hooks and those of the caller."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hfgolf.command_line import ResolvedConfig
from hfgolf.hooks import standard_hooks
from hfgolf.ranks import decide, together
from hfgolf.run.folder import run_folder
from hfgolf.train import loop
from hfgolf.train.claim import changed_text, completed, damage
from hfgolf.train.finish import show_summary
from hfgolf.train.hooks import Hook
from hfgolf.train.process import processes, resolve_precision
from hfgolf.train.signals import Signals

logger = logging.getLogger(__name__)


def train(resolved: ResolvedConfig, signals: Signals | None = None, hooks: Sequence[Hook] = ()) -> dict[str, Any]:
    """Train a model and return the summary. Arguments and errors are those of `loop.train`; hooks: in addition."""
    return loop.train(resolved, signals, [*standard_hooks(resolved.config), *hooks])


def train_once(resolved: ResolvedConfig, signals: Signals | None = None, hooks: Sequence[Hook] = ()) -> dict[str, Any]:
    """Train a run, or show and return the summary of one that is complete. Arguments and errors are those of `train`.

    A complete run whose model or summary is damaged is rebuilt from its checkpoints.
    """
    resolved = resolve_precision(resolved)  # decide it now, to compare it with that of a complete run
    folder, state = run_folder(resolved.config), processes()
    with together(state.num_processes):
        summary = decide(lambda: completed(folder, resolved))
        if summary:
            logger.info("%s is complete; to train again, choose another --run.name or delete that folder", folder.path)
            changes = changed_text(folder, resolved.config) if state.is_main_process else []
            if changes:
                logger.warning("the text has changed since it was trained (%s)", ", ".join(changes))
            show_summary(summary)
            return summary
        damaged = decide(lambda: damage(folder, resolved))
        if damaged:
            logger.warning("%s: %s; rebuilding it from the checkpoints", folder.path, damaged)
            resolved = resolved.resolve("auto", train__resume="auto")
        return train(resolved, signals, hooks)
