"""What a person types after a script's name: absurd numbers and bad outputs are one line each, before any work."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

ABSURD = ("0", "-1", "nan", "inf", "1e308", str(10**30), "9" * 5000, "many")
NUMBERS = {
    "compare_runs.py": ("--jobs",),
    "evaluate.py": ("--sequence_length", "--batch_size"),
    "find_lr.py": ("--steps", "--lowest", "--highest"),
    "generate.py": ("--max_new_tokens", "--temperature", "--top_k", "--top_p", "--num_samples", "--seed"),
    "ladder.py": ("--repetitions", "--losses"),
    "make_report.py": ("--price_per_hour",),
    "plan.py": ("--tokens_per_second", "--mfu", "--dollars", "--minutes", "--price_per_hour"),
    "profile_step.py": ("--steps",),
    "show_schedule.py": ("--seconds_per_step",),
    "verify_resume.py": ("--steps", "--kills", "--kill_seed", "--num_processes"),
    "vocabulary_study.py": ("--vocab_sizes", "--hidden_size", "--context", "--max_bytes"),
}
MAY_BE_0 = {"--kills", "--kill_seed", "--temperature", "--top_k", "--seed", ("make_report.py", "--price_per_hour")}


@pytest.mark.parametrize(("script", "option"), [(script, option) for script in NUMBERS for option in NUMBERS[script]])
def test_an_absurd_number_is_one_line(run_script, tmp_path, monkeypatch, script, option):
    monkeypatch.chdir(tmp_path)
    needed = {"vocabulary_study.py": ("--files", "text.txt")}.get(script, ())
    for text in ABSURD:
        if text == "0" and {option, (script, option)} & MAY_BE_0:
            continue
        status, printed, error = run_script(script, *needed, option, text)
        assert (status, printed, error.count("\n")) == (2, "", 1), (text, error)
        assert option[2:] in error and "allowed: " in error and len(error) < 250, error
    assert list(tmp_path.iterdir()) == []


def test_what_argparse_refuses_is_one_line_too(run_script):
    for arguments in (["generate.py"], ["evaluate.py", "--model"], ["doctor.py", "--jsonn", "x"]):
        status, printed, error = run_script(*arguments)
        assert (status, printed, error.count("\n")) == (2, "", 1) and error.startswith("error: "), error


OUTPUTS = {  # script: its arguments, the option, and what must not be reached
    "compare_runs.py": (["--runs", "run"], "--output_dir", "hfgolf.tools.compare.outcome.read_outcome"),
    "export.py": (["--run", "run"], "--output", "hfgolf.tools.export_checkpoint.export_checkpoint"),
    "find_lr.py": (["--train.max_steps=1"], "--output", "hfgolf.tools.find_lr.find_lr"),
    "ladder.py": (["--train.max_steps=1"], "--output", "hfgolf.tools.scratch.scratch_run"),
    "make_report.py": (["run"], "--output", "hfgolf.run.record.read_run"),
    "profile_step.py": (["--train.max_steps=1"], "--output", "hfgolf.tools.scratch.scratch_run"),
    "roofline.py": ([], "--output", "hfgolf.tools.scratch.scratch_run"),
    "show_schedule.py": (["--train.max_steps=1"], "--output", "hfgolf.optim.schedule.apply_schedule"),
    "vocabulary_study.py": (["--files", "text.txt"], "--output", "hfgolf.tools.vocabulary.write_sample"),
}
SUFFIXES = {"find_lr.py": ".png", "make_report.py": ".html", "show_schedule.py": ".svg"}


@pytest.mark.parametrize("script", OUTPUTS)
def test_an_output_that_cannot_be_written_is_one_line_before_any_work(run_script, tmp_path, monkeypatch, script):
    def reached(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"{script} began to work")

    arguments, option, work = OUTPUTS[script]
    module, _, name = work.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), name, reached)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").touch()
    for folder, reason in (("file/deeper", "Not a directory"), ("/proc/nowhere", "No such file or directory")):
        status, printed, error = run_script(script, *arguments, option, f"{folder}/out{SUFFIXES.get(script, '')}")
        assert (status, printed, error.count("\n")) == (2, "", 1), error
        assert error.startswith(f"error: {option}: cannot write to {folder}") or script in SUFFIXES, error
        assert f"({reason}); choose another folder." in error, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_a_page_or_picture_has_a_name_that_says_so_and_is_no_folder(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    for arguments, message in (
        (["--output", "page.pdf"], "--output: page.pdf can't be written; allowed: a name that ends in .html."),
        (["--output", "folder.html"], "--output: folder.html is a folder; name a file."),
        (["--png", "loss.gif"], "--png: loss.gif can't be written; allowed: a name that ends in .png."),
    ):
        assert run_script("make_report.py", "run", *arguments) == (2, "", f"error: {message}\n")
