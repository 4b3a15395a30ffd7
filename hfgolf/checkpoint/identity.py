"""What makes a run this run: what a checkpoint keeps of it, and what a resume may change.

Owns the table of config keys by what a change of them means, and the comparison of a checkpoint's `run.json` with the
run that resumes from it. Does not know how a checkpoint is written or read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from hfgolf.command_line import KEY_TYPES, SECTIONS, ResolvedConfig, one_line
from hfgolf.config import RunConfig
from hfgolf.data.corpus import identity_changes
from hfgolf.errors import UserError
from hfgolf.redact import redact_values

logger = logging.getLogger(__name__)

RUN_NAME = "run.json"
MAX_FILES = 2000  # of a corpus, listed one by one in each checkpoint; of more only their hash is kept


class Change(Enum):
    """What a different value means to a run that goes on."""

    FREE = "does not touch what the run computes, but for rounding; nobody needs to know"
    TOLD = "may change: a resume from latest, best or a path says so in one line, auto refuses"
    DATA = "another order of the data: needs train.resume_with_other data"
    TEXT = "as DATA, but what counts is the text itself: its names and hashes, not where it lies"
    FIXED = "never: the weights belong to it"


# The longest prefix of a key decides.
_RULES = {
    "run.": Change.FREE,
    "run.seed": Change.DATA,
    "data.": Change.TEXT,
    "data.cache_dir": Change.FREE,
    "data.streaming": Change.FREE,
    "data.in_memory": Change.FREE,
    "data.num_workers": Change.FREE,
    "data.prefetch_factor": Change.FREE,
    "tokenizer.": Change.FIXED,
    "model.": Change.FIXED,
    "model.dropout": Change.TOLD,
    "model.attention_dropout": Change.TOLD,
    "model.gradient_checkpointing": Change.FREE,
    "batch.sequence_length": Change.DATA,
    "batch.tokens_per_step": Change.TOLD,  # the data goes on after the blocks read
    "batch.micro_batch_size": Change.FREE,
    "optim.": Change.TOLD,
    "optim.name": Change.FIXED,  # another optimizer has another state
    "schedule.": Change.TOLD,
    "train.": Change.TOLD,
    "train.resume": Change.FREE,
    "train.resume_with_other": Change.FREE,
    "train.cpu_threads": Change.FREE,
    "train.log_every_steps": Change.FREE,
    "train.sample_tokens": Change.FREE,
    "train.save_every_steps": Change.FREE,
    "train.save_every_minutes": Change.FREE,
    "train.keep_last": Change.FREE,
    "track.": Change.FREE,
    "hub.": Change.FREE,
}

# What the run decides for itself if it is told this, and sticks to when it goes on.
UNDECIDED: dict[str, Any] = {
    "train.mixed_precision": None,
    "train.compile": "auto",
    "train.cpu_threads": "auto",
    "batch.micro_batch_size": "auto",
}


def rule(key: str) -> Change:
    """Return what a change of a config key ("section.key") means."""
    return _RULES[max((prefix for prefix in _RULES if key.startswith(prefix)), key=len)]


def run_identity(resolved: ResolvedConfig, corpus: Mapping[str, Any], tokenizer_sha256: str) -> dict[str, Any]:
    """Return what `run.json` in a checkpoint holds; plain JSON, without secrets.

    corpus: what identifies the text and its split (Corpus.identity).
    """
    return {
        "config": json.loads(json.dumps(redact_values(resolved.config.flat()))),
        "corpus": _short_corpus(corpus),
        "tokenizer_sha256": tokenizer_sha256,
    }


def read_identity(checkpoint: Path) -> dict[str, Any]:
    """Return the identity that a verified checkpoint holds; UserError if it is not one of hfgolf's."""
    try:
        identity = json.loads((checkpoint / RUN_NAME).read_bytes())
        if all(isinstance(identity[key], kind) for key, kind in (("config", dict), ("corpus", dict))):
            return identity
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        pass
    raise UserError(f"train.resume: {RUN_NAME} in {checkpoint} is missing or not one of hfgolf's; choose another.")


def saved_config(identity: Mapping[str, Any]) -> RunConfig:
    """Return the config with which a checkpoint was saved, without secrets; UserError if it is not one of hfgolf's."""
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for dotted in identity["config"].keys() & KEY_TYPES.keys():  # not the keys of another version
        section, key = dotted.split(".")
        values[section][key] = identity["config"][dotted]
    try:
        return RunConfig(**{section: cls(**values[section]) for section, cls in SECTIONS.items()})
    except TypeError as error:
        raise UserError(f"{RUN_NAME} of the checkpoint is not one of hfgolf's ({one_line(error)}).") from None


