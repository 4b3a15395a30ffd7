"""score.py, unpack.py and the program of an archive: small files that need torch and numpy only.

Assembled from the real sources: program.py, unpack.py or restore.py, and what it uses of the files in SOURCES. Owns
assembling, shrinking and packing. Does not know artifacts or scores.
"""

from __future__ import annotations

import ast
import base64
import lzma
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeGuard

from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.system.errors import UserError

_MINIFIER = "3.4.0"  # this version: score.py must be the same bytes wherever it is written
try:
    from python_minifier import minify

    if version("python-minifier") != _MINIFIER:
        raise ImportError
except ImportError:
    raise UserError(
        f"Golf needs python-minifier {_MINIFIER}; run `pip install python-minifier=={_MINIFIER}`."
    ) from None

MAX_BYTES = 12_000
"""What score.py may take; a test holds it."""
SOURCES = (
    "evaluate/windows.py",
    "golf/grid.py",
    "golf/decoder.py",
    "model/layers_golf.py",
    "golf/learner.py",
    "golf/program.py",
    "golf/unpack.py",
    "golf/exact.py",
    "golf/restore.py",
)
_KEPT_NAMES = ("main", "load_model", "unpack", "print_sha256", "restore")
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
    return _self_extracting(_packed(_values(config), "main", "if __name__=='__main__':main({})\n"))


def packed_unpack() -> bytes:
    """Return unpack.py, for any artifact that `pack` wrote: it defines `unpack`, and run, prints a SHA-256."""
    return _self_extracting(_packed((), "print_sha256", "if __name__=='__main__':print_sha256()\n"))


def packed_restore(config: GolfConfig) -> bytes:
    """Return the program of archives of models with a config, which defines `restore`, packed with LZMA."""
    return _packed(_values(config), "restore", "")


def _self_extracting(packed: bytes) -> bytes:
    # base85 survives any editor that keeps lines
    return b'import lzma,base64\nexec(lzma.decompress(base64.b85decode("%b")))\n' % base64.b85encode(packed)


def _values(config: GolfConfig) -> tuple[tuple[str, str], ...]:
    return tuple((name, repr(getattr(config, name))) for name in defaults())


@lru_cache(maxsize=8)
def _packed(values: tuple[tuple[str, str], ...], entry: str, ending: str) -> bytes:
    module = ast.Module(assemble({name: ast.literal_eval(value) for name, value in values}, entry), [])
    _make_positional(module)
    source = minify(
        ast.unparse(ast.fix_missing_locations(module)) + "\n" + ending,
        remove_literal_statements=True,
        remove_asserts=True,
        hoist_literals=False,  # LZMA does that
        rename_globals=True,
        preserve_globals=[*_KEPT_NAMES],
        prefer_single_line=True,
    )
    return smallest_lzma(source.encode())


def _make_positional(module: ast.Module) -> None:
    """Make arguments positional-only, in place, unless a keyword or a string names them: so they can be renamed."""
    nodes = list(ast.walk(module))
    named = {node.arg for node in nodes if isinstance(node, ast.keyword)}
    named |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for function in nodes:
        if isinstance(function, ast.FunctionDef):
            each = function.args.args
            count = next((place for place, argument in enumerate(each) if argument.arg in named), len(each))
            function.args.posonlyargs, function.args.args = each[:count], each[count:]


@lru_cache(maxsize=8)  # a run asks again at each forecast and each grid
def smallest_lzma(content: bytes) -> bytes:
    """Return content packed with those settings of LZMA that make it smallest, for lzma.decompress."""
    settings = {
        "id": lzma.FILTER_LZMA1,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 1 << max(12, len(content).bit_length()),  # to clear the preset's 64 MiB takes longer than the rest
    }
    filters = [settings | {"lc": lc, "lp": lp, "pb": pb} for lc in range(5) for lp in range(5 - lc) for pb in range(3)]
    return min((lzma.compress(content, lzma.FORMAT_ALONE, filters=[each]) for each in filters), key=len)


def assemble(values: Mapping[str, Any], entry: str = "main") -> list[ast.stmt]:
    """Return one module with `entry` and everything that it uses, from SOURCES, for a config with these values.

    Raises ValueError if two sources give different things one name, or if a source renames what it imports.
    """
    module, before = ast.Module(_statements(), []), ""
    while (now := ast.dump(module)) != before:
        before = now
        module = Specialize({**dict.fromkeys(_NO_DROPOUT, 0.0), **values}).visit(module)
    statements = module.body
    _drop_unused_methods(statements)
    imports = [each for each in statements if isinstance(each, ast.Import | ast.ImportFrom)]
    definitions: dict[str, ast.stmt] = {}
    for statement in statements:
        for name in _defined(statement):
            if name in definitions:
                raise ValueError(f"two sources of score.py define {name}: rename one")
            definitions[name] = statement
    needed, waiting = {entry}, [entry]
    while waiting:
        used = set(_names(definitions[waiting.pop()])) & definitions.keys() - needed
        needed |= used
        waiting += used
    kept = [each for each in statements if needed & set(_defined(each))]
    used = {name for statement in kept for name in _names(statement)}
    found: dict[str, ast.stmt] = {}  # imports from outside hfgolf, each once
    for statement in imports:
        package = getattr(statement, "module", "")
        for alias in statement.names:
            if package.split(".")[0] == "hfgolf":
                if alias.asname:
                    raise ValueError(f"a source of score.py imports {alias.name} as {alias.asname}: keep its name")
            elif (alias.asname or alias.name.split(".")[0]) in used and package != "__future__":
                single = ast.ImportFrom(package, [alias], 0) if package else ast.Import([alias])
                found[ast.unparse(single)] = single
    return [*found.values(), *kept]


