"""A corpus tokenized in parts is the cache that one process builds, byte for byte."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hfgolf.config import DataConfig, TokenizerConfig
from hfgolf.data.corpus import load_corpus
from hfgolf.data.files import cache_folder
from hfgolf.data.parts import Plan, join_parts, write_part
from hfgolf.data.token_cache import build_cache, cache_key, load_tokens
from hfgolf.data.tokenizer import find_tokenizer
from hfgolf.errors import UserError

BYTE = TokenizerConfig(kind="byte")


def plan_of(data: DataConfig, config: TokenizerConfig, tasks: int) -> Plan:
    corpus, cache_dir = load_corpus(data), cache_folder(data)
    tokenizer = find_tokenizer(config, corpus.identity, cache_dir / "tokenizers")
    assert tokenizer is not None
    return Plan(corpus, config, cache_dir, cache_key(corpus, config, tokenizer), tasks)


def build_in_parts(plan: Plan, order: list[int]) -> Path:
    for task in order:
        write_part(plan, task)
    folder, _ = build_cache(plan.corpus, plan.tokenizer, plan.cache_dir, None, lambda *to: join_parts(plan, *to))
    return folder


def content(folder: Path) -> dict[str, Any]:
    """Return the bytes of a cache's files; of cache.json, all but the time."""
    manifest = json.loads((folder / "cache.json").read_text())
    assert manifest.pop("built_at")
    return {path.name: path.read_bytes() for path in folder.glob("*.arrow")} | manifest


@pytest.fixture
def options(write, awkward) -> dict[str, dict[str, Any]]:
    """The options of a corpus of each kind."""

    def jsonl(name: str, rows: list[Any]) -> str:
        return write(name, "".join(json.dumps(row) + "\n" for row in rows))

    def chat(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number + 1} {awkward}"}]

    mixed = [
        jsonl("a.jsonl", [{"text": f"row {number} {awkward}"} for number in range(30)] + [{"text": ""}]),
        write("b.txt", f"long {awkward}" * 700),  # several pieces
        write("c.txt.gz", gzip.compress(f"packed {awkward}".encode())),
        jsonl("d.jsonl", [{"text": None}, {"text": "last"}]),
        *(write(f"e{number}.txt", f"{number} {awkward}") for number in range(9)),
    ]
    return {
        "text": {"files": mixed, "val_fraction": 0.3},
        "val_files": {"files": mixed, "val_files": [write("v.txt", f"held out {awkward}" * 500), mixed[2]]},
        "ids": {
            "files": [jsonl(f"i{part}.jsonl", [{"ids": [part, n, 256, n]} for n in range(8)]) for part in range(3)],
            "ids_column": "ids",
            "val_fraction": 0.2,
        },
        "messages": {
            "files": [jsonl(f"m{part}.jsonl", [{"m": chat(n)} for n in range(part, 8)]) for part in range(3)],
            "messages_column": "m",
            "val_fraction": 0.2,
        },
    }


@pytest.mark.parametrize(
    "kind, tasks",
    [("text", 1), ("text", 3), ("text", 40), ("val_files", 3), ("ids", 3), ("messages", 5)],  # 40: more than files
)
def test_parts_are_the_cache_of_one_process(options, tmp_path, kind, tasks):
    whole = load_tokens(DataConfig(source="files", cache_dir=str(tmp_path / "whole"), **options[kind]), BYTE)
    data = DataConfig(source="files", cache_dir=str(tmp_path / "parts"), **options[kind])
    plan = plan_of(data, BYTE, tasks)
    shares = [plan.share(task).files for task in range(tasks)]
    assert sum(shares, ()) == plan.corpus.files
    order = random.Random(0).sample(range(tasks), tasks)
    folder = build_in_parts(plan, order)
    assert folder.name == whole.path.name and content(folder) == content(whole.path)
    tokens = load_tokens(data, BYTE)
    assert tokens.is_hit and tokens.path == folder
    tokens.check(wait=True)


