"""What a launcher tells a process is checked, and waiting for the others is said and can be ended."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from hfgolf.system.rendezvous import Launch, LaunchError, find_launch

COMPLETE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def launched(monkeypatch):
    def set_variables(variables: dict[str, str]) -> None:
        for name in COMPLETE:
            monkeypatch.delenv(name, raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

    return set_variables


@pytest.mark.parametrize("missing", COMPLETE)
def test_each_variable_that_an_earlier_job_left_alone_is_named(launched, missing):
    launched({name: text for name, text in COMPLETE.items() if name != missing})
    with pytest.raises(LaunchError, match=rf"^{missing}: it is not set, but .*; start .* or unset them to train"):
        find_launch()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["two", "-1", "9" * 5000, "\u0662", "a\nerror: b"])
def test_each_variable_must_be_a_number(launched, name, text):
    launched(COMPLETE | {name: text})
    with pytest.raises(LaunchError, match=rf"^{name}: .* is not a whole number from \d to \d+; unset") as raised:
        find_launch()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250


@pytest.mark.parametrize("change", [{"RANK": "2"}, {"LOCAL_RANK": "2"}, {"WORLD_SIZE": "1"}])
def test_numbers_that_do_not_fit_together_are_refused(launched, change):
    launched(COMPLETE | change)
    with pytest.raises(LaunchError, match=r"^RANK: .*; allowed: LOCAL_RANK <= RANK < WORLD_SIZE"):
        find_launch()


ONE = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"RANK": "0", "MASTER_ADDR": "nowhere"}, None),
        (COMPLETE | ONE, None),
        (COMPLETE, Launch(1, 2, "127.0.0.1", 29500)),
    ],
)
def test_several_processes_are_found_only_if_somebody_started_them(launched, variables, found):
    launched(variables)
    assert find_launch() == found


ALONE = """
import logging, sys
from datetime import timedelta
from hfgolf.system import rendezvous
from hfgolf.system.command import run_command
from hfgolf.system.signals import Signals

logging.basicConfig(format="%(message)s")
rendezvous.PATIENCE_SECONDS = 0.2

def main():
    with Signals():
        rendezvous.meet(rendezvous.find_launch(), timedelta(seconds=float(sys.argv[1])))

run_command(main)
"""


def start_alone(rank: int, port: int, seconds: float = 600.0) -> Any:
    variables = COMPLETE | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", ALONE, str(seconds)]
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_process_that_is_alone_says_for_whom_it_waits_and_a_signal_ends_it(rank, number, port):
    process = start_alone(rank, port)
    try:
        why = " (Connection refused)" if rank else ""
        line = process.stderr.readline()
        assert line.startswith(f"waiting for 1 of 2 processes at 127.0.0.1:{port}{why}: rank {1 - rank}; "), line
        process.send_signal(number)
        assert process.wait(10) == 128 + number
    finally:
        process.kill()


@pytest.mark.slow
def test_a_wait_ends_with_one_line_when_patience_does(port):
    done = start_alone(1, port, seconds=1.0)
    _, said = done.communicate(timeout=60)
    assert done.returncode == 2
    *_, last = said.splitlines()
    assert re.match(r"error: WORLD_SIZE: gave up waiting for 1 of 2 processes at .*: rank 0; .*unset it", last), said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_port_that_another_program_has_is_one_line():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        done = start_alone(0, taken.getsockname()[1])
        _, said = done.communicate(timeout=60)
    assert done.returncode == 2 and said.count("\n") == 1, said
    assert re.match(r"error: MASTER_PORT: rank 0 cannot listen on port \d+ .*set another MASTER_PORT\.", said)
