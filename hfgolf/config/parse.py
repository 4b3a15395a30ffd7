"""Parse `--config file.yaml --section.key value` into a checked RunConfig, with the source of every value.

Owns the order of file and command line, and the nearest key to one that does not exist. The sections check values.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hfgolf.config.mixture import stages
from hfgolf.config.other_names import (
    GONE,
    HALF_LIFE,
    OTHER_NAMES,
    in_current_names,
    is_earlier,
    laid_over,
    with_ema_decay,
)
from hfgolf.config.sections import (
    KEY_TYPES,
    SECTIONS,
    Positive,
    RunConfig,
    as_list,
    has_type,
    plain,
    takes_text,
    type_parts,
)
from hfgolf.config.yaml_text import as_yaml, load_yaml, yaml_value
from hfgolf.system.command import is_first_of_machine
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact_values
from hfgolf.system.wording import close_match, join_words, nearest, shortened

logger = logging.getLogger(__name__)

_FLAGS = ("-h", "--help", "--print_config")
DISTILL_FROM = "train.distill_from"
_SHORT = {"--minutes": "--train.max_minutes", "--distill_from": f"--{DISTILL_FROM}"}
AUTOPILOT = (
    "tokenizer.kind",
    "tokenizer.vocab_size",
    "model.hidden_size",
    "model.num_hidden_layers",
    "model.num_attention_heads",
    "batch.tokens_per_step",
    "batch.segment_length",
    "optim.learning_rate",
    "optim.adamw_learning_rate",
    "optim.ema_decay",
    "optim.ema_export",
    "train.max_tokens",
    "schedule.warmup_steps",
    "train.eval_every_steps",
)
"""The keys that train/autopilot.py decides for a text and minutes, where nobody states them: their source is auto."""
_MEASURED: dict[str, tuple[str, ...]] = {
    "model.architecture": ("golf",),
    "model.init_from": (),
    "optim.name": ("muon",),
    "data.source": ("files", "hub", "python_stdlib"),
    "data.ids_column": (),
    "data.messages_column": (),
    "data.mixture": (),
}
"""{key: its values that train/law.py knows of}."""
_UNSTATED_BY_NULL = ("model.max_position_embeddings", "model.vocab_size")  # something else decides, such as weights
_NAMES_OF_TEXT = {"data.hub_name": "hub", "data.files": "files", "data.mixture": "mixture"}
"""{key: the data.source that it implies}."""
_MAX_NAME_BYTES = 100  # of a text's name in that of its run; its folder and its files add more

CONFIGS = Path(__file__).parents[1] / "configs"
CONFIGS = CONFIGS if CONFIGS.is_dir() else CONFIGS.parents[1] / "configs"  # beside the package in a checkout


@dataclass(frozen=True)
class ResolvedConfig:
    """A config and, for each "section.key", its source: default, file, command line, code, accelerate or auto."""

    config: RunConfig
    sources: dict[str, str]

    @classmethod
    def from_code(cls, config: RunConfig) -> ResolvedConfig:
        """Wrap a config that Python code built; every value that differs from its default has the source "code"."""
        defaults = RunConfig().flat() | {"train.max_steps": None}  # whose default is a limit for want of another
        stated = {key: "code" for key, value in config.flat().items() if value != defaults[key]}
        if config.run.name is None:
            config = config.replace(run__name="default")
        return cls(config, stated).with_low_memory()

    @property
    def is_open(self) -> bool:
        """Whether train/autopilot.py has something to choose; the tokenizer's kind alone follows from the text."""
        return any(self.sources.get(key) == "auto" for key in AUTOPILOT if key != "tokenizer.kind")

    def stated(self) -> dict[str, Any]:
        """Return {"section.key": value} of every value with a source, and the name."""
        values = self.config.flat()
        return {key: values[key] for key in ("run.name", *self.sources)}

    def resolve(self, source: str, **values: Any) -> ResolvedConfig:
        """Return a copy with each `section__key=value` set, and `source` as where it came from."""
        sources = self.sources | {name.replace("__", "."): source for name in values}
        return ResolvedConfig(self.config.replace(**values), sources)

    def with_low_memory(self) -> ResolvedConfig:
        """Return a copy with what train.low_memory sets, unless it is stated."""
        values = {"model__gradient_checkpointing": True, "optim__state_dtype": "bf16"}
        unstated = {name: value for name, value in values.items() if name.replace("__", ".") not in self.sources}
        return self.resolve("train.low_memory", **unstated) if self.config.train.low_memory else self

    def to_yaml(self) -> str:
        """Return YAML that repeats the run if passed as --config. Secrets are redacted; comments name the sources."""
        lines: list[str] = []
        for dotted, value in self.config.flat().items():
            section, key = dotted.split(".")
            if f"{section}:" not in lines:
                lines.append(f"{section}:")
            lines.append(f"  {key}: {as_yaml(redact_values(value))}  # {self.sources.get(dotted, 'default')}")
        return "\n".join(lines) + "\n"