def _statements() -> list[ast.stmt]:
    """Return the statements of all sources, without types and dropout."""
    package = Path(__file__).parents[1]
    modules = [ast.parse((package / source).read_text(encoding="utf-8")) for source in SOURCES]
    return [statement for module in modules for statement in Bare().visit(module).body]


def _names(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement reads."""
    yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))


@lru_cache(maxsize=1)
def defaults() -> dict[str, Any]:
    """Return the defaults of the fields that the sources read. The config derives what is None from other fields."""
    read = {node.attr for each in _statements() for node in ast.walk(each) if isinstance(node, ast.Attribute)}
    names = (name for name in GolfConfig.__annotations__ if name in read and name not in _NO_DROPOUT)
    return {name: getattr(GolfConfig, name) for name in names}


class Bare(ast.NodeTransformer):
    """Remove annotations and dropout."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return node.args[0] if isinstance(node.func, ast.Name) and node.func.id == _DROPOUT else node

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


class Specialize(ast.NodeTransformer):
    """Replace `config.NAME`, with `config` as a name or an attribute, by known values; drop branches never taken.

    Within a class, an attribute of self that is assigned once, a constant, is that constant. A vector that the config
    does not have is None. Run it until nothing changes.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.constants: dict[str, ast.Constant] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        nodes = list(ast.walk(node))
        stored = Counter(each.attr for each in nodes if _is_self(each) and not isinstance(each.ctx, ast.Load))
        assigned = [(each.targets[0], each.value) for each in nodes if isinstance(each, ast.Assign)]
        self.constants = {
            target.attr: value
            for target, value in assigned
            if isinstance(value, ast.Constant) and _is_self(target) and stored[target.attr] == 1
        }
        self.generic_visit(node)
        self.constants = {}
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        owner = getattr(node.value, "id", getattr(node.value, "attr", None))
        if isinstance(node.ctx, ast.Load) and owner == "config" and node.attr in self.values:
            return ast.parse(repr(self.values[node.attr]), mode="eval").body
        if isinstance(node.ctx, ast.Load) and _is_self(node) and node.attr in self.constants:
            return self.constants[node.attr]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        before = node.value
        self.generic_visit(node)
        if isinstance(node.value, ast.Constant):  # None[0], which is never reached, but warned of
            node.value = before
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        is_vector = isinstance(node.func, ast.Name) and node.func.id == _VECTOR and node.args
        return ast.Constant(None) if is_vector and _truth(node.args[0]) is False else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if not all(isinstance(each, ast.Constant) for each in (node.left, *node.comparators)):
            return node
        with warnings.catch_warnings(action="ignore"):  # that "is" compares literals
            return ast.Constant(eval(ast.unparse(node), {}))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        ends = isinstance(node.op, ast.Or)  # the truth that ends the evaluation
        values: list[ast.expr] = []
        for place, value in enumerate(node.values):
            truth = _truth(value)
            if truth is None or truth is ends or place == len(node.values) - 1:
                values.append(value)
            if truth is ends:
                break
        return values[0] if len(values) == 1 else ast.BoolOp(node.op, values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        truth = _truth(node.operand) if isinstance(node.op, ast.Not) else None
        return node if truth is None else ast.Constant(not truth)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        truth = _truth(node.test)
        return node if truth is None else node.body if truth else node.orelse

    def visit_If(self, node: ast.If) -> ast.If | list[ast.stmt]:
        self.generic_visit(node)
        truth = _truth(node.test)
        if truth is not None:
            return node.body if truth else node.orelse
        node.body = node.body or [ast.Pass()]
        return node


def _drop_unused_methods(statements: list[ast.stmt]) -> None:
    """Remove methods that nothing names, in place."""
    classes = [statement for statement in statements if isinstance(statement, ast.ClassDef)]
    unused: set[str] | None = None
    while unused is None or unused:
        named = {node.attr for each in statements for node in ast.walk(each) if isinstance(node, ast.Attribute)}
        methods = {part.name for each in classes for part in each.body if isinstance(part, ast.FunctionDef)}
        unused = {name for name in methods - named - {"forward"} if not name.startswith("__")}
        for each in classes:
            each.body = [part for part in each.body if getattr(part, "name", None) not in unused] or [ast.Pass()]


def _defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines, imports aside."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _is_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _truth(node: ast.expr) -> bool | None:
    """Return whether a constant is true; None if the node is not a constant."""
    return bool(node.value) if isinstance(node, ast.Constant) else None
