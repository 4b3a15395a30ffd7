"""Checkpoints as folders that are whole or not there, and the choice among them.

Owns the layout `checkpoints/step-000300`, the manifest and the retention. A checkpoint is written to a hidden folder,
synced, and renamed, so that a reader never sees half of one. The latest is the one with the highest step, the best is
what the train states say; the links `latest` and `best` are only for people, because not every copy and file system
keeps links. Does not know when to save (loop.py), nor what else is in the files (checkpointer.py).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from hfgolf.checkpoint.state import TrainState
from hfgolf.command_line import one_line
from hfgolf.config import join_words
from hfgolf.durable import find_damage, list_files, make_folder, sync, sync_tree
from hfgolf.errors import UserError

if TYPE_CHECKING:
    from accelerate import PartialState

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
STATE_NAME = "train_state.json"  # not a registered object: accelerate unpickles those, which can run code
_MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{6,})")


class Rejected(Exception):
    """A checkpoint that can not be resumed from; says why."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Make the hidden folder in which a checkpoint is written."""
    partial = folder / f".partial-{step_folder(folder, step).name}"
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(folder)
    partial.mkdir()
    return partial


def commit_checkpoint(partial: Path, step: int, processes: int) -> Path:
    """Make what is in `partial` durable and let it appear as `step-NNNNNN`, the latest; returns that path."""
    folder = partial.parent
    final = step_folder(folder, step)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest = {
        "format": FORMAT_VERSION,
        "step": step,
        "processes": processes,
        "files": list_files(partial, files),
    }
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    sync_tree(partial)
    set_aside(final)
    partial.rename(final)
    sync(folder)
    point(folder / "latest", final)
    return final


def clean_up(folder: Path) -> None:
    """Finish a save that was killed when only its name was missing; remove what any other left behind."""
    for partial in folder.glob(".partial-*"):
        final = folder / partial.name.removeprefix(".partial-")
        if _STEP_FOLDER.fullmatch(final.name) and not final.exists() and is_whole(partial):
            partial.rename(final)
            sync(folder)
        else:
            shutil.rmtree(partial, ignore_errors=True)


def is_whole(checkpoint: Path) -> bool:
    """Say whether a checkpoint verifies."""
    try:
        verify(checkpoint)
    except Rejected:
        return False
    return True


