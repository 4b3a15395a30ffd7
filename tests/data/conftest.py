"""Tiny corpora. Every cache is in the test's own folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfgolf.config.sections import DataSection
from hfgolf.data.corpus import load_corpus


@pytest.fixture
def awkward() -> str:
    """Return text that changes if anything tampers with newlines, normal forms, zero bytes or special tokens."""
    return "naïve café 你好 🌍 \r\n tab\tNUL\0 <|endoftext|> e\u0301 \u200d👩\u200d🚀 \ufeff  end  \n\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes | str], str]:
    """Return a function that writes a file in the test's folder and returns its path."""

    def write_file(name: str, content: bytes | str) -> str:
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_file


@pytest.fixture
def files_config(tmp_path: Path) -> Callable[..., DataSection]:
    """Return a function that builds a DataSection for files, with its cache in the test's folder."""

    def build(*files: str, **settings: object) -> DataSection:
        settings = {"cache_dir": str(tmp_path / "cache"), **settings}
        return DataSection(source="files", files=list(files), **settings)

    return build


@pytest.fixture
def contents(files_config, tmp_path: Path) -> Callable[..., list[Any]]:
    """Return a function that returns the documents in files, however they are divided: text, token ids or messages."""

    def read(*files: str, **settings: object) -> list[Any]:
        found = [content for _, _, content in load_corpus(files_config(*files, **settings))._documents(tmp_path)]
        return [content if isinstance(content, list) else "".join(content) for content in found]

    return read
