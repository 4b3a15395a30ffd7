"""A noted hash is used for an unchanged file, and only for that."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from hfgolf.data import cache_folder as module
from hfgolf.data.cache_folder import file_hashes
from hfgolf.system.durable import file_sha256


@pytest.fixture
def note(tmp_path) -> Path:
    return tmp_path / "hashes.json"


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """A file that counts as written long ago."""
    monkeypatch.setattr(module, "SETTLED_SECONDS", -1.0)
    path = tmp_path / "text.txt"
    path.write_text("one")
    return path


def is_read(path: Path, note: Path, monkeypatch) -> bool:
    """Hash the file and return whether the file was read for it."""
    read = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "file_sha256", lambda path: read.append(path) or file_sha256(path))
        assert file_hashes([path], note) == {path: hashlib.sha256(path.read_bytes()).hexdigest()}
    return bool(read)


def test_unchanged_file_is_hashed_once(text, note, monkeypatch):
    assert [is_read(text, note, monkeypatch) for _ in range(3)] == [True, False, False]
    assert [path.name for path in sorted(note.parent.iterdir())] == ["hashes.json", "text.txt"]


@pytest.mark.parametrize("change", ["longer", "same size", "mtime set back", "replaced, mtime set back", "touched"])
def test_changed_file_is_rehashed(text, note, monkeypatch, change):
    is_read(text, note, monkeypatch)
    before = text.stat()
    time.sleep(0.02)  # longer than the resolution of the file system's clock
    if change.startswith("replaced"):
        text.with_name("new").write_text("two")
        text.with_name("new").replace(text)
    elif change != "touched":
        text.write_text("one and more" if change == "longer" else "two")
    if change.endswith("set back"):
        os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "touched":
        text.touch()
    assert is_read(text, note, monkeypatch)  # and is_read compares the hash
    assert not is_read(text, note, monkeypatch)


def test_just_written_file_is_not_cached(text, note, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_SECONDS", 60.0)
    assert is_read(text, note, monkeypatch) and is_read(text, note, monkeypatch)


@pytest.mark.parametrize("damage", ["", "[1, 2]", "\udcff", "null", "entries"])
def test_damaged_cache_of_hashes_is_rewritten(text, note, monkeypatch, damage):
    is_read(text, note, monkeypatch)
    entries = json.dumps({str(text): {"sha256": "none"}, "other": None})
    note.write_text(entries if damage == "entries" else damage, errors="surrogateescape")
    assert [is_read(text, note, monkeypatch) for _ in range(2)] == [True, False]


def test_hashes_of_other_corpora_are_kept_and_an_unwritable_cache_is_ignored(text, note, monkeypatch):
    is_read(text, note, monkeypatch)
    other = text.with_name("other.txt")
    other.write_text("other")
    assert is_read(other, note, monkeypatch) and not is_read(text, note, monkeypatch)
    note.unlink()
    note.mkdir()
    assert is_read(text, note, monkeypatch)
    assert not list(note.parent.glob("*.part"))
