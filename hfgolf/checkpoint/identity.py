"""The identity of a run: what a checkpoint records of it, and what a resume may change.

Owns the table of what a change of each config key means, and the comparison of a checkpoint's `run.json` with the run
that resumes from it. Does not know how a checkpoint is written or read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hfgolf.config.other_names import GONE, in_current_names
from hfgolf.config.parse import KEY_TYPES, ResolvedConfig
from hfgolf.config.sections import RunConfig, model_key, plain
from hfgolf.data.corpus import identity_changes
from hfgolf.model.configuration_golf import MODEL_FIELDS
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact_values
from hfgolf.system.wording import one_line

logger = logging.getLogger(__name__)

RUN_NAME = "run.json"
MAX_FILES = 2000  # listed one by one in each checkpoint; a larger corpus is recorded as one hash


class Change(Enum):
    """What a different value of a config key means for a run that resumes."""

    FREE = "does not affect the results, except for rounding; not reported"
    REPORTED = "may change: a resume from latest, best or a path logs it, auto refuses"
    DATA = "changes the order of the data: needs train.resume_with_other data"
    TEXT = "like DATA, but the text itself decides (its names and hashes), not its location"
    FIXED = "may never change: the weights depend on it"


# The longest matching prefix decides.
_RULES = {
    "run.": Change.FREE,
    "run.seed": Change.DATA,
    "data.": Change.TEXT,
    "data.cache_dir": Change.FREE,
    "data.old_text": Change.FREE,
    "data.order": Change.DATA,
    "data.streaming": Change.FREE,
    "data.in_memory": Change.FREE,
    "data.num_workers": Change.FREE,
    "data.prefetch_factor": Change.FREE,  # of earlier versions
    "tokenizer.": Change.FIXED,
    "model.": Change.FIXED,
    "model.dropout": Change.REPORTED,
    "model.attention_dropout": Change.REPORTED,
    "model.gradient_checkpointing": Change.FREE,
    "batch.sequence_length": Change.DATA,
    "batch.tokens_per_step": Change.REPORTED,  # the data continues after the blocks already read
    "batch.micro_batch_size": Change.FREE,
    "batch.segment_length": Change.DATA,
    "batch.segmented_tokens": Change.DATA,
    "optim.": Change.REPORTED,
    "optim.name": Change.FIXED,  # optimizers have different states
    "schedule.": Change.REPORTED,
    "train.": Change.REPORTED,
    "train.distill_from": Change.FIXED,
    "train.resume": Change.FREE,
    "train.resume_with_other": Change.FREE,
    "train.cpu_threads": Change.FREE,
    "train.final_eval_tokens": Change.FREE,
    "train.log_every_steps": Change.FREE,
    "train.sample_tokens": Change.FREE,
    "train.sample_prompt": Change.FREE,
    "train.save_every_steps": Change.FREE,
    "train.save_every_minutes": Change.FREE,
    "train.keep_last": Change.FREE,
    "train.milestones": Change.FREE,
    "track.": Change.FREE,
    "hub.": Change.FREE,
    "golf.": Change.FREE,
    "golf.qat_fraction": Change.REPORTED,
}

# {key: the value that lets the run decide}. A resumed run keeps its decisions.
UNDECIDED: dict[str, Any] = {
    "train.mixed_precision": None,
    "train.compile": "auto",
    "train.cpu_threads": "auto",
    "batch.micro_batch_size": "auto",
    "train.eval_tokens": "auto",
    "optim.newton_schulz_dtype": "auto",
    "tokenizer.vocab_size": "auto",
}

FORMER_DEFAULTS: dict[str, Any] = {"optim.row_equilibration": False, "optim.normuon_beta2": None}
"""{key: its default in earlier versions}. A run that has it keeps it, where nobody states the key."""


def rule(key: str) -> Change:
    """Return what a change of a config key ("section.key") means for a resume."""
    return _RULES[max((prefix for prefix in _RULES if key.startswith(prefix)), key=len)]


def run_identity(
    config: RunConfig,
    corpus: Mapping[str, Any],
    tokenizer_sha256: str,
    init_from: dict[str, Any] | None = None,
    frozen: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the content of a checkpoint's `run.json`: plain JSON, with secrets redacted.

    corpus: the identity of the text and its split (Corpus.identity). init_from: the weights of model.init_from.
    frozen: the parameters that are not trained.
    """
    return ({"frozen": list(frozen)} if frozen else {}) | {
        "config": saved_values(config),
        "corpus": _short_corpus(corpus),
        "tokenizer_sha256": tokenizer_sha256,
        "init_from": redact_values(init_from),
    }


def saved_values(config: RunConfig) -> dict[str, Any]:
    """Return a config as a checkpoint holds it: {"section.key": value} in plain JSON, with secrets redacted."""
    return dict(json.loads(json.dumps(redact_values(config.flat()))))


def read_identity(checkpoint: Path) -> dict[str, Any]:
    """Return the identity saved in a verified checkpoint, by today's names of keys.

    Raises UserError if hfgolf did not write it.
    """
    try:
        identity = json.loads((checkpoint / RUN_NAME).read_bytes())
        if all(isinstance(identity[key], kind) for key, kind in (("config", dict), ("corpus", dict))):
            return identity | {"config": in_current_names(identity["config"])}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        pass
    raise UserError(f"train.resume: {RUN_NAME} in {checkpoint} is missing or not valid; choose another checkpoint.")


def saved_config(identity: Mapping[str, Any]) -> RunConfig:
    """Return the config that a checkpoint was saved with, secrets redacted. Raises UserError if it is not valid."""
    try:  # without keys of other versions
        return RunConfig.from_flat({key: value for key, value in identity["config"].items() if key in KEY_TYPES})
    except UserError as error:
        raise UserError(f"{RUN_NAME} of the checkpoint is not valid ({one_line(error)}).") from None


