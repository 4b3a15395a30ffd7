"""Names of files: a path that exists is taken as it is written, and nothing in a folder is left out in silence."""

from __future__ import annotations

import json
import logging
import os
import socket
import unicodedata
from pathlib import Path

import pytest

from hfgolf.config.parse import load_config
from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.corpus import load_corpus
from hfgolf.data.files import require_paths
from hfgolf.data.token_cache import load_tokens
from hfgolf.system.errors import UserError

NAMES = [
    *("book[1].txt", "[draft] notes.txt", "[]", "[a", "a*b.txt", "what?.txt", "**", "*a", "~x", "~", "{a}", "{a: 1}"),
    *("1e3", "1.5E+3", "0x10", "010", "1:30", "1_000", ".inf", "null", "yes", "no", "true", "2024-01-01", "=", "<<"),
    *("a,b.txt", "a::b", "zip:x", "sp ace.txt", "new\nline", "a\tb", "\x1b[31mx", "\u2028", "#x", "a #b", "%20.txt"),
    *("a: b", "é.txt", unicodedata.normalize("NFD", "éb.txt"), "'q'", '"q"', "!x", "&a", "|", "@x"),
]
OTHERS = ["book1.txt", "d otes.txt", "aXb.txt", "whatX.txt", "xa", "x"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Go to an empty folder with a validation text; return what a command line reads to train, relative to it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("v.txt").write_text("validation")

    def trained(*names: str) -> list[str]:
        options = ["--data.val_files=v.txt", "--train.max_steps=3", f"--data.cache_dir={tmp_path / 'cache'}"]
        resolved = load_config([*names, *options])
        data = resolved.config.data
        require_paths(data)
        Path("again.yaml").write_text(resolved.to_yaml())
        assert load_config("again.yaml").config.data == data
        return [os.path.relpath(file.path) for file in load_corpus(data).files if file.split is None]

    return trained


def test_a_path_that_exists_is_literal(here):
    for name in (*NAMES, *OTHERS):
        Path(name).write_text(f"the text of {name!r}")
    assert here(*NAMES) == here("--data.files", *NAMES) == NAMES
    for name in ("book[1].txt", "[]", "1e3"):
        assert here(name) == here(f"--data.files={name}") == [name]


def test_folders_that_exist_are_literal_in_a_glob(here):
    for folder in ("data[1]", "data1"):
        Path(folder, "inner").mkdir(parents=True)
        Path(folder, "a.txt").write_text(folder)
        Path(folder, "inner", "b.txt").write_text(folder)
    names = ["data[1]", "data[1]/**/*.txt", "data[0-9]/*.txt"]
    assert here(*names) == ["data[1]/a.txt", "data[1]/inner/b.txt", "data1/a.txt"]
    data = DataSection(source="hub", hub_name="data[1]")
    with pytest.raises(UserError, match=r"data\[1\]' has one of \[\]\*\? in it, which `datasets` takes as a pattern"):
        load_corpus(data)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: os.symlink("gone.txt", "a"), "data.files: 'a' is a link to 'gone.txt', which does not exist"),
        (lambda: os.mkfifo("a"), "data.files: 'a' is a pipe, socket or device"),
        (lambda: None, "data.files: no file matches 'a'"),
        (lambda: Path("a ").touch(), "or a URL; did you mean 'a '?"),
        (lambda: Path("a").write_bytes(b"%PDF-1.7\n"), "data.files: a is a PDF, not text; convert it"),
        (lambda: Path("a").write_bytes(b"\x89PNG\r\n"), "data.files: a is a picture, not text"),
    ],
)
def test_what_cannot_be_read_is_named_before_torch_is_loaded(here, make, problem):
    make()
    with pytest.raises(UserError) as caught:
        require_paths(DataSection(source="files", files=["a"]))
    assert problem in str(caught.value)


def test_linked_folders_are_followed_once_and_not_upward(here, caplog):
    caplog.set_level(logging.INFO, "hfgolf")
    Path("texts/z").mkdir(parents=True)
    Path("texts/z/a.txt").write_text("a")
    Path("elsewhere/deep").mkdir(parents=True)
    Path("elsewhere/deep/b.txt").write_text("b")
    os.symlink("z", "texts/again")  # files that are there keep their names
    os.symlink("..", "texts/z/up")
    os.symlink(".", "texts/self")
    os.symlink("../elsewhere", "texts/linked")
    os.symlink("../texts", "elsewhere/back")
    os.symlink("../../..", "texts/z/above")
    assert here("texts") == ["texts/z/a.txt", "texts/linked/deep/b.txt"]
    links = "4 link to a folder above (texts/self, texts/z/above, texts/z/up and 1 more)".replace("texts/", "")
    assert links in caplog.text


def test_what_a_folder_or_a_glob_leaves_out_is_told_with_the_reason(here, caplog):
    for name in ("a.txt", ".hidden.txt", "b.png", "c.log", "d.pdf"):
        Path("texts", name).parent.mkdir(exist_ok=True)
        Path("texts", name).write_text("text")
    Path("texts/empty.txt").touch()
    Path("texts/.git").mkdir()
    os.symlink("gone.txt", "texts/gone.txt")
    with socket.socket(socket.AF_UNIX) as listener, caplog.at_level(logging.INFO, "hfgolf"):
        listener.bind("texts/socket.txt")
        assert here("texts") == here("texts") == ["texts/a.txt"]  # and it is told once
        assert here("texts/[!e]*") == ["texts/a.txt", "texts/b.png", "texts/c.log", "texts/d.pdf"]
    assert caplog.messages == [
        "data.files: texts: 1 file read; skipped: 2 hidden (.git, .hidden.txt), 3 other kind (b.png, c.log, d.pdf),"
        " 1 empty (empty.txt), 2 not a file (gone.txt, socket.txt)",
        "data.files: texts/[!e]*: 4 files read; skipped: 2 not a file (texts/gone.txt, texts/socket.txt)",
    ]


@pytest.mark.parametrize("column", [None, "messages"])
def test_a_name_in_a_folder_need_not_be_utf_8(tmp_path, column):
    for number in range(30):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"text {number}"}]
        content = f"text {number}" if column is None else json.dumps({column: turns})
        ending = "txt" if column is None else "jsonl"
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9%d.%s" % (number, ending.encode()))).write_text(content)
    data = DataSection(source="files", files=[str(tmp_path)], messages_column=column, cache_dir=str(tmp_path / "cache"))
    tokens = load_tokens(data, TokenizerSection(kind="byte"))
    assert len(tokens.train.piece_tokens) + len(tokens.val.piece_tokens) == 30


def test_a_remote_name_that_exists_is_literal(here):
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe({"/d/a[1].txt": b"right", "/d/a1.txt": b"wrong"})
    try:
        [path] = here("memory://d/a[1].txt")
        assert Path(path).read_text() == "right"
    finally:
        files.rm("/d", recursive=True)
