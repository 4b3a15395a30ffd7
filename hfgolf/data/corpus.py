"""The sources of text, and its split into train and validation.

Owns the sources (local files and URLs, the Hub, the standard library of the running Python) and the split. Does not
know tokens.

Why not fsspec, which `datasets` needs anyway: its HTTP needs aiohttp, which nothing else here installs, and its zstd
accepts a truncated file without an error (it read 262,144 of 600,000 bytes). It could only replace `_fetch`.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import http.client
import itertools
import os
import re
import shutil
import sysconfig
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

import numpy as np

from hfgolf.config import DataConfig
from hfgolf.data.file_hashes import file_hashes, file_state
from hfgolf.data.lock import locked
from hfgolf.data.pieces import PIECE_CHARACTERS, PieceWriter
from hfgolf.durable import sync
from hfgolf.errors import UserError
from hfgolf.redact import redact
from hfgolf.wording import first_line, join_words

if TYPE_CHECKING:
    from datasets import Dataset

SPLITS = ("train", "val")
BLOCK_BYTES = 1 << 20
_ROWS_PER_BATCH = 1000
DOWNLOAD_TIMEOUT_SECONDS = 60
_MIN_DOWNLOAD_BYTES = 1 << 16  # per DOWNLOAD_TIMEOUT_SECONDS; a slower download fails
_TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
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


@dataclass(frozen=True)
class Corpus:
    """Text that has been identified but not read yet.

    identity: a JSON-serializable dict that changes whenever the documents or their split change.
    """

    identity: dict[str, Any]
    data: DataConfig
    files: tuple[SourceFile, ...] = ()
    bytes_files: tuple[SourceFile, ...] = ()
    """With shards: the files with the bytes of each validation token."""
    states: dict[Path, list[int]] = field(default_factory=dict)
    """`file_state` of each file when it was hashed."""

    def write_pieces(self, folder: Path) -> dict[str, Dataset]:
        """Write the documents to `folder` and return {"train": Dataset, "val": Dataset}, memory-mapped.

        Each row is a piece of a document, at most PIECE_CHARACTERS long, in order: {"text": str, "is_start": bool}.
        `is_start` marks the first piece of a document, or of a document's part in a split. Memory use is bounded for
        any corpus.

        Raises UserError if text cannot be read or a split is empty.
        """
        if self.data.source == "shards" or self.data.ids_column is not None:
            key = "source shards" if self.data.source == "shards" else f"ids_column {self.data.ids_column}"
            raise UserError(f"data.{key} holds tokens, not text: what needs the text itself cannot use it.")
        from datasets import Dataset

        folder.mkdir(parents=True, exist_ok=True)
        paths = {split: folder / f"{split}-text.arrow" for split in SPLITS}
        train, val = (PieceWriter(paths[split]) for split in SPLITS)
        with train, val:
            if self.data.split == "contiguous" and not self.data.val_files:
                self._write_contiguous(train, val, folder)
            else:
                for name, split, blocks in self._documents(folder):
                    writer = val if (split or self.hashed_split(name)) == "val" else train
                    writer.add_document(blocks)
        self._require_unchanged()
        if not train.num_pieces or not val.num_pieces:
            self.raise_empty("train" if not train.num_pieces else "val")
        return {split: cast(Dataset, Dataset.from_file(str(paths[split]))) for split in SPLITS}

    def rows_of_ids(self, split: str, scratch: Path) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, token ids) of each row of a split, with data.ids_column. Raises UserError like write_pieces."""
        scratch.mkdir(parents=True, exist_ok=True)
        for name, fixed, ids in self._documents(scratch):
            if (fixed or self.hashed_split(name)) == split:
                yield name, np.asarray(ids)
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        for file in self.files:
            if file_state(file.path) != self.states[file.path]:
                raise UserError(f"{file.path} changed while it was being read; start again when nothing writes to it.")

    def hashed_split(self, name: str) -> str:
        if self.data.val_files:
            return "train"
        digest = hashlib.sha256(name.encode()).digest()
        return "val" if int.from_bytes(digest[:8]) < self.data.val_fraction * 2**64 else "train"

    def _write_contiguous(self, train: PieceWriter, val: PieceWriter, scratch: Path) -> None:
        # Two passes, even over the network for a streamed dataset: where to cut depends on the total length.
        num_characters = sum(len(block) for _, _, blocks in self._documents(scratch) for block in blocks)
        num_left = int(num_characters * (1 - self.data.val_fraction))  # characters still to go to train
        for _, _, blocks in self._documents(scratch):
            for block in blocks:
                train.add(block[:num_left])
                val.add(block[num_left:])
                num_left = max(0, num_left - len(block))
            train.end_document()
            val.end_document()

    def _documents(self, scratch: Path) -> Iterator[tuple[str, str | None, Any]]:
        """Yield (name, fixed split or None, blocks of text or token ids) for each document, in order.

        scratch: a folder for files that must be decompressed first.
        """
        documents: Iterator[tuple[str, str | None, Any]]
        if self.data.source == "hub":
            documents = _rows(_load_hub(self.data), str(self.data.hub_name), None, self.data)
        else:
            documents = itertools.chain.from_iterable(self._read(file, scratch) for file in self.files)
        return itertools.islice(documents, self.data.max_documents)

    def _read(self, file: SourceFile, scratch: Path) -> Iterator[tuple[str, str | None, Any]]:
        kind = _TABLES.get(file.endings[0])
        if kind:
            with _readable_by_datasets(file, scratch) as path:
                yield from _rows(_load_table(path, kind), file.name, file.split, self.data)
        elif self.data.ids_column is not None:
            raise UserError(f"data.ids_column: {file.path} has no columns; name jsonl, parquet or arrow files.")
        elif self.data.source != "python_stdlib":
            yield file.name, file.split, _text_blocks(file)
        elif text := _utf8_text(file.path):
            yield file.name, None, (text,)

    def raise_empty(self, split: str) -> NoReturn:
        """Raise the UserError for an empty split."""
        where, split = f"data.source {self.data.source}", {"val": "validation"}.get(split, split)
        if self.data.val_files:
            raise UserError(
                f"The {split} split of {where} is empty; every file in data.files is also in data.val_files."
            )
        remedy = (
            f"change data.val_fraction ({self.data.val_fraction}), name data.val_files, or set data.split contiguous"
        )
        raise UserError(
            f"The {split} split of {where} is empty: too few documents for data.split {self.data.split}; {remedy}."
        )


