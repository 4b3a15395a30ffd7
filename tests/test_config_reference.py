"""docs/config.md is generated from config/sections.py, and has every key with its values and default."""

from __future__ import annotations

import re
from pathlib import Path

from hfgolf.config.parse import KEY_TYPES
from hfgolf.config.reference import markdown

PAGE = Path(__file__).parents[1] / "docs" / "config.md"


def test_page_is_up_to_date():
    """To regenerate: python -m hfgolf.config.reference > docs/config.md"""
    assert PAGE.read_text(encoding="utf-8") == markdown()


def test_page_lists_every_key_with_values_default_and_meaning():
    keys = set()
    for section in re.split(r"^## ", markdown(), flags=re.MULTILINE)[1:]:
        name = section.split()[0]
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
        keys |= {f"{name}.{key}" for key, *_ in rows}
    assert keys == set(KEY_TYPES)
    assert "| `name` | muon, adamw or sgd | `muon` | muon: Muon for the hidden matrices" in markdown()
    assert "| `betas` | a list of 2, each a number | `[0.9, 0.95]` | AdamW's" in markdown()
    assert r"a file (tokenizer.json, \*.tiktoken" in markdown()  # not read as Markdown
