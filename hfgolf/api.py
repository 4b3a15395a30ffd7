"""Train from Python, as in a notebook: `run = hfgolf.fit("my.txt", max_minutes=5)`, then `run.sample("To be")`.

Objects that a run reads from files, tables and weights, are copied to the cache, in folders whose names are hashes of
their content: a run that resumes finds what it began with. The code of the command line checks everything.
"""

from __future__ import annotations

import hashlib
import html
import json
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hfgolf.config.parse import ResolvedConfig, as_resolved, base_for, find_config, load_config, read_yaml
from hfgolf.config.sections import DataSection, RunConfig
from hfgolf.data.cache_folder import cache_folder, locked
from hfgolf.data.files import require_paths, train_and_validation
from hfgolf.data.tables import Column, other_keys
from hfgolf.doctor.doctor import advice, examine
from hfgolf.doctor.finding import Finding
from hfgolf.evaluate.sample import generate_text
from hfgolf.hooks import standard_hooks
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import ALL_FROZEN
from hfgolf.publish.hub import push_model
from hfgolf.publish.load import load_exported, load_model
from hfgolf.report.report import render_page
from hfgolf.run.folder import RunFolder, run_folder
from hfgolf.run.metrics import read_metrics
from hfgolf.run.record import read_run, read_summary, status
from hfgolf.system.command import is_first_of_machine
from hfgolf.system.durable import new_folder
from hfgolf.system.errors import UserError, writing
from hfgolf.system.ranks import decide, together
from hfgolf.system.signals import Signals
from hfgolf.system.wording import duration, join_words, labeled, one_line, shortened
from hfgolf.train import loop
from hfgolf.train.claim import changed_text, completed, with_own_folder
from hfgolf.train.console import quiet_libraries, show_log
from hfgolf.train.decisions import with_accelerate
from hfgolf.train.finish import show_summary
from hfgolf.train.hooks import Hook
from hfgolf.train.init_from import FROZEN, weights_sha256
from hfgolf.train.process import processes
from hfgolf.train.successor import is_used_up, taught

if TYPE_CHECKING:
    import pandas as pd
    from datasets import Dataset

logger = logging.getLogger(__name__)

_WHERE = "hfgolf.fit"
_ALLOWED = "pass a Dataset, a DataFrame, a list with a string for each document, or a section as a dict"


def train(
    config: ResolvedConfig | RunConfig | str | Path, hooks: Sequence[Hook] = (), signals: Signals | None = None
) -> dict[str, Any]:
    """Train a model and return the summary: losses, bits per byte, speed and the model's folder.

    config: from `load_config`, a RunConfig, or the path or name of a YAML file. In a notebook, `hfgolf.fit` is the
    shorter way; unlike it and the command, this takes no other folder, and refuses a run that is complete.
    hooks: see `hfgolf.Hook`. signals: as in `loop.train`.
    Raises UserError for a problem that the user can fix, and SystemExit(128 + signal) if a signal ended the run.
    """
    return _train(as_resolved(config), hooks, signals, may_teach=False)


def _train(resolved: ResolvedConfig, hooks: Sequence[Hook], signals: Signals | None, may_teach: bool) -> dict[str, Any]:
    if not isinstance(hooks, Iterable):
        raise UserError(f"hooks: {shortened(hooks)} is no list; pass hooks=[...].")
    quiet_libraries()
    return loop.train(resolved, signals, [*standard_hooks(resolved.config), *hooks], may_teach)


