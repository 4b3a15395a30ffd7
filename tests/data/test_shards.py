"""Shards: tokens from other programs train like text, and a mistake in a shard is one line."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfgolf.config.parse import load_config
from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.batches import block_starts
from hfgolf.data.shards import ShardStream, open_shard
from hfgolf.data.token_cache import TokenCache, load_tokens
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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_shard(tmp_path / "train.bin", [4] * 9)
    write_shard(tmp_path / "val.bin", [1, 4, 3, 5, 6, 7, 1, 7, 4, 1, 5])
    kind = TokenizerSection(kind="pretrained", name_or_path=str(tmp_path / "tokenizer"))
    tokens = load_tokens(options(tmp_path, separator_id=1), kind)
    counted = bytes_per_token(tokens.val, tokens.tokenizer).tolist()
    assert counted == [0, 3, 1, 2, 1, 7, 0, 6, 4, 0, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"ids": [1, 2], "version": 2}, "has version 2 in its header; only 1 is known"),
        ({"ids": [1, 2], "magic": 20240801}, "has version 1 in its header; only 7 is known"),
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


@pytest.mark.parametrize("magic", [20240521, 0x4E4A])
def test_header_of_another_format_is_one_line(tmp_path, magic):
    path = write_shard(tmp_path / "train.bin", [5, 6], magic=magic, version=7, dtype="<u4")
    with pytest.raises(UserError, match=f"has the magic number {magic} in its header; known are 20240520 and 20240801"):
        open_shard(path)


LARGE = 128_256  # entries of Llama 3
RNG = np.random.default_rng(0)
TEXT_IDS = RNG.zipf(1.2, 5000) % 50_257  # most are small, as those of text


@pytest.mark.parametrize(
    ("name", "ids", "vocab_size", "written"),
    [
        *[
            ("a.bin", TEXT_IDS, 50_257, {"header": False, "dtype": f"<{kind}"})
            for kind in ("u2", "u4", "i4", "i8", "u8")
        ],
        *[
            ("a.bin", RNG.integers(0, LARGE, 999), LARGE, {"header": False, "dtype": f"<{kind}"})
            for kind in ("u4", "i8")
        ],
        ("a.bin", np.append(TEXT_IDS, np.zeros(20_000)), 50_257, {"header": False}),  # padding
        ("a.bin", np.append(TEXT_IDS, np.zeros(20_000)), 50_257, {"header": False, "dtype": "<u4"}),
        ("a.bin", np.tile(TEXT_IDS, 800), 50_257, {"header": False}),  # sampled
        ("a.bin", np.append(np.zeros(1_600_000), TEXT_IDS), 50_257, {"header": False, "dtype": "<u4"}),
        ("a.bin", np.tile(TEXT_IDS, 800), 50_257, {"header": False, "dtype": "<i8"}),
        ("a.bin", np.frombuffer(b"plain text of bytes" * 9, np.uint8), 257, {"header": False}),
        ("a.bin", np.frombuffer(b"plain text of bytes" * 9, np.uint8), 257, {"header": False, "dtype": "<u4"}),
        ("a.bin", [65, 66, 67], 257, {"header": False}),
        ("a.bin", TEXT_IDS, 50_257, {}),
        ("a.bin", RNG.integers(0, LARGE, 999), LARGE, {"magic": 20240801, "version": 7, "dtype": "<u4"}),
        ("a.ds", TEXT_IDS, 50_257, {"header": False}),
        ("a.ds", [1, 0], 50_257, {"header": False, "metadata": "gpt2|2\n2\n0K tokens"}),  # nothing would prove it
        ("a.ds", [1, 0, 5], 50_257, {"header": False, "dtype": "<u4", "metadata": "org/name|4\n3"}),
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
    ("ids", "vocab_size", "dtype", "problem"),
    [
        (np.zeros(9000), 50_257, "<u2", "all its values are 0"),
        ([65, 0, 66, 0], 257, "<u2", "read as 32 bits, 100% of 2 values are in the vocabulary"),
        (
            np.where(np.arange(5000) % 3, TEXT_IDS, -100),
            50_257,
            "<i4",
            "read as 32 bits, 67% of 5,000 values are in the vocabulary",
        ),
        (
            np.where(np.arange(5000) % 2, TEXT_IDS, -100),
            50_257,
            "<i4",
            "read as 32 bits, 50% of 5,000 values are in the vocabulary",
        ),
        (TEXT_IDS, 50_257, ">u2", "its 16-bit ids are big-endian"),
        (TEXT_IDS, 50_257, ">u4", "every second 16-bit value is 0, but they are not little-endian ids"),
        (TEXT_IDS, 50_257, ">i8", "every second 16-bit value is 0, but they are not little-endian ids"),
        (TEXT_IDS, LARGE, "<u2", "its ids have 16 bits, too few for the 128,256 entries of the tokenizer"),
    ],
)
def test_width_that_nothing_tells_is_refused(tmp_path, ids, vocab_size, dtype, problem):
    path = write_shard(tmp_path / "a.bin", ids, header=False, dtype=dtype)
    with pytest.raises(UserError, match=f"width of the ids in .*a.bin cannot be told: {problem}; .* as .npy") as caught:
        open_shard(path, vocab_size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.bin", np.append(TEXT_IDS, 1).astype("<u4").tobytes()[:-2], "not a whole number of 32-bit ids; write it"),
        ("a.bin", TEXT_IDS.astype("<i8").tobytes()[:-4], "not a whole number of 64-bit ids; write it"),
        ("a.bin", b"", "has 0 bytes, not a whole number of"),
        ("a.npz", b"PK", r"is not a shard; allowed: \.bin, \.npy, \.ds \(rename raw token ids to \.bin\)"),
        ("a.txt", b"text", "is not a shard; allowed"),
    ],
)
def test_file_of_another_kind_or_cut_is_one_line(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=problem) as caught:
        open_shard(tmp_path / name, 50_257)
    assert "\n" not in str(caught.value) and name in str(caught.value)


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


def test_metadata_without_a_width_is_one_line(tmp_path):
    path = write_shard(tmp_path / "a.ds", TEXT_IDS, header=False)
    (tmp_path / "a.ds.metadata").write_text("gpt2\n5000")
    with pytest.raises(UserError, match=r"a\.ds\.metadata states no bytes per id \(2 or 4\) in its first line"):
        open_shard(path, 50_257)


def test_numpy_files_are_shards(tmp_path):
    for name, ids in (("train0", [65, 66]), ("train1", [67]), ("val", [END, 68, 69])):
        np.save(tmp_path / f"{name}.npy", np.array(ids, np.uint16))
    files = {"files": [str(tmp_path / "train*.npy")], "val_files": [str(tmp_path / "val.npy")]}
    tokens = load_tokens(options(tmp_path, **files), BYTE)
    assert tokens.train.read(np.arange(4)).tolist() == [65, 66, 67, 65]
    assert (tokens.val.tokens.tolist(), tokens.val.num_bytes) == ([END, 68, 69], 2)
    assert np.array_equal(pickle.loads(pickle.dumps(tokens.train)).read(np.arange(3)), [65, 66, 67])


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<u4", "<i4", ">i8", "<u8"])
def test_numpy_files_state_their_width_and_byte_order(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([65, 0, 66, 0, 0], dtype))
    stream = ShardStream((tmp_path / "a.npy",), 257, np.zeros(1), np.zeros(1))
    assert stream.read(np.arange(5)).tolist() == stream.tokens.tolist() == [65, 0, 66, 0, 0]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.0, 2.0]), r"holds float64 \(2\), not a list of token ids"),
        (np.array([True]), r"holds bool \(1\), not a list of token ids"),
        (np.array([(1, 2)], [("a", "<u2"), ("b", "<u2")]), r"holds \[.*\] \(1\), not a list of token ids"),
        (np.array(7, np.uint16), r"holds uint16 \(a single value\), not a list"),
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
