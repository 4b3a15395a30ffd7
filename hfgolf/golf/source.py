"""What an export begins with: a model, the text it is scored on, and the text it is calibrated on.

Two ways lead there: the folder of a run, or any model with files of text. Does not know rounding or bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hfgolf.checkpoint.identity import Change, config_changes, read_identity, rule, text_changes
from hfgolf.checkpoint.store import newest_first
from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.config.sections import GolfSection, RunConfig
from hfgolf.data.corpus import Corpus, load_corpus
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import tokenizer_sha256
from hfgolf.evaluate.context import evaluation_length
from hfgolf.evaluate.text import tokenize_files
from hfgolf.golf.certificate import Searched
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.load import load_exported, read_card
from hfgolf.publish.model_card import model_card
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_metrics
from hfgolf.run.record import read_json, read_summary
from hfgolf.system.errors import UserError
from hfgolf.system.wording import count_of


@dataclass(frozen=True)
class Source:
    """A model and its text.

    sequence_length, seed, blocks_read: of the training, which determine the calibration text. train_split: what it
    is to the model; None if the weights have seen other text, too. golf: the settings of the run. card: returns the
    model card, given the final figures with the keys of a run's summary. run_config: what it takes to train the model
    again, or None.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    corpus: Corpus
    tokens: TokenCache
    sequence_length: int
    train_split: Searched | None
    card: Callable[[dict[str, Any]], str]
    seed: int | None = 0
    blocks_read: int = 0
    golf: GolfSection = field(default_factory=GolfSection)
    run_config: RunConfig | None = None


def run_source(folder: Path) -> Source:
    """Return the model that a run exported, and the run's own text. Raises UserError if one of them is missing."""
    run = RunFolder(folder)
    if not run.config.is_file():
        raise UserError(f"--run: there is no run in {folder}; name the folder of a run, such as runs/small.")
    if not (run.model / "config.json").is_file():
        raise UserError(f"--run: there is no exported model in {run.model}; a run writes it when it ends.")
    resolved = load_config([f"--config={run.config}"])
    config = resolved.config
    if config.data.messages_column is not None:
        raise UserError(
            f"--run: {folder} was trained on conversations, and golf scores all of a text; use --model with --files."
        )
    if config.data.mixture:
        raise UserError(
            f"--run: {folder} was trained on a mixture, and golf scores one text; use --model with --files."
        )
    damage = run.find_damage() if run.summary.is_file() else None
    if damage:
        raise UserError(
            f"--run: {damage}, so this is not what {folder} trained; restore it, or use --model with --files."
        )
    model, tokenizer = _load(str(run.model))
    corpus = load_corpus(config.data)
    _require_recorded(run, resolved, corpus)
    # a pretrained tokenizer may be gone since, as that of model.init_from; the text cannot change it
    is_given = config.tokenizer.kind == "pretrained"
    tokens = load_tokens(config.data, config.tokenizer, corpus, tokenizer if is_given else None)
    if tokenizer_sha256(tokens.tokenizer) != tokenizer_sha256(tokenizer):
        raise UserError(
            f"--run: the text of {run.config} now has another tokenizer than the model in {run.model}, so the text has"
            " changed since the run; restore it, or use --model with --files."
        )
    events = read_metrics(run.metrics).events if run.metrics.is_file() else []
    # train.resume_with_other: the weights have seen other text, too
    has_other = any(e["event"] == "resumed" and e.get("begins_data") and e["step"] for e in events)
    summary = read_summary(run.summary)
    summary.pop("sample", None)  # the weights before rounding wrote it
    length = config.batch.sequence_length
    return Source(
        model,
        tokens.tokenizer,
        corpus,
        tokens,
        sequence_length=length,
        train_split="training" if config.model.init_from is None and not has_other else None,
        card=lambda figures: model_card(config, summary | figures, model),
        seed=config.order_seed,
        blocks_read=int(summary.get("tokens") or 0) // length,
        golf=config.golf,
        run_config=config,
    )


def _load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a model in fp32 with its tokenizer. score.py finds documents by the model's eos, so it is that of both."""
    model, tokenizer = load_exported(name)
    if isinstance(model, GolfForCausalLM):
        model.config.eos_token_id = tokenizer.eos_token_id  # no logit depends on it
    return model.float(), cast("PreTrainedTokenizerFast", tokenizer)


def _require_recorded(run: RunFolder, resolved: ResolvedConfig, corpus: Corpus) -> None:
    """Raise UserError unless config and text are those that the run recorded: certificate and card are about them."""
    metadata, newest = read_json(run.metadata), next(iter(newest_first(run.checkpoints)), None)
    before = metadata.get("config")
    changes = config_changes(before, resolved) if isinstance(before, dict) else {}
    if changed := [change for key, change in changes.items() if rule(key) is not Change.TEXT]:
        raise UserError(
            f"--run: {run.config} is not the config that trained the run ({', '.join(changed)}); restore it."
        )
    # older versions did not note the text in metadata.json
    recorded = read_identity(newest)["corpus"] if newest else metadata.get("corpus")
    if not isinstance(recorded, dict):
        raise UserError(
            f"--run: {run.path} has no checkpoint left that says which text it was trained on, so nothing can be proved"
            " about it; use --model with --files."
        )
    if changed := text_changes(recorded, corpus.identity):
        raise UserError(
            f"--run: the text is not the one that {run.path} was trained on ({', '.join(changed)}); restore it, or use"
            " --model with --files."
        )


def model_source(name: str, files: list[str], calibration_files: list[str], text_column: str, cache: Path) -> Source:
    """Return any model (a folder or a Hub name) with text to score it on and text to calibrate it on.

    files, calibration_files: paths, globs or URLs, as data.files takes them. cache: a folder for their tokens. Raises
    UserError if one of them can't be used.
    """
    model, tokenizer = _load(name)
    try:
        corpus, tokens = tokenize_files(
            files, tokenizer, model.config.vocab_size, text_column, cache, train_files=calibration_files
        )
    except UserError as error:
        raise UserError(str(error).replace("--train_files", "--calibration_files")) from None
    length = evaluation_length(model, None)
    if len(tokens.train) <= length:
        raise UserError(
            f"--calibration_files: they have {count_of(len(tokens.train), 'token')}, but a sequence of this model takes"
            f" {length:,} and the one after; name more text."
        )
    card = read_card(name)
    return Source(model, tokens.tokenizer, corpus, tokens, length, "calibration", lambda figures: card)