def train_once(resolved: ResolvedConfig, hooks: Sequence[Hook] = (), signals: Signals | None = None) -> dict[str, Any]:
    """Train a run, or show and return the summary of one that is complete. Arguments and errors are those of `train`.

    A run that nobody named leaves another one's folder alone (claim.with_own_folder). A complete run whose model or
    summary is damaged is rebuilt from its checkpoints. If the minutes last longer than the text (successor.py), another
    run follows, unless there are hooks or several processes, and the summary of the better one is returned.
    """
    state = processes()
    may_teach = not hooks and state.num_processes == 1
    resolved, summary, changes = _train_or_show(resolved, hooks, signals, may_teach)
    folder = run_folder(resolved.config)
    is_to_teach = may_teach and not changes and is_used_up(resolved)
    if is_to_teach and (second := taught(resolved)):
        logger.info("\n%s", labeled("then", f"{folder.path} teaches another model, in the minutes that are left"))
        _, last, _ = _train_or_show(second, (), signals, may_teach=False)
        lower = summary["val_loss"] - last["val_loss"]
        than = f"{'lower' if lower > 0 else 'higher'} than {folder.path}, nats per token"
        logger.info("%s", labeled("taught", f"{abs(lower):.4f} {than}", 16))
        return last if lower > 0 else summary
    if is_to_teach:
        minutes = duration(60 * (resolved.config.train.max_minutes or 0))
        logger.info("%s", labeled("taught", f"no other model, because too little of the {minutes} is left", 16))
    better = advice(folder.path, summary.get("epochs"))
    if better and state.is_main_process:
        logger.info("%s", labeled("better", better, 16))
    return summary


def _train_or_show(
    resolved: ResolvedConfig, hooks: Sequence[Hook], signals: Signals | None, may_teach: bool
) -> tuple[ResolvedConfig, dict[str, Any], list[str]]:
    """Train a run or show a complete one; return its config and summary, and how its text has changed since."""
    resolved, state = with_accelerate(resolved), processes()  # to compare it with a complete run
    with together(state.num_processes):
        if "run.name" not in resolved.sources and (resume := resolved.config.train.resume) in (None, "auto"):
            resolved = with_own_folder(resolved, starts_beside_unfinished=resume is None)
        folder = run_folder(resolved.config)
        summary, damage = decide(lambda: completed(folder, resolved))
        if summary:
            logger.info("%s is complete; to train again, choose another --run.name or delete that folder", folder.path)
            changes = changed_text(folder, resolved.config) if state.is_main_process else []
            if changes:
                logger.warning("the text has changed since it was trained (%s)", ", ".join(changes))
            show_summary(summary)
            return resolved, summary, changes
        if damage:
            logger.warning("%s: %s; rebuilding it from the checkpoints", folder.path, damage)
            resolved = resolved.resolve("auto", train__resume="auto")
        return resolved, _train(resolved, hooks, signals, may_teach), []


