"""Train from Python, as in a notebook: text in, a run out that shows its curve, its model and its samples.

    run = hfgolf.fit("my.txt", max_minutes=5, model={"num_hidden_layers": 4})
    run.sample("To be")

Owns how arguments become a config, and the names of runs. Everything is checked by the code of the command line.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfgolf.command_line import ResolvedConfig, as_resolved, find_config, load_config, read_yaml, shipped_base
from hfgolf.config import RunConfig
from hfgolf.data.files import require_paths
from hfgolf.errors import UserError
from hfgolf.run.folder import run_folder
from hfgolf.tools.passed import is_splits, text_file, tokenizer_folder, weights_folder
from hfgolf.tools.trained_run import TrainedRun
from hfgolf.train.claim import changed_text, changes
from hfgolf.train.console import show_log
from hfgolf.train.hooks import Hook
from hfgolf.train.process import resolve_precision
from hfgolf.training import train_once
from hfgolf.wording import shortened

if TYPE_CHECKING:
    import pandas as pd
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WHERE = "hfgolf.fit"


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
    trains a new run beside it.

    files: text, as for `hfgolf train`: files, folders, globs or URLs. None of them, and neither `data` nor `config`:
    the shipped config small.
    config: what the values below change: a YAML file, the name of a shipped config, or a RunConfig.
    name: of the run, and of its folder in run.output_dir. None: that of the text or the config, with a number if
    another run has it.
    max_minutes, max_steps: when to end. One of them replaces both limits of the config.
    data, model, tokenizer, and sections: a section of the config as {key: value}; docs/config.md lists them. Or
    objects: as data a Dataset, a DataFrame or another table with a column `text` (or the data.text_column of config),
    or one string per document; a PreTrainedModel, whose weights training starts from, with its tokenizer; then the
    rates and sizes are those of the shipped config finetune. They are copied to data.cache_dir, where resuming finds
    them.
    hooks: see `hfgolf.Hook`.

    If SIGINT (a notebook's stop button) ends the run, it is saved and returned as it is. Raises UserError for a problem
    that the user can fix, and KeyboardInterrupt if the run is stopped before its first step.
    """
    limits = {"max_minutes": max_minutes, "max_steps": max_steps}
    stated: dict[str, Any] = {f"train.{key}": value for key, value in limits.items() if any(limits.values())}
    stated |= {key: value for key, value in (("run.name", name), ("run.seed", seed)) if value is not None}
    for section, values in ({"data": data, "model": model, "tokenizer": tokenizer} | sections).items():
        if isinstance(values, Mapping) and not is_splits(values):
            stated |= {f"{section}.{key}": value for key, value in values.items()}
        elif section in sections:  # not a section: the command line's answer to an unknown key
            stated[section] = values
    texts = _paths(files)
    known = _known(config) | stated
    if data is not None and (not isinstance(data, Mapping) or is_splits(data)):
        texts.append(str(text_file(data, known)))
    if model is not None and not isinstance(model, Mapping):
        stated |= weights_folder(model, tokenizer, known)
    elif tokenizer is not None and not isinstance(tokenizer, Mapping):
        stated |= tokenizer_folder(tokenizer, known)
    resolved = _resolve(texts, config, stated)
    with _shown_log():
        resolved = resolve_precision(resolved)
        if name is None:
            resolved = _with_own_folder(resolved)
        folder = run_folder(resolved.config)
        if not folder.path.exists():
            require_paths(resolved.config.data)  # before there is a folder
        try:
            train_once(resolved, hooks=hooks)
        except SystemExit as stopped:
            if stopped.code != 128 + signal.SIGINT:
                raise
            if not folder.metrics.is_file():
                raise KeyboardInterrupt from None
    return TrainedRun(folder.path)


def _paths(files: Any) -> list[str]:
    """Return the paths that `files` names. Raises UserError for other objects."""
    listed = [files] if isinstance(files, str | Path) else files
    if not isinstance(listed, Sequence | Iterator) or isinstance(listed, bytes) or hasattr(listed, "read"):
        raise UserError(f"files: {type(files).__name__} names no files; pass paths, and tables or texts as data=.")
    listed = list(listed)
    if wrong := [path for path in listed if not isinstance(path, str | Path)]:
        raise UserError(f"files: {shortened(wrong[0])} is not a path; pass paths, and tables or texts as data=.")
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
        base = shipped_base("model.init_from" in stated)
    elif isinstance(config, RunConfig | ResolvedConfig):
        base = as_resolved(config)
    else:
        arguments.append(f"--config={config}")
    stated = {"train.resume": "auto"} | stated
    return load_config(arguments, where=_WHERE, base=base, values=stated)


def _with_own_folder(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return the config with the first name whose folder is free, or holds this run."""
    base, number = resolved.config.run.name, 1
    while True:
        folder = run_folder(resolved.config)
        if not folder.config.exists() or not (changes(folder, resolved) or changed_text(folder, resolved.config)):
            return resolved
        number += 1
        resolved = resolved.resolve(_WHERE, run__name=f"{base}-{number}")


@contextmanager
def _shown_log() -> Iterator[None]:
    """Print hfgolf's log lines, unless the program has its own handlers for them."""
    log = logging.getLogger("hfgolf")
    before = log.handlers, log.propagate, log.level
    if not log.handlers:
        show_log(is_main_process=True, is_verbose=False)
    try:
        yield
    finally:
        log.handlers, log.propagate, level = before
        log.setLevel(level)


def open_run(folder: str | Path) -> TrainedRun:
    """Return the run in a folder, also one that is not complete. Raises UserError if there is none."""
    run = TrainedRun(Path(folder).expanduser())
    if not (run.folder / "metrics.jsonl").is_file():
        raise UserError(f"{run.folder} is not the folder of a run; name one such as runs/small.")
    return run
