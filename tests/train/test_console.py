"""What a run prints: lines in a file, one bar and lines above it on a terminal, and nothing on a closed stream."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hfgolf.system.command import own_command, run_command
from hfgolf.train import console as console_module
from hfgolf.train.console import Console, quiet_libraries, show_log, start_log

ROOT = Path(__file__).parents[2]


@pytest.fixture
def closed_pipe():
    """A pipe whose reader is gone, like that of `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("buffering", [1, -1])  # by line: print fails; by block: the last flush
def test_output_to_a_full_disk_is_one_line(buffering, monkeypatch, capsys):
    with open("/dev/full", "w", buffering=buffering) as full, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", full)
        run_command(lambda: print("a line of a report"))
    said = capsys.readouterr().err
    assert (ended.value.code, said) == (1, "error: the output could not be written: No space left on device.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_error_after_output_to_a_full_disk_keeps_its_status():
    program = (
        "from hfgolf.system.command import run_command\nfrom hfgolf.system.errors import UserError\n"
        "def main():\n    print('a line of a report')\n    raise UserError('what; what to do.')\nrun_command(main)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, text=True)
    assert (done.returncode, done.stderr) == (2, "error: what; what to do.\n")


def test_control_characters_are_escaped(capsys):
    show_log(is_main_process=True)
    logging.getLogger("hfgolf").info("sample  %s", "a\tb\n\x1b]0;owned\x07 \x9b2J \rnaïve \u202e🌍")
    assert capsys.readouterr().out == "sample  a\tb\n\\x1b]0;owned\\x07 \\x9b2J \\rnaïve \\u202e🌍\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def drawn(self) -> list[str]:
        """Return what was drawn since the last call, without the blanks that remove a bar."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return [line.strip() for line in text.replace("\n", "\r").split("\r") if line.strip()]


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal that is stdout and stderr from now on (pytest sets both after fixtures), every step drawn."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(console_module, "_DRAW_EVERY_SECONDS", (0, 0))
    start_log(is_main_process=True, is_verbose=False)
    return screen


def row(step: int, val_loss: float | None = None) -> dict:
    figures = {"train_loss": 4.5, "learning_rate": 0.02, "grad_norm": 1.0, "tokens_per_second": 8012.0, "mfu": 0.3}
    return {"step": step, "val_loss": val_loss, "val_bits_per_byte": 2.5, "elapsed_seconds": 7.0, **figures}


def test_bar_moves_with_every_step_and_says_what_is_known(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Console() as console:
        console.open()
        console.now("loading torch")
        assert terminal.drawn() == ["loading torch"]
        console.begin(60, math.inf, tokens_per_step=1024, tokens_per_epoch=40 * 1024)
        console.switch("train")
        console.step(1, 5.0)  # a slow first step says nothing of the others
        (drawn,) = terminal.drawn()
        assert drawn.startswith("step 1 of 60 |") and drawn.endswith("|")
        console.step(2, 5.5)
        plan, again, drawn = terminal.drawn()
        assert plan.startswith("plan     60 steps, 61,440 tokens, 1.5 epochs in about 29 s, until ")
        assert again.startswith("step 1") and drawn.endswith("| 0:29 left")
        console.show(row(2), 60)
        assert terminal.drawn() == [], "a row without an evaluation is no line on a terminal"
        console.step(3, 6.0)
        assert terminal.drawn()[0].endswith("| loss 4.500  8,012 tokens/s  0:28 left")
        console.switch("evaluate")
        assert terminal.drawn()[0].endswith("  evaluating")
        console.show(row(3, val_loss=5.25), 60)
        line, drawn = terminal.drawn()
        assert line == "step 3/60  loss 4.5000  val loss 5.2500 (2.5000 bits per byte)  7 s"
        console.switch("train")
        console.step(4, 6.5, 5.25)
        assert terminal.drawn()[0].endswith("| loss 4.500  best val 5.250  8,012 tokens/s  0:28 left")
    assert terminal.drawn() == [], "the bar is gone at the end"


def test_bar_counts_the_minutes_that_end_a_run(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Console() as console:
        console.open()
        console.begin(math.inf, 120.0, tokens_per_step=1024, tokens_per_epoch=4096)
        for step in range(1, 5):
            console.step(step, 10.0 * step)
        plan = terminal.drawn()[1]
        assert plan.startswith("plan     about 12 steps, 12,288 tokens, 3.0 epochs in 1 min 40 s, until ")
        console.step(5, 50.0)
        (drawn,) = terminal.drawn()
        assert drawn.startswith("step 5 |") and drawn.endswith("| 1:10 left")


@pytest.mark.parametrize(("limit", "minutes", "seconds"), [(60, math.inf, 58 + 30), (math.inf, 2.0, 118 + 20)])
def test_the_expected_end_includes_evaluations_but_that_of_the_last_step_takes_no_minutes(
    monkeypatch, limit, minutes, seconds
):
    """All of them take as long as 30 steps, those at the last step as 20; a step takes a second, the first one five."""
    terminal = on_terminal(monkeypatch)
    with Console() as console:
        console.open()
        console.begin(limit, 60 * minutes, 1024, 4096, lambda last_step: (30.0, 20.0))
        console.step(1, 5.0)
        console.step(2, 1005.0 if limit == 60 else 2.0, evaluating=999.0 if limit == 60 else -4.0)
        assert terminal.drawn()[-1].endswith(f"| {seconds // 60}:{seconds % 60:02} left")


def test_an_evaluation_shows_how_far_it_is(monkeypatch, capsys):
    clock = iter(range(0, 10**6, 20))
    monkeypatch.setattr(console_module, "perf_counter", lambda: float(next(clock)))
    start_log(is_main_process=True, is_verbose=False)
    with Console() as console:  # no terminal: a line every half a minute
        for batch in range(6):
            console.progress(batch / 6)
    assert capsys.readouterr().out.splitlines() == [
        "evaluating 33%, about 1 min 20 s left",
        "evaluating 67%, about 40 s left",
    ]
    terminal = on_terminal(monkeypatch)
    with Console() as console:
        console.open()
        console.begin(60, math.inf, 1024, 4096)
        for step in (59, 60):
            console.step(step, float(step))
        console.switch("evaluate")
        console.progress(0)
        terminal.drawn()
        console.progress(0.25)
        assert terminal.drawn()[-1].endswith("| 1:00 left  evaluating 25%")
        console.switch("other")
        console.step(60, 70.0)
        assert terminal.drawn()[-1].endswith("| 0:00 left")


def test_bar_has_room_in_a_terminal_of_80_columns(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Console() as console:
        console.open()
        console.begin(math.inf, 7200.0, tokens_per_step=1024, tokens_per_epoch=4096)
        console.show({**row(3, val_loss=5.25), "tokens_per_second": 123_456}, 3600)
        for step in (1234, 1235):
            console.step(step, 2.0 * step, 5.25)
        drawn = terminal.drawn()[-1]
        assert len(drawn) - len(drawn.split("|")[1]) <= 72, "less than a tenth of the line is left for the bar"
        assert drawn.endswith("| loss 4.500  best val 5.250  123,456 tokens/s  1:18:50 left")


def test_lines_and_warnings_stay_whole_above_the_bar(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Console() as console:
        console.open()
        console.now("tokenizing")
        terminal.drawn()
        logging.getLogger("hfgolf").info("a line of ours")
        assert terminal.drawn() == ["a line of ours", "tokenizing"]
        warnings.warn("the sky falls", stacklevel=1)
        warned, *_, drawn = terminal.drawn()
        assert warned.endswith("UserWarning: the sky falls") and drawn == "tokenizing"
        logging.getLogger("some.library").warning("the disk is slow")
        assert terminal.drawn() == ["the disk is slow", "tokenizing"]


def test_without_a_terminal_there_are_lines_and_no_bar(capsys):
    start_log(is_main_process=True, is_verbose=False)
    with Console() as console:
        console.open()
        console.begin(60, math.inf, tokens_per_step=1024, tokens_per_epoch=4096)
        console.now("loading torch")
        for step in range(1, 4):
            console.step(step, float(step))
            console.show(row(step), 60)
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split("  ")[0] for line in out.splitlines()] == ["step 1/60", "plan", "step 2/60", "step 3/60"]


def test_a_notebook_has_the_bar_too_and_nothing_on_stderr_which_it_shows_on_red(monkeypatch, capsys):
    monkeypatch.setattr(console_module, "_is_notebook", lambda: True)
    start_log(is_main_process=True, is_verbose=False)
    with Console() as console:
        console.open()
        console.begin(60, math.inf, tokens_per_step=1024, tokens_per_epoch=4096)
        console.step(1, 1.0)
        for shown in (row(1), row(2, val_loss=5.25)):
            console.show(shown, 60)
    out, err = capsys.readouterr()
    lines = [line.split("\r")[-1] for line in out.split("\n")]  # what the bar leaves visible
    assert [line.split("  ")[0] for line in lines[:-1]] == ["step 2/60"]
    assert "step 1 of 60" in out and err == ""


def test_details_are_for_verbose(capsys):
    for is_verbose, said in ((False, ""), (True, "a table\n")):
        start_log(is_main_process=True, is_verbose=is_verbose)
        logging.getLogger("hfgolf").debug("a table")
        assert capsys.readouterr().out == said


def test_a_run_says_what_it_is_in_six_lines_and_what_came_of_it(run_script, tiny_run, tmp_path):
    said = run_script("train.py", *tiny_run())
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["run", "device", "data", "model", "batch", "evaluate"]
    assert [line.index(line.split()[1]) for line in lines[:6]] == [9] * 6, "aligned"
    assert [line.split()[0] for line in lines[6:9]] == ["step", "plan", "step"]
    metadata = json.loads((tmp_path / "runs" / "tiny" / "metadata.json").read_text())
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert sum(row["parameters"] for row in metadata["parameter_groups"]) == summary["parameters"]
    folder = str(tmp_path / "runs" / "tiny")
    assert [line.split()[-3:] for line in lines[-2:]] == [
        [own_command(), verb, folder] for verb in ("generate", "chat")
    ]
    assert said.err == ""


def test_only_the_warning_that_the_run_contradicts_is_silent(recwarn):
    quiet_libraries()
    warnings.warn("OMP_NUM_THREADS/MKL_NUM_THREADS unset, we set it at 1 to improve oob performance.", stacklevel=1)
    warnings.warn("OMP_NUM_THREADS is negative", stacklevel=1)
    assert [str(warning.message) for warning in recwarn] == ["OMP_NUM_THREADS is negative"]


def test_the_first_line_comes_before_torch(tmp_path):
    """An import of torch fails here; the run has named its folder by then."""
    (tmp_path / "my.txt").write_text("some text\n" * 100)
    program = "import sys; sys.modules['torch'] = None; from hfgolf import cli; cli.main(['train', 'my.txt'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "run      runs/my\n"
    assert "import of torch halted" in done.stderr
