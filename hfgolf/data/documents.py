"""Documents: the text, the token ids or the messages in one file, or in a dataset of the Hub.

Owns formats and encodings, and what a value may be. Does not know which files there are, nor templates or tokens.
"""

from __future__ import annotations

import codecs
import errno
import glob
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from hfgolf.config.sections import DataSection
from hfgolf.data.archives import DECOMPRESSED, Opener, has_links, members_of, unreadable
from hfgolf.data.exports import current_branch
from hfgolf.data.files import (
    ARCHIVES,
    FIRST_TEXTS,
    TEXTS,
    SourceFile,
    is_utf8,
    log_skipped,
    marked_encoding,
    not_text,
    optional_kinds,
    require_text,
    without_other_splits,
)
from hfgolf.data.tables import (
    BINARY_TABLES,
    ROWS_WITHOUT_COLUMN,
    SYSTEM,
    TABLES,
    TEXT_TABLES,
    Answer,
    Column,
    NoColumnError,
    Row,
    row_name,
)
from hfgolf.system.errors import UserError
from hfgolf.system.wording import first_line, join_words, one_line, shortened

Document = tuple[str, str | None, Any]
"""Its name, the same on every machine; its split if that is fixed; its blocks of text, token ids or messages."""
Messages = list[dict[str, Any]]
"""A conversation: [{"role": str, "content": str}, ...], with "weight": 0 in a turn that the loss leaves out."""

BLOCK_BYTES = 1 << 20
_ROWS_PER_BATCH = 1000  # of the Hub's
_ROLES = {
    **{role: role for role in ("system", "user", "assistant")},
    "developer": "system",
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
}
_MEMBERS = (*TABLES, *TEXTS)
_HIDDEN = re.compile(r"(^|/)(\.(?!\.?/)|__MACOSX/)")  # the folders . and .. are not
_ABSENT: tuple[object, ...] = (None, "", [], {})
"""Values of fields that a table has because other rows fill them."""


