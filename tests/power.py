"""A disk that loses its power: what it would hold at each moment of a run.

In the run's process, an audit hook inspects a folder before each change to it, and os.fsync is recorded. There are two
kinds of disk. One has only synced names and content. The other, like ext4, has all names and the synced content; of
unsynced content it has nothing, half, or zeros.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tree = tuple[tuple[str, str], ...]
"""Path below the folder -> FOLDER, a link's `-> target`, or the hash of a file's content; sorted."""
FOLDER = "folder"
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate"}


@dataclass
class Moment:
    """The last time that a disk was in a state."""

    saved_step: int
    """The newest checkpoint reported as saved by then; 0: none."""
    names: str
    """"synced" for synced names and content; else how much unsynced content there is: "nothing", "half" or "zeros"."""
    before: str


@dataclass
class Disk:
    """Collects the distinct states in which a power cut could have left `root`."""

    root: Path
    saved_step: int = 0
    states: dict[Tree, Moment] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    """By hash."""

    def watch(self) -> None:
        """Start recording. It never stops, because an audit hook cannot be removed."""
        # inode -> content, size and time at the last sync; inode -> names then
        self._files: dict[int, tuple[str, int, int]] = {}
        self._folders: dict[int, dict[str, tuple[int, str]]] = {}
        self._open: list[int] = []  # an open inode's number is not reused
        self._lock, self._looking = threading.RLock(), threading.local()
        real_fsync = os.fsync

        def fsync(descriptor: int) -> None:
            self._look("fsync")
            real_fsync(descriptor)
            with self._alone():
                self._note_sync(descriptor)
                self._add(self._synced_tree(), "synced", "after fsync")

        os.fsync = fsync
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            self._look(f"{event} {arguments[0]}")

    def _look(self, before: str) -> None:
        if getattr(self._looking, "now", False):
            return
        with self._alone():
            while True:
                with contextlib.suppress(FileNotFoundError):  # removed by another thread meanwhile
                    entries = list(self._entries_now())
                    break
            for names in ("nothing", "half", "zeros"):
                tree = [
                    (path, self._left_over(found[0], found[1], names) if inode else found)
                    for path, inode, found in entries
                ]
                self._add(tree, names, before)

    def now(self) -> Tree:
        """Return the current state, with nothing lost."""
        with self._alone():
            entries = list(self._entries_now())
        return tuple(
            sorted(
                (path, (found[0] if found[1] is None else self._keep(found[1])) if inode else found)
                for path, inode, found in entries
            )
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            self._looking.now = True
            try:
                yield
            finally:
                self._looking.now = False

    def _add(self, tree: list[tuple[str, str]], names: str, before: str) -> None:
        self.states[tuple(sorted(tree))] = Moment(self.saved_step, names, before)

    def _entries_now(self) -> Iterator[tuple[str, int, Any]]:
        """Yield (path, inode, (synced content, content now)) for each file, and (path, 0, kind) for the others."""
        for parent, folders, names in os.walk(self.root):
            for name in (*folders, *names):
                path = os.path.join(parent, name)
                status = os.lstat(path)
                short = os.path.relpath(path, self.root)
                if stat.S_ISLNK(status.st_mode):
                    yield short, 0, f"-> {os.readlink(path)}"
                elif stat.S_ISDIR(status.st_mode):
                    yield short, 0, FOLDER
                else:
                    synced, *state = self._files.get(status.st_ino, (None, 0, 0))
                    is_synced = synced is not None and state == [status.st_size, status.st_mtime_ns]
                    yield short, status.st_ino, (synced, None if is_synced else Path(path).read_bytes())

    def _left_over(self, synced: str | None, now: bytes | None, kind: str) -> str:
        if now is None:
            return str(synced)
        before = b"" if synced is None else self.contents[synced]
        if kind == "nothing":
            return self._keep(before)
        if not now.startswith(before):  # written in place
            before = b""
        half = len(before) + (len(now) - len(before)) // 2
        return self._keep(now[:half] if kind == "half" else before + bytes(len(now) - len(before)))

    def _keep(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        self.contents.setdefault(digest, content)
        return digest

    def _note_sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_ino not in self._files and status.st_ino not in self._folders:
            self._open.append(os.dup(descriptor))
        if stat.S_ISDIR(status.st_mode):
            self._folders[status.st_ino] = {
                entry.name: (entry.inode(), f"-> {os.readlink(entry.name, dir_fd=descriptor)}")
                if entry.is_symlink()
                else (entry.inode(), FOLDER if entry.is_dir() else "file")
                for entry in os.scandir(descriptor)
            }
        else:
            content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            self._files[status.st_ino] = (self._keep(content), status.st_size, status.st_mtime_ns)

    def _synced_tree(self) -> list[tuple[str, str]]:
        tree: list[tuple[str, str]] = []

        def descend(inode: int, prefix: str) -> None:
            for name, (child, kind) in self._folders.get(inode, {}).items():
                path = f"{prefix}{name}"
                if kind == FOLDER:
                    tree.append((path, FOLDER))
                    descend(child, f"{path}/")
                elif kind == "file":
                    tree.append((path, self._files[child][0] if child in self._files else self._keep(b"")))
                else:
                    tree.append((path, kind))

        descend(self.root.stat().st_ino, "")
        return tree


def below(tree: Tree, folder: str) -> Tree:
    """Return the part of a tree in a folder, with paths relative to the folder."""
    return tuple((path.removeprefix(f"{folder}/"), what) for path, what in tree if path.startswith(f"{folder}/"))


def write_tree(tree: Tree, folder: Path, contents: dict[str, bytes]) -> Path:
    """Write a tree to a new folder and return the folder."""
    folder.mkdir(parents=True)
    for path, what in tree:
        if what == FOLDER:
            (folder / path).mkdir()
        elif what.startswith("-> "):
            (folder / path).symlink_to(what.removeprefix("-> "))
        else:
            (folder / path).write_bytes(contents[what])
    return folder
