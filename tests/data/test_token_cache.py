"""The cache holds exactly the text, is built once, found again, and rebuilt if anything it depends on changes."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, List, Value, load_from_disk
from test_special_tokens import saved
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from hfgolf.config.sections import TokenizerSection
from hfgolf.data import cache_folder, stream_writer, token_cache
from hfgolf.data import tokenizer as tokenizer_module
from hfgolf.data.token_cache import load_tokens
from hfgolf.system import hardware
from hfgolf.system.errors import UserError

BYTE = TokenizerSection(kind="byte")
REPOSITORY = Path(__file__).parents[2]


def bpe(vocab_size: int = 300) -> TokenizerSection:
    return TokenizerSection(kind="bpe", vocab_size=vocab_size)


@pytest.fixture
def data(write, files_config, awkward):
    files = [write("a.txt", f"first {awkward}" * 300), write("b.txt", f"second {awkward}")]
    return files_config(*files, val_files=[write("val.txt", awkward), write("val2.txt", "so short")])


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_stream_has_an_end_of_text_before_each_document(data, kind, awkward):
    cache = load_tokens(data, TokenizerSection(kind=kind, vocab_size=300))
    documents = {cache.train: [f"first {awkward}" * 300, f"second {awkward}"], cache.val: [awkward, "so short"]}
    for stream, texts in documents.items():
        end_of_text = cache.tokenizer.eos_token_id
        starts = np.flatnonzero(stream.tokens == end_of_text)
        assert [cache.tokenizer.decode(ids[1:]) for ids in np.split(stream.tokens, starts)[1:]] == texts
        assert starts[0] == 0
        assert stream.num_bytes == sum(len(text.encode()) for text in texts)
        assert stream.piece_tokens.sum() == len(stream)
        ends = np.cumsum(stream.piece_tokens)
        for start, end, num_bytes in zip(ends - stream.piece_tokens, ends, stream.piece_bytes, strict=True):
            ids = stream.tokens[start:end]
            text = cache.tokenizer.decode(ids[ids != end_of_text])
            assert isinstance(text, str) and len(text.encode()) == num_bytes


def test_splitting_a_document_does_not_change_its_tokens(write, files_config):
    text = "".join(f"def name_{n}(a, b):\n    return a + {n}\n\n" for n in range(1500))
    cache = load_tokens(files_config(write("a.py", text), val_files=[write("val.txt", "v")]), bpe())
    assert len(cache.train.piece_tokens) > 3
    assert cache.train.tokens[1:].tolist() == cache.tokenizer(text)["input_ids"]


def test_batches_are_written_in_order_with_bounded_memory(write, files_config, monkeypatch):
    text = "".join(f"line {number}: naïve {number**3}\n" for number in range(12_000))
    val = write("val.txt", "v")
    whole = load_tokens(files_config(write("a.txt", text), val_files=[val]), BYTE)
    build_encoder = stream_writer.build_encoder
    sizes = []
    monkeypatch.setattr(stream_writer, "ROWS_PER_BATCH", 2)
    monkeypatch.setattr(
        stream_writer, "build_encoder", lambda *of: lambda texts: sizes.append(len(texts)) or build_encoder(*of)(texts)
    )
    again = load_tokens(files_config(write("b.txt", text), val_files=[val]), BYTE)
    assert len(sizes) > 20 and max(sizes) == 2 and np.array_equal(again.train.tokens, whole.train.tokens)
    assert np.array_equal(again.train.piece_tokens, whole.train.piece_tokens)


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_folder_is_a_dataset_and_its_chunks_are_read_as_one_stream(write, files_config, in_memory):
    rows = [{"text": f"row {number} " + "é" * (number % 7)} for number in range(3500)]
    path = write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    data = files_config(path, val_fraction=0.1, split="documents")
    cache = load_tokens(data.replace(in_memory=in_memory), bpe())
    stream, saved = cache.train, load_from_disk(cache.path)
    assert len(stream.chunks) > 2
    assert saved["train"].features == {"input_ids": List(Value("uint16")), "num_bytes": Value("uint32")}
    for split, name in ((cache.train, "train"), (cache.val, "val")):
        assert [id_ for row in saved[name]["input_ids"] for id_ in row] == split.tokens.tolist()
        assert saved[name]["num_bytes"][:] == split.piece_bytes.tolist()
    wanted = np.random.default_rng(0).integers(0, 3 * len(stream), (50, 40))
    wanted[:3] = len(stream.chunks[0]) - 20 + np.arange(40)
    for reader in (stream, pickle.loads(pickle.dumps(stream))):  # as a spawned worker gets it
        assert np.array_equal(reader.read(wanted), stream.tokens.take(wanted, mode="wrap"))


def test_a_tokenizer_that_takes_very_long_is_told(data, monkeypatch, caplog):
    monkeypatch.setattr(stream_writer, "_PATIENCE_SECONDS", 0.01)
    build_encoder = stream_writer.build_encoder

    def slow(tokenizer, kind):
        return lambda texts: time.sleep(0.1) or build_encoder(tokenizer, kind)(texts)

    monkeypatch.setattr(stream_writer, "build_encoder", slow)
    load_tokens(data, BYTE)
    assert "pieces of text, of which the first begins 'first na" in caplog.text


_NEVER_ENDS = """
import signal, time
from hfgolf.data.stream_writer import _encode_patiently
signal.alarm(1)  # its default ends the process without Python, as SIGTERM's; Ctrl-C is an exception in Python
signal.signal(signal.SIGALRM, signal.default_int_handler)
_encode_patiently(lambda texts: time.sleep(10**6), ["a"])
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_process_whose_tokenizer_never_ends():
    ended = subprocess.run([sys.executable, "-c", _NEVER_ENDS], cwd=REPOSITORY, timeout=60, stderr=subprocess.PIPE)
    assert ended.returncode != 0 and b"KeyboardInterrupt" in ended.stderr


