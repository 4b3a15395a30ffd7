"""Rows of local tables: the value of one column in each row of a JSON, CSV, TSV, Parquet or Arrow file.

Python's own parsers read JSON and CSV: pyarrow's need a limit of a few megabytes for a row, number the rows of a block
instead of those of the file, and take what follows a closing quote as text. docs/data.md has the dialects.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfgolf.data.exports import chats_as_text, mended
from hfgolf.system.errors import UserError
from hfgolf.system.wording import count_of, join_words, one_line, shortened

_Object = tuple[int, dict[str, Any]]
Row = tuple[int | None, Any, list[str]]
"""The line that a row begins in, if it is in a text file; its value; and the steps from there to what is nested."""

MAX_ROW_CHARACTERS = 1 << 28
"""A row of text that is longer is refused: it would be held in memory."""
_ROWS_PER_BATCH = 256
ROWS_WITHOUT_COLUMN = 10_000
"""After so many rows of JSON without the column, nobody reads on for it."""
_SPACE = re.compile(r"[ \t\r\n]*")


class NoColumnError(UserError):
    """A whole file without the column, or one that is of another format from its first characters on."""


class Answer(dict[str, Any]):
    """What a row says one after the other, {column: value}: instruction, input and then their output, for example."""


SYSTEM = ("system", "system_prompt")
"""Columns of what the system says before a conversation."""
_BEFORE = {
    "completion": (*SYSTEM, "prompt"),
    "output": (*SYSTEM, "history", "instruction", "input"),
    "response": (*SYSTEM, "history", "prompt", "instruction", "question", "context"),
    "answer": (*SYSTEM, "question", "context"),
    "mapping": ("current_node",),  # of ChatGPT's export
}
"""Columns of what is said before an answer, by the answer's: those of a table make a conversation with it."""


@dataclass(frozen=True)
class Column:
    """The column with the content of the rows. key: such as text_column, without data.; name: a, or a.b.0 if nested."""

    key: str
    name: str
    unread: dict[str, None] = field(default_factory=dict, compare=False)
    """The columns beside those of a conversation, as they are found."""

    @property
    def before(self) -> list[str]:
        """The columns that may hold what is said before the conversation or the answer in this one."""
        return [*_BEFORE.get(self.name, SYSTEM)] if self.key == "messages_column" else []

    @property
    def prompts(self) -> list[str]:
        """Those of them that hold the prompt of an answer."""
        return [name for name in self.before if name not in SYSTEM]

    @property
    def no_prompt(self) -> str:
        """What an error about a text adds if it may be an answer."""
        return f", and no row has its prompt in {join_words(self.prompts, ' or ')}" if self.prompts else ""

    def wanted(self, names: Collection[str], path: object) -> tuple[list[str], list[str]]:
        """Return the columns to read, and the steps from the value of the last to the content.

        That is the column itself, after what is said before it. Raises UserError if it is not there.
        """
        found = self.find(names)
        if found is None:
            raise NoColumnError(self.missing(names, path))
        wanted = [*(name for name in self.before if name in names and not found[1:]), found[0]]
        if twice := [one for one in wanted if sum(name == one for name in names) > 1]:
            raise UserError(f"{path} has two columns {twice[0]!r}; rename one.")
        if self.key == "messages_column":
            self.unread.update(dict.fromkeys(name for name in names if name not in wanted))
        return wanted, found[1:]

    def value(self, names: Sequence[str], values: Sequence[Any]) -> Any:
        """Return the value of a row, of whose wanted columns these are the values. A text without a prompt is text."""
        is_text = isinstance(values[-1], str) and not {*self.prompts} & {*names}
        return values[-1] if is_text or len(values) == 1 else Answer(zip(names, values, strict=True))

    def rows(self, batch: Mapping[str, list[Any]], wanted: list[str], steps: list[str]) -> Iterator[Row]:
        """Yield the rows of a batch, {column: its values}."""
        for values in zip(*(batch[name] for name in wanted), strict=True):
            yield None, self.value(wanted, values), steps

    def missing(self, names: Collection[str], path: object) -> str:
        """Return what an error says if the column is not one of these."""
        column = f"{path} has no column {self.name.split('.')[0]!r}"
        if _OF_SLACK.get(Path(str(path)).name) in names:
            return (
                f"{column}: it is the list of a Slack export, not its messages; unpack the export if it is a .zip, and"
                " name the folders of its channels."
            )
        others = other_keys(names) if self.key == "text_column" else ""
        fitting = [name for name in names if not (others and name in _KEYS)]
        advice = f"; or data.{self.key} to one of: {_listed(fitting)}" if fitting else ""
        return f"{column}; set {(advice + others).removeprefix('; or ')}."

    def find(self, names: Collection[str]) -> list[str] | None:
        steps = [self.name] if self.name in names else self.name.split(".")
        return steps if steps[0] in names else None


