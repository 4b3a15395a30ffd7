"""Samples are exact on Unicode and evenly spaced; a vocabulary's figures match closed forms; the script."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks import vocabulary_study
from benchmarks.vocabulary_study import Sample, Vocabulary, embedding_parameters, measure_vocabulary, write_sample
from hfgolf.config.parse import load_config
from hfgolf.data.pieces import texts
from hfgolf.data.tokenizer import END_OF_TEXT

CONFIG = load_config(["--model.hidden_size", "64", "--model.num_hidden_layers", "2", "--train.max_steps", "1"]).config
LINES = "".join(
    f"{number}: ä naïve 你好 🌍 e\u0301 \r\n {END_OF_TEXT}, {number * 7} \ufeff€.\n" for number in range(600)
)


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def sample_of(folder: Path, *files: Path, max_bytes: int = 10**9) -> Sample:
    folder.mkdir(exist_ok=True)
    return write_sample(files, max_bytes, folder)


def slices(sample: Sample) -> list[str]:
    """Return the training slices, then the held-out ones."""
    found: list[str] = []
    for part in (sample.train, sample.held_out):
        for text, is_start in zip(texts(part), part["is_start"], strict=True):
            found[len(found) :] = [text] if is_start else [found.pop() + text]
    return found


def test_uncapped_sample_is_the_whole_text(tmp_path, monkeypatch):
    """Wherever a slice ends within characters of 1 to 4 bytes, no character is cut, lost or repeated."""
    files = [write(tmp_path / "a", LINES), write(tmp_path / "b", "🌍" * 300 + "é"), write(tmp_path / "c", "漢")]
    for slice_bytes in (997, 1000, 1001, 1002, 1003):
        monkeypatch.setattr(vocabulary_study, "SLICE_BYTES", slice_bytes)
        sample = sample_of(tmp_path / "sample", *files, files[0])  # a file named twice counts once
        everything = "".join(file.read_bytes().decode() for file in files)
        assert sample.file_bytes == len(everything.encode())
        found = slices(sample)
        assert sum(map(len, found)) == len(everything)
        assert "".join(sorted(found, key=everything.index)) == everything


def test_capped_sample_is_even_and_disjoint_from_held_out_text(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary_study, "SLICE_BYTES", 100)
    numbered = "".join(f"{number:06d}ü" for number in range(100_000))  # 8 bytes each
    cuts = [0, 25_100 * 7, 50_300 * 7, 75_200 * 7, 700_000]  # between two slices
    texts_of_files = (numbered[start:end] for start, end in itertools.pairwise(cuts))
    files = [write(tmp_path / str(number), text) for number, text in enumerate(texts_of_files)]
    sample = sample_of(tmp_path / "sample", *files, max_bytes=8000)
    found = slices(sample)
    assert len(found) == 80 and 8000 - 3 * 80 <= sum(len(text.encode()) for text in found) <= 8000 + 3 * 80
    places = sorted(numbered.index(text) for text in found)
    gaps = [b - a for a, b in itertools.pairwise([*places, 700_000])]
    assert max(gaps) - min(gaps) <= 2
    held_out = [numbered.index(text) for text in texts(sample.held_out)]
    assert held_out == places[9::10]


def test_figures_come_only_from_held_out_text(tmp_path):
    """A tokenizer trained on one alphabet has no merges for text in other letters."""
    (tmp_path / "a").mkdir()
    seen = sample_of(tmp_path / "a", write(tmp_path / "seen", "hello world " * 500))
    (tmp_path / "b").mkdir()
    other = sample_of(tmp_path / "b", write(tmp_path / "other", "xyzzy" * 1000))
    known = measure_vocabulary(264, seen, CONFIG, 100, tmp_path / "a")
    unknown = measure_vocabulary(264, Sample(seen.train, other.held_out, 0), CONFIG, 100, tmp_path / "a")
    assert isinstance(known, Vocabulary) and isinstance(unknown, Vocabulary)
    assert known.tokens_per_character < 0.5
    assert unknown.tokens_per_character == pytest.approx(1)


def test_larger_vocabulary_means_fewer_tokens_and_a_larger_embedding_share(tmp_path):
    sample = sample_of(tmp_path / "sample", write(tmp_path / "text", LINES))
    found = [measure_vocabulary(size, sample, CONFIG, 1000, tmp_path) for size in (256, 300, 400)]
    assert all(isinstance(each, Vocabulary) and each.is_exact for each in found)
    assert [each.entries for each in found] == [257, 300, 400]
    assert found[0].bytes_per_token == 1  # even for text that contains the end-of-text marker
    for less, more in itertools.pairwise(found):
        assert more.context_tokens < less.context_tokens and more.embedding_share > less.embedding_share
        assert more.bytes_per_token > less.bytes_per_token


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_parameters_in_closed_form(tied):
    """Golf with RMSNorm: 12 C^2 per layer, norms of C (two per layer, one at either end), V C per embedding."""
    config = CONFIG.replace(model__tie_word_embeddings=tied)
    embedding, share = embedding_parameters(config, 1000)
    assert embedding == (1 if tied else 2) * 1000 * 64
    assert share == pytest.approx(embedding / (embedding + 2 * 12 * 64**2), rel=0.01)


def test_it_writes_tables_and_a_plot(tmp_path, run_script):
    text = write(tmp_path / "text.txt", LINES)
    options = ["--vocab_sizes", 300, 256, 50257, "--hidden_size", 64, "--context", 1000]
    said = run_script("vocabulary_study.py", "--files", text, *options, "--output", tmp_path / "out").out
    record = json.loads((tmp_path / "out" / "vocabulary.json").read_text())
    small, trained, too_large = record["vocabularies"]
    assert (small["entries"], trained["entries"], too_large["size"]) == (257, 300, 50257)
    assert 300 < too_large["entries"] < 10_000
    assert record["hidden_size"] == 64 and trained["embedding_parameters"] == 300 * 64
    assert record["train_bytes"] + record["held_out_bytes"] == record["file_bytes"] == len(LINES.encode())
    page = (tmp_path / "out" / "vocabulary.md").read_text()
    for shown in (said, page):
        assert f"the text yields only {too_large['entries']:,} entries" in shown
        assert f"{trained['tokens_per_character']:.3f}" in shown and "tokens for 1,000 characters" in shown
    assert (tmp_path / "out" / "vocabulary.png").read_bytes().startswith(b"\x89PNG")