def test_second_start_reuses_the_cache(data, caplog, monkeypatch):
    caplog.set_level("DEBUG", logger="hfgolf")
    first = load_tokens(data, bpe())
    assert not first.is_hit and "cache miss: no cache in" in caplog.text
    caplog.clear()
    monkeypatch.setattr(stream_writer, "build_encoder", lambda *_: pytest.fail("tokenized again"))
    second = load_tokens(data, bpe())
    assert second.is_hit and second.path == first.path and np.array_equal(second.train.tokens, first.train.tokens)
    assert f"cache hit: {first.path} ({len(first.train):,} train tokens" in caplog.text
    left = {path.name for path in second.path.parents[1].iterdir()} - {"hashes.json"}  # not of just-written files
    assert left == {"locks", "tokenizers", "tokens"}


def test_cache_miss_names_what_changed(data, write, files_config, caplog):
    caplog.set_level("DEBUG", logger="hfgolf")
    load_tokens(data, BYTE)

    def miss(new_data, tokenizer):
        caplog.clear()
        assert not load_tokens(new_data, tokenizer).is_hit
        return next(record.message for record in caplog.records if "cache miss" in record.message)

    line = miss(data, bpe())
    assert "tokenizer (byte, 257 entries -> bpe, 300 entries)" in line and "files" not in line
    path = write("b.txt", "changed")
    line = miss(data, BYTE)
    assert "files (b.txt" in line and "tokenizer" not in line and path not in line
    line = miss(files_config(*data.files, split="contiguous", val_fraction=0.1), BYTE)
    assert "split (files -> contiguous)" in line