def load_config(
    argv: str | Path | Sequence[str] | None = None,
    where: str = "the command line",
    base: ResolvedConfig | None = None,
    needs_limit: bool = True,
    values: Mapping[str, Any] | None = None,
    may_choose: bool = True,
    verb: str | None = None,
) -> ResolvedConfig:
    """Parse `[TEXT ...] --config FILE --section.key value ...` into a checked config.

    The arguments win over the file, in whatever order they come, and the file wins over `base`. Of a key stated twice,
    the last value counts. `--model.overrides.NAME value` sets one field and leaves the others. Texts (files, folders,
    globs, URLs) are data.files; with neither a config nor a base, they begin with `base_for`.

    argv: the arguments, or the path or name of a config; None: the arguments of the process. `--help` and
    `--print_config` print and exit with status 0. where: what error messages call the arguments. needs_limit: whether
    the run must end by itself. values: {"section.key": value}, which win over the file like the arguments. may_choose:
    whether the caller lets train/autopilot.py choose what the minutes leave open; else, a config is asked for. verb:
    the command that wants its text or a config named; None: without them, the text is that of the defaults.
    Raises UserError (one line) for a missing file, an unknown key, or a value of the wrong type or out of range.
    """
    argv = [f"--config={argv}"] if isinstance(argv, str | Path) else argv
    arguments = one_token_per_option(sys.argv[1:] if argv is None else argv)
    texts = [argument for argument in arguments if not argument.startswith("-")]
    if {"-h", "--help"} & {*arguments}:
        from hfgolf.config.reference import print_help

        print_help()
        sys.exit(0)
    options = _options(arguments, where)
    path = find_config(options.pop("config")) if "config" in options else None
    dollars = options.pop("dollars", None)
    stated = plain(dict(values or {}))
    for key in [*stated, *options]:
        _check_key(key, where)
    stated |= {key: _typed(key, text, where) for key, text in options.items()}
    if texts and "data.files" in stated:
        raise UserError(f"{texts[0]}: data.files names the text already; name all of it there.")
    stated |= {"data.files": texts} if texts else {}
    from_file = {} if path is None else read_yaml(path)
    if dollars is not None and "train.max_minutes" in stated:
        raise UserError(f"{where}: --dollars and train.max_minutes both say how long to train; state one of them.")
    if dollars is not None:
        stated["train.max_minutes"] = _minutes(dollars, (from_file | stated).get("run.price_per_hour"))
    if (texts or stated.get(DISTILL_FROM)) and base is None and path is None:
        base = base_for(stated)
    if verb and base is None and path is None and not stated.keys() & {"data.source", *_NAMES_OF_TEXT}:
        raise UserError(
            "name your text, a config, or both, and any values:",
            f"  hfgolf {verb} my.txt",
            f"  hfgolf {verb} --config small",
        )
    below, sources = ({}, {}) if base is None else (base.stated(), dict(base.sources))
    if base and texts and "run.name" not in sources:
        below["run.name"] = text_name(texts)
    if path is not None:
        for key in from_file:
            _check_key(key, path)
        below, said = _laid_over(below, from_file, path)
        sources |= dict.fromkeys(said, "file")
    shipped = {key: value for key, value in below.items() if sources.get(key) in ("small", "finetune")}
    if sources.get("batch.segment_length") == "auto":  # the autopilot may leave segments out, not fit them
        shipped["batch.segment_length"] = below["batch.segment_length"]
    implied = _implied(below, stated, shipped)
    if sources.get("train.max_tokens") == "auto":
        implied |= {key: (value, "auto") for key, value in _placeholders(stated).items()}
    merged, said = _laid_over(below | {key: value for key, (value, _) in implied.items()}, stated, where)
    sources |= {key: why for key, (_, why) in implied.items()} | dict.fromkeys(said, where.removeprefix("the "))
    merged, half_life = with_ema_decay(merged), merged.get(HALF_LIFE)
    if half_life is not None and "optim.ema_decay" in merged:
        _say_once(f"{HALF_LIFE} {half_life} is now optim.ema_decay {merged['optim.ema_decay']}")
    if not needs_limit:
        merged = {"train.max_steps": RunConfig().train.max_steps} | merged
    try:
        config = RunConfig.from_flat(merged)
    except UserError as error:
        raise _with_origin(error, sources, path, where) from None
    if config.run.name is None:
        config = config.replace(run__name=Path(path).stem if path else "default")
    unstated = [key for key in _UNSTATED_BY_NULL if merged.get(key) is None]
    sources = {key: source for key, source in sources.items() if key not in unstated}
    if needs_limit:
        _check_stages(config)
    resolved = ResolvedConfig(config, sources).with_low_memory()
    if "--print_config" in arguments:
        print("# auto: chosen when training starts\n" if resolved.is_open else "", resolved.to_yaml(), sep="", end="")
        sys.exit(0)
    if resolved.is_open and not may_choose:
        raise UserError(
            "train.max_minutes: without a config, the minutes choose shape and rates when training starts, and this"
            " command can't know them; leave the minutes out, or name a config, as of a run."
        )
    return resolved


