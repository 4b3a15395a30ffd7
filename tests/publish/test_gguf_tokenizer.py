"""Which tokenizers a GGUF file can hold. tests/ecosystem compares their ids with those of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset
from tiny_export import build_tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfgolf.config.sections import TokenizerSection
from hfgolf.data.tokenizer import build_tokenizer
from hfgolf.publish.convert import convert_folder
from hfgolf.publish.gguf import export_gguf, gguf_tokenizer
from hfgolf.publish.hub import set_location
from hfgolf.publish.model_card import usage
from hfgolf.system.errors import UserError


def trained(kind: str, folder: Path, text: str, **options: bool) -> PreTrainedTokenizerFast:
    config = TokenizerSection(kind=kind, vocab_size=262, **options)
    return build_tokenizer(config, {}, lambda: Dataset.from_dict({"text": [text * 99]}), folder)


def test_rows_beyond_the_tokenizer_are_unused_entries_with_names_of_their_own(tmp_path):
    fields = gguf_tokenizer(trained("bpe", tmp_path, "one two three four five"), 265)
    assert fields.tokens[-3:] == ["[PAD262]", "[PAD263]", "[PAD264]"] and fields.types[-3:] == [5, 5, 5]
    assert len(set(fields.tokens)) == 265 and fields.types.count(3) == 1 and len(fields.merges) == 5


def test_char_tokenizer_is_characters_and_bytes(tmp_path):
    fields = gguf_tokenizer(trained("char", tmp_path, "é日"), 259)
    assert (fields.model, fields.tokens[32], fields.tokens[65]) == ("llama", "\u2581", "<0x41>")
    assert fields.tokens[256:] == ["é", "日", "<|endoftext|>"] and fields.types[255:] == [6, 1, 1, 3]


def test_what_llama_cpp_cannot_tokenize_is_refused_in_one_line(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    metaspace = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    for tokenizer, reason in (
        (PreTrainedTokenizerFast(tokenizer_object=words), "it is WordLevel, not byte-level BPE"),
        (PreTrainedTokenizerFast(tokenizer_object=metaspace), "it splits text into words in its own way"),
        (trained("bpe", tmp_path / "case", "One TWO", case_operators=True), "it rewrites the text"),
        (trained("char", tmp_path / "space", "\u2581"), "it has an entry for \u2581"),
    ):
        with pytest.raises(UserError, match=r"--to gguf: llama\.cpp has no tokenizer like this one: ") as error:
            gguf_tokenizer(tokenizer, 300)
        assert reason in str(error.value)
    with pytest.raises(UserError, match="its tokenizer has 257 entries, but its embedding only 256"):
        gguf_tokenizer(build_tiny()[1], 256)


def test_a_missing_package_is_one_line(exported, tmp_path, monkeypatch):
    monkeypatch.setattr("hfgolf.publish.gguf.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--to gguf: needs the package gguf; run `pip install gguf`\."):
        export_gguf(str(exported), tmp_path / "a.gguf", "f16")


def test_card_of_a_native_model_says_how_to_run_it_in_llama_cpp(exported, tmp_path):
    convert_folder(str(exported), tmp_path / "native", "native")
    path = tmp_path / "native" / "README.md"
    assert f'hfgolf export --model "{tmp_path / "native"}" --to gguf --output model.gguf\n' in path.read_text()
    assert """printf 'FROM ./model.gguf\\nTEMPLATE "{{ .Prompt }}"\\n' > Modelfile\n""" in path.read_text()
    assert usage(build_tiny()[0], "a", is_chat=True, has_gguf=True).endswith(
        """--output model.gguf\nllama-completion -m model.gguf --jinja -st -p "..."\n```"""
    )
    set_location(path, "user/name")
    assert 'hfgolf export --model "user/name" --to gguf' in path.read_text()
    convert_folder(str(tmp_path / "native"), tmp_path / "golf", "golf")
    assert "llama-completion" not in (tmp_path / "golf" / "README.md").read_text()
