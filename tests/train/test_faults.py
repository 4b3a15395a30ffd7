"""Faults of the machine during a run: killed processes, full disks, folders that are deleted or taken."""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import FORKING, before_step, differences, events, lines, losses, rows, start, train_on_two, valid_steps

import hfgolf
from hfgolf.checkpoint.store import verify
from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.run import metrics
from hfgolf.run.folder import run_folder
from hfgolf.system.errors import UserError
from hfgolf.train import loop
from hfgolf.train.claim import claim

pytestmark = pytest.mark.slow

KEPT = "the newest is of step 3"


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


def partial_folders(checkpoints: Path) -> set[tuple[str, int]]:
    """Return the unfinished folders, each with its ctime, which distinguishes folders of the same name."""
    found = set()
    for path in checkpoints.glob(".partial-*"):
        try:
            found.add((path.name, path.stat().st_ctime_ns))
        except FileNotFoundError:  # finished while we looked
            continue
    return found


def wait_for_a_save(checkpoints: Path, known: set[tuple[str, int]]) -> None:
    wait_until(lambda: bool(partial_folders(checkpoints) - known))


def test_run_killed_again_and_again_matches_a_straight_run(tiny_run, tmp_path):
    """kill -9 at random moments, every second time during a save: bitwise equal to a straight run."""
    options = {
        "train__max_steps": 60,
        "train__save_every_steps": 2,
        "train__eval_every_steps": 25,
        "train__eval_tokens": 512,
        "train__resume": "auto",
        "model__dropout": 0.1,
        "optim__ema_decay": 0.9,
    }
    straight, killed = (load_config(tiny_run(run__name=name, **options)) for name in ("straight", "killed"))
    process = start(straight, tmp_path / "straight.txt")
    process.join()
    assert process.exitcode == 0, (tmp_path / "straight.txt").read_text()

    moments = random.Random(0)
    checkpoints = tmp_path / "runs" / "killed" / "checkpoints"
    newest, in_a_save = 0, 0
    for kill in range(10):
        left_over = partial_folders(checkpoints)
        process = start(killed, tmp_path / "killed.txt", pause_seconds=0.03)
        if kill % 4 == 2:  # on a slow machine, no other kill may let a save end
            wait_until(lambda before=f"step-{newest:06}": any(p.name > before for p in checkpoints.glob("step-*")))
        elif kill % 4:  # otherwise possibly during setup
            wait_for_a_save(checkpoints, left_over)
        delay = moments.uniform(0, 0.01 if kill % 2 else 0.4)
        time.sleep(delay)
        assert process.is_alive(), f"before kill {kill}: {(tmp_path / 'killed.txt').read_text()}"
        process.kill()
        process.join()
        in_a_save += bool(partial_folders(checkpoints) - left_over)
        steps = valid_steps(checkpoints)
        assert not steps or max(steps) >= newest, f"kill {kill} lost step {newest}"
        assert steps or not newest, f"kill {kill} lost step {newest}"
        newest = max(steps, default=0)
    assert in_a_save >= 2 and newest > 0
    process = start(killed, tmp_path / "killed.txt")
    process.join()
    assert process.exitcode == 0, (tmp_path / "killed.txt").read_text()

    assert not list(checkpoints.glob("abandoned-*")) and not list(checkpoints.glob(".partial-*"))
    one, other = tmp_path / "runs" / "straight", checkpoints.parent
    assert losses(other) == losses(one) and len(losses(one)) == 60
    evaluations, expected = ([row["val_loss"] for row in rows(f)] for f in (other, one))
    assert evaluations == expected
    assert differences(checkpoints / "latest", one / "checkpoints" / "latest") == []


def _train_and_tell(resolved: ResolvedConfig, answers: Any, fault: Callable[[Path], Callable[[], None]]) -> None:
    """Train with a disk that fails from step 5 to step 8; send the log, and the files at step 8."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hfgolf").addHandler(handler)
    logging.getLogger("hfgolf").setLevel(logging.INFO)
    mend: list[Callable[[], None]] = []
    there: list[Any] = []

    def after(run: Any) -> None:
        there.extend([valid_steps(run.folder.checkpoints), [row["step"] for row in rows(run.folder.path)]])
        mend.pop()()

    # at step 8, because the save of step 6 must fail before the disk works again, however slow the disk is
    actions = {5: lambda run: mend.append(fault(run.folder.path)), 8: lambda run: run.checkpoints.wait(), 9: after}
    loop.train_step = before_step(actions)
    hfgolf.train(resolved)
    answers.send((said, *there))


def no_larger_files(folder: Path) -> Callable[[], None]:
    """Limit file sizes to that of metrics.jsonl plus 100 bytes: the next row is cut off, and saves fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "metrics.jsonl").stat().st_size + 100, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def no_more_room(folder: Path) -> Callable[[], None]:
    """Fill the disk with another file, so that the weights fit but the optimizer's state does not."""
    filler = folder.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        file.write(bytes(free - 200_000))
    return filler.unlink


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a file system with this limit."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(limit: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", limit, "tmpfs", str(disk)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("a file system can not be mounted here")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("limit", ["size=4k", "nr_inodes=4"])
def test_nearly_full_disk_is_one_line(run, tiny_run, small_disk, limit):
    with pytest.raises(UserError, match=r"run.output_dir: cannot write to .*No space left on device"):
        run(tiny_run(run__output_dir=small_disk(limit)))