def _check_stages(config: RunConfig) -> None:
    """Raise UserError if a stage of data.mixture begins when the run is over."""
    steps = config.train.max_steps
    limits = {"max_tokens": config.train.max_tokens, "max_steps": steps and steps * config.batch.tokens_per_step}
    known = {limit: key for key, limit in limits.items() if limit}
    start = stages(config.data.mixture)[-1][0] if config.data.mixture else 0
    if known and start >= min(known):
        raise UserError(
            f"data.mixture: a stage begins at {start:,} tokens, but the run ends after {min(known):,}"
            f" (train.{known[min(known)]}); train longer, or let it begin earlier."
        )


def _options(arguments: list[str], where: str) -> dict[str, str]:
    """Return {key: its text} of the options, which have one token each; --config is one."""
    found: dict[str, str] = {}
    for option in arguments:
        name, equals, text = option.partition("=")
        key = name.removeprefix("--")
        if not option.startswith("-") or option in _FLAGS:
            continue
        if key == name:
            raise UserError(f"{where}: {shortened(option)} is no option; options are --section.key VALUE.")
        if name in _FLAGS:
            raise UserError(f"{where}: {name} takes no value.")
        if key == "config" and key in found:
            both = f"{found[key]}, {text}"
            raise UserError(f"--config: named more than once ({both}); name one, and other values as options.")
        if not equals and key not in ("config", "dollars"):
            _check_key(key, where)
        if not equals:
            raise UserError(f"{where}: {name} needs a value.")
        found[key] = text
    return found


def _typed(key: str, text: str, where: str) -> Any:
    """Return the value of an option's text: as it stands for a key that takes any, else YAML."""
    kind = KEY_TYPES.get(key)
    parts = type_parts(kind)
    if typing.get_origin(parts[0]) is list and key != "data.mixture":
        return as_list(yaml_value(text, as_text=True, where=f"{where}: {key}"))
    if kind is not None and takes_text(kind):
        return None if text in ("null", "~") and type(None) in parts else text
    return yaml_value(text, where=f"{where}: {key}") if text.strip() else text


def _laid_over(below: Mapping[str, Any], layer: Mapping[str, Any], where: str) -> tuple[dict[str, Any], set[str]]:
    """Return what `laid_over` does, and say where those keys went that moved.

    where: the file or the command line. Raises UserError for a value that can't be set any more.
    """
    values, said, moved = laid_over(below, layer)
    for key in with_ema_decay(values).keys() & GONE.keys():
        raise UserError(f"{where}: {key} is gone; {GONE[key][1]}.")
    if moved:
        new = as_yaml({key.removeprefix("model."): value for key, value in moved.items()})
        _say_once(f"{where}: {join_words(moved)} moved; now model.overrides: {new}")
    return values, said


@functools.cache
def _say_once(line: str) -> None:
    if is_first_of_machine():
        logger.warning("%s", line)