def row_name(path: object, row: int, line: int | None) -> str:
    """Return how an error names a row: "a.csv, row 1 (line 3)". Rows count from 0, lines from 1."""
    return f"{path}, row {row}" + ("" if line is None else f" (line {line})")


def json_rows(blocks: Iterator[str], path: Path, column: Column) -> Iterator[Row]:
    """Yield the rows of JSON objects one after the other, usually one per line, or in one array.

    An object without the column counts as one with null, and so does one without the columns before an answer, if other
    objects have them. Raises UserError if no object has the column, or for broken JSON.
    """
    others: dict[str, None] = {}
    is_found = has_prompt = False
    alone: str | None = None
    objects = _JsonObjects(blocks, path)
    is_table, found = _unwrapped(objects, path, column)
    for row, (line, value) in enumerate(found):
        is_here = column.find(value) is not None
        is_found |= is_here
        if not is_found:
            others |= dict.fromkeys(value)
            if row == ROWS_WITHOUT_COLUMN:
                break
        if not is_here:
            yield line, None, []
        else:
            names, steps = column.wanted(value, path)
            has_prompt |= bool({*column.prompts} & {*names})
            content = column.value(names, [value[name] for name in names])
            is_alone = bool(column.prompts) and isinstance(content, str)
            if is_alone and alone is None:
                alone = row_name(path, row, line)
            yield line, Answer({name: value[name] for name in names}) if is_alone else content, steps
    if alone is not None and not has_prompt:
        raise UserError(
            f"{alone}: {column.name!r} holds text, not a list of messages{column.no_prompt}; name a column of text by"
            " data.text_column."
        )
    if others and not is_found:
        raise (UserError if is_table else NoColumnError)(column.missing(others, path))


def _unwrapped(objects: _JsonObjects, path: Path, column: Column) -> tuple[bool, Iterator[_Object]]:
    """Return whether the objects are rows, and the rows: of a lone object, those in its list.

    A lone object without the column, such as a composer.lock, has rows if there are at least as many as it has keys, in
    one list or under all keys.
    """
    rest = iter(objects)
    begin = list(itertools.islice(rest, 2))
    is_table = len(begin) > 1 or objects.is_array
    if len(begin) == 1 and column.find(begin[0][1]) is None:
        line, value = begin[0][0], mended(begin[0][1])
        if (column.key, column.name) == ("text_column", "text") and (chats := chats_as_text(value)):
            return True, ((line, {column.name: chat}) for chat in chats)
        lists = {name: rows for name, rows in value.items() if isinstance(rows, list) and rows}
        lists = {name: rows for name, rows in lists.items() if all(isinstance(row, dict) for row in rows)}
        found = [name for name, rows in lists.items() if any(column.find(row) for row in rows)]
        if len(found) > 1:
            raise UserError(f"{path} holds several lists of rows ({_listed(found)}); write one of them to the file.")
        is_table |= len(lists) in (1, len(value)) and sum(map(len, lists.values())) >= len(value) > 0
        if found or (len(lists) == 1 and not {*lists} & {*_KEYS}):
            return is_table, ((line, row) for row in lists[(found or [*lists])[0]])
        begin = [(line, value)]
    return is_table, itertools.chain(begin, rest)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a key appears twice: nobody knows which value is meant."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} appears twice in an object")
    return dict(pairs)