@dataclass
class Notes:
    """What the log says of documents once they are read."""

    skipped: list[str] = field(default_factory=list)
    """Names of optional files without the column."""
    empty: list[str] = field(default_factory=list)
    """Names of tables and notebooks without a document, which are skipped, too."""
    plain_json: list[str] = field(default_factory=list)
    """Names of files with rows of JSON that are read as plain text, because of their endings."""
    unread: dict[str, None] = field(default_factory=dict)
    """Of conversations: the columns beside them."""
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of tables: how many rows have nothing in the column, and how many were read."""


def read_file(file: SourceFile, data: DataSection, scratch: Path, notes: Notes) -> Iterator[Document]:
    """Yield the documents of a file, in order. Raises UserError if it cannot be read.

    scratch: a folder for files that must be decompressed first. notes: gets what the log says afterwards.
    """
    if data.source == "python_stdlib":
        text = file.path.read_bytes()
        if text and is_utf8(text):  # a few have other encodings
            yield file.name, None, (text.decode(),)
    elif file.endings[0] in ARCHIVES:
        yield from _read_archive(file, data, scratch, notes)
    else:
        yield from _read(file, partial(open, file.path, "rb"), data, scratch, notes)


def _read_archive(file: SourceFile, data: DataSection, scratch: Path, notes: Notes) -> Iterator[Document]:
    try:
        changed_at = file.path.stat().st_mtime_ns
    except OSError as error:
        raise unreadable(file, error) from error
    used = _used_members(file, content_column(data), changed_at)
    for number, _, _, opener in _visible(file):
        if number in used:
            require_text(used[number], "data.files")
            if used[number].endings[0] in ARCHIVES:
                raise UserError(f"{used[number].path} is an archive in an archive; unpack the outer one.")
            yield from _read(used[number], opener, data, scratch, notes)


@lru_cache(maxsize=16)  # to find them takes a pass over the archive
def _used_members(file: SourceFile, column: Column, changed_at: int) -> dict[int, SourceFile]:
    """Return {number: member} of an archive's members of a known kind, or of its only member whatever its name.

    Nothing is unpacked by its name. Of a name that appears twice, the last member counts.
    """
    last, sizes, about = dict[str, int](), dict[int, int](), set()
    for number, name, size, opener in _visible(file):
        last[name], sizes[number] = number, size
        if file.endings[0] == ".tar" and _may_be_about_text(SourceFile(name, Path(name)), opener, column):
            about.add(number)
    used: dict[int, SourceFile] = {}
    for name, number in last.items():
        member = SourceFile(f"{file.name}/{name}", Path(f"{file.path}/{name}"), file.split)
        if len(last) == 1 or member.endings[0] in _MEMBERS:
            used[number] = member
    if not used:
        raise UserError(f"{file.path} holds no file of a known kind (docs/data.md lists them); unpack it.")
    texts = [_stem(member) for member in used.values() if member.endings[0] not in TABLES]
    keys = {text[: dot.start()] for text in texts for dot in re.finditer(r"\.(?=[^/]*$)|$", text)}
    beside = {number for number, member in used.items() if number in about and _stem(member) in keys}
    reasons = {
        "other kind": [name for name, number in last.items() if number not in used],
        "about a text": [name for name, number in last.items() if number in beside],
    }
    used = {number: member for number, member in used.items() if number not in beside}
    log_skipped("data.files", str(file.path), len(used), reasons)
    if file.split is None:
        trained = {*without_other_splits([*used.values()], needs_validation=False)[0]}
        used = {number: member for number, member in used.items() if member in trained}
    optional = optional_kinds((member.endings[0], sizes[number]) for number, member in used.items())
    return {number: replace(member, is_optional=member.endings[0] in optional) for number, member in used.items()}


def _visible(file: SourceFile) -> Iterator[tuple[int, str, int, Opener]]:
    """Yield the number, name, bytes and opener of the members of an archive that hold something and are not hidden."""
    for number, (name, size, opener) in enumerate(members_of(file)):
        if size and not _HIDDEN.search(name):
            yield number, name, size, opener


def newer_kinds(file: SourceFile) -> set[str]:
    """Return the endings of the members of a zip archive that are read now, and were not by earlier versions.

    For members with . or .. in their names, it is "./"; for links, which earlier versions read as text, it is "link".
    """
    names = {name for _, name, _, _ in _visible(file)}
    kinds = {SourceFile(name, Path(name)).endings[0] for name in names} if len(names) > 1 else set()
    others = {"./" for name in names if re.search(r"(^|/)\.\.?/", name)} | ({"link"} if has_links(file) else set())
    return kinds & {*TEXTS} - {*FIRST_TEXTS} | others


def _stem(member: SourceFile) -> str:
    """Return the name of a member without its ending, and that of its compression."""
    ending, compression = member.endings
    return member.name[: len(member.name) - len(ending + compression)]


def _may_be_about_text(member: SourceFile, opener: Opener, column: Column) -> bool:
    """Return whether a member is one JSON object that holds no rows, as in webdataset: KEY.json is about KEY.*txt."""
    ending, compression = member.endings
    if ending != ".json" or column.key != "text_column":
        return False
    try:
        with opener() as raw, DECOMPRESSED[compression](raw) as stream:
            content = stream.read(BLOCK_BYTES + 1)
        value = json.loads(content) if len(content) <= BLOCK_BYTES else None
    except Exception:  # it is read as a table, which says what is wrong
        return False
    lists = [rows for rows in value.values() if isinstance(rows, list)] if isinstance(value, dict) else []
    has_rows = any(isinstance(row, dict) and column.find(row) for rows in lists for row in rows)
    return isinstance(value, dict) and not has_rows


def _read(file: SourceFile, opener: Opener, data: DataSection, scratch: Path, notes: Notes) -> Iterator[Document]:
    names: list[str] | None = notes.empty
    try:
        for document in _parsed(file, opener, data, scratch, notes):
            names = None
            yield document
        if names is not None and file.is_named:
            raise UserError(_nothing_in(file, content_column(data)))
    except NoColumnError:
        if not file.is_optional:
            raise
        names = notes.skipped
    if names is not None:
        notes.rows.pop(file.name, None)
        names.append(file.name)


def _nothing_in(file: SourceFile, column: Column) -> str:
    if file.endings[0] not in TABLES:
        return f"{file.path} has no text in it; remove it or add text to it."
    return f"{file.path} has no row with {_CONTENTS[column.key][1]} in column {column.name!r}; remove it or add rows."


def _parsed(file: SourceFile, opener: Opener, data: DataSection, scratch: Path, notes: Notes) -> Iterator[Document]:
    ending, column = file.endings[0], content_column(data, notes.unread)
    blocks = _text_blocks(file, opener, data.encoding)
    if ending in TEXT_TABLES:
        yield from _documents(TEXT_TABLES[ending](blocks, file.path, column), file, data, notes)
    elif ending in BINARY_TABLES:
        with _uncompressed(file, opener, scratch) as path:
            yield from _documents(BINARY_TABLES[ending](path, column, file.path), file, data, notes)
    elif column.key != "text_column":
        raise NoColumnError(f"data.{column.key}: {file.path} has no columns; name jsonl, parquet or arrow files.")
    elif ending != ".ipynb":
        first = next(blocks)
        notes.plain_json += [file.name] if _is_json(first) else []
        yield file.name, file.split, itertools.chain([first], blocks)
    elif text := _notebook(blocks, file.path):
        yield file.name, file.split, (text,)


def _is_json(text: str) -> bool:
    """Return whether a text begins with an object of JSON, alone or in an array, as a table does."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value)


