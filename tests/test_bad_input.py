"""Each mistake gives one clear line and exit status 2, and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hfgolf.command_line import load_config
from hfgolf.errors import UserError
from hfgolf.train.loop import train

ROOT = Path(__file__).parents[1]


# What is asked for (a function of the folder `bad_files`), and what the line must say.
MISTAKES = {
    "no file matches": (lambda at: {"data__files": at / "*.md"}, r"data.files: .*\*\.md"),
    "an empty file": (lambda at: {"data__files": at / "empty.txt"}, r"empty\.txt is empty"),
    "not UTF-8": (lambda at: {"data__files": at / "latin.txt"}, r"latin\.txt is not UTF-8 \(byte 0: .*\); convert"),
    "a missing column": (
        lambda at: {"data__files": at / "table.jsonl", "data__split": "documents"},
        r"no column 'text'; set data.text_column to one of: body",
    ),
    "shorter than one block": (lambda at: {"data__files": at / "short.txt"}, r"sequence_length"),
    "an empty validation part": (
        lambda at: {"data__split": "documents", "data__val_fraction": 0.001},
        r"validation.*empty|no document.*validation",
    ),
    "a vocabulary larger than the corpus allows": (
        lambda at: {"tokenizer__kind": "bpe", "tokenizer__vocab_size": 50000},
        r"tokenizer.vocab_size: 50000",
    ),
    "no such tokenizer": (
        lambda at: {"tokenizer__kind": "pretrained", "tokenizer__name_or_path": at},
        r"tokenizer.name_or_path",
    ),
    "a model larger than the memory": (
        lambda at: {"model__hidden_size": 2**17, "model__num_hidden_layers": 100},
        r"not even one sequence of 32 tokens fits: it needs .* GB free; try .* or a smaller model\.",
    ),
    "fp16 on a CPU": (
        lambda at: {"train__mixed_precision": "fp16"},
        r"train.mixed_precision: fp16 .* allowed: no, bf16\.",
    ),
    "a Hub data set that can't be reached": (
        lambda at: {"data__source": "hub", "data__files": "[]", "data__hub_name": "nobody/nothing"},
        r"data.hub_name: .*nobody/nothing",
    ),
    "a micro-batch that does not divide": (
        lambda at: {"batch__micro_batch_size": 3},
        r"is not a multiple of micro-batches of 3",
    ),
}


@pytest.fixture
def bad_files(tmp_path: Path) -> Path:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes("über".encode("latin-1") * 100)
    (folder / "short.txt").write_text("too short")
    (folder / "table.jsonl").write_text('{"body": "a text"}\n' * 10)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, bad_files, tiny_run, tmp_path):
    options, pattern = MISTAKES[mistake]
    with pytest.raises(UserError, match=pattern) as error:
        train(load_config(tiny_run(**options(bad_files))))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs" / "tiny" / "config.yaml").exists(), "nothing of the run was begun"


@pytest.mark.slow
def test_the_script_exits_with_2_and_one_line_and_no_traceback(tiny_run, tmp_path):
    arguments = tiny_run(data__files=tmp_path / "*.md")
    command = [sys.executable, "scripts/train.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: data.files")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout + done.stderr
