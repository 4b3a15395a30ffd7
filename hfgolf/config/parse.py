"""Parse `--config file.yaml --section.key value` into a checked RunConfig; turn a user's mistake into one clear line.

Owns the parsing, the source of every value (default, file, command line, code, accelerate, auto) and the wrapper that
runs every script. jsonargparse converts the types and prints `--help`. This module adds what it lacks: naming the
nearest key, and saying in one line what is allowed. Imports nothing heavy before it is needed.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import logging
import math
import os
import re
import select
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import yaml

from hfgolf.config.other_names import (
    GONE,
    OTHER_NAMES,
    by_current_names,
    in_current_names,
    is_earlier,
    key_for,
    with_ema_decay,
    with_overrides,
)
from hfgolf.config.sections import RunConfig
from hfgolf.system.errors import UserError, explained
from hfgolf.system.redact import redact, redact_values
from hfgolf.system.wording import close_match, join_words, nearest, one_line, shortened

logger = logging.getLogger(__name__)

SECTIONS: dict[str, type] = typing.get_type_hints(RunConfig)
KEY_TYPES: dict[str, Any] = {
    f"{section}.{key}": kind for section, cls in SECTIONS.items() for key, kind in typing.get_type_hints(cls).items()
}
CONFIGS = Path(__file__).parents[1] / "configs"
CONFIGS = CONFIGS if CONFIGS.is_dir() else CONFIGS.parents[1] / "configs"  # beside the package in a checkout
_MAX_VALUES = 100_000  # in one config, with aliases expanded
# Numbers that YAML 1.1 reads differently than a person does: 010 is octal, 1:30 is base 60.
_MISREAD = re.compile(r"[-+]?(0[0-7_]*[1-7][0-7_]*|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")  # one that YAML 1.1 reads as text, 1e-5


@dataclass(frozen=True)
class ResolvedConfig:
    """A config and, for each "section.key", its source: default, file, command line, code, accelerate or auto."""

    config: RunConfig
    sources: dict[str, str]

    @classmethod
    def from_code(cls, config: RunConfig) -> ResolvedConfig:
        """Wrap a config that Python code built; every value that differs from its default has the source "code"."""
        if config.run.name is None:
            config = config.replace(run__name="default")
        defaults = RunConfig().flat()
        stated = {key: "code" for key, value in config.flat().items() if value != defaults[key]}
        return cls(config, stated).with_low_memory()

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
    description: str = "Train a GPT from text.",
    where: str = "the command line",
    base: ResolvedConfig | None = None,
    needs_limit: bool = True,
    values: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Parse `[TEXT ...] --config FILE --section.key value ...` into a checked config.

    The arguments win over the file, in whatever order they come, and the file wins over `base`. Of a key stated twice,
    the last value counts. `--model.overrides.NAME value` sets one field and leaves the others. Texts (files, folders,
    globs, URLs) are data.files; with neither a config nor a base, they begin with `shipped_base`.

    argv: the arguments, or the path or name of a config; None: the arguments of the process. `--help` and
    `--print_config` print and exit with status 0. where: what error messages call the arguments. needs_limit: whether
    the run must end by itself. values: {"section.key": value}, which win over the file like the arguments.
    Raises UserError (one line) for a missing file, an unknown key, or a value of the wrong type or out of range.
    """
    argv = [f"--config={argv}"] if isinstance(argv, str | Path) else argv
    arguments = _one_token_per_option(sys.argv[1:] if argv is None else argv)
    texts = [argument for argument in arguments if not argument.startswith("-")]
    path, options = _take_config([argument for argument in arguments if argument.startswith("-")])
    objects = _with_lists({key: _plain(value) for key, value in (values or {}).items()})
    if texts:
        if "data.files" in objects or any(option.startswith("--data.files=") for option in options):
            raise UserError(f"{texts[0]}: data.files names the text already; name all of it there.")
        options.insert(0, f"--data.files={as_yaml(texts)}")
    pairs = [option[2:].split("=", 1) for option in options if option.startswith("--") and "=" in option]
    texts_of_objects = {key: text for key, text in pairs if key.startswith("model.overrides") or is_earlier(key)}
    options = [option for option in options if option[2:].split("=")[0] not in texts_of_objects]
    objects |= {key: _yaml_value(text, f"{where}: {key}") for key, text in texts_of_objects.items()}
    stated = objects | {key.removesuffix("+"): value for key, value in pairs if key not in objects}
    stated.pop("print_config", None)
    for key in stated:
        _check_key(key, where)
    if texts and base is None and path is None:
        base = shipped_base(_starts_elsewhere(stated))
    below, sources = ({}, {}) if base is None else (base.stated(), base.sources)
    if base and texts:
        below["run.name"] = text_name(texts)
    if path is not None:
        from_file = read_yaml(path)
        for key in from_file:
            _check_key(key, path)
        from_file = _by_current_names(from_file, path, below)
        below, sources = with_overrides(from_file, below), sources | dict.fromkeys(map(key_for, from_file), "file")
    below = {key: value for key, value in below.items() if key not in stated.keys() & GONE.keys()}
    stated = _by_current_names(stated, where, below)
    objects = {key: value for key, value in stated.items() if key in objects or key not in KEY_TYPES}
    implied = _implied(below, stated)
    below = ({} if needs_limit else {"train.max_steps": RunConfig().train.max_steps}) | below | implied
    for key, value in stated.items():
        # YAML 1.1 reads 1:30 as 90
        if isinstance(value, str) and ":" in value and {int, float} & set(_parts(KEY_TYPES.get(key))):
            raise _not_allowed(where, key, value)
    parser = _build_parser(description, Path(sys.argv[0]).name)
    try:
        objects = _with_numbers(with_overrides(objects, below))
        tokens_per_step = str(stated.get("batch.tokens_per_step", objects.get("batch.tokens_per_step", 4096)))
        objects = _with_ema_decay(objects, int(tokens_per_step) if tokens_per_step.isdigit() else 1)
        sections = parser.parse_args(options, namespace=parser.parse_object(_nested(objects), defaults=False))
    except (argparse.ArgumentError, argparse.ArgumentTypeError, RecursionError, TypeError, ValueError) as error:
        raise _explain(error, stated, below, path, where) from None
    for key, value in objects.items():  # jsonargparse accepts null for any type
        if value is None and type(None) not in typing.get_args(KEY_TYPES[key]):
            raise _not_allowed(where if key in stated else path, key, None)
    sources |= dict.fromkeys(implied, "auto") | dict.fromkeys(map(key_for, stated), where.removeprefix("the "))
    try:
        config = RunConfig(**{name: cls(**vars(sections[name])) for name, cls in SECTIONS.items()})
    except UserError as error:
        raise _with_origin(error, sources) from None
    if config.run.name is None:
        config = config.replace(run__name=Path(path).stem if path else "default")
    return ResolvedConfig(config, sources).with_low_memory()