def _notebook(blocks: Iterator[str], path: Path) -> str:
    """Return the sources of a notebook's cells, with a blank line between them. What they print is no text."""
    try:
        sources = ["".join(cell["source"]) for cell in json.loads("".join(blocks))["cells"]]
        text = "\n\n".join(filter(None, sources))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is no notebook of format 4 ({one_line(error)[:100]}); open it in Jupyter and save it again."
        ) from error
    try:
        _require_unicode(text)
    except ValueError as error:
        raise UserError(f"{path} {error}.") from None
    return text


def _text_blocks(file: SourceFile, opener: Opener, encoding: str | None) -> Iterator[str]:
    """Decode a file strictly, with unchanged newlines, about a megabyte at a time. encoding: data.encoding.

    A byte order mark at its start is no text. Raises UserError for other encodings and for formats that are not text.
    """
    decoder = _Decoder(encoding)
    num_bytes, is_empty = 0, True
    try:
        with opener() as raw, DECOMPRESSED[file.endings[1]](raw) as stream:
            for block in itertools.chain(iter(lambda: stream.read(BLOCK_BYTES), b""), [b""]):  # empty at the end
                if block and not num_bytes and (problem := not_text(block, file.path, encoding)):
                    raise UserError(f"{file.path} {problem}.")
                num_bytes += len(block)
                text = decoder.decode(block, is_final=not block)
                is_empty &= not text
                if text.count("\0") > max(99, len(text) / 2):  # as a crash or a broken download leaves them
                    raise UserError(f"{file.path} is mostly zero bytes before byte {num_bytes}; restore it.")
                yield text
    except UserError:
        raise
    except UnicodeDecodeError as error:
        offset = num_bytes - len(error.object) + error.start  # of the object, the last bytes that were read
        name, advice = encoding or error.encoding, "restore it, or find its encoding and set data.encoding to it"
        if error.encoding == "utf-8":
            name = "UTF-8"
            is_damaged = encoding is None or _utf8_share(error.object) > 0.9
            advice = _other_encoding(error) if is_damaged else "restore it, or convert it to UTF-8 by `iconv`"
        raise UserError(f"{file.path} is not {name} (byte {offset}: {error.reason}); {advice}.") from error
    except Exception as error:  # each compression library has its own exceptions for a damaged file
        raise unreadable(file, error) from error
    if is_empty:
        raise UserError(f"{file.path} has no text in it; remove it or add text to it.")


class _Decoder:
    """Decodes a file block by block: by its byte order mark, as UTF-8, or by the encoding that is named for others.

    ASCII leaves open which of them it is, and so does the first byte of a character that the next block completes.
    """

    def __init__(self, named: str | None) -> None:
        self._named = named
        self._decoder: codecs.IncrementalDecoder | None = None
        self._rest, self._is_first = b"", True

    def decode(self, block: bytes, is_final: bool) -> str:
        if self._decoder is None:
            block = self._rest + block
            encoding = (marked_encoding(block) if self._is_first else None) or self._encoding(block, is_final)
            self._is_first = False
            if encoding is None:
                text = codecs.getincrementaldecoder("utf-8")().decode(block)
                self._rest = block[len(text) :]
                return text
            self._decoder = codecs.getincrementaldecoder(encoding)()
        return self._decoder.decode(block, is_final)

    def _encoding(self, block: bytes, is_final: bool) -> str | None:
        if self._named is None:
            return "utf-8"
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(block, is_final)
        except UnicodeDecodeError:
            if _utf8_share(block) > 0.9:
                raise
            return self._named
        if text.isascii() and not codecs.lookup(self._named).name.startswith("utf"):
            return None
        return self._named if text.isascii() and "\0" in text else "utf-8"