def test_killed_build_leaves_no_files(data, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(token_cache.shutil, "rmtree", lambda *_, **__: None)  # as kill -9 would
        patch.setattr(Dataset, "save_to_disk", lambda *_, **__: raise_(OSError("disk full")))
        with pytest.raises(UserError, match="disk full"):
            load_tokens(data, BYTE)
    folder = Path(data.cache_dir)
    (left,) = folder.glob(f"{token_cache.BUILDING}*")
    (partial,) = folder.glob("tokens/.partial-*")
    others = [path.with_name(path.name[:-1] + ("0" if path.name[-1] == "1" else "1")) for path in (left, partial)]
    for other in others:  # of another text, whose build was killed, too
        other.mkdir()
    with cache_folder.locked(folder / "locks" / f"{others[0].name[-16:]}.lock", "is not dead yet"):
        assert not load_tokens(data, BYTE).is_hit and not left.exists() and not partial.exists()
        assert all(other.exists() for other in others)
    shutil.rmtree(folder / "tokenizers")
    assert not load_tokens(data, bpe()).is_hit and not any(other.exists() for other in others)


def test_texts_that_have_nothing_in_common_do_not_wait_for_each_other(data, write, files_config):
    load_tokens(data, BYTE)
    (lock,) = Path(data.cache_dir, "locks").iterdir()
    other = files_config(write("other.txt", "another text\n" * 50), val_files=[write("v.txt", "and its validation")])
    assert other.cache_dir == data.cache_dir
    with cache_folder.locked(lock, "builds the first one again"):
        assert not load_tokens(other, BYTE).is_hit


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "free up space there, or choose another folder."),
        (errno.ENOLCK, "the file system there has no locks; choose a folder on another one."),
    ],
)
def test_a_cache_that_cannot_be_written_names_its_own_cause(data, monkeypatch, number, way_out):
    monkeypatch.setattr("filelock.FileLock.acquire", lambda *_, **__: raise_(OSError(number, os.strerror(number))))
    with pytest.raises(UserError) as error:
        load_tokens(data, BYTE)
    assert way_out in str(error.value) and os.strerror(number) in str(error.value)


def raise_(error):
    raise error


def test_a_cache_in_a_folder_of_the_user_deletes_nothing_there(data):
    folder = Path(data.cache_dir)
    mine = ["building/notes.txt", "tokens/.secret", "tokens/.partial-notes/x", "tokens/.replaced-1/x", "text/x.txt"]
    mine += ["tokenizers/.partial-mine/x", "parts/x", "tasks/mine/parts/x", ".partial-x", "downloads/mine.part"]
    for name in mine:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    for _ in range(2):
        assert len(load_tokens(data, BYTE).train)
        shutil.rmtree(next(path for path in (folder / "tokens").glob("[0-9a-f]*")))
    assert [name for name in mine if not (folder / name).is_file()] == []


