"""Start from weights (model.init_from): their architecture and tokenizer complete the config, then they fill the model.

Owns which keys the weights decide, and what a config may not ask of them. Does not know how weights are read or
converted (publish), or which weights a resumed run has: those of its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file

from hfgolf.config.parse import ResolvedConfig, as_yaml, load_config
from hfgolf.config.sections import ModelSection, RunConfig, TokenizerSection, model_key
from hfgolf.data.batches import Stream
from hfgolf.data.cache_folder import cache_folder
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import document_start, embedding_rows, find_tokenizer
from hfgolf.evaluate.text import tokenize_files
from hfgolf.model.configuration_golf import MODEL_FIELDS, GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.load import load_model, load_model_config
from hfgolf.publish.native import converted, golf_shape
from hfgolf.run.find_model import find_model
from hfgolf.run.folder import RunFolder
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line
from hfgolf.train.build import golf_overrides

logger = logging.getLogger(__name__)

_OF_THE_RUN = {"dropout", "attention_dropout"}  # of the model's fields, those that every run chooses for itself
_OF_THE_WEIGHTS = [key for key in ModelSection.model_fields if key in MODEL_FIELDS and key not in _OF_THE_RUN]
_NO_OVERRIDES = {*_OF_THE_WEIGHTS, *_OF_THE_RUN, "initializer_range"}  # trained weights have forgotten the last
FROZEN = "frozen.json"  # beside weights: the names of the parameters that are not trained
_REAL_IDS = 256  # of the run's text, on which a converted model is compared with the original


def take_architecture(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return the config with the architecture and the tokenizer of model.init_from. Reads no weights.

    Raises UserError if there are no such weights, Golf cannot compute their architecture, or the config states another
    architecture or vocabulary; it lists the differences.
    """
    config = resolved.config
    if config.model.init_from is None:
        return resolved
    source = find_model(config.model.init_from, "model.init_from", is_final=True)
    native = load_model_config(source, "model.init_from")
    if config.model.architecture != "golf":
        return _take_tokenizer(_within(resolved, getattr(native, "max_position_embeddings", math.inf)), source)
    try:
        shape = golf_shape(native)
    except UserError as error:
        as_it_is = f"To train it as it is, set model.architecture {native.model_type}."
        if not _is_causal(native):
            as_it_is = f"{native.model_type} is no causal language model in transformers either."
        raise UserError(f"model.init_from: {error} {as_it_is}") from None
    section, overrides = config.model, golf_overrides(config.model)
    stated = {key: getattr(section, key) for key in _OF_THE_WEIGHTS if f"model.{key}" in resolved.sources}
    differences = [
        f"{model_key(key)} {as_yaml(value)} (the weights: {as_yaml(getattr(shape, key))})"
        for key, value in (stated | overrides).items()
        if not _agrees(shape, key, value)
    ]
    if differences:
        raise UserError(
            f"model.init_from: {source} has another architecture than this config: {', '.join(differences)}; leave"
            " these keys out, and the weights decide."
        )
    values = {f"model__{key}": getattr(shape, key) for key in _OF_THE_WEIGHTS if key not in stated}
    others = {key: getattr(shape, key) for key in MODEL_FIELDS if key not in _NO_OVERRIDES}
    values["model__overrides"] = {key: value for key, value in others.items() if value != MODEL_FIELDS[key]}
    if shape.position_embedding == "learned":
        positions = shape.max_position_embeddings
        resolved = _within(resolved, positions)
        if (
            config.model.position_embedding != "learned"
            and (length := resolved.config.batch.sequence_length) > positions
        ):
            raise UserError(
                f"batch.sequence_length: {length} is longer than the {positions} positions of the weights in {source};"
                f" set {positions} or less."
            )
    return _take_tokenizer(resolved.resolve("model.init_from", **values), source)


def _is_causal(native: Any) -> bool:
    """Return whether transformers computes it as a causal language model: not as an encoder, as in BERT."""
    kind = type(native)
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(native, "is_decoder", False)
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING and not is_encoder


def _within(resolved: ResolvedConfig, positions: float) -> ResolvedConfig:
    """Return the config with sequences that the weights have positions for, unless it states their length."""
    if "batch.sequence_length" in resolved.sources or resolved.config.batch.sequence_length <= positions:
        return resolved
    length = 1 << (int(positions).bit_length() - 1)  # a power of two divides what a step reads
    return resolved.resolve("model.init_from", batch__sequence_length=length)


