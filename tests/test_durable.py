"""Durable writes: a file with its final name is always complete and on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfgolf.system.durable import HashedFile, list_files, make_folder, new_folder, replace_folder, sync_tree, write_text
from hfgolf.system.errors import UserError, writing


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that records each fsync and rename by file or folder name."""
    seen: list[tuple[str, str]] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def record_fsync(descriptor: int) -> None:
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(("rename", Path(b).name)), replace(a, b))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (seen.append(("rename", Path(b).name)), rename(a, b))[1])
    return seen


def test_file_is_synced_before_and_its_folder_after_the_rename(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    write_text(tmp_path / "note.txt", "fünf")
    assert (tmp_path / "note.txt").read_bytes() == "fünf".encode()
    assert calls == [("sync", ".partial-note.txt"), ("rename", "note.txt"), ("sync", tmp_path.name)]


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "note.txt", "old")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "note.txt", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"note.txt": "old"}


def test_folder_is_synced_before_the_rename_also_after_a_kill(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    for name, text in (("model", "old"), (".partial-model", "new"), (".replaced-model", "left by a kill")):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "weights").write_text(text)
    replace_folder(tmp_path / ".partial-model", tmp_path / "model")
    assert (tmp_path / "model" / "sub" / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    named = calls.index(("rename", "model"))
    assert calls[:named].count(("sync", "weights")) == calls[:named].count(("sync", "sub")) == 1
    assert calls[named + 1 :] == [("sync", tmp_path.name)]


def test_two_that_make_one_folder_do_not_mix_their_files(tmp_path: Path) -> None:
    (tmp_path / ".partial-model" / "sub").mkdir(parents=True)
    (tmp_path / ".partial-model" / "left by a kill").write_text("old")
    with new_folder(tmp_path / "model") as partial:
        assert not list(partial.iterdir())
        (partial / "weights").write_text("first")
        with (
            pytest.raises(UserError, match=r"^--output: cannot write to .*model \(another process is writing it\)"),
            writing("--output", tmp_path / "model"),
            new_folder(tmp_path / "model") as second,
        ):
            (second / "weights").write_text("second")
    assert (tmp_path / "model" / "weights").read_text() == "first"
    with pytest.raises(KeyError), new_folder(tmp_path / "model"):
        raise KeyError
    with new_folder(tmp_path / "model") as partial:
        (partial / "weights").write_text("third")
    assert (tmp_path / "model" / "weights").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_new_folders_are_synced_in_their_parents(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    make_folder(tmp_path / "runs" / "tiny")
    make_folder(tmp_path / "runs" / "tiny")
    assert sorted(calls) == sorted([("sync", "runs"), ("sync", tmp_path.name)])


def test_dangling_link_is_not_synced(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "file").touch()
    sync_tree(tmp_path)
    assert calls == [("sync", "file"), ("sync", tmp_path.name)]


@pytest.mark.parametrize("sizes", [(), (5,), (70_000, 3, 2**20, 2**16 - 1, 2**16)])
def test_file_hashed_while_it_is_written_has_the_entry_of_one_that_is_read(tmp_path: Path, sizes: tuple[int]) -> None:
    """The caller may reuse its buffer after each write."""
    content = [os.urandom(size) for size in sizes]
    with HashedFile(tmp_path / "file") as file:
        for piece in content:
            buffer = bytearray(piece)
            assert file.write(memoryview(buffer)) == len(piece)
            buffer[:] = bytes(len(piece))
    assert (tmp_path / "file").read_bytes() == b"".join(content)
    assert {"file": file.entry()} == list_files(tmp_path, [tmp_path / "file"])


@pytest.mark.parametrize("size", [5, 2**20])
def test_file_hashed_while_it_is_written_reports_a_full_disk(size: int) -> None:
    with pytest.raises(OSError, match="No space left"), HashedFile(Path("/dev/full")) as file:
        file.write(bytes(size))
