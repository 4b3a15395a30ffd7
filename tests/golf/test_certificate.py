"""The certificate holds for any text of a lossless tokenizer, and says what is wrong with everything else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import normalizers

from hfgolf.data.sentencepiece_model import load_sentencepiece
from hfgolf.evaluate.loss import plan_evaluation
from hfgolf.evaluate.windows import plan_windows
from hfgolf.golf.certificate import Certificate, certify, certify_text

SENTENCEPIECE = Path(__file__).parents[1] / "data/sentencepiece.model"
# two characters of every plane, with noncharacters and private use; the last of them all
PLANES = "".join(chr(plane << 16 | place) for plane in range(17) for place in (0xA1, 0xFFFD)) + chr(0x10FFFF)
ODD = "\r\n a\r\n\r\nb\n\r  \t   two,   three     \n\n\n<|endoftext|> </s> \x00\x7f\x85\ufeff e\u0301 \ufb01 \ufffd"
DOCUMENTS = [PLANES, ODD, "the end", "the naive cafe and THE End " * 1500]  # the last: six pieces


@pytest.fixture
def certified(tokenize):
    """Return a function that tokenizes documents and certifies sliding windows over them."""

    def certified_(kind, *documents, **options) -> Certificate:
        corpus, tokens = tokenize(kind, *documents, **options)
        plan, _ = plan_evaluation(tokens.val, tokens.tokenizer, "sliding", 64, 32)
        return certify(corpus, tokens, plan)

    return certified_


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "case operators", "pretrained"])
def test_certificate_holds_on_text_of_every_kind(certified, sentencepiece_like, tmp_path, kind):
    certificate = certified(sentencepiece_like() if kind == "pretrained" else kind, *DOCUMENTS)
    assert certificate.holds and certificate.problems == (), certificate.line
    raw = [document.encode() for document in DOCUMENTS]
    facts = certificate.facts
    assert facts["documents"] == [[hashlib.sha256(text).hexdigest(), len(text)] for text in raw]
    assert facts["sha256"] == hashlib.sha256(b"".join(raw)).hexdigest()
    assert facts["num_bytes"] == facts["token_bytes"] == facts["scored_bytes"] == sum(map(len, raw))
    assert (facts["duplicates"], facts["searched_documents"]) == ([], 2)
    assert facts["coverage"]["num_scored"] == facts["num_tokens"] - 1
    expected = math.log2(facts["vocab_size"]) * (facts["num_tokens"] - 1) / facts["num_bytes"]
    assert facts["uniform_bits_per_byte"] == pytest.approx(expected, rel=1e-9)
    assert certificate.unit == "bits per byte"
    certificate.write(tmp_path / "certificate.json")
    assert json.loads((tmp_path / "certificate.json").read_text()) == {
        "written_by": "hfgolf", "holds": True, "problems": [], "unit": "bits per byte", **facts,
    }  # fmt: skip
    assert certificate.line.startswith(f"Certificate holds: 4 documents, {sum(map(len, raw)):,} bytes (sha256 ")


def test_tokenizer_that_rewrites_text_gets_no_certificate(certified, sentencepiece_like):
    certificate = certified(
        sentencepiece_like(normalizers.NFKC()), "the end", "na\u00efve \ufb01sh and \u00bd", "\ufb01"
    )
    assert not certificate.holds and certificate.unit == "bits per byte of the normalized text"
    assert certificate.facts["documents_decoded_differently"] == 2
    assert certificate.line == (
        "No certificate: 2 of 3 documents decode to another text, so the tokenizer rewrites text (first in document 1,"
        " character 6: '\\ufb01sh and \\xbd' became 'fish and 1\\u20442'); use a lossless tokenizer."
    )
    assert certificate.facts["decoded_bytes"] == len("the endna\u00efve fish and 1\u20442fi".encode())


def test_it_says_what_the_challenges_rule_counts(certified):
    tokenizer = load_sentencepiece(SENTENCEPIECE).backend_tokenizer
    certificate = certified(tokenizer, " the best model", "two  spaces\n of bytes")
    assert certificate.holds and certificate.facts["num_bytes"] == certificate.facts["scored_bytes"] == 36
    assert certificate.facts["challenge_bytes"] == 35  # not the space in front of the first document
    assert certificate.line.endswith("tokens scored once; Parameter Golf's rule would count 35 bytes.")
    certificate = certified(tokenizer, "the best model", "two spaces")
    assert certificate.facts["challenge_bytes"] == certificate.facts["scored_bytes"]
    assert certificate.line.endswith("tokens scored once.")


def test_validation_document_in_the_training_text_is_found(certified):
    certificate = certified("byte", "one", "copied", train="copied")
    assert certificate.facts["duplicates"] == [1]
    assert "1 of 2 validation documents are also training documents (the first is document 1, 6 bytes" in (
        certificate.line
    )


def rows(*texts: str) -> Dataset:
    return Dataset.from_dict({"text": [*texts], "is_start": [True] * len(texts)})


@pytest.fixture
def parts(tokenize):
    """Return (tokens, plan) of two documents."""
    _, tokens = tokenize("byte", "one", "two")
    return tokens, plan_windows("flat", 8, 4)


def test_certificate_says_if_the_training_text_is_unknown(parts):
    tokens, plan = parts
    certificate = certify_text(rows("one", "two"), None, tokens.val, tokens.tokenizer, plan)
    assert certificate.holds and "training text not known" in certificate.line


@pytest.mark.parametrize("texts", [("one",), ("one", "two", "three"), ("one", "twos"), ("onetwo",)])
def test_tokens_of_another_text_get_no_certificate(parts, texts):
    tokens, plan = parts
    certificate = certify_text(rows(*texts), None, tokens.val, tokens.tokenizer, plan)
    assert certificate.problems[0] == "the tokens were made from another text; build the token cache again"


def changed(tokens, ids, **pieces):
    """Return the stream with other tokens and pieces."""
    return dataclasses.replace(tokens.val, chunks=(np.array(ids, tokens.val.tokens.dtype),), **pieces)


def test_tokens_that_are_not_those_of_the_documents_get_no_certificate(parts):
    tokens, plan = parts
    ids = tokens.val.tokens.tolist()
    # a document in two pieces, of which the text has one: as many separators
    more = changed(tokens, ids=ids[:4] + ids[5:], piece_tokens=np.array([4, 3]), piece_bytes=np.array([3, 3]))
    certificate = certify_text(rows("one"), None, more, tokens.tokenizer, plan_windows("flat", 7, 4))
    assert certificate.problems == ("the tokens were made from another text; build the token cache again",)
    separator = changed(tokens, ids=[*ids[:2], ids[0], *ids[3:]])
    certificate = certify_text(rows("one", "two"), None, separator, tokens.tokenizer, plan)
    assert certificate.problems[0] == "the tokens were made from another text; build the token cache again"
    other = changed(tokens, ids=[*ids[:2], ord("N"), *ids[3:]])
    certificate = certify_text(rows("one", "two"), None, other, tokens.tokenizer, plan)
    assert not certificate.holds and "first in document 0, character 1: 'ne' became 'Ne'" in certificate.line


def test_a_loop_that_scores_other_tokens_gets_no_certificate(parts, monkeypatch):
    """The uniform model's score follows from the tokens and bytes alone, to nine digits."""
    from hfgolf.golf import certificate as module

    tokens, plan = parts
    real = module.score
    for factor in (1 + 1e-8, 1 - 1e-8, 2.0):
        monkeypatch.setattr(module, "score", lambda *arguments, factor=factor: factor * real(*arguments))
        certificate = certify_text(rows("one", "two"), None, tokens.val, tokens.tokenizer, plan)
        assert len(certificate.problems) == 1 and certificate.problems[0].startswith("a uniform model costs ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: plan_windows("flat", 6, 4), "only the first 6 of 8 tokens were evaluated"),
        (lambda windows: windows[:1], "3 tokens are not scored, first token 5"),
        (lambda windows: windows[[0, 1, 1]], "do not score each token once, in order"),
        (lambda windows: windows[::-1], "do not score each token once, in order"),
        (lambda windows: windows + np.array([0, 0, 1]), "do not score each token once, in order"),
    ],
)
def test_windows_that_skip_or_repeat_tokens_get_no_certificate(parts, change, says):
    tokens, plan = parts
    changed = change(plan.windows)
    if isinstance(changed, np.ndarray):
        changed = dataclasses.replace(plan, windows=changed)
    certificate = certify_text(rows("one", "two"), None, tokens.val, tokens.tokenizer, changed)
    assert not certificate.holds and says in certificate.line


def test_two_byte_counts_are_independent(parts, monkeypatch):
    """A table that is wrong in the middle of a piece, but right in its sum, is found by decoding."""
    from hfgolf.golf import certificate as module

    tokens, plan = parts
    monkeypatch.setattr(module, "bytes_per_token", lambda *_: np.array([0, 2, 0, 1, 0, 1, 1, 1], np.uint16))
    certificate = certify_text(rows("one", "two"), None, tokens.val, tokens.tokenizer, plan)
    assert "other bytes than the vocabulary, first at token 1 (id 111)" in certificate.line


def test_dropped_tail_drops_its_bytes(tokenize):
    _, tokens = tokenize("byte", "one", "two")
    plan, num_bytes = plan_evaluation(tokens.val, tokens.tokenizer, "flat", 5, drop_tail=True)
    certificate = certify_text(rows("one", "two"), None, tokens.val, tokens.tokenizer, plan)
    assert certificate.holds and certificate.facts["scored_bytes"] == num_bytes == 4  # a separator and "one", "t"