def has_other_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two identities differ in their text or its order."""
    keys = [key for key, change in _RULES.items() if change is Change.DATA]
    return before["corpus"] != now["corpus"] or any(before["config"].get(k) != now["config"].get(k) for k in keys)


def judges_otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the evaluations of two runs do not compare: of other tokens, or averaged weights and raw."""
    return any(before["config"].get(key) != now["config"].get(key) for key in ("train.eval_tokens", "optim.ema_export"))


def comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that affects the results: without the keys that may change freely."""
    config = {key: value for key, value in identity["config"].items() if rule(key) is not Change.FREE}
    return {**identity, "config": config}


def config_changes(before: Mapping[str, Any], resolved: ResolvedConfig) -> dict[str, str]:
    """Return {key: "key old -> new"} of what differs from `before`, {"section.key": value}, and is not FREE.

    A key that is newer than the run counts as its default. A value that this run has yet to decide, or decided by
    itself, does not count as different; model.init_from decides the architecture and the tokenizer.
    """
    kept = kept_defaults(before, resolved)
    has_weights = resolved.config.model.init_from is not None
    stated = resolved.sources.keys() | {f"model.overrides.{name}" for name in resolved.config.model.overrides}
    old, new = _each_field(before), _each_field(redact_values(resolved.config.flat()))
    return {
        key: f"{key} {old.get(key)} -> {value}"
        for key, value in new.items()
        if rule(key) is not Change.FREE
        and not (key in UNDECIDED and value == UNDECIDED[key])
        and resolved.sources.get(key) != "auto"
        and key not in kept
        and not (has_weights and key not in stated and _is_of_weights(key))
        and plain(old.get(key)) != plain(value)
    }


def kept_defaults(before: Mapping[str, Any], resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the former defaults that a run has by its config, {"section.key": value}, and that nobody states now."""
    return {
        key: value
        for key, value in FORMER_DEFAULTS.items()
        if key not in resolved.sources and key in before and before[key] == value
    }


def _each_field(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat config with all defaults, and with model.overrides of Golf as one key for each field."""
    flat = RunConfig().flat() | in_current_names(flat)
    if flat["model.architecture"] != "golf":
        return flat
    fields = {key: value for name, value in MODEL_FIELDS.items() if (key := model_key(name)) not in KEY_TYPES}
    fields |= {f"model.overrides.{name}": value for name, value in flat.pop("model.overrides").items()}
    return flat | fields


def _is_of_weights(key: str) -> bool:
    return key == "batch.sequence_length" or (key.startswith(("model.", "tokenizer.")) and rule(key) is Change.FIXED)


def check_config(checkpoint: str, before: Mapping[str, Any], resolved: ResolvedConfig) -> list[str]:
    """Return "key old -> new" for each change that a resume must log; raise UserError for one that is not allowed.

    checkpoint: its name; before: its config. check_text compares the text.
    """
    for key in sorted(key for key in before.keys() & GONE.keys() if rule(key) is not Change.FREE):
        raise UserError(
            f"train.resume: {checkpoint} is of a run with {key} {before[key]}, which this version does not have; start"
            f" a new run with another --run.name, and {GONE[key][1]}."
        )
    changed = config_changes(before, resolved).items()
    fixed, data, reported = (
        [change for key, change in changed if rule(key) is kind]
        for kind in (Change.FIXED, Change.DATA, Change.REPORTED)
    )
    train = resolved.config.train
    if fixed:
        raise UserError(
            f"train.resume: {checkpoint} does not fit this config ({', '.join(fixed)}); restore these"
            " keys, or start a new run with another --run.name."
        )
    if data and train.resume_with_other != "data":
        raise UserError(
            f"train.resume: {checkpoint} read the data in another order ({', '.join(data)}); restore"
            " these keys, or start over with the data: --train.resume_with_other data."
        )
    if reported and train.resume == "auto":
        raise UserError(
            f"train.resume: {checkpoint} is from a run with another config ({', '.join(reported)}); continue"
            " it with these values by --train.resume latest, or choose another --run.name."
        )
    return data + reported


def check_tokenizer(checkpoint: str, before: str, now: str) -> None:
    """Raise UserError if the tokenizer is not the one of the weights. before, now: sha256 of each tokenizer."""
    if before != now:
        raise UserError(
            f"train.resume: {checkpoint} was trained with another tokenizer than this config and text produce now;"
            " restore it, or start a new run with another --run.name."
        )


def text_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between a checkpoint's corpus and the current one. before, now: corpus identities."""
    return identity_changes(before, _short_corpus(now))


def check_text(checkpoint: str, before: Mapping[str, Any], now: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return the differences between a checkpoint's corpus and this run's; raise UserError if it may not change.

    checkpoint: its name; before, now: corpus identities.
    """
    changes = text_changes(before, now)
    if changes and config.train.resume_with_other != "data":
        raise UserError(
            f"train.resume: {checkpoint} was trained on other text ({', '.join(changes)}); restore it, start a new run"
            " with another --run.name, or continue on the current text with --train.resume_with_other data."
        )
    return changes


def _short_corpus(corpus: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a corpus with one hash for each list of more than MAX_FILES entries."""
    hashes = {
        key: {"entries": len(value), "sha256": hashlib.sha256(json.dumps(value).encode()).hexdigest()}
        for key, value in corpus.items()
        if isinstance(value, list) and len(value) > MAX_FILES
    }
    return {**corpus, **hashes}
