"""Documents: the text or the token ids in one file, or in a dataset of the Hub.

Owns formats and compressions. A document is (name, fixed split or None, blocks of text or token ids); its name is the
same on every machine. Does not know which files there are, nor the split of what has no fixed one.

Why not fsspec for compressed files: its zstd accepts a truncated file without an error (it read 262,144 of 600,000
bytes).
"""

from __future__ import annotations

import codecs
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from hfgolf.config import DataConfig
from hfgolf.data.files import SourceFile
from hfgolf.errors import UserError
from hfgolf.wording import first_line

Document = tuple[str, str | None, Any]

TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
BLOCK_BYTES = 1 << 20
_ROWS_PER_BATCH = 1000


def read_file(file: SourceFile, data: DataConfig, scratch: Path) -> Iterator[Document]:
    """Yield the documents of a file, in order. Raises UserError if it cannot be read.

    scratch: a folder for files that must be decompressed first.
    """
    kind = TABLES.get(file.endings[0])
    if kind:
        with _readable_by_datasets(file, scratch) as path:
            yield from _rows(_load_table(path, kind), file.name, file.split, data)
    elif data.ids_column is not None:
        raise UserError(f"data.ids_column: {file.path} has no columns; name jsonl, parquet or arrow files.")
    elif data.source != "python_stdlib":
        yield file.name, file.split, _text_blocks(file)
    elif text := _utf8_text(file.path):
        yield file.name, None, (text,)


def read_hub(data: DataConfig) -> Iterator[Document]:
    """Yield the rows of the Hub dataset that `data` names. Raises UserError if it cannot be reached or read."""
    yield from _rows(_load_hub(data), str(data.hub_name), None, data)


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


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**32 for number in value)


def _rows(table: Any, name: str, split: str | None, data: DataConfig) -> Iterator[Document]:
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
