"""Shards: tokens from other programs train like text, and a mistake in a shard is one line."""

from __future__ import annotations

import os
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from test_special_tokens import saved
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from hfgolf.config.parse import load_config
from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.shards import ShardStream, open_shard
from hfgolf.data.token_cache import load_tokens
from hfgolf.data.tokenizer import tokenizer_sha256
from hfgolf.evaluate.token_bytes import bytes_per_token
from hfgolf.run.metrics import read_rows
from hfgolf.system.errors import UserError

END = 256
BYTE = TokenizerSection(kind="byte")


def write_shard(
    path: Path,
    ids: Any,
    header: bool = True,
    version: int = 1,
    count: int | None = None,
    magic: int = 20240520,
    dtype: str = "<u2",
) -> Path:
    values = np.asarray(ids).astype(dtype)
    first = np.zeros(256, "<i4")
    first[:3] = magic, version, len(values) if count is None else count
    path.write_bytes((first.tobytes() if header else b"") + values.tobytes())
    return path


def options(folder: Path, **changes: Any) -> DataSection:
    files = {"files": [str(folder / "train*.bin")], "val_files": [str(folder / "val*.bin")]}
    return DataSection(source="shards", cache_dir=str(folder / "cache"), **files | changes)


def test_stream_reads_across_shards_and_wraps(tmp_path):
    ids = np.random.default_rng(0).integers(0, END, 50)
    for number, part in enumerate(np.split(ids, [7, 8, 30])):
        write_shard(tmp_path / f"train{number}.bin", part)
    write_shard(tmp_path / "val.bin", [END, 65, 66, END, 67])
    tokens = load_tokens(options(tmp_path), BYTE)
    stream = tokens.train
    assert len(stream) == 50 and stream.tokens.tolist() == ids.tolist()
    wanted = np.array([[0, 6, 7, 8], [29, 30, 49, 50], [57, 99, 100, 149]])
    for reader in (stream, pickle.loads(pickle.dumps(stream))):  # as a spawned worker gets it
        assert np.array_equal(reader.read(wanted), ids[wanted % 50])
    assert isinstance(tokens.val, ShardStream)
    assert (tokens.val.piece_tokens.tolist(), tokens.val.piece_bytes.tolist()) == ([3, 2], [2, 1])
    assert bytes_per_token(tokens.val, tokens.tokenizer).tolist() == [0, 1, 1, 0, 1]


def test_a_special_separator_becomes_the_end_of_text(tmp_path):
    """As in the golf challenge, whose shards separate documents by <s>: what evaluates or samples later does, too."""
    write_shard(tmp_path / "train.bin", [5] * 9)
    write_shard(tmp_path / "val.bin", [1, 267, 1, 267])
    model = str(Path(__file__).with_name("sentencepiece.model"))
    kind = TokenizerSection(kind="pretrained", name_or_path=model)
    plain = load_tokens(options(tmp_path), kind)
    tokens = load_tokens(options(tmp_path, separator_id=1), kind)
    assert (plain.tokenizer.eos_token_id, tokens.tokenizer.eos_token_id) == (2, 1)
    assert tokens.tokenizer_sha256 == plain.tokenizer_sha256 and tokens.val.piece_tokens.tolist() == [2, 2]
    tokens.tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded.eos_token == "<s>" and tokenizer_sha256(loaded) == tokens.tokenizer_sha256


def test_tokens_before_the_first_separator_are_a_document(tmp_path):
    write_shard(tmp_path / "train.bin", [65] * 9)
    write_shard(tmp_path / "val.bin", [65, 66, END, 67], header=False)
    val = load_tokens(options(tmp_path), BYTE).val
    assert (val.piece_tokens.tolist(), val.piece_bytes.tolist()) == ([2, 2], [1, 1])