def _minutes(dollars: str, price_per_hour: object) -> float:
    """Return the minutes that --dollars pays for."""
    value = yaml_value(dollars, where="--dollars")
    if not has_type(value, Positive):
        raise UserError(f"--dollars: {shortened(dollars)} is not allowed; allowed: a number above 0.")
    if price_per_hour is None:
        raise UserError("--dollars: the price is not known; add --run.price_per_hour, of the whole machine in dollars.")
    if not has_type(price_per_hour, Positive):
        price = shortened(price_per_hour)
        raise UserError(f"run.price_per_hour: {price} is not allowed with --dollars; allowed: a number above 0.")
    return 60 * value / price_per_hour


def base_for(stated: Mapping[str, Any]) -> ResolvedConfig:
    """Return what begins without a config: small, or finetune for weights that exist, without their examples.

    With train.distill_from, it is the config of the first of these runs, whose steps it repeats.

    stated: what a person states beside it. With train.max_minutes, the values of AUTOPILOT are open, unless it states
    a key of _MEASURED with another value: then one line says that the minutes choose nothing.
    Of finetune, the examples are its text, its model and the length of its sequences, for which the weights may be too
    short. Of small, they are its prompt, and its tokenizer, whose size depends on the text; a run that has another
    tokenizer keeps it. Of both, that they evaluate all of their small texts at the end.
    """
    teachers = as_list(stated.get(DISTILL_FROM))
    if teachers and has_type(teachers, KEY_TYPES[DISTILL_FROM]):
        return _like(teachers)
    starts_elsewhere = stated.get("model.init_from") is not None
    name = "finetune" if starts_elsewhere else "small"
    has_minutes = stated.get("train.max_minutes") is not None
    unknown = [
        key if isinstance(value, list) else f"{key} {value}"
        for key, known in _MEASURED.items()
        if (value := stated.get(key)) not in (None, *known)
    ]
    if has_minutes and unknown:
        why = f"shape and rates are not chosen with {join_words(unknown)}"
        _say_once(f"the minutes only limit this run: {why}, so they are those of {name}, or stated")
    of_weights = ("data.", "model.", "batch.sequence_length")
    examples = of_weights if starts_elsewhere else ("train.sample_prompt", "tokenizer.", "run.")
    shipped = load_config([f"--config={CONFIGS / name}.yaml"])
    sources = {key: name for key in shipped.sources if not key.startswith((*examples, "train.final_eval_tokens"))}
    if starts_elsewhere:
        return ResolvedConfig(shipped.config, sources)
    if has_minutes:
        del sources["train.max_steps"]
    open_keys = AUTOPILOT if has_minutes and not unknown else ["tokenizer.kind"]
    return ResolvedConfig(shipped.config, sources | dict.fromkeys(open_keys, "auto"))


