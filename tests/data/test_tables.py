"""Rows of local tables: the wanted column as it is written, whatever the others hold; anything else is one line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hfgolf.data.documents as documents_module
from hfgolf.data.corpus import load_corpus
from hfgolf.system.errors import UserError

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def read(write, contents):
    """Return a function that writes a file and returns the content of its rows, or the line that refuses it."""

    def read_rows(name: str, content: bytes | str, **settings: Any) -> Any:
        path = write(name, content)
        try:
            return contents(path, **settings)
        except UserError as error:
            assert "\n" not in str(error)
            return str(error).replace(path, name)

    return read_rows


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.csv", "text,n\n007,1\nTrue,2\n1.50,3\nNA,4\nnull,5\n,6\n", ["007", "True", "1.50", "NA", "null"]),
        ("a.csv", 'n,text\r\n1,"a, ""b""\r\nc"\r\n\r\n2,d e\r\n', ['a, "b"\r\nc', "d e"]),
        ("a.csv", "text,label,\nfirst,pos,\nsecond,neg,\n", ["first", "second"]),
        ("a.csv", "text\n5' 10\" tall\nlast", ["5' 10\" tall", "last"]),
        ("a.csv", "\ufefftext,label\none,1\n", ["one"]),
        ("a.csv", "text,a\nx\x0by\u2028z\x1c\x85,1\n", ["x\x0by\u2028z\x1c\x85"]),
        (
            "a.tsv",
            'text\tn\n"Hello," she said.\tpos\n"open\t\n\n5" x\tneg\r\n"Hi"\t\n"a" "b"\t""\n',
            ['"Hello," she said.', '"open', '5" x', '"Hi"', '"a" "b"'],
        ),
        ("a.tsv", "\ufeffid\ttext\n1\t007\n2\t\n3\tNA\n", ["007", "NA"]),
        ("a.jsonl", '\ufeff{"text": "one"}\n\n  {"text": "two"}', ["one", "two"]),
        ("a.json", '[\n {"text": "one"},\n {"text": null},\n {"text": "two"}]\n', ["one", "two"]),
        ("a.json", '{\n "text": "one"\n}\n{"text":"two"} {"text":"three"}', ["one", "two", "three"]),
        ("a.json", '{"version": 1, "data": [{"text": "one"}, {"n": 1}, {"text": "two"}]}', ["one", "two"]),
        ("a.json", '{"train": [{"text": "one"}], "labels": [{"name": "x"}], "n": []}', ["one"]),
        ("a.json", '{"text": "whole", "data": [{"text": "part"}]}', ["whole"]),
        ("a.csv", 'text;label\n"a; ""b""\n";1\nb, c;2\n', ['a; "b"\n', "b, c"]),
        ("a.csv", "\nlabel\ttext\n1\tb, c; d\n", ["b, c; d"]),
        ("a.csv", "id;x,text\n1,a\n2,b;c\n", ["a", "b;c"]),
        ("a.csv", "\ufeffsep=;\r\nid;text\r\n1;a, b\r\n", ["a, b"]),
        ("a.jsonl", '{"text": "a", "n": NaN, "d": "\\ud800"}\n', ["a"]),
        ("a.jsonl", '{"text": "\\ud83c\\udf0d \\u0000 \\r"}\n', ["🌍 \0 \r"]),
        ("a.jsonl", '{"x": 1}\n{"text": "a"}\n{"text": null}\n{}\n', ["a"]),
        ("a.jsonl", '{"text": "a", "id": 1, "source": "b", "model": "c", "messages": [{"role": "user"}]}\n', ["a"]),
    ],
)
def test_texts_are_read_as_they_are_written(read, name, content, texts):
    assert read(name, content) == texts == read(name + ".gz", gzip.compress(content.encode()))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("t.csv", "text,label\nfirst,pos,\nsecond,neg,\n", "row 0 (line 2) has 3 fields, but the header has 2"),
        ("t.csv", "text,label\nfirst,pos\nsecond, really,neg\n", "row 1 (line 3) has 3 fields, but the header has 2"),
        ("t.csv", 'text,label\n"a\n\nb",pos\n\nsecond\n', "row 1 (line 6) has 1 field, but the header has 2"),
        ("t.csv", "sep=;\nn;text\n1;a;b\n", "row 0 (line 3) has 3 fields, but the header has 2"),
        ("t.csv", "text\nfirst,\n", "row 0 (line 2) has 2 fields, but the header has 1"),
        ("t.csv", 'text,label\n"Hello, she said,pos\n"next",neg\n', "row 0 (line 2) cannot be read: something follows"),
        ("t.csv", 'text,label\nok,pos\n"open,pos\nnext,neg\n', "row 1 (line 3) cannot be read: a double quote opens"),
        ("t.csv", "text;label\na;pos\nb;c;neg\n", "row 1 (line 3) has 3 fields, but the header has 2; put a field"),
        ("t.csv", 'text\tlabel\n"a" b\tpos\n', "something follows a closing double quote"),
        ("t.csv", "body;n\na;b\n", "its first line holds body, n. If that is the header, set data.text_column to one"),
        ("t.csv", "Once upon a time,pos\nThere was,neg\n", "no header, set it to the column's number, from 0."),
        ("t.csv", f"{'long ' * 999},b\n", "its first line holds 'long long l"),
        ("t.csv", f"b,{'long ' * 99}\nb,{'long ' * 99}\n", "number, from 0, as in --data.text_column 1."),
        ("t.csv", "id, text\n1, hello\n", "one of them, as in --data.text_column ' text'; if there is no header, set"),
        ("t.csv", "Text,other\na,a long one\n", "one of them, as in --data.text_column Text; if there is no header"),
        ("t.csv", "Review text,b\na long review,b\n", "one of them, as in --data.text_column 'Review text'; if there"),
        ("t.csv", "instruction,output\na,b\n", "data.text_column instruction; or data.messages_column to output; if"),
        ("t.csv", "text,label,text\na,b,c\n", "has two columns 'text'"),
        ("t.csv", "text,label\ra,pos\rb,neg\r", "the header cannot be read: no line feed follows a carriage return"),
        ("t.csv", "text,label\nna\u00efve,b\n".encode("latin-1"), "(byte 13: invalid continuation byte)"),
        ("t.tsv", "text\tlabel\na\tb\tc\n", "row 0 (line 2) has 3 fields, but the header has 2"),
        ("t.tsv", "text,label\na,b\n", "has one column here, text,label; divide it with commas in .csv, with tabs in"),
        ("t.csv", "id|text\n1|a, b\n", "has one column here, id|text; divide it with commas"),
        ("t.tsv", 'n\ttext\n1\ta\n2\t"say ""b"""\n', "row 1 (line 3) is in double quotes as in CSV, which would be"),
        ("t.tsv", '"n"\t"text"\n"1"\t"a"\n', "the header is in double quotes as in CSV, which would be text here"),
        ("t.jsonl", '{"text": "a"}\n{"text": "b"\n{"text": "c"}\n', "row 1 (line 3) cannot be read: Expecting ','"),
        ("t.jsonl", '{"text": "a"}\n{"text": "b', "row 1 (line 2) cannot be read: Unterminated string"),
        ("t.jsonl", '{"text": "a"}\nnot json\n', "row 1 (line 2) cannot be read: Expecting value"),
        ("t.jsonl", '{"text": "a"}\n"b"\n', "row 1 (line 2) cannot be read: it is 'b', not an object with columns"),
        ("t.jsonl", '{"text": "a"}\n\n{"text": 7}\n', "row 1 (line 3): 'text' holds a number, not text"),
        ("t.jsonl", '{"text": "a", "text": "b"}\n', "row 0 (line 1) cannot be read: 'text' appears twice in an object"),
        ("t.jsonl", '\n{"text": "a", "d": ' + "9" * 9999 + "}\n", "row 0 (line 2) cannot be read: Exceeds the limit"),
        ("t.jsonl", '{"text": "half \\ud83d"}\n', "row 0 (line 1): 'text' holds half of a surrogate pair"),
        ("t.jsonl", '{"text": "a", "x": ' + DEEP + "}\n", "row 0 (line 1) cannot be read: it is nested too deeply"),
        ("t.json", '{"data": [{"body": "a"}]}', "has no column 'text'; set data.text_column to one of: body."),
        ("t.json", '{"a": [{"text": "x"}], "b": [{"text": "y"}]}', "holds several lists of rows (a, b); write one of"),
        ("t.json", '{"data": [{"text": "x"}, "y"]}', "has no column 'text'; set data.text_column to one of: data."),
        ("t.json", '[{"text": "a"} {"text": "b"}]', "row 1 (line 1) cannot be read: a comma or the end of the array"),
        ("t.json", '[{"text": "a"}, ', "row 1 (line 1) cannot be read: "),
        ("t.json", '[{"text": "a"}]\n[', "row 1 (line 2) cannot be read: something follows the array"),
        ("t.json", " [ ] ", "has no row with text in column 'text'; remove it or add rows."),
        ("t.json", '["a", "b"]', """it is 'a', not an object with columns; write each text as {"text": "..."}."""),
        ("t.json", '{"text": {"0": "a", "1": "b"}}', "a dict of 0, 1, not text; write each row as an object, as"),
        ("t.json", '{"x": 1}\n' * 20_000 + '{"text": "a"}', "has no column 'text'; set data.text_column to one of: x."),
        ("t.jsonl", '{"text": [{"role": "user"}]}\n', "'text' holds a list, not text; name a column of conversations"),
        ("t.jsonl", '{"text": [1, 2]}\n', "'text' holds a list, not text; name a column of token ids by"),
        ("t.jsonl", '{"messages": [{"role": "user"}]}\n', "'text'; set data.messages_column to messages."),
        ("t.json", '[{"input_ids": [1], "n": 1}]', "data.text_column to one of: n; or data.ids_column to input_ids."),
        ("channels.json", '[{"id": "C1", "members": []}]', "it is the list of a Slack export, not its messages;"),
    ],
)
def test_what_is_not_in_the_dialect_is_refused_with_its_row(read, name, content, problem):
    line = read(name, content)
    assert isinstance(line, str) and problem in line and line.startswith(name)


