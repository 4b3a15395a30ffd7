"""A run stopped by a signal saves the step of its last row, prints one line, and resumes without a trace."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import psutil
import pytest
from faults import FORKING, before_step, events, rows, start_two, train_here

from hfgolf.checkpoint import contents
from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.evaluate import loss
from hfgolf.system.signals import Signals, Stopped
from hfgolf.train import loop, setup, validation

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "scripts/train.py"]
ACCELERATE = [
    *(str(Path(sys.executable).with_name("accelerate")), "launch", "--cpu", "--num_processes=1", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", "scripts/train.py"),
]
# saves only on a signal and at the last step
UNSAVED = {"train__save_every_steps": 10**6, "train__eval_every_steps": 10**6, "model__dropout": 0.1}


ENVIRONMENT = os.environ | {"ACCELERATE_USE_CPU": "true"}


def wait_until(condition: Callable[[], Any], is_running: Callable[[], bool], output: Path) -> None:
    """Wait for a condition; fail if the process ends first."""
    deadline = time.monotonic() + 120
    while not condition():
        assert is_running() and time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)


def last_step(folder: Path) -> int:
    """Return the step of the last row that is complete. It is asked often, so it reads no more than that."""
    metrics = folder / "metrics.jsonl"
    content = metrics.read_bytes() if metrics.is_file() else b""
    lines = map(json.loads, reversed(content[: content.rfind(b"\n") + 1].splitlines()))
    return next((line["step"] for line in lines if "event" not in line), 0)


def assert_stopped_at_its_last_row(folder: Path, output: str, name: str) -> None:
    step = last_step(folder)
    latest = (folder / "checkpoints" / "latest").resolve()
    assert latest.name == f"step-{step:06d}"
    assert json.loads((latest / "train_state.json").read_text())["step"] == step
    line = f"stopped by {name} at step {step}; saved up to step {step}; resume with the same command"
    assert [told.startswith(line) for told in output.splitlines() if "stopped by" in told] == [True]
    assert not (folder / "summary.json").exists()


def test_signals_to_a_process_save_once_or_stop_it_at_its_last_row(tiny_run, tmp_path):
    """SIGUSR1, as docs/running.md shows it, then SIGTERM; then SIGINT to the resumed run."""
    folder, options = tmp_path / "runs" / "tiny", UNSAVED | {"train__max_steps": 10**5}
    output = tmp_path / "output"
    process = faults.start(load_config(tiny_run(**options)), output)
    wait_until(lambda: last_step(folder) > 2, process.is_alive, output)
    asked_at = last_step(folder)
    (shown,) = re.findall(r"`(kill -USR1 [^`]+)`", (ROOT / "docs" / "running.md").read_text())
    subprocess.run(["sh", "-c", shown.replace("runs/NAME", str(folder))], check=True)
    wait_until((folder / "checkpoints" / "latest").exists, process.is_alive, output)
    (saved,) = (folder / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert step > asked_at
    wait_until(lambda: last_step(folder) > step + 2, process.is_alive, output)
    assert list((folder / "checkpoints").glob("step-*")) == [saved], "one request gives one checkpoint"
    assert "stopped by" not in output.read_text()
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 143, output.read_text()
    assert_stopped_at_its_last_row(folder, output.read_text(), "SIGTERM")

    begun_at, output = last_step(folder), tmp_path / "of the resumed"
    process = faults.start(load_config(tiny_run(**options, train__resume="auto")), output)
    wait_until(lambda: last_step(folder) > begun_at + 2, process.is_alive, output)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130, output.read_text()
    assert_stopped_at_its_last_row(folder, output.read_text(), "SIGINT")
    assert f"step-{begun_at:06d} at step {begun_at}" in output.read_text()
    steps = [row["step"] for row in rows(folder)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.skipif(sys.platform != "linux", reason="opens a terminal as Linux does")
def test_closed_terminal_saves_and_exits_with_129(tiny_run, tmp_path):
    """Like a lost ssh connection: SIGHUP arrives, and every write to the terminal fails afterwards."""
    folder = tmp_path / "runs" / "tiny"
    ours, theirs = os.openpty()
    command = [sys.executable, "scripts/train.py", *tiny_run(**UNSAVED, train__max_steps=10**5)]
    process = subprocess.Popen(
        ["setsid", "--ctty", *command], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT
    )
    os.close(theirs)
    try:
        while last_step(folder) < 3:
            assert os.read(ours, 10**5)
        os.close(ours)
        assert process.wait(60) == 129
    finally:
        process.kill()
    step = last_step(folder)
    assert (folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").is_file()
    (stopped,) = [event for event in events(folder) if event["event"] == "stopped"]
    assert (stopped["signal"], stopped["step"]) == ("SIGHUP", step)


def test_interrupted_evaluation_is_repeated_after_the_resume(run, tiny_run, tmp_path, monkeypatch):
    """The resumed run has the same rows and best step as an uninterrupted one, also if it dies before it saves again.

    The loss gets worse, so that the repeated evaluation is not the best, which would be saved.
    """
    monkeypatch.setattr(validation.Evaluation, "loss", property(lambda self: 9 - self.nats / self.num_tokens))
    options = {"train__max_steps": 6, "train__eval_every_steps": 2, "train__save_every_steps": 10**6}
    straight, folder = run(tiny_run(run__name="straight", **options)), tmp_path / "runs" / "stopped"
    batches = []
    real = loss.summed_nats

    def asked_in_the_second_batch(*arguments: Any, **named: Any) -> Any:
        batches.append(arguments)
        if len(batches) == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **named)

    run_here = functools.partial(tiny_run, run__name="stopped", **options)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):  # in step 4, after that of step 2
        patched.setattr(loop, "train_step", before_step({4: lambda run_: 1 // 0}))
        run(run_here())
    for _ in range(2):  # in the evaluation of step 4, then in the same one again
        batches.clear()
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
            patched.setattr(loss, "summed_nats", asked_in_the_second_batch)
            run(run_here(train__resume="auto"))
        assert (ended.value.code, len(batches)) == (143, 2)
        assert [row["step"] for row in rows(folder)] == [1, 2, 3], "an interrupted evaluation leaves no row"
        checkpoints = [path for path in (folder / "checkpoints").iterdir() if not path.is_symlink()]
        assert sorted(path.name for path in checkpoints) == ["step-000002", "step-000004"]
        *_, last = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        assert (last["event"], last["signal"], last["step"]) == ("stopped", "SIGTERM", 4)
        report = folder / "report.html"
        assert "Stopped by SIGTERM at step 4" in report.read_text()
        report.unlink()
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(loop, "train_step", before_step({6: lambda run_: 1 // 0}))
        run(run_here(train__resume="auto"))
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5]
    run(run_here(train__resume="auto"))
    for name in ("step", "train_losses", "val_loss", "val_bits_per_byte"):
        assert [row[name] for row in rows(folder)] == [row[name] for row in rows(straight)]
    best = [json.loads((path / "summary.json").read_text())["step"] for path in (folder, straight)]
    assert best[0] == best[1]


@pytest.mark.parametrize("place", ["load_tokens", "conclude"])
def test_signal_outside_the_loop_ends_at_once_and_the_command_resumes(
    run, tiny_run, shared_run, monkeypatch, capsys, place
):
    """While tokenizing, as before any other phase, and in the last evaluation and the export."""
    module = loop if place == "conclude" else setup
    real = getattr(module, place)

    def asked(*arguments: Any, **named: Any) -> Any:
        real(*arguments, **named)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the signal did not end the process")

    straight = shared_run()
    capsys.readouterr()
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr(module, place, asked)
        run(tiny_run(run__name="stopped"))
    assert ended.value.code == 143
    told = capsys.readouterr().err
    resume = "auto" if place == "conclude" else "null"
    assert told.startswith(f"stopped by SIGTERM {'after the last' if resume == 'auto' else 'before the first'} step")
    folder = run(tiny_run(run__name="stopped", train__resume=resume))
    assert [row["train_losses"] for row in rows(folder)] == [row["train_losses"] for row in rows(straight)]
    losses = [json.loads((path / "summary.json").read_text())["val_loss"] for path in (folder, straight)]
    assert losses[0] == losses[1]


def test_checkpoint_requested_before_the_loop_is_saved_after_the_first_step(run, tiny_run, edit_run):
    edit_run(lambda run: signal.raise_signal(signal.SIGUSR1))
    folder = run(tiny_run(**UNSAVED, train__max_steps=2))
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-000001", "step-000002"]


def stop_the_second_rank_in_an_evaluation(folder: Path) -> None:
    """Send rank 1 a SIGTERM in its third batch; note how many batches each rank begins."""
    real, batches = loss.summed_nats, []
    rank = os.environ["RANK"]

    def asked(*arguments: Any, **options: Any) -> Any:
        batches.append(1)
        if len(batches) == 3 and rank == "1":
            signal.raise_signal(signal.SIGTERM)
        (folder / f"batches{rank}").write_text(f"{len(batches)}")
        return real(*arguments, **options)

    loss.summed_nats = asked


@pytest.mark.distributed
def test_all_processes_leave_an_evaluation_at_the_same_batch(tiny_run, tmp_path):
    arguments = tiny_run(**UNSAVED | {"train__eval_every_steps": 3, "batch__micro_batch_size": 1})
    prepare = functools.partial(stop_the_second_rank_in_an_evaluation, tmp_path)
    processes = start_two(arguments, tmp_path / "output", prepare)
    for process in processes:
        process.join(60)
        assert process.exitcode == 143, (tmp_path / "output").read_text()
    assert [(tmp_path / f"batches{rank}").read_text() for rank in (0, 1)] == ["7", "7"]
    folder = tmp_path / "runs" / "tiny"
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000003"] and last_step(folder) == 2


def train_and_save_forever(resolved: ResolvedConfig, output: Path, is_saving: Path) -> None:
    def never_done(*arguments: Any) -> None:
        is_saving.touch()
        time.sleep(600)

    contents.commit_checkpoint = never_done
    train_here(resolved, output)


def test_second_signal_does_not_wait_for_the_save(tiny_run, tmp_path):
    is_saving, folder, output = tmp_path / "is_saving", tmp_path / "runs" / "tiny", tmp_path / "output"
    resolved = load_config(tiny_run(**UNSAVED, train__max_steps=10**5))
    process = FORKING.Process(target=train_and_save_forever, args=(resolved, output, is_saving))
    process.start()
    for condition in (lambda: last_step(folder) > 2, is_saving.exists):
        wait_until(condition, process.is_alive, output)
        process.terminate()
    repeated_at = time.monotonic()
    while process.is_alive():  # within a second it counts as the same request
        assert time.monotonic() < repeated_at + 60, output.read_text()
        process.terminate()
        time.sleep(0.05)
    assert process.exitcode == 143
    assert not list((folder / "checkpoints").glob("step-*"))
    assert "stopped by" not in output.read_text()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("launcher", "number"), [(ACCELERATE, signal.SIGTERM), (TORCHRUN, signal.SIGKILL)], ids=["accelerate", "torchrun"]
)
def test_processes_save_and_end_if_their_launcher_dies(tiny_run, tmp_path, launcher, number):
    """`accelerate launch` does not forward SIGTERM to a single process, and nothing forwards kill -9."""
    folder, output = tmp_path / "runs" / "tiny", tmp_path / "output"
    command = [*launcher, *tiny_run(**UNSAVED, train__max_steps=10**5, batch__micro_batch_size=4)]
    with output.open("w") as file:
        started = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT)
    trainers: list[psutil.Process] = []
    try:
        wait_until(lambda: last_step(folder) > 2, lambda: started.poll() is None, output)
        children = psutil.Process(started.pid).children()
        trainers += [child for child in children if "scripts/train.py" in child.cmdline()]
        started.send_signal(number)
        started.wait(60)
        wait_until(lambda: not any(map(is_alive, trainers)), lambda: True, output)
    finally:
        started.kill()
        for trainer in filter(is_alive, trainers):
            trainer.kill()
    processes = 2 if launcher is TORCHRUN else 1
    assert len(trainers) == processes
    assert_stopped_at_its_last_row(folder, output.read_text(), "SIGTERM")
    manifest = json.loads((folder / "checkpoints" / "latest" / "manifest.json").read_text())
    assert manifest["processes"] == processes
    assert {f"random_states_{rank}.pkl" for rank in range(processes)} <= set(manifest["files"])
    assert "Traceback" not in output.read_text().split("stopped by")[0]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def test_burst_of_signals_counts_once_and_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in ALL}
    with Signals() as signals, pytest.raises(Stopped) as ended, signals.deferred():
        handlers = [signal.getsignal(number) for number in ALL]
        with signals:
            pass
        assert [signal.getsignal(number) for number in ALL] == handlers, "nested use keeps them"
        assert (signals.stop, signals.save) == (0, 0)
        signal.raise_signal(signal.SIGUSR1)
        assert (signals.stop, signals.save) == (0, 1)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop == signal.SIGINT
    assert ended.value.code == 130, "the signal had no effect"
    assert {number: signal.getsignal(number) for number in ALL} == before


DEAF = """
import ctypes, sys
from hfgolf.system import signals