def fit(
    files: str | Path | Sequence[str | Path] = (),
    *,
    config: str | Path | RunConfig | ResolvedConfig | None = None,
    name: str | None = None,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    seed: int | None = None,
    data: Mapping[str, Any] | Dataset | pd.DataFrame | Iterable[str] | None = None,
    model: Mapping[str, Any] | PreTrainedModel | None = None,
    tokenizer: Mapping[str, Any] | PreTrainedTokenizerBase | None = None,
    hooks: Sequence[Hook] = (),
    **sections: Any,
) -> TrainedRun:
    """Train a model on text, and return the run: its curve, its model, its samples.

        run = hfgolf.fit("my.txt", max_minutes=5, model={"num_hidden_layers": 4}, optim={"learning_rate": 0.02})

    The same call again continues a run that was stopped, and returns one that is complete. A call with other values
    trains a new run beside it; with train={"resume": "latest"}, it continues that one with them.

    files: text, as for `hfgolf train`: files, folders, globs or URLs.
    config: what the values below change: a YAML file, the name of a shipped config, or a RunConfig.
    name: of the run, and of its folder in run.output_dir. None: that of the text or the config, with a number if
    another run has it.
    max_minutes, max_steps: when to end. One of them replaces both limits of the config. Without a config, minutes also
    choose shape, vocabulary and rates, as of `hfgolf train my.txt --minutes`; if a short text is used up before they
    are over, the run that is returned is of another model, which learned from the first.
    data, model, tokenizer, and sections: a section of the config as {key: value}; docs/config.md lists them. Or
    objects: as data a Dataset, a DataFrame or another table with a column `text` (or the data.text_column of config),
    one string per document, or a dict of them (a DatasetDict), of which `train` trains and `validation` or `test`
    validates; a PreTrainedModel, whose weights training starts from, with its tokenizer; then the
    rates and sizes are those of the shipped config finetune. They are copied to data.cache_dir, where resuming finds
    them.
    hooks: see `hfgolf.Hook`.

    If SIGINT (a notebook's stop button) ends the run, it is saved and returned as it is. Raises UserError for a problem
    that the user can fix, and KeyboardInterrupt if the run is stopped before its first step.
    """
    limits = {"train.max_minutes": max_minutes, "train.max_steps": max_steps}
    stated: dict[str, Any] = {} if max_minutes is None and max_steps is None else limits
    stated |= {key: value for key, value in (("run.name", name), ("run.seed", seed)) if value is not None}
    for section, values in ({"data": data, "model": model, "tokenizer": tokenizer} | sections).items():
        if isinstance(values, Mapping) and not is_splits(values):
            if twice := [key for key in values if stated.get(f"{section}.{key}") is not None]:
                raise UserError(f"{twice[0]}: also stated in {section}={{...}}; pass one of them.")
            stated |= {f"{section}.{key}": value for key, value in values.items()}
        elif section in sections:  # not a section: the command line's answer to an unknown key
            stated[section] = values
    texts = _paths(files)
    known = _known(config) | stated
    if data is not None and (not isinstance(data, Mapping) or is_splits(data)):
        parts: Any = data
        if is_splits(parts):
            split, val = train_and_validation(parts, f"data: {type(data).__name__}")
            stated |= {} if val is None else {"data.val_files": [str(text_file(parts[val], known))]}
            parts = parts[split]
        texts.append(str(text_file(parts, known)))
    if model is not None and not isinstance(model, Mapping):
        stated |= weights_folder(model, tokenizer, known)
    elif tokenizer is not None and not isinstance(tokenizer, Mapping):
        stated |= tokenizer_folder(tokenizer, known)
    resolved = _resolve(texts, config, stated)
    if config is None and resolved.sources.get("data.source", "small") == "small":  # nobody said it
        raise UserError("files: they name no text; pass some, tables or texts as data=, or a config=.")
    with _shown_log():
        resolved = with_accelerate(resolved)
        if "run.name" not in stated and resolved.config.train.resume in (None, "auto"):
            resolved = with_own_folder(resolved)
        folder = run_folder(resolved.config)
        if not folder.path.exists():
            require_paths(resolved.config.data)  # before there is a folder
        try:
            folder = RunFolder(Path(train_once(resolved, hooks=hooks)["model"]).parent)
        except SystemExit as stopped:
            if stopped.code != 128 + signal.SIGINT:
                raise
            if not (folder.metrics.is_file() and read_metrics(folder.metrics).rows):
                raise KeyboardInterrupt from None
    return TrainedRun(folder.path)


def _paths(files: Any) -> list[str]:
    """Return the paths that `files` names. Raises UserError for other objects."""
    is_one = isinstance(files, str | bytes) or hasattr(files, "read") or not isinstance(files, Sequence | Iterator)
    listed = [files] if is_one else list(files)
    for path in listed:
        if not isinstance(path, str | Path):
            shown = f"{type(path).__name__} {shortened(path)}"
            raise UserError(f"files: {shown} names no file; pass paths, and tables or texts as data=.")
    return [str(path) for path in listed]


def _known(config: str | Path | RunConfig | ResolvedConfig | None) -> dict[str, Any]:
    """Return {"section.key": value} of a config as it is given, not yet checked."""
    if isinstance(config, RunConfig | ResolvedConfig):
        return as_resolved(config).config.flat()
    return {} if config is None else read_yaml(find_config(str(config)))