def has_other_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Say whether two identities read other text, or the same in another order."""
    keys = [key for key, change in _RULES.items() if change is Change.DATA]
    return before["corpus"] != now["corpus"] or any(before["config"].get(k) != now["config"].get(k) for k in keys)


def comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two equal runs have in common: the identity without what may change freely."""
    config = {key: value for key, value in identity["config"].items() if rule(key) is not Change.FREE}
    return {**identity, "config": config}


def changed_keys(before: Mapping[str, Any], resolved: ResolvedConfig) -> list[str]:
    """Return the keys that are not FREE and whose values differ from those before, {"section.key": value}.

    A key younger than the run had its default. What this run has not decided, or decided by itself, does not differ.
    """
    before = RunConfig().flat() | dict(before)
    after = redact_values(resolved.config.flat())
    return [
        key
        for key, value in after.items()
        if rule(key) is not Change.FREE
        and not (key in UNDECIDED and value == UNDECIDED[key])
        and resolved.sources.get(key) != "auto"
        and _plain(before[key]) != _plain(value)
    ]


def differences(before: Mapping[str, Any], resolved: ResolvedConfig, keys: list[str]) -> list[str]:
    """Return "key old -> new" for each of some keys."""
    before = RunConfig().flat() | dict(before)
    after = redact_values(resolved.config.flat())
    return [f"{key} {before[key]} -> {after[key]}" for key in keys]


def check_config(where: str, before: Mapping[str, Any], resolved: ResolvedConfig) -> list[str]:
    """Return "key old -> new" for what a resume changes and has to tell; raise UserError if it may not change one.

    where: the name of the checkpoint; before: its config. TEXT is not looked at: see changed_text.
    """
    changed = changed_keys(before, resolved)
    fixed, data, told = (
        differences(before, resolved, [key for key in changed if rule(key) is kind])
        for kind in (Change.FIXED, Change.DATA, Change.TOLD)
    )
    train = resolved.config.train
    if fixed:
        raise UserError(
            f"train.resume: {where} does not fit this config ({', '.join(fixed)}); restore these"
            " keys, or start anew under another --run.name."
        )
    if data and train.resume_with_other != "data":
        raise UserError(
            f"train.resume: {where} read the data in another order ({', '.join(data)}); restore"
            " these keys, or begin the data anew with --train.resume_with_other data."
        )
    if told and train.resume == "auto":
        raise UserError(
            f"train.resume: {where} is of a run with another config ({', '.join(told)}); continue"
            " it with these values by --train.resume latest, or choose another --run.name."
        )
    return data + told


def check_tokenizer(where: str, before: str, now: str) -> None:
    """Raise UserError if the tokenizer is not the one that the weights belong to. before, now: their sha256."""
    if before != now:
        raise UserError(
            f"train.resume: {where} belongs to another tokenizer than the one that this config and text give now;"
            " restore it, or start anew under another --run.name."
        )


def text_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between the corpora of a checkpoint and of today. before, now: identities of a corpus."""
    return identity_changes(before, _short_corpus(now))


def check_text(where: str, before: Mapping[str, Any], now: Mapping[str, Any], resolved: ResolvedConfig) -> list[str]:
    """Return what differs between the corpora of a checkpoint and of this run; UserError if the text may not change.

    before, now: identities of a corpus.
    """
    changes = text_changes(before, now)
    if changes and resolved.config.train.resume_with_other != "data":
        raise UserError(
            f"train.resume: {where} was trained on other text ({', '.join(changes)}); restore it, start anew"
            " under another --run.name, or go on with the present text by --train.resume_with_other data."
        )
    return changes


def keep_decisions(
    resolved: ResolvedConfig, before: Mapping[str, Any], is_possible: Callable[[str, Any], bool]
) -> ResolvedConfig:
    """Let a run that goes on stick to what it decided for itself, if it is possible here.

    before: its config; is_possible: says of a key and its value whether this machine can do it.
    """
    for key, undecided in UNDECIDED.items():
        of_run = before.get(key, undecided)
        if resolved.config.flat()[key] != undecided or of_run == undecided:
            continue
        if is_possible(key, of_run):
            resolved = resolved.resolve("the run so far", **{key.replace(".", "__"): of_run})
        else:
            logger.info("%s: %s, as the run had it, is not possible here; it is decided anew", key, of_run)
    return resolved


def _short_corpus(corpus: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _shortened(value) for key, value in corpus.items()}


def _shortened(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_FILES:
        return {"entries": len(value), "sha256": hashlib.sha256(json.dumps(value).encode()).hexdigest()}
    return value


def _plain(value: Any) -> Any:
    """Return a value as JSON and YAML read it back."""
    return list(value) if isinstance(value, tuple) else value
