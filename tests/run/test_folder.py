"""A run's folder: what is removed from it, and the lock that keeps other processes out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hfgolf.checkpoint.store import clean_up
from hfgolf.run.folder import RunFolder
from hfgolf.system.errors import UserError

LOCK = "import sys, pathlib; from hfgolf.run.folder import RunFolder; RunFolder(pathlib.Path(sys.argv[1])).lock()"


def test_only_the_remains_of_our_writes_are_removed(tmp_path):
    ours = [".partial-config.yaml", ".partial-model/x", ".replaced-model/x", "starts/001/.partial-metadata.json"]
    ours += ["report/.partial-loss.png", ".partial-shared-0123456789abcdef", "checkpoints/.partial-step-000003/x"]
    mine = [".partial-notes.txt", ".partial-mine/x", ".replaced-mine/x", "starts/mine/.partial-x", "report/.partial-x"]
    mine += [".partial-golf/x"]  # of an export, which may be at work
    mine += ["checkpoints/.partial-mine/x", "checkpoints/notes.txt", "building/x"]
    for name in (*ours, *mine):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    RunFolder(tmp_path).clean_up()
    clean_up(tmp_path / "checkpoints")
    assert [name for name in ours if (tmp_path / name).exists()] == []
    assert [name for name in mine if not (tmp_path / name).exists()] == []


def test_starts_are_counted_beside_folders_of_the_user(tmp_path):
    for name in ("002", "1x", "7 notes", "9" * 40, "³"):
        (tmp_path / "starts" / name).mkdir(parents=True)
    RunFolder(tmp_path).describe_start("run: {}\n", {}, None)
    assert (tmp_path / "starts" / "003" / "config.yaml").is_file()


def is_locked(folder: Path) -> bool:
    """Return whether another process finds the folder locked."""
    done = subprocess.run([sys.executable, "-c", LOCK, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or f"in use by another run (process {os.getpid()} on" in done.stderr, done.stderr
    return done.returncode != 0


def read_lock(folder: Path) -> None:
    (folder / ".lock").read_text()


def copy_folder(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("copy"))


def fork_and_exit(folder: Path) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def test_a_failed_start_leaves_no_folder_unless_something_is_in_it(tmp_path):
    RunFolder(tmp_path / "mine").make()
    for place in ("run", "mine/run", "new/runs/run"):
        folder = RunFolder(tmp_path / place)
        folder.make()
        folder.lock()
        folder.abandon()
        assert [path.name for path in tmp_path.iterdir()] == ["mine"], "an empty folder of the user stays"
    for _ in range(2):
        folder.make()
        folder.lock()  # a second try in the same process
        assert is_locked(folder.path)
    (folder.path / "notes.txt").touch()
    folder.abandon()
    assert (folder.path / "notes.txt").exists() and is_locked(folder.path)
    RunFolder(tmp_path).abandon()  # not locked by this process
    assert tmp_path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not locked there")
@pytest.mark.parametrize("disturb", [read_lock, copy_folder, fork_and_exit])
def test_nothing_that_the_process_does_with_its_folder_unlocks_it(tmp_path, disturb):
    """POSIX locks end when their process closes any descriptor of the file: a copy of the folder did that."""
    folder = tmp_path / "run"
    folder.mkdir()
    RunFolder(folder).lock()
    disturb(folder)
    assert is_locked(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not locked there")
def test_a_run_that_has_ended_leaves_its_folder_to_other_processes(shared_run):
    """Its own may go on, such as the kernel of a notebook."""
    assert not is_locked(shared_run())


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not locked there")
def test_a_child_that_outlives_the_run_does_not_keep_its_folder(tmp_path):
    """Loader workers are forked, and may survive a kill -9."""
    script = (
        f"{LOCK}\nimport os, time\nif not os.fork():\n    os.close(1)\n    time.sleep(60)\nprint('up', flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, process_group=0) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            process.wait(10)
            assert not is_locked(tmp_path)
        finally:
            os.killpg(process.pid, 9)


def test_a_folder_locked_by_a_version_with_posix_locks_is_in_use(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / ".lock").open("w") as file:
        file.write("of an older version")
        file.flush()
        child = os.fork()  # the lock of another process
        if not child:
            fcntl.lockf(file, fcntl.LOCK_EX)
            (tmp_path / "locked").touch()
            time.sleep(30)
            os._exit(0)
    try:
        while not (tmp_path / "locked").exists():
            pass
        with pytest.raises(UserError, match="in use by another run"):
            RunFolder(tmp_path).lock()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