def load_corpus(data: DataConfig) -> Corpus:
    """Identify the text that `data` names. Reads files only to hash them, and only if they changed (see file_hashes).

    Raises UserError if nothing matches, a file is empty, or a Hub dataset cannot be reached.
    """
    identity: dict[str, Any] = {
        "source": data.source,
        "split": "files" if data.val_files else data.split,
        "val_fraction": None if data.val_files else data.val_fraction,
        "max_documents": data.max_documents,
        "piece_characters": PIECE_CHARACTERS,
    }
    if data.ids_column is not None:
        identity["ids_column"] = data.ids_column
    if data.source == "hub":
        hub = {key: getattr(data, key) for key in ("hub_name", "hub_config", "hub_split", "text_column")}
        return Corpus({**identity, **hub, "hub_revision": _hub_revision(data)}, data)
    files = _stdlib_files() if data.source == "python_stdlib" else _named_files(data)
    bytes_files = _match(data, "val_bytes_files", "bytes")
    if any(file.endings[0] in _TABLES for file in files):
        identity["text_column"] = data.text_column
    try:
        states = {file.path: file_state(file.path) for file in [*files, *bytes_files]}
        hashes = file_hashes(states, cache_folder(data) / "hashes.json")
    except OSError as error:
        raise UserError(f"data.files: cannot read {error.filename} ({error.strerror}); make it readable.") from error
    for split in (None, "val"):
        listed = [[file.name, file.path.stat().st_size, hashes[file.path]] for file in files if file.split == split]
        identity["files" if split is None else "val_files"] = listed
    if data.source == "shards":
        identity["separator_id"] = data.separator_id
        identity["val_bytes"] = [[file.name, file.path.stat().st_size, hashes[file.path]] for file in bytes_files]
    return Corpus(identity, data, tuple(files), tuple(bytes_files), states)


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two identities: "field (old -> new)", or "files (a.txt and 2 more)" for lists."""
    changed = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return [_change(name, before.get(name), now.get(name)) for name in changed]


def _change(name: str, before: Any, now: Any) -> str:
    if isinstance(before, list) and isinstance(now, list):
        entries = [entry for entry in now if entry not in before] + [entry for entry in before if entry not in now]
        names = join_words(dict.fromkeys(entry[0] for entry in entries), maximum=1)
        return f"{name} ({names})" if names else name
    if isinstance(now, dict) or name.endswith("sha256"):
        return name  # hashes mean nothing to a reader
    return f"{name} ({before} -> {now})"


def cache_folder(data: DataConfig) -> Path:
    """Return data.cache_dir or its default, creating it if needed. Raises UserError if it cannot be created."""
    from huggingface_hub.constants import HF_HOME

    path = Path(data.cache_dir or Path(HF_HOME) / "hfgolf").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: cannot create {path} ({error.strerror}); name a writable folder.") from error
    return path


def _stdlib_files() -> list[SourceFile]:
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


def _named_files(data: DataConfig) -> list[SourceFile]:
    val_files = _match(data, "val_files", "val")
    val_paths = {file.path for file in val_files}
    # A file in both is only for validation: `files: data/*.txt, val_files: data/val.txt` must not train on val.txt
    return [file for file in _match(data, "files", None) if file.path not in val_paths] + val_files


def _match(data: DataConfig, field: str, split: str | None) -> list[SourceFile]:
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
        while block := answer.read1(BLOCK_BYTES):
            file.write(block)
            num_bytes += len(block)
            if time.monotonic() - checked_at > DOWNLOAD_TIMEOUT_SECONDS:
                if num_bytes < _MIN_DOWNLOAD_BYTES:
                    raise OSError(f"only {num_bytes} bytes arrived in {DOWNLOAD_TIMEOUT_SECONDS} s")
                checked_at, num_bytes = time.monotonic(), 0
        if answer.length:  # http.client does not raise for this
            raise OSError(f"the connection ended {answer.length:,} bytes before the end of the file")
    sync(path)


def _open(file: SourceFile) -> BinaryIO:
    compression = file.endings[1]
    if compression == ".gz":
        import gzip

        return cast(BinaryIO, gzip.open(file.path, "rb"))
    if compression == ".zst":
        import pyarrow as pa

        # zstandard's own reader accepts a truncated frame, and reads only the first of several frames
        return cast(BinaryIO, pa.input_stream(str(file.path), compression="zstd"))
    return open(file.path, "rb")


def _text_blocks(file: SourceFile) -> Iterator[str]:
    """Decode a file as strict UTF-8 with unchanged newlines, about a megabyte at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    try:
        with _open(file) as stream:
            while block := stream.read(BLOCK_BYTES):
                pending = len(decoder.getstate()[0])
                yield decoder.decode(block)
                num_bytes += len(block)
            pending = len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = num_bytes - pending + error.start
        raise UserError(f"{file.path} is not UTF-8 (byte {offset}: {error.reason}); convert or remove it.") from error
    except Exception as error:  # each compression library has its own exceptions for a damaged file
        raise UserError(f"{file.path} cannot be read ({first_line(error)}); check the file.") from error
    if not num_bytes:
        raise UserError(f"{file.path} is empty once decompressed; remove it or add text to it.")


