"""The folder of a run: the names of its files, and the lock that keeps other processes out.

Does not know which run may use it (train/claim.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import shutil
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hfgolf.config.other_names import in_current_names
from hfgolf.config.parse import read_yaml
from hfgolf.config.sections import RunConfig
from hfgolf.system.durable import find_damage, make_folder, sync, write_text
from hfgolf.system.errors import UserError

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]


class FolderTakenError(UserError):
    """Another run has started in the folder after it was deleted during this run."""


class _PathIn:
    """An attribute of RunFolder: the path of a file or folder in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """`runs/NAME` and the files in it."""

    path: Path
    _made: list[Path] = field(default_factory=list, init=False, repr=False, compare=False)
    """The folder and its parents, as far as they did not exist."""
    _locks: ClassVar[dict[Path, int]] = {}

    config = _PathIn("config.yaml")
    metadata = _PathIn("metadata.json")
    starts = _PathIn("starts")
    """One numbered folder per start of the run, with its config, metadata and patch."""
    uncommitted = _PathIn("uncommitted.patch")
    """Patch of the differences from the commit in metadata.json; exists only if there are any."""
    metrics = _PathIn("metrics.jsonl")
    report = _PathIn("report.html")
    """The HTML page; next to it is a folder with a picture of the losses."""
    checkpoints = _PathIn("checkpoints")
    model = _PathIn("model")
    """The exported model, as a folder for `from_pretrained`."""
    milestones = _PathIn("milestones")
    """The exported models of train.milestones, a folder each."""
    summary = _PathIn("summary.json")
    """The final figures; exists once the run is complete."""
    tasks = _PathIn("tasks.json")
    """Results of lm-eval's tasks, by task."""
    _lock_file = _PathIn(".lock")

    def make(self) -> None:
        """Make the folder and check that this process may write there. Raises UserError if it may not."""
        try:
            self._made.extend(make_folder(self.path))
            probe = self.path / ".writable"
            probe.write_text("\n")  # not empty: an empty file fits even on a full disk
            probe.unlink(missing_ok=True)  # another run may be probing, too
        except OSError as error:
            raise UserError(
                f"run.output_dir: cannot write to {self.path} ({error.strerror}); choose another --run.output_dir."
            ) from None

    def clean_up(self) -> None:
        """Remove the remains of killed writes, except among the checkpoints (see checkpoint/store.py)."""
        for pattern in (*_LEFTOVER_PLACES, f"{self.report.stem}/.partial-*"):
            for path in self.path.glob(pattern):
                if not _LEFTOVER.fullmatch(path.name):
                    continue  # the user may have others with such names
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def lock(self) -> None:
        """Keep other processes out until `unlock` or the end of this process. Raises UserError if another is in."""
        if fcntl is None or self.path.resolve() in self._locks:
            return
        try:
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"run.name: cannot open {self._lock_file} ({error.strerror}); if it belongs to another user, choose"
                " another --run.name or --run.output_dir."
            ) from None
        try:
            _lock_file(descriptor)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # the file system does not support locks
                os.close(descriptor)
                return
            owner = os.read(descriptor, 100).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"run.name: {self.path} is in use by another run (process {owner}); wait for it or choose another"
                " --run.name."
            ) from None
        self._locks[self.path.resolve()] = descriptor
        # loader workers are forked and may survive a kill -9: they must not keep the lock
        os.register_at_fork(after_in_child=lambda: _close_lock(descriptor))
        with contextlib.suppress(OSError):  # a full disk; the owner is only for the message above
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{_this_process()}\n".encode())

    def unlock(self) -> None:
        """Let other processes in: the run has ended, and its process may be a notebook that goes on."""
        descriptor = self._locks.pop(self.path.resolve(), None)
        if descriptor is not None:
            os.close(descriptor)

    def abandon(self) -> None:
        """Remove the folder if this process has written nothing to it but the lock: a failed start leaves nothing.

        Empty parents go, too, if `make` made them.
        """
        with contextlib.suppress(OSError):
            if self.path.resolve() in self._locks and os.listdir(self.path) == [self._lock_file.name]:
                self._lock_file.unlink()
                self.unlock()
                for path in (self.path, *self._made[1:]):
                    path.rmdir()

    def hold(self) -> None:
        """Check that this process still holds the folder, and lock it again if it was deleted during the run.

        Raises FolderTakenError if another run has started in it since.
        """
        held = self._locks.get(self.path.resolve())
        if held is None:  # not locked by this process
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(held), os.stat(self._lock_file)):
                return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            owner = self._lock_file.read_text(errors="replace").strip() if self._lock_file.exists() else ""
            if owner in ("", _this_process()):
                self._lock_file.touch()
                del self._locks[self.path.resolve()]
                self.lock()
                os.close(held)
                return
        except UserError:
            self._locks[self.path.resolve()] = held
            owner = "of another user, or just started"
        except OSError:  # the disk is full or failing; the next call checks again
            return
        raise FolderTakenError(
            f"run.name: {self.path} was deleted during this run, and another run has started in it (process {owner});"
            " this run stops and leaves the other one alone."
        )

    def read_config(self) -> dict[str, Any]:
        """Return config.yaml as {"section.key": value}, by today's names; {} if it can't be read."""
        try:
            return in_current_names(read_yaml(self.config))
        except (UserError, OSError):  # missing, or cut off by a power failure: checkpoints hold the config, too
            return {}

    def find_damage(self) -> str | None:
        """Describe what has changed since the run ended, in its summary or its model; None if nothing has."""
        try:
            summary = json.loads(self.summary.read_text())
            listed = summary.get("files", {})  # runs of older versions have none
            if not {"val_loss", "weights"} <= summary.keys():  # every summary has these
                raise ValueError
            for name in ("config.json", "model.safetensors"):
                if not (self.model / name).is_file():
                    return f"{self.model.name}/{name} is missing"
            damage = find_damage(self.model, listed)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return f"{self.summary.name} is not readable"
        return damage and f"{self.model.name}/{damage}"

    def mark_incomplete(self) -> None:
        """Delete the summary, which marks a complete run. Call it before changing anything else of the run."""
        if self.summary.exists():
            self.summary.unlink()
            sync(self.path)

    def describe_start(self, config_yaml: str, metadata: dict[str, Any], patch: str | None) -> None:
        """Write what is needed to repeat this start of the run, to `starts/NNN` and to the run folder (the latest)."""
        numbers = [int(path.name) for path in self.starts.glob("*") if re.fullmatch(r"[0-9]{1,9}", path.name)]
        number = 1 + max(numbers, default=0)
        start = self.starts / f"{number:03d}"
        make_folder(start)
        for folder in (start, self.path):
            write_text(folder / self.config.name, config_yaml)
            write_text(folder / self.metadata.name, json.dumps(metadata, indent=1))
            (folder / self.uncommitted.name).unlink(missing_ok=True)
            if patch:
                write_text(folder / self.uncommitted.name, patch)

    def commits(self) -> list[str]:
        """Return the commits of hfgolf that the run's starts used, without repetition, in order."""
        found: dict[str, None] = {}
        for path in sorted(self.starts.glob("*/metadata.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found[str(json.loads(path.read_text())["commit"] or "unknown")] = None
        return list(found)


_LEFTOVER_PLACES = (
    *(".partial-*", ".replaced-*", "milestones/.partial-*", "milestones/.replaced-*"),
    "starts/*/.partial-*",
)
# What a killed write of a run leaves. An export may be writing golf/ meanwhile: the next one removes what it leaves.
_LEFTOVER = re.compile(
    r"\.partial-(config\.yaml|uncommitted\.patch|metrics\.jsonl|report\.(html|md)|\w+\.png|shared-[0-9a-f]{16})"
    r"|\.partial-(metadata|summary|tasks|profile)\.json|\.(partial|replaced)-(model|chck_[\w.]+)"
)


def _lock_file(descriptor: int) -> None:
    """Lock an open file until it is closed. Raises OSError if another process holds the lock, or if there are none.

    The lock belongs to the open file: one of the process would end once it closes any descriptor of the file, as a copy
    of the folder does. Linux's also exclude those of the process, which older versions take, and work over NFS.
    """
    if sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK"):
        whole_file = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole_file)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without them
                raise
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close_lock(descriptor: int) -> None:
    """In a forked child: close a lock's file, if it is still the one of its run."""
    if descriptor in RunFolder._locks.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _this_process() -> str:
    return f"{os.getpid()} on {platform.node()}"


def run_folder(config: RunConfig) -> RunFolder:
    """Return the folder of the run that a config describes."""
    return RunFolder(Path(os.path.expanduser(config.run.output_dir)) / str(config.run.name))
