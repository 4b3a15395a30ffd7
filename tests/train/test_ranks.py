"""Ranks that disagree, fail or see different disks: one decision, or one line on every machine, and no rank hangs."""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from faults import losses, start_two, train_on_two, valid_steps

import hfgolf
from hfgolf.commands.evidence import diff_runs, evidence, verdict
from hfgolf.commands.find_lr import MIN_STEPS, sweep_rates
from hfgolf.commands.lr_sweep import find_lr
from hfgolf.run.folder import RunFolder
from hfgolf.system import ranks
from hfgolf.system.errors import UserError
from hfgolf.train import claim, compilation, decisions, loop, process, setup

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
SAME = {"batch__micro_batch_size": 4, "train__max_steps": 2}


def on_second_rank() -> bool:
    return os.environ["RANK"] == "1"


def train_two(arguments: list[str], output: Path, prepare: Any) -> tuple[list[int | None], list[str]]:
    """Train on two processes; return how each ends and what it says."""
    processes = start_two(arguments, output, prepare)
    for one in processes:
        one.join(60)
    return [one.exitcode for one in processes], [Path(f"{output}{rank}").read_text() for rank in ("", 1)]


def on_own_machine(prepare: Callable[[], None]) -> None:
    os.environ["LOCAL_RANK"] = "0"
    prepare()


def assert_one_line(said: list[str], pattern: str) -> None:
    """Both machines show the same error, in one line and without a traceback."""
    for text in said:
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and re.search(pattern, errors[0]), said
        assert "Traceback" not in text
    assert re.findall("error: .*", said[0]) == re.findall("error: .*", said[1])


def second_rank_has_less_memory_and_is_faster() -> None:
    real = decisions.choose_micro_batch_size
    decisions.choose_micro_batch_size = lambda *arguments: 2 if on_second_rank() else min(4, real(*arguments))
    logging.getLogger("hfgolf").setLevel(logging.DEBUG)
    compilation.should_compile = lambda *_, **__: (
        (False, "rank 1 is faster") if on_second_rank() else (True, "it would pay")
    )


def test_micro_batch_is_what_fits_on_every_rank_and_ranks_compile_only_if_all_do(tiny_run, tmp_path):
    arguments = tiny_run(**SAME | {"batch__micro_batch_size": "auto", "train__compile": "auto"})
    train_on_two(arguments, tmp_path / "output", second_rank_has_less_memory_and_is_faster)
    said = (tmp_path / "output").read_text()
    assert "= 2 sequences x 32 tokens x 2 micro-batches x 2 processes" in said
    assert "compile: no, because rank 1 is faster" in said


def other_config_on_second_rank() -> None:
    real = setup.set_up

    def set_up(resolved: Any, *others: Any) -> Any:
        return real(resolved.resolve("file", optim__learning_rate=0.5) if on_second_rank() else resolved, *others)

    loop.set_up = set_up


FAILING = {
    "tokens": (setup, "load_tokens"),
    "build": (setup, "build_optimizer"),
    "start": (setup, "describe_validation"),
    "step": (loop, "accumulate_gradients"),
}
NO_DISK = UserError("data: the disk of this machine is gone.")


