"""score.py: the program that scores an artifact, in one small file that needs torch and numpy only.

Assembled from the real sources: from program.py, and whatever it uses of the files in SOURCES. Owns assembling,
shrinking and packing. Does not know artifacts or scores.
"""

from __future__ import annotations

import ast
import base64
import lzma
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hfgolf.golf.minify import Bare, defined, drop_unused_methods, indented_by_one, rename, specialized
from hfgolf.model.configuration_golf import GolfConfig

MAX_BYTES = 12_000
"""What score.py may take; a test holds it."""
SOURCES = (
    "evaluate/windows.py",
    "golf/grid.py",
    "golf/decoder.py",
    "model/layers_golf.py",
    "golf/program.py",
)
_ENTRY = "main"
_KEPT_NAMES = (_ENTRY, "load_model")
_DROPOUT = "apply_dropout"
_VECTOR = "_vector"  # layers_golf.py: a parameter, or None if its first argument is false
_NO_DROPOUT = ("dropout", "attention_dropout")


def config_differences(config: GolfConfig) -> dict[str, Any]:
    """Return the fields of a config that differ from the defaults and change the logits: what an artifact holds."""
    return {name: getattr(config, name) for name, value in defaults().items() if getattr(config, name) != value}


def packed_script(config: GolfConfig) -> bytes:
    """Return score.py for models with a config: two lines of ASCII that unpack the program and run it.

    What the config makes constant is: its values, and without the branches that they never take.
    """
    return _packed(tuple((name, repr(getattr(config, name))) for name in defaults()))


@lru_cache(maxsize=8)
def _packed(values: tuple[tuple[str, str], ...]) -> bytes:
    statements = assemble({name: ast.literal_eval(value) for name, value in values})
    rename(statements, _KEPT_NAMES)
    source = indented_by_one(ast.unparse(ast.fix_missing_locations(ast.Module(statements, []))))
    content = f"{source}if __name__=='__main__':{_ENTRY}({{}})\n".encode()
    filters = [
        {"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": lc, "lp": lp, "pb": pb}
        for lc in range(5)
        for lp in range(5 - lc)
        for pb in range(3)
    ]
    packed = min((lzma.compress(content, lzma.FORMAT_ALONE, filters=[each]) for each in filters), key=len)
    # base85 survives any editor that keeps lines
    return b'import lzma,base64\nexec(lzma.decompress(base64.b85decode("%b")))\n' % base64.b85encode(packed)


def assemble(values: Mapping[str, Any]) -> list[ast.stmt]:
    """Return one module with `main` and everything that it uses, from SOURCES, for a config with these values.

    Raises ValueError if two sources give different things one name, or if a source renames what it imports.
    """
    statements = specialized(_statements(), {**dict.fromkeys(_NO_DROPOUT, 0.0), **values}, (_VECTOR,))
    drop_unused_methods(statements, ("forward",))
    imports = [each for each in statements if isinstance(each, ast.Import | ast.ImportFrom)]
    definitions: dict[str, ast.stmt] = {}
    for statement in statements:
        for name in defined(statement):
            if name in definitions:
                raise ValueError(f"two sources of score.py define {name}: rename one")
            definitions[name] = statement
    needed, waiting = {_ENTRY}, [_ENTRY]
    while waiting:
        used = set(_names(definitions[waiting.pop()])) & definitions.keys() - needed
        needed |= used
        waiting += used
    kept = [each for each in statements if needed & set(defined(each))]
    used = {name for statement in kept for name in _names(statement)}
    found: dict[str, ast.stmt] = {}  # imports from outside hfgolf, each once
    for statement in imports:
        module = getattr(statement, "module", "")
        for alias in statement.names:
            if module.split(".")[0] == "hfgolf":
                if alias.asname:
                    raise ValueError(f"a source of score.py imports {alias.name} as {alias.asname}: keep its name")
            elif (alias.asname or alias.name.split(".")[0]) in used and module != "__future__":
                single = ast.Import([alias]) if module == "" else ast.ImportFrom(module, [alias], 0)
                found[ast.unparse(single)] = single
    return [*found.values(), *kept]


def _statements() -> list[ast.stmt]:
    """Return the statements of all sources, without types, docstrings and dropout."""
    package = Path(__file__).parents[1]
    modules = [ast.parse((package / source).read_text(encoding="utf-8")) for source in SOURCES]
    return [statement for module in modules for statement in Bare((_DROPOUT,)).visit(module).body]


def _names(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement reads."""
    yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))


@lru_cache(maxsize=1)
def defaults() -> dict[str, Any]:
    """Return the defaults of the fields that the sources read. The config derives what is None from other fields."""
    read = {node.attr for each in _statements() for node in ast.walk(each) if isinstance(node, ast.Attribute)}
    names = (name for name in GolfConfig.__annotations__ if name in read and name not in _NO_DROPOUT)
    return {name: getattr(GolfConfig, name) for name in names}
