"""score.py: the program that scores an artifact, in one small file that needs torch and numpy only.

Assembled from the real sources: from program.py, and whatever it uses of the files in SOURCES. Owns assembling,
shrinking and packing. Does not know artifacts or scores.
"""

from __future__ import annotations

import ast
import base64
import lzma
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

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
_NOT_SCORED = ("initializer_range", "use_cache", "bos_token_id", "pad_token_id", "dropout", "attention_dropout")
"""Fields of a config that change no logits."""


def config_differences(config: GolfConfig) -> dict[str, Any]:
    """Return the fields of a config that differ from the defaults and change the logits: what an artifact holds."""
    scored = {name: value for name, value in defaults().items() if name not in _NOT_SCORED}
    return {name: getattr(config, name) for name, value in scored.items() if getattr(config, name) != value}


@lru_cache(maxsize=1)
def packed_script() -> bytes:
    """Return score.py: two lines of ASCII that unpack the program and run it. The same for every model."""
    return pack(f"{shrink(assemble())}if __name__=='__main__':{_ENTRY}({defaults()!r})\n")


def pack(source: str) -> bytes:
    """Return a program that runs `source`: LZMA in base85, which survives any editor that keeps lines."""
    content = source.encode()
    filters = [
        {"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": lc, "lp": lp, "pb": pb}
        for lc in range(5)
        for lp in range(5 - lc)
        for pb in range(3)
    ]
    packed = min((lzma.compress(content, lzma.FORMAT_ALONE, filters=[each]) for each in filters), key=len)
    return b'import lzma,base64\nexec(lzma.decompress(base64.b85decode("%b")))\n' % base64.b85encode(packed)


def unpack(script: bytes) -> str:
    """Return the source in a packed program."""
    return lzma.decompress(base64.b85decode(script.split(b'"')[1])).decode()


def assemble() -> str:
    """Return one module with `main` and everything that it uses, from SOURCES, without types and docstrings.

    Raises ValueError if two sources give different things one name, or if a source renames what it imports.
    """
    package = Path(__file__).parents[1]
    statements: list[ast.stmt] = []
    for source in SOURCES:
        statements += _bare(ast.parse((package / source).read_text(encoding="utf-8"))).body
    imports = [each for each in statements if isinstance(each, ast.Import | ast.ImportFrom)]
    definitions: dict[str, ast.stmt] = {}
    for statement in statements:
        for name in _defined(statement):
            if name in definitions:
                raise ValueError(f"two sources of score.py define {name}: rename one")
            definitions[name] = statement
    needed, waiting = {_ENTRY}, [_ENTRY]
    while waiting:
        used = set(_names(definitions[waiting.pop()])) & definitions.keys() - needed
        needed |= used
        waiting += used
    kept = [each for each in statements if needed & set(_defined(each))]
    used = {name for statement in kept for name in _names(statement)}
    return _as_source([*_needed_imports(imports, used), *kept])


def shrink(source: str) -> str:
    """Return the same program with one space per level of indentation."""
    lines = []
    for line in source.splitlines():
        text = line.lstrip(" ")
        lines.append(" " * ((len(line) - len(text)) // 4) + text)
    smaller = "\n".join(lines) + "\n"
    if ast.dump(ast.parse(smaller)) != ast.dump(ast.parse(source)):
        raise ValueError("a source of score.py has a string of several lines, which shrinking would change")
    return smaller


class _Bare(ast.NodeTransformer):
    """Remove what a program does not need to score: annotations, docstrings and other lone strings, and dropout."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return node.args[0] if isinstance(node.func, ast.Name) and node.func.id == "apply_dropout" else node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        body: list[ast.stmt] = []
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and node.decorator_list:  # a field of a dataclass
                body.append(ast.AnnAssign(statement.target, ast.Constant(0), statement.value, 1))
            elif (kept := self.visit(statement)) is not None:
                body.append(kept)
        node.body = body or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        return None if node.value is None else ast.Assign([node.target], node.value)

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def _bare(module: ast.Module) -> ast.Module:
    bare: ast.Module = ast.fix_missing_locations(_Bare().visit(module))
    return bare


def _defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _names(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement reads."""
    yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))


def _needed_imports(imports: Iterable[ast.Import | ast.ImportFrom], used: set[str]) -> list[ast.stmt]:
    """Return the imports of used names from outside hfgolf, each once."""
    found: dict[str, ast.stmt] = {}
    for statement in imports:
        module = getattr(statement, "module", "")
        for alias in statement.names:
            if module.split(".")[0] == "hfgolf":
                if alias.asname:
                    raise ValueError(f"a source of score.py imports {alias.name} as {alias.asname}: keep its name")
            elif (alias.asname or alias.name.split(".")[0]) in used and module != "__future__":
                single = ast.Import([alias]) if module == "" else ast.ImportFrom(module, [alias], 0)
                found[ast.unparse(single)] = single
    return list(found.values())


def _as_source(statements: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(statements, []))) + "\n"


@lru_cache(maxsize=1)
def defaults() -> dict[str, Any]:
    """Return the defaults of a config's fields. The config derives what is None from other fields."""
    return {name: getattr(GolfConfig, name) for name in GolfConfig.__annotations__ if name != "_auto_class"}