class _JsonObjects:
    """The objects in the text of a JSON file, as (line, object). Holds one block, or one object if that is longer."""

    def __init__(self, blocks: Iterator[str], path: Path) -> None:
        self._blocks, self._path = filter(None, blocks), path
        self._text, self._at = "", 0
        self._line, self._row = 1, 0
        self._decode = json.JSONDecoder(object_pairs_hook=_object).raw_decode
        self.is_array = False
        """Whether the text that is read so far begins an array."""

    def __iter__(self) -> Iterator[_Object]:
        values = self._values()
        for row, (line, value) in enumerate(values):
            if not isinstance(value, dict):
                where = row_name(self._path, row, line)
                advice = '; write each text as {"text": "..."}' if isinstance(value, str) else ""
                problem = f"{where} cannot be read: it is {shortened(value)}, not an object with columns{advice}."
                others = (isinstance(other, dict) for _, other in itertools.islice(values, ROWS_WITHOUT_COLUMN))
                raise (UserError if row or any([*others]) else NoColumnError)(problem)
            yield line, value

    def _values(self) -> Iterator[tuple[int, Any]]:
        self.is_array = self._next() == "["
        if not self.is_array:
            while self._next():
                yield self._read()
            return
        mark = self._after("[")
        while mark != "]":
            yield self._read()
            mark = self._next()
            if mark not in (",", "]"):
                raise self._error("a comma or the end of the array is missing")
            if mark == ",":
                self._after(",")
        if self._after("]"):
            raise self._error("something follows the array")

    def _after(self, mark: str) -> str:
        self._at += len(mark)
        return self._next()

    def _next(self) -> str:
        """Go to the next character that is no white space, and return it; "" at the end."""
        while True:
            end = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches the empty text
            self._line += self._text.count("\n", self._at, end)
            self._at = end
            if end < len(self._text):
                return self._text[end]
            if not self._read_more():
                return ""

    def _read_more(self) -> bool:
        """Drop what is read and add as much as is left, at least a block. Return whether there was more."""
        blocks, wanted = [self._text[self._at :]], max(1, len(self._text) - self._at)
        while wanted > 0 and (block := next(self._blocks, None)):
            blocks.append(block)
            wanted -= len(block)
        self._text, self._at = "".join(blocks), 0
        return len(blocks) > 1

    def _read(self) -> tuple[int, Any]:
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                break
            except RecursionError:
                raise self._error("it is nested too deeply") from None
            except json.JSONDecodeError as error:
                # an object that goes on in the next block ends in an error at the end of this one
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - 16
                if len(self._text) - self._at > MAX_ROW_CHARACTERS:
                    raise self._error(f"it is longer than {MAX_ROW_CHARACTERS:,} characters") from None
                lines_before = self._text.count("\n", self._at, error.pos)
                if not is_cut or not self._read_more():
                    self._line += lines_before
                    problem = self._error(error.msg.removesuffix(" at"))
                    raise NoColumnError(str(problem)) if self._is_foreign(error) else problem from None
            except ValueError as error:  # a key twice, or a number of thousands of digits
                raise self._error(str(error).partition(":")[0]) from None
        line, self._line = self._line, self._line + self._text.count("\n", self._at, end)
        self._at, self._row = end, self._row + 1
        return line, value

    def _is_foreign(self, error: json.JSONDecodeError) -> bool:
        """Return whether the text is of another format: its first characters are no JSON, or it has comments."""
        is_begin = error.pos < min(self._at + 2, len(self._text)) and not error.msg.startswith("Unterminated string")
        return self._row == 0 and (is_begin or self._text.startswith(("//", "/*"), error.pos))

    def _error(self, problem: str) -> UserError:
        return UserError(f"{row_name(self._path, self._row, self._line)} cannot be read: {problem}.")


_MARKS = {",": "comma", ";": "semicolon", "\t": "tab"}


def csv_rows(blocks: Iterator[str], path: Path, column: Column) -> Iterator[Row]:
    """Yield the rows of CSV: RFC 4180, with commas, semicolons or tabs: what Excel's `sep=;` or the first line says.

    It is the header if it names the column. Without a header, the column is named by its number, from 0. Numbers are a
    header only if they are 0, 1, 2 and so on, as pandas writes them. Raises UserError for a row with another number of
    fields, open quotes, or a number that may be a name or a place.
    """
    advice = "put a field that holds a {} or a line break in double quotes"
    return _separated(blocks, path, column, [*_MARKS], advice, strict=True)