@pytest.mark.parametrize(
    ("name", "content", "column", "found"),
    [
        ("a.csv", "one,pos\ntwo,neg\n", "0", ["one", "two"]),
        ("a.csv", 'pos;"one; 1"\nneg;two, 2\n', "1", ["one; 1", "two, 2"]),
        ("a.tsv", '"one\tpos\ntwo"\tneg\n', "0", ['"one', 'two"']),
        ("a.csv", "one\ntwo\n", "0", ["one", "two"]),
        ("a.csv", "0,1\none,pos\n", "0", ["one"]),
        ("a.csv", "year,2024\n1,one\n", "2024", ["one"]),
        ("a.csv", "1,one\n0,two\n", "1", "so data.text_column 1 may be the name or the place of a column; give the"),
        ("a.csv", "1;one, two\n0;three\n", "1", "has '1' in its first line (1, one, two), so data.text_column 1 may"),
        ("a.tsv", "one\t0\ntwo\t1\n", "0", "so data.text_column 0 may be the name or the place of a column"),
        ("a.csv", "one,pos\n", "2", "its first line holds one, pos."),
        ("a.csv", "one, two;pos\n", "0", "does not tell what separates its fields, of commas and semicolons; give it"),
        ("a.csv", "one,pos\ntwo\n", "0", "row 1 (line 2) has 1 field, but the first row has 2"),
    ],
)
def test_column_without_a_header_is_named_by_its_number(read, name, content, column, found):
    rows = read(name, content, text_column=column)
    assert rows == found or (isinstance(found, str) and found in rows)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv"])