def test_sidecars_give_bytes_and_the_separator_gives_documents(tmp_path):
    write_shard(tmp_path / "train.bin", [65] * 9)
    write_shard(tmp_path / "val0.bin", [1, 66, 67])
    write_shard(tmp_path / "val1.bin", [1, 68])
    write_shard(tmp_path / "bytes0.bin", [0, 5, 300])
    write_shard(tmp_path / "bytes1.bin", [0, 2])
    sidecars = {"val_bytes_files": [str(tmp_path / "bytes*.bin")], "separator_id": 1}
    tokens = load_tokens(options(tmp_path, **sidecars), BYTE)
    assert (tokens.val.piece_tokens.tolist(), tokens.val.piece_bytes.tolist()) == ([3, 2], [305, 2])
    assert bytes_per_token(tokens.val, tokens.tokenizer).tolist() == [0, 5, 300, 0, 2]
    before = tokens.identity
    write_shard(tmp_path / "bytes1.bin", [0, 3])
    assert load_tokens(options(tmp_path, **sidecars), BYTE).identity != before
    write_shard(tmp_path / "bytes1.bin", [4, 3])
    with pytest.raises(UserError, match="val_bytes_files: token 3 is a separator, but stands for 4 bytes, not 0"):
        load_tokens(options(tmp_path, **sidecars), BYTE)
    write_shard(tmp_path / "bytes1.bin", [0])
    with pytest.raises(UserError, match=r"they hold 4 values, but data\.val_files 5 tokens"):
        load_tokens(options(tmp_path, **sidecars), BYTE)


