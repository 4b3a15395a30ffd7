"""Milestones: when they are due, that the words are those of the text, and that no kill loses or doubles one."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import events
from test_resume import Interrupted, run_in_parts
from transformers import AutoModelForCausalLM

import hfgolf
from hfgolf.checkpoint.state import TrainState
from hfgolf.config.milestones import milestone
from hfgolf.config.sections import BatchSection, DataSection, TokenizerSection, TrainSection
from hfgolf.data import words
from hfgolf.data.token_cache import load_tokens
from hfgolf.hooks import milestones as hook
from hfgolf.system.errors import UserError

BABYLM = [f"{n}M words" for n in (*range(1, 10), *range(10, 101, 10), *range(200, 1001, 100))]
TOKENS = "[0.6k, 1k tokens, 1024, 1.5k, 2k]"  # of steps of 256 tokens: at step 3, 4, 4, 6 and 8
STEPS = {"chck_0.6k_tokens": 3, "chck_1k_tokens": 4, "chck_1024_tokens": 4, "chck_1.5k_tokens": 6, "chck_2k_tokens": 8}


def taken(folder: Path) -> dict[str, int]:
    """Return {name: step} of the milestones in the log of a run, each of which must have its folder, and only these."""
    logged = {(event["name"], event["step"]) for event in events(folder) if event["event"] == "milestone"}
    assert sorted(path.name for path in (folder / "milestones").iterdir()) == sorted(name for name, _ in logged)
    return dict(logged)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_names_are_those_of_babylm():
    names = [milestone(entry).name for entry in BABYLM]
    assert names[0] == "chck_1M" and names[9:11] == ["chck_10M", "chck_20M"] and names[-1] == "chck_1000M"
    assert [milestone(entry).amount for entry in ("10M", "1.5B tokens", "512")] == [10**7, 15 * 10**8, 512]
    assert [milestone(entry).unit for entry in ("10M", "1.5B tokens", "2k words")] == ["tokens", "tokens", "words"]
    assert TrainSection(max_steps=1, milestones=BABYLM).milestones == BABYLM


@pytest.mark.parametrize("entry", ["", "0", "0.5", "M", "1m", "1e6", "-1M", "1M words ", "1M bytes", "9" * 16, "../1M"])
def test_another_entry_is_refused_in_one_line(entry):
    with pytest.raises(UserError, match=r"^train\.milestones: .* allowed: a list, each an amount of tokens or words"):
        TrainSection(max_steps=1, milestones=[entry])


def test_a_name_stands_for_one_milestone():
    with pytest.raises(UserError, match=r"two entries are named chck_1M_tokens; leave one out"):
        TrainSection(max_steps=1, milestones=["1M", "1M words", "1M tokens"])


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_words_are_those_of_the_text(tmp_path, corpus_file, kind):
    """Also if documents follow each other, and the last word of one the first of the next."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"ends{number} here, fünf")
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "val.txt").write_text("held out")
    files, held_out = [str(corpus_file), str(tmp_path / "*.txt")], [str(tmp_path / "val" / "val.txt")]
    data = DataSection(source="files", files=files, val_files=held_out, cache_dir=str(tmp_path / "cache"))
    tokens = load_tokens(data, TokenizerSection(kind=kind))
    num_words = len(corpus_file.read_text().split()) + 40 * 3
    assert words.words_per_token(tokens.train, tokens.tokenizer) * len(tokens.train) == pytest.approx(
        num_words,
        abs=len(tokens.train) / words._WINDOW_TOKENS + 1,  # a window may begin within a word
    )


def test_a_long_text_is_counted_in_windows_all_over_it(tmp_path, corpus_file, monkeypatch):
    rare, held_out = tmp_path / "rare.txt", tmp_path / "val.txt"
    rare.write_text("x" * 40_000)
    held_out.write_text("held out")
    files = [str(corpus_file), str(rare)]
    data = DataSection(source="files", files=files, val_files=[str(held_out)], cache_dir=str(tmp_path / "cache"))
    tokens = load_tokens(data, TokenizerSection(kind="byte"))
    whole = words.words_per_token(tokens.train, tokens.tokenizer)
    monkeypatch.setattr(words, "_WINDOW_TOKENS", 2**8)
    monkeypatch.setattr(words, "MAX_COUNTED_TOKENS", 2**13)
    read: list[int] = []
    real = type(tokens.train).read
    monkeypatch.setattr(type(tokens.train), "read", lambda self, at: read.append(len(at)) or real(self, at))
    assert words.words_per_token(tokens.train, tokens.tokenizer) == pytest.approx(whole, rel=0.1)
    assert sum(read) <= 2**13 < len(tokens.train) / 4


