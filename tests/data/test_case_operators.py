"""Case operators spell capitals by lower-case letters, and every text comes back exactly."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data import tokenizer as tokenizer_module
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import entry_bytes
from hfgolf.evaluate.token_bytes import bytes_per_token
from hfgolf.system.errors import UserError

CASES = TokenizerSection(vocab_size=300, case_operators=True)
TRAINING = (
    "The old man said: THE END of the USA is not the end of The world. McDonald and iPhone, e.g. HTTPServer.\n" * 90
)


def tokenize_in(folder: Path, *documents: str, kind: TokenizerSection = CASES) -> TokenCache:
    """Tokenize validation documents, with training text that has every kind of word."""
    (folder / "train.txt").write_text(TRAINING)
    for number, text in enumerate(documents):
        (folder / f"val{number:03}.txt").write_bytes(text.encode())
    files = {"files": [str(folder / "train.txt")], "val_files": [str(folder / "val*.txt")]}
    return load_tokens(DataSection(source="files", cache_dir=str(folder / "cache"), **files), kind)


@pytest.fixture
def tokenize(tmp_path):
    return partial(tokenize_in, tmp_path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenize_in(tmp_path_factory.mktemp("cases"), "a").tokenizer


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("The USA, iPhone", "^the& usa, i^phone"),
        ("I am A1 USAtoday HTTPServer", "^i am^ a1^ u^s^atoday^ h^t^t^p^server"),
        ("CAPS\nTitle  Two _A_BC", "&caps\n^title ^ two _^a_&bc"),
        ("École Straße İ ǅ ΑΒΓ é", "École^ straße İ ǅ ΑΒΓ é"),
        ("a\x01b\x02c\x03d", "a\x031b\x032c\x030d"),
        (f"{'X' * 32} {'X' * 33}", f"&{'x' * 32}^ {'^'.join('x' * 33)}"),
    ],
)
def test_operators_stand_before_the_space_of_their_word(tokenizer, text, spelled):
    found = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    assert found == spelled.replace("^", "\x01").replace("&", "\x02")


def random_texts(number: int) -> list[str]:
    rng = random.Random(0)
    letters = [*"aAbBzZ   \n\t1'_.", "\x01", "\x02", "\x03", "\x00", "0", "2", "HELLO", " WORLD", " Word", "W" * 31]
    # title case, letters whose lower() is longer or another ASCII letter, combining marks, byte-level symbols
    letters += [*"éÉİ\u0131ǅßẞ\u017f\u212a\u212bﬁΣ\u03c2\u0301\u200d😀āĂĠ"]
    return ["".join(rng.choice(letters) for _ in range(rng.randrange(1, 40))) for _ in range(number)]


def test_every_text_comes_back_and_its_bytes_add_up(tokenizer):
    counts = entry_bytes(tokenizer)
    for text in [*random_texts(500), TRAINING, TRAINING.upper(), TRAINING.title(), "", "<|endoftext|>"]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert counts[ids].sum() == len(text.encode()), text


def test_capitals_share_the_entries_of_lower_case(tokenize):
    with_operators, plain = (tokenize("a", kind=kind).tokenizer for kind in (CASES, TokenizerSection(vocab_size=300)))
    words = [entry for entry in with_operators.get_vocab() if len(entry) > 1 and entry != "<|endoftext|>"]
    assert words and not any(set(ascii_uppercase) & set(word) for word in words)
    text = TRAINING[:110].upper()
    assert len(with_operators(text)["input_ids"]) < 0.9 * len(plain(text)["input_ids"])


def test_bytes_per_token_are_those_of_the_text(tokenize):
    documents = [*filter(str.strip, random_texts(40)), "The END of THE World " * 1500]
    tokens = tokenize(*documents)
    counts = bytes_per_token(tokens.val, tokens.tokenizer)
    starts = np.flatnonzero(tokens.val.tokens == tokens.tokenizer.eos_token_id)
    assert np.add.reduceat(counts.astype(int), starts).tolist() == [len(text.encode()) for text in documents]
    assert tokens.tokenizer_loss is None


def test_exported_tokenizer_applies_it_without_hfgolf(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "The USA and\x01 McDonald"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
    plain = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert plain.decode(plain.encode(text, add_special_tokens=False).ids) == text
    assert (entry_bytes(loaded) == entry_bytes(tokenizer)).all()


def test_operators_without_a_letter_write_nothing(tokenizer):
    entry = {operator: tokenizer.get_vocab()[symbol] for operator, symbol in (("^", "\u0101"), ("_", "\u0102"))}
    a, space = tokenizer("a")["input_ids"][0], tokenizer(" ")["input_ids"][0]
    assert tokenizer.decode([entry["^"], entry["_"], space]) == " "
    assert tokenizer.decode([entry["_"], a, a, space, a]) == "AA a"
    assert tokenizer.decode([entry["^"]]) == ""


def test_a_text_that_does_not_come_back_is_refused(tokenize, monkeypatch):
    plain = tokenizer_module.add_case_operators

    def lossy(tokenizer: Tokenizer) -> None:
        plain(tokenizer)
        rules = json.loads(tokenizer.to_str())
        rules["decoder"]["decoders"] = [step for step in rules["decoder"]["decoders"] if step.get("content") != " Z"]
        tokenizer.decoder = Tokenizer.from_str(json.dumps(rules)).decoder

    monkeypatch.setattr(tokenizer_module, "add_case_operators", lossy)
    with pytest.raises(UserError, match="case_operators: true does not restore this text exactly; set it to false"):
        tokenize("fine", "The Zoo")


def test_the_tokenizer_of_other_runs_is_another_and_other_kinds_have_no_operators(tokenize):
    assert tokenize("a").path != tokenize("a", kind=TokenizerSection(vocab_size=300)).path
    with pytest.raises(UserError, match=r"requires tokenizer\.kind bpe"):
        TokenizerSection(kind="char", case_operators=True)