def retain(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best one."""
    best = best_checkpoint(folder)
    for checkpoint in newest_first(folder)[keep_last:]:
        if checkpoint != best:
            hidden = checkpoint.with_name(f".partial-{checkpoint.name}")  # killed half-way, it must not look whole
            shutil.rmtree(hidden, ignore_errors=True)
            checkpoint.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to its sibling `target`, in one atomic step; without a link if that fails.

    A folder in its place, which a copy that followed the link has made, is set aside.
    """
    temporary = link.with_name(f".{link.name}")
    try:
        if link.is_dir() and not link.is_symlink():
            set_aside(link)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        temporary.replace(link)
    except (OSError, NotImplementedError) as error:  # a file system, or a Windows account, without links
        logger.debug("no link %s: %s", link, error)
        with suppress(OSError):
            link.unlink()  # none is better than a wrong one


def set_aside(checkpoint: Path) -> None:
    """Take a checkpoint out of the running, if it is there, without losing it: `abandoned-step-NNNNNN`.

    One abandoned earlier keeps that name, as it may be the one to resume from; the next is `abandoned-step-NNNNNN-2`.
    """
    if checkpoint.exists():
        aside, count = checkpoint.with_name(f"abandoned-{checkpoint.name}"), 1
        while aside.exists():
            count += 1
            aside = checkpoint.with_name(f"abandoned-{checkpoint.name}-{count}")
        checkpoint.rename(aside)


def check_resume(folder: Path, which: str | None) -> None:
    """Raise UserError, before any work, if the checkpoints can't be reached or train.resume names none of them."""
    if folder.is_symlink() and not folder.exists():
        raise UserError(
            f"run.output_dir: {folder} leads to {os.readlink(folder)}, which is not there; mount that disk, or remove"
            " the link to begin anew."
        )
    if which in (None, "auto"):
        return
    path = find_checkpoint(folder, which)
    if path is None or not path.is_dir():
        names = join_words(sorted(checkpoint.name for checkpoint in newest_first(folder))) or "none"
        raise UserError(
            f"train.resume: there is no checkpoint {path or folder / which} (checkpoints in {folder}: {names})."
        )


def choose_checkpoint(processes: PartialState, folder: Path, which: str) -> Path | None:
    """Return the checkpoint to resume from, verified; all ranks call it and all get the same answer.

    which: auto or latest take the newest valid one and name each that they rejected, with the reason (auto: None if
    there is none at all); best or a path takes that one. Changes nothing on the disk. Raises UserError if none will do.
    """
    answer: list[Any] = [None, None]
    if processes.is_main_process:
        try:
            answer[0] = _choose(folder, which)
        except UserError as error:
            answer[1] = str(error)
    path, complaint = broadcast_object_list(answer)
    if complaint:
        raise UserError(complaint)
    return path


def make_latest(folder: Path, chosen: Path) -> None:
    """Set aside the checkpoints in a folder that are newer than the one the run goes on from."""
    step = read_manifest(chosen)["step"]
    for other in newest_first(folder):
        if step_of(other) >= step and other.resolve() != chosen.resolve():
            set_aside(other)
    for name, target in (("latest", next(iter(newest_first(folder)), None)), ("best", best_checkpoint(folder))):
        if target is not None:
            point(folder / name, target)
        elif (folder / name).is_symlink():
            (folder / name).unlink()


def verify(checkpoint: Path) -> dict[str, Any]:
    """Check a checkpoint's files against its manifest; return the manifest.

    Raises Rejected with the first thing that is wrong.
    """
    manifest = read_manifest(checkpoint)
    try:
        version, files = manifest["format"], dict(manifest["files"])
        if version != FORMAT_VERSION:
            raise Rejected(f"another version of hfgolf saved it (format {version}, this one reads {FORMAT_VERSION})")
        if not all(isinstance(manifest[key], int) for key in ("step", "processes")):
            raise TypeError
        if _STEP_FOLDER.fullmatch(checkpoint.name) and step_of(checkpoint) != manifest["step"]:
            raise Rejected(f"{_MANIFEST} is of step {manifest['step']}")
        for name, expected in files.items():
            _verify_file(checkpoint, name, expected)
        paths = [path for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir()]
    except OSError as error:
        raise Rejected(f"not readable ({one_line(error)})") from None
    except (KeyError, TypeError, ValueError):
        raise Rejected(f"{_MANIFEST} is not one of hfgolf's") from None
    inside = {str(path.relative_to(checkpoint)) for path in paths}
    for name in sorted(inside - files.keys() - {_MANIFEST}):
        raise Rejected(f"{name} is not in {_MANIFEST}")
    if STATE_NAME in files:
        try:
            TrainState().load_state_dict(json.loads((checkpoint / STATE_NAME).read_text()))
        except (OSError, KeyError, TypeError, ValueError, RecursionError):
            raise Rejected(f"{STATE_NAME} is not one of hfgolf's") from None
    return manifest


def verified_file(checkpoint: Path, name: str) -> Path:
    """Return the path of one file of a checkpoint, checked against the manifest; Rejected if it is not as saved."""
    try:
        _verify_file(checkpoint, name, read_manifest(checkpoint)["files"][name])
    except (KeyError, TypeError):
        raise Rejected(f"{name} is not in {_MANIFEST}") from None
    return checkpoint / name


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return what commit_checkpoint noted of a checkpoint; Rejected where there is nothing to read."""
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        raise Rejected(f"{_MANIFEST} is missing or not readable") from None
    if not isinstance(manifest, dict):
        raise Rejected(f"{_MANIFEST} is not one of hfgolf's")
    return manifest


def _choose(folder: Path, which: str) -> Path | None:
    if which in ("auto", "latest"):
        return _newest_valid(folder, which)
    chosen = (find_checkpoint(folder, which) or folder / which).resolve()
    try:
        verify(chosen)
    except Rejected as rejected:
        raise UserError(f"train.resume: {chosen} is rejected, {rejected}; choose another.") from None
    return chosen


def _newest_valid(folder: Path, which: str) -> Path | None:
    """Return the newest checkpoint that verifies, after a line for each that does not; None: there never was one."""
    reasons = []
    for checkpoint in newest_first(folder):
        try:
            verify(checkpoint)
            return checkpoint
        except Rejected as rejected:
            reasons.append(f"{checkpoint.name}: {rejected}")
            logger.warning("checkpoint rejected, %s", reasons[-1])
    if reasons or which == "latest":
        raise UserError(
            f"train.resume: no checkpoint in {folder} is valid ({'; '.join(reasons) or 'none there'}); restore one, or"
            " start anew under another --run.name."
        )
    return None


def find_checkpoint(folder: Path, which: str) -> Path | None:
    """Return the checkpoint that latest, best or a path means; None if there is no latest or best."""
    if which == "latest":
        return next(iter(newest_first(folder)), None)
    if which == "best":
        return best_checkpoint(folder)
    return Path(which)


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder by their steps, whatever their files' times say."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name)), key=step_of, reverse=True)


def saved_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint that is on the disk, with all its files by name and size; else None."""
    for checkpoint in newest_first(folder):
        with suppress(Rejected, OSError, KeyError, TypeError, ValueError, AttributeError):
            files = read_manifest(checkpoint)["files"].items()
            if all((checkpoint / name).stat().st_size == listed["bytes"] for name, listed in files):
                return step_of(checkpoint)
    return None


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of the lowest validation loss among those in a folder, as their train states say.

    The newest state knows it, unless the save of that step failed: then an older one does. None if none does.
    """
    for checkpoint in newest_first(folder):
        with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
            best = step_folder(folder, json.loads((checkpoint / STATE_NAME).read_text())["best_step"])
            if best.is_dir():
                return best
    return None


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's name says."""
    return int(checkpoint.name.removeprefix("step-"))


def _verify_file(checkpoint: Path, name: str, listed: Any) -> None:
    damage = find_damage(checkpoint, name, listed)
    if damage:
        raise Rejected(damage)
