"""Compressed files, and the members of zip and tar archives, read in order. Nothing is unpacked by its name.

fsspec does not decompress here, because its zstd takes a truncated file (it read 262,144 of 600,000 bytes).
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pyarrow as pa

from hfgolf.data.files import SourceFile
from hfgolf.system.errors import UserError
from hfgolf.system.wording import first_line

Opener = Callable[[], Any]
DECOMPRESSED: dict[str, Callable[[Any], Any]] = {
    "": lambda file: file,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    # zstandard's own reader accepts a truncated frame, and reads only the first of several frames
    ".zst": lambda file: pa.input_stream(file, compression="zstd"),
}


def unreadable(file: SourceFile, error: Exception) -> UserError:
    return UserError(f"{file.path} cannot be read ({first_line(error)}); check the file.")


def members_of(file: SourceFile) -> Iterator[tuple[str, int, Opener]]:
    """Yield the name of each member of an archive, its bytes (0 if it is no plain file), and what opens it.

    A member has to be read before the next one. Raises UserError if the archive is damaged.
    """
    try:
        yield from _zip_members(file) if file.endings[0] == ".zip" else _tar_members(file)
    except Exception as error:  # each compression library has its own exceptions for a damaged file
        raise unreadable(file, error) from error


def _zip_members(file: SourceFile) -> Iterator[tuple[str, int, Opener]]:
    with zipfile.ZipFile(file.path) as archive:
        for entry in archive.infolist():
            yield entry.filename, 0 if _is_link(entry) else entry.file_size, partial(archive.open, entry)


def has_links(file: SourceFile) -> bool:
    """Return whether a zip archive holds symbolic links, whose content is the name of another file."""
    with zipfile.ZipFile(file.path) as archive:
        return any(map(_is_link, archive.infolist()))


def _is_link(entry: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(entry.external_attr >> 16)  # its mode, if it was packed on Unix


def _tar_members(file: SourceFile) -> Iterator[tuple[str, int, Opener]]:
    compression, end = file.endings[1], 0
    options: dict[str, Any] = {"tarinfo": _Member, "errors": "backslashreplace"}
    options["ignore_zeros"] = True  # those between archives that were joined
    with (
        open(file.path, "rb") as raw,
        DECOMPRESSED[compression](raw) as stream,
        tarfile.open(fileobj=stream, mode="r|" if compression else "r:", **options) as archive,
    ):
        while member := archive.next():
            end = archive.offset
            size = member.size if member.isreg() else 0
            yield member.name.removeprefix("./"), size, partial(archive.extractfile, member)
            cast(Any, archive).members.clear()  # it would keep all of them
        if archive.offset == end:
            raise OSError("it is cut: the zeros at its end are missing")


class _Member(tarfile.TarInfo):
    """The header of a member. A damaged one is an error, because tarfile takes it for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not any(buf):  # what marks the end
                raise
            raise OSError(f"a header is damaged: {first_line(error)}") from error
