"""hfgolf prepare builds the cache that training finds, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfgolf.data import stream_writer


@pytest.mark.slow
def test_prepared_tokens_are_reused_by_the_next_call_and_by_training(
    run, hfgolf, tiny_run, tmp_path, corpus_file, monkeypatch
):
    said = hfgolf("prepare", *tiny_run())
    num_bytes = corpus_file.stat().st_size
    train, val, where = said.out.splitlines()[-3:]
    assert [line.split()[0] for line in (train, val)] == ["train", "val"]
    numbers = [[int(word.replace(",", "")) for word in line.split()[1:4:2]] for line in (train, val)]
    assert sum(split_bytes for _, split_bytes in numbers) == num_bytes
    assert sum(tokens for tokens, _ in numbers) == num_bytes + 2  # byte tokens, and an end of text before each split
    folder = Path(where.split(": ")[0])
    assert folder.is_relative_to(tmp_path / "cache") and (folder / "train").is_dir() and "MB/s" in where

    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path for path in kept if b"one and four make" in path.read_bytes()] == [], (
        "the text was stored with its tokens"
    )

    monkeypatch.setattr(stream_writer, "build_encoder", lambda *_: pytest.fail("tokenized again"))
    said = hfgolf("prepare", *tiny_run())
    assert said.status == 0 and f"{folder}: already cached" in said.out
    assert (run(tiny_run(train__max_steps=1)) / "summary.json").is_file()


@pytest.mark.parametrize("named", [["--data.files"], []], ids=["--data.files TEXT", "TEXT"])
def test_no_limit_of_a_training_is_asked_for(corpus_file, tmp_path, hfgolf, named):
    said = hfgolf("prepare", *named, corpus_file, "--data.split=contiguous", f"--data.cache_dir={tmp_path}")
    assert said.status == 0 and "tokens" in said.out


def test_json_has_the_figures_of_conversations(hfgolf, tmp_path):
    turns = [[{"role": "user", "content": f"one and {n}"}, {"role": "assistant", "content": "two"}] for n in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    options = ["--data.messages_column=messages", "--data.val_fraction=0.5", f"--data.cache_dir={tmp_path / 'cache'}"]
    options += ["--tokenizer.kind=byte", "--batch.sequence_length=8", "--batch.tokens_per_step=8"]
    said = hfgolf("prepare", tmp_path / "chat.jsonl", *options, "--json")
    assert said.status == 0, said.err
    figures = json.loads(said.out)
    assert sum(figures[split]["assistant_tokens"] for split in ("train", "val")) == 40 * len("two.")  # and its end