def tsv_rows(blocks: Iterator[str], path: Path, column: Column) -> Iterator[Row]:
    """Yield the rows of tabs and lines, in which quotes are text. Header and errors are those of `csv_rows`."""
    advice = "a field cannot hold a {} or a line break, and quotes are text"
    return _separated(blocks, path, column, ["\t"], advice, quoting=csv.QUOTE_NONE)


def _separated(
    blocks: Iterator[str], path: Path, column: Column, marks: list[str], advice: str, **dialect: Any
) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    lines = _lines(blocks, path)
    head: list[str] = []
    for line in lines:
        if not head and (stated := re.fullmatch(r"sep=(.)\r?\n", line)) and stated[1] in marks:
            marks, line = [stated[1]], "\n"  # a blank line is no row, but counts
        head.append(line)
        if line.strip("\r\n"):
            break
    fields = {mark: _fields(head[-1:], mark, dialect.get("quoting", csv.QUOTE_MINIMAL)) for mark in marks}
    named = [mark for mark in marks if column.find(fields[mark]) is not None]
    dividing = [mark for mark in marks if len(fields[mark]) > 1] or marks[:1]
    mark = (named or dividing)[0]
    is_name = not column.name.isdecimal() or fields[mark] == [str(place) for place in range(len(fields[mark]))]
    if named and not is_name and int(column.name) < len(fields[mark]):
        raise UserError(
            f"{path} has {column.name!r} in its first line ({_listed(fields[mark])}), so data.{column.key}"
            f" {column.name} may be the name or the place of a column; give the file a header of names, and set"
            f" data.{column.key} to one of them."
        )
    has_header = bool(named) or not (column.name.isdecimal() and int(column.name) < max(map(len, fields.values())))
    if not has_header and len(dividing) > 1:
        found = join_words((f"{_MARKS[mark]}s" for mark in dividing), " and ")
        raise UserError(f"{path} does not tell what separates its fields, of {found}; give it a header.")
    reader = csv.reader(itertools.chain(head, lines), delimiter=mark, **dialect)
    yield from _cells(reader, path, column, has_header, advice.format(_MARKS[mark]))


def _fields(lines: list[str], mark: str, quoting: Any) -> list[str]:
    try:
        return next(csv.reader(lines, delimiter=mark, quoting=quoting), [])
    except csv.Error:  # the reader of all lines says which
        return []


def _filled(reader: Any, path: Path, row: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, fields) of each row that is not a blank line. row: number of the first, -1 for a header."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            where = f"{path}, the header" if row < 0 else row_name(path, row, line)
            problem = str(error).partition(" - ")[0]  # what follows is advice for who calls open()
            raise UserError(f"{where} cannot be read: {_CSV_ERRORS.get(problem, one_line(error))}.") from None
        if cells is None:
            return
        if cells:
            yield line, cells
            row += 1


_CSV_ERRORS = {
    "unexpected end of data": "a double quote opens a field and none closes it",
    "new-line character seen in unquoted field": "no line feed follows a carriage return; write one in its place",
    **dict.fromkeys(
        (f"'{mark}' expected after '\"'" for mark in _MARKS),
        "something follows a closing double quote; write a quote in a quoted field twice",
    ),
}


def _lines(blocks: Iterable[str], path: Path) -> Iterator[str]:
    """Yield the lines of a text, with their ends; only a line feed ends one."""
    rest = ""
    for block in blocks:
        first, *others = block.split("\n")
        rest += first
        for other in others:
            yield rest + "\n"
            rest = other
        if len(rest) > MAX_ROW_CHARACTERS:
            raise UserError(f"{path} has a line of more than {MAX_ROW_CHARACTERS:,} characters; cut or remove it.")
    if rest:
        yield rest


