"""Text stays text, and documents begin as the tokenizer begins a text, over every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfgolf.config.sections import TokenizerSection
from hfgolf.data.chat import ConversationEncoder, add_chat_template
from hfgolf.data.corpus import load_corpus
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import byte_level_tokenizer, document_start, keep_old_documents, text_start
from hfgolf.evaluate.bits_per_byte import compressor_scores
from hfgolf.evaluate.loss import plan_documents, plan_evaluation
from hfgolf.evaluate.sample import text_ids
from hfgolf.evaluate.token_bytes import bytes_per_token
from hfgolf.golf.certificate import certify
from hfgolf.system.errors import UserError

SPECIAL = ["<unk>", "<s>", "</s>", "[MASK]", "<|im_end|>"]
LETTERS = [*map(chr, range(33, 127))]
HTML = "<p>a</s>b <s>c</s> <unk> [MASK] <|im_end|> d</p>"


def unigram() -> Tokenizer:
    pieces = [*SPECIAL, "\u2581", *LETTERS]
    tokenizer = Tokenizer(models.Unigram([(piece, 0.0 if piece in SPECIAL else -9.0) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def ids_of(entries: list[str]) -> dict[str, int]:
    return {entry: number for number, entry in enumerate(entries)}


def sentencepiece_bpe() -> Tokenizer:
    merges = [("<", "/"), ("</", "s"), ("</s", ">")]  # these alone would make </s> of text
    tokenizer = Tokenizer(models.BPE(ids_of([*SPECIAL, "\u2581", *LETTERS, "</", "</s"]), merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def byte_level_bpe() -> Tokenizer:
    vocab = ids_of([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    tokenizer = Tokenizer(models.BPE(vocab, [], ignore_merges=True))  # a word in the vocabulary is a token
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("</s>|<s>"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(ids_of([*SPECIAL, "<p>", "a", "b", "d", "</p>"]), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?\w+>|\[\w+\]|<\|\w+\|>|\w+"), "removed", invert=True)
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = ids_of([*SPECIAL, *LETTERS, *("##" + letter for letter in LETTERS)])
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    return tokenizer


KINDS = {kind.__name__: kind for kind in (unigram, sentencepiece_bpe, byte_level_bpe, word_level, word_piece)}


def saved(folder: Path, backend: Tokenizer, **declared: Any) -> TokenizerSection:
    declared = {"eos_token": "</s>", "unk_token": "<unk>", **declared}
    PreTrainedTokenizerFast(tokenizer_object=backend, **declared).save_pretrained(folder)
    return TokenizerSection(kind="pretrained", name_or_path=str(folder))


@pytest.mark.parametrize("added", ["special", "not special", "in the vocabulary only"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_never_becomes_a_special_token(write, files_config, tmp_path, kind, added):
    backend = KINDS[kind]()
    if added != "in the vocabulary only":
        backend.add_tokens([AddedToken(token, special=added == "special", normalized=False) for token in SPECIAL])
    special = [backend.token_to_id(token) for token in SPECIAL[1:]]
    declared = {"bos_token": "<s>", "mask_token": "[MASK]", "extra_special_tokens": ["<|im_end|>"]}
    config = saved(tmp_path / "saved", backend, **declared)
    tokens = load_tokens(files_config(write("a.txt", HTML), val_files=[write("v.txt", HTML * 3)]), config)
    for stream in (tokens.train, tokens.val):
        assert np.flatnonzero(stream.tokens == tokens.tokenizer.eos_token_id).tolist() == [0]
        assert not np.isin(stream.tokens[1:], special).any()
    assert tokens.val.num_bytes == len(HTML) * 3
    if kind not in ("word_level", "word_piece"):  # these lose spaces
        assert tokens.tokenizer_loss is None
        assert bytes_per_token(tokens.val, tokens.tokenizer).sum() == len(HTML) * 3


@pytest.mark.parametrize("pad", ["!", "\n"])
def test_a_special_token_of_one_character_does_not_take_it_from_the_text(write, files_config, tmp_path, pad):
    text = "Oh! no\nyes!\n"
    config = saved(tmp_path / "saved", byte_level_bpe(), pad_token=pad)
    tokens = load_tokens(files_config(write("a.txt", text), val_files=[write("v.txt", text)]), config)
    assert tokens.tokenizer_loss is None and tokens.tokenizer.decode(tokens.val.tokens[1:]) == text


def test_separators_that_stand_for_unknown_text_are_refused(write, files_config, tmp_path):
    config = saved(tmp_path / "saved", word_level(), eos_token="<unk>")
    with pytest.raises(UserError, match=r"<unk>, which begins documents, .* text that it does not know") as caught:
        load_tokens(files_config(write("a.txt", "a b"), val_files=[write("v.txt", "a zzz b")]), config)
    assert "'a zzz b'" in str(caught.value) and "\n" not in str(caught.value)


def template(backend: Tokenizer, single: str) -> Tokenizer:
    named = [(token, backend.token_to_id(token)) for token in SPECIAL]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    return backend


FORMS = {
    "Llama": ("<s> $A", {"bos_token": "<s>"}, "</s> <s>"),
    "with an end": ("<s> $A </s>", {"bos_token": "<s>"}, "</s> <s>"),
    "T5": ("$A </s>", {}, "</s>"),
    "OPT": ("</s> $A", {"bos_token": "</s>"}, "</s>"),
    "BERT": ("<s> $A [MASK]", {"eos_token": None}, "[MASK] <s>"),
    "two tokens": ("[MASK] <s> $A", {}, "</s> [MASK] <s>"),
    "bare": ("$A", {"bos_token": "<s>"}, "</s>"),
}


def tokens_of(write, files_config, config: TokenizerSection) -> TokenCache:
    val_files = [write("v.txt", "cc"), write("w.txt", "d")]
    return load_tokens(files_config(write("a.txt", "aaa"), write("b.txt", "b"), val_files=val_files), config)


@pytest.mark.parametrize("form", FORMS)
def test_documents_begin_as_the_tokenizer_begins_a_text(write, files_config, tmp_path, form):
    single, declared, begins = FORMS[form]
    config = saved(tmp_path / "saved", template(byte_level_bpe(), single), **declared)
    tokens = tokens_of(write, files_config, config)
    names = tokens.tokenizer.convert_ids_to_tokens(tokens.val.tokens.tolist())
    assert names == [*begins.split(), "c", "c", *begins.split(), "d"]
    assert tokens.val.piece_tokens.tolist() == [len(begins.split()) + 2, len(begins.split()) + 1]
    assert tokens.val.piece_bytes.tolist() == [2, 1] and tokens.tokenizer_loss is None
    counted = bytes_per_token(tokens.val, tokens.tokenizer)
    assert counted.sum() == 3 and not counted[np.isin(tokens.val.tokens, document_start(tokens.tokenizer))].any()
    # what the exported tokenizer makes of a text is what the run trained on, and what a prompt begins with
    tokens.tokenizer.save_pretrained(tmp_path / "export")
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    own = [number for number in exported("cc")["input_ids"] if number != exported.eos_token_id]
    assert own == [number for number in tokens.val.tokens[: len(begins.split()) + 2] if number != exported.eos_token_id]
    assert text_ids(exported, "cc") == [*text_start(exported), *exported("cc", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("form", ["Llama", "bare"])
def test_each_document_is_scored_after_what_begins_it(write, files_config, tmp_path, form):
    config = saved(tmp_path / "saved", template(byte_level_bpe(), FORMS[form][0]))
    tokens = tokens_of(write, files_config, config)
    start, stream = text_start(tokens.tokenizer)[0], tokens.val.tokens
    for plan, num_bytes in (
        plan_evaluation(tokens.val, tokens.tokenizer, "documents", 8, skip_separators=True),
        plan_documents(tokens.val, tokens.tokenizer, 8),
    ):
        assert (stream[plan.windows[:, 0]] == start).all() and num_bytes == 3
        scored = tokens.tokenizer.convert_ids_to_tokens(stream[plan.targets()].tolist())
        assert scored == ["c", "c", "d"]
    plan, num_bytes = plan_evaluation(tokens.val, tokens.tokenizer, "documents", 8)
    assert plan.num_scored == len(stream) - 1 and num_bytes == 3


@pytest.mark.parametrize("form", ["Llama", "two tokens", "bare"])
def test_what_begins_documents_is_no_text_for_proofs_and_compressors(write, files_config, tmp_path, form):
    config = saved(tmp_path / "saved", template(byte_level_bpe(), FORMS[form][0]))
    data = files_config(write("a.txt", "other"), val_files=[write("v.txt", "one text " * 2000), write("w.txt", "two")])
    tokens = load_tokens(data, config)
    for mode, options in (("flat", {}), ("documents", {}), ("documents", {"skip_separators": True})):
        plan, num_bytes = plan_evaluation(tokens.val, tokens.tokenizer, mode, 64, **options)
        certificate = certify(load_corpus(data), tokens, plan)
        assert certificate.problems == () and certificate.facts["scored_bytes"] == num_bytes == 18_003
        assert certificate.facts["decoded_bytes"] == 18_003
    assert compressor_scores(tokens)["compressed_bytes"] == 18_003


def test_a_resumed_run_of_an_older_version_keeps_its_tokens(write, files_config, tmp_path):
    config = saved(tmp_path / "saved", template(byte_level_bpe(), "<s> $A"))
    new = tokens_of(write, files_config, config)
    new.tokenizer.save_pretrained(tmp_path / "checkpoint")
    for folder, begins in (("saved", "</s>"), ("checkpoint", "</s> <s>")):  # an older version saved no word on it
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / folder)
        keep_old_documents(tokenizer)
        assert " ".join(tokenizer.convert_ids_to_tokens(document_start(tokenizer))) == begins
        tokenizer.save_pretrained(tmp_path / "again")
        again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "again")
        assert document_start(again) == document_start(tokenizer)


def test_ids_that_come_with_what_begins_a_text_get_it_once(write, files_config, tmp_path):
    config = saved(tmp_path / "saved", template(byte_level_bpe(), "<s> $A"))
    letters = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved").convert_tokens_to_ids(["a", "b"])
    rows = [[1, letters[0], 2, 1, letters[1], 2], [letters[1]]]
    path = write("rows.jsonl", "".join(f'{{"ids": {row}}}\n' for row in rows))
    data = files_config(path, val_files=[write("v.jsonl", f'{{"ids": {rows[0]}}}\n')], ids_column="ids")
    tokens = load_tokens(data, config)
    assert tokens.val.tokens.tolist() == [2, 1, letters[0], 2, 1, letters[1]]
    assert tokens.train.tokens.tolist() == [2, 1, letters[0], 2, 1, letters[1], 2, 1, letters[1]]
    assert tokens.val.piece_bytes.tolist() == [1, 1] and tokens.tokenizer_loss is None


def test_unused_ids_are_rows_of_the_embedding(write, files_config, tmp_path):
    vocab = {"<unk>": 0, "</s>": 1, "a": 3, "b": 4}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    data = files_config(write("a.txt", "a b"), val_files=[write("v.txt", "b")])
    tokens = load_tokens(data, saved(tmp_path / "saved", backend))
    assert tokens.train.read(np.arange(3)).tolist() == [1, 3, 4] and tokens.train.vocab_size == 5
    backend = Tokenizer(models.WordLevel({"x": 0, "c": 2, "a": 3, "b": 4}, unk_token="x"))
    config = saved(tmp_path / "other", backend, eos_token=None, unk_token="x")
    with pytest.raises(UserError, match=r"has the same id 4 for '<.endoftext.>', 'b': .* add that token"):
        load_tokens(files_config(write("c.txt", "a"), val_files=[write("v.txt", "b")]), config)


def test_a_template_with_an_id_of_no_entry_is_one_line(tmp_path, write, files_config):
    backend = byte_level_bpe()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 9999)])
    with pytest.raises(UserError, match="puts id 9999 around a text, which no entry of its vocabulary has"):
        tokens_of(write, files_config, saved(tmp_path / "saved", backend))


def never_ending(pattern: str) -> Tokenizer:
    backend = byte_level_tokenizer([])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return backend


@pytest.mark.parametrize(
    ("build", "text", "reason"),
    [
        (lambda: Tokenizer(models.WordLevel({"a": 0, "</s>": 1})), "other", "Missing .UNK. token from the vocabulary"),
        (lambda: never_ending("(a|aa)+$"), "a" * 60 + "b", "retry-limit-in-match over"),
    ],
)
def test_text_that_a_tokenizer_cannot_encode_is_named_in_one_line(write, files_config, tmp_path, build, text, reason):
    config = saved(tmp_path / "saved", build(), unk_token=None)
    data = files_config(write("a.txt", "a"), write("b.txt", text), val_files=[write("v.txt", "a")])
    line = rf"^[^\n]*cannot encode the text that begins '{text[:5]}[^\n]*{reason}[^\n]*$"
    with pytest.raises(UserError, match=line):
        load_tokens(data, config)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build(), eos_token="</s>")
    add_chat_template(tokenizer)
    with pytest.raises(UserError, match="cannot encode the text that begins '"):
        ConversationEncoder(tokenizer).encode([("a", [{"role": "assistant", "content": text}])])


def test_tokenizers_that_begin_documents_differently_have_caches_of_their_own(write, files_config, tmp_path):
    """Also if tokenizer.json, whose hash is in the key, is the same, and only the separator is another."""
    data = files_config(write("a.txt", "aaa"), val_files=[write("v.txt", "cc")])
    backend = byte_level_bpe()
    backend.add_special_tokens(SPECIAL)
    found = []
    for single, separator in (("$A", "</s>"), ("$A", "[MASK]"), ("<s> $A", "</s>"), ("[MASK] $A", "</s>")):
        config = saved(tmp_path / f"{single} {separator[1:3]}", template(backend, single), eos_token=separator)
        found.append(load_tokens(data, config))
    assert not any(tokens.is_hit for tokens in found) and found[0].tokenizer_sha256 == found[1].tokenizer_sha256
    assert [tokens.train.tokens[:-3].tolist() for tokens in found] == [[2], [3], [2, 1], [2, 3]]