def test_blocks_and_other_columns_do_not_matter(read, kind, monkeypatch):
    """Random rows, read in blocks so small that any character may be the last of one."""
    chance = random.Random(kind)
    alphabet = [*'ab "\\,:{}[]é🌍', *("\n\r\t" if kind != "tsv" else "")]
    texts = ["".join(chance.choices(alphabet, k=chance.randrange(1, 60))) for _ in range(60)]
    other: list[Any] = [None, 7, "x", {"a": [1, {"b": None}]}, [], "2024-01-01", True, 1.5e300]
    rows = [{"n": chance.choice(other), "text": text} for text in texts]
    if kind == "jsonl":
        content = "".join(json.dumps(row, ensure_ascii=chance.random() < 0.5) + "\n" for row in rows)
    elif kind == "json":
        content = json.dumps(rows, indent=1)
    elif kind == "csv":
        sink = io.StringIO()
        csv.writer(sink).writerows([["n", "text"], *([row["n"], row["text"]] for row in rows)])
        content = sink.getvalue()
    else:
        content = "n\ttext\n" + "".join(f"{number}\t{text}\n" for number, text in enumerate(texts))
    for size in (1, 7, 1 << 20):
        monkeypatch.setattr(documents_module, "BLOCK_BYTES", size)
        assert read(f"rows.{kind}", content) == texts