def _like(teachers: Sequence[str]) -> ResolvedConfig:
    """Return the config of the first of some complete runs, for another one of as many steps and with another seed."""
    run = Path(os.path.expanduser(teachers[0]))
    try:
        steps = json.loads((run / "summary.json").read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{DISTILL_FROM}: {run} is not a complete run; name folders such as runs/small.") from None
    before = load_config([f"--config={run / 'config.yaml'}"])
    limits = [f"train.max_{name}" for name in ("steps", "tokens", "epochs", "minutes")]
    others = ("run.name", *limits, "train.resume", "hub.", DISTILL_FROM)
    kept = [key for key in before.sources if not key.startswith(others)]
    seed = before.config.run.seed + len(teachers)  # of a model that begins as its teacher did, less is new
    config = before.config.replace(train__max_steps=steps, run__seed=seed)
    return ResolvedConfig(config, dict.fromkeys([*kept, "run.seed", "train.max_steps"], DISTILL_FROM))


def as_resolved(config: ResolvedConfig | RunConfig | str | Path) -> ResolvedConfig:
    """Return what `load_config` returns, for it, for a RunConfig, or for the path or name of a config."""
    if isinstance(config, ResolvedConfig):
        return config
    if not isinstance(config, RunConfig | str | Path):
        raise UserError(f"config: {shortened(config)} is none; pass a RunConfig, or the path or name of a config.")
    if isinstance(config, RunConfig):  # with what its values imply, as those of a file do
        return load_config([], where="code", base=ResolvedConfig.from_code(config))
    return load_config(config)


def text_name(texts: Sequence[str]) -> str:
    """Return the name of a run on these texts: that of the first, without its ending, and not too long for run.name."""
    name = os.path.basename(os.path.abspath(texts[0]))  # "." is the folder of that name
    return name_of(re.sub(r"[^\w.-]+|^\W+", "_", name.partition(".")[0]) or "text")


def name_of(text: str, ending: str = "") -> str:
    """Return a name of a run that is not too long: a text, shortened if it must be, and an ending."""
    return text.encode()[: _MAX_NAME_BYTES - len(ending)].decode(errors="ignore") + ending


def _implied(
    below: Mapping[str, Any], stated: Mapping[str, Any], shipped: Mapping[str, Any]
) -> dict[str, tuple[Any, str]]:
    """Return {key: (what other values imply for it, their key, or auto)}. shipped: the keys of a shipped base."""
    implied: dict[str, tuple[Any, str]] = {}
    if (source := _implied_source(below, stated)) is not None:
        implied["data.source"] = source, "auto"
    where = stated if "tokenizer.name_or_path" in stated else below
    if where.get("tokenizer.name_or_path") and "tokenizer.kind" not in {**where, **stated}:
        implied["tokenizer.kind"] = "pretrained", "tokenizer.name_or_path"
    # a file's segments are for its random weights, which know nothing yet
    if stated.get("model.init_from") is not None and below.get("batch.segment_length"):
        implied["batch.segment_length"] = None, "model.init_from"
    if stated.get("data.order") == "sequential" and shipped.get("batch.segment_length"):
        implied["batch.segment_length"] = None, "data.order"
    return implied | {key: (value, "batch.sequence_length") for key, value in _fitting_batch(shipped, stated).items()}


def _implied_source(below: Mapping[str, Any], stated: Mapping[str, Any]) -> str | None:
    """Return the data.source of the key that names the text; None if it is stated. The nearer layer decides.

    Raises UserError if one layer names texts of two kinds.
    """
    for values in (stated, {key: value for key, value in below.items() if key not in stated}):
        named = [(key, source) for key, source in _NAMES_OF_TEXT.items() if values.get(key)]
        if "data.mixture" not in values and len(named) > 1 and "data.source" not in values:
            raise UserError(f"{named[0][0]} and {named[1][0]} both name the text; state one of them.")
        if "data.source" in values:
            return None
        if named:
            source = named[-1][1]
            return None if (source, below.get("data.source")) == ("files", "shards") else source
    return None


def _fitting_batch(shipped: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch for a stated sequence length that does not divide that of a shipped base. shipped: its keys."""
    length, fitting = stated.get("batch.sequence_length"), dict[str, Any]()
    if not isinstance(length, int) or length < 1:
        return fitting
    if (per_step := shipped.get("batch.tokens_per_step", 0)) % length:
        sequences = max(1, round(per_step / length))
        # a number that micro-batches divide
        fitting["batch.tokens_per_step"] = length * (8 * round(sequences / 8) if sequences > 4 else sequences)
    segment = shipped.get("batch.segment_length")
    if segment and segment < length and length % segment:
        fitting["batch.segment_length"] = None
    return {key: value for key, value in fitting.items() if key not in stated}


def _placeholders(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of AUTOPILOT's keys, until they are chosen, that go with those that are stated."""
    sizes = ("batch.sequence_length", "model.num_key_value_heads", "model.num_attention_heads")
    length, of_keys, of_queries = (stated[key] if isinstance(stated.get(key), int) else None for key in sizes)
    heads = of_queries or of_keys
    fitting = {
        "model.hidden_size": 64 * heads if heads else None,
        "model.num_attention_heads": of_keys or (1 if "model.hidden_size" in stated else None),
        "batch.tokens_per_step": length,
    }
    return {key: value for key, value in fitting.items() if value is not None and key not in stated}


def find_config(name: str) -> str:
    """Return the path of a config: `name` itself, or that of the shipped config with this name, such as small."""
    shipped = {file.stem: str(file) for file in CONFIGS.glob("*.yaml")}
    return name if os.path.isfile(name) else shipped.get(name, name)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a config file as {"section.key": value}. Raises UserError if it is missing or is not YAML with sections."""
    if not os.path.isfile(path):
        available = join_words(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        problem = f"{path} is a folder, not a file" if os.path.isdir(path) else f"there is no file {path}"
        raise UserError(f"--config: {problem}; name a file, or one that hfgolf has: {available}.")
    sections = load_yaml(path, f"--config: {path}") or {}
    if not isinstance(sections, dict):
        raise UserError(f"--config: {path} must hold sections ({join_words(SECTIONS)}).")
    flat: dict[str, Any] = {}
    for section, keys in sections.items():
        if section not in SECTIONS:
            if section in OTHER_NAMES and not isinstance(keys, dict):
                _check_key(str(section), str(path))
            raise UserError(f"{path}: unknown section {section}; did you mean {nearest(str(section), SECTIONS)}?")
        if not isinstance(keys, dict | None):
            raise UserError(
                f"{path}: {section}: {shortened(keys)} is not allowed; allowed: keys and values, as in"
                f" `{section}: {{key: value}}`."
            )
        flat |= {f"{section}.{key}": value for key, value in (keys or {}).items()}
    return flat


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return what `read_yaml` does, without keys that this version does not know and values of the wrong type."""
    values = in_current_names(read_yaml(path))
    return {key: value for key, value in values.items() if key in KEY_TYPES and has_type(value, KEY_TYPES[key])}


def one_token_per_option(arguments: Sequence[str]) -> list[str]:
    """Rewrite every option of a config as `--key=value`, and `--data.files a b` (an expanded glob) as one YAML list."""
    tokens: list[str] = []
    rest = list(arguments)
    while rest:
        key, equals, value = (argument := rest.pop(0)).partition("=")
        key = _SHORT.get(key, key)
        if argument == "--":  # what follows are texts
            return [*tokens, *(f"./{text}" if text.startswith("-") else text for text in rest)]
        if not is_option(argument):
            tokens.append(argument)
            continue
        values = [value] if equals else list(itertools.takewhile(lambda a: not a.startswith("--"), rest))
        is_list = typing.get_origin(type_parts(KEY_TYPES.get(key[2:]))[0]) is list
        if not equals:
            values = values if is_list else values[:1]
            del rest[: len(values)]
        is_yaml = len(values) == 1 and values[0].startswith("[") and not os.path.lexists(values[0])  # [draft].txt
        if is_list and values and not is_yaml:
            values = [as_yaml(values)]
        tokens.append("=".join([key, *values]))
    return tokens


def as_typed(lines: Sequence[Any], argv: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of an error, with the short options that the arguments have in the place of their keys."""
    typed = {argument.partition("=")[0] for argument in argv}
    for short, option in _SHORT.items():
        if short in typed:
            lines = [str(line).replace(option, short).replace(option[2:], short) for line in lines]
    return tuple(map(str, lines))


def is_option(argument: str) -> bool:
    """Return whether an argument is an option of a config: --section.key, --config, --dollars or one of _SHORT."""
    name = argument.partition("=")[0]
    return name in ("--config", "--dollars", *_SHORT) or (name.startswith("--") and "." in name)


def is_key(key: str) -> bool:
    """Return whether "section.key" can be set, also by its name in an earlier version or as model.overrides.NAME."""
    return key in KEY_TYPES or is_earlier(key) or key.startswith("model.overrides.")


def _check_key(key: str, where: str | None) -> None:
    if is_key(key):
        return
    last = key.split(".")[-1]
    if last in OTHER_NAMES:
        raise UserError(f"{where}: unknown key {key}; here: {OTHER_NAMES[last]}.")
    by_name = {known.split(".")[1]: known for known in reversed(KEY_TYPES)}
    is_typed = where == "the command line"  # else a file or Python, which have no such options
    by_name |= {short[2:]: short if is_typed else option[2:] for short, option in _SHORT.items()}
    section = nearest(key.split(".")[0], SECTIONS)
    section_keys = [known for known in KEY_TYPES if known.split(".")[0] == section]
    names, likeness = (section_keys, 0.7) if "." in key else (by_name, 0.8)
    similar = close_match(key, names, likeness) or close_match(last, names, likeness)
    meant = by_name.get(last) or (similar and by_name.get(similar, similar))
    advice = f"did you mean {meant}?" if meant else "docs/config.md has all keys, and --help."
    raise UserError(f"{where}: unknown key {key}; {advice}")


def _with_origin(error: UserError, sources: Mapping[str, str], path: str | None, where: str) -> UserError:
    """Return an error that also says where the value that it blames is from."""
    key = str(error).partition(": ")[0]
    origin = sources.get(key, "the defaults")
    if key in KEY_TYPES and origin in ("the defaults", "small", "finetune", "auto"):
        return UserError(f"{error} It is from {origin}.")
    is_of_one_key = isinstance(error.__cause__, ValidationError)
    return UserError(f"{path if origin == 'file' else where}: {error}") if is_of_one_key else error
