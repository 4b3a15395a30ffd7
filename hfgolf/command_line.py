"""From `--config file.yaml --section.key value` to a checked RunConfig, and from a user's mistake to one clear line.

Owns the parsing, the source of every value (default, file, command line, code, accelerate, auto) and the wrapper that
every script runs in. jsonargparse does the typing and `--help`; what it cannot do is here: naming the nearest key and
saying in one line what is allowed. Imports nothing heavy before it is needed.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import os
import re
import select
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import yaml

from hfgolf.config import RunConfig, join_words, shortened
from hfgolf.errors import UserError
from hfgolf.redact import redact, redact_values

SECTIONS: dict[str, type] = typing.get_type_hints(RunConfig)
KEY_TYPES: dict[str, Any] = {
    f"{section}.{key}": kind for section, cls in SECTIONS.items() for key, kind in typing.get_type_hints(cls).items()
}
_MAX_VALUES = 100_000  # in a config
# what YAML 1.1 reads as another number than is written: 010 is octal, 1:30 is base 60
_MISREAD = re.compile(r"[-+]?(0[0-7_]*[1-7][0-7_]*|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


@dataclass(frozen=True)
class ResolvedConfig:
    """A config and, for each "section.key", its source: default, file, command line, code, accelerate or auto."""

    config: RunConfig
    sources: dict[str, str]

    @classmethod
    def from_code(cls, config: RunConfig) -> ResolvedConfig:
        """Return a config that Python code built; what differs from the defaults is from there."""
        if config.run.name is None:
            config = config.replace(run__name="default")
        defaults = RunConfig().flat()
        return cls(config, {key: "code" for key, value in config.flat().items() if value != defaults[key]})

    def resolve(self, source: str, **values: Any) -> ResolvedConfig:
        """Return a copy in which each `section__key=value` was decided by `source`."""
        sources = self.sources | {name.replace("__", "."): source for name in values}
        return ResolvedConfig(self.config.replace(**values), sources)

    def to_yaml(self) -> str:
        """Return YAML that repeats the run when given as --config, without secrets; comments name the sources."""
        lines: list[str] = []
        for dotted, value in self.config.flat().items():
            section, key = dotted.split(".")
            if f"{section}:" not in lines:
                lines.append(f"{section}:")
            lines.append(f"  {key}: {as_yaml(redact_values(value))}  # {self.sources.get(dotted, 'default')}")
        return "\n".join(lines) + "\n"


def load_config(argv: Sequence[str] | None = None, description: str = "Train a GPT from text.") -> ResolvedConfig:
    """Parse `--config FILE --section.key value ...` into a checked config; the command line wins over the file.

    argv: the arguments, None takes the process's own. Raises UserError (one line) for a missing file, an unknown key,
    a value of the wrong type or out of range. `--help` and `--print_config` print and exit with status 0.
    """
    arguments = _one_token_an_option(list(sys.argv[1:] if argv is None else argv))
    stated = dict(a[2:].split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
    path = stated.pop("config", None)
    from_file = {} if path is None else read_yaml(path)
    from_command_line = {key.removesuffix("+"): value for key, value in stated.items() if key != "print_config"}
    for where, keys in ((path, from_file), ("the command line", from_command_line)):
        for key in keys:
            _check_key(key, where)
    for key, value in from_command_line.items():
        if ":" in value and {int, float} & set(_plain_types(KEY_TYPES[key])):  # 1:30 would be 90
            raise _not_allowed("the command line", key, value)
    parser = _build_parser(description)
    if path:  # what was read above, not the file once more
        arguments = [f"--config={as_yaml(_nested(from_file))}" if a.startswith("--config=") else a for a in arguments]
    try:
        sections = parser.parse_args(arguments)
    except (argparse.ArgumentError, argparse.ArgumentTypeError, RecursionError, TypeError, ValueError) as error:
        raise _explain(error, from_command_line, from_file, path) from None
    for key, value in from_file.items():  # jsonargparse lets a null pass for any type
        if value is None and type(None) not in typing.get_args(KEY_TYPES[key]):
            raise UserError(f"{path}: {key}: null is not allowed; allowed: {describe_type(KEY_TYPES[key])}.")
    config = RunConfig(**{name: cls(**vars(sections[name])) for name, cls in SECTIONS.items()})
    if config.run.name is None:
        config = config.replace(run__name=Path(path).stem if path else "default")
    return ResolvedConfig(config, dict.fromkeys(from_file, "file") | dict.fromkeys(from_command_line, "command line"))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a config file as {"section.key": value}; raises UserError if it is missing or not YAML in sections."""
    if not os.path.isfile(path):
        there = join_words(sorted(str(file) for file in Path("configs").glob("*.yaml")))
        kind = " but a folder" if os.path.isdir(path) else ""
        raise UserError(f"--config: there is no file {path}{kind}" + (f"; there are {there}." if there else "."))
    sections = load_yaml(path, f"--config: {path}") or {}
    if not isinstance(sections, dict):
        raise UserError(f"--config: {path} must hold sections ({join_words(SECTIONS)}).")
    flat: dict[str, Any] = {}
    for section, keys in sections.items():
        if section not in SECTIONS:
            raise UserError(f"{path}: unknown section {section}; did you mean {_nearest(str(section), SECTIONS)}?")
        if not isinstance(keys, dict | None):
            raise UserError(
                f"{path}: {section}: {shortened(keys)} is not allowed; allowed: keys, as `{section}: {{key: value}}`."
            )
        flat |= {f"{section}.{key}": value for key, value in (keys or {}).items()}
    # YAML 1.1 reads a bare `no` as false
    return {key: "no" if value is False and "no" in _choices(key) else value for key, value in flat.items()}


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return what `read_yaml` does, without keys of another version and values that their key can't have."""
    return {
        key: value for key, value in read_yaml(path).items() if key in KEY_TYPES and _has_type(value, KEY_TYPES[key])
    }


