"""A tokenizer in few bytes: what comes back is the same tokenizer.json."""

from __future__ import annotations

import json
import lzma

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hfgolf.golf.merges import pack_tokenizer, unpack_tokenizer


@pytest.fixture(scope="module")
def bpe():
    """Return a byte-level BPE tokenizer of 900 entries, with separator."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    random = np.random.default_rng(0)
    letters = random.choice([*"etaoinshrdlu «é»\n"], (400, 40))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(map("".join, letters), trainer)
    assert tokenizer.get_vocab_size() == 900
    return tokenizer


def changed(tokenizer, change):
    rules = json.loads(tokenizer.to_str())
    change(rules["model"])
    return Tokenizer.from_str(json.dumps(rules))


def test_a_tokenizer_comes_back_from_less_than_half_the_bytes(bpe):
    packed = pack_tokenizer(bpe)
    assert unpack_tokenizer(packed).to_str() == bpe.to_str()
    assert len(packed) < len(lzma.compress(bpe.to_str().encode(), preset=9 | lzma.PRESET_EXTREME)) / 2


def turned(model):
    """Ids in another order than the merges."""
    model["vocab"] = {entry: 899 - number for entry, number in model["vocab"].items()}


@pytest.mark.parametrize(
    "change",
    [
        turned,
        lambda model: model.update(merges=[]),
        lambda model: model.update(merges=model["merges"][::-1]),
        lambda model: model.update(byte_fallback=True, dropout=0.1, unk_token="é"),
        lambda model: model["merges"].append(["e", "!"]) or model["vocab"].update({"e!": 70_000}),
        lambda model: (
            model["merges"].extend([["e", "\x1f"], ["\x1f", "😀"]])
            or model["vocab"].update({"\x1f": 900, "😀": 901, "e\x1f": 902, "\x1f😀": 903})
        ),
    ],
)
def test_any_tokenizer_comes_back(bpe, change):
    tokenizer = changed(bpe, change)
    assert unpack_tokenizer(pack_tokenizer(tokenizer)).to_str() == tokenizer.to_str()


@pytest.mark.parametrize("separator", ["<|end|>", "<|other|>"])
def test_entries_behind_the_merges_keep_their_ids(bpe, separator):
    """As GPT-2's separator, which is the last entry."""
    tokenizer = changed(bpe, lambda model: model["vocab"].update({separator: 900}))
    packed = pack_tokenizer(tokenizer)
    assert unpack_tokenizer(packed).to_str() == tokenizer.to_str() and len(packed) < 5_000


def test_other_kinds_come_back():
    for model in (models.WordLevel({"a": 0, "b": 1}, unk_token="a"), models.Unigram([("a", -1.0), ("b", -2.5)])):
        tokenizer = Tokenizer(model)
        assert unpack_tokenizer(pack_tokenizer(tokenizer)).to_str() == tokenizer.to_str()


def test_the_tokenizer_of_an_older_export_is_read(bpe):
    assert unpack_tokenizer(lzma.compress(bpe.to_str().encode())).to_str() == bpe.to_str()


def test_merges_that_double_an_entry_again_and_again_are_refused():
    """Forty merges of two small ids each: an entry of 2**40 characters."""
    rules = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    pairs = np.tile(np.arange(40, dtype="<u2"), 2)
    with pytest.raises(ValueError, match=r"^the tokenizer is too large$"):
        unpack_tokenizer(lzma.compress(json.dumps(rules).encode() + b"\0" + pairs.tobytes()))
