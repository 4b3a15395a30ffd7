"""Shards: tokens from other programs train like text, and a mistake in a shard is one line."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfgolf.command_line import load_config
from hfgolf.config import DataConfig, TokenizerConfig
from hfgolf.data.batches import block_starts
from hfgolf.data.shards import ShardStream, open_shard
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import tokenizer_sha256
from hfgolf.errors import UserError
from hfgolf.evaluate.token_bytes import bytes_per_token
from hfgolf.run.metrics import read_rows

END = 256
BYTE = TokenizerConfig(kind="byte")


def write_shard(path: Path, ids: Any, header: bool = True, version: int = 1, count: int | None = None) -> Path:
    values = np.asarray(ids, "<u2")
    first = np.zeros(256, "<i4")
    first[:3] = 20240520, version, len(values) if count is None else count
    path.write_bytes((first.tobytes() if header else b"") + values.tobytes())
    return path


@pytest.fixture
def text_tokens(tiny_run) -> TokenCache:
    config = load_config(tiny_run()).config
    return load_tokens(config.data, config.tokenizer)


def shard_options(folder: Path, tokens: TokenCache, header: bool, ending: str = "bin") -> dict[str, Any]:
    """Write the tokens of a text as three training shards and two of validation; return the options to read them."""
    for name, stream, cuts in (("train", tokens.train, [1000, 1001]), ("val", tokens.val, [777])):
        for number, part in enumerate(np.split(np.asarray(stream.tokens), cuts)):
            path = folder / f"{name}_{number:06d}.{ending}"
            np.save(path, part) if ending == "npy" else write_shard(path, part, header)
    return {
        "data__source": "shards",
        "data__files": folder / f"train_*.{ending}",
        "data__val_files": folder / f"val_*.{ending}",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "ending"), [(True, "bin"), (False, "bin"), (False, "npy")], ids=["with header", "nanoGPT's", "NumPy's"]
)
def test_training_on_shards_matches_training_on_text(run, tiny_run, text_tokens, tmp_path, header, ending):
    folders = [
        run(tiny_run(run__name="text")),
        run(tiny_run(run__name="shards", **shard_options(tmp_path, text_tokens, header, ending))),
    ]
    text, shards = (read_rows(folder / "metrics.jsonl") for folder in folders)
    for column in ("train_losses", "sample_hashes", "val_loss", "val_bits_per_byte", "val_bytes", "val_tokens"):
        assert [row.get(column) for row in shards] == [row.get(column) for row in text], column


def options(folder: Path, **changes: Any) -> DataConfig:
    files = {"files": [str(folder / "train*.bin")], "val_files": [str(folder / "val*.bin")]}
    return DataConfig(source="shards", cache_dir=str(folder / "cache"), **files | changes)


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
    kind = TokenizerConfig(kind="pretrained", name_or_path=model)
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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_shard(tmp_path / "train.bin", [4] * 9)
    write_shard(tmp_path / "val.bin", [1, 4, 3, 5, 6, 7, 1, 7, 4, 1, 5])
    kind = TokenizerConfig(kind="pretrained", name_or_path=str(tmp_path / "tokenizer"))
    tokens = load_tokens(options(tmp_path, separator_id=1), kind)
    counted = bytes_per_token(tokens.val, tokens.tokenizer).tolist()
    assert counted == [0, 3, 1, 2, 1, 7, 0, 6, 4, 0, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"ids": [1, 2], "version": 2}, "has version 2 in its header; only 1 is known"),
        ({"ids": [1, 2], "count": 3}, "states 3 tokens, 1,030 bytes with its header, but has 1,028 bytes"),
        ({"ids": [1, 2], "count": 1}, "states 1 tokens, 1,026 bytes with its header, but has 1,028 bytes"),
        ({"ids": [], "count": 0}, "states 0 tokens"),
    ],
)
def test_wrong_header_is_one_line(tmp_path, content, message):
    path = write_shard(tmp_path / "train.bin", **content)
    with pytest.raises(UserError) as caught:
        open_shard(path)
    assert str(path) in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("magic", [20240801, 20240521, 0x4E4A])
def test_header_of_another_format_is_one_line(tmp_path, magic):
    path = tmp_path / "train.bin"
    header = np.zeros(256, "<i4")
    header[:3] = magic, 7, 2
    path.write_bytes(header.tobytes() + np.array([5, 6], "<u4").tobytes())
    with pytest.raises(UserError, match=f"has the magic number {magic} in its header; only 20240520"):
        open_shard(path)


def test_numpy_files_are_shards(tmp_path):
    for name, ids in (("train0", [65, 66]), ("train1", [67]), ("val", [END, 68, 69])):
        np.save(tmp_path / f"{name}.npy", np.array(ids, np.uint16))
    files = {"files": [str(tmp_path / "train*.npy")], "val_files": [str(tmp_path / "val.npy")]}
    tokens = load_tokens(options(tmp_path, **files), BYTE)
    assert tokens.train.read(np.arange(4)).tolist() == [65, 66, 67, 65]
    assert (tokens.val.tokens.tolist(), tokens.val.num_bytes) == ([END, 68, 69], 2)
    assert np.array_equal(pickle.loads(pickle.dumps(tokens.train)).read(np.arange(3)), [65, 66, 67])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, 2], np.uint32), r"holds uint32 \(2\), not a list of 16-bit ids"),
        (np.array([[1, 2]], np.uint16), r"holds uint16 \(1x2\), not a list"),
        (np.array([], np.uint16), r"holds uint16 \(0\), not a list"),
        (np.array([1, None]), "is not a NumPy file"),
        (None, "is not a NumPy file"),
    ],
)
def test_wrong_numpy_file_is_one_line(tmp_path, array, message):
    path = tmp_path / "train.npy"
    path.write_bytes(b"\x93NUMPY") if array is None else np.save(path, array)
    with pytest.raises(UserError, match=message) as caught:
        open_shard(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_validation_shards_that_also_train_are_told(tmp_path, caplog):
    write_shard(tmp_path / "train.bin", [END, 65])
    write_shard(tmp_path / "val.bin", [END, 66])
    load_tokens(options(tmp_path), BYTE)
    assert caplog.messages == []
    write_shard(tmp_path / "val.bin", [END, 65])
    load_tokens(options(tmp_path), BYTE)
    (message,) = caplog.messages
    assert "val.bin has the same content as" in message and "train.bin, which trains" in message


def test_partial_token_is_rejected(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(b"abc")
    with pytest.raises(UserError, match="has 3 bytes, not a whole number of 16-bit ids"):
        open_shard(path)


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


def test_truncated_shard_is_one_line(tmp_path):
    path = write_shard(tmp_path / "train.bin", [65] * 40_000)
    write_shard(tmp_path / "val.bin", [END, 65])
    stream = load_tokens(options(tmp_path), BYTE).train
    with open(path, "r+b") as file:
        file.truncate(2000)
    with pytest.raises(UserError, match="was truncated while it was being read"):
        stream.read(np.array([39_999]))


def test_sequential_order_reads_blocks_in_stream_order():
    assert block_starts(None, np.arange(12), 5, 8).tolist() == [0, 8, 16, 24, 32, 0, 8, 16, 24, 32, 0, 8]


def test_run_can_read_sequentially(run, tiny_run, text_tokens, tmp_path):
    folder = run(tiny_run(**shard_options(tmp_path, text_tokens, True), data__order="sequential"))
    shuffled = run(tiny_run(run__name="shuffled", **shard_options(tmp_path, text_tokens, True)))
    hashes = [[h for row in read_rows(f / "metrics.jsonl") for h in row["sample_hashes"]] for f in (folder, shuffled)]
    assert len(hashes[0]) == 6 and set(hashes[0]).isdisjoint(hashes[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.source", "shards"], "data.files is empty, but data.source is shards"),
        (["--data.source", "shards", "--data.files", "[a.bin]"], "data.val_files is empty, but data.source is shards"),
        (["--data.separator_id", "1"], "data.val_bytes_files and data.separator_id require data.source shards"),
        (
            ["--data.source=shards", "--data.files=[a.bin]", "--data.val_files=[b.bin]", "--train.max_steps=1"],
            "tokenizer.kind: bpe is trained on text, but data.source shards has only tokens; set pretrained",
        ),
    ],
)
def test_missing_shard_options_are_reported_before_reading(arguments, message):
    with pytest.raises(UserError) as caught:
        load_config(arguments)
    assert message in str(caught.value)


def test_options_that_need_text_are_rejected(tmp_path):
    from hfgolf.data.corpus import load_corpus

    write_shard(tmp_path / "train.bin", [65] * 9)
    write_shard(tmp_path / "val.bin", [END, 65])
    with pytest.raises(UserError, match="holds tokens, not text"):
        load_corpus(options(tmp_path)).write_pieces(tmp_path / "text")