def _utf8_text(path: Path) -> str:
    """Return the text of a standard library file, or "" for the few files in other encodings."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""


@contextmanager
def _readable_by_datasets(file: SourceFile, scratch: Path) -> Iterator[Path]:
    """Yield the path of a table, temporarily decompressed in `scratch` if `datasets` cannot do that itself.

    It cannot decompress parquet, and it silently accepts a truncated .zst file.
    """
    ending, compression = file.endings
    if not compression or (ending != ".parquet" and compression != ".zst"):
        yield file.path
        return
    with tempfile.NamedTemporaryFile(suffix=ending, dir=scratch) as plain:
        try:
            with _open(file) as stream:
                shutil.copyfileobj(stream, plain)
            plain.flush()
        except Exception as error:  # each compression library has its own exceptions for a damaged file
            raise UserError(f"{file.path} cannot be decompressed ({first_line(error)}); check the file.") from error
        yield Path(plain.name)


def _load_table(path: Path, kind: str) -> Any:
    from datasets import load_dataset

    try:  # streaming reads the file in place, without a second copy in the datasets cache
        return load_dataset(kind, data_files=[str(path)], split="train", streaming=True)
    except Exception as error:
        raise UserError(f"{path} cannot be read as {kind} ({first_line(error)}); check the file.") from error


def _load_hub(data: DataConfig) -> Any:
    from datasets import load_dataset

    try:  # with streaming, the text is on disk only as pieces while the cache is built; the rows are the same
        return load_dataset(str(data.hub_name), data.hub_config, split=data.hub_split, streaming=data.streaming)
    except Exception as error:
        raise UserError(_hub_message(data, error)) from error


def _hub_revision(data: DataConfig) -> str:
    """Return the hash that `datasets` computes for the dataset's files (offline: for the copy in its cache)."""
    from datasets import load_dataset_builder

    try:
        return str(load_dataset_builder(str(data.hub_name), data.hub_config).hash)
    except Exception as error:
        raise UserError(_hub_message(data, error)) from error


def _hub_message(data: DataConfig, error: Exception) -> str:
    name = f"{data.hub_name!r} (data.hub_config {data.hub_config}, data.hub_split {data.hub_split})"
    return f"data.hub_name: cannot load {name}: {first_line(error)} Check the name, the network and `hf auth login`."


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**32 for number in value)


def _rows(table: Any, name: str, split: str | None, data: DataConfig) -> Iterator[tuple[str, str | None, Any]]:
    """Yield each row as a document named `name#row`: blocks of its text, or its ids. Skips empty and null rows."""
    row = 0
    key, column = ("text_column", data.text_column) if data.ids_column is None else ("ids_column", data.ids_column)
    try:
        for batch in table.iter(batch_size=_ROWS_PER_BATCH):
            if column not in batch:
                raise UserError(f"{name} has no column {column!r}; set data.{key} to one of: {', '.join(batch)}.")
            for value in batch[column]:
                if value is not None and not (isinstance(value, str) if key == "text_column" else _are_ids(value)):
                    wanted = "text" if key == "text_column" else "a list of token ids"
                    raise UserError(f"{name}, row {row}: {column!r} holds {type(value).__name__}, not {wanted}.")
                if value:
                    yield f"{name}#{row}", split, (value,) if key == "text_column" else value
                row += 1
    except UserError:
        raise
    except Exception as error:  # the error that `datasets` raises for a broken row depends on the format
        reason = first_line(error)
        raise UserError(f"{name} cannot be read near row {row} ({reason}); check the file or the network.") from error
