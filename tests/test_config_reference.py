"""What is generated from config/sections.py is current: docs/config.md, and configs/schema.json with what ships."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from hfgolf.config.other_names import GONE, MOVED_TO_OVERRIDES
from hfgolf.config.parse import KEY_TYPES, SECTIONS, load_config
from hfgolf.config.reference import markdown, schema
from hfgolf.config.yaml_text import load_yaml

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SCHEMA = json.loads((ROOT / "configs" / "schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.mark.parametrize(("file", "content"), [("docs/config.md", markdown), ("configs/schema.json", schema)])
def test_generated_files_are_up_to_date(file, content):
    """To regenerate: python -m hfgolf.config.reference > docs/config.md, and with --schema > configs/schema.json"""
    assert (ROOT / file).read_text(encoding="utf-8") == content()


def test_page_lists_every_key_with_values_default_and_meaning():
    page, keys = (ROOT / "docs" / "config.md").read_text(encoding="utf-8"), set()
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        name = section.split()[0]
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
        keys |= {f"{name}.{key}" for key, *_ in rows}
    assert keys == set(KEY_TYPES)
    assert "| `name` | muon, adamw or sgd | `muon` | muon: Muon for the hidden matrices" in page
    assert "| `betas` | a list of 2, each a number from 0 to below 1 | `[0.9, 0.95]` | AdamW's" in page
    assert r"a file (tokenizer.json, SentencePiece \*.model)" in page  # not read as Markdown


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_editors_check_it_by_the_schema(path):
    assert load_config(["--config", str(path)]).config.run.name == path.stem
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=schema.json\n")
    assert list(VALIDATOR.iter_errors(load_yaml(path, "config"))) == []


def test_the_schema_takes_old_keys_and_marks_them():
    for old in (*GONE, *(f"model.{name}" for name in MOVED_TO_OVERRIDES)):
        section, key = old.split(".")
        assert SCHEMA["$defs"][SECTIONS[section].__name__]["properties"][key]["deprecated"], old
    assert VALIDATOR.is_valid({"model": {"norm_eps": 1e-6}})


@pytest.mark.parametrize(
    "wrong", [{"optm": {}}, {"optim": {"nam": "sgd"}}, {"optim": {"eps": 0}}, {"hub": {"push": 1}}]
)
def test_the_schema_refuses_what_the_config_refuses(wrong):
    assert not VALIDATOR.is_valid(wrong)
