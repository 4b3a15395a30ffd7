"""A SentencePiece file becomes a fast tokenizer with SentencePiece's own ids.

sentencepiece.model is a real one, trained by sentencepiece 0.2.3 on hfgolf's README.md and docs/golf.md: BPE, 400
entries, byte fallback, digits split, identity, spaces kept. The ids below are those of sentencepiece.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import import_protobuf

from hfgolf.data.sentencepiece_model import load_sentencepiece
from hfgolf.data.tokenizer import entry_bytes
from hfgolf.system.errors import UserError

MODEL = Path(__file__).with_name("sentencepiece.model")
TEXT = "  the best  model,\tin 1234 bytes:\r\n<s>é 你\u2581the "
MIDDLE = [345, 13, 263, 326, 353, 357, 364, 360, 312, 264, 366, 17, 14, 64, 329, 66, 199, 173, 326, 232, 193, 164, 267]
IDS = {  # by (add_dummy_prefix, remove_extra_whitespaces)
    (False, False): [326, 267, 275, 264, 328, 326, 290, 315, *MIDDLE, 326],
    (True, False): [326, 326, 267, 275, 264, 328, 326, 290, 315, *MIDDLE, 326],
    (False, True): [328, 261, 275, 264, 328, 290, 315, *MIDDLE],
    (True, True): [267, 275, 264, 328, 290, 315, *MIDDLE],
}


def changed(folder: Path, **rules: bool) -> Path:
    """Write the model with other rules for spaces; sentencepiece obeys them, too."""
    model = import_protobuf().ModelProto()
    model.ParseFromString(MODEL.read_bytes())
    for name, value in rules.items():
        setattr(model.normalizer_spec, name, value)
    path = folder / "changed.model"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("rules", IDS)
def test_ids_are_sentencepieces(tmp_path, rules):
    path = changed(tmp_path, add_dummy_prefix=rules[0], remove_extra_whitespaces=rules[1])
    tokenizer = load_sentencepiece(path)
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    assert backend.encode(TEXT, add_special_tokens=False).ids == IDS[rules]
    spelled = TEXT.replace("\u2581", " ")
    expected = spelled.replace("  ", " ").strip(" ") if rules[1] else spelled
    assert backend.decode(IDS[rules], skip_special_tokens=False) == expected
    for empty in ("", *(["   "] if rules[1] else [])):
        assert backend.encode(empty, add_special_tokens=False).ids == []


def test_special_tokens_are_those_of_the_file_and_survive_export(tmp_path):
    tokenizer = load_sentencepiece(MODEL)
    assert [getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "unk")] == [0, 1, 2, 3]
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.decode(loaded(TEXT)["input_ids"]) == tokenizer.decode(tokenizer(TEXT)["input_ids"])
    assert loaded.eos_token_id == 2 and len(loaded) == 400


def test_entries_count_the_bytes_of_their_text():
    tokenizer = load_sentencepiece(MODEL)
    counts = entry_bytes(tokenizer)
    assert not counts[:4].any() and (counts[4:260] == 1).all()
    assert counts[IDS[False, False]].sum() == len(TEXT.replace("\u2581", " ").encode())


@pytest.mark.parametrize("content", [b"", b"\x0a\xff", b"not a model"])
def test_damaged_file_is_one_line(tmp_path, content):
    path = tmp_path / "bad.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not a SentencePiece model") as caught:
        load_sentencepiece(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def random_text(rng: random.Random) -> str:
    letters = [*"abetAB01 _.\n\t'<>s/", "the", "  ", "é", "\u2581", "你", "\U0001f600", "\ue001", "\r", "\0", "<0x0A>"]
    return "".join(rng.choice(letters) for _ in range(rng.randrange(60)))


@pytest.mark.parametrize(
    "settings",
    [
        {"add_dummy_prefix": False, "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},  # the challenge's: nmt_nfkc
        {},
        {"user_defined_symbols": ["\ue001"], "add_dummy_prefix": False},
        {"model_type": "unigram", "vocab_size": 330, "add_dummy_prefix": False},
    ],
    ids=["identity", "challenge", "prefix", "symbols", "unigram"],
)
def test_trained_models_agree_with_the_library(tmp_path, settings):
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece trains the models to compare with")
    rng = random.Random(0)
    lines = [random_text(rng) for _ in range(500)] + ["the best model of all in 1234 bytes", "a naïve café"] * 50
    common: dict[str, Any] = {"model_type": "bpe", "vocab_size": 330, "byte_fallback": True, "hard_vocab_limit": False}
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, split_digits=True, minloglevel=2, **common | settings
    )
    path = tmp_path / "trained.model"
    path.write_bytes(written.getvalue())
    backend = load_sentencepiece(path).backend_tokenizer
    backend.encode_special_tokens = True
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in [*lines, " ", ""] if "model_type" not in settings else lines[-2:]:  # no ties between segmentations
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ids == processor.encode(text), text
        assert backend.decode(ids, skip_special_tokens=False) == processor.decode(ids), text


def test_other_ids_than_the_librarys_are_refused(tmp_path, monkeypatch):
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece returns the ids to compare with")
    monkeypatch.setattr(sentencepiece.SentencePieceProcessor, "encode", lambda processor, text: [5, *IDS[False, False]])
    with pytest.raises(UserError, match="gives other ids by SentencePiece than by the tokenizers library, first"):
        load_sentencepiece(MODEL)