def _utf8_share(block: bytes) -> float:
    """Return the share of the bytes beyond ASCII, of which there are some, that are of whole characters of UTF-8."""
    good = sum(len(character.encode()) for character in block.decode("utf-8", "ignore") if character >= "\x80")
    return good / sum(byte >= 0x80 for byte in block)


def _other_encoding(error: UnicodeDecodeError) -> str:
    """Return what the bytes around one that is not UTF-8 tell of the encoding, and what to do."""
    block = error.object
    if error.reason == "unexpected end of data":
        return "its last character is cut, or in another encoding; restore the end, or set data.encoding to it"
    high = [byte for byte in block if byte >= 0x80]
    if _utf8_share(block) > 0.5:
        return "most of it is UTF-8, so these bytes are damaged; `iconv -c -f UTF-8 -t UTF-8 OLD > NEW` leaves them out"
    if sum(map(block.count, range(8))) > len(block) / 100:  # control characters, which no encoding has in text
        return "it is probably not text; remove it"
    if len(high) < len(block) / 3 and not {*b"\x81\x8d\x8f\x90\x9d"} & {*high}:  # which Windows-1252 lacks
        name, encoding = "Latin-1", "latin-1"
        if any(0x80 <= byte < 0xA0 for byte in high):
            name, encoding = "Windows-1252", "windows-1252"
        around = block[max(0, error.start - 20) : error.start + 20].decode(encoding, "replace")
        word = next(word for word in re.split("[ \t\r\n]+", around) if not word.isascii())
        return f"it is probably {name}, with words such as {shortened(word)}; set data.encoding {encoding}"
    return "find its encoding, such as cp850, gb18030 or shift_jis, and set data.encoding to it"


@contextmanager
def _uncompressed(file: SourceFile, opener: Opener, scratch: Path) -> Iterator[Path]:
    """Yield the path of a table, temporarily decompressed in `scratch`, because its format is not read in order."""
    if file.path.is_file() and not file.endings[1]:
        yield file.path
        return
    with tempfile.NamedTemporaryFile(dir=scratch) as plain:
        try:
            with opener() as raw, DECOMPRESSED[file.endings[1]](raw) as stream:
                shutil.copyfileobj(stream, plain)
            plain.flush()
        except Exception as error:  # each compression library has its own exceptions for a damaged file
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(
                    f"{file.path} expands to more than {scratch} has room for ({error.strerror}); free up space there,"
                    " set another data.cache_dir, or check what the file holds."
                ) from error
            raise unreadable(file, error) from error
        yield Path(plain.name)


def read_hub(data: DataSection, notes: Notes) -> Iterator[Document]:
    """Yield the rows of the Hub dataset that `data` names. Raises UserError if it cannot be reached or read."""
    from datasets import load_dataset

    name, column = str(data.hub_name), content_column(data, notes.unread)
    try:  # with streaming, the text is on disk only as pieces while the cache is built; the rows are the same
        table: Any = load_dataset(name, data.hub_config, split=data.hub_split, streaming=data.streaming)
    except Exception as error:
        raise _unreachable(data, error) from error
    if table.column_names is not None:  # None: of a streamed dataset that does not state them
        table = table.select_columns(column.wanted(table.column_names, name)[0])  # pictures would be decoded

    def rows() -> Iterator[Row]:
        for batch in table.iter(batch_size=_ROWS_PER_BATCH):
            yield from column.rows(batch, *column.wanted(batch, name))

    yield from _documents(rows(), SourceFile(name, Path(name)), data, notes)


def hub_revision(data: DataSection) -> str:
    """Return the hash that `datasets` computes for the dataset's files (offline: for the copy in its cache)."""
    from datasets import load_dataset_builder

    name = str(data.hub_name)
    if os.path.isdir(name) and glob.has_magic(os.path.abspath(name)):  # it would read another folder's files
        raise UserError(
            f"data.hub_name: {os.path.abspath(name)!r} has one of []*? in it, which `datasets` takes as a pattern; name"
            " its files in data.files, or rename the folder."
        )
    try:
        return str(load_dataset_builder(name, data.hub_config).hash)
    except Exception as error:
        raise _unreachable(data, error) from error


