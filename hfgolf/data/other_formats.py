"""Bytes that are not UTF-8 text: which format or encoding they probably are, and how to convert it.

Knows only the first bytes of a file, or those around the first that is not UTF-8.
"""

from __future__ import annotations

import codecs
import re
from pathlib import Path

_OFFICE = {".docx": "a Word document", ".odt": "an OpenDocument text", ".epub": "an EPUB book"}
_SHEETS = {".xlsx": "an Excel sheet", ".ods": "an OpenDocument sheet"}
_PDF = "is a PDF, not text; convert it with `pdftotext`, and name the .txt file"
_FORMATS: tuple[tuple[bytes, str], ...] = (
    (rb"%PDF-", _PDF),
    (rb"PK\x03\x04|PK\x05\x06", "is a zip archive, not text; name it .zip, or unpack it"),
    (rb"\xd0\xcf\x11\xe0", "is an old Office document, not text; save it as plain text or CSV"),
    (rb"\x1f\x8b", "is compressed by gzip; give its name the ending .gz"),
    (rb"BZh[1-9]1AY&SY", "is compressed by bzip2; give its name the ending .bz2"),
    (rb"\xfd7zXZ\0", "is compressed by xz; give its name the ending .xz"),
    (rb"\x28\xb5\x2f\xfd", "is compressed by zstd; give its name the ending .zst"),
    (rb"7z\xbc\xaf|Rar!\x1a", "is an archive, not text; unpack it, and name the folder"),
    (rb"(?s).{257}ustar", "is a tar archive, not text; unpack it, and name the folder"),
    (rb"PAR1", "is a Parquet file; give its name the ending .parquet"),
    (rb"ARROW1|\xff\xff\xff\xff", "is an Arrow file; give its name the ending .arrow"),
    (rb"SQLite format 3\0", "is an SQLite database, not text; write its table of text to a .csv file"),
    (rb"\x89HDF|\x93NUMPY|\x80[\x02-\x05]", "holds a program's numbers or objects, not text; write its text to a file"),
    (rb"\xff\xd8\xff|\x89PNG|GIF8[79]a|II\*\0|MM\0\*", "is a picture, not text; read its text with an OCR program"),
    (
        rb"(?s)ID3|\xff[\xf2\xf3\xfb]|OggS|fLaC|RIFF|.{4}ftyp|\x1a\x45\xdf\xa3",
        "is sound or a video, not text; transcribe it",
    ),
    (rb"\x7fELF|MZ.\0|\xcf\xfa\xed\xfe", "is a program, not text"),
)


def not_text(start: bytes, path: Path) -> str | None:
    """Return what a file that begins with these bytes is and what to do, as the end of a sentence; None for text."""
    if b"\0" not in start and is_utf8(start[:4096]):
        return _PDF if start.startswith(b"%PDF-") else None
    ending = path.suffix.lower()
    if start.startswith(b"PK") and ending in _OFFICE:
        return f"is {_OFFICE[ending]}, not text; convert it with `pandoc -t plain`, and name the .txt file"
    if start.startswith(b"PK") and ending in _SHEETS:
        return f"is {_SHEETS[ending]}, not text; save it as CSV"
    for pattern, problem in _FORMATS:
        if re.match(pattern, start):
            return problem
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "is UTF-32, not UTF-8; convert it with `iconv -f UTF-32 -t UTF-8 OLD > NEW`"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or _is_utf16(start[:1000]):
        return "is UTF-16, not UTF-8; convert it with `iconv -f UTF-16 -t UTF-8 OLD > NEW`"
    return None


def is_utf8(start: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # its last character may be cut
    except UnicodeDecodeError:
        return False
    return True


def _is_utf16(start: bytes) -> bool:
    """Return whether every other byte is zero: Latin letters in UTF-16 without a mark, which are UTF-8 with zeros."""
    halves = start[::2], start[1::2]
    return len(start) >= 8 and any(half.count(0) > 0.9 * len(half) for half in halves) and start.count(0) < len(start)


def other_encoding(error: UnicodeDecodeError) -> str:
    """Return what the bytes around one that is not UTF-8 tell of the encoding, and how to convert it."""
    block = error.object
    if error.reason == "unexpected end of data":
        return "its last character is cut, or in another encoding; restore the end of the file, or convert it"
    high = [byte for byte in block if byte >= 0x80]
    good = sum(len(character.encode()) for character in block.decode("utf-8", "ignore") if character >= "\x80")
    if good > len(high) / 2:
        return "most of it is UTF-8, so these bytes are damaged; `iconv -c -f UTF-8 -t UTF-8 OLD > NEW` leaves them out"
    if block.count(0) > len(block) / 100:
        return "it is probably not text; remove it"
    if len(high) < len(block) / 3:
        name = "WINDOWS-1252" if any(0x80 <= byte < 0xA0 for byte in high) else "ISO-8859-1"
        other = "Windows-1252" if name == "WINDOWS-1252" else "Latin-1"
        return f"it is probably {other}; convert it with `iconv -f {name} -t UTF-8 OLD > NEW`"
    return "find its encoding, such as GB18030 or Shift_JIS, and convert it with `iconv -f IT -t UTF-8 OLD > NEW`"