def test_each_row_is_checked_however_late(read):
    rows = "".join(json.dumps({"text": "word " * 2000, "x": None}) + "\n" for _ in range(1100))
    problem = "rows.jsonl, row 1101 (line 1102): 'text' holds "
    late_column = json.dumps({"text": "a", "x": {"new": 1}, "y": "new"}) + "\n"
    assert read("rows.jsonl", rows + late_column + json.dumps({"text": ["late"]}) + "\n").startswith(problem)


def arrow(table: pa.Table, is_file: bool) -> bytes:
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return sink.getvalue().to_pybytes()


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather"])
@pytest.mark.parametrize("type_", ["string", "large_string", "string_view", pa.dictionary(pa.int32(), pa.string())])
def test_binary_tables(read, kind, type_):
    texts = [None if number % 7 == 0 else f"document {number} é" for number in range(999)]
    if type_ == "string_view" and kind == "parquet":
        type_ = "string"
    others = {"n": pa.array([b"\xff"] * 999), "t": pa.array(range(999), pa.timestamp("s", "UTC"))}
    table = pa.table(others | {"text": pa.array(texts, pa.string()).cast(type_)})
    content = parquet(table) if kind == "parquet" else arrow(table, kind == "feather")
    expected = [text for text in texts if text]
    assert read(f"rows.{kind}", content) == expected == read(f"rows.{kind}.gz", gzip.compress(content))
    assert "to one of: n, t, text" in read(f"rows.{kind}", content, text_column="body")
    assert f"rows.{kind}, row 0: 'n' holds bytes, not text" in read(f"rows.{kind}", content, text_column="n")
    for end in (100, len(content) // 2, len(content) - 8):
        damaged = read(f"rows.{kind}", content[:end])
        assert (isinstance(damaged, str) and "cannot be read" in damaged) or damaged == expected  # a stream's end mark


def test_damaged_offsets_and_bytes_of_an_arrow_file_are_one_line(read):
    content = arrow(pa.table({"text": ["some text"] * 100}), is_file=False)
    place = content.index(b"some text")
    assert "UTF8" in read("rows.arrow", content[:place] + b"\xff" + content[place + 1 :])
    offsets = (9).to_bytes(4, "little") + (18).to_bytes(4, "little")
    assert "cannot be read" in read("rows.arrow", content.replace(offsets, b"\xff\xff\xff\x7f" + offsets[4:]))


FORMATS = {
    "PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "a zip archive": b"PK\x03\x04\x14\0\0\0",
    "a picture": b"\x89PNG\r\n\x1a\n\0\0",
    "sound": b"ID3\4\0\0\xff\xfb",
    "a program": b"\x7fELF\2\1\1\0",
    "gzip": gzip.compress(b"text"),
    "compressed; unpack it": b"\x04\x22\x4d\x18\x64\x40\xa7",
    "an old Office document": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
    "SQLite": b"SQLite format 3\0\x10\0",
    "a Parquet file": parquet(pa.table({"text": ["a"]})),
    "RTF": rb"{\rtf1\ansi text}".ljust(99),
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "ISO-2022-JP": "plain, then \u3053\u3093\u306b\u3061\u306f".encode("iso2022_jp"),
    "an archive of X (Twitter)": b'window.YTD.tweets.part0 = [\n{"tweet": {"full_text": "Hi"}}]',
    "mail with encoded parts": b"From a@b Sat\nSubject: x\nContent-transfer-encoding: BASE64\n\nSGVsbG8=\n",
    "UTF-16 without a byte order mark": "plain text".encode("utf-16-le"),
    "a tar archive": b"a.txt".ljust(257, b"\0") + b"ustar\0",
}


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_not_text_is_named(read, kind):
    name = "a.csv" if kind == "PDF" else "a"
    line = read(name, FORMATS[kind] if kind.startswith("UTF-") else FORMATS[kind].ljust(99, b"\n"))
    assert isinstance(line, str) and f"{name} is " in line and kind in line


def test_office_documents_are_named_by_their_ending(read):
    kinds = {"docx": "Word", "epub": "EPUB", "xlsx": "Excel sheet", "odt": "OpenDocument", "pptx": "PowerPoint"}
    for ending, kind in (kinds | {"pages": "a Pages document, not text; save it as plain text"}).items():
        assert kind in read(f"a.{ending}", b"PK\x03\x04\x14\0\0\0")


def test_tensors_in_a_zip_archive_are_not_called_an_archive_of_text(read, tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "made.pt")
    np.savez(tmp_path / "made.npz", weight=np.zeros(3))
    for name in ("made.pt", "made.npz"):
        assert "holds a program's numbers or objects, not text" in read(f"a_{name}", (tmp_path / name).read_bytes())


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        ("Café crème, ".encode("latin-1") * 9, "Latin-1, with words such as 'Café'; set data.encoding latin-1."),
        ("“quoted” text ".encode("cp1252") * 9, "words such as '“quoted”'; set data.encoding windows-1252."),
        (b"one\xa0hundred and one " * 9, "with words such as 'one\\xa0hundred'; set data.encoding latin-1."),
        ("привет мир".encode("koi8-r"), "find its encoding"),
        ("Grüße aus Köln".encode("cp850"), "find its encoding, such as cp850"),
        ("é".encode() * 50 + b"\xff" + "é".encode() * 50, "most of it is UTF-8"),
        ("é".encode() * 50 + b"\xc3", "its last character is cut"),
        (b"ok\xff rest", "a.txt is not UTF-8 (byte 2: "),
        (b"\xef\xbb\xbfok\xff rest", "a.txt is not UTF-8 (byte 5: "),
        ("é".encode() * 600_000 + b"\xe4", "a.txt is not UTF-8 (byte 1200000: "),
        (b"\xe4\xbd", "a.txt is not UTF-8 (byte 0: "),
        (b"\0\1\xff\0\0\0" * 20, "it is probably not text"),
        (bytes(range(256)), "it is probably not text"),
        ("plain text".encode("utf-16-be"), "without a byte order mark, not UTF-8; set data.encoding utf-16-be."),
        *(
            (text.encode(f"utf-16-{order}"), f"without a byte order mark, not UTF-8; set data.encoding utf-16-{order}.")
            for text in ("Привет, мир", "สวัสดี ชาว", "吾輩は猫である。名前はまだ無い。" * 9, "ひらがな、カタカナ。" * 9)
            for order in ("le", "be")
        ),
        ("text".encode("utf-16") + b"\0", "a.txt is not utf-16-le (byte 10: truncated data); restore it, or find"),
    ],
)
def test_other_encodings_and_damaged_bytes_are_named(read, content, advice):
    assert advice in read("a.txt", content)


