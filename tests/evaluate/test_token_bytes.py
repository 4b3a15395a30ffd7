"""Bytes per token add up to the raw text for every kind of tokenizer, or the tokenizer is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfgolf.data.sentencepiece_model import load_sentencepiece
from hfgolf.evaluate.token_bytes import bytes_per_token, challenge_bytes, entry_bytes
from hfgolf.system.errors import UserError

TEXT = " naïve café,  two spaces;\ttab\r\n\r\n漢字 \U0001f600 \U000e0041 <|endoftext|> ﬁ ½ \u2581 the end "

SENTENCEPIECE = Path(__file__).parents[1] / "data/sentencepiece.model"


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "sentencepiece"])
def test_token_bytes_add_up_to_the_text(tokenize, sentencepiece_like, kind):
    documents = [TEXT, "a", "\u2581 x" if kind != "sentencepiece" else "x", "word and " * 3000]  # the last: two pieces
    if kind == "sentencepiece":
        documents[0] = TEXT.replace("\u2581", "")  # Llama's rules read it as a space
    _, tokens = tokenize(sentencepiece_like() if kind == "sentencepiece" else kind, *documents)
    counts = bytes_per_token(tokens.val, tokens.tokenizer)
    assert counts.dtype == np.uint16 and len(counts) == len(tokens.val)
    is_separator = tokens.val.tokens == tokens.tokenizer.eos_token_id
    assert is_separator.sum() == len(documents) and not counts[is_separator].any()
    sums = np.add.reduceat(counts.astype(np.int64), np.flatnonzero(is_separator))
    assert sums.tolist() == [len(document.encode()) for document in documents]
    if kind == "byte":
        assert set(counts[~is_separator]) == {1}
    if kind == "char":  # é is in no training text, so it is two tokens
        assert counts[:8].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


def test_tokenizer_that_rewrites_its_text_is_rejected(tokenize, sentencepiece_like):
    _, tokens = tokenize(sentencepiece_like(normalizers.NFKC()), "the end", "one ﬁne ﬁsh")
    with pytest.raises(UserError, match=r"^The tokens of piece 1 stand for 13 bytes, but its text has 15 \(1 of 2 "):
        bytes_per_token(tokens.val, tokens.tokenizer)


def test_token_of_more_than_65535_bytes_is_rejected(tokenizer):
    long = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    long.decoder, long.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    long.add_tokens(["x" * 65_536])
    fast = PreTrainedTokenizerFast(tokenizer_object=long, eos_token="</s>")
    stream = SimpleNamespace(tokens=np.array([3, 0, 2]), piece_tokens=np.array([3]), piece_bytes=np.array([65_537]))
    with pytest.raises(UserError, match=r"^Token 2 \(id 2\) stands for 65536 bytes"):
        bytes_per_token(stream, fast)


def test_published_entries_count_the_bytes_they_spell(tokenizer, sentencepiece_like):
    counts = entry_bytes(tokenizer)
    assert counts.tolist() == [1] * 256 + [0]
    like = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like(), eos_token="</s>")
    entries = {entry: entry_bytes(like)[number] for entry, number in like.get_vocab().items()}
    assert (entries["</s>"], entries["<0xE2>"], entries["\u2581"]) == (0, 1, 1)
    words = [entry for entry in entries if "\u2581" in entry[1:] and not entry.startswith("<")]
    assert words and all(entries[word] == len(word) for word in words)  # of ASCII and spaces


def test_the_challenges_rule_counts_a_leading_space_only_after_text(tokenizer):
    """The rule as the challenge states it, one token after the other."""
    fast = load_sentencepiece(SENTENCEPIECE)
    ids = [1, *fast.backend_tokenizer.encode(" the  best\tbytes of 日本 é").ids, 3, 2, 267, 326, 0, 267, 1, 326, 326]
    expected, before = [], None
    for number in ids:
        entry = fast.convert_ids_to_tokens(number)
        if number < 4:
            expected.append(0)
        elif entry.startswith("<0x"):
            expected.append(1)
        else:
            counts_space = entry.startswith("\u2581") and before is not None and before >= 4
            expected.append(len(entry.removeprefix("\u2581").encode()) + counts_space)
        before = number
    assert challenge_bytes(np.array(ids), fast).tolist() == expected
    assert sum(expected[: ids.index(3)]) == len("the  best\tbytes of 日本 é".encode())  # without the first space
    assert challenge_bytes(np.array([3, 267, 267]), fast).tolist() == [0, len("the"), len(" the")]
    assert challenge_bytes(np.array([65, 66]), tokenizer) is None
