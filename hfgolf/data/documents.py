"""Documents: the text, the token ids or the messages in one file, or in a dataset of the Hub.

Owns formats and compressions. A document is (name, fixed split or None, blocks of text, token ids or messages); its
name is the same on every machine. Does not know which files there are, nor the split of what has no fixed one.

Why not fsspec for compressed files: its zstd accepts a truncated file without an error (it read 262,144 of 600,000
bytes).
"""

from __future__ import annotations

import codecs
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from hfgolf.config import DataConfig
from hfgolf.data.files import TABLES, TEXTS, SourceFile, log_skipped, require_text
from hfgolf.data.messages import read_messages
from hfgolf.errors import UserError
from hfgolf.wording import first_line, join_words

Document = tuple[str, str | None, Any]
Opener = Callable[[], Any]

BLOCK_BYTES = 1 << 20
_ROWS_PER_BATCH = 1000


def read_file(file: SourceFile, data: DataConfig, scratch: Path) -> Iterator[Document]:
    """Yield the documents of a file, in order. Raises UserError if it cannot be read.

    scratch: a folder for files that must be decompressed first.
    """
    if data.source == "python_stdlib":
        if text := _utf8_text(file.path):
            yield file.name, None, (text,)
    elif file.endings[0] == ".zip":
        yield from _read_archive(file, data, scratch)
    else:
        yield from _read(file, partial(open, file.path, "rb"), data, scratch)


