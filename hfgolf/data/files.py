"""The files that a corpus consists of: paths, globs and URLs resolved, and what each is called on every machine.

Owns names and endings, and which files of a folder count. Does not read them.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

from hfgolf.config import DataConfig
from hfgolf.data.downloads import download, list_urls
from hfgolf.errors import UserError
from hfgolf.redact import redact
from hfgolf.wording import first_line, join_words

TABLES = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
TEXTS = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".go", ".rs")
"""What counts as text in a folder or an archive. A file that is named itself may have any ending but these:"""
NOT_TEXT = {
    **dict.fromkeys((".bin", ".npy", ".ds"), "set data.source shards if it holds token ids"),
    **dict.fromkeys((".tar", ".tgz", ".7z", ".rar"), "unpack it, and name the folder"),
}
SHARDS = (".bin", ".npy", ".ds")
_RUN_FILES = {"config.yaml", "metadata.json"}  # what tells a run's folder
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFile:
    """A file of text or rows: its name (the same on every machine), its path, and its split if that is fixed."""

    name: str
    path: Path
    split: str | None = None

    @property
    def endings(self) -> tuple[str, str]:
        """Return (format, compression), such as (".jsonl", ".zst") or (".txt", "")."""
        stem, last = os.path.splitext(self.path.name.lower())  # not of the name: a URL may end in a query
        return (os.path.splitext(stem)[1], last) if last in COMPRESSIONS else (last, "")


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
    """Return the files of data.files and data.val_files. Raises UserError like `match_files`."""
    val_files = match_files(data, "val_files", "val")
    files = match_files(data, "files", None)
    if val_files:
        # A file in both is only for validation: `files: data/*.txt, val_files: data/val.txt` must not train on val.txt
        val_paths = set(_real_paths(file.path for file in val_files).values())
        real_paths = _real_paths(file.path for file in files)
        files = [file for file in files if real_paths[file.path] not in val_paths]
    return files + val_files


def match_files(data: DataConfig, field: str, split: str | None) -> list[SourceFile]:
    """Resolve paths, folders, globs and URLs in order, each file once. Names are relative to their common folder.

    Raises UserError if an entry matches nothing, if a file is empty, or if it is of a kind that holds no text.
    """
    key, downloads = f"data.{field}", cache_folder(data) / "downloads"
    urls: dict[Path, str] = {}
    for pattern in getattr(data, field):
        if "://" in pattern:
            urls.update({download(url, key, downloads): url for url in list_urls(pattern, key, downloads)})
        else:
            urls.update({Path(os.path.abspath(path)): "" for path in _match(pattern, key, data)})
    # a link keeps its own name, whose ending says what it is: the Hub's cache links to files named by their hashes
    resolved = _real_paths(urls)
    paths = {resolved[path]: path for path in reversed(urls)}
    unique = [path for path in urls if paths[resolved[path]] == path]
    local = [path.parent for path in unique if not urls[path]]
    root = os.path.commonpath(local) if local else ""
    names = {path: redact(urls[path]) if urls[path] else path.relative_to(root).as_posix() for path in unique}
    files = [SourceFile(name, path, split) for path, name in names.items()]
    for file in files:
        if file.path.stat().st_size == 0:
            raise UserError(f"{key}: {file.path} is empty; remove it or add text to it.")
        if data.source == "files":
            require_text(file, key)
    return files


def _real_paths(paths: Iterable[Path]) -> dict[Path, str]:
    """Resolve the links in absolute paths. Like Path.resolve, but it looks at the way to each folder only once."""
    real_path = cache(os.path.realpath)
    return {
        path: real_path(path) if path.is_symlink() else os.path.join(real_path(path.parent), path.name)
        for path in paths
    }


def require_paths(data: DataConfig) -> None:
    """Raise UserError if a path or glob of data.files or data.val_files matches nothing. Reads and imports little."""
    for field in ("files", "val_files"):
        for pattern in getattr(data, field):
            if "://" not in pattern and not glob.glob(os.path.expanduser(pattern), recursive=True):
                raise _no_match(f"data.{field}", pattern)


def require_text(file: SourceFile, key: str) -> None:
    """Raise UserError if a file's ending says that it holds no text. Its bytes may look like text all the same."""
    if remedy := NOT_TEXT.get(file.endings[0]):
        raise UserError(f"{key}: {file.path} is not text; {remedy}.")