_BUILD = """
import json, logging, sys
from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.token_cache import load_tokens
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
logging.getLogger("hfgolf").setLevel("DEBUG")
input()
load_tokens(DataSection(**json.loads(sys.argv[1])), TokenizerSection(vocab_size=300))
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_build_the_cache_once(data):
    settings = {name: getattr(data, name) for name in ("source", "files", "val_files", "cache_dir")}
    command = [sys.executable, "-c", _BUILD, json.dumps(settings)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        for _ in range(2)
    ]
    for process in processes:  # they wait in input(), so that they start together
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    output = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(text.count("cache miss") for text in output) == [0, 1]
    assert sorted(text.count("cache hit") for text in output) == [0, 1]
    assert sum(text.count("tokenizing train") for text in output) == 1


@pytest.mark.parametrize("in_memory", [True, False, "auto"])
def test_tokens_are_mapped_with_two_bytes_each_or_copied_which_is_logged_if_automatic(data, caplog, in_memory):
    caplog.set_level("DEBUG", logger="hfgolf")
    stream = load_tokens(data.replace(in_memory=in_memory), BYTE).train
    assert stream.is_in_memory == (in_memory is not False)  # auto: this corpus fits
    assert stream.tokens.dtype == np.uint16 and stream.path.stat().st_size < stream.tokens.nbytes + 1500
    assert not stream.tokens.flags.writeable and not stream.tokens.flags.owndata
    assert ("copied into memory" in caplog.text) == (in_memory == "auto")  # an explicit setting is not logged
    copy = pickle.loads(pickle.dumps(stream))
    assert len(pickle.dumps(stream)) < 1000 and np.array_equal(copy.tokens, stream.tokens)
    first = int(stream.tokens[0])
    with open(stream.path, "r+b") as file:
        file.write(bytes(stream.path.stat().st_size))  # visible through a map, but not in a copy
    assert (stream.tokens[0] == first) == stream.is_in_memory


def test_tokens_stay_on_disk_if_the_container_lacks_memory(data, monkeypatch):
    monkeypatch.setattr(hardware, "free_cgroup_bytes", lambda: 100)
    assert not load_tokens(data, BYTE).train.is_in_memory


def test_pretrained_tokenizer_is_loaded_once(data, tmp_path, monkeypatch):
    load_tokens(data, BYTE).tokenizer.save_pretrained(tmp_path / "saved")
    loaded = []
    load = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: loaded.append(a) or load(*a, **k))
    config = TokenizerSection(kind="pretrained", name_or_path=str(tmp_path / "saved"))
    assert np.array_equal(load_tokens(data, config).train.tokens, load_tokens(data, BYTE).train.tokens)
    assert len(loaded) == 1


def test_tokenizer_may_drop_all_whitespace(write, files_config, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_writer, "ROWS_PER_BATCH", 1)
    blank = write("a.txt", "first" + " " * 30_000 + "first")
    config = save_word_tokenizer(tmp_path / "saved", {"first": 2})
    stream = load_tokens(files_config(blank, val_files=[write("v.txt", "first")]), config).train
    assert stream.tokens.tolist() == [0, 2, 2] and stream.piece_tokens.tolist() == [2, 0, 0, 1]
    assert stream.num_bytes == 30_010


def save_word_tokenizer(folder: Path, ids: dict[str, int]) -> TokenizerSection:
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1} | ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return saved(folder, tokenizer, eos_token="<eos>")


def build_lower_casing_wordpiece() -> Tokenizer:
    letters = {f"{mark}{letter}": 0 for mark in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz"}
    vocab = {entry: number for number, entry in enumerate(["[UNK]", "[EOS]", *letters])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def build_spacing_wordpiece() -> Tokenizer:
    """Return a tokenizer that loses nothing but whether there are spaces around a comma."""
    vocab = {entry: number for number, entry in enumerate(["[UNK]", "[EOS]", "cat", "dog", "dogcat", ","])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return tokenizer


def build_unigram() -> Tokenizer:
    """Return a tokenizer like SentencePiece's: it normalizes to NFKC and has no byte fallback."""
    letters = [(letter, -3.0) for letter in "▁Ttheyarcotsfi1"]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *letters], unk_id=0, byte_fallback=False))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize(
    ("build", "text", "loss"),
    [
        (build_lower_casing_wordpiece, "The Cat" * 10, "28.57% of the characters in"),  # each T and C
        (build_unigram, "The ﬁrst cat 你", "14.29% of the characters in"),  # "ﬁ" becomes "fi", and 你 is unknown
        (build_spacing_wordpiece, "cat,dog" * 10, "a sample is decoded to another text"),
        (build_unigram, " The cat", None),
        (lambda: tokenizer_module.byte_level_tokenizer([]), "The ﬁrst cat 你 \0\r\n", None),
    ],
)
def test_lossy_tokenizer_is_reported(write, files_config, tmp_path, caplog, build, text, loss):
    config = saved(tmp_path / "saved", build(), eos_token=None, unk_token=None)
    data = files_config(write("a.txt", "text"), val_files=[write("v.txt", text)])
    for is_hit in (False, True):
        caplog.clear()
        tokens = load_tokens(data, config)
        assert tokens.is_hit == is_hit
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == ([tokens.tokenizer_loss] if loss else [])
        if loss:
            assert warnings[0].startswith(f"the tokenizer is not lossless ({loss}")
            assert warnings[0].endswith("bits per byte is not comparable")


def test_pretrained_tokenizer_with_ids_out_of_range_is_rejected(data, tmp_path):
    with pytest.raises(UserError, match=r"has id 90000, but only 3 entries"):
        load_tokens(data, save_word_tokenizer(tmp_path / "saved", {"first": 90_000}))


def test_large_vocabularies_use_four_bytes_per_token(data, tmp_path):
    config = save_word_tokenizer(tmp_path / "saved", {f"w{n}": n for n in range(2, 36_000)} | {"first": 70_000})
    stream = load_tokens(data, config).train
    assert stream.tokens.dtype == np.uint32 and stream.tokens.max() == 70_000


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(data, monkeypatch, caplog, capsys, is_terminal):
    caplog.set_level("INFO", logger="hfgolf")
    monkeypatch.setattr(stream_writer, "_PROGRESS_SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    load_tokens(data, BYTE)
    assert ("tokenizing train: 100%" in capsys.readouterr().err) == is_terminal
    assert ("tokenizing train: 100 %, 0 s left" in caplog.text) == (not is_terminal)