SENTENCE = "Ein Mädchen, 3 € für Café; 我"


@pytest.mark.parametrize("size", [7, 1 << 20])
@pytest.mark.parametrize(
    ("text", "written", "named"),
    [
        *((SENTENCE, encoding, None) for encoding in ("utf-8-sig", "utf-16", "utf-32")),
        *((SENTENCE, encoding, "latin-1") for encoding in ("utf-8", "utf-8-sig", "utf-16")),
        *((SENTENCE, encoding, encoding) for encoding in ("gb18030", "utf-16-le", "utf-32-be", "UTF-8", "utf_16")),
        (SENTENCE[:-1], "windows-1252", "windows-1252"),
        ("Привет, мир", "koi8-r", "koi8-r"),
        ("こんにちは。" * 99, "shift_jis", "shift_jis"),
        ("\0 ASCII " * 99 + "é", "utf-8", "latin-1"),
    ],
)
def test_text_is_read_by_its_mark_as_utf_8_or_in_the_named_encoding(read, monkeypatch, text, written, named, size):
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", max(size, 0 if text.isascii() else 4))
    content = ("plain words\n" * 9 + text).encode(written)
    if written.lower() == "utf-8" and size == 7:
        return  # a block of seven bytes does not tell UTF-8 from Latin-1
    assert read("a.txt", content, encoding=named) == ["plain words\n" * 9 + text]
    table = f'text,n\n"{text}",1\n'
    assert read("a.csv.gz", gzip.compress(table.encode(written)), encoding=named) == [text]


