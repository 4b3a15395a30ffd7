"""Data as people have it: folders, saved datasets, archives, nested columns and URLs of fsspec."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import logging
import lzma
import re
import stat
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from test_corpus import fails, read

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data import corpus as corpus_module
from hfgolf.data.corpus import load_corpus
from hfgolf.data.files import ARCHIVES, KNOWN, TEXTS
from hfgolf.data.token_cache import load_tokens
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def train_on(write, files_config):
    """Return a function that builds a DataSection with the given training files and one of validation."""
    val = write("../val.txt", "validation")
    return lambda *files, **settings: files_config(*map(str, files), val_files=[val], **settings)


@pytest.fixture
def documents(train_on, tmp_path):
    """Return a function that returns the documents to train on in the given files."""
    return lambda *files, **settings: read(train_on(*files, **settings), tmp_path)["train"]


@pytest.fixture
def refusal(train_on, tmp_path):
    """Return a function that returns the one line that refuses the given files."""
    return lambda *files, **settings: fails(train_on(*files, **settings), tmp_path)


def zipped(members: dict[str, bytes | str]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return sink.getvalue()


def test_folder_is_its_files_of_known_kinds(tmp_path, write, train_on, documents):
    write("b/rows.jsonl.gz", gzip.compress(b'{"text": "row"}\n'))
    write("b/page.html.xz", lzma.compress(b"page"))
    write("a.txt", "first")
    write("c.zip", zipped({"in.md": "zipped"}))
    for name, content in {"cat.png": b"\x89PNG", "empty.txt": b"", ".hidden.txt": b"no", ".git/x.txt": b"no"}.items():
        write(name, content)
    assert documents(tmp_path / "text") == ["first", "zipped", "page", "row"]
    names = [name for name, _, _ in load_corpus(train_on(tmp_path / "text")).identity["files"]]
    assert names == ["a.txt", "c.zip", "b/page.html.xz", "b/rows.jsonl.gz"]


def test_folder_is_without_runs_and_the_token_cache(tmp_path, write, documents):
    write("a.txt", "text")
    for name in ("config.yaml", "metadata.json", "report.md", "model/README.md"):
        write(f"runs/small/{name}", "written by a run")
    write("cache/hashes.json", "{}")
    cache = str(tmp_path / "text" / "cache")
    assert documents(tmp_path / "text", cache_dir=cache) == ["text"]


def test_folder_without_known_kinds_is_one_line(tmp_path, write, refusal):
    write("a.log", b"text")
    assert "holds no file of a known kind (docs/data.md" in refusal(tmp_path / "text")
    write("book.pdf", b"%PDF-1.7")
    line = "holds no text: book.pdf is a PDF, not text; convert it with `pdftotext`"
    assert line in refusal(tmp_path / "text")


def test_source_tree_is_its_sources_and_the_cells_of_its_notebooks(tmp_path, write, documents):
    documented = (ROOT / "docs" / "data.md").read_text().partition("A folder stands for")[2].partition("\n\n")[0]
    assert {*re.findall(r"\.\w+", documented)} >= {*TEXTS, *ARCHIVES}
    for number, ending in enumerate(TEXTS):
        write(f"src/{number:02}{ending.upper()}", ending if ending != ".ipynb" else NOTEBOOK)
    texts = documents(tmp_path / "text")
    assert texts == ["# A\n\nb\n\nprint(1)" if ending == ".ipynb" else ending for ending in TEXTS]


def test_tables_without_the_column_are_skipped_in_much_text_but_not_if_they_are_named(
    tmp_path, write, train_on, documents, refusal, caplog
):
    write("a.py", code := "code " * 99)
    write("package.json", '{"name": "x"}')
    write("tsconfig.json", "{ // comment\n}")
    write("lock.json", '{"packages": [{"name": "a"}, {"name": "b"}], "dev": [{"name": "c"}], "hash": 1}')
    write("b/c.json", '["text"]')
    write("b/c.csv", "a;b\n1;2\n")
    write("b/d.csv.gz", gzip.compress(b"n\n1\n"))
    folder, chat = tmp_path / "text", '{"messages": [{"role": "assistant", "content": "a"}]}\n'
    with caplog.at_level(logging.INFO, "hfgolf"):
        assert documents(folder) == [code]
    line = "data.files: skipped 6 files without a column 'text': lock.json, package.json, tsconfig.json and 3 more"
    assert line in caplog.messages
    archive = write("../b.tar", tarred({"a.py": code, "p.json": "{}", "q.json": "[1]"}))
    assert documents(archive) == [code]
    load_tokens(train_on(folder), TokenizerSection(kind="byte"))
    for name in ("package.json", "tsconfig.json", "b/c.json", "b/c.csv"):
        with pytest.raises(UserError, match=name):  # and not from the cache of the folder
            load_tokens(train_on(folder, folder / name), TokenizerSection(kind="byte"))
    write("broken.jsonl", '{"text": "a"}\n{"text": 7}\n')
    assert "broken.jsonl, row 1 (line 2): 'text' holds a number" in refusal(folder)
    write("broken.jsonl", chat)
    for name in ("package.json", "tsconfig.json", "lock.json", "b/c.json", "b/c.csv", "b/d.csv.gz"):
        (folder / name).unlink()
    (found,) = load_corpus(train_on(folder, messages_column="messages").replace(val_files=[]))._documents(tmp_path)
    assert found[2] == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("b.jsonl", '{"body": "a"}\n'),
        ("b.json", '[{"body": "a"}]'),
        ("b.json", '{"body": "a"}\n{"body": "b"}'),
        ("b.json", '{"data": [{"body": "a"}, {"body": "b"}]}'),
        ("b.json", '["a", "b"]'),
        ("b.csv", "body\na\n"),
        ("b.jsonl", "not JSON"),
    ],
)
def test_tables_beside_less_text_need_the_column(tmp_path, write, refusal, name, content):
    """A dataset with a README does not train on its README alone."""
    write("README.md", "about")
    write(name, content)
    problem = refusal(tmp_path / "text")
    assert name in problem and ("has no column 'text'" in problem or "row 0 (line 1) cannot be read" in problem)
    archive = write("../b.zip", zipped({"README.md": "about", name: content}))
    assert f"b.zip/{name}" in refusal(archive)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"data": [{"text": "a"}, {"text": "b', "row 0 (line 1) cannot be read: Unterminated string"),
        ('[{"text": "a"', "row 0 (line 1) cannot be read: Expecting ','"),
        ('{"te', "row 0 (line 1) cannot be read: Unterminated string"),
        ("[", "row 0 (line 1) cannot be read: Expecting value"),
        ('["a", {"te', "row 1 (line 1) cannot be read: Unterminated string"),
        ('{"name": "x",\n}', "row 0 (line "),
        ('[1, {"text": "a"}]', "row 0 (line 1) cannot be read: it is 1, not an object"),
        ('[{"body": "a"}]', "has no column 'text'; set data.text_column to one of: body."),
        ('{"body": "a"}\n{"body": "b"}', "has no column 'text'; set data.text_column to one of: body."),
        ('{"data": [{"body": "a"}]}', "has no column 'text'; set data.text_column to one of: body."),
        ('{"data": [{"a": 1}, {"a": 2}], "meta": [{"b": 1}]}', "set data.text_column to one of: data, meta."),
        ('{"name": "x", "files": [{"a": 1}]}', None),
        ('{\n  "a": {\n    // comment\n  }\n}', None),
        ("{name: 1}", None),
        ("[1, 2]", None),
    ],
)
def test_json_that_is_damaged_or_has_other_rows_is_an_error_in_much_text_too(
    tmp_path, write, documents, refusal, content, problem
):
    write("a.md", about := "about " * 99)
    write("b.json", content)
    if problem is None:
        assert documents(tmp_path / "text") == [about]
    else:
        line = refusal(tmp_path / "text")
        assert "b.json" in line and problem in line


CELLS = [
    {"cell_type": "markdown", "source": ["# A\n", "\nb"]},
    {"cell_type": "code", "source": "print(1)", "outputs": [{"text": "1"}]},
    {"cell_type": "code", "source": []},
]
NOTEBOOK = json.dumps({"nbformat": 4, "cells": CELLS})


def test_named_notebook_is_its_cells(write, train_on, documents, refusal):
    path = write("a.ipynb", NOTEBOOK)
    assert documents(path) == ["# A\n\nb\n\nprint(1)"]
    assert load_corpus(train_on(path)).identity["notebooks"] == "cells"
    for content in ("{", "[]", '{"worksheets": []}', '{"cells": [{"source": 1}]}'):
        assert "a.ipynb is no notebook of format 4" in refusal(write("a.ipynb", content))
    half = refusal(write("a.ipynb", NOTEBOOK.replace("# A", "\\ud800")))
    assert "a.ipynb holds half of a surrogate pair" in half


@pytest.mark.parametrize("names", ["a.csv", "a.zip", "a.tar", "a.txt", "a.txt b.txt"])
def test_documents_too_few_to_divide_by_name_are_cut(tmp_path, write, files_config, names, caplog):
    """The last characters validate. That text files are too few is known before they are read."""
    text = "word " * 100
    content = {"csv": f"text\n{text}\n", "zip": zipped({"a.txt": text}), "tar": tarred({"a.txt": text}), "txt": text}
    data = files_config(*(write(name, content[name[2:]]) for name in names.split()))
    with caplog.at_level(logging.INFO, "hfgolf"):
        found = {split: "".join(documents) for split, documents in read(data, tmp_path).items()}
    whole = text * len(names.split())
    assert found == {"train": whole[: int(0.95 * len(whole))], "val": whole[int(0.95 * len(whole)) :]}
    is_known = load_corpus(data).identity["split"] == "contiguous"
    assert is_known == ("txt" in names) != ("too few documents to divide by their names, so the end of" in caplog.text)


def test_folder_of_shards(tmp_path, write):
    ids = np.arange(100, dtype="<u2")
    for name in ("fine_train_1.bin", "fine_train_2.bin", "fine_val.bin"):
        write(name, ids.tobytes())
    write("README.md", "not a shard")
    folder = str(tmp_path / "text")
    files = {"files": [folder], "val_files": [f"{folder}/*val*"]}
    data = DataSection(source="shards", **files, cache_dir=str(tmp_path / "cache"))
    tokens = load_tokens(data, TokenizerSection(kind="byte"))
    assert (len(tokens.train), len(tokens.val)) == (200, 100)


@pytest.mark.parametrize("name", ["train.bin", "ids.npy", "val.bin.gz", "all.rar", "all.7z.gz"])
def test_what_is_not_text_does_not_become_text(write, refusal, name):
    content = np.full(8, 65, "<u2").tobytes()  # valid UTF-8: nanoGPT's characters of Shakespeare are
    path = write(name, gzip.compress(content) if name.endswith(".gz") else content)
    message = refusal(path)
    assert path in message and ("data.source shards" in message or "unpack" in message)


def test_link_is_read_by_its_own_name_and_only_once(tmp_path, write, documents, refusal):
    blob = write("../blobs/0f3a", '{"text": "row"}\n')  # the cache of the Hub
    link = tmp_path / "train.jsonl"
    link.symlink_to(blob)
    assert documents(link, blob) == ["row"]
    (tmp_path / "again.txt").symlink_to(tmp_path / "val.txt")
    assert "train split" in refusal(tmp_path / "again.txt")


@pytest.mark.parametrize("num_shards", [1, 3])
def test_saved_dataset_is_its_rows_in_order(tmp_path, documents, refusal, num_shards):
    saved = tmp_path / "sets" / "saved"
    texts = [f"document {number}" for number in range(10)]
    table = Dataset.from_dict({"text": [*texts, "filtered"]}).filter(lambda row: row["text"] != "filtered")
    table.save_to_disk(saved, num_shards=num_shards)
    (saved / "cache-0.arrow").write_bytes(b"left behind by map")
    assert documents(saved) == texts
    assert documents(saved.parent) == texts  # also in a folder of others
    (saved / f"data-00000-of-{num_shards:05}.arrow").unlink()
    assert "is missing, which" in refusal(saved)
    (saved / "state.json").write_text("{}")
    assert "state.json is damaged" in refusal(saved)


@pytest.mark.parametrize(
    ("splits", "val"),
    [(("test", "train"), "test"), (("test", "train", "validation"), "validation"), (("dev", "test", "train"), "dev")],
)
def test_saved_splits_train_and_validate_by_themselves(tmp_path, write, files_config, splits, val, caplog):
    DatasetDict({name: Dataset.from_dict({"text": [name] * 9}) for name in splits}).save_to_disk(tmp_path / "saved")
    folder = str(tmp_path / "saved")
    with caplog.at_level(logging.INFO, "hfgolf"):
        assert read(files_config(folder), tmp_path) == {"train": ["train"] * 9, "val": [val] * 9}
    assert f"data.files: {folder}: {val} validates" in caplog.messages
    named = files_config(f"{folder}/train", val_files=[f"{folder}/{val}"])
    assert load_corpus(named).identity == load_corpus(files_config(folder)).identity
    other = files_config(folder, val_files=[write("other.txt", "other")])
    assert read(other, tmp_path) == {"train": ["train"] * 9, "val": ["other"]}
    assert read(files_config(write("a.txt", "mine"), val_files=[folder]), tmp_path)["val"] == [val] * 9
    assert "name one of them" in fails(files_config(str(tmp_path)), tmp_path), "in a folder of datasets"


def test_saved_splits_without_validation_are_divided_and_without_train_refused(tmp_path, files_config):
    for name in ("train", "first"):
        DatasetDict({name: Dataset.from_dict({"text": ["a b"] * 40})}).save_to_disk(tmp_path / name)
    found = read(files_config(str(tmp_path / "train")), tmp_path)
    assert found["train"] and found["val"]
    problem = f"{tmp_path / 'first'} has no split called train; name one of its own: first."
    first = str(tmp_path / "first")
    assert f"data.files: {problem}" in fails(files_config(first), tmp_path)
    assert f"data.val_files: {problem}" in fails(files_config(first, val_files=[first]), tmp_path)


@pytest.mark.parametrize(
    ("train", "val", "unread"),
    [
        ("train.csv", "valid.csv", "test.csv"),
        ("train.csv", "test.csv", None),
        ("train-00000-of-00002.csv", "validation-00000-of-00001.csv", "test-00001-of-00003.csv"),
        ("My_Train.csv", "My_Dev.csv.gz", None),
        ("train/pos/1.csv", "test/neg/2.csv", None),
    ],
)
def test_files_that_are_called_like_splits_do_not_train(tmp_path, write, files_config, train, val, unread, caplog):
    for name, text in {train: "train", val: "val", unread or "other.csv": "other"}.items():
        content = f"text\n{text}\n".encode()
        write(f"a/{name}", gzip.compress(content) if name.endswith(".gz") else content)
    folder = tmp_path / "text/a"
    told = "; ".join([f"for validation: {val}", *([f"not read: {unread}"] if unread else [])])
    with caplog.at_level(logging.INFO, "hfgolf"):
        for found in (folder, folder / "**/*.csv*"):
            texts = read(files_config(str(found)), tmp_path)
            assert sorted(texts["train"]) == (["train"] if unread else ["other", "train"]) and texts["val"] == ["val"]
    assert f"data.files: by their names, {told}" in caplog.messages
    other = files_config(str(folder), val_files=[write("other.txt", "mine")])
    found = read(other, tmp_path)
    assert "val" not in found["train"] and found["val"] == ["mine"]
    named = files_config(str(folder / train), str(folder / val), val_files=other.val_files)
    assert read(named, tmp_path)["train"] == ["train", "val"]
    archive = write("b.zip", zipped({name: "text\na\n" for name in (train, val.removesuffix(".gz"))}))
    assert read(files_config(archive, val_files=[str(folder / val)]), tmp_path)["train"] == ["a"]
    assert read(files_config(str(folder / train), val_files=[archive]), tmp_path)["val"] == ["a"] * 2


@pytest.mark.parametrize(
    "names", ["train.py test.py", "my_train.txt unit_test.txt", "test.txt dev.txt", "train/a.txt train/a.py test/a.txt"]
)
def test_files_that_are_not_the_splits_of_one_set_train(tmp_path, write, documents, names):
    for name in names.split():
        write(f"a/{name}", name)
    assert sorted(documents(tmp_path / "text/a")) == sorted(names.split())


def tarred(members: dict[str, bytes | str], mode: str = "w", format: int = tarfile.PAX_FORMAT) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode, format=format) as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            content = content.encode() if isinstance(content, str) else content
            header.size, header.type = len(content), tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(header, io.BytesIO(content))
    return sink.getvalue()


ARCHIVES_WRITTEN = {
    "all.zip": zipped,
    "all.tar": tarred,
    **{f"all.{dot}{kind}": partial(tarred, mode=f"w:{kind}") for dot in ("tar.", "t") for kind in ("gz", "bz2", "xz")},
    "all.tar.zst": lambda members: pa.compress(tarred(members, format=tarfile.GNU_FORMAT), "zstd", asbytes=True),
}


@pytest.mark.parametrize("archive", ARCHIVES_WRITTEN)
def test_members_of_an_archive_are_documents(tmp_path, write, train_on, documents, caplog, awkward, archive):
    members = {
        "b/a.txt": awkward,
        "b/": "",
        "rows.jsonl": '{"text": "one"}\n{"text": "two"}\n',
        "table.tsv.bz2": bz2.compress(b"text\tn\nthree\t1\n"),
        "cat.png": b"\x89PNG",
        "empty.txt": b"",
        "__MACOSX/b/._a.txt": b"\0",
    }
    path = write(archive, ARCHIVES_WRITTEN[archive](members))
    with caplog.at_level(logging.INFO, "hfgolf"):
        assert documents(path) == [awkward, "one", "two", "three"]
    assert f"data.files: {path}: 3 files read; skipped: 1 other kind (cat.png)" in caplog.messages
    corpus = load_corpus(train_on(path))
    names = [name for name, _, _ in corpus._documents(tmp_path)]
    rows = [f"{archive}/rows.jsonl#0", f"{archive}/rows.jsonl#1", f"{archive}/table.tsv.bz2#0"]
    assert names == [f"{archive}/b/a.txt", *rows, "val.txt"]
    assert load_corpus(train_on(path, text_column="n")).identity != corpus.identity


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_members_are_never_files_of_this_machine(tmp_path, write, documents, pack):
    outside = write("secret.parquet", b"not read")
    table = tmp_path / "row.parquet"
    Dataset.from_dict({"text": ["inside"]}).to_parquet(table)
    members = {outside: table.read_bytes(), "../../up.txt": "up", "/abs.txt": "absolute", "a.txt": "old"}
    ending = "zip" if pack is zipped else "tar"
    path = write(f"all.{ending}", pack(members))
    assert documents(path) == ["inside", "up", "absolute", "old"]
    only = write(f"only.{ending}", pack({"../a.txt": "a", "x/./b.txt": "b", "../.c.txt": "c"}))
    assert documents(only) == ["a", "b"]


def test_link_in_a_zip_is_no_text(write, train_on, documents):
    def packed(*links: str) -> str:
        sink = io.BytesIO(zipped({"a.txt": "a", "b.md": "b"}))
        with zipfile.ZipFile(sink, "a") as archive:
            for name in links:
                link = zipfile.ZipInfo(name)
                link.external_attr = (stat.S_IFLNK | 0o777) << 16
                archive.writestr(link, "docs/target.md")
        return write("a.zip", sink.getvalue())

    assert "member_kinds" not in load_corpus(train_on(packed())).identity
    path = packed("link.md", "link.css")
    assert documents(path) == ["a", "b"]
    assert load_corpus(train_on(path)).identity["member_kinds"] == ["link"]


def test_archive_is_another_text_only_if_other_members_of_it_are_read(write, train_on, monkeypatch):
    members = {"a.txt": "a", "b.md": "b", "c.dat": "c"}
    for others, kinds in (({}, None), ({"d.css": "d", "e.YAML": "e"}, [".css", ".yaml"]), ({"../d.txt": "d"}, ["./"])):
        path = write("a.zip", zipped(members | others))
        assert load_corpus(train_on(path)).identity.get("member_kinds") == kinds
    assert "member_kinds" not in load_corpus(train_on(write("c.zip", zipped({"d.css": "d"})))).identity
    tar = train_on(write("a.tar", tarred(members)))
    before, tokens = load_corpus(tar).identity, load_tokens(tar, TokenizerSection(kind="byte"))
    monkeypatch.setattr(corpus_module, "KNOWN", (".dat", *KNOWN))
    assert load_corpus(tar).identity == before
    assert load_tokens(tar, TokenizerSection(kind="byte")).path != tokens.path


def test_webdataset_shards_are_their_texts(write, documents, caplog):
    samples = {
        "./a/0.txt": "zero", "./a/0.json": '{"text": "about"}', "./a/0.jpg": b"\xff\xd8",
        "a/1.caption.txt": "one", "a/1.caption.json": "{}", "b/0.json": '{"text": "alone"}',
        "c.d/2.input.txt": "two", "c.d/2.output.md": "too", "c.d/2.json": "{}", "c.json": '{"text": "c"}',
    }  # fmt: skip
    shards = [write(f"{number}.tar", tarred(samples)) for number in range(2)]
    with caplog.at_level(logging.INFO, "hfgolf"):
        assert documents(*shards) == ["zero", "one", "alone", "two", "too", "c"] * 2
    about = "3 about a text (a/0.json, a/1.caption.json, c.d/2.json)"
    skipped = f"6 files read; skipped: 1 other kind (a/0.jpg), {about}"
    assert f"data.files: {shards[0]}: {skipped}" in caplog.messages


def test_json_beside_text_in_a_tar_is_read_if_it_may_hold_rows(tmp_path, write, train_on, documents, refusal):
    rows = '[{"text": "one"}, {"text": "two"}]'
    members = {
        "a.md": "card", "a.json": rows, "v1.0-b.txt": "notes", "v1.5-b.json": '{"text": "other"}', "c.md": "c",
        "c.json": f'{{"data": {rows}}}', "d.md": "d", "d.json.gz": gzip.compress(b'{"text": "about"}'), "e.md": "e",
        "e.json": '{"text": "three"}\n{"text": "four"}',
    }  # fmt: skip
    path = write("a.tar", tarred(members))
    found = ["card", "one", "two", "notes", "other", "c", "one", "two", "d", "e", "three", "four"]
    assert documents(path) == found
    chat = write("b.tar", tarred({"a.md": "card", "a.json": '{"messages": [{"role": "assistant", "content": "b"}]}'}))
    (found,) = load_corpus(train_on(chat, messages_column="messages").replace(val_files=[]))._documents(tmp_path)
    assert found[2] == [{"role": "assistant", "content": "b"}]
    cut = write("c.tar", tarred({"a.md": "card " * 99, "a.json": '{"text": "b'}))
    assert "a.json, row 0 (line 1) cannot be read: Unterminated" in refusal(cut)


def test_tar_reads_the_last_of_a_name_links_long_names_and_joined_archives(write, documents):
    long = "d/" * 90 + "long.txt"
    first, second = tarred({"a.txt": "old", long: "long"}), tarred({"a.txt": "new"}, format=tarfile.GNU_FORMAT)
    link = tarfile.TarInfo("link.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    path = write("all.tar", first + link.tobuf() + second)
    assert documents(path) == ["long", "new"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda tar: tar[:-10_240], "it is cut: the zeros at its end are missing"),
        (lambda tar: tar[:900], "unexpected end of data"),
        (lambda tar: tar[:700] + b"\1" * 600 + tar[1300:], "a header is damaged"),
        (lambda tar: tar + b"more" * 300, "a header is damaged"),
        (lambda tar: b"plain text\n" * 99, "a header is damaged"),
    ],
)
@pytest.mark.parametrize("pack", ["", ".gz"])
def test_damaged_tar_is_one_line(write, refusal, damage, problem, pack):
    content = damage(tarred({f"{number}.txt": "some text " * 50 for number in range(20)}))
    path = write(f"a.tar{pack}", gzip.compress(content) if pack else content)
    assert problem in refusal(path)


def test_only_member_of_an_archive_may_have_any_name(write, documents, refusal):
    assert documents(write("enwik8.zip", zipped({"enwik8": "<page>"}))) == ["<page>"]
    assert "data.source shards" in refusal(write("t.zip", zipped({"t.bin": b"AA"})))
    inner = zipped({"a.txt": "a"})
    assert "in.zip is an archive in an archive" in refusal(write("o.zip", zipped({"in.zip": inner})))


@pytest.mark.parametrize(("name", "end"), [("cut.zip", -30), ("none.zip", 3), ("cut.txt.bz2", -9), ("cut.json.xz", -9)])
def test_damaged_archive_is_one_line(write, refusal, name, end):
    text = b'{"text": "one"}\n' * 99
    packed = {".zip": zipped({"a.txt": text}), ".bz2": bz2.compress(text), ".xz": lzma.compress(text)}
    path = write(name, packed[Path(name).suffix][:end])
    message = refusal(path)
    assert path in message and "check the file" in message


def test_damaged_member_is_one_line(write, refusal):
    content = zipped({"a.txt": "one text " * 99, "b.txt": bytes(range(256)) * 4})
    place = content.index(b"a.txt") + 10
    path = write("bad.zip", content[:place] + b"\0\0\0\0" + content[place + 4 :])
    message = refusal(path)
    assert f"{path}/a.txt cannot be read" in message
    none = write("none.zip", zipped({"a.png": b"1", "b.png": b"2"}))
    assert "holds no file of a known kind" in refusal(none)


NESTED: list[dict[str, Any]] = [
    {"message": {"content": "a"}, "conversation": [{"text": "x"}, {"text": "b"}], "dotted.name": "c"},
    {"message": None, "conversation": [{"text": "y"}], "dotted.name": None},
    {"message": {"content": "d"}, "conversation": [], "dotted.name": "e"},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "disk"])
@pytest.mark.parametrize(
    ("column", "texts"),
    [("message.content", "ad"), ("conversation.0.text", "xy"), ("conversation.1.text", "b"), ("dotted.name", "ce")],
)
def test_nested_columns(tmp_path, documents, kind, column, texts):
    path, table = tmp_path / f"rows.{kind}", Dataset.from_list(NESTED)
    {"jsonl": table.to_json, "parquet": table.to_parquet, "disk": table.save_to_disk}[kind](path)
    assert documents(path, text_column=column) == [*texts]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("message.contents", "row 0 (line 1): 'message.contents' leads nowhere: there is no 'contents' in a dict"),
        ("mesage.content", "no column 'mesage'; set data.text_column to one of: message, dotted.name; or data.m"),
        ("conversation.text", "there is no 'text' in a list"),
        ("message.content.0", "there is no '0' in text"),
        ("message", "row 0 (line 1): 'message' holds a dict of content, not text"),
    ],
)
def test_nested_column_that_is_not_there_is_one_line(write, refusal, column, message):
    path = write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in NESTED))
    assert message in refusal(path, text_column=column)


def test_a_row_without_the_key_of_a_nested_column_is_no_document(write, documents, refusal):
    rows: list[Any] = [{"data": {}}, {"data": {"body": "a"}}, {"data": {"text": "b"}}, {"data": None}, {}]
    path = write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert documents(path, text_column="data.text") == ["b"]
    problem = "row 1 (line 2): 'data.title' leads nowhere: there is no 'title' in a dict of body."
    assert problem in refusal(path, text_column="data.title")
    assert "'data' holds an empty dict, not text" in refusal(path, text_column="data")


def test_nobody_reads_on_for_the_key_of_a_nested_column(write, refusal):
    path = write("rows.jsonl", '{"data": {"body": "a"}}\n' * 20_000 + "broken")
    assert "row 0 (line 1): 'data.text' leads" in refusal(path, text_column="data.text")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "disk"])
def test_rows_that_are_left_out_are_counted(tmp_path, train_on, documents, caplog, kind):
    for name in "ab":
        table = Dataset.from_list([{"n": n, "text": [name, "", None][n % 3]} for n in range(1200)])
        path = tmp_path / f"rows/{name}.{kind}"
        path.parent.mkdir(exist_ok=True)
        writers = {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet, "disk": table.save_to_disk}
        writers[kind](path)
    paths = sorted((tmp_path / "rows").iterdir())
    with caplog.at_level(logging.INFO, "hfgolf"):
        assert documents(*paths) == documents(*paths) == ["a"] * 400 + ["b"] * 400
    names = ", ".join(file.name for file in load_corpus(train_on(*paths)).files[:2])
    assert [message for message in caplog.messages if "skipped" in message] == [
        f"data.text_column text: skipped 1,600 of 2,400 rows, in which it is missing or has nothing to read: {names}"
    ]


def test_rows_of_json_that_are_read_as_plain_text_are_told(write, documents, caplog):
    rows = '{"text": "a"}\n{"text": "b"}\n'
    told = [write(name, rows) for name in ("a.jl", "b.jsonl.txt")] + [write("c.gz", gzip.compress(rows.encode()))]
    other = [write(name, text) for name, text in {"d.txt": "{}", "e.txt": "[1] {x}"}.items()]
    with caplog.at_level(logging.INFO, "hfgolf"):
        assert documents(*told, *other)[:3] == [rows] * 3
    assert [message for message in caplog.messages if "JSON" in message] == [
        "data.files: read 3 files of JSON as plain text, because only .jsonl, .ndjson and .json are read as rows:"
        " a.jl, b.jsonl.txt, c.gz"
    ]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("header_alone.csv", "id,text\n", "row with text in column 'text'; remove it or add rows."),
        ("no_rows.json", "[]", "row with text in column 'text'; remove it or add rows."),
        ("nulls.jsonl.gz", '{"text": null}\n{"text": ""}\n', "row with text in column 'text'; remove it"),
        ("no_cells.ipynb", '{"nbformat": 4, "cells": []}', "text in it; remove it or add text to it."),
    ],
)
def test_files_without_a_document_are_skipped_unless_they_are_named(
    tmp_path, write, documents, refusal, caplog, name, content, problem
):
    content = gzip.compress(content.encode()) if name.endswith(".gz") else content
    path, other = write(f"found/{name}", content), write("found/z.txt", "text")
    assert f"{path} has no {problem}" in refusal(other, path)
    archive = write("found.zip", zipped({name: content, "z.txt": "text"}))
    with caplog.at_level(logging.INFO, "hfgolf"):
        for found in (tmp_path / "text/found", tmp_path / "text/found/*", archive):
            assert documents(found) == ["text"]
    logged = [message for message in caplog.messages if "without a document" in message]
    names = name, f"found.zip/{name}"
    assert logged == [f"data.files: skipped 1 file without a document: {one}" for one in names]


@pytest.fixture
def memory():
    """A file system of fsspec in this process's memory."""
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def test_fsspec_urls_are_listed_and_downloaded_once(tmp_path, train_on, documents, memory):
    for number in range(3):
        memory.pipe(f"/data/{number}.jsonl.gz", gzip.compress(b'{"text": "%d"}\n' % number))
    urls = "memory://data/*.gz", "memory:///data/1.jsonl.gz"
    data = train_on(*urls)
    identity = load_corpus(data).identity
    assert [name for name, _, _ in identity["files"]] == [f"memory:///data/{n}.jsonl.gz" for n in range(3)]
    assert documents(*urls) == ["0", "1", "2"]
    (listing,) = (tmp_path / "cache").rglob("listing.json")
    for damage in (b"", b"[", b"{}", b"[]", b"[3]", b"null", b"\xff", b"[" * 9_000):
        listing.write_bytes(damage)
        assert load_corpus(data).identity == identity, "a damaged listing is made again"
    memory.rm("/data", recursive=True)
    assert load_corpus(data).identity == identity  # from the copies


def test_mistakes_in_a_url_are_one_line(refusal, memory, monkeypatch):
    memory.pipe("/data/a.txt", b"text")
    for url, message in {
        "memory://data/b.txt": "cannot download memory://data/b.txt",
        "memory://data/*.csv": "no file matches memory://data/*.csv",
        "memory://data": "is a folder; name its files by a glob, such as memory://data/*.jsonl",
        "nothing://data/a.txt": "cannot open nothing://data/a.txt: Protocol not known: nothing",
        "http://[half": "cannot download http://[half",
    }.items():
        assert message in refusal(url)
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it is not installed
    assert "s3fs" in refusal("s3://bucket/a.txt")


def test_truncated_copy_is_discarded(tmp_path, refusal, memory, monkeypatch):
    memory.pipe("/data/a.txt", b"text")
    monkeypatch.setattr(type(memory), "get_file", lambda self, url, path: Path(path).write_bytes(b"te"))
    assert "2 of 4 bytes arrived" in refusal("memory://data/a.txt")
    assert not list((tmp_path / "cache" / "downloads").rglob("*a.txt"))