@pytest.mark.parametrize(
    ("fault", "reason"), [(no_larger_files, "File too large"), (no_more_room, "No space left on device")]
)
def test_full_disk_gives_one_warning_per_save_and_training_continues(shared_run, tiny_run, small_disk, fault, reason):
    options = {"train__max_steps": 12, "train__eval_every_steps": 99}
    straight = shared_run(**options)
    if fault is no_more_room:
        options["run__output_dir"] = small_disk("size=8m")
    resolved = load_config(tiny_run(run__name="full", **options))
    answers, answer = FORKING.Pipe(duplex=False)
    process = FORKING.Process(target=_train_and_tell, args=(resolved, answer, fault))
    process.start()
    answer.close()
    said, steps_then, rows_then = answers.recv()
    process.join()
    assert process.exitcode == 0

    (line,) = [line for line in said if "checkpoint of" in line]
    assert line.startswith("checkpoint of step 6 not written: ") and reason in line and line.endswith(f"; {KEPT}")
    assert "\n" not in line
    assert steps_then == [3]
    folder = Path(resolved.config.run.output_dir) / "full"
    assert not list((folder / "checkpoints").glob(".partial-*"))
    assert valid_steps(folder / "checkpoints") == [9, 12]
    assert losses(folder) == losses(straight)
    (event,) = events(folder)
    assert event["event"] == "save_failed" and reason in event["reason"] and event["step"] < 9
    assert differences(folder / "checkpoints" / "latest", straight / "checkpoints" / "latest") == []
    if fault is no_larger_files:
        assert rows_then == [1, 2, 3, 4]
        assert len([line for line in said if "metrics.jsonl: cannot write (File too large)" in line]) == 1