def _match(pattern: str, key: str, data: DataConfig) -> list[str]:
    """Return the files that a path, a folder or a glob stands for, in an order that does not depend on the machine."""
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        kinds = SHARDS if data.source == "shards" else (*TABLES, *TEXTS, ".zip")
        return _folder_files(path, key, cache_folder(data), kinds)
    matches = [match for match in sorted(glob.glob(path, recursive=True)) if os.path.isfile(match)]
    if not matches:
        raise _no_match(key, pattern)
    if glob.has_magic(pattern):  # an empty file is an error if it is named, but not as one of a glob's matches
        return [match for match in matches if os.path.getsize(match)] or matches
    return matches


def _no_match(key: str, pattern: str) -> UserError:
    return UserError(f"{key}: no file matches {pattern!r} (in {Path.cwd()}); give a file, a folder, a glob or a URL.")


def _folder_files(folder: str, key: str, cache: Path, kinds: Iterable[str]) -> list[str]:
    """Return the files of some kinds in a folder and its subfolders, and log what is skipped.

    Runs and the token cache do not count: they change while a run starts. A folder that `save_to_disk` wrote stands for
    the Arrow files it lists, in its own order.
    """
    used: list[str] = []
    skipped: list[str] = []

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"{key}: cannot read {error.filename} ({error.strerror}); make it readable.") from error

    for parent, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if os.path.realpath(parent) == str(cache.resolve()) or set(names) >= _RUN_FILES:
            skipped.append(parent)
            subfolders.clear()
            continue
        if "dataset_dict.json" in names:
            splits = join_words((os.path.join(parent, name) for name in subfolders), " or ")
            raise UserError(f"{key}: {parent} holds several splits of a dataset; name one of them: {splits}.")
        if {"state.json", "dataset_info.json"} <= set(names):
            used += _saved_tables(Path(parent), key)
            subfolders.clear()
            continue
        for path in (os.path.join(parent, name) for name in sorted(names) if not name.startswith(".")):
            is_known = SourceFile(path, Path(path)).endings[0] in kinds
            (used if is_known and os.path.isfile(path) and os.path.getsize(path) else skipped).append(path)
    if not used:
        raise UserError(f"{key}: {folder} holds no file of a known kind ({' '.join(kinds)}); name its files by a glob.")
    log_skipped(key, folder, len(used), tuple(os.path.relpath(path, folder) for path in skipped))
    return used


def _saved_tables(folder: Path, key: str) -> list[str]:
    """Return the Arrow files of a dataset that `save_to_disk` wrote, in order."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        paths = [str(folder / file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{key}: {folder / 'state.json'} is damaged ({first_line(error)}); save it again.") from error
    for path in paths:
        if not os.path.isfile(path):
            raise UserError(f"{key}: {path} is missing, which {folder / 'state.json'} lists; copy the folder again.")
    return paths


@cache
def log_skipped(key: str, where: str, num_used: int, skipped: tuple[str, ...]) -> None:
    """Log which files of a folder or an archive are not read; once per process, however often it is identified."""
    if skipped:
        names = join_words(skipped, maximum=3)
        logger.info("%s: %s: %s files read, %s skipped (%s)", key, where, num_used, len(skipped), names)


def cache_folder(data: DataConfig) -> Path:
    """Return data.cache_dir or its default, creating it if needed. Raises UserError if it cannot be created."""
    from huggingface_hub.constants import HF_HOME

    path = Path(data.cache_dir or Path(HF_HOME) / "hfgolf").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: cannot create {path} ({error.strerror}); name a writable folder.") from error
    return path
