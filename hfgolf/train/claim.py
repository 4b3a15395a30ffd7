"""Which run may use a folder: the one that began there, unless it is complete."""

from __future__ import annotations

import json
from typing import Any

from hfgolf.checkpoint.identity import changed_keys, differences, read_identity, text_changes
from hfgolf.checkpoint.store import newest_first
from hfgolf.command_line import ResolvedConfig
from hfgolf.config import RunConfig
from hfgolf.data.corpus import load_corpus
from hfgolf.errors import UserError
from hfgolf.run.folder import RunFolder


def claim(folder: RunFolder, resolved: ResolvedConfig) -> None:
    """Make and lock the folder of this run; the main process calls it before any work.

    Raises UserError if the folder is not writable, is in use by another process, or holds another config or a run that
    train.resume must continue. Leaves everything in it untouched except unfinished writes.
    """
    folder.make()
    folder.lock()
    folder.clean_up()
    resume = resolved.config.train.resume
    has_checkpoints = bool(newest_first(folder.checkpoints))
    changed = changes(folder, resolved) if resume is None or not has_checkpoints else []
    if resume in (None, "auto") and changed:  # if there is a checkpoint, its own config decides
        raise UserError(
            f"run.name: {folder.path} holds a run with another config ({', '.join(changed[:3])}"
            f"{', ...' if len(changed) > 3 else ''}); choose another --run.name, delete that folder, or continue"
            " that run with these values by --train.resume latest."
        )
    if resume is None and folder.summary.exists():
        raise UserError(f"run.name: {folder.path} holds a run that is complete; another --run.name starts a new one.")
    if resume is None and has_checkpoints:
        raise UserError(
            f"run.name: {folder.path} holds an unfinished run; --train.resume auto continues it,"
            " another --run.name starts a new one."
        )


def changes(folder: RunFolder, resolved: ResolvedConfig) -> list[str]:
    """Return "key old -> new" for each value of config.yaml that this run changes; none if it can't be read."""
    before = folder.read_config()
    return differences(before, resolved, changed_keys(before, resolved)) if before else []


def completed(folder: RunFolder, resolved: ResolvedConfig) -> dict[str, Any] | None:
    """Return the summary if this very run is complete and its model is undamaged, else None."""
    if not _has_ended(folder, resolved) or damage(folder, resolved):
        return None
    return json.loads(folder.summary.read_text()) | {"model": str(folder.model)}


def changed_text(folder: RunFolder, config: RunConfig) -> list[str]:
    """Return how the text of a complete run has changed since; nothing if it hasn't, or if that can't be told."""
    newest = next(iter(newest_first(folder.checkpoints)), None)
    try:
        return text_changes(read_identity(newest)["corpus"], load_corpus(config.data).identity) if newest else []
    except UserError:  # the text is gone, or its server is: nobody needs it any more
        return []


def damage(folder: RunFolder, resolved: ResolvedConfig) -> str | None:
    """Say what is not as it was when this very run ended: its summary, or a file of its model; else None.

    Raises UserError if there is no checkpoint to make it again from.
    """
    found = folder.find_damage() if _has_ended(folder, resolved) else None
    if found and not any(folder.checkpoints.glob("step-*")):
        raise UserError(
            f"run.name: {folder.path} holds a run that ended, but {found}, and there is no checkpoint to make it"
            " again from; choose another --run.name, or delete that folder."
        )
    return found


def _has_ended(folder: RunFolder, resolved: ResolvedConfig) -> bool:
    if resolved.config.train.resume not in (None, "auto") or not (folder.summary.is_file() and folder.read_config()):
        return False
    return not changes(folder, resolved)