def _by_current_names(values: Mapping[str, Any], where: str, below: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by the keys of this version, and say where those went that moved.

    where: the file or the command line. below: the values that these win over. Raises UserError for a value that can't
    be set any more.
    """
    current = by_current_names(values, below.get("model.overrides", ()))
    for key in with_ema_decay(current, 1).keys() & GONE.keys():
        raise UserError(f"{where}: {key} is gone; {GONE[key][1]}.")
    moved = {key.removeprefix("model.overrides."): _number(current[key]) for key in current if key not in values}
    if moved:
        names = join_words(f"model.{name}" for name in moved)
        _say_once(f"{where}: {names} moved; now model.overrides: {as_yaml(moved)}")
    return current


def _with_ema_decay(values: dict[str, Any], tokens_per_step: int) -> dict[str, Any]:
    current = with_ema_decay(values, tokens_per_step)
    for key in values.keys() - current.keys():
        _say_once(f"{key} {values[key]} is now optim.ema_decay {current['optim.ema_decay']}")
    return current


@functools.cache
def _say_once(line: str) -> None:
    if _is_first_of_machine():
        logger.warning("%s", line)


def _yaml_value(text: str, where: str) -> Any:
    """Return what YAML makes of an option's text."""
    try:
        _check_nodes(yaml.compose(text, yaml.SafeLoader), {})
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {shortened(text)} is not YAML ({one_line(error)[:100]}).") from None


def _with_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with numbers such as 1e-5 in model.overrides, whose types only the architecture knows."""
    return {key: _number(value) if key == "model.overrides" else value for key, value in values.items()}


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_number(item) for item in value]
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def _take_config(options: list[str]) -> tuple[str | None, list[str]]:
    """Return the path of the config that the options name, if any, and the other options."""
    named = [option.removeprefix("--config=") for option in options if option.startswith("--config=")]
    if len(named) > 1:
        raise UserError(f"--config: named more than once ({join_words(named)}); name one, and other values as options.")
    return (find_config(named[0]) if named else None), [o for o in options if not o.startswith("--config=")]


def shipped_base(starts_elsewhere: bool) -> ResolvedConfig:
    """Return what begins without a config: small, or finetune for weights that exist, without their examples.

    Of finetune, these are its text, its model and the length of its sequences, for which the weights may be too short.
    Of small, its prompt and its tokenizer, whose size depends on the text; a run that has another tokenizer keeps it.
    """
    name = "finetune" if starts_elsewhere else "small"
    of_weights = ("data.", "model.", "batch.sequence_length")
    examples = of_weights if starts_elsewhere else ("train.sample_prompt", "tokenizer.", "run.")
    shipped = load_config([f"--config={CONFIGS / name}.yaml"])
    sources = {key: name for key in shipped.sources if not key.startswith(examples)}
    return ResolvedConfig(shipped.config, sources | ({} if starts_elsewhere else {"tokenizer.kind": "auto"}))


def as_resolved(config: ResolvedConfig | RunConfig | str | Path) -> ResolvedConfig:
    """Return what `load_config` returns, for it, for a RunConfig, or for the path or name of a config."""
    if isinstance(config, ResolvedConfig):
        return config
    return ResolvedConfig.from_code(config) if isinstance(config, RunConfig) else load_config(config)


def text_name(texts: Sequence[str]) -> str:
    """Return the name of a run on these texts: that of the first, without its ending."""
    return re.sub(r"[^\w.-]+|^\W+", "_", Path(texts[0]).name.partition(".")[0]) or "text"


def _implied(below: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """Return what other values imply: data.source files for data.files, and no segments for weights that exist."""
    implied: dict[str, Any] = {}
    where: Mapping[str, Any] = next((values for values in (stated, below) if "data.files" in values), {})
    has_files = where.get("data.files", "[]") not in ("[]", [], None)
    is_stated = "data.source" in {**where, **stated} or below.get("data.source") in ("files", "shards")
    if has_files and not is_stated:
        implied["data.source"] = "files"
    # a file's segments are for its random weights, which know nothing yet
    if _starts_elsewhere(stated) and below.get("batch.segment_length") and "batch.segment_length" not in stated:
        implied["batch.segment_length"] = None
    return implied


def _starts_elsewhere(stated: Mapping[str, Any]) -> bool:
    """Return whether the command line names weights that exist."""
    return stated.get("model.init_from") not in (None, "null", "~")


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
    # YAML 1.1 reads an unquoted `no` as false
    return _with_lists(
        {key: "no" if value is False and "no" in _parts(KEY_TYPES.get(key)) else value for key, value in flat.items()}
    )


def _with_lists(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the values with each text alone, where a list of texts is wanted, as a list of one."""
    return {
        key: [value] if isinstance(value, str) and KEY_TYPES.get(key) == list[str] else value
        for key, value in flat.items()
    }


def _plain(value: Any) -> Any:
    """Return a value of Python code as YAML has it: paths as text, tuples as lists, numpy's numbers as Python's."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_number = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_number else value


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return what `read_yaml` does, without keys that this version does not know and values of the wrong type."""
    return {
        key: value
        for key, value in _with_numbers(in_current_names(read_yaml(path))).items()
        if key in KEY_TYPES and has_type(value, KEY_TYPES[key], 2**64)
    }


def load_yaml(path: str | Path, where: str, loader: type[Any] = yaml.SafeLoader) -> Any:
    """Return the content of a YAML file. where: the file's name in error messages.

    Raises UserError if the file cannot be read, is not YAML, repeats a key, expands without end through its aliases, or
    holds a number that YAML reads as a different one.
    """
    try:
        document = loader(Path(path).read_text(encoding="utf-8"))
        node = document.get_single_node()
        _check_nodes(node, {})
        return None if node is None else document.construct_document(node)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except OSError as error:
        raise UserError(f"{where} cannot be read ({error.strerror}).") from None
    except RecursionError:
        raise UserError(f"{where} is not a config: it is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, a 13th month, 5,000 digits
        raise UserError(f"{where} is not YAML: {one_line(error)}.") from None


def run_command(main: Callable[[], int | None]) -> None:
    """Run a script's main(). A UserError becomes one line on stderr, once per machine, and exit status 2.

    So does any error behind which is something that the machine refuses, such as space on a disk.
    """
    # before torch is imported: when a process is gone, its store writes 30 lines of C++ frames for each call
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a sample holds any character, an old locale's terminal does not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _require_readable(sys.argv)
        status = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        status = _say(error)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        if not silence_if_closed(sys.stdout):
            raise
        status = 141  # 128 + SIGPIPE
    except OSError as error:
        if error.filename is None and (reason := _refusal_of(sys.stdout)):
            with suppress(OSError):
                print(f"error: the output could not be written: {reason}.", file=sys.stderr)
            status = 1
        else:
            status = _say(explained(error) or error)
    except Exception as error:
        status = _say(explained(error) or error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if not silence_if_closed(stream):  # else Python's flush at exit fails, and the status becomes 120
                _refusal_of(stream, "")
    sys.exit(status)


def _require_readable(words: list[str]) -> None:
    if sys.getfilesystemencoding() != "utf-8" and (odd := next((w for w in words if not w.isprintable()), None)):
        raise UserError(f"the command line: this locale has no characters for {odd!r}; set LC_ALL=C.UTF-8.")


def _say(error: Exception) -> int:
    """Print a UserError, unless the first process of this machine does, and return the exit status; else raise it."""
    if not isinstance(error, UserError):
        raise error
    if _is_first_of_machine() or error.by_any_rank:  # ranks.py tells the first of the others' errors
        with suppress(OSError):
            print(error.shown(redact), file=sys.stderr)
    return 2


def _is_first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def _refusal_of(stream: TextIO | None, text: str = "\n") -> str | None:
    """Return why a stream takes no text, and redirect it to nowhere; None if it takes some."""
    if stream is None or stream.closed:
        return None
    try:
        print(end=text, file=stream, flush=True)
    except OSError as error:
        _silence(stream.fileno())
        return error.strerror
    return None


def silence_if_closed(stream: TextIO | None) -> bool:
    """Redirect a stream to nowhere if its reader is gone (closed terminal, broken pipe); return whether it was."""
    if stream is None or not hasattr(select, "poll"):  # Windows has no poll
        return False
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file, as in a notebook
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # report only errors and hang-ups
    if not poll.poll(0):
        return False
    _silence(descriptor)
    return True


def _silence(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def has_type(value: Any, kind: Any, largest: float = math.inf) -> bool:
    """Return whether a value read from YAML or JSON fits a type annotation, with numbers up to `largest`."""
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if kind is Any or origin is Literal:
        return kind is Any or value in arguments
    if kind in (int, float):
        return type(value) in (int, kind) and abs(value) <= largest
    if origin in (list, tuple):
        return isinstance(value, list) and all(has_type(item, arguments[0], largest) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(has_type(item, arguments[1], largest) for item in value.values())
    return any(has_type(value, argument, largest) for argument in arguments) if arguments else type(value) is kind


def _check_nodes(node: yaml.Node | None, sizes: dict[int, float]) -> float:
    """Return the number of values below a node, counting every use of an alias. sizes: the known numbers, by id."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # until it is known: an alias to its own parent is endless
        if isinstance(node, yaml.ScalarNode):
            _check_number(node)
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        keys = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                line = pairs[number][0].start_mark.line + 1
                raise yaml.YAMLError(f"{key} appears twice, the second time in line {line}")
        inner = [*sum(pairs, ())] if pairs else node.value if isinstance(node, yaml.SequenceNode) else []
        sizes[id(node)] = 1 + sum(_check_nodes(value, sizes) for value in inner)
        if sizes[id(node)] > _MAX_VALUES:
            raise yaml.YAMLError(f"its aliases expand to more than {_MAX_VALUES:,} values")
    return sizes[id(node)]


def _check_number(node: yaml.ScalarNode) -> None:
    """Raise UserError if YAML 1.1 reads a number as a different one. BaseLoader resolves no numbers, so it passes."""
    text = node.value
    if not node.tag.endswith((":int", ":float")) or not _MISREAD.fullmatch(text):
        return
    value = yaml.safe_load(text)
    if ":" in text or value != int(text.replace("_", "")):  # octal 007 is 7, too
        line = node.start_mark.line + 1
        raise UserError(
            f"line {line}: YAML reads {text} as {value}; write {value} if you mean that, or put text in quotes."
        )


@functools.cache  # it takes 0.1 s to read the docstrings of all keys
def _build_parser(description: str, program: str) -> Any:
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(program, description=description, exit_on_error=False)
    parser.add_argument(
        "--config", action="config", help="YAML file with the sections below, or the name of one of hfgolf's: small."
    )
    for section, cls in SECTIONS.items():
        parser.add_class_arguments(cls, section)
    return parser


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options `--section.key`, one token each, and the other arguments.

    For scripts that also take paths: argparse would take the value of an option that it does not know for a path.
    """
    others: list[str] = []
    return _one_token_per_option(arguments, others), others


def _one_token_per_option(arguments: Sequence[str], others: list[str] | None = None) -> list[str]:
    """Rewrite every option as `--key=value`, and `--data.files a b` (an expanded glob) as one YAML list.

    others: takes the arguments that are no options `--section.key`; None: they stay.
    """
    tokens: list[str] = []
    arguments = list(arguments)
    while arguments:
        key, equals, value = (argument := arguments.pop(0)).partition("=")
        if argument == "--" and others is None:  # what follows are texts
            return [*tokens, *(f"./{text}" if text.startswith("-") else text for text in arguments)]
        if others is not None and not (key.startswith("--") and "." in key):
            others.append(argument)
            continue
        values = [value] if equals else list(itertools.takewhile(lambda a: not a.startswith("--"), arguments))
        is_list = typing.get_origin(KEY_TYPES.get(key[2:].removesuffix("+"))) is list
        if not equals and key.startswith("--"):
            values = values if is_list else values[:1]
            del arguments[: len(values)]
        elif not equals:
            values = []
        is_yaml = len(values) == 1 and values[0].startswith("[") and not os.path.lexists(values[0])  # [draft].txt
        if is_list and values and not is_yaml:
            values = [as_yaml(values)]
        tokens.append("=".join([key, *values]))
    return tokens


def is_key(key: str) -> bool:
    """Return whether "section.key" can be set, also by its name in an earlier version or as model.overrides.NAME."""
    return key in KEY_TYPES or is_earlier(key) or key.startswith("model.overrides.")


def _check_key(key: str, where: str | None) -> None:
    if is_key(key):
        return
    last = key.split(".")[-1]
    if last in OTHER_NAMES:
        raise UserError(f"{where}: unknown key {key}; here: {OTHER_NAMES[last]}.")
    same_name = [known for known in KEY_TYPES if known.split(".")[1] == last]
    section = nearest(key.split(".")[0], SECTIONS)
    section_keys = [known for known in KEY_TYPES if known.split(".")[0] == section]
    meant = same_name[0] if same_name else close_match(key, section_keys) or close_match(last, section_keys)
    advice = f"did you mean {meant}?" if meant else "docs/config.md has all keys, and --help."
    raise UserError(f"{where}: unknown key {key}; {advice}")


def _nested(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        nested.setdefault(key.split(".")[0], {})[key.split(".")[1]] = value
    return nested


def _explain(
    error: Exception, from_command_line: dict[str, Any], from_file: dict[str, Any], path: str | None, where: str
) -> UserError:
    """Turn jsonargparse's message into one line: where, which key, which value, what is allowed."""
    if isinstance(error, RecursionError):
        return UserError(f"{where}: a value is nested too deeply.")
    match = re.search(r'key "([\w.]+)"', str(error))
    if not match or match[1] not in KEY_TYPES:
        return UserError(f"{one_line(error)}.")
    key = match[1]
    value = from_command_line.get(key, from_file.get(key))
    return _not_allowed(where if key in from_command_line else path, key, value)


def _with_origin(error: UserError, sources: dict[str, str]) -> UserError:
    """Return an error that also says where the value that it blames is from, if nobody wrote it."""
    key = str(error).partition(": ")[0]
    origin = sources.get(key, "the defaults")
    is_written = key not in KEY_TYPES or origin not in ("the defaults", "small", "finetune", "auto")
    return error if is_written else UserError(f"{error} It is from {origin}.")


def _not_allowed(where: str | None, key: str, value: object) -> UserError:
    shown = "null" if value is None else " ".join(shortened(value).split())
    return UserError(f"{where}: {key}: {shown} is not allowed; allowed: {describe_type(KEY_TYPES[key])}.")


def _parts(kind: Any) -> list[Any]:
    """Return the types and literal values in a config type: int and "auto" in `int | Literal["auto"]`."""
    arguments = typing.get_args(kind)
    return [kind] if not arguments else [part for argument in arguments for part in _parts(argument)]


def describe_type(kind: Any) -> str:
    """Describe a config type in words."""
    plain: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if kind in plain:
        return plain[kind]
    if kind is type(None):
        return "null"
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return join_words((as_yaml(argument).strip("'") for argument in arguments), last=" or ")
    if typing.get_origin(kind) is list:
        return f"a list, each {describe_type(arguments[0])}"
    if typing.get_origin(kind) is dict:
        return "a mapping"
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(arguments)}, each {describe_type(arguments[0])}"
    return " or ".join(describe_type(argument) for argument in arguments)


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    value = list(value) if isinstance(value, tuple) else value
    dumped: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6)
    return dumped.removesuffix("...\n").strip()


class _Dumper(yaml.SafeDumper):
    """Quotes a text such as 1e3, too, which jsonargparse reads as a number."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
