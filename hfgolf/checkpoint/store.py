"""Store checkpoints as folders that are either complete or absent, and choose among them.

Owns the layout `checkpoints/step-000300`, the manifest and the retention. A checkpoint is written to a hidden folder,
synced and renamed, so a reader never sees an incomplete one. The latest has the highest step; the train states name the
best. The links `latest` and `best` are only for people: not every copy and file system keeps links. Does not know when
to save (train/loop.py) or what the other files contain (contents.py).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from hfgolf.checkpoint.state import TrainState
from hfgolf.system.durable import find_damage, list_files, make_folder, sync, sync_tree
from hfgolf.system.errors import UserError
from hfgolf.system.ranks import decide
from hfgolf.system.wording import join_words, one_line

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
SHARDED_FORMAT_VERSION = 4
"""Of checkpoints with files in subfolders, which versions of hfgolf without them cannot read."""
STATE_NAME = "train_state.json"  # not registered with accelerate, which would unpickle it: a pickle can run code
_MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{6,})")


class Rejected(Exception):
    """Says why a checkpoint cannot be used."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def hidden_folder(folder: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is assembled."""
    return folder / f".partial-{step_folder(folder, step).name}"


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Make the hidden folder in which a checkpoint is assembled."""
    partial = hidden_folder(folder, step)
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(folder)
    partial.mkdir()
    return partial


def commit_checkpoint(partial: Path, step: int, processes: int, listed: dict[str, Any] | None = None) -> Path:
    """Sync the folder `partial`, rename it to `step-NNNNNN` and make it the latest; return its path.

    listed: the entries (see `list_files`) of the files whose hashes are known already; the others are read.
    """
    folder = partial.parent
    final = step_folder(folder, step)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    listed = listed or {}
    others = [path for path in files if str(path.relative_to(partial)) not in listed]
    manifest = {
        "format": FORMAT_VERSION if all(path.parent == partial for path in files) else SHARDED_FORMAT_VERSION,
        "step": step,
        "processes": processes,
        "files": dict(sorted((listed | list_files(partial, others)).items())),
    }
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    sync_tree(partial)
    set_aside(final)
    partial.rename(final)
    sync(folder)
    replace_link(folder / "latest", final)
    return final


def clean_up(folder: Path) -> None:
    """Finish a killed save if only its final rename is missing; remove the remains of all others."""
    for partial in folder.glob(".partial-*"):
        final = folder / partial.name.removeprefix(".partial-")
        if not _STEP_FOLDER.fullmatch(final.name):
            continue  # not a save of hfgolf's
        if not final.exists() and is_whole(partial):
            partial.rename(final)
            sync(folder)
        else:
            shutil.rmtree(partial, ignore_errors=True)


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint passes `verify`."""
    try:
        verify(checkpoint)
    except Rejected:
        return False
    return True


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best one."""
    best = best_checkpoint(folder)
    for checkpoint in newest_first(folder)[keep_last:]:
        if checkpoint != best:
            hidden = checkpoint.with_name(f".partial-{checkpoint.name}")  # if killed halfway, it must not look complete
            shutil.rmtree(hidden, ignore_errors=True)
            checkpoint.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def replace_link(link: Path, target: Path) -> None:
    """Atomically make `link` a relative symbolic link to its sibling `target`; remove it if that fails.

    If a folder has the link's name (left by a copy that followed links), set it aside.
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
            link.unlink()  # no link is better than a wrong one


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint, if it exists, to `abandoned-step-NNNNNN`, so that no resume picks it automatically.

    An earlier abandoned one keeps its name, because a resume may name it; the next becomes `abandoned-step-NNNNNN-2`.
    """
    if checkpoint.exists():
        aside, count = checkpoint.with_name(f"abandoned-{checkpoint.name}"), 1
        while aside.exists():
            count += 1
            aside = checkpoint.with_name(f"abandoned-{checkpoint.name}-{count}")
        checkpoint.rename(aside)


def check_resume(folder: Path, which: str | None) -> None:
    """Raise UserError, before any work, if the checkpoints can't be reached or train.resume names a missing one."""
    if folder.is_symlink() and not folder.exists():
        raise UserError(
            f"run.output_dir: {folder} links to {os.readlink(folder)}, which does not exist; mount that disk, or remove"
            " the link to start over."
        )
    if which in (None, "auto"):
        return
    path = find_checkpoint(folder, which)
    if path is None or not path.is_dir():
        names = join_words(sorted(checkpoint.name for checkpoint in newest_first(folder))) or "none"
        raise UserError(
            f"train.resume: there is no checkpoint {path or folder / which} (checkpoints in {folder}: {names})."
        )


def choose_checkpoint(folder: Path, which: str) -> Path | None:
    """Return the verified checkpoint to resume from. All ranks call it and get the same answer.

    which: auto or latest: the newest valid one, with a warning for each rejected one (auto: None if there are no
    checkpoints); best or a path: that one. Changes nothing on disk. Raises UserError if no checkpoint is usable.
    """
    return decide(lambda: _choose(folder, which))


