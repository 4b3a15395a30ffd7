"""The names of other trainers are answered with existing keys."""

from __future__ import annotations

import dataclasses
import re

import pytest
from transformers import TrainingArguments

from hfgolf.config.other_names import OTHER_NAMES
from hfgolf.config.parse import KEY_TYPES, SECTIONS, load_config
from hfgolf.system.errors import UserError


def test_every_answer_names_existing_keys_only():
    named = {name: re.findall(rf"\b(?:{'|'.join(SECTIONS)})\.\w+", answer) for name, answer in OTHER_NAMES.items()}
    assert len(named) > 60
    assert {key for keys in named.values() for key in keys} <= set(KEY_TYPES)
    assert {name for name, keys in named.items() if not keys} == {"device"}


def test_most_names_of_training_arguments_are_real():
    """The table would go stale unseen if transformers renamed its arguments."""
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert len(theirs & set(OTHER_NAMES)) > 20


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("n_embd", "unknown key n_embd; here: model.hidden_size."),
        ("max_iters", "unknown key max_iters; here: train.max_steps; or train.max_minutes."),
        ("train.report_to", "unknown key train.report_to; here: track.trackers, a list such as [wandb]."),
        ("train.qqqq", "unknown key train.qqqq; docs/config.md has all keys, and --help."),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_the_key_here(name, answer, tmp_path):
    with pytest.raises(UserError) as error:
        load_config([f"--{name}", "1"])
    assert str(error.value) == f"the command line: {answer}"
    path = tmp_path / "x.yaml"
    section, _, key = name.rpartition(".")
    path.write_text(f"{section}: {{{key}: 1}}" if section else f"{key}: 1")
    with pytest.raises(UserError) as error:
        load_config(["--config", str(path)])
    assert str(error.value) == f"{path}: {answer}"