def _resolve(
    texts: Sequence[str], config: str | Path | RunConfig | ResolvedConfig | None, stated: dict[str, Any]
) -> ResolvedConfig:
    """Return the checked config; the stated values win over `config`."""
    base = None
    arguments = [f"./{text}" if text.startswith("-") else text for text in texts]
    if config is None:
        base = base_for(stated)
    elif isinstance(config, RunConfig | ResolvedConfig):
        base = as_resolved(config)
    else:
        arguments.append(f"--config={config}")
    stated = {"train.resume": "auto"} | stated
    return load_config(arguments, where=_WHERE, base=base, values=stated)


@contextmanager
def _shown_log() -> Iterator[None]:
    """Print hfgolf's log lines, unless the program has its own handlers for them."""
    log = logging.getLogger("hfgolf")
    before = log.handlers, log.propagate, log.level
    if not log.handlers:
        show_log(is_first_of_machine())
    try:
        yield
    finally:
        log.handlers, log.propagate, level = before
        log.setLevel(level)


def open_run(folder: str | Path) -> TrainedRun:
    """Return the run in a folder, also one that is not complete. Raises UserError if there is none."""
    run = TrainedRun(Path(os.path.expanduser(folder)))
    if not (run.folder / "metrics.jsonl").is_file():
        raise UserError(f"{run.folder} is not the folder of a run; name one such as runs/small.")
    return run


class TrainedRun:
    """A run, complete or not. It reads its folder when asked, so it also follows a run that trains elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        summary = self.summary
        if not summary:
            try:
                return f"<run {self.folder}: {status(read_run(self.folder))}>"
            except UserError as error:  # before the first step, or the folder is gone
                return f"<run {error}>"
        return (
            f"<run {self.folder}: validation loss {summary['val_loss']:.4f},"
            f" {summary['val_bits_per_byte']:.4f} bits per byte after {summary['steps']:,} steps>"
        )

    @property
    def summary(self) -> dict[str, Any]:
        """The final figures, as in summary.json; empty if the run is not complete."""
        return read_summary(self.folder / "summary.json")

    @property
    def metrics(self) -> pd.DataFrame:
        """The rows of metrics.jsonl, by step; docs/metrics.md explains each column.

        `run.metrics.val_loss.dropna().plot()` draws the validation loss.
        """
        import pandas as pd

        rows = read_metrics(self.folder / "metrics.jsonl").rows
        return pd.DataFrame(rows or {"step": []}).set_index("step")

    @property
    def findings(self) -> list[Finding]:
        """What the doctor finds in the run, as `hfgolf doctor` does; `print(*run.findings, sep="\\n")` shows it."""
        return examine(self.folder)[0]

    @property
    def model(self) -> PreTrainedModel:
        """The exported model, or of a run that is not complete its newest checkpoint, for inference.

        It is loaded once. Raises UserError if there is neither.
        """
        return self._loaded[0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return load_exported(str(self.folder))

    def sample(self, prompt: str = "", **options: Any) -> str:
        """Return the prompt and its continuation by the model.

        options: max_new_tokens (100), temperature (0.8; 0: the most likely token), top_k (50), top_p (1), seed (0).
        """
        if not isinstance(prompt, str):
            raise UserError(f"prompt: {shortened(prompt)} is not text; pass a string.")
        return generate_text(self.model, self.tokenizer, prompt, **options)

    def report(self) -> Report:
        """Return the report of the run, which a notebook shows."""
        return Report(render_page([read_run(self.folder)]), self.folder / "report.html")

    def push(self, repo_id: str, private: bool = False) -> str:
        """Push the exported model to the Hub, as `hfgolf push` does; return its address.

        repo_id: user/name. Raises UserError if the Hub refuses it, or the run is not complete.
        """
        if not self.summary:
            raise UserError(f"{self.folder} is not complete, so it has no model to push; continue it first.")
        return push_model(self.folder / "model", repo_id, private, "Push with hfgolf")


class Report:
    """The page of a run. A notebook shows it; elsewhere, open the file."""

    def __init__(self, page: str, path: Path) -> None:
        self.page, self.path = page, path

    def __repr__(self) -> str:
        return f"<report {self.path}>"

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, so that its styles and the notebook's stay apart."""
        return f'<iframe srcdoc="{html.escape(self.page)}" style="width: 100%; height: 60em; border: 0"></iframe>'


