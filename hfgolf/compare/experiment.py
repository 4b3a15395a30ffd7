"""The definition of an experiment: which configs to compare, over which seeds, against which baseline.

Owns the format of benchmarks/experiments/*.yaml (see the README there) and its expansion into a list of runs. Passes
values on as written, so that parse.py alone checks them. Does not know how runs are launched or evaluated.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfgolf.config.parse import KEY_TYPES, ResolvedConfig, is_key, load_config, load_yaml
from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words, nearest, shortened

if TYPE_CHECKING:
    from hfgolf.run.folder import RunFolder

Settings = dict[str, Any]
"""{"section.key": value}; of a definition, as written"""

_PARTS = ("base", "seeds", "common", "arms", "grid", "baseline")
_SET_BY_EXPERIMENT = {"run.name", "run.seed", "run.output_dir", "train.resume"}


@dataclass(frozen=True)
class Experiment:
    """A definition whose format is checked; the values of its keys are not."""

    path: Path
    base: str | None
    """Path of the config that every arm starts from; None: the defaults."""
    seeds: list[int]
    arms: dict[str, Settings]
    """{arm: its settings, including the common ones}; a grid is expanded into arms like `muon[learning_rate=0.02]`."""
    grids: dict[str, dict[str, list[str]]]
    """{name of an expanded arm: {key: values}}"""
    baseline: str
    """An arm, or a grid, which means the grid's best arm."""

    def arms_of(self, grid: str) -> list[str]:
        """Return the arms that a grid expands into."""
        return [arm for arm in self.arms if arm.startswith(f"{grid}[")]


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment: an arm with a seed."""

    arm: str
    arguments: list[str]
    """Arguments for train.py."""
    resolved: ResolvedConfig

    @property
    def seed(self) -> int:
        return self.resolved.config.run.seed

    @property
    def name(self) -> str:
        return str(self.resolved.config.run.name)

    @property
    def folder(self) -> RunFolder:
        from hfgolf.run.folder import run_folder  # slow to import: `--help` should not wait for it

        return run_folder(self.resolved.config)

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.path / "train.log"


def load_experiment(path: Path) -> Experiment:
    """Read a definition. Raises UserError, naming file and key, if its format is wrong."""
    if not path.is_file():
        raise UserError(f"there is no definition {path}; name one, such as benchmarks/experiments/muon_vs_adamw.yaml.")
    # as text: `1e-3` and 0.10 stay as written
    content = load_yaml(path, str(path), as_text=True)
    try:
        return _experiment(path, _mapping("a definition", content))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _experiment(path: Path, content: dict[str, Any]) -> Experiment:
    for part in content:
        if part not in _PARTS:
            raise UserError(f"unknown key {part}; did you mean {nearest(part, _PARTS)}?")
    parts = {part: value for part, value in content.items() if value not in ("", "null")}
    base = parts.get("base")
    if base is not None and not isinstance(base, str):
        raise UserError(f"base: {base} is not allowed; allowed: the path of a config (put values under common).")
    common = _settings("common", parts.get("common"))
    stated = _mapping("arms", parts.get("arms"))
    if not stated:
        raise UserError("arms: there are none; add one, such as `arms: {muon: {optim.name: muon}}`.")
    for name in stated:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"arms: {name!r} is not allowed as a name; allowed: letters, digits, . _ -")
    grids = _grids(parts.get("grid"), list(stated))
    arms: dict[str, Settings] = {}
    for name, changes in stated.items():
        settings = common | _settings(f"arms.{name}", changes)
        axes = grids.get(name, {})
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            text = ",".join(f"{key.split('.')[-1]}={value}" for key, value in point.items())
            arms[f"{name}[{text}]" if text else name] = settings | point
    baseline = parts.get("baseline", next(iter(stated)))
    if baseline not in [*stated, *arms]:
        raise UserError(f"baseline: there is no arm {baseline}; allowed: {join_words(stated, last=' or ')}.")
    seeds = parts.get("seeds")
    if (
        not (isinstance(seeds, list) and seeds)
        or not all(isinstance(seed, str) and seed.isdecimal() for seed in seeds)
        or len({*map(int, seeds)}) < len(seeds)
    ):
        raise UserError(
            f"seeds: {shortened(seeds)} is not allowed; allowed: a list of different numbers, such as [1, 2, 3]."
        )
    return Experiment(path, base, [*map(int, seeds)], arms, grids, baseline)


def plan_runs(experiment: Experiment, output_dir: Path, options: Sequence[str]) -> list[PlannedRun]:
    """Return the runs of an experiment, seed by seed, so that a slow phase of the machine affects every arm.

    options: of hfgolf train, for every run; they override the definition. By default, all runs evaluate all validation
    tokens at the end. Raises UserError, naming arm and key, if they do not make a valid config, or would make arms
    equal, and if two arms would have the same folders.
    """
    base_options = [f"--config={experiment.base}"] if experiment.base else []
    base_options.append("--train.final_eval_tokens=null")  # by default, an arm that trains longer would read more
    stated = {option[2:].split("=")[0].removesuffix("+") for option in options if option.startswith("--")}
    _check_keys("the command line", stated)
    runs: dict[str, list[PlannedRun]] = {}
    for arm, settings in experiment.arms.items():
        for key in stated & settings.keys():
            if any(others.get(key) != settings[key] for others in experiment.arms.values()):
                raise UserError(f"--{key}: the arms differ in this key; change it in {experiment.path}.")
        arguments = [*base_options, *(f"--{key}={value}" for key, value in settings.items()), *options]
        name = re.sub(r"[^\w.-]+", "-", arm).strip("-")
        if name in runs:
            twins = f"{runs[name][0].arm} and {arm} would both be in {name}"
            raise UserError(f"{experiment.path}: {twins}; write them as arms with names of their own.")
        runs[name] = []
        for seed in experiment.seeds:
            of_run = [*arguments, f"--run.name={name}-seed{seed}", f"--run.seed={seed}"]
            of_run += [f"--run.output_dir={output_dir}", "--train.resume=auto"]
            try:
                runs[name].append(PlannedRun(arm, of_run, load_config(of_run)))
            except UserError as error:
                raise UserError(f"{experiment.path}: {arm}: {str(error).removeprefix('the command line: ')}") from None
    return [run for of_seed in zip(*runs.values(), strict=True) for run in of_seed]


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if value in (None, "", "null"):
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where}: {shortened(value)} is not allowed; allowed: keys and values, as in `key: value`.")
    return value


def _settings(where: str, value: Any) -> Settings:
    settings = _mapping(where, value)
    _check_keys(where, settings)
    return {key: _text(where, key, value) for key, value in settings.items()}


def _check_keys(where: str, keys: Iterable[str]) -> None:
    for key in keys:
        if key in _SET_BY_EXPERIMENT:
            raise UserError(f"{where}: the experiment sets {key} for each run; remove it.")
        if not is_key(key):
            raise UserError(f"{where}: unknown key {key}; did you mean {nearest(key, KEY_TYPES)}?")


def _text(where: str, key: str, value: Any) -> str:
    """Return a value as text for the command line."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return f"[{', '.join(value)}]"
    if not isinstance(value, str):
        raise UserError(f"{where}: {key}: {shortened(value)} is not allowed; allowed: a value or a list of values.")
    return value or "null"


def _grids(value: Any, arms: list[str]) -> dict[str, dict[str, list[str]]]:
    """Return {arm: {key: values}}; a key directly under `grid` applies to every arm."""
    grids: dict[str, dict[str, list[str]]] = {}
    for name, axes in _mapping("grid", value).items():
        if name not in arms and not is_key(name):
            raise UserError(f"grid: {name} is neither an arm ({join_words(arms)}) nor a key of the config.")
        expanded, axes = ([name], axes) if name in arms else (arms, {name: axes})
        for key, values in _mapping(f"grid.{name}", axes).items():
            where = f"grid.{name}" if name in arms else "grid"
            if not isinstance(values, list) or not values:
                raise UserError(f"{where}: {key}: {shortened(values)} is not allowed; allowed: a list of values.")
            _check_keys(where, [key])
            for arm in expanded:
                grids.setdefault(arm, {})[key] = [_text(where, key, value) for value in values]
    return grids
