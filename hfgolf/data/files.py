"""The files that a corpus consists of: paths, globs and URLs resolved, and what each is called on every machine.

Owns names and downloads. Does not open a file, and knows no text.

Why not fsspec, which `datasets` needs anyway: its HTTP needs aiohttp, which nothing else here installs.
"""

from __future__ import annotations

import glob
import hashlib
import http.client
import os
import re
import sysconfig
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from hfgolf.config import DataConfig
from hfgolf.data.lock import locked
from hfgolf.durable import sync
from hfgolf.errors import UserError
from hfgolf.redact import redact
from hfgolf.wording import first_line

DOWNLOAD_TIMEOUT_SECONDS = 60
_MIN_DOWNLOAD_BYTES = 1 << 16  # per DOWNLOAD_TIMEOUT_SECONDS; a slower download fails
_BLOCK_BYTES = 1 << 20
_COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class SourceFile:
    """A file of text or rows: its name (the same on every machine), its path, and its split if that is fixed."""

    name: str
    path: Path
    split: str | None = None

    @property
    def endings(self) -> tuple[str, str]:
        """Return (format, compression), such as (".jsonl", ".zst") or (".txt", "")."""
        stem, last = os.path.splitext(self.name.lower())
        return (os.path.splitext(stem)[1], last) if last in _COMPRESSIONS else (last, "")


def stdlib_files() -> list[SourceFile]:
    """Return the sources of the standard library: over 10 MB of text, the same for any build of a Python version.

    Skips its tests, which some distributions omit; _sysconfigdata, which differs between builds; and pydoc_data, the
    language reference as one generated string, which is 6 % of the text and no code.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        paths += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    files = [SourceFile(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(files, key=lambda file: file.name)


def named_files(data: DataConfig) -> list[SourceFile]:
    val_files = match_files(data, "val_files", "val")
    val_paths = {file.path for file in val_files}
    # A file in both is only for validation: `files: data/*.txt, val_files: data/val.txt` must not train on val.txt
    return [file for file in match_files(data, "files", None) if file.path not in val_paths] + val_files


def match_files(data: DataConfig, field: str, split: str | None) -> list[SourceFile]:
    """Resolve paths, globs and URLs in order, each file once. Names are relative to the files' common folder."""
    key = f"data.{field}"
    urls: dict[Path, str] = {}
    for pattern in getattr(data, field):
        if re.match(r"https?://", pattern):
            urls[_download(pattern, key, cache_folder(data) / "downloads")] = pattern
            continue
        matches = [
            path for path in sorted(glob.glob(os.path.expanduser(pattern), recursive=True)) if os.path.isfile(path)
        ]
        if not matches:
            raise UserError(f"{key}: no file matches {pattern!r} (in {Path.cwd()}); give a file, a glob or a URL.")
        if glob.has_magic(pattern):  # an empty file is an error if it is named, but not as one of a glob's matches
            matches = [path for path in matches if os.path.getsize(path)] or matches
        urls.update({Path(path).resolve(): "" for path in matches})
    local = [path.parent for path, url in urls.items() if not url]
    root = os.path.commonpath(local) if local else ""
    names = {path: redact(url) if url else path.relative_to(root).as_posix() for path, url in urls.items()}
    files = [SourceFile(name, path, split) for path, name in names.items()]
    for file in files:
        if file.path.stat().st_size == 0:
            raise UserError(f"{key}: {file.path} is empty; remove it or add text to it.")
    return files


def _download(url: str, key: str, folder: Path) -> Path:
    """Return the copy of `url` in `folder`, downloading it if it is missing. Delete it to download it again."""
    name = Path(urllib.parse.urlsplit(url).path).name or "text"
    path = folder / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    if path.exists():
        return path
    unfinished = path.with_name(f".partial-{name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / "download.lock", f"downloads {redact(url)}"):
            if not path.exists():  # another process may have downloaded it while this one waited
                try:
                    _fetch(url, unfinished)
                    unfinished.replace(path)
                    sync(path.parent)
                finally:
                    for leftover in (unfinished, *path.parent.glob(f"{glob.escape(name)}.*.part")):
                        leftover.unlink(missing_ok=True)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"{key}: cannot download {redact(url)} to {path.parent} ({first_line(error)}); check the address, the"
            " network and the disk."
        ) from error
    return path


def _fetch(url: str, path: Path) -> None:
    """Download `url` to a file. Raises OSError if the download is cut short or too slow."""
    with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer, open(path, "wb") as file:
        checked_at, num_bytes = time.monotonic(), 0
        while block := answer.read1(_BLOCK_BYTES):
            file.write(block)
            num_bytes += len(block)
            if time.monotonic() - checked_at > DOWNLOAD_TIMEOUT_SECONDS:
                if num_bytes < _MIN_DOWNLOAD_BYTES:
                    raise OSError(f"only {num_bytes} bytes arrived in {DOWNLOAD_TIMEOUT_SECONDS} s")
                checked_at, num_bytes = time.monotonic(), 0
        if answer.length:  # http.client does not raise for this
            raise OSError(f"the connection ended {answer.length:,} bytes before the end of the file")
    sync(path)


def cache_folder(data: DataConfig) -> Path:
    """Return data.cache_dir or its default, creating it if needed. Raises UserError if it cannot be created."""
    from huggingface_hub.constants import HF_HOME

    path = Path(data.cache_dir or Path(HF_HOME) / "hfgolf").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: cannot create {path} ({error.strerror}); name a writable folder.") from error
    return path
