"""Writing files that survive a power cut, and reading them back with a check.

Owns the sequence of a write (a temporary file, fsync, rename, fsync of the folder), so that whatever is there under its
final name is whole, and what a folder's list of files says: sizes and sha256. Does not know what the files hold.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hfgolf.command_line import one_line


def write_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text; at every moment it holds the old text or the new one. Raises OSError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file; at every moment it holds the old bytes or the new ones. Raises OSError."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        partial.write_bytes(content)
        sync(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_folder(partial: Path, folder: Path) -> None:
    """Give a finished folder its final name, in the place of what had it before. Both lie in the same parent.

    Between two renames nothing has that name; the old folder is then `.replaced-NAME`, and `partial` is whole.
    """
    sync_tree(partial)
    replaced = folder.with_name(f".replaced-{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are not there, so that a power cut does not take them away again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync(path.parent)


def sync_tree(folder: Path) -> None:
    """Have a folder and all that is in it on the disk before what follows."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            if not os.path.islink(os.path.join(parent, name)):
                sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Have a file's content, or a folder's list of names, on the disk before what follows."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_files(folder: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Return the size and sha256 of files in a folder, by their names in it; plain JSON."""
    return {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in paths}


def find_damage(folder: Path, name: str, listed: Any) -> str | None:
    """Say in what a file is not as it was when `list_files` listed it; None if it is as it was.

    Raises KeyError, TypeError or ValueError if `listed` is not what list_files said of a file.
    """
    num_bytes, sha256 = listed["bytes"], listed["sha256"]
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"{name} leads out of the folder"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != num_bytes:
            return f"{name} has {path.stat().st_size} bytes instead of {num_bytes}"
        return None if file_sha256(path) == sha256 else f"{name} does not match its sha256"
    except (OSError, RuntimeError) as error:  # a bad sector, a name too long; RuntimeError: links in a ring
        return f"{name} is not readable ({one_line(error)})"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    # not mapped: a bad sector would end the process. Large pieces: between two, a save waits for the loop's GIL
    digest, buffer = hashlib.sha256(), bytearray(min(2**24, path.stat().st_size + 1))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