def fail_on(rank: str, phase: str, error: Exception, folder: Path | None = None) -> None:
    """Let a function of a phase fail on one rank."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    if os.environ["RANK"] == rank:
        setattr(*FAILING[phase], fail)


class EndedStore:
    """As after the process of rank 0 was killed."""

    def set(self, *_: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    check = get = set


def test_failure_after_the_store_has_ended_is_still_said(monkeypatch):
    monkeypatch.setattr(ranks, "_failures", {})
    monkeypatch.setenv("LOCAL_RANK", "0")
    group = ranks._Group(rank=1, size=2, store=EndedStore())
    ranks._part(group, "the disk is full.")
    assert re.fullmatch(r"rank 1 \(\S+\): the disk is full\.", ranks._report(group))


def first_rank_listens_late(folder: Path) -> None:
    """Each time rank 0 waits for rank 1 in an exchange, rank 1 answers, disagrees and fails before rank 0 listens."""
    other_config_on_second_rank()
    exchange, listen = ranks.gather, ranks._listen

    def answer_late(value: Any) -> Any:
        time.sleep(0.2)
        return exchange(value)

    def listen_late(group: Any) -> bool:
        time.sleep(0.6)
        return listen(group)

    if on_second_rank():
        ranks.gather = answer_late
    else:
        ranks._listen = listen_late


def test_bug_on_one_rank_keeps_its_traceback_and_ends_the_other_with_one_line(tiny_run, tmp_path):
    prepare = functools.partial(fail_on, "1", "step", ZeroDivisionError("of nothing"))
    ended, said = train_two(tiny_run(**SAME), tmp_path / "output", prepare)
    assert ended == [2, 1] and re.search(r"error: rank 1 \(\S+\): ZeroDivisionError: of nothing\n", said[0])


def second_rank_fails_and_first_never_notices(folder: Path) -> None:
    """As in a collective of NCCL, which waits for a rank that is gone."""
    ranks.STUCK_SECONDS = 0.5
    if on_second_rank():
        fail_on("1", "step", NO_DISK)
    else:
        loop.accumulate_gradients = lambda run: time.sleep(600)


def killed(rank: str, phase: str) -> None:
    """Kill one rank in a phase, as the kernel does if memory runs out."""
    ranks.GONE_SECONDS, ranks.SILENT_SECONDS = 3.0, 6.0
    if os.environ["RANK"] == rank:
        setattr(*FAILING[phase], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize(("rank", "phase"), [("0", "step"), ("1", "tokens")])
def test_killed_rank_ends_the_others_with_one_line_that_names_it(tiny_run, tmp_path, rank, phase):
    """In a collective, which breaks; or while they wait for its answer, which never comes."""
    prepare = functools.partial(on_own_machine, functools.partial(killed, rank, phase))
    ended, told = train_two(tiny_run(**SAME), tmp_path / "output", prepare)
    said = told[1 - int(rank)]
    assert ended == ([2, -9] if rank == "1" else [-9, 2]), said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(rf"error: rank {rank}( \(\S+\))?: gives no sign of life; .*killed", errors[0])
    assert "Traceback" not in said


def ends_itself(rank: str, phase: str, number: int) -> None:
    if os.environ["RANK"] == rank:
        setattr(*FAILING[phase], lambda *_, **__: signal.raise_signal(number))


@pytest.mark.parametrize(("rank", "phase", "number"), [("1", "build", signal.SIGINT), ("0", "start", signal.SIGTERM)])
def test_rank_that_ends_before_the_first_step_ends_the_other_on_its_machine(tiny_run, tmp_path, rank, phase, number):
    """Neither waits for minutes, and the one that is left says what happened, whichever rank it has."""
    prepare = functools.partial(ends_itself, rank, phase, number)
    ended, told = train_two(tiny_run(**SAME), tmp_path / "output", prepare)
    survivor = 1 - int(rank)
    said = told[survivor]
    assert ended[survivor] == 2 and ended[1 - survivor] is not None
    if survivor == 0:
        assert re.search(rf"error: rank {rank}( \(\S+\))?: stopped by {signal.Signals(number).name}", said), said
    assert "Traceback" not in said and "frame #" not in said


def machine_with_a_disk_of_its_own(folder: Path) -> None:
    claim._SHARED_SECONDS = 0.2
    own = folder / f"disk{os.environ['RANK']}"
    own.mkdir()
    os.chdir(own)


GONE = r": data: the disk of this machine is gone\.$"
TOLD: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    # what happens: (options, what prepares each process, the line on both machines)
    "another config, and one listens late": (
        {},
        first_rank_listens_late,
        r"error: optim\.learning_rate: 0\.\d+ on rank 0 \(\S+\), but 0\.5 on rank 1 \(\S+\); ",
    ),
    "an error of rank 0": (
        {},
        functools.partial(fail_on, "0", "tokens", NO_DISK),
        rf"error: rank 0 \(\S+\){GONE}",
    ),
    "an error of both": (
        {"train__resume": "nowhere"},
        functools.partial(fail_on, "none", "tokens", NO_DISK),
        r"error: train\.resume: there is no checkpoint nowhere",
    ),
    "an error that a waiting rank never notices": (
        {},
        second_rank_fails_and_first_never_notices,
        rf"error: rank 1 \(\S+\){GONE}",
    ),
    "no shared folder": (
        {"run__output_dir": "runs"},
        machine_with_a_disk_of_its_own,
        r"run\.output_dir: runs/tiny on rank 1 \(\S+\) is not the folder of rank 0 .*all ranks share",
    ),
}


@pytest.mark.parametrize("what", TOLD)
def test_what_ends_the_ranks_is_one_line_on_every_machine(tiny_run, tmp_path, what):
    options, prepare, line = TOLD[what]
    prepare = functools.partial(on_own_machine, functools.partial(prepare, tmp_path))
    ended, said = train_two(tiny_run(**SAME | options), tmp_path / "output", prepare)
    assert ended == [2, 2], said
    assert_one_line(said, line)
    assert not list(tmp_path.glob("disk*/runs/tiny/**/*"))


def first_rank_takes_longer_than_the_group_waits() -> None:
    process._PATIENCE = timedelta(seconds=4)
    real = setup.load_tokens

    def load(*arguments: Any) -> Any:
        if not on_second_rank():
            time.sleep(5)
        return real(*arguments)

    setup.load_tokens = load
    loop.conclude = lambda run: {}  # its collectives wait no longer than that, however busy the machine is


def test_first_rank_may_take_longer_than_the_group_waits(tiny_run, tmp_path):
    train_on_two(tiny_run(**SAME), tmp_path / "output", first_rank_takes_longer_than_the_group_waits)


def find_lr_without_tokens() -> None:
    """A command that is no training run, on two processes of one machine."""
    fail_on("1", "tokens", NO_DISK)
    hfgolf.train = lambda resolved: find_lr(resolved, sweep_rates(1e-4, 1.0, MIN_STEPS))


def test_error_on_rank_1_of_another_command_is_one_line_of_its_machine(tiny_run, tmp_path):
    ended, told = train_two(tiny_run(**SAME), tmp_path / "output", find_lr_without_tokens)
    said = "".join(told)
    assert ended == [2, 2]
    assert len(re.findall("error: ", said)) == 1 and "Traceback" not in said
    assert re.search(r"error: rank 1 \(\S+\): data: the disk of this machine is gone\.", said), said


def test_a_machine_that_is_killed_ends_the_other_and_the_resumed_run_is_the_same(tiny_run, tmp_path):
    """Each machine has its own token cache; they share only the run's folder."""
    options = SAME | {"train__save_every_steps": 2, "train__max_steps": 24, "model__dropout": 0.1}
    options |= {"train__keep_last": 99}
    straight, killed = tmp_path / "runs" / "straight", tmp_path / "runs" / "killed"
    train_on_two(tiny_run(run__name="straight", **options), tmp_path / "output")
    prepare = functools.partial(on_own_machine, functools.partial(machine_with_a_disk_of_its_own, tmp_path))
    arguments = tiny_run(run__name="killed", **options, data__cache_dir="cache", train__resume="auto")
    processes = start_two(arguments, tmp_path / "of the killed", prepare)
    while len(valid_steps(killed / "checkpoints")) < 3:
        assert all(one.is_alive() for one in processes), (tmp_path / "of the killed").read_text()
        time.sleep(0.02)
    processes[1].kill()
    for one in processes:
        one.join(60)
    said = (tmp_path / "of the killed").read_text()
    assert [one.exitcode for one in processes] == [2, -9], said
    assert len(re.findall(r"error: rank 1( \(\S+\))?: gives no sign of life", said)) == 1, said
    assert not (killed / "summary.json").exists()
    newest = valid_steps(killed / "checkpoints")[-1]
    assert all((tmp_path / f"disk{rank}" / "cache" / "tokens").is_dir() for rank in (0, 1))
    train_on_two(tiny_run(run__name="killed", **options, train__resume="auto"), tmp_path / "output")
    assert f"at step {newest}\n" in (tmp_path / "output").read_text()
    assert losses(killed) == losses(straight)
    assert verdict(diff_runs(evidence(RunFolder(straight)), evidence(RunFolder(killed))), 24, is_exact=True)[0]
    assert (killed / "model" / "model.safetensors").is_file()
