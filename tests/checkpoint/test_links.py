"""`latest` and `best` are for people: a run resumes without the links, or with copies in their place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import differences, losses, valid_steps

from hfgolf.checkpoint.store import best_checkpoint, newest_first, replace_link
from hfgolf.system.errors import UserError

pytestmark = pytest.mark.slow

LENGTH = {"train__max_steps": 9, "train__keep_last": 1, "schedule__name": "constant"}


def follow_links(checkpoints: Path) -> None:
    """Turn each link into a folder, like scp -r and most zip tools."""
    copy = checkpoints.with_name("copy")
    shutil.copytree(checkpoints, copy)
    shutil.rmtree(checkpoints)
    copy.rename(checkpoints)
    assert not (checkpoints / "best").is_symlink()


def drop_links(checkpoints: Path) -> None:
    """Drop each link, like an object store."""
    for link in ("latest", "best"):
        (checkpoints / link).unlink()


def write_links_as_text(checkpoints: Path) -> None:
    """Turn each link into a text file, like git and some zip tools on Windows."""
    for link in ("latest", "best"):
        target = os.readlink(checkpoints / link)
        (checkpoints / link).unlink()
        (checkpoints / link).write_text(target)


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that puts the run on a file system without symbolic links."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    def install() -> None:
        monkeypatch.setattr(os, "symlink", refuse)
        monkeypatch.setattr(Path, "symlink_to", refuse)

    return install


def test_copied_run_resumes(run, tiny_run, validation_losses, tmp_path):
    """The best is step 3, the latest step 6; the files decide which one is used, not the links."""
    validation_losses([2.0, 2.5])
    straight = run(tiny_run(**LENGTH | {"train__max_steps": 6}))
    for copy, resume in ((follow_links, "latest"), (drop_links, "best"), (write_links_as_text, "latest")):
        folder = shutil.copytree(straight, tmp_path / copy.__name__ / "tiny", symlinks=True)
        checkpoints = folder / "checkpoints"
        copy(checkpoints)
        assert best_checkpoint(checkpoints) == checkpoints / "step-000003"
        run(tiny_run(**LENGTH, run__output_dir=folder.parent, train__resume=resume))
        assert len(losses(folder)) == 9
        assert (checkpoints / "abandoned-step-000006").exists() == (resume == "best")
        assert json.loads((folder / "summary.json").read_text())["step"] == 3, "the best weights are exported"
        assert valid_steps(checkpoints) == [3, 9]
        links = {name: os.readlink(checkpoints / name) for name in ("best", "latest")}
        assert links == {"best": "step-000003", "latest": "step-000009"}


def test_checkpoints_work_on_a_file_system_without_links(run, tiny_run, validation_losses, no_links, caplog):
    options = LENGTH | {"train__eval_every_steps": 2, "train__save_every_steps": 2}
    validation_losses([2.0, 1.5, 2.5])
    straight = run(tiny_run(**options, run__name="straight"))
    no_links()
    validation_losses([2.0, 1.5, 2.5])
    folder = run(tiny_run(**options, run__name="other"))
    assert not [line for line in caplog.messages if "not written" in line]
    assert sorted(os.listdir(folder / "checkpoints")) == ["step-000004", "step-000009"]
    assert json.loads((folder / "summary.json").read_text())["step"] == 4
    assert differences(folder / "checkpoints" / "step-000009", straight / "checkpoints" / "step-000009") == []
    run(tiny_run(**options | {"train__max_steps": 10}, run__name="other", train__resume="best"))
    assert len(losses(folder)) == 10


def test_outdated_link_is_removed_if_it_cannot_be_updated(tmp_path, no_links):
    """No link is better than a link to an older checkpoint."""
    for name in ("step-000003", "step-000006"):
        (tmp_path / name).mkdir()
    replace_link(tmp_path / "latest", tmp_path / "step-000003")
    no_links()
    replace_link(tmp_path / "latest", tmp_path / "step-000006")
    assert not (tmp_path / "latest").is_symlink()


def test_folder_in_place_of_a_link_is_renamed_not_deleted(copied_run):
    checkpoints = copied_run() / "checkpoints"
    follow_links(checkpoints)
    (checkpoints / "best" / "notes.txt").write_text("mine")
    replace_link(checkpoints / "best", checkpoints / "step-000003")
    assert os.readlink(checkpoints / "best") == "step-000003"
    assert (checkpoints / "abandoned-best" / "notes.txt").read_text() == "mine"


def test_best_is_not_searched_if_none_was_saved(copied_run):
    """The disk was full at the best step: the best is the best that exists."""
    checkpoints = copied_run() / "checkpoints"
    assert best_checkpoint(checkpoints) == checkpoints / "step-000006"
    for text in ('{"best_step": 5}', '{"best_step": "6"}', '{"best_step": [6]}', "[]", "{", "[" * 100_000, "\xff"):
        (checkpoints / "step-000006" / "train_state.json").write_text(text, encoding="latin-1")
        assert best_checkpoint(checkpoints) == checkpoints / "step-000003"
    shutil.rmtree(checkpoints / "step-000003")
    assert best_checkpoint(checkpoints) is None and newest_first(checkpoints)


def test_unmounted_checkpoint_disk_is_an_error_not_a_fresh_start(run, copied_run, tiny_run, tmp_path):
    """The run does not start over, and no row is erased."""
    folder = copied_run()
    (folder / "summary.json").unlink()
    (folder / "checkpoints").rename(tmp_path / "disk")
    (folder / "checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for resume in ("auto", "latest", "best", "null"):
        with pytest.raises(UserError, match=r"run.output_dir: .*checkpoints links to .*disk, which does not exist"):
            run(tiny_run(train__resume=resume))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    run(tiny_run(train__resume="auto", train__max_steps=6))
    assert len(losses(folder)) == 6