@pytest.mark.parametrize(
    ("content", "encoding", "problem"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "latin-1", "is a picture"),
        (b"caf\xe9 \0\1\2", "latin-1", "has a zero byte, so it is not text in latin-1"),
        (b"caf\xe9 \x81", "windows-1252", "is not windows-1252 (byte 5: character maps to <undefined>); restore it"),
        ("我".encode() * 9 + b"\xff", None, "most of it is UTF-8, so these bytes are damaged"),
        ("我".encode() * 9 + b"\xff", "latin-1", "is not UTF-8 (byte 27: invalid start byte); most of it is"),
        (b"c\0\xe9\0f", "utf-16-le", "is not utf-16-le (byte 4: truncated data)"),
    ],
)
def test_what_is_not_in_the_named_encoding_is_refused(read, content, encoding, problem):
    assert problem in read("a.txt", content, encoding=encoding)


NOT_ASCII = ["", "hex", "utf-7", "iso2022_jp", "hz", "cp037", "punycode", "no such", "idna", "unicode_escape"]


@pytest.mark.parametrize("name", NOT_ASCII)
def test_encodings_in_which_ascii_is_not_ascii_are_refused(files_config, name):
    with pytest.raises(UserError, match=r"data\.encoding: .* is not allowed; allowed: an encoding such as latin-1"):
        files_config("a.txt", encoding=name)


def test_another_encoding_is_another_corpus(write, files_config, contents):
    path = write("a.txt", b"caf\xe9")
    assert contents(path, encoding="latin-1") == ["café"] and contents(path, encoding="cp1251") == ["cafй"]
    identities = [load_corpus(files_config(path, encoding=name)).identity for name in (None, "latin-1", "cp1251")]
    assert len({json.dumps(identity) for identity in identities}) == 3


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_byte_order_mark_is_no_text(read, name):
    content = "\ufefftext \ufeff inside".encode()
    pack = gzip.compress if name.endswith("gz") else bytes
    assert read(name, pack(content)) == ["text \ufeff inside"]
    assert f"{name} has no text in it" in read(name, pack(b"\xef\xbb\xbf"))


def test_text_that_begins_like_another_format_is_text(read):
    texts = [
        "GIF89a is a format",
        "ID3 is an algorithm",
        "PK",
        "PAR1 and PAR2",
        "\0 zero",
        "BZh91",
        "a\0b\0 but not all",
        "name\0" * 99,
        "letters\0" * 99,
        "Subject: a word\n\nSend it with Content-Transfer-Encoding: base64\n",
        "from email import message\n\nContent-Transfer-Encoding: base64\n",
        "From a@b Sat\nContent-Transfer-Encoding: 8bit\n\nPlain, with an escape: \x1b[1m$B\n",
        "version https://example.org",
    ]
    for text in texts:
        assert read("a.txt", text) == [text]


@pytest.mark.parametrize("content", [bytes(999), b"text" * 999 + bytes(1 << 20), b"text" * (1 << 20) + bytes(3 << 20)])
def test_zeros_that_a_crash_leaves_are_no_text(read, content):
    assert "a.txt is mostly zero bytes before byte " in read("a.txt", content)
    assert "a.csv is mostly zero bytes before byte " in read("a.csv", content)


def test_a_bomb_that_fills_the_disk_is_told_as_one(read, monkeypatch):
    def fill(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", fill)
    line = read("bomb.parquet.gz", gzip.compress(b"PAR1"))
    assert "bomb.parquet.gz expands to more than" in line and "No space left on device" in line


def test_a_row_without_an_end_is_refused_before_memory_ends(read, monkeypatch):
    monkeypatch.setattr("hfgolf.data.tables.MAX_ROW_CHARACTERS", 5000)
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 1000)
    assert "longer than 5,000" in read("a.jsonl", '{"text": "' + "a" * 50_000)
    assert "more than 5,000" in read("a.csv", "text\n" + "a" * 50_000)
    assert "field larger than field limit (5000)" in read("a.csv", 'text\n"' + "a\n" * 50_000)


_READ_MEMORY = """
import resource, sys
import pyarrow.parquet
from pathlib import Path
from hfgolf.data.tables import Column, parquet_rows
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(len(value) for _, value, _ in parquet_rows(path, Column("text_column", "text"), path)) == 60_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_row_group_is_read_in_bounded_memory(tmp_path):
    chance = random.Random(0)
    texts = [chance.randbytes(1500).hex() for _ in range(20_000)]  # 60 MB, in which nothing repeats
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=10**6)
    command = [sys.executable, "-c", _READ_MEMORY, str(tmp_path / "a.parquet")]
    added = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert added * (1 if sys.platform == "darwin" else 1024) < 30e6