def load_yaml(path: str | Path, where: str, loader: type[Any] = yaml.SafeLoader) -> Any:
    """Return what a YAML file holds. where: what names it in an error line.

    Raises UserError for a file that cannot be read, is not YAML, says a key twice, grows without end by its aliases, or
    holds a number that YAML reads as another one.
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
    """Run a script's main(): a UserError becomes one line on stderr (from one process only) and exit status 2."""
    try:
        status = main()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):
                print(f"error: {redact(str(error))}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # `| head` has read enough
        if not is_lost(sys.stdout):
            raise
        status = 141  # as a program that SIGPIPE ends
    finally:
        for stream in (sys.stdout, sys.stderr):
            is_lost(stream)  # or Python, which flushes them at its end, would exit with 120
    sys.exit(status)


def is_lost(stream: TextIO | None) -> bool:
    """Say whether nobody reads a stream any more (a closed terminal, a pipe's end); it goes nowhere from then on."""
    if stream is None or not hasattr(select, "poll"):  # Windows
        return False
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # no file, as in a notebook
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # tells of errors alone
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return True


def one_line(error: object) -> str:
    """Return a message without line breaks and without its final full stop."""
    return " ".join(str(error).split()).rstrip(".")


def _has_type(value: object, kind: Any) -> bool:
    """Say whether a value as YAML reads it has a type of the config."""
    arguments = typing.get_args(kind)
    if kind in (int, float):
        return type(value) in (int, kind) and abs(typing.cast(float, value)) < 2**64
    if not arguments:
        return isinstance(value, kind)
    if typing.get_origin(kind) is Literal:
        return value in arguments
    if typing.get_origin(kind) in (list, tuple):
        return isinstance(value, list) and all(_has_type(item, arguments[0]) for item in value)
    return any(_has_type(value, argument) for argument in arguments)


def _check_nodes(node: yaml.Node | None, sizes: dict[int, float]) -> float:
    """Return the values below a node, each alias as often as it is used. sizes: those that are known, by id."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # until it is known: an alias to what holds it
        if isinstance(node, yaml.ScalarNode):
            _check_number(node)
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        keys = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                line = pairs[number][0].start_mark.line + 1
                raise yaml.YAMLError(f"{key} is there twice, the second time in line {line}")
        inner = [*sum(pairs, ())] if pairs else node.value if isinstance(node, yaml.SequenceNode) else []
        sizes[id(node)] = 1 + sum(_check_nodes(value, sizes) for value in inner)
        if sizes[id(node)] > _MAX_VALUES:
            raise yaml.YAMLError(f"its aliases make more than {_MAX_VALUES:,} values")
    return sizes[id(node)]


def _check_number(node: yaml.ScalarNode) -> None:
    """Raise UserError if YAML 1.1 reads a number as another one than is written. BaseLoader reads none at all."""
    text = node.value
    if not node.tag.endswith((":int", ":float")) or not _MISREAD.fullmatch(text):
        return
    value = yaml.safe_load(text)
    if ":" in text or value != int(text.replace("_", "")):  # 007 is 7 either way
        line = node.start_mark.line + 1
        raise UserError(f"line {line}: YAML reads {text} as {value}; write {value} if you mean that; quote a text.")


def _build_parser(description: str) -> Any:
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file with the sections below, as configs/small.yaml.")
    for section, cls in SECTIONS.items():
        parser.add_class_arguments(cls, section)
    return parser


def _one_token_an_option(arguments: list[str]) -> list[str]:
    """Write every option as `--key=value`, and `--data.files a b` (what a shell makes of a glob) as one YAML list."""
    tokens: list[str] = []
    while arguments:
        key, equals, value = arguments.pop(0).partition("=")
        values = [value] if equals else list(itertools.takewhile(lambda a: not a.startswith("--"), arguments))
        is_list = typing.get_origin(KEY_TYPES.get(key[2:])) is list
        if not equals and key.startswith("--"):
            values = values if is_list else values[:1]
            del arguments[: len(values)]
        elif not equals:
            values = []
        if is_list and (len(values) != 1 or not values[0].startswith("[")):
            values = [as_yaml(values)]
        tokens.append("=".join([key, *values]))
    return tokens


def _check_key(key: str, where: str | None) -> None:
    if key in KEY_TYPES:
        return
    same_name = [known for known in KEY_TYPES if known.split(".")[1] == key.split(".")[-1]]
    section = _nearest(key.split(".")[0], SECTIONS)
    of_section = [known for known in KEY_TYPES if known.split(".")[0] == section]
    raise UserError(
        f"{where}: unknown key {key}; did you mean {same_name[0] if same_name else _nearest(key, of_section)}?"
    )


def _nearest(word: str, words: Iterable[str]) -> str:
    return difflib.get_close_matches(word, words, n=1, cutoff=0.0)[0]


def _choices(key: str) -> tuple[Any, ...]:
    """Return the literal values a key may take, those of a union's members included."""
    kind = KEY_TYPES.get(key)
    return tuple(typing.get_args(kind)) + tuple(itertools.chain(*map(typing.get_args, typing.get_args(kind))))


def _nested(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        nested.setdefault(key.split(".")[0], {})[key.split(".")[1]] = value
    return nested


def _explain(
    error: Exception, from_command_line: dict[str, str], from_file: dict[str, Any], path: str | None
) -> UserError:
    """Turn jsonargparse's message into one line: where, key, value, what is allowed."""
    if isinstance(error, RecursionError):
        return UserError("the command line: a value is nested too deeply.")
    match = re.search(r'key "([\w.]+)"', str(error))
    if not match or match[1] not in KEY_TYPES:
        return UserError(f"{one_line(error)}.")
    key = match[1]
    where = "the command line" if key in from_command_line else path
    value = from_command_line.get(key, from_file.get(key))
    return _not_allowed(where, key, value)


def _not_allowed(where: str | None, key: str, value: object) -> UserError:
    return UserError(f"{where}: {key}: {shortened(value)} is not allowed; allowed: {describe_type(KEY_TYPES[key])}.")


def _plain_types(kind: Any) -> list[Any]:
    """Return the types that a type of the config is made of: int of `int | None`, float of a tuple of floats."""
    arguments = typing.get_args(kind)
    return [kind] if not arguments else [inner for argument in arguments for inner in _plain_types(argument)]


def describe_type(kind: Any) -> str:
    """Describe a type as a person would say it."""
    plain: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if kind in plain:
        return plain[kind]
    if kind is type(None):
        return "null"
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return join_words((as_yaml(argument).strip("'") for argument in arguments), last=" or ")
    if typing.get_origin(kind) is list:
        return f"a list, each {describe_type(arguments[0])}"
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(arguments)}, each {describe_type(arguments[0])}"
    return " or ".join(describe_type(argument) for argument in arguments)


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
