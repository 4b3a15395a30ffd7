"""Decide which run may use a folder: only the run that began there, and only until it is complete.

On several ranks, it is one run with one config, in one folder that all of them see.
"""

from __future__ import annotations

import json
import logging
import platform
import secrets
import time
from typing import Any

from hfgolf.checkpoint.identity import config_changes, read_identity, text_changes
from hfgolf.checkpoint.store import newest_first
from hfgolf.config.parse import ResolvedConfig
from hfgolf.config.sections import RunConfig
from hfgolf.data.corpus import load_corpus
from hfgolf.run.folder import RunFolder, run_folder
from hfgolf.system.errors import UserError
from hfgolf.system.ranks import agree, decide, gather
from hfgolf.system.wording import join_words, labeled

logger = logging.getLogger(__name__)

_SHARED_SECONDS = 10.0  # a network file system shows a new file to other machines only after a moment
_OF_THE_MACHINE = {
    "run.output_dir",
    "data.cache_dir",
    "data.files",  # their names and hashes are compared
    "data.old_text",
    "data.in_memory",
    "data.num_workers",
    "train.cpu_threads",
}


def claim(folder: RunFolder, resolved: ResolvedConfig) -> None:
    """Make and lock the folder of this run. The main process calls it before any other work.

    Raises UserError if the folder is not writable, is in use by another process, holds a run with another config, or
    holds a run that needs train.resume. Touches nothing in the folder except unfinished writes.
    """
    folder.make()
    folder.lock()
    folder.clean_up()
    resume = resolved.config.train.resume
    has_checkpoints = bool(newest_first(folder.checkpoints))
    changed = changes(folder, resolved) if resume is None or not has_checkpoints else []
    if resume in (None, "auto") and changed:  # if there is a checkpoint, its own config decides
        listed = f"{', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''}"
        goes_on = ", delete that folder, or continue that run with these values: --train.resume latest"
        advice = goes_on if has_checkpoints else ", or delete that folder, which has no checkpoint"
        raise UserError(
            f"run.name: {folder.path} holds a run with another config ({listed}); choose another --run.name{advice}."
        )
    if resume is None and folder.summary.exists():
        raise UserError(f"run.name: {folder.path} holds a complete run; choose another --run.name to start a new one.")
    if resume is None and has_checkpoints:
        raise UserError(
            f"run.name: {folder.path} holds an unfinished run; continue it with --train.resume auto, or choose another"
            " --run.name to start a new one."
        )


def require_shared(folder: RunFolder) -> None:
    """Raise UserError unless all ranks see the same folder: each reads the checkpoints that rank 0 writes there.

    All ranks call it. Makes the folder.
    """
    machines = gather(platform.node())
    if len(machines) == 1:
        return
    name = decide(lambda: f".partial-shared-{secrets.token_hex(8)}")
    probe = folder.path / name

    def make_probe() -> None:
        folder.make()
        probe.touch()

    decide(make_probe)
    ends_at = time.monotonic() + _SHARED_SECONDS
    while not probe.exists() and time.monotonic() < ends_at:
        time.sleep(0.1)
    is_shared = gather(probe.exists())
    decide(lambda: probe.unlink(missing_ok=True))
    if not all(is_shared):
        rank = is_shared.index(False)
        raise UserError(
            f"run.output_dir: {folder.path} on rank {rank} ({machines[rank]}) is not the folder of rank 0"
            f" ({machines[0]}); set it to a folder that all ranks share, because all read the checkpoints there."
        )


def agree_on_config(config: RunConfig) -> None:
    """Raise UserError if the ranks have different configs, except for what may depend on the machine."""
    values = {key: value for key, value in config.flat().items() if key not in _OF_THE_MACHINE}
    agree(values, "start all ranks with the same config, or state this key")


def changes(folder: RunFolder, resolved: ResolvedConfig) -> list[str]:
    """Return "key old -> new" for each value of config.yaml that this run changes; [] if it can't be read."""
    before = folder.read_config()
    return list(config_changes(before, resolved).values()) if before else []


def with_own_folder(said: ResolvedConfig, starts_beside_unfinished: bool = True) -> ResolvedConfig:
    """Return the config with the first name whose folder is free, or holds this run.

    For a run that nobody named: its name is that of its text or its config, which others may have, too. If a run has
    that name, says which folder this one has, and why. All ranks call it. starts_beside_unfinished: whether this may be
    a new run if the one with that name is unfinished; if not, the resume refuses what has changed in that one.
    """
    return said.resolve("auto", run__name=decide(lambda: _own_name(said, starts_beside_unfinished)))


def _own_name(said: ResolvedConfig, starts_beside_unfinished: bool) -> str:
    first, own, number = run_folder(said.config), said, 1
    other = differs = _other_run(said)
    while other:
        number += 1
        own = said.resolve("auto", run__name=f"{said.config.run.name}-{number}")
        other = _other_run(own)
    is_new = not run_folder(own.config).config.exists()
    if is_new and not (starts_beside_unfinished or first.summary.exists()):
        own = said
    text = str(run_folder(own.config).path)
    if own is not said:
        kind = "a complete" if first.summary.exists() else "an unfinished"
        text += f", because {first.path} holds {kind} run with another text or config"
        text += f" ({join_words(differs, maximum=3)})"
        goes_on = not first.summary.exists() and newest_first(first.checkpoints)
        text += "; to continue that one: --train.resume latest" if goes_on else ""
    if first.config.exists():
        logger.info("%s", labeled("run", text))
    return str(own.config.run.name)


def _other_run(said: ResolvedConfig) -> list[str]:
    """Return what distinguishes the run in this one's folder from this one; [] if there is none, or if it is this."""
    folder = run_folder(said.config)
    return (changes(folder, said) or changed_text(folder, said.config)) if folder.config.exists() else []


def completed(folder: RunFolder, resolved: ResolvedConfig) -> tuple[dict[str, Any] | None, str | None]:
    """Return the summary of this run if it is complete already, and else what has changed in it since, if it was.

    That is its summary or a file of its model. Raises UserError if there is no checkpoint to rebuild it from.
    """
    may_resume = resolved.config.train.resume in (None, "auto")
    if not (may_resume and folder.summary.is_file() and folder.read_config()) or changes(folder, resolved):
        return None, None
    damage = folder.find_damage()
    if damage is None:
        return json.loads(folder.summary.read_text()) | {"model": str(folder.model)}, None
    if not newest_first(folder.checkpoints):
        raise UserError(
            f"run.name: {folder.path} holds a complete run, but {damage}, and there is no checkpoint to rebuild it"
            " from; choose another --run.name, or delete that folder."
        )
    return None, damage


def changed_text(folder: RunFolder, config: RunConfig) -> list[str]:
    """Return how the text of a complete run has changed since; [] if it hasn't, or if that is unknown."""
    newest = next(iter(newest_first(folder.checkpoints)), None)
    try:
        return text_changes(read_identity(newest)["corpus"], load_corpus(config.data).identity) if newest else []
    except UserError:  # the text or its server is gone, and a complete run no longer needs it
        return []
