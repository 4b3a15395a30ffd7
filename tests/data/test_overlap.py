"""Validation documents that also train are counted exactly, whatever they are, and told with the figures."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.token_cache import TokenCache, count_overlap, load_tokens
from hfgolf.data.token_stream import TokenStream
from hfgolf.data.tokenizer import byte_level_tokenizer
from hfgolf.system.wording import describe_overlap

BYTE = TokenizerSection(kind="byte")
END = 256


def stream_of(documents: list[list[bytes]], pieces_per_chunk: int) -> TokenStream:
    """Return a stream of documents, each of some pieces."""
    pieces = [
        np.array([END] * (number == 0) + [*text], np.uint16)
        for document in documents
        for number, text in enumerate(document)
    ]
    sizes = np.array([len(text) for document in documents for text in document], np.uint32)
    chunks = [np.concatenate(pieces[i : i + pieces_per_chunk]) for i in range(0, len(pieces), pieces_per_chunk)]
    counts = np.array([len(piece) for piece in pieces], np.uint32)
    return TokenStream(tuple(chunks), counts, sizes, Path("unused"), b"", 257)


@pytest.mark.parametrize("pieces_per_chunk", [1, 3, 1000])
def test_overlap_is_what_sets_of_documents_say(pieces_per_chunk):
    """Documents of several pieces, of no token but their separator, and like others but for one token."""
    rng = random.Random(pieces_per_chunk)
    texts = [[bytes(rng.choices(b"ab", k=rng.randrange(1, 9))) for _ in range(rng.randrange(1, 4))] for _ in range(60)]
    texts += [[b"", b"x" * 40], [b"x" * 40], [b"x" * 7 + b"y" + b"x" * 32], [b""]]
    for _ in range(20):
        train, val = rng.choices(texts, k=rng.randrange(1, 40)), rng.choices(texts, k=rng.randrange(1, 40))
        trained = {b"".join(document) for document in train}
        both = [text for text in map(b"".join, val) if text in trained]
        counted = count_overlap(stream_of(train, pieces_per_chunk), stream_of(val, 2), END)
        assert (counted["val_documents"], counted["val_documents_in_train"]) == (len(val), len(both))
        all_bytes = sum(map(len, map(b"".join, val)))
        assert counted["val_share_in_train"] == pytest.approx(sum(map(len, both)) / max(1, all_bytes))


def rows(write: Any, name: str, column: str, values: list[Any]) -> str:
    path: str = write(name, "".join(json.dumps({column: value}) + "\n" for value in values))
    return path


def chat(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number:04}"}]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (lambda number: f"text {number:04}", {}),
    "ids": (lambda number: [*f"text {number:04}".encode(), END, 65, number], {"ids_column": "c"}),
    "conversations": (chat, {"messages_column": "c"}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_of_validation_files_that_train_are_told_at_each_start(write, files_config, caplog, case):
    row, options = CASES[case]
    options = options or {"text_column": "c"}
    files = [rows(write, "train.jsonl", "c", [row(number) for number in range(40)])]
    data = files_config(*files, val_files=[rows(write, "val.jsonl", "c", [row(n) for n in range(30, 50)])], **options)
    for is_hit in (False, True):
        caplog.clear()
        tokens = load_tokens(data, BYTE)
        assert tokens.is_hit == is_hit and tokens.overlap["val_share_in_train"] == 0.5
        number, of = (20, 40) if case == "ids" else (10, 20)
        line = f"{number} of {of} validation documents (50.0% of the bytes) also train, word for word"
        assert [message for message in caplog.messages if message.startswith(line)] == caplog.messages[-1:] != []


@pytest.mark.parametrize("damaged", [None, [], "many", {"val_documents_in_train": "many", "val_documents": None}])
def test_a_damaged_or_absent_count_says_nothing(write, files_config, caplog, damaged):
    data = files_config(write("a.txt", "one"), val_files=[write("v.txt", "one")])
    manifest = load_tokens(data, BYTE).path / "cache.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"overlap": damaged}))
    caplog.clear()
    tokens = load_tokens(data, BYTE)
    assert tokens.is_hit and tokens.overlap == {} and caplog.messages == []


@pytest.mark.parametrize(
    ("texts", "settings", "told"),
    [
        ({"a.txt": "one", "b.txt": "two"}, {"val_files": {"v.txt": "two"}}, "1 of 1"),  # under another name
        ({"a.txt": "one", "b.txt": "two"}, {"val_files": {"v.txt": "two more"}}, None),
        ({"a.txt": "same " * 100}, {"split": "contiguous", "val_fraction": 0.25}, None),  # the parts of a text differ
        ({"a.txt": "same", "b.txt": "same"}, {"split": "contiguous", "val_fraction": 0.5}, "1 of 1"),
    ],
)
def test_text_files_are_documents(write, files_config, texts, settings, told):
    if "val_files" in settings:
        settings = settings | {"val_files": [write(name, text) for name, text in settings["val_files"].items()]}
    data: DataSection = files_config(*(write(name, text) for name, text in texts.items()), **settings)
    sentence = describe_overlap(load_tokens(data, BYTE).overlap)
    assert sentence is None if told is None else str(sentence).startswith(f"{told} validation document ")


def test_rows_that_come_twice_are_found_between_the_hashed_parts(write, files_config):
    path = rows(write, "train.jsonl", "text", [f"text {number // 2}" for number in range(400)])
    tokens: TokenCache = load_tokens(files_config(path, val_fraction=0.2), BYTE)
    texts = []
    for stream in (tokens.train, tokens.val):
        parts = np.split(stream.tokens, np.flatnonzero(stream.tokens == END))[1:]
        texts.append([part.tobytes() for part in parts])
    expected = sum(text in set(texts[0]) for text in texts[1])
    assert 0 < expected == tokens.overlap["val_documents_in_train"] < tokens.overlap["val_documents"]


def test_overlap_and_a_lossy_tokenizer_stand_with_the_figures_of_a_run(run, tiny_run, tmp_path, caplog, hfgolf):
    tokenizer = byte_level_tokenizer([])
    tokenizer.normalizer = normalizers.Lowercase()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(tmp_path / "saved")
    options = {"tokenizer__kind": "pretrained", "tokenizer__name_or_path": tmp_path / "saved", "train__max_steps": 2}
    for name, first in (("files", 0), ("val_files", 190)):
        lines = (json.dumps({"text": f"Text {number:03}"}) + "\n" for number in range(first, first + 200))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        options[f"data__{name}"] = tmp_path / f"{name}.jsonl"
    with caplog.at_level(logging.INFO, logger="hfgolf"):
        folder = run(tiny_run(**options))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["val_documents"], summary["val_documents_in_train"]) == (200, 10)
    assert summary["tokenizer_loss"].startswith("the tokenizer is not lossless (12.50% ")  # the T of 8 characters
    overlap = "10 of 200 validation documents (5.0% of the bytes) also train, word for word"
    exported = hfgolf("export", "--run", folder, "--checkpoint", "latest", "--output", tmp_path / "exported")
    assert exported.status == 0, exported.err
    for said in (overlap, summary["tokenizer_loss"]):
        assert sum(said in message for message in caplog.messages) == 2  # at the start, and below bits per byte
        for model in (folder / "model", tmp_path / "exported"):
            assert f"Note: {said}" in (model / "README.md").read_text()
    assert overlap in (folder / "report.html").read_text()
