"""Write files that survive a power cut, and check them when they are read back, by their sizes and sha256.

A file with its final name is complete: temporary file, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hfgolf.system.wording import one_line

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]


def write_text(path: Path, text: str) -> None:
    """Replace a file with UTF-8 text. At any moment it holds either the old text or the new. Raises OSError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file. At any moment it holds either the old bytes or the new. Raises OSError."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        partial.write_bytes(content)
        replace_file(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace_file(partial: Path, path: Path) -> None:
    """Rename a finished file to its final name, replacing an older one. Both must have the same parent."""
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def replace_folder(partial: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, replacing an older folder. Both must have the same parent.

    Between the two renames, nothing has the final name: the old folder is `.replaced-NAME`, and `partial` is complete.
    """
    sync_tree(partial)
    replaced = folder.with_name(f".replaced-{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` at the end. After an error it is deleted: the disk may be full.

    Raises OSError if another process makes the same folder at this time.
    """
    partial = folder.with_name(f".partial-{folder.name}")
    with _held(partial):
        for left in partial.iterdir():  # by a process that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        replace_folder(partial, folder)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Make a folder if there is none, and keep it to this process, if its system and its file system have locks.

    Raises OSError if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.path.samestat(os.fstat(descriptor), folder.stat())
        except OSError as error:  # it is held, or was just renamed; else the file system has no locks
            is_held = error.errno not in (errno.EWOULDBLOCK, errno.ENOENT)
        if not is_held:
            raise OSError(errno.EBUSY, "another process is writing it", str(folder))
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its missing parents so that they survive a power cut; return them, the folder first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync(path.parent)
    return made


def sync_tree(folder: Path) -> None:
    """Force a folder and everything in it to disk (fsync)."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            if not os.path.islink(os.path.join(parent, name)):
                sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Force the content of a file, or the entries of a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_files(folder: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Return {path relative to the folder: {"bytes": size, "sha256": digest}}; plain JSON."""
    return {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in paths}


class HashedFile(io.BufferedWriter):
    """A new file whose SHA-256 is computed while it is written, without reading it again.

    Writing and hashing release the GIL, so several such files can be written at once, by a thread each. No sync.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._digest, self._bytes = hashlib.sha256(), 0

    def write(self, content: Any) -> int:
        """Write and hash bytes; return how many. Raises OSError."""
        self._digest.update(content)
        count = super().write(content)
        self._bytes += count
        return count

    def entry(self) -> dict[str, Any]:
        """Return what `list_files` would say of the file."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def find_damage(folder: Path, files: Mapping[str, Any]) -> str | None:
    """Describe how the first file that differs from its entry by `list_files` does; None if none differs.

    Raises KeyError, TypeError, ValueError or AttributeError if the entries are malformed.
    """
    damages = (_damage(folder, name, listed["bytes"], listed["sha256"]) for name, listed in files.items())
    return next(filter(None, damages), None)


def _damage(folder: Path, name: str, num_bytes: Any, sha256: Any) -> str | None:
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"{name} leads out of the folder"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != num_bytes:
            return f"{name} has {path.stat().st_size} bytes instead of {num_bytes}"
        return None if file_sha256(path) == sha256 else f"{name} does not match its sha256"
    except (OSError, RuntimeError) as error:  # a bad sector, a name too long; RuntimeError: a cycle of links
        return f"{name} is not readable ({one_line(error)})"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    # Read, not memory-mapped: with mmap, a bad sector would kill the process (SIGBUS). Read in large chunks: between
    # two of them, a save in the background must wait for the GIL, which the training loop holds.
    digest, buffer = hashlib.sha256(), bytearray(min(2**24, path.stat().st_size + 1))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
