"""The folder of a run: the names of its files, and the lock that keeps other processes out of it.

Does not know which run may use it (train/claim.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hfgolf.command_line import read_yaml
from hfgolf.config import RunConfig
from hfgolf.durable import find_damage, make_folder, sync, write_text
from hfgolf.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two runs apart there
    fcntl = None  # type: ignore[assignment]


class FolderTakenError(UserError):
    """Another run has begun in the folder, which was deleted under this one."""


@dataclass(frozen=True)
class RunFolder:
    """`runs/NAME` and the files in it."""

    path: Path
    _locks: ClassVar[dict[Path, int]] = {}

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metadata(self) -> Path:
        return self.path / "metadata.json"

    @property
    def starts(self) -> Path:
        """A numbered folder for each start of the run, with its config, metadata and patch."""
        return self.path / "starts"

    @property
    def uncommitted(self) -> Path:
        """What differed from the commit in metadata.json, as a patch; there only where something did."""
        return self.path / "uncommitted.patch"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The page; beside it are its Markdown and, in a folder, its pictures."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The exported model, for others to load."""
        return self.path / "model"

    @property
    def summary(self) -> Path:
        """The final figures; there once the run is complete."""
        return self.path / "summary.json"

    def make(self) -> None:
        """Make the folder and check that this process may write there; UserError if it may not."""
        try:
            make_folder(self.path)
            probe = self.path / ".writable"
            probe.write_text("\n")  # not empty: that fits on a full disk
            probe.unlink(missing_ok=True)  # another run may be looking too
        except OSError as error:
            raise UserError(
                f"run.output_dir: cannot write to {self.path} ({error.strerror}); choose another --run.output_dir."
            ) from None

    def clean_up(self) -> None:
        """Remove what a write that was killed left behind; not among the checkpoints, which do so themselves."""
        for pattern in (".partial-*", ".replaced-*", "starts/*/.partial-*", f"{self.report.stem}/.partial-*"):
            for path in self.path.glob(pattern):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def lock(self) -> None:
        """Keep other processes out for as long as this one lives, however it ends; UserError where one is in."""
        if fcntl is None or self.path.resolve() in self._locks:
            return
        try:
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"run.name: cannot open {self._lock_file} ({error.strerror}); if another user made it, choose another"
                " --run.name or --run.output_dir."
            ) from None
        try:
            # a lock of the process: unlike flock's, not inherited by loader workers, which may outlive a kill -9
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system that knows no locks
                os.close(descriptor)
                return
            owner = os.read(descriptor, 100).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"run.name: {self.path} is in use by another run (process {owner}); wait for it or choose another"
                " --run.name."
            ) from None
        self._locks[self.path.resolve()] = descriptor
        with contextlib.suppress(OSError):  # a full disk: it is only for whoever is refused
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{_this_process()}\n".encode())

    def hold(self) -> None:
        """Check that the folder is still this process's, and lock it anew if it was deleted under the run.

        Raises FolderTakenError if another run has begun in it since.
        """
        held = self._locks.get(self.path.resolve())
        if held is None:  # nothing is locked here
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(held), os.stat(self._lock_file)):
                return  # never opened here: to close it would unlock it
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
            owner = "of another user, or just now started"
        except OSError:  # the disk takes nothing at the moment
            return
        raise FolderTakenError(
            f"run.name: {self.path} was deleted under this run, and another one has begun in it (process {owner}); this"
            " one ends and leaves that alone."
        )

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def read_config(self) -> dict[str, Any]:
        """Return config.yaml as {"section.key": value}; nothing if it can't be read."""
        try:
            return read_yaml(self.config)
        except (UserError, OSError):  # not there, or cut by a power failure: checkpoints hold the config, too
            return {}

    def find_damage(self) -> str | None:
        """Say what is not as it was when the run ended, its summary or a file of its model; None if nothing is."""
        try:
            summary = json.loads(self.summary.read_text())
            listed = summary.get("files", {})  # runs of older versions have none
            if not {"val_loss", "weights"} <= summary.keys():  # a sample may have failed
                raise ValueError
            for name in ("config.json", "model.safetensors"):
                if not (self.model / name).is_file():
                    return f"{self.model.name}/{name} is missing"
            damages = (find_damage(self.model, name, of_file) for name, of_file in listed.items())
            damage = next(filter(None, damages), None)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return f"{self.summary.name} is not readable"
        return damage and f"{self.model.name}/{damage}"

    def reopen(self) -> None:
        """Let the run be complete no longer, before anything else of it changes."""
        if self.summary.exists():
            self.summary.unlink()
            sync(self.path)

    def describe_start(self, config_yaml: str, metadata: dict[str, Any], patch: str | None) -> None:
        """Keep what one needs to repeat this start of the run, in `starts/NNN`; the run's own folder has the latest."""
        number = 1 + max((int(path.name) for path in self.starts.glob("[0-9]*")), default=0)
        start = self.starts / f"{number:03d}"
        make_folder(start)
        for folder in (start, self.path):
            write_text(folder / self.config.name, config_yaml)
            write_text(folder / self.metadata.name, json.dumps(metadata, indent=1))
            (folder / self.uncommitted.name).unlink(missing_ok=True)
            if patch:
                write_text(folder / self.uncommitted.name, patch)

    def commits(self) -> list[str]:
        """Return the commits of hfgolf that the starts of the run were made with, each once, in order."""
        found: dict[str, None] = {}
        for path in sorted(self.starts.glob("*/metadata.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found[str(json.loads(path.read_text())["commit"] or "unknown")] = None
        return list(found)


def _this_process() -> str:
    return f"{os.getpid()} on {platform.node()}"


def run_folder(config: RunConfig) -> RunFolder:
    """Return the folder of the run that a config describes."""
    return RunFolder(Path(config.run.output_dir).expanduser() / str(config.run.name))