signals.DEAF_SECONDS, signals.SAME_REQUEST_SECONDS = 0.2, 0.0

def wait_in_a_library():  # a mutex that this thread has already: no signal ends the call, so no handler runs
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        print("waiting", flush=True)
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

with signals.Signals() as entered:
    if sys.argv[1] == "saving":
        with entered.deferred():
            wait_in_a_library()
    wait_in_a_library()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other mutexes")
@pytest.mark.parametrize(
    ("number", "place"), [(signal.SIGTERM, "setting up"), (signal.SIGINT, "saving"), (signal.SIGHUP, "saving")]
)
def test_signal_during_a_call_that_lets_no_handler_run_ends_the_process(number, place):
    """As in a collective of C++, or while a tokenizer is trained. Where there is something to save, the second one."""
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF, place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    killer = threading.Timer(30, process.kill)  # ends each wait below
    killer.start()
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
        main_thread, asleep = Path(f"/proc/{process.pid}/task/{process.pid}/stat"), 0
        while asleep < 5:
            time.sleep(0.05)
            asleep = asleep + 1 if ") S " in main_thread.read_text() else 0
        process.send_signal(number)
        line = process.stderr.readline()
        if place == "saving":
            assert line.startswith(f"{number.name}: waiting for the end of the step to save; a second one ends")
            number = signal.SIGTERM  # nobody repeats SIGHUP on purpose
            process.send_signal(number)
            line = process.stderr.readline()
        where = "in the middle of a step" if place == "saving" else "before the first step"
        assert line.startswith(f"stopped by {number.name} {where}")
        assert process.wait(10) == 128 + number
    finally:
        killer.cancel()
        process.kill()


