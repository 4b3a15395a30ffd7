"""What the machine refuses is one line with its cause, whichever library raised it; no text forges a second line."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from faults import FORKING
from safetensors import SafetensorError

from hfgolf.cli import main
from hfgolf.system import errors
from hfgolf.system.command import run_command
from hfgolf.system.errors import UserError, explained, writing
from hfgolf.system.wording import labeled
from hfgolf.train.console import _SafeFormatter


def to_output() -> AbstractContextManager[None]:
    return writing("--output", Path("runs/x"))


def behind(inner: Exception) -> Exception:
    """Return an error that hides another one, as torch.save and datasets raise them."""
    try:
        try:
            raise inner
        except Exception:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")  # noqa: B904
    except RuntimeError as error:
        return error


FORMS = {
    "python": lambda code: OSError(code, os.strerror(code), "runs/.partial-x/model"),
    "descriptor": lambda code: OSError(code, os.strerror(code)),
    "rust": lambda code: SafetensorError(f"Error: I/O error: {os.strerror(code)} (os error {code})"),
    "tokenizers": lambda code: Exception(f"{os.strerror(code)} (os error {code})"),
    "arrow": lambda code: pa.ArrowException(f"Error writing bytes. Detail: [errno {code}] {os.strerror(code)}"),
    "text": lambda code: RuntimeError(f"unable to open file: {os.strerror(code)}"),
    "hidden": lambda code: behind(OSError(code, os.strerror(code))),
}


# EIO's text is too general without its number
REFUSALS = [(form, code) for form in FORMS for code in sorted(errors._ADVICE) if (form, code) != ("text", errno.EIO)]


@pytest.mark.parametrize(("form", "code"), REFUSALS)
def test_refusal_of_the_machine_is_one_line_whichever_library_notices_it(form, code, capsys):
    def main() -> None:
        raise FORMS[form](code)

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert os.strerror(code) in said and errors._ADVICE[code] in said
    assert form != "python" or "runs/.partial-x/model: " in said
    with pytest.raises(UserError, match=r"^--output: cannot write to runs/x ") as raised, to_output():
        main()
    assert os.strerror(code) in str(raised.value)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES])
@pytest.mark.parametrize("path", ["text.txt", "runs/xy/text.txt", "/other/x/text.txt"])
def test_where_output_goes_is_not_blamed_for_a_file_elsewhere(path, code):
    with pytest.raises(UserError, match=f"^{path}: {os.strerror(code)}[;.]"), to_output():
        raise OSError(code, os.strerror(code), path)


@pytest.mark.parametrize("path", ["runs", "runs/x", "runs/x/a/b", "runs/.replaced-x", Path("runs/x").absolute()])
def test_where_output_goes_is_named_for_what_is_there(path):
    with pytest.raises(UserError, match=r"^--output: cannot write to runs/x "), to_output():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_memory_that_is_refused_is_one_line(error):
    assert str(explained(error)).startswith(f"{os.strerror(errno.ENOMEM)}; free memory, or take a smaller model")


BUGS = [ValueError("3"), KeyError("x"), OSError("no code"), UserError("os error 28"), RuntimeError("shape mismatch")]


@pytest.mark.parametrize("error", BUGS)
def test_a_bug_keeps_its_traceback(error):
    assert explained(error) is None


FORGED = ["a\nerror: b", "a\r\nerror: b", "\x1b[2Ka", "\x9b31m", "\u2028error: b", "\x85b", "\u202eabc", "a\x08\x00"]


@pytest.mark.parametrize("text", FORGED)
def test_no_text_in_a_message_forges_a_line_or_controls_the_terminal(text, capsys):
    def main() -> None:
        raise UserError(f"data.files: {text} is not UTF-8.")

    with pytest.raises(SystemExit):
        run_command(main)
    said = capsys.readouterr().err
    record = logging.LogRecord("hfgolf", logging.WARNING, "", 0, "the text of %s has changed", (text,), None)
    for line in (said.removesuffix("\n"), _SafeFormatter("%(message)s").format(record), labeled("data", text)):
        assert len(line.splitlines()) == 1
    assert said.removesuffix("\n").isprintable()
    assert UserError(text)._render_traceback_()[0].isprintable()


def test_lines_that_are_meant_stay():
    assert UserError("name your text:", "  hfgolf train").shown() == "error: name your text:\n  hfgolf train"


def write_with_small_files(verbs: list[list[str]], output: Path) -> None:
    """Run commands that may not write a file of more than 24 kB; what they say, and how they end, goes to a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 1024, resource.RLIM_INFINITY))
    with output.open("w") as said, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        for words in verbs:
            sys.argv = ["hfgolf"]
            try:
                main(words)
            except SystemExit as ended:
                print(f"status {ended.code}", flush=True)


@pytest.mark.slow
def test_each_verb_that_writes_says_in_one_line_that_it_may_not(run, tiny_run, tmp_path):
    """With a limit for the size of files, as on a full disk: whichever library writes a larger one is refused."""
    folder, output = str(run(tiny_run(train__max_steps=1))), ["--output", str(tmp_path / "output")]
    prepare = [f"--data.cache_dir={tmp_path / 'new'}", "--tokenizer.kind=bpe", "--tokenizer.vocab_size=300"]
    verbs = [
        ["prepare", *tiny_run(), *prepare],
        ["train", *tiny_run(run__name="new")],
        ["export", "--model", f"{folder}/model", "--to", "native", *output],
        ["golf", "export", "--run", folder, "--budget_bytes", "60000", *output],
    ]
    process = FORKING.Process(target=write_with_small_files, args=(verbs, tmp_path / "said"))
    process.start()
    process.join()
    said = (tmp_path / "said").read_text()
    assert said.count("status 2\n") == len(verbs), said
    for verb, text in zip(verbs, said.split("status 2\n"), strict=False):
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and os.strerror(errno.EFBIG) in lines[0], (verb[:2], text)
    assert "Traceback" not in said
