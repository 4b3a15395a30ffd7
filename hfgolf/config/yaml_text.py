"""Read and write YAML 1.2: files and single values, with one line for what is wrong. Knows no key of a config.

Refuses repeated keys, aliases that expand without end, and more than one document.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import Node, ScalarNode

from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line, shortened

_MAX_VALUES = 100_000  # in one document, with aliases expanded


class _Constructor(SafeConstructor):
    """Makes what YAML 1.2 knows: 2026-01-31 is text, such as the name of a run."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def load_yaml(path: str | Path, where: str, as_text: bool = False) -> Any:
    """Return the content of a YAML file. where: the file's name in error messages. as_text: keep every scalar as text.

    Raises UserError if the file cannot be read, is not YAML, repeats a key, or expands without end through its aliases.
    """
    try:
        return _construct(Path(path).read_text(encoding="utf-8"), as_text)
    except OSError as error:
        raise UserError(f"{where} cannot be read ({error.strerror}).") from None
    except RecursionError:
        raise UserError(f"{where} is not a config: it is nested too deeply.") from None
    except (YAMLError, ValueError) as error:  # ValueError: not UTF-8, 5,000 digits
        raise UserError(f"{where} is not YAML: {_problem(error)}.") from None


def yaml_value(text: str, as_text: bool = False, where: str | None = None) -> Any:
    """Return what YAML makes of a text, or the text itself if it is not YAML.

    where: the option. Raises UserError, if it is given, for a list or a mapping that is not YAML.
    """
    try:
        return _construct(text, as_text)
    except (YAMLError, RecursionError, ValueError) as error:  # ValueError: 5,000 digits
        if where and text.lstrip().startswith(("[", "{")):
            raise UserError(f"{where} {shortened(text)} is not YAML ({_problem(error)}).") from None
        return text


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line, which readers of YAML 1.1 and 1.2 take for the same."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version, yaml.default_flow_style, yaml.width = (1, 1), True, 10**6
    stream = io.StringIO()
    yaml.dump(value, stream)
    if "0o" in stream.getvalue():  # octal in YAML 1.2 only, so it has no quotes; JSON is YAML, too
        return json.dumps(value, ensure_ascii=False)
    return stream.getvalue().partition("\n--- ")[2].removesuffix("...\n").strip()


def _construct(text: str, as_text: bool) -> Any:
    yaml = YAML(typ="base" if as_text else "safe", pure=True)
    if not as_text:
        yaml.Constructor = _Constructor
    node = yaml.compose(text)
    if node is None:
        return None
    _count(node, {})
    return yaml.constructor.construct_document(node)


def _problem(error: Exception) -> str:
    """Return what is wrong, with its line, in one line."""
    mark = getattr(error, "problem_mark", None)
    context, problem = getattr(error, "context", None), getattr(error, "problem", None)
    if isinstance(error, DuplicateKeyError):  # whose problem also shows both values, which are not made yet
        problem, context = str(problem).partition(" with value ")[0], None
    problem = one_line(f"{context or ''} {problem}" if problem else error)
    problem = problem if len(problem) <= 200 else f"{problem[:200]}..."
    return problem if mark is None else f"line {mark.line + 1}: {problem}"


def _count(node: Node, sizes: dict[int, float]) -> float:
    """Return the number of values below a node, counting every use of an alias. sizes: the known numbers, by id."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # until it is known: an alias to its own parent is endless
        inner = [] if isinstance(node, ScalarNode) else node.value
        values = [value for item in inner for value in (item if isinstance(item, tuple) else [item])]
        sizes[id(node)] = 1 + sum(_count(value, sizes) for value in values)
        if sizes[id(node)] > _MAX_VALUES:
            raise YAMLError(f"its aliases expand to more than {_MAX_VALUES:,} values")
    return sizes[id(node)]