def _cells(reader: Any, path: Path, column: Column, has_header: bool, advice: str) -> Iterator[Row]:
    rows = _filled(reader, path, -1 if has_header else 0)
    first = next(rows, None)
    if first is None:
        return
    header = first[1] if has_header else [str(number) for number in range(len(first[1]))]
    if column.find(header) is None:
        if all(map(_is_quoted, header)):
            raise NoColumnError(f"{path}, the header {_QUOTED}.")
        if len(header) == 1 and column.name in re.split(r"[,|:^~]", header[0]):
            raise NoColumnError(
                f"{path} has one column here, {_listed(header)}; divide it with commas in .csv, with tabs in .tsv."
            )
        _, example = next(rows, first)
        longest = max(range(min(len(header), len(example))), key=lambda place: len(example[place]))
        alike = [name for name in header if name.strip().casefold() == column.name.casefold()]
        name = (alike or [header[longest]])[0]
        is_name = bool(alike) or _listed([name]) == name
        option = f", as in --data.{column.key} {shlex.quote(name) if is_name else longest}"
        raise NoColumnError(
            f"{path} has no column {column.name!r}; its first line holds {_listed(header)}. If that is the header, set"
            f" data.{column.key} to one of them{option if is_name else ''}{other_keys(header)}; if there is no header,"
            f" set it to the column's number, from 0{'' if is_name else option}."
        )
    names, steps = column.wanted(header, path)
    indices = [header.index(name) for name in names]
    is_tsv = reader.dialect.quoting == csv.QUOTE_NONE
    for row, (line, cells) in enumerate(rows if has_header else itertools.chain([first], rows)):
        if len(cells) != len(header):
            raise UserError(
                f"{row_name(path, row, line)} has {count_of(len(cells), 'field')}, but the"
                f" {'header' if has_header else 'first row'} has {len(header)}; {advice}."
            )
        values = [cells[index] for index in indices]
        if is_tsv and any('""' in value[1:-1] and _is_quoted(value) for value in values):
            raise UserError(f"{row_name(path, row, line)} {_QUOTED}.")
        yield line, column.value(names, values), steps


_QUOTED = "is in double quotes as in CSV, which would be text here; name the file .csv, or write it without quotes"


def _is_quoted(field: str) -> bool:
    """Return whether a field is in double quotes as CSV has them, with any quotes inside twice."""
    return len(field) > 1 and field[0] == field[-1] == '"' and '"' not in field[1:-1].replace('""', "")


def parquet_rows(path: Path, column: Column, name: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file, of which it reads one column. name: what an error calls the file."""
    import pyarrow.parquet as pq

    # a row group may be the whole file: read it page by page
    with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        wanted, steps = column.wanted(table.schema_arrow.names, name)
        for batch in table.iter_batches(_ROWS_PER_BATCH, columns=wanted, use_threads=False):
            yield from column.rows(batch.select(wanted).to_pydict(), wanted, steps)


def arrow_rows(path: Path, column: Column, name: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow file, of either IPC format, like `parquet_rows`."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        names = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file).schema.names
        wanted, steps = column.wanted(names, name)
        file.seek(0)
        options = pa.ipc.IpcReadOptions(included_fields=[names.index(one) for one in wanted])
        if is_file:
            reader = pa.ipc.open_file(file, options=options)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(file, options=options))
        for batch in batches:
            batch.validate(full=True)  # offsets of a damaged file would lead anywhere
            for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
                rows = batch.slice(start, _ROWS_PER_BATCH).to_pydict()
                yield from column.rows(rows, wanted, steps)


TEXT_TABLES: dict[str, Callable[[Iterator[str], Path, Column], Iterator[Row]]] = {
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".tsv": tsv_rows,
}
BINARY_TABLES: dict[str, Callable[[Path, Column, Path], Iterator[Row]]] = {
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
    ".feather": arrow_rows,
}
TABLES = (*TEXT_TABLES, *BINARY_TABLES)


def _listed(names: Iterable[str]) -> str:
    def shown(name: str) -> str:
        is_plain = name.isprintable() and name.strip() == name and 0 < len(name) < 100
        return name if is_plain else shortened(name)

    return join_words(map(shown, names), maximum=8)


def other_keys(names: Iterable[str]) -> str:
    """Return which key is for columns whose names are usual for conversations or token ids, as the end of a message."""
    names = [*names]
    keys = {name: _KEYS[name] for name in names if name in _KEYS}
    keys |= {name: "messages" for name, before in _BEFORE.items() if name in names and {*before} - {*SYSTEM} & {*names}}
    return "".join(f"; or data.{key}_column to {name}" for name, key in keys.items())


_OF_SLACK = {f"{name}.json": "members" for name in ("channels", "groups", "dms", "mpims")} | {"users.json": "profile"}
"""{what lists the channels or the people in Slack's export: a key in it}."""
_KEYS = {"messages": "messages", "conversations": "messages", "conversation": "messages", "input_ids": "ids"}