def _read_archive(file: SourceFile, data: DataConfig, scratch: Path) -> Iterator[Document]:
    """Yield the documents of a zip archive's members of a known kind, or of its only member whatever its name."""
    try:
        archive = zipfile.ZipFile(file.path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{file.path} cannot be read ({first_line(error)}); check the file.") from error
    with archive:
        entries = {
            SourceFile(f"{file.name}/{entry.filename}", file.path / entry.filename, file.split): entry
            for entry in archive.infolist()
            if entry.file_size and not re.search(r"(^|/)(\.|__MACOSX/)", entry.filename)
        }
        known = (*TABLES, *TEXTS)
        used = {member: entry for member, entry in entries.items() if len(entries) == 1 or member.endings[0] in known}
        if not used:
            raise UserError(f"{file.path} holds no file of a known kind ({' '.join(known)}); unpack it.")
        skipped = tuple(entry.filename for member, entry in entries.items() if member not in used)
        log_skipped("data.files", str(file.path), len(used), skipped)
        for member, entry in used.items():
            require_text(member, "data.files")
            yield from _read(member, partial(archive.open, entry), data, scratch)


def _read(file: SourceFile, opener: Opener, data: DataConfig, scratch: Path) -> Iterator[Document]:
    ending = file.endings[0]
    if ending in TABLES:
        with _readable_by_datasets(file, opener, scratch) as path:
            yield from _rows(_load_table(path, ending), file.name, file.split, data)
    elif (key := _content_column(data)[0]) != "text_column":
        raise UserError(f"data.{key}: {file.path} has no columns; name jsonl, parquet or arrow files.")
    else:
        yield file.name, file.split, _text_blocks(file, opener)


def read_hub(data: DataConfig) -> Iterator[Document]:
    """Yield the rows of the Hub dataset that `data` names. Raises UserError if it cannot be reached or read."""
    yield from _rows(_load_hub(data), str(data.hub_name), None, data)


def _decompressed(file: BinaryIO, compression: str) -> BinaryIO:
    match compression:
        case ".gz":
            import gzip

            return cast(BinaryIO, gzip.open(file, "rb"))
        case ".bz2":
            import bz2

            return cast(BinaryIO, bz2.open(file, "rb"))
        case ".xz":
            import lzma

            return cast(BinaryIO, lzma.open(file, "rb"))
        case ".zst":
            import pyarrow as pa

            # zstandard's own reader accepts a truncated frame, and reads only the first of several frames
            return cast(BinaryIO, pa.input_stream(file, compression="zstd"))
    return file


def _text_blocks(file: SourceFile, opener: Opener) -> Iterator[str]:
    """Decode a file as strict UTF-8 with unchanged newlines, about a megabyte at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    try:
        with opener() as raw, _decompressed(raw, file.endings[1]) as stream:
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
def _readable_by_datasets(file: SourceFile, opener: Opener, scratch: Path) -> Iterator[Path]:
    """Yield the path of a table, temporarily decompressed in `scratch` if `datasets` cannot do that itself.

    It decompresses .gz in place, but not of parquet, and it silently accepts a truncated .zst file.
    """
    ending, compression = file.endings
    if file.path.is_file() and (not compression or (compression == ".gz" and ending != ".parquet")):
        yield file.path
        return
    with tempfile.NamedTemporaryFile(suffix=ending, dir=scratch) as plain:
        try:
            with opener() as raw, _decompressed(raw, compression) as stream:
                shutil.copyfileobj(stream, plain)
            plain.flush()
        except Exception as error:  # each compression library has its own exceptions for a damaged file
            raise UserError(f"{file.path} cannot be decompressed ({first_line(error)}); check the file.") from error
        yield Path(plain.name)


def _load_table(path: Path, ending: str) -> Any:
    from datasets import load_dataset

    kind = TABLES[ending]
    # otherwise pandas takes a text such as NA or null for a missing cell
    options: dict[str, Any] = {"keep_default_na": False} if kind == "csv" else {}
    options |= {"delimiter": "\t"} if ending == ".tsv" else {}
    try:  # streaming reads the file in place, without a second copy in the datasets cache
        return load_dataset(kind, data_files=[str(path)], split="train", streaming=True, **options)
    except Exception as error:
        raise UserError(f"{path} cannot be read as {kind} ({first_line(error)}); check the file.") from error


def _load_hub(data: DataConfig) -> Any:
    from datasets import load_dataset

    try:  # with streaming, the text is on disk only as pieces while the cache is built; the rows are the same
        return load_dataset(str(data.hub_name), data.hub_config, split=data.hub_split, streaming=data.streaming)
    except Exception as error:
        raise UserError(_hub_message(data, error)) from error


def hub_revision(data: DataConfig) -> str:
    """Return the hash that `datasets` computes for the dataset's files (offline: for the copy in its cache)."""
    from datasets import load_dataset_builder

    try:
        return str(load_dataset_builder(str(data.hub_name), data.hub_config).hash)
    except Exception as error:
        raise UserError(_hub_message(data, error)) from error


def _hub_message(data: DataConfig, error: Exception) -> str:
    name = f"{data.hub_name!r} (data.hub_config {data.hub_config}, data.hub_split {data.hub_split})"
    return f"data.hub_name: cannot load {name}: {first_line(error)} Check the name, the network and `hf auth login`."


def _content_column(data: DataConfig) -> tuple[str, str, Callable[[Any], Any]]:
    """Return the key and the name of the column that holds a row's content, and what reads it or raises ValueError."""
    if data.ids_column is not None:
        return "ids_column", data.ids_column, _read_ids
    if data.messages_column is not None:
        return "messages_column", data.messages_column, read_messages
    return "text_column", data.text_column, _read_text


def _read_text(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str):
        raise ValueError(f"holds {_described(value)}, not text")
    return (value,) if value else ()


def _read_ids(value: Any) -> list[int]:
    if not (isinstance(value, list) and all(type(number) is int and 0 <= number < 2**32 for number in value)):
        raise ValueError(f"holds {_described(value)}, not a list of token ids")
    return value


def _rows(table: Any, name: str, split: str | None, data: DataConfig) -> Iterator[Document]:
    """Yield each row as a document named `name#row`: blocks of text, ids or messages. Skips empty and null rows."""
    row = 0
    key, column, read = _content_column(data)
    try:
        for batch in table.iter(batch_size=_ROWS_PER_BATCH):
            first, *inner = [column] if column in batch else column.split(".")
            if first not in batch:
                raise UserError(f"{name} has no column {first!r}; set data.{key} to one of: {', '.join(batch)}.")
            for value in batch[first]:
                for step in inner:
                    value = _inner(value, step, f"{name}, row {row}: data.{key} {column}")
                try:
                    content = None if value is None else read(value)
                except ValueError as error:
                    raise UserError(f"{name}, row {row}: {column!r} {error}.") from None
                if content:
                    yield f"{name}#{row}", split, content
                row += 1
    except UserError:
        raise
    except Exception as error:  # the error that `datasets` raises for a broken row depends on the format
        reason = first_line(error)
        raise UserError(f"{name} cannot be read near row {row} ({reason}); check the file or the network.") from error


def _inner(value: Any, step: str, where: str) -> Any:
    """Return what a step of a.b.0 leads to: a dict's value, or a list's item. None if a row has none."""
    if value is None:
        return None
    if isinstance(value, dict) and step in value:
        return value[step]
    if isinstance(value, list) and step.isdecimal():
        return value[int(step)] if int(step) < len(value) else None
    raise UserError(f"{where}: there is no {step!r} in {_described(value)}.")


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {join_words(value, maximum=8)}"
    return type(value).__name__