def test_signal_to_a_forked_child_does_not_count_as_one_to_the_parent(monkeypatch):
    monkeypatch.setattr("hfgolf.system.signals.DEAF_SECONDS", 0.0)
    with Signals():
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            signal.raise_signal(signal.SIGTERM)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.2)  # the thread would end this process


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_outside_the_loop_is_one_line_of_the_first_process(monkeypatch, capsys, number, rank):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended, Signals():
        signal.raise_signal(number)
        pytest.fail("the signal did not end the process")
    assert ended.value.code == 128 + number
    line = f"stopped by {number.name} before the first step; run the same command to start again\n"
    assert capsys.readouterr().err == (line if rank == "0" else "")


def test_forked_worker_ends_at_once_silently(capfd):
    """It inherits the handlers of its parent, but has nothing to save."""
    with Signals() as signals, signals.deferred():
        worker = os.fork()
        if not worker:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 143
        assert signals.stop == 0
    assert capfd.readouterr().err == ""


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.stop == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_repeated_sighup_counts_once(monkeypatch):
    """The shell and the kernel each send SIGHUP when a terminal closes; the save in between must finish."""
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr("hfgolf.system.signals.SAME_REQUEST_SECONDS", -1.0)
    with pytest.raises(Stopped), Signals() as signals, signals.deferred():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert ends == []
        signal.raise_signal(signal.SIGTERM)
        assert ends == [143]


def test_no_handlers_are_installed_outside_the_main_thread():
    seen = []

    def enter() -> None:
        with Signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
