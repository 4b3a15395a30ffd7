"""hfgolf chat: lines are texts to continue or messages to answer, on a terminal and from a pipe."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_export import build_tiny

from hfgolf.data.chat import add_chat_template
from hfgolf.evaluate.sample import TextStream, generate_answer, generate_text
from hfgolf.publish.load import load_exported
from hfgolf.train.console import shown

ROOT = Path(__file__).parents[2]
pty = pytest.importorskip("pty")  # not on Windows
SETTINGS = {"max_new_tokens": 6, "temperature": 0.8}


@pytest.fixture
def save(tmp_path) -> Callable[..., Path]:
    """Return a function that saves a tiny model, whose tokenizer has a chat template if it is a chat model."""

    def save_(is_chat: bool = False, **shape: Any) -> Path:
        model, tokenizer = build_tiny(**shape)
        if is_chat:
            add_chat_template(tokenizer)
            model.config.vocab_size = len(tokenizer)
            model = type(model)(model.config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save_


@pytest.fixture
def chat(hfgolf, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Return a function that pipes lines into the script: (status, stdout, stderr)."""

    def chat_(model: object, text: bytes, *options: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return hfgolf("chat", model, "--max_new_tokens", 6, *options)

    return chat_


def test_each_line_of_a_pipe_is_continued_in_order_with_the_next_seed(save, chat):
    folder = save()
    model, tokenizer = load_exported(str(folder))
    texts = [generate_text(model, tokenizer, "ab", seed=seed, max_new_tokens=6) for seed in (3, 4)]
    expected = "".join(f"{text.removeprefix('ab')}\n" for text in texts)
    assert chat(folder, b"ab\r\nab\n", "--seed", 3) == (0, expected, "")
    assert chat(folder, b"/seed 3\nab\n/seed 4\nab\n/quit now \nab\n") == (0, expected, "")


def test_settings_change_on_the_fly(save, chat):
    folder = save()
    greedy = chat(folder, b"ab\n", "--temperature", 0)
    assert chat(folder, b"/temperature 0\nab\n") == greedy
    status, out, error = chat(folder, b"/top_k 7\n/top_k\n/help\n")
    assert (status, out) == (0, "")
    assert error.startswith("/top_k 7\n") and "\n  /temperature 0.8 " in error and "\n  /top_k 7 " in error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"/temprature 1\n", "there is no command /temprature; did you mean /temperature?"),
        (b"/top_p 2\n", "/top_p: 2.0 is out of range; allowed: 1e-09 to 1."),
        (b"/temperature 1e-5\n", "/temperature: 1e-05 is out of range; allowed: 0, or 0.001 to 1000000."),
        (b"ab\nc\xe9\n", "standard input, line 2: not UTF-8; convert it, or set the terminal to UTF-8."),
    ],
)
def test_a_line_that_has_no_answer_ends_a_pipe_in_one_line(save, chat, text, says):
    status, _, error = chat(save(), text)
    assert (status, error) == (2, f"error: {says}\n")


def test_a_pipe_is_in_utf_8_also_where_the_terminal_is_not(save, chat, monkeypatch):
    folder = save()
    answered = chat(folder, "ä\n".encode())
    monkeypatch.setattr("hfgolf.commands.options.os", SimpleNamespace(fsencode=lambda text: text.encode("ascii")))
    assert chat(folder, "ä\n".encode()) == answered and answered[0] == 0


def test_a_text_may_begin_with_a_slash(save, chat):
    folder = save()
    text = generate_text(*load_exported(str(folder)), "/usr/bin", max_new_tokens=6)
    assert chat(folder, b"/usr/bin\n") == (0, f"{text.removeprefix('/usr/bin')}\n", "")


def test_a_wrong_model_is_told_before_a_line_is_read(save, chat, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    save()
    assert chat("./modell", b"") == (2, "", "error: --model: there is no model ./modell; did you mean model?\n")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    status, out, error = chat("model", b"")
    assert (status, out, error.count("\n")) == (2, "", 1) and "cannot load model" in error


def test_a_conversation_is_remembered_until_reset(save, chat):
    folder = save(is_chat=True)
    model, tokenizer = load_exported(str(folder))
    alone = generate_answer(model, tokenizer, "b", temperature=0, max_new_tokens=6)
    greedy = ("--temperature", 0)
    first, second = chat(folder, b"a\nb\n", *greedy)[1].split("\n")[:2]
    assert first == generate_answer(model, tokenizer, "a", temperature=0, max_new_tokens=6)
    assert second != alone
    assert chat(folder, b"a\n/reset\nb\n", *greedy) == (0, f"{first}\n{alone}\n", "")


def test_the_oldest_messages_of_a_long_conversation_are_forgotten(save, chat):
    """With learned positions, a longer one could not be read at all."""
    folder = save(is_chat=True, position_embedding="learned")  # 32 tokens
    status, out, error = chat(folder, b"abcdefgh\n" * 6, "--temperature", 0)
    assert (status, error) == (0, "") and out.endswith("\n")


@pytest.mark.parametrize(
    ("text", "pieces"), [("aä€b".encode(), ["a", "ä", "€", "b"]), (b"a\xe2\x82b\xff", ["a", "\ufffdb", "\ufffd"])]
)
def test_streamed_text_has_no_half_characters(text, pieces):
    written: list[str] = []
    stream = TextStream(build_tiny()[1], [], written.append)
    stream.put(torch.tensor([[1, 2]]))  # the prompt
    for byte in text:  # a token's id is its byte
        stream.put(torch.tensor([byte]))
    stream.end()
    assert written == pieces
    assert stream.text == text.decode(errors="replace") and stream.num_tokens == len(text)


@pytest.mark.slow
def test_a_terminal_has_a_prompt_and_survives_ctrl_c(save):
    """Typed into a pseudo-terminal."""
    folder = save()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hfgolf", "chat", str(folder), "--max_new_tokens", "6"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
    seen = ""

    def until(text: str) -> str:
        nonlocal seen
        while text not in seen:
            assert select.select([ours], [], [], 120)[0], seen
            seen += os.read(ours, 4096).decode()
        before, _, seen = seen.partition(text)
        return before

    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        try:
            assert "/help lists the settings." in until("> ")
            os.write(ours, b"/top_p 3\n")
            assert "error: /top_p: 3.0 is out of range" in until("> ")
            os.write(ours, b"ab\n")
            written = generate_text(*load_exported(str(folder)), "ab", max_new_tokens=6)
            assert shown(written).split() == until("[6 tokens, ").partition("ab")[2].split()
            until(" tokens/s]")
            until("> ")
            os.write(ours, b"/max_new_tokens 1000000\n")
            until("> ")
            os.write(ours, b"cd\n")
            until("cd")
            until("cd")  # what was typed, and the text that begins with it
            process.send_signal(signal.SIGINT)
            until("> ")
            os.write(ours, b"/quit\n")
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(theirs)
            os.close(ours)