def refuse(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make writes to the run's folder fail, even for root."""
    real_open, real_mkdir, folder = Path.open, Path.mkdir, run.folder.path

    def open_(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if folder in path.parents and mode[0] != "r":
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, mode, *arguments, **options)

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if folder in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        real_mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(Path, "mkdir", mkdir)


def block_folder(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run.folder.path.rename(run.folder.path.with_name("aside"))
    run.folder.path.write_text("a file")


def unblock(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if run.folder.path.is_file():
        run.folder.path.unlink()
        run.folder.path.with_name("aside").rename(run.folder.path)


@pytest.mark.parametrize("fault", [refuse, block_folder])
def test_unwritable_folder_does_not_stop_training(run, tiny_run, shared_run, caplog, fault):
    options = {"train__max_steps": 12, "train__eval_every_steps": 99}
    straight = shared_run(**options)
    fault_patch, patch = pytest.MonkeyPatch(), pytest.MonkeyPatch()
    caplog.clear()
    actions = {5: lambda run: fault(run, fault_patch), 9: lambda run: unblock(run, fault_patch)}
    patch.setattr(loop, "train_step", before_step(actions))
    try:
        folder = run(tiny_run(run__name="refused", **options))
    finally:
        fault_patch.undo()
        patch.undo()
    (line,) = [line for line in caplog.messages if "checkpoint of" in line]
    kept = "no checkpoint exists" if fault is block_folder else KEPT
    assert line.startswith("checkpoint of step 6 not written: ") and line.endswith(f"; {kept}")
    assert valid_steps(folder / "checkpoints") == [9, 12]
    assert losses(folder) == losses(straight)
    assert [row["step"] for row in rows(folder)] == list(range(1, 13))


@pytest.mark.parametrize("names", [["path"], ["metrics", "checkpoints", "config"]], ids=["the folder", "its files"])
def test_run_survives_deleted_files(run, tiny_run, shared_run, monkeypatch, names):
    options = {"train__max_steps": 9, "train__eval_every_steps": 99}
    straight = shared_run(**options)

    def delete(run_: Any) -> None:
        for path in (getattr(run_.folder, name) for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    monkeypatch.setattr(loop, "train_step", before_step({5: delete}))
    folder = run(tiny_run(run__name="deleted", **options))
    assert load_config(["--config", str(folder / "config.yaml")]).config.run.name == "deleted"
    assert losses(folder) == losses(straight)[4:]
    assert valid_steps(folder / "checkpoints") == [6, 9]
    assert differences(folder / "checkpoints" / "latest", straight / "checkpoints" / "latest") == []
    assert json.loads((folder / "summary.json").read_text())["steps"] == 9


def delete_before_step_5(folder: Path) -> None:
    """Let rank 0 delete the folder while both train."""
    actions = {5: lambda run: shutil.rmtree(folder) if os.environ["RANK"] == "0" else None}
    loop.train_step = before_step(actions)


@pytest.mark.distributed
def test_run_on_two_processes_survives_the_deletion_of_its_folder(tiny_run, shared_run, tmp_path):
    options = {"train__max_steps": 9, "train__eval_every_steps": 99, "batch__micro_batch_size": 4}
    straight, folder = shared_run(**options), tmp_path / "runs" / "tiny"
    train_on_two(tiny_run(**options), tmp_path / "output", functools.partial(delete_before_step_5, folder))
    assert losses(folder) == pytest.approx(losses(straight)[4:], rel=1e-5)
    assert valid_steps(folder / "checkpoints") == [6, 9]
    assert verify(folder / "checkpoints" / "latest")["processes"] == 2
    assert (folder / ".lock").is_file(), "locked again, so that no other run takes it"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 9


def test_checkpoints_without_config_yaml_are_not_overwritten(run, tiny_run, copied_run):
    folder = copied_run()
    folder.joinpath("config.yaml").unlink()
    with pytest.raises(UserError, match=r"holds a complete run; choose another --run.name"):
        run(tiny_run())
    folder.joinpath("summary.json").unlink()
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=r"holds an unfinished run; continue it with --train.resume auto"):
        run(tiny_run())
    assert [path for path in sorted(folder.rglob("*")) if path.name != ".lock"] == [
        path for path in before if path.name != ".lock"
    ]


def test_folder_is_locked_by_one_live_process(shared_run, tiny_run, tmp_path):
    options = {"train__save_every_steps": 1, "train__eval_every_steps": 99, "train__resume": "auto"}
    straight = shared_run(**options)
    # loader workers may outlive their parent for seconds: they must not hold on to the folder
    resolved = load_config(tiny_run(run__name="shared", **options, data__num_workers=2))
    folder = tmp_path / "runs" / "shared"
    first = start(resolved, tmp_path / "first.txt", pause_seconds=1000)
    try:
        wait_until(lambda: (folder / "checkpoints" / "latest").exists())
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        second = start(resolved, tmp_path / "second.txt")
        second.join()
        assert second.exitcode == 2
        (line,) = [line for line in (tmp_path / "second.txt").read_text().splitlines() if line.startswith("error: ")]
        assert f"{folder} is in use by another run (process {first.pid}" in line
        assert first.is_alive()
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    finally:
        first.kill()
        first.join()
    last = start(resolved, tmp_path / "last.txt")
    last.join()
    assert last.exitcode == 0, (tmp_path / "last.txt").read_text()
    assert "resumed from" in (tmp_path / "last.txt").read_text()
    assert losses(folder) == losses(straight)


def test_clock_may_run_backwards(run, tiny_run, shared_run, monkeypatch):
    """If the clock jumps, the newest checkpoint is still that of the last step, not the one with the newest files."""
    options = {"train__eval_every_steps": 99, "train__save_every_steps": 2, "schedule__name": "constant"}
    straight = shared_run(train__max_steps=9, **options)
    now = itertools.count(2e9, -3600)
    monkeypatch.setattr(time, "time", lambda: next(now))
    folder = run(tiny_run(run__name="backwards", **options))
    for age, checkpoint in enumerate(sorted((folder / "checkpoints").glob("step-*"))):
        for path in (*checkpoint.iterdir(), checkpoint):
            os.utime(path, (1e9 - 3600 * age, 1e9 - 3600 * age))
    run(tiny_run(run__name="backwards", train__max_steps=9, train__resume="latest", **options))
    assert losses(folder) == losses(straight)
    assert not list((folder / "checkpoints").glob("abandoned-*"))
    elapsed = [line["elapsed_seconds"] for line in lines(folder) if line.get("event") != "resumed"]
    assert elapsed == sorted(elapsed) and elapsed[0] > 0


def test_lost_rows_are_counted(run, tiny_run, monkeypatch, caplog):
    def append_lines(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics, "append_lines", append_lines)
    folder = run(tiny_run())
    said = [message for message in caplog.messages if "metrics.jsonl" in message]
    assert [line.split("metrics.jsonl: ")[1] for line in said] == [
        "cannot write (No space left on device); the row is kept and written with the next one",
        "8 rows lost (No space left on device)",
    ]
    assert (folder / "model" / "model.safetensors").is_file()


def test_run_does_not_touch_another_run_in_its_folder(run, tiny_run, tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "tiny"
    theirs = {".lock": b"1 on another machine\n", "metrics.jsonl": b'{"step": 1}\n', "report.html": b"their report"}

    def take(run_: Any) -> None:
        folder.rename(tmp_path / "deleted")
        folder.mkdir()
        for name, content in theirs.items():
            (folder / name).write_bytes(content)

    monkeypatch.setattr(loop, "train_step", before_step({5: take}))
    with pytest.raises(UserError, match=r"another run has started in it \(process 1 on another machine\)"):
        run(tiny_run())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == theirs


def test_lock_of_another_user_is_one_line(run, tiny_run, monkeypatch):
    real_open = os.open

    def refuse_lock(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(".lock") and "runs" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse_lock)
    with pytest.raises(
        UserError, match=r"run.name: cannot open .*tiny/.lock \(Permission denied\); if it belongs to another user"
    ):
        run(tiny_run())


def test_training_works_without_file_locks(tiny_run, monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    resolved = load_config(tiny_run())
    folder = run_folder(resolved.config)
    claim(folder, resolved)
    folder.hold()