def test_a_milestone_is_due_at_the_first_step_that_has_read_so_much():
    batch = BatchSection(sequence_length=8, tokens_per_step=32)
    ahead = [milestone(entry) for entry in ("64", "65", "10 words", "11 words", "1B words")]
    counted = words.Words((0.25,), words.Turns([(0, (1,))], 8))
    due = hook.due_steps(ahead, batch, TrainState(), counted.read)
    assert due == {"chck_64_tokens": 2, "chck_10": 2, "chck_11": 2, "chck_65_tokens": 3, "chck_1B": 125_000_000}
    assert list(due.values()) == sorted(due.values())
    state = TrainState(step=2, tokens=64, blocks=8)
    assert hook.due_steps(ahead, batch, state, lambda more: counted.read(8 + more)).keys() == {
        "chck_65_tokens",
        "chck_1B",
    }
    assert hook.due_steps([milestone("1 words")], batch, TrainState(), lambda more: 0.0)["chck_1"] > 10**15


@pytest.mark.slow
def test_a_run_killed_between_milestones_exports_each_as_a_straight_run_does(run, tiny_run, monkeypatch):
    options = {"train__milestones": TOKENS, "train__max_steps": 9, "train__save_every_steps": 100}
    straight = run(tiny_run(run__name="straight", **options))
    assert taken(straight) == STEPS
    broken = run_in_parts(run, tiny_run, (3, 5, 8), monkeypatch, **options)
    assert taken(broken) == STEPS
    first, second = (contents_of(folder / "milestones") for folder in (straight, broken))
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name] and not name.endswith("README.md")] == []
    weights = {
        name: AutoModelForCausalLM.from_pretrained(straight / "milestones" / name).state_dict() for name in STEPS
    }
    last = AutoModelForCausalLM.from_pretrained(straight / "model").state_dict()
    same = [all(torch.equal(weights[a][key], weights[b][key]) for key in last) for a, b in itertools.pairwise(weights)]
    assert same == [False, True, False, False], "the model of each step, and not the last one"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in the export", "before the checkpoint"])
def test_a_milestone_that_dies_is_exported_by_the_resume(run, tiny_run, monkeypatch, moment):
    options = {"train__milestones": "[1k]", "train__save_every_steps": 3, "train__max_steps": 6}
    place, name = (hook, "export_now") if moment == "in the export" else (hfgolf.train.loop, "report_step")
    real = getattr(place, name)

    def dies(run_: Any, *arguments: Any, **named: Any) -> Any:
        if run_.state.step == 4:
            raise Interrupted
        return real(run_, *arguments, **named)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(place, name, dies)
        run(tiny_run(**options))
    folder = run(tiny_run(**options, train__resume="auto"))
    assert taken(folder) == {"chck_1k_tokens": 4}


def test_words_count_in_a_run_on_all_of_its_texts(run, tiny_run, corpus_file, caplog):
    """A milestone comes with a checkpoint, so a resume begins there; the log and the card say what was read."""
    text = corpus_file.read_text()
    ratio = len(text.split()) / len(text.encode())
    options = {"train__save_every_steps": "null", "train__keep_last": 9}
    folder = run(tiny_run(train__milestones="[100 words, 1k words]", **options))
    step = int(np.ceil(100 / ratio / 256))
    (event,) = [event for event in events(folder) if event["event"] == "milestone"]
    assert (event["name"], event["step"], event["tokens"]) == ("chck_100", step, 256 * step)
    assert event["words"] == pytest.approx(256 * step * ratio, rel=0.02)
    card = (folder / "milestones" / "chck_100" / "README.md").read_text()
    assert f"step {step}, after {256 * step} training tokens ({event['words']} words)." in card
    assert (folder / "checkpoints" / f"step-{step:06d}").is_dir()
    assert any("milestone chck_1k is not reached by the last step, 6; train longer" in line for line in caplog.messages)
    assert "milestone" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_words_of_a_text_that_was_replaced_count_on(run, tiny_run, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("a b c d " * 3000)  # a word in two bytes
    of_text = {"train__milestones": "[100 words, 600 words]", "train__max_steps": 3}
    folder = run(tiny_run(**of_text))
    (before,) = [e["words"] / e["tokens"] for e in events(folder) if e["event"] == "milestone"]
    changed = {"data__files": other, "train__resume": "latest", "train__resume_with_other": "data"}
    run(tiny_run(**of_text | {"train__max_steps": 9}, **changed))
    step = 3 + int(np.ceil((600 - 768 * before) / 128))
    assert taken(folder) == {"chck_100": taken(folder)["chck_100"], "chck_600": step}
    state = json.loads((folder / "checkpoints" / "step-000009" / "train_state.json").read_text())
    assert state["hooks"]["Milestones"]["words"] == pytest.approx(768 * before + 6 * 128, rel=1e-3)


@pytest.mark.slow
def test_a_milestone_from_before_it_was_stated_is_named_not_faked(run, tiny_run, caplog):
    folder = run(tiny_run())
    with caplog.at_level(logging.WARNING, "hfgolf"):
        run(tiny_run(train__milestones="[1k, 2k]", train__max_steps=8, train__resume="latest"))
    assert taken(folder) == {"chck_2k_tokens": 8}
    assert "milestone chck_1k_tokens is of a step before this start, and was not exported then" in caplog.messages