def text_file(data: Any, stated: Mapping[str, Any]) -> Path:
    """Write a table, or one string per document, to a Parquet file and return its path.

    data: a Dataset, a DataFrame, a Table or another object with Arrow's stream protocol, of which the column of text is
    read; or strings or rows as dicts in a list, a Series, an array or a generator. stated: values of the config. Raises
    UserError for other objects, or for a table without the column of text.
    """
    import pyarrow.parquet as pq
    from datasets import Dataset

    text_column = stated.get("data.text_column") or DataSection().text_column
    column = stated.get("data.messages_column") or stated.get("data.ids_column") or text_column
    if not isinstance(data, Dataset):
        data = _dataset(data, text_column, is_alone=column == text_column)
    if not len(data):
        raise UserError(f"data: there is nothing in it; {_ALLOWED}.")
    if Column("text_column", column).find(data.column_names) is None:
        names = join_words(data.column_names, maximum=9) or "it has none"
        other = other_keys(data.column_names)
        raise UserError(
            f"data: there is no column {column}; rename one to it, or name it in a config as data.text_column{other}"
            f" ({names})."
        )

    def write(folder: Path) -> None:
        data.to_parquet(folder / "data.parquet")

    digest = hashlib.sha256()
    for batch in data.with_format("arrow").iter(batch_size=1000):
        digest.update(repr([batch[name].to_pylist() for name in batch.column_names]).encode())
    path = _once(stated, digest.hexdigest(), write) / "data.parquet"
    if pq.read_schema(path).names != data.column_names:  # of a table with the same values under other names
        digest.update(repr(data.column_names).encode())
        path = _once(stated, digest.hexdigest(), write) / "data.parquet"
    return path


def _dataset(data: Any, column: str, is_alone: bool) -> Dataset:
    """Return the rows of an object that is no Dataset; strings and arrays are the column of text.

    is_alone: whether the column of text is all that is needed of a table.
    """
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

    kind = type(data).__name__
    if isinstance(data, str | bytes | os.PathLike) or hasattr(data, "read"):
        raise UserError(f"data: {shortened(data)} is one {kind}; pass paths as files, or a list of texts as data.")
    if isinstance(data, Mapping | Set | IterableDataset):
        raise UserError(f"data: {kind} has no order or no known end; {_ALLOWED}.")
    try:
        if (names := getattr(data, "column_names", getattr(data, "columns", None))) is not None:
            if is_alone and column in [*names]:  # what is in the others does not matter
                data = data.select([column]) if hasattr(data, "select") else data[[column]]
            return Dataset(pa.table(data))
        items = data.to_pylist() if hasattr(data, "to_pylist") else list(data)
        wanted = Mapping if items and isinstance(items[0], Mapping) else str
        for number, item in enumerate(items):
            if not isinstance(item, wanted):
                raise TypeError(f"item {number} is {shortened(item)}")
        if wanted is str and items and all(len(item) < 1000 and os.path.exists(item) for item in items):
            raise TypeError(f"{shortened(items[0])} is a file; pass paths as files")
        if wanted is str:
            return Dataset.from_dict({column: items})
        return Dataset.from_list(
            [{column: row.get(column)} for row in items] if is_alone and column in items[0] else items
        )
    except UnicodeEncodeError as error:
        raise UserError(f"data: {shortened(error.object)} is not text ({one_line(error)}); remove that.") from None
    except (TypeError, ValueError, NotImplementedError, pa.ArrowException) as error:
        raise UserError(f"data: {kind} cannot be read: {one_line(error)[:200]}; {_ALLOWED}.") from None


def is_splits(data: Any) -> bool:
    """Return whether an object is a dict of tables or lists of texts by split, such as a DatasetDict."""
    return isinstance(data, Mapping) and any(
        name == "train" or hasattr(value, "column_names") or hasattr(value, "columns") for name, value in data.items()
    )


