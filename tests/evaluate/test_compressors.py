"""gzip's and xz's bits per byte are those of the raw validation text."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from hfgolf.config.parse import load_config
from hfgolf.data.token_cache import load_tokens
from hfgolf.evaluate.bits_per_byte import compressor_scores

SOURCE = Path(__file__).read_text(encoding="utf-8") * 4
TEXTS = ["naïve 🌍\n" * 50 + SOURCE[:8000], SOURCE[4000:] * 3]


@pytest.fixture
def tokens(tmp_path):
    """Return a function that tokenizes TEXTS as validation documents."""

    def load(*options: str):
        (tmp_path / "train.txt").write_text(SOURCE)
        files = []
        for number, text in enumerate(TEXTS):
            files.append(tmp_path / f"val{number}.txt")
            files[-1].write_text(text)
        named = [f"--data.files={tmp_path / 'train.txt'}", f"--data.val_files=[{', '.join(map(str, files))}]"]
        config = load_config([*named, "--train.max_steps=1", "--tokenizer.kind=byte", *options]).config
        return load_tokens(config.data, config.tokenizer)

    return load


@pytest.mark.parametrize("options", [[], ["--tokenizer.kind=bpe", "--tokenizer.vocab_size=300"]])
def test_scores_are_those_of_the_raw_text(tokens, options):
    cache = tokens(*options)
    text = "".join(TEXTS).encode()
    scores = compressor_scores(cache)
    assert scores["compressed_bytes"] == len(text) == cache.val.num_bytes
    assert scores["gzip_bits_per_byte"] == 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)
    xz = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    assert scores["xz_bits_per_byte"] == pytest.approx(8 * len(xz) / len(text), abs=8 * 8 / len(text))


def test_a_bound_takes_whole_pieces_from_the_start(tokens):
    cache = tokens()
    scores = compressor_scores(cache, max_bytes=len(TEXTS[0].encode()) + 10)
    start = "".join(TEXTS).encode()[: scores["compressed_bytes"]]
    assert 0 < len(start) <= len(TEXTS[0].encode()) + 10
    assert scores["gzip_bits_per_byte"] == 8 * len(gzip.compress(start, 9, mtime=0)) / len(start)
    assert compressor_scores(cache, max_bytes=10) == {}


REMOVED = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}


@pytest.mark.parametrize("normalizer", [REMOVED, REMOVED | {"content": "b"}])
def test_nothing_is_said_if_the_text_does_not_come_back(tokens, tmp_path, normalizer):
    saved = tokens().tokenizer
    rules = json.loads(saved.backend_tokenizer.to_str())
    rules["normalizer"] = normalizer
    saved.save_pretrained(tmp_path / "lossy")
    (tmp_path / "lossy" / "tokenizer.json").write_text(json.dumps(rules))
    cache = tokens("--tokenizer.kind=pretrained", f"--tokenizer.name_or_path={tmp_path / 'lossy'}")
    assert cache.tokenizer_loss
    assert compressor_scores(cache) == {}