def test_shares_are_even_in_bytes(write, files_config):
    files = [write(f"{number:03d}.txt", "x" * random.Random(number).randint(1, 2000)) for number in range(300)]
    plan = plan_of(files_config(*files), BYTE, 7)
    sizes = [sum(file.path.stat().st_size for file in plan.share(task).files) for task in range(7)]
    assert max(sizes) - min(sizes) <= 2 * 2000


def test_finished_part_is_not_written_again(options, files_config):
    plan = plan_of(DataConfig(source="files", cache_dir=files_config("x").cache_dir, **options["text"]), BYTE, 2)
    write_part(plan, 0)
    before = {path: path.stat().st_mtime_ns for path in plan.part(0).rglob("*")}
    write_part(plan, 0)
    assert {path: path.stat().st_mtime_ns for path in plan.part(0).rglob("*")} == before
    assert plan.missing() == [1] and [path.name for path in plan.part(0).parent.iterdir()] == ["00000"]


def test_missing_and_damaged_parts_are_one_line(options, tmp_path):
    plan = plan_of(DataConfig(source="files", cache_dir=str(tmp_path / "cache"), **options["text"]), BYTE, 3)
    with pytest.raises(UserError, match=r"2 of 3 tasks have not finished \(1, 2\)"):
        build_in_parts(plan, [0])
    damaged = plan.part(0) / "train.arrow"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match=r"00000 is damaged \(train\.arrow does not match its sha256\)"):
        build_in_parts(plan, [1, 2])
    assert content(build_in_parts(plan, [0]))  # the damaged part is written again
    assert not [path for path in (tmp_path / "cache").rglob(".*")]


def test_damaged_file_leaves_no_part(write, files_config):
    plan = plan_of(files_config(write("a.txt", "fine"), write("b.txt", b"bad \xff")), BYTE, 2)
    write_part(plan, 0)
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8"):
        write_part(plan, 1)
    assert [path.name for path in plan.part(0).parent.iterdir()] == ["00000"]


def test_split_that_is_empty_in_all_parts_is_one_line(write, files_config):
    rows = (write(name, '{"text": "some"}') for name in ("a.jsonl", "b.jsonl"))
    plan = plan_of(files_config(*rows, val_fraction=1e-9), BYTE, 2)
    with pytest.raises(UserError, match=r"The validation split of data\.source files is empty"):
        build_in_parts(plan, [0, 1])


def test_file_changed_since_the_plan_is_one_line(write, files_config):
    path = write("a.txt", "before")
    plan = plan_of(files_config(path, write("b.txt", "b")), BYTE, 1)
    Path(path).write_text("later text")
    with pytest.raises(UserError, match=r"a\.txt changed while it was being read"):
        write_part(plan, 0)


def test_other_tokenizer_on_another_machine_is_one_line(write, files_config):
    plan = plan_of(files_config(write("a.txt", "a"), write("b.txt", "b")), BYTE, 1)
    other = replace(plan, key=plan.key | {"tokenizer_sha256": "another"})
    with pytest.raises(UserError, match="finds another one than the machine that planned this task"):
        write_part(other, 0)
    untrained = replace(plan, tokenizer=TokenizerConfig(kind="char"))
    with pytest.raises(UserError, match=r"let both see the same .*tokenizers"):
        write_part(untrained, 0)


def test_lossy_tokenizer_is_said_once_for_all_parts(write, files_config, tmp_path):
    from test_token_cache import save_word_tokenizer

    config = save_word_tokenizer(tmp_path / "saved", {"first": 2})
    data = files_config(write("a.txt", "first other"), write("b.txt", "first"), val_files=[write("v.txt", "first two")])
    folder = build_in_parts(plan_of(data, config, 3), [0, 1, 2])
    assert "not lossless" in content(folder)["tokenizer_loss"]