def _take_tokenizer(resolved: ResolvedConfig, source: str) -> ResolvedConfig:
    if {"tokenizer.kind", "tokenizer.name_or_path"} & resolved.sources.keys():
        _require_same_vocabulary(resolved.config.tokenizer, source)
        return resolved
    taken = resolved.resolve("model.init_from", tokenizer__kind="pretrained", tokenizer__name_or_path=source)
    if (stated := taken.config.tokenizer.vocab_size) != "auto":
        with named_by_weights(taken):
            entries = len(_found(taken.config.tokenizer).get_vocab())
        if entries != stated:
            raise UserError(
                f"tokenizer.vocab_size: {stated} is not the {entries} entries of the tokenizer of {source};"
                " leave it out, and the weights decide."
            )
    return taken


@contextmanager
def named_by_weights(resolved: ResolvedConfig) -> Iterator[None]:
    """Have errors about the tokenizer name model.init_from, if that is where the tokenizer is from."""
    try:
        yield
    except UserError as error:
        if resolved.sources.get("tokenizer.name_or_path") != "model.init_from":
            raise
        raise UserError(str(error).replace("tokenizer.name_or_path", "model.init_from")) from None


def keep_architecture(resolved: ResolvedConfig, before: Mapping[str, Any]) -> ResolvedConfig:
    """Return the config of a resumed run, whose checkpoint says what the weights decided. before: its config."""
    if resolved.config.model.init_from is None:
        return resolved
    keys = {"tokenizer.kind", "tokenizer.name_or_path", "batch.sequence_length"}
    keys |= {f"model.{key}" for key in _OF_THE_WEIGHTS}
    values = {key.replace(".", "__"): before[key] for key in (keys & before.keys()) - resolved.sources.keys()}
    if resolved.config.model.architecture == "golf":
        values["model__overrides"] = before.get("model.overrides", {}) | resolved.config.model.overrides
    return resolved.resolve("the run so far", **values)


def frozen_names(config: RunConfig) -> list[str]:
    """Return the names of the parameters of model.init_from that are not trained: of a model passed to hfgolf.fit."""
    path = Path(os.path.expanduser(config.model.init_from or "")) / FROZEN
    return json.loads(path.read_text()) if config.model.init_from is not None and path.is_file() else []


def load_weights(config: RunConfig, model: PreTrainedModel, tokens: TokenCache) -> dict[str, Any]:
    """Load the weights of model.init_from into a run's new model; return what the run records of them.

    model: of a config from `take_architecture`. tokens: those of the run. Raises UserError if the weights are damaged,
    or if a converted model has other logits.
    """
    source = find_model(str(config.model.init_from), "model.init_from", is_final=True)
    original = load_model(source, "model.init_from").float()
    if isinstance(model, GolfForCausalLM):
        sentence = _load_golf(original, model, tokens, config.batch.sequence_length)
    else:
        sentence = type(model).__name__
        try:
            _load_other(original, model)
        except RuntimeError as error:
            raise UserError(f"model.overrides: the weights have another shape ({one_line(error)[:200]}).") from None
    sha256, revision = weights_sha256(model), None
    if not Path(source).is_dir():  # as its files lie in the local cache of the Hub: snapshots/COMMIT/config.json
        revision = Path(str(cached_file(source, "config.json"))).parent.name
    logger.info("weights: %s (%s), sha256 %s", source, sentence, sha256[:16])
    return {"name": config.model.init_from, "revision": revision, "sha256": sha256}


def _load_other(original: Any, model: PreTrainedModel) -> None:
    weights = original.state_dict()
    for name, initial in model.state_dict().items():
        if name in weights and weights[name].shape != initial.shape:  # new rows for the tokens of a chat template
            weights[name] = torch.cat([weights[name], initial[len(weights[name]) :]])
    model.load_state_dict(weights)
    for name, loaded in model.state_dict().items():
        if name in weights and not torch.equal(loaded, weights[name]):
            raise UserError(f"model.init_from: the weights have a {name} of its own, which their config.json ties.")


def _load_golf(original: Any, model: GolfForCausalLM, tokens: TokenCache, length: int) -> str:
    """Convert the weights and copy them; return what they were. length: of the run's sequences."""
    ids = tokens.train.read(np.arange(min(_REAL_IDS, len(tokens.train))))
    golf: Any
    try:
        golf, sentence = converted(original, "golf", ids[ids < original.config.vocab_size].tolist())
    except UserError as error:
        raise UserError(f"model.init_from: {error}") from None
    if golf.config.embedding_norm != model.config.embedding_norm:
        raise UserError(
            "model.init_from: the weights were trained since hfgolf exported them, so they are no longer the Golf model"
            " that their config.json describes in its entry golf; remove that entry."
        )
    _require_same_separator(golf.config, model.config)
    _copy(golf, model)
    model.config.loop_active = golf.config.loop_active
    made_for = golf.config.max_position_embeddings
    if length > made_for:
        logger.info(
            "positions: sequences of %d tokens; the weights are for %d, and have to learn the rest", length, made_for
        )
    return sentence