def test_sentencepiece_bytes_follow_the_challenge_rule(tmp_path):
    """A byte entry is 1; a space in front of a piece is 1, but not after a separator; control entries are 0."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3, "\u2581the": 4, "é": 5, "<0x0A>": 6, "\u2581日本": 7}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    write_shard(tmp_path / "train.bin", [4] * 9)
    write_shard(tmp_path / "val.bin", [1, 4, 3, 5, 6, 7, 1, 7, 4, 1, 5])
    tokens = load_tokens(options(tmp_path, separator_id=1), saved(tmp_path / "tokenizer", backend))
    counted = bytes_per_token(tokens.val, tokens.tokenizer).tolist()
    assert counted == [0, 3, 1, 2, 1, 7, 0, 6, 4, 0, 2]


def refuses(path: Path, message: str, vocab_size: int = 2**16) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_shard(path, vocab_size)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"version": 2}, "has version 2 in its header; only 1 is known"),
        ({"magic": 20240801}, "has version 1 in its header; only 7 is known"),
        ({"magic": 20240521, "version": 7, "dtype": "<u4"}, "has the magic number 20240521 in its header; known are"),
        ({"count": 3}, "states 3 tokens, 1,030 bytes with its header, but has 1,028 bytes"),
        ({"count": 1}, "states 1 tokens, 1,026 bytes with its header, but has 1,028 bytes"),
        ({"ids": [], "count": 0}, "states 0 tokens"),
    ],
)
def test_wrong_header_is_one_line(tmp_path, content, message):
    refuses(write_shard(tmp_path / "train.bin", **{"ids": [1, 2]} | content), message)


LARGE = 128_256  # entries of Llama 3
RNG = np.random.default_rng(0)
TEXT_IDS = RNG.zipf(1.2, 5000) % 50_257  # most are small, as those of text


RAW: dict[str, Any] = {"header": False}
SMALL = np.frombuffer(b"plain text of bytes" * 9, np.uint8)
WIDE = RNG.integers(0, LARGE, 999)


@pytest.mark.parametrize(
    ("name", "ids", "vocab_size", "written"),
    [
        *[("a.bin", TEXT_IDS, 50_257, RAW | {"dtype": f"<{kind}"}) for kind in ("u2", "u4", "i4", "i8", "u8")],
        *[("a.bin", WIDE, LARGE, RAW | {"dtype": f"<{kind}"}) for kind in ("u4", "i8")],
        ("a.bin", np.append(TEXT_IDS, np.zeros(20_000)), 50_257, RAW),  # padding
        ("a.bin", np.append(TEXT_IDS, np.zeros(20_000)), 50_257, RAW | {"dtype": "<u4"}),
        ("a.bin", np.tile(TEXT_IDS, 800), 50_257, RAW),  # sampled
        ("a.bin", np.append(np.zeros(1_600_000), TEXT_IDS), 50_257, RAW | {"dtype": "<u4"}),
        *[("a.bin", SMALL, 257, RAW | {"dtype": kind}) for kind in ("<u2", "<u4")],
        ("a.bin", [65, 66, 67], 257, RAW),
        ("a.bin", TEXT_IDS, 50_257, {}),
        ("a.bin", WIDE, LARGE, {"magic": 20240801, "version": 7, "dtype": "<u4"}),
        ("a.ds", TEXT_IDS, 50_257, RAW),
        ("a.ds", [1, 0], 50_257, RAW | {"metadata": "gpt2|2\n2\n0K tokens"}),  # nothing would prove it
        ("a.ds", [1, 0, 5], 50_257, RAW | {"dtype": "<u4", "metadata": "org/name|4\n3"}),
    ],
)
def test_ids_are_read_by_the_width_that_the_file_states_or_proves(tmp_path, name, ids, vocab_size, written):
    metadata = written.get("metadata")
    path = write_shard(tmp_path / name, ids, **{key: value for key, value in written.items() if key != "metadata"})
    if metadata is not None:
        (tmp_path / f"{name}.metadata").write_text(metadata)
    assert np.array_equal(open_shard(path, vocab_size), ids)
    stream = ShardStream((path,), vocab_size, np.zeros(1), np.zeros(1))
    assert np.array_equal(pickle.loads(pickle.dumps(stream)).read(np.arange(len(ids))), ids)


@pytest.mark.parametrize(
    ("ids", "vocab_size", "dtype", "found"),
    [
        (np.zeros(9000), 50_257, "<u2", "as 64 bits 0%, as 32 bits 0%, as 16 bits 0%"),
        ([65, 0, 66, 0], 257, "<u2", "as 32 bits 100%"),
        (np.where(np.arange(5000) % 3, TEXT_IDS, -100), 50_257, "<i4", "as 32 bits 67%"),
        (np.where(np.arange(5000) % 2, TEXT_IDS, -100), 50_257, "<i4", "as 32 bits 50%"),
        (TEXT_IDS, 50_257, ">u2", "as 16 bits 9.%"),
        (TEXT_IDS, 50_257, ">u4", "as 32 bits 0%, as 16 bits 9.%"),
        (TEXT_IDS, 65_536, ">u4", "as 32 bits 0%, as 16 bits 100%"),
        (TEXT_IDS, 50_257, ">i8", "as 16 bits 9.%"),
        (TEXT_IDS, LARGE, "<u2", "as 16 bits 100%"),  # too few bits for the vocabulary
    ],
)
def test_width_that_nothing_tells_is_refused(tmp_path, ids, vocab_size, dtype, found):
    path = write_shard(tmp_path / "a.bin", ids, header=False, dtype=dtype)
    refuses(path, f"a.bin does not tell the width of its ids: .*{found} of .* as .npy", vocab_size)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.bin", np.append(TEXT_IDS, 1).astype("<u4").tobytes()[:-2], "not a whole number of 32-bit ids; write it"),
        ("a.bin", TEXT_IDS.astype("<i8").tobytes()[:-4], "not a whole number of 64-bit ids; write it"),
        ("a.bin", b"abc", "has 3 bytes, not a whole number of 16-bit ids"),
        ("a.bin", b"", "has 0 bytes, not a whole number of"),
        ("a.npz", b"PK", r"is not a shard; allowed: \.bin, \.npy, \.ds \(rename raw token ids to \.bin\)"),
        ("a.ds", TEXT_IDS.tobytes(), r"a\.ds\.metadata states no bytes per id \(2 or 4\) in its first line"),
    ],
)
def test_file_of_another_kind_or_cut_is_one_line(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "a.ds.metadata").write_text("gpt2\n5000")
    refuses(tmp_path / name, problem, 50_257)


@pytest.mark.parametrize("wrong", [-1, 50_257, 2**33])
@pytest.mark.parametrize("ending", ["bin", "npy"])
def test_wide_ids_outside_the_vocabulary_are_rejected_when_read(tmp_path, wrong, ending):
    ids, path = np.array([*TEXT_IDS, wrong]), tmp_path / f"a.{ending}"
    if ending == "npy":
        np.save(path, ids)
    else:
        write_shard(path, ids, header=False, dtype="<i8")
    stream = ShardStream((path,), 50_257, np.zeros(1), np.zeros(1))
    assert np.array_equal(stream.read(np.arange(5000)), TEXT_IDS)
    said = wrong % 2**64 if ending == "bin" else wrong
    with pytest.raises(UserError, match=rf"a\.{ending} contains id {said}, but the tokenizer has 50257 entries"):
        stream.read(np.array([5000]))


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<u4", "<i4", ">i8", "<u8"])
def test_numpy_files_state_their_width_and_byte_order(tmp_path, dtype):
    for name, ids in (("train0", [[65, 0], [66, 0], [0, 67]]), ("train1", [67]), ("val", [[0, 68, 69]])):
        np.save(tmp_path / f"{name}.npy", np.array(ids, dtype))
    files = {"files": [str(tmp_path / "train*.npy")], "val_files": [str(tmp_path / "val.npy")], "separator_id": 0}
    tokens = load_tokens(options(tmp_path, **files), BYTE)
    assert tokens.train.read(np.arange(8)).tolist() == [*tokens.train.tokens, 65] == [65, 0, 66, 0, 0, 67, 67, 65]
    assert (tokens.val.tokens.tolist(), tokens.val.num_bytes) == ([0, 68, 69], 2)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.0, 2.0]), r"holds float64 \(2\), not a list of token ids"),
        (np.array([True]), r"holds bool \(1\), not a list of token ids"),
        (np.array([(1, 2)], [("a", "<u2"), ("b", "<u2")]), r"holds \[.*\] \(1\), not a list of token ids"),
        (np.array(7, np.uint16), r"holds uint16 \(a single value\), not a list"),
        (np.array([[[1, 2]]], np.uint16), r"holds uint16 \(1x1x2\), not a list"),
        (np.arange(20, dtype="<u2").reshape(4, 5).T, "stores its columns one after the other"),
        (np.arange(81).reshape(9, 9) % 80 * (np.arange(9) < 7), "has rows that end in the same ids, so they are pad"),
        (np.arange(81).reshape(9, 9) % 80 * (np.arange(9) > 1), "has rows that begin in the same ids, so they are pad"),
        (np.array([[5, 6, 65, 65]]), "has rows that end in the same ids, which may be padding; save the ids without"),
        (np.array([[1, 2, 3], [65, 65, 4]]), "has rows that begin in the same ids, which may be padding"),
        (np.array([], np.uint16), r"holds uint16 \(0\), not a list"),
        (np.array([1, None]), "is not a NumPy file"),
        (None, "is not a NumPy file"),
    ],
)
def test_wrong_numpy_file_is_one_line(tmp_path, array, message):
    path = tmp_path / "train.npy"
    path.write_bytes(b"\x93NUMPY") if array is None else np.save(path, array)
    refuses(path, message)


def test_validation_shards_that_also_train_are_told(tmp_path, caplog):
    write_shard(tmp_path / "train.bin", [END, 65])
    write_shard(tmp_path / "val.bin", [END, 66])
    load_tokens(options(tmp_path), BYTE)
    assert caplog.messages == []
    write_shard(tmp_path / "val.bin", [END, 65])
    load_tokens(options(tmp_path), BYTE)
    (message,) = caplog.messages
    assert "val.bin has the same content as" in message and "train.bin, which trains" in message


def test_shards_that_only_validate_leave_nothing_to_train_on(tmp_path):
    path = str(write_shard(tmp_path / "val.bin", [END, 65]))
    with pytest.raises(UserError, match=r"train split .* is empty: every file in data\.files is also in data\.val_f"):
        load_tokens(options(tmp_path, files=[path]), BYTE)


def test_ids_outside_the_vocabulary_are_rejected_when_read(tmp_path):
    write_shard(tmp_path / "train.bin", [65, 66, 300, 67])
    write_shard(tmp_path / "val.bin", [END, 65])
    tokens = load_tokens(options(tmp_path), BYTE)
    assert tokens.train.read(np.array([0, 1])).tolist() == [65, 66]
    with pytest.raises(UserError, match=r"train\.bin contains id 300, but the tokenizer has 257 entries"):
        tokens.train.read(np.array([1, 2]))
    write_shard(tmp_path / "val.bin", [END, 999])
    with pytest.raises(UserError, match="contains id 999"):
        load_tokens(options(tmp_path), BYTE)
    write_shard(tmp_path / "val.bin", [END, 65])
    with pytest.raises(UserError, match=r"data\.separator_id: 257 is not in the tokenizer, which has 257 entries"):
        load_tokens(options(tmp_path, separator_id=257), BYTE)


@pytest.mark.parametrize("num_bytes", [100, 79_000, None])
@pytest.mark.parametrize("ending", ["bin", "npy"])
def test_shard_truncated_or_removed_while_it_is_read_is_one_line(tmp_path, ending, num_bytes):
    """Also by less than its header."""
    path, ids = tmp_path / f"train.{ending}", np.full(40_000, 65, np.uint16)
    _ = np.save(path, ids) if ending == "npy" else write_shard(path, ids)
    stream = ShardStream((path,), 257, np.zeros(1), np.zeros(1))
    assert stream.read(np.array([39_999])) == 65
    path.unlink() if num_bytes is None else os.truncate(path, path.stat().st_size - num_bytes)
    with pytest.raises(UserError, match="was truncated or removed while it was being read"):
        stream.read(np.array([39_999]))


@pytest.mark.slow
def test_training_on_shards_or_ids_matches_training_on_text(run, shared_run, tiny_run, tmp_path):
    config = load_config(tiny_run()).config
    tokens = load_tokens(config.data, config.tokenizer)
    for name, stream, cuts in (("train", tokens.train, [1000, 1001]), ("val", tokens.val, [777])):
        for number, part in enumerate(np.split(np.asarray(stream.tokens), cuts)):
            write_shard(tmp_path / f"{name}_{number:06d}.bin", part)
        rows = [part.tolist() for part in np.split(stream.tokens, np.flatnonzero(stream.tokens == END))[1:]]
        Dataset.from_dict({"input_ids": rows}).to_parquet(tmp_path / f"{name}.parquet")
    files = {"data__files": tmp_path / "train_*.bin", "data__val_files": tmp_path / "val_*.bin"}
    logs = [shared_run(), run(tiny_run(data__source="shards", **files))]
    text, shards = (read_rows(folder / "metrics.jsonl") for folder in logs)
    for column in ("train_losses", "sample_hashes", "val_loss", "val_bits_per_byte", "val_bytes", "val_tokens"):
        assert [row.get(column) for row in text] == [row.get(column) for row in shards], column
    shape = {"data__source": "shards", "data__order": "sequential", "train__max_steps": 1}
    sequential = read_rows(run(tiny_run(run__name="sequential", **shape, **files)) / "metrics.jsonl")
    hashes = [{*chain(*(row.get("sample_hashes", ()) for row in rows))} for rows in (text, sequential)]
    assert [len(of_run) for of_run in hashes] == [6, 1] and hashes[0].isdisjoint(hashes[1])
    files = {"files": [str(tmp_path / "train.parquet")], "val_files": [str(tmp_path / "val.parquet")]}
    ids = load_tokens(config.data.replace(ids_column="input_ids", split="documents", **files), config.tokenizer)
    for one, other in ((ids.train, tokens.train), (ids.val, tokens.val)):
        assert np.array_equal(one.tokens, other.tokens) and one.num_bytes == other.num_bytes