def _unreachable(data: DataSection, error: Exception) -> UserError:
    name = f"{data.hub_name!r} (data.hub_config {data.hub_config}, data.hub_split {data.hub_split})"
    reason = first_line(error)
    return UserError(f"data.hub_name: cannot load {name}: {reason} Check the name, the network and `hf auth login`.")


def content_column(data: DataSection, unread: dict[str, None] | None = None) -> Column:
    """Return the column that holds the content of a row. unread: gets the columns beside a conversation."""
    unread = {} if unread is None else unread
    for key in ("ids_column", "messages_column"):
        if (name := getattr(data, key)) is not None:
            return Column(key, name, unread)
    return Column("text_column", data.text_column)


def _require_unicode(text: str) -> None:
    """Raise ValueError for half a surrogate pair, which JSON can spell and no encoding of Unicode can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds half of a surrogate pair ({shortened(text[error.start])} at character {error.start}), which is no"
            " character; write it again from its source"
        ) from None


def _read_text(text: str) -> tuple[str, ...]:
    _require_unicode(text)
    return (text,) if text else ()


def _read_ids(ids: list[Any]) -> list[int]:
    for number in ids:
        if not (type(number) is int and 0 <= number < 2**32):
            raise ValueError(f"holds a list with {shortened(number)}, not of token ids")
    return ids


def _read_messages(row: list[Any] | Answer) -> Messages:
    """Return OpenAI's {"role", "content", "weight"} or ShareGPT's {"from", "value", "weight"} in OpenAI's form."""
    if isinstance(row, Answer):
        return _read_messages(current_branch(row)) if "current_node" in row else _read_answer(row)
    return [_read_message(number, message) for number, message in enumerate(row)]


def _read_answer(row: Answer) -> Messages:
    """Return a prompt and its answer as a conversation: each of them text, or messages. [] without an answer.

    Of the text before an answer, all but the system's is one message, in paragraphs. Only the answer is learned. An
    answer that is a list of messages and does not begin with the assistant's is a whole conversation, but for the
    system's columns.
    """
    *before, (last, answer) = row.items()
    if answer in _ABSENT:
        return []
    rest = _as_messages(last, "assistant", answer)
    is_whole = rest[0]["role"] != "assistant"
    system: Messages = []
    prompt: Messages = []
    for name, value in before:
        if value in _ABSENT or (is_whole and name not in SYSTEM):
            continue
        if name in SYSTEM:
            system += _as_messages(name, "system", value)
        elif name == "history":
            prompt += _past_turns(value)
        elif isinstance(value, str) and prompt and prompt[-1]["role"] == "user":
            _require_unicode(value)
            prompt[-1]["content"] += f"\n\n{value}"
        else:
            prompt += _as_messages(name, "user", value)
    rest = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in prompt] + rest
    if system and rest[0]["role"] == "system":
        if system != rest[:1]:
            raise ValueError("begins with a message of the system, and a column of the row has another; keep one")
        system = []
    return system + rest


def _as_messages(name: str, role: str, value: Any) -> Messages:
    if not isinstance(value, str | list):
        raise ValueError(f"needs text or messages in column {name!r}, which holds {_described(value)}")
    return _read_messages([{"role": role, "content": value}] if isinstance(value, str) else value)


def _past_turns(history: Any) -> Messages:
    """Return what Alpaca's tables have as history, [[question, answer], ...], as messages."""
    if not (isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history)):
        raise ValueError("needs pairs of a question and its answer in column 'history'")
    roles = itertools.cycle(("user", "assistant"))
    return _read_messages([{"role": next(roles), "content": text} for turn in history for text in turn])


