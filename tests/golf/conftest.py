"""A folder with a tiny artifact and all that scores it; fixtures of tests/tiny_streams.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_golf
from tiny_golf import VOCABULARY, encode_model
from tiny_streams import build_model, sentencepiece_like, tokenize, tokenizer

from hfgolf.golf.script import packed_script

__all__ = ["build_model", "sentencepiece_like", "tokenize", "tokenizer"]


@pytest.fixture(scope="session")
def artifact() -> bytes:
    return encode_model(tiny_golf.build_model())


@pytest.fixture
def golf_files(tmp_path: Path, artifact: bytes) -> Path:
    """Return a folder with score.py, an artifact, and 500 tokens of 0 to 3 bytes in documents of about 40."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCABULARY, 500)
    tokens[random.integers(0, 500, 12)] = 0
    tokens[0] = 0
    token_bytes = np.where(tokens == 0, 0, random.integers(0, 4, 500))
    (tmp_path / "score.py").write_bytes(packed_script(tiny_golf.build_model().config))
    (tmp_path / "artifact.bin").write_bytes(artifact)
    (tmp_path / "tokens.bin").write_bytes(tokens.astype("<u2").tobytes())
    (tmp_path / "bytes.bin").write_bytes(token_bytes.astype("<u2").tobytes())
    return tmp_path