def load_old_text(config: RunConfig, tokens: TokenCache) -> Stream | None:
    """Return data.old_text as tokens of the run's tokenizer, from a cache or tokenized now; None if there is none.

    Raises UserError if it cannot be read.
    """
    names = config.data.old_text
    if not names:
        return None
    if len(names) == 1 and (old := RunFolder(Path(os.path.expanduser(names[0])))).config.is_file():
        before = load_config([f"--config={old.config}"]).config
        return load_tokens(before.data, before.tokenizer, tokenizer=tokens.tokenizer).val
    folder = cache_folder(config.data) / "old_text" / tokens.tokenizer_sha256[:16]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        rows, data = embedding_rows(tokens.tokenizer), config.data
        _, old_tokens = tokenize_files(names, tokens.tokenizer, rows, data.text_column, folder, encoding=data.encoding)
    except UserError as error:
        raise UserError(str(error).replace("--files", "data.old_text").replace("--text", "data.text")) from None
    return old_tokens.val


def weights_sha256(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a model's parameters: their names and values, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _agrees(shape: GolfConfig, key: str, stated: Any) -> bool:
    """Return whether a stated value means what the weights have: null, for example, is 4 x hidden_size."""
    if key == "max_position_embeddings" and shape.position_embedding != "learned":
        return True  # the weights have no limit
    fields = {name: getattr(shape, name) for name in MODEL_FIELDS}
    try:
        return bool(getattr(GolfConfig(**fields | {key: stated}), key) == getattr(shape, key))
    except ValueError:
        return False


def _require_same_vocabulary(config: TokenizerSection, source: str) -> None:
    """Raise UserError if a stated tokenizer does not have the entries of the weights' own, under the same ids."""
    advice = f"leave out tokenizer.kind, or set pretrained and tokenizer.name_or_path {source}"
    if config.kind in ("bpe", "char"):
        raise UserError(
            f"tokenizer.kind: {config.kind} would train a tokenizer on this text, but the weights belong to the one in"
            f" {source}; {advice}."
        )
    tokenizers = [_found(one) for one in (config, TokenizerSection(kind="pretrained", name_or_path=source))]
    own, theirs = (tokenizer.get_vocab() for tokenizer in tokenizers)
    others = sorted(entry for entry in own.keys() | theirs.keys() if own.get(entry) != theirs.get(entry))
    if others:
        example = f"{others[0]!r} has id {own.get(others[0])} here and {theirs.get(others[0])} there"
        raise UserError(
            f"tokenizer.kind: {config.kind} is not the tokenizer of the weights in {source}: {len(own):,} entries here,"
            f" {len(theirs):,} there, {len(others):,} differ; {example} (None: no such entry); {advice}."
        )
    here, there = (" ".join(map(str, document_start(tokenizer))) for tokenizer in tokenizers)
    if here != there:
        raise UserError(
            f"tokenizer.kind: {config.kind} begins documents differently from the tokenizer of the weights in {source}"
            f" (ids {here} here, {there} there); {advice}."
        )


def _found(config: TokenizerSection) -> PreTrainedTokenizerFast:
    tokenizer = find_tokenizer(config, {}, Path())
    assert tokenizer is not None  # nothing to train: neither bpe nor char
    return tokenizer


def _require_same_separator(weights: GolfConfig, run: GolfConfig) -> None:
    """Raise UserError if the model sees where documents begin, but by another token than the weights do."""
    reads_ids = run.switch_that_reads_ids
    if reads_ids and weights.bos_token_id != run.bos_token_id:
        raise UserError(
            f"model.init_from: with {model_key(reads_ids)} the weights know token {weights.bos_token_id} as the one"
            f" between documents, but here it is {run.bos_token_id}; see data.separator_id."
        )


@torch.no_grad()
def _copy(golf: GolfForCausalLM, model: GolfForCausalLM) -> None:
    """Copy the weights. A native architecture has biases even if all are zero, and then `golf` has none.

    Rows for the tokens that a chat template added to the vocabulary keep their initial values.
    """
    weights = dict(golf.named_parameters())
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter[: len(weights[name])].copy_(weights[name])
        else:
            parameter.zero_()
