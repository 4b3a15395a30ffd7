"""A cache that differs from what was written is rebuilt or rejected in one line, and never trusted again."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hfgolf.config.parse import load_config
from hfgolf.config.sections import TokenizerSection
from hfgolf.data import cache_folder, token_cache
from hfgolf.data.cache_folder import DamagedCacheError
from hfgolf.data.token_cache import load_tokens
from hfgolf.doctor.doctor import examine
from hfgolf.system.errors import UserError

BYTE = TokenizerSection(kind="byte")

TRAIN, VAL = (f"{split}/data-00000-of-00001.arrow" for split in ("train", "val"))


@pytest.fixture
def data(write, files_config):
    text = "".join(f"line {number}\n" for number in range(2000))
    return files_config(write("a.txt", text), val_files=[write("val.txt", text[:5000])], in_memory=False)


@pytest.fixture
def large(monkeypatch):
    """Treat every cache as too large to verify before use."""
    monkeypatch.setattr(token_cache, "VERIFIED_BEFORE_USE_BYTES", 0)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize("damage", ["overwritten", "cut"])
@pytest.mark.parametrize("name", [TRAIN, VAL, "val/state.json", "cache.json"])
def test_damaged_cache_is_rebuilt(data, caplog, name, damage):
    caplog.set_level("INFO", logger="hfgolf")
    first = load_tokens(data, BYTE)
    tokens = first.train.tokens.copy()
    path = first.path / name
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 7)
    else:
        overwrite(path, path.stat().st_size // 3, b"\1\0" * 5)
    again = load_tokens(data, BYTE)
    if (name, damage) != ("val/state.json", "overwritten"):  # nothing here reads what it holds
        assert not again.is_hit and caplog.text.count("cache damaged") == 1
        assert name in caplog.text or name == "cache.json"
    assert np.array_equal(again.train.tokens, tokens) and load_tokens(data, BYTE).is_hit


def test_tokens_are_reused_after_the_tokenizer_is_retrained(data, caplog):
    caplog.set_level("INFO", logger="hfgolf")
    bpe = TokenizerSection(kind="bpe", vocab_size=260)
    first = load_tokens(data, bpe)
    (trained,) = (Path(data.cache_dir) / "tokenizers").glob("*/tokenizer.json")
    trained.write_bytes(b"")
    caplog.clear()
    again = load_tokens(data, bpe)
    assert "tokenizer damaged" in caplog.text and "cache damaged" not in caplog.text
    assert again.path == first.path and np.array_equal(again.train.tokens, first.train.tokens)


@pytest.mark.parametrize(("name", "in_memory"), [(TRAIN, False), (TRAIN, True), (VAL, False)])
def test_large_cache_is_verified_in_the_background(data, large, caplog, monkeypatch, name, in_memory):
    caplog.set_level("INFO", logger="hfgolf")
    data = data.replace(in_memory=in_memory)
    first = load_tokens(data, BYTE)
    first.check(wait=True)
    may_go_on, sha256 = threading.Event(), token_cache.TokenStream.sha256
    monkeypatch.setattr(token_cache.TokenStream, "sha256", lambda stream: may_go_on.wait() and sha256(stream))
    overwrite(first.path / name, 4000, b"\1\0" * 5)
    tokens = load_tokens(data, BYTE)
    assert tokens.is_hit
    tokens.check()  # not known yet
    may_go_on.set()
    for wait in (True, False):
        with pytest.raises(DamagedCacheError, match=rf"{name} does not match the SHA-256 .* next start rebuilds it"):
            tokens.check(wait)
    again = load_tokens(data, BYTE)
    assert not again.is_hit and "cache damaged" in caplog.text
    again.check(wait=True)


@pytest.mark.parametrize("offset", [0, 8, 100, 300])
def test_damaged_header_of_a_large_cache_is_one_line(data, large, offset):
    overwrite(load_tokens(data, BYTE).path / TRAIN, offset, b"\xff" * 40)
    tokens = load_tokens(data, BYTE)
    if tokens.is_hit:
        with pytest.raises(DamagedCacheError):
            tokens.check(wait=True)


def test_id_outside_the_vocabulary_is_one_line(data):
    tokens = load_tokens(data, BYTE)
    assert tokens.train.read(np.array([[0, 1], [2, len(tokens.train)]])).shape == (2, 2)
    overwrite(tokens.train.path, 4000, b"\xff\xff" * 5)  # while it is mapped
    with pytest.raises(DamagedCacheError, match="contains id 65535, but the vocabulary has 257 entries") as caught:
        tokens.train.read(np.arange(len(tokens.train)))
    assert "\n" not in str(caught.value)
    assert not load_tokens(data, BYTE).is_hit


def test_file_truncated_while_mapped_is_one_line(data):
    tokens = load_tokens(data, BYTE)
    os.truncate(tokens.train.path, 2000)
    with pytest.raises(DamagedCacheError, match="truncated"):
        tokens.train.read(np.arange(len(tokens.train)))
    assert not load_tokens(data, BYTE).is_hit


def test_cache_of_an_earlier_format_is_rebuilt_in_silence_and_its_runs_go_on(data, caplog, monkeypatch):
    """The key of the cache changes, what a checkpoint compares does not."""
    caplog.set_level("DEBUG", logger="hfgolf")
    monkeypatch.setattr(token_cache, "_FORMAT_VERSION", 1)
    before = load_tokens(data, BYTE)
    monkeypatch.undo()
    caplog.clear()
    now = load_tokens(data, BYTE)
    assert not now.is_hit and now.identity == before.identity and load_tokens(data, BYTE).is_hit
    assert "format_version (1 -> 2) changed since" in caplog.text
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def cached(arguments: list[str]) -> Path:
    """Tokenize the text of a run, and return the file of its training tokens."""
    config = load_config(arguments).config
    return load_tokens(config.data, config.tokenizer).path / TRAIN


def test_training_on_damaged_tokens_ends_with_one_line_and_an_event(run, tiny_run, tmp_path, large, monkeypatch):
    """With a worker, in which the ids are read; without, it is the error that TokenStream.read raises."""
    monkeypatch.setattr(token_cache, "find_wrong_hash", lambda *_: None)  # training reads the ids first
    arguments = tiny_run(data__in_memory="false", data__num_workers=1)
    path = cached(arguments)
    overwrite(path, path.stat().st_size // 2, b"\xff\xff" * (path.stat().st_size // 5))
    with pytest.raises(UserError, match="contains id 65535") as caught:
        run(arguments)
    assert "\n" not in str(caught.value) and str(path.parents[1]) in str(caught.value)
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    (event,) = [row for row in map(json.loads, lines) if row.get("event") == "damaged_cache"]
    assert event["reason"] == str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("known", ["at the first row", "after the last step"])
def test_training_on_tokens_with_a_wrong_hash_ends_without_saving(
    run, tiny_run, tmp_path, large, monkeypatch, caplog, known
):
    arguments = tiny_run(data__in_memory="false")
    path = cached(arguments)
    overwrite(path, path.stat().st_size // 2, b"\1\0" * 50)
    may_hash = threading.Event()
    sha256, check = token_cache.TokenStream.sha256, token_cache.TokenCache.check
    monkeypatch.setattr(token_cache.TokenStream, "sha256", lambda stream: may_hash.wait() and sha256(stream))

    def check_(tokens, wait=False):
        if wait or known == "at the first row":
            may_hash.set()
            wait = True
        check(tokens, wait)

    monkeypatch.setattr(token_cache.TokenCache, "check", check_)
    try:
        with pytest.raises(DamagedCacheError, match="SHA-256") as caught:
            run(arguments)
    finally:
        may_hash.set()
    folder = tmp_path / "runs" / "tiny"
    assert not (folder / "model").exists()
    saved = sorted(path.name for path in folder.glob("checkpoints/step-*"))
    assert saved == ([] if known == "at the first row" else ["step-000003", "step-000006"])
    assert [line for line in caplog.messages if line.startswith("doctor")]
    (finding,), _ = examine(folder)
    assert finding.symptom == "damaged token cache"
    assert finding.saw in str(caught.value) and "SHA-256" in finding.saw


def test_full_disk_is_one_line_and_leaves_no_files(write, files_config):
    text = "".join(f"line {number}\n" for number in range(200_000))
    data = files_config(write("a.txt", text), val_files=[write("val.txt", text[:5000])])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(UserError, match=r"data.cache_dir: .*File too large") as caught:
            load_tokens(data, BYTE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    left = [path for path in Path(data.cache_dir).rglob("*") if path.is_file()]
    assert [path.parent for path in left] == [Path(data.cache_dir, "locks")]


def test_read_only_cache_can_be_read(data, monkeypatch):
    load_tokens(data, BYTE)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(token_cache, "locked", refuse)
    monkeypatch.setattr("hfgolf.system.durable.write_bytes", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert load_tokens(data, BYTE).is_hit
    with pytest.raises(UserError, match=r"data.cache_dir: cannot write to .*Permission denied"):
        load_tokens(data, TokenizerSection(kind="char"))


def test_waiting_for_the_process_that_builds_is_said(data, caplog, monkeypatch):
    caplog.set_level("INFO", logger="hfgolf")
    monkeypatch.setattr(cache_folder, "PATIENCE_SECONDS", 0.05)
    load_tokens(data, BYTE)
    (path,) = Path(data.cache_dir, "locks").iterdir()
    shutil.rmtree(Path(data.cache_dir, "tokens"))
    with cache_folder.locked(path, "is a test"):
        waiting = threading.Thread(target=load_tokens, args=(data, BYTE))
        waiting.start()
        while "waiting" not in caplog.text:
            time.sleep(0.02)
    waiting.join()
    assert f"waiting for another process, which builds the token cache of the same text ({path})" in caplog.text
    assert load_tokens(data, BYTE).is_hit
