"""A closed output stream neither stops a run nor causes a traceback."""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
from pathlib import Path

import pytest

from hfgolf.command_line import run_command
from hfgolf.train.console import show_log

ROOT = Path(__file__).parents[2]


@pytest.fixture
def closed_pipe():
    """A pipe whose reader is gone, like that of `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


def test_closed_stdout_silences_the_log(closed_pipe, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", closed_pipe)
    show_log(is_main_process=True)
    for step in range(3):
        logging.getLogger("hfgolf").info("step %d", step)
    assert capsys.readouterr().err == ""
    closed_pipe.write("whatever a library prints")
    closed_pipe.flush()


def test_run_continues_after_its_output_is_closed(closed_pipe, tiny_run, tmp_path, monkeypatch, capsys):
    """Like stdout in `| head -1` after head has ended."""
    monkeypatch.setattr(sys, "stdout", closed_pipe)
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", *tiny_run()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="__main__")
    folder = tmp_path / "runs" / "tiny"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6
    assert (folder / "model" / "model.safetensors").is_file()
    assert (ended.value.code or 0, capsys.readouterr().err) == (0, "")


def test_script_ends_quietly_on_a_closed_pipe(closed_pipe, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", closed_pipe)

    def main():
        for _ in range(10**4):
            print("a line of a report")

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert (ended.value.code, capsys.readouterr().err) == (141, "")


def test_control_characters_are_escaped(capsys):
    show_log(is_main_process=True)
    logging.getLogger("hfgolf").info("sample  %s", "a\tb\n\x1b]0;owned\x07 \x9b2J \rnaïve \u202e🌍")
    assert capsys.readouterr().out == "sample  a\tb\n\\x1b]0;owned\\x07 \\x9b2J \\rnaïve \\u202e🌍\n"
