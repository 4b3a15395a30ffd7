"""Writing files that survive a power cut: a temporary file, fsync, rename, fsync of the folder.

Owns that sequence, so that whatever is there under its final name is whole. Does not know what the files hold.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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