def weights_folder(model: Any, tokenizer: Any, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Write a model and its tokenizer to a folder; return the values of the config that start training from it.

    Parameters without requires_grad stay as they are. Weights of 16 bits become fp32. A class that transformers does
    not know is registered, in this process only. Raises UserError for other objects, and for a model that computes
    something else than what its class makes of its config and its weights.
    """
    if not isinstance(model, PreTrainedModel):
        advice = (
            ' name weights as model={"init_from": ...}' if isinstance(model, str) else " subclass transformers' own"
        )
        raise UserError(f"model: {type(model).__name__} is not a PreTrainedModel;{advice}.")
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if len(frozen) == len([*model.parameters()]):
        raise UserError(ALL_FROZEN)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("model: it is on the meta device, without weights; pass one that has some.")
    if getattr(model, "is_quantized", False) or getattr(model, "_hf_peft_config_loaded", False):
        raise UserError("model: it is quantized or has adapters; pass a plain model, with its adapters merged.")
    _require_tokenizer(tokenizer)
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not isinstance(model, GolfForCausalLM):
        AutoConfig.register(model.config.model_type, type(model.config), exist_ok=True)
        AutoModelForCausalLM.register(type(model.config), type(model), exist_ok=True)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if frozen:
            (folder / FROZEN).write_text(json.dumps(frozen))

    buffers = {name: str(buffer.tolist()) for name, buffer in model.named_buffers()}
    digest = _hash(weights_sha256(model), model.config.to_dict(), *_tokenizer_key(tokenizer), buffers, frozen)
    folder = _once(stated, digest, write)
    _require_same(model, load_model(str(folder), "model"))
    values: dict[str, Any] = {"model.init_from": str(folder)}
    return values if isinstance(model, GolfForCausalLM) else values | {"model.architecture": model.config.model_type}


@torch.no_grad()
def _require_same(model: Any, again: Any) -> None:
    """Raise UserError if a model, saved and loaded again, has other logits: it has hooks, say, or replaced modules."""
    was_training = {module for module in model.modules() if module.training}
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        logits = model.eval()(input_ids=ids).logits.float().cpu()
    except Exception as error:  # whatever a model raises that is no causal language model
        reason = f"{type(error).__name__}: {one_line(error)[:200]}"
        raise UserError(f"model: {type(model).__name__} computes no logits from input_ids ({reason}).") from None
    finally:
        for module in was_training:
            module.training = True
    difference = (again.to(model.dtype)(input_ids=ids.cpu()).logits.float() - logits).abs().max().item()
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.1) * max(1.0, logits.abs().max().item())
    if not difference <= tolerance:
        raise UserError(
            f"model: saved and loaded again, its logits differ by {difference:.2g}; what is not in its config and its"
            " weights would be lost, such as hooks or replaced modules. Make it a class of its own."
        )


def tokenizer_folder(tokenizer: Any, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Write a tokenizer to a folder; return the values of the config that name it. Raises UserError for others."""
    _require_tokenizer(tokenizer)
    folder = _once(stated, _hash(*_tokenizer_key(tokenizer)), tokenizer.save_pretrained)
    return {"tokenizer.kind": "pretrained", "tokenizer.name_or_path": str(folder)}


def _require_tokenizer(tokenizer: Any) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError("tokenizer: must be a PreTrainedTokenizerFast, and the model's own if a model is passed.")


def _tokenizer_key(tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    return [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map]


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _once(stated: Mapping[str, Any], digest: str, write: Callable[[Path], Any]) -> Path:
    """Return the folder of the cache that a hash names; `write` fills it if it is not there.

    Raises UserError if the machine refuses that, as on a full disk.
    """
    data = DataSection(**{"cache_dir": stated["data.cache_dir"]} if "data.cache_dir" in stated else {})
    cache = cache_folder(data).absolute()
    folder = cache / "passed" / digest[:16]
    with writing("data.cache_dir", cache), locked(cache / "passed.lock", "copies what was passed to hfgolf.fit"):
        if not folder.is_dir():
            with new_folder(folder) as partial:
                write(partial)
    return folder