def make_latest(folder: Path, chosen: Path) -> None:
    """Set aside the checkpoints in a folder that are newer than the one the run continues from."""
    step = read_manifest(chosen)["step"]
    for other in newest_first(folder):
        if step_of(other) >= step and other.resolve() != chosen.resolve():
            set_aside(other)
    for name, target in (("latest", next(iter(newest_first(folder)), None)), ("best", best_checkpoint(folder))):
        if target is not None:
            replace_link(folder / name, target)
        elif (folder / name).is_symlink():
            (folder / name).unlink()


def verify(checkpoint: Path) -> dict[str, Any]:
    """Check a checkpoint's files against its manifest; return the manifest.

    Raises Rejected with the first problem found.
    """
    manifest = read_manifest(checkpoint)
    try:
        version, files = manifest["format"], dict(manifest["files"])
        if version not in (FORMAT_VERSION, SHARDED_FORMAT_VERSION):
            readable = f"{FORMAT_VERSION} and {SHARDED_FORMAT_VERSION}"
            raise Rejected(f"saved by another version of hfgolf (format {version}; this version reads {readable})")
        if not all(isinstance(manifest[key], int) for key in ("step", "processes")):
            raise TypeError
        if _STEP_FOLDER.fullmatch(checkpoint.name) and step_of(checkpoint) != manifest["step"]:
            raise Rejected(f"{_MANIFEST} belongs to step {manifest['step']}")
        if damage := find_damage(checkpoint, files):
            raise Rejected(damage)
        paths = [path for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir()]
    except OSError as error:
        raise Rejected(f"not readable ({one_line(error)})") from None
    except (KeyError, TypeError, ValueError):
        raise Rejected(f"{_MANIFEST} is not valid") from None
    inside = {str(path.relative_to(checkpoint)) for path in paths}
    for name in sorted(inside - files.keys() - {_MANIFEST}):
        raise Rejected(f"{name} is not in {_MANIFEST}")
    if STATE_NAME in files:
        try:
            TrainState().load_state_dict(json.loads((checkpoint / STATE_NAME).read_text()))
        except (OSError, KeyError, TypeError, ValueError, RecursionError):
            raise Rejected(f"{STATE_NAME} is not valid") from None
    return manifest


def verified_file(checkpoint: Path, name: str) -> Path:
    """Return the path of one file of a checkpoint, checked against the manifest. Raises Rejected if it is damaged."""
    try:
        damage = find_damage(checkpoint, {name: read_manifest(checkpoint)["files"][name]})
    except (KeyError, TypeError):
        raise Rejected(f"{name} is not in {_MANIFEST}") from None
    if damage:
        raise Rejected(damage)
    return checkpoint / name


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest that commit_checkpoint wrote. Raises Rejected if it cannot be read."""
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        raise Rejected(f"{_MANIFEST} is missing or not readable") from None
    if not isinstance(manifest, dict):
        raise Rejected(f"{_MANIFEST} is not valid")
    return manifest


def _choose(folder: Path, which: str) -> Path | None:
    if which in ("auto", "latest"):
        return _newest_valid(folder, which)
    chosen = (find_checkpoint(folder, which) or folder / which).resolve()
    try:
        verify(chosen)
    except Rejected as rejected:
        raise UserError(f"train.resume: {chosen} rejected: {rejected}; choose another.") from None
    return chosen


def _newest_valid(folder: Path, which: str) -> Path | None:
    """Return the newest valid checkpoint, with a warning for each invalid one; None if there are no checkpoints."""
    reasons = []
    for checkpoint in newest_first(folder):
        try:
            verify(checkpoint)
            return checkpoint
        except Rejected as rejected:
            reasons.append(f"{checkpoint.name}: {rejected}")
            logger.warning("checkpoint rejected: %s", reasons[-1])
    if reasons or which == "latest":
        raise UserError(
            f"train.resume: no valid checkpoint in {folder} ({'; '.join(reasons) or 'it has none'}); restore one, or"
            " start a new run with another --run.name."
        )
    return None


def find_checkpoint(folder: Path, which: str) -> Path | None:
    """Return the checkpoint that "latest", "best" or a path means; None if there is no latest or best."""
    if which == "latest":
        return next(iter(newest_first(folder)), None)
    if which == "best":
        return best_checkpoint(folder)
    return Path(os.path.expanduser(which))


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, sorted by step and not by file times."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name)), key=step_of, reverse=True)


def saved_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint whose files all exist with the right sizes; None if there is none."""
    for checkpoint in newest_first(folder):
        with suppress(Rejected, OSError, KeyError, TypeError, ValueError, AttributeError):
            files = read_manifest(checkpoint)["files"].items()
            if all((checkpoint / name).stat().st_size == listed["bytes"] for name, listed in files):
                return step_of(checkpoint)
    return None


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the lowest validation loss, according to the train states; None if there is none.

    The newest state names it. If the save of that step failed, an older state names the best one that exists.
    """
    for checkpoint in newest_first(folder):
        with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
            best = step_folder(folder, json.loads((checkpoint / STATE_NAME).read_text())["best_step"])
            if best.is_dir():
                return best
    return None


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))