def _read_message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"holds {type(message).__name__} as message {number}, not role and content")
    role_key, content_key = ("role", "content") if message.get("role") is not None else ("from", "value")
    role, content = message.get(role_key), message.get(content_key)
    if not isinstance(role, str) or not role:
        raise ValueError(f"has message {number} without a role (or from)")
    if role not in _ROLES:
        raise ValueError(f"has {role_key} {shortened(role)} in message {number}; allowed: {join_words(_ROLES)}")
    for key, value in message.items():
        if key not in (role_key, content_key, "weight") and value not in _ABSENT:
            raise ValueError(
                f"has {shortened(key)} in message {number}, which cannot be trained on; leave it or such rows out"
            )
    if isinstance(content, list):
        content = _joined_parts(number, content)
    if not isinstance(content, str):
        raise ValueError(f"has {type(content).__name__} as {content_key} of message {number}, not text")
    _require_unicode(content)
    weight, is_assistant = message.get("weight"), _ROLES[role] == "assistant"
    if weight is not None and (type(weight) not in (int, float) or weight not in (0, 1)):
        raise ValueError(f"has weight {shortened(weight)} in message {number}; allowed: 0 and 1")
    if weight == 1 and not is_assistant:
        raise ValueError(f"has weight 1 in message {number} of {role}; only the assistant's turns can be trained on")
    return {"role": _ROLES[role], "content": content} | ({"weight": 0} if weight == 0 and is_assistant else {})


def _joined_parts(number: int, parts: list[Any]) -> str:
    """Return a content of OpenAI's parts, {"type": "text", "text": str}, as one text."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has a part of type {shortened(kind)} in message {number}; only text can be trained on")
    return "".join(part["text"] for part in parts)


def is_learned(message: dict[str, Any]) -> bool:
    """Return whether the loss counts a message."""
    return message["role"] == "assistant" and "weight" not in message


_CONTENTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "text_column": (str, "text", _read_text),
    "ids_column": (list, "a list of token ids", _read_ids),
    "messages_column": (list | Answer, "a list of messages", _read_messages),
}


def _other_column(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(value, str):
        return "; name a column of text by data.text_column"
    if isinstance(value, dict) and "0" in value:  # pandas' to_json as it is
        return "; write each row as an object, as pandas does with orient='records'"
    if isinstance(first, dict) and {"role", "from"} & {*first}:
        return "; name a column of conversations by data.messages_column"
    return "; name a column of token ids by data.ids_column" if type(first) is int else ""


def _documents(rows: Iterator[Row], file: SourceFile, data: DataSection, notes: Notes) -> Iterator[Document]:
    """Yield each row as a document named `name#row`: blocks of text, ids or messages. Skips empty and null rows."""
    row, num_empty, column = 0, 0, content_column(data)
    stray: UserError | None = None
    is_found = False
    kind, name, read = _CONTENTS[column.key]
    try:
        for line, value, steps in rows:
            try:
                value = _inner(value, steps)
                is_found |= value is not None
                if not isinstance(value, kind | None):
                    no_prompt = column.no_prompt if isinstance(value, str) else ""
                    raise ValueError(f"holds {_described(value)}, not {name}{no_prompt}{_other_column(value)}")
                content = None if value is None else read(value)
            except ValueError as error:
                problem = UserError(f"{row_name(file.path, row, line)}: {column.name!r} {error}.")
                if not isinstance(error, _NoKeyError):
                    raise problem from None
                stray, content = stray or problem, None
            if stray and not is_found and row == ROWS_WITHOUT_COLUMN:
                break
            num_empty += not content
            notes.rows[file.name] = num_empty, row + 1
            if content:
                yield f"{file.name}#{row}", file.split, content
            row += 1
        if stray and not is_found:
            raise stray
    except UserError:
        raise
    except Exception as error:  # what pyarrow and `datasets` raise for broken data depends on the format
        reason = first_line(error)
        where = "network" if data.source == "hub" else "file"
        raise UserError(f"{file.path} cannot be read near row {row} ({reason}); check the {where}.") from error


class _NoKeyError(ValueError):
    """A dict with other keys than a step of a.b.0."""


def _inner(value: Any, steps: list[str]) -> Any:
    """Return what the steps of a.b.0 lead to, each to a dict's value or a list's item. None if a row has none."""
    for step in steps:
        if value is None or value == {}:
            return None
        if isinstance(value, list) and step.isdecimal():
            value = value[int(step)] if int(step) < len(value) else None
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            kind = _NoKeyError if isinstance(value, dict) else ValueError
            raise kind(f"leads nowhere: there is no {step!r} in {_described(value)}")
    return value


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {join_words(value, maximum=8)}" if value else "an empty dict"
    names = {str: "text", int: "a number", float: "a number", bool: "true or false", list: "a list"}
    return names.get(type(value), type(value).__name__)
