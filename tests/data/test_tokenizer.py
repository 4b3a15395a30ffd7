"""Tokenizers restore the exact text, and keep what their kind promises."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import logging
import random
import re
import string
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data import tokenizer as tokenizer_module
from hfgolf.data.pieces import evenly_sampled, num_text_bytes
from hfgolf.data.token_cache import load_tokens
from hfgolf.data.tokenizer import END_OF_TEXT, build_encoder, build_tokenizer, tokenizer_sha256
from hfgolf.system.errors import UserError

TEXT = "".join(f"Line {number}: the naïve 你好 costs {number * 7} €.\r\n" for number in range(400))
KINDS = ["bpe", "byte", "char"]


def build(kind: str, folder: Path, text: str = TEXT, vocab_size: int = 300) -> PreTrainedTokenizerFast:
    pieces = Dataset.from_dict({"text": [text[i : i + 5000] for i in range(0, len(text), 5000)]})
    config = TokenizerSection(kind=kind, vocab_size=vocab_size)
    folder.mkdir(exist_ok=True)
    return build_tokenizer(config, {"text": text}, lambda: pieces, folder)


def random_text(rng: random.Random) -> str:
    ranges = [(0, 128), (128, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x1F300, 0x1FAFF), (0x10000, 0x110000)]
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 200)))


@pytest.mark.parametrize("kind", KINDS)
def test_any_unicode_round_trips_and_the_encoder_gives_the_same_ids(tmp_path, kind, awkward):
    tokenizer = build(kind, tmp_path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    rng = random.Random(0)
    texts = [awkward, END_OF_TEXT, f"a{END_OF_TEXT}b", " , . ' n't 's", "\0", "plain ASCII", TEXT]
    texts += [random_text(rng) for _ in range(100)]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    for text, ids in zip(texts, rows, strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.eos_token_id not in ids and max(ids) < len(tokenizer)
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.decode([tokenizer.eos_token_id]) == END_OF_TEXT
    if kind == "byte":
        assert tokenizer(awkward)["input_ids"] == list(awkward.encode()) and len(tokenizer) == 257
    encoded, num_ids = build_encoder(tokenizer, kind)(texts)
    assert encoded.dtype == np.uint32 and num_ids == [len(row) for row in rows]
    assert encoded.tolist() == list(itertools.chain.from_iterable(rows))
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert isinstance(loaded, PreTrainedTokenizerFast) and tokenizer_sha256(loaded) == tokenizer_sha256(tokenizer)
    assert loaded(awkward)["input_ids"] == rows[0] and loaded.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("is_limited", [True, False])
def test_encoder_does_not_change_the_tokenizer(tmp_path, is_limited):
    tokenizer = build("bpe", tmp_path)
    tokenizer.split_special_tokens = False  # like a pretrained one
    if is_limited:
        tokenizer.backend_tokenizer.enable_padding(length=50)
        tokenizer.backend_tokenizer.enable_truncation(3)
    before = tokenizer_sha256(tokenizer)
    ids, num_ids = build_encoder(tokenizer, "bpe")([TEXT, END_OF_TEXT])
    assert num_ids[0] > 50 and num_ids[1] > 1 and len(ids) == sum(num_ids)  # not truncated, and not padded
    assert tokenizer_sha256(tokenizer) == before
    assert is_limited or tokenizer(END_OF_TEXT)["input_ids"] == [tokenizer.eos_token_id]


def test_char_has_one_token_for_each_character_seen(tmp_path):
    tokenizer = build("char", tmp_path)
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) == len(TEXT) and len(set(ids)) == len(set(TEXT))
    assert len(tokenizer) == 257 + len({"ï", "你", "好", "€"})
    assert len(tokenizer("ü")["input_ids"]) == len("ü".encode())  # unseen, so encoded as bytes


def test_bpe_reaches_its_size_and_compresses(tmp_path):
    tokenizer = build("bpe", tmp_path)
    assert len(tokenizer) == 300
    assert len(tokenizer(TEXT)["input_ids"]) < 0.5 * len(TEXT.encode())
    assert tokenizer_sha256(build("bpe", tmp_path / "again")) == tokenizer_sha256(tokenizer)


def test_trains_once_per_corpus_and_size(tmp_path, monkeypatch):
    first = build("bpe", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_module, "_train_bpe", None)  # training again would fail
        assert tokenizer_sha256(build("bpe", tmp_path)) == tokenizer_sha256(first)
    assert len(build("bpe", tmp_path, vocab_size=280)) == 280
    assert tokenizer_sha256(build("bpe", tmp_path, text=TEXT.upper())) != tokenizer_sha256(first)


def test_vocabulary_too_large_for_the_corpus_names_the_limit(tmp_path):
    with pytest.raises(UserError, match=r"vocab_size: 5000 .* (\d+) entries") as caught:
        build("bpe", tmp_path, vocab_size=5000)
    reached = int(str(caught.value).split(" entries")[0].split()[-1])
    assert len(build("bpe", tmp_path, vocab_size=reached)) == reached


@pytest.mark.parametrize("kind", ["six notes", "repetitive", "compressed", "chat", "enough"])
def test_without_a_size_the_vocabulary_fits_the_text(tmp_path, caplog, kind):
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(5000)]
    prose = " ".join(rng.choices(words, k=50_000))
    data = {"files": [str(tmp_path / "text")], "split": "contiguous", "cache_dir": str(tmp_path / "cache")}
    if kind == "six notes":
        (tmp_path / "text").mkdir()
        for number in range(6):
            (tmp_path / "text" / f"{number}.md").write_text(f"note {number}: buy milk. " * 10)
    elif kind == "chat":
        data |= {"files": [str(tmp_path / "text.jsonl")], "messages_column": "messages", "split": "documents"}
        turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": prose[:5000]}]
        rows = [json.dumps({"messages": turns, "number": number}) for number in range(60)]
        (tmp_path / "text.jsonl").write_text("\n".join(rows))
    elif kind == "compressed":
        data["files"] = [str(tmp_path / "text.txt.gz")]
        (tmp_path / "text.txt.gz").write_bytes(gzip.compress(("to be or not to be\n" * 20_000).encode()))
    else:
        (tmp_path / "text").write_text(prose if kind == "enough" else "to be or not to be\n" * 20_000)
    with caplog.at_level(logging.DEBUG, "hfgolf"):
        size = len(load_tokens(DataSection(source="files", **data), TokenizerSection()).tokenizer)
    assert any("trained a BPE" in message for message in caplog.messages) == (size > 257)
    said = [message for message in caplog.messages if message.startswith("tokenizer: ")]
    if kind == "six notes":
        assert size == 257 and re.fullmatch(r"tokenizer: bytes, .* only 1\.\d kB of training text", said[0])
    elif kind == "enough":
        assert size == 4096 and not said
    else:
        assert 257 < size < 4096 and said == [f"tokenizer: {size:,} entries, all that this text supports"]


def test_sample_is_evenly_spaced_and_within_its_cap():
    pieces = Dataset.from_dict({"text": [str(number % 10) * 100 for number in range(1000)]})
    sample = pieces.select(evenly_sampled(pieces, 10_000))
    assert 5_000 < num_text_bytes(sample) <= 10_000
    assert sample[0]["text"] == pieces[0]["text"]
    assert len(set(pieces.select(evenly_sampled(pieces, 30_000))["text"][:])) >= 5
    assert evenly_sampled(pieces, 100_000) == range(1000)


def test_pretrained_tokenizer_is_used_unchanged(tmp_path):
    build("bpe", tmp_path / "cache").save_pretrained(tmp_path / "saved")
    config = TokenizerSection(kind="pretrained", name_or_path=str(tmp_path / "saved"))
    loaded = build_tokenizer(config, {}, lambda: pytest.fail("read the corpus"), tmp_path)
    assert tokenizer_sha256(loaded) == tokenizer_sha256(build("bpe", tmp_path / "cache"))

    (tmp_path / "empty.json").write_text("")
    (tmp_path / "words.tiktoken").write_text("IQ== 0\n")
    a_file = "name a tokenizer.json or a SentencePiece *.model."
    for name, advice in (("nowhere", "and the network."), ("empty.json", a_file), ("words.tiktoken", a_file)):
        with pytest.raises(UserError, match="cannot be loaded") as caught:
            load_pretrained(tmp_path / name)
        assert "\n" not in str(caught.value) and str(caught.value).endswith(advice)


def load_pretrained(path: Path) -> PreTrainedTokenizerFast:
    config = TokenizerSection(kind="pretrained", name_or_path=str(path))
    return build_tokenizer(config, {}, lambda: pytest.fail("read the corpus"), path.parent)


def test_missing_end_of_text_token_is_added(tmp_path, caplog):
    caplog.set_level("INFO", logger="hfgolf")
    bare = Tokenizer(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    bare.save(str(tmp_path / "tokenizer.json"))
    loaded = load_pretrained(tmp_path / "tokenizer.json")
    assert (loaded.eos_token, loaded.eos_token_id, len(loaded)) == (END_OF_TEXT, 3, 4)
    assert "<|endoftext|>, added to its vocabulary (id 3, 4 entries)" in caplog.text
    loaded.save_pretrained(tmp_path / "export")
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert again.eos_token_id == 3 and again("one two")["input_ids"] == [0, 1]
    assert again.decode([0, 3], skip_special_tokens=True) == "one"

    folder = tmp_path / "folder"
    PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(folder)
    assert load_pretrained(folder).eos_token_id == 3
    bare.add_special_tokens(["</s>"])
    bare.save(str(tmp_path / "other.json"))
    assert load_pretrained(tmp_path / "other.json").eos_token == "</s>" and "</s> of its vocabulary" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "swapped ids", "no tokenizer.json", "no hashes"])
def test_damaged_tokenizer_is_retrained(tmp_path, caplog, damage):
    kind = "char" if damage == "cut" else "bpe"
    caplog.set_level("INFO", logger="hfgolf")
    first = build(kind, tmp_path)
    (folder,) = tmp_path.iterdir()
    path = folder / "tokenizer.json"
    content = json.loads(path.read_bytes())
    if damage == "swapped ids":
        vocab = content["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        path.write_text(json.dumps(content))
    elif damage.startswith("no"):
        (path if damage == "no tokenizer.json" else folder / "cache.json").unlink()
    else:
        path.write_bytes(path.read_bytes()[:100])
    again = build(kind, tmp_path)
    assert caplog.text.count("tokenizer damaged") == 1 and str(folder) in caplog.text
    assert tokenizer_sha256(again) == tokenizer_sha256(first)
    caplog.clear()
    build(kind, tmp_path)
    assert "tokenizer" not in caplog.text and [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_tokenizer_code_is_never_executed(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    folder = tmp_path / "custom"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Words: pass\n")
    config = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": ["code.Words", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"auto_map": config["auto_map"]}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_pretrained(folder)
    assert "\n" not in str(caught.value) and not ran.exists()
