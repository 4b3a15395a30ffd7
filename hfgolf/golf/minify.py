"""Make Python source small without changing what it computes: bare, specialized to known values, with short names.

Works on syntax trees of whole programs in the plain style of hfgolf's sources. Does not know what the program does.
"""

from __future__ import annotations

import ast
import itertools
import keyword
import string
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeGuard


class Bare(ast.NodeTransformer):
    """Remove annotations, docstrings and other lone strings, assertions, and calls of functions that do nothing.

    identities: functions that return their first argument.
    """

    def __init__(self, identities: Collection[str] = ()) -> None:
        self.identities = identities

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return node.args[0] if isinstance(node.func, ast.Name) and node.func.id in self.identities else node

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

    def visit_Assert(self, node: ast.Assert) -> None:
        return None


class Specialize(ast.NodeTransformer):
    """Replace `config.NAME`, with `config` as a name or an attribute, by known values; drop branches never taken.

    Within a class, an attribute of self that is assigned once, a constant, is that constant. A call of a function in
    `absent` whose first argument is a constant that is false is None. Run it until nothing changes.
    """

    def __init__(self, values: Mapping[str, Any], absent: Collection[str] = ()) -> None:
        self.values, self.absent = values, absent
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
        is_absent = isinstance(node.func, ast.Name) and node.func.id in self.absent and node.args
        return ast.Constant(None) if is_absent and _truth(node.args[0]) is False else node

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


def specialized(statements: list[ast.stmt], values: Mapping[str, Any], absent: Collection[str] = ()) -> list[ast.stmt]:
    """Return statements after running Specialize until nothing changes."""
    module = ast.Module(statements, [])
    before = ""
    while (now := ast.dump(module)) != before:
        before = now
        module = Specialize(values, absent).visit(module)
    return module.body


def drop_unused_methods(statements: list[ast.stmt], kept: Collection[str]) -> None:
    """Remove methods that nothing names, in place. kept: methods that others call, as torch calls forward."""
    classes = [statement for statement in statements if isinstance(statement, ast.ClassDef)]
    unused: set[str] | None = None
    while unused is None or unused:
        named = {node.attr for each in statements for node in ast.walk(each) if isinstance(node, ast.Attribute)}
        methods = {part.name for each in classes for part in each.body if isinstance(part, ast.FunctionDef)}
        unused = {name for name in methods - named - {*kept} if not name.startswith("__")}
        for each in classes:
            each.body = [part for part in each.body if getattr(part, "name", None) not in unused] or [ast.Pass()]


def rename(statements: list[ast.stmt], kept: Collection[str]) -> None:
    """Give local variables and what a module defines short names, in place. kept: names of the module that stay.

    Names stay too if they are an attribute, a keyword of some call, or a string: those may reach across functions.
    """
    module = ast.Module(statements, [])
    nodes = list(ast.walk(module))
    visible = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    visible |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    visible |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    top = {name for statement in statements for name in defined(statement)}
    for statement in statements:
        for part in statement.body if isinstance(statement, ast.ClassDef) else [statement]:
            if isinstance(part, ast.FunctionDef):
                _rename_within(part, visible | top)
    imports = [each for each in statements if isinstance(each, ast.Import | ast.ImportFrom)]
    taken = {(alias.asname or alias.name).split(".")[0] for each in imports for alias in each.names}
    taken |= {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    counts = Counter(node.id for node in ast.walk(module) if isinstance(node, ast.Name) and node.id in top)
    names = [name for name, _ in counts.most_common() if name not in visible and name not in kept]
    _replace(module, dict(zip(names, _short_names(taken, string.ascii_uppercase), strict=False)))


def defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines, imports aside."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def indented_by_one(source: str) -> str:
    """Return source, as ast.unparse writes it, with one space per level. Raises ValueError if that would change it."""
    lines = []
    for line in source.splitlines():
        text = line.lstrip(" ")
        lines.append(" " * ((len(line) - len(text)) // 4) + text)
    smaller = "\n".join(lines) + "\n"
    if ast.dump(ast.parse(smaller)) != ast.dump(ast.parse(source)):
        raise ValueError("a string of several lines would change with its indentation: write it on one line")
    return smaller


def _is_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _truth(node: ast.expr) -> bool | None:
    """Return whether a constant is true; None if the node is not a constant."""
    return bool(node.value) if isinstance(node, ast.Constant) else None


def _rename_within(function: ast.FunctionDef, stay: set[str]) -> None:
    nodes = list(ast.walk(function))
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    local = (arguments | stored) - stay
    taken = {name for name in used if name not in local} | (arguments - local)
    taken |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    names = sorted(local, key=lambda name: (-used[name], name))
    _replace(function, dict(zip(names, _short_names(taken, string.ascii_lowercase), strict=False)))


def _replace(tree: ast.AST, names: Mapping[str, str]) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.arg = names.get(node.arg, node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node is not tree:
            node.name = names.get(node.name, node.name)


def _short_names(taken: Collection[str], letters: str) -> Iterator[str]:
    for length in itertools.count(1):
        for name in map("".join, itertools.product(letters, repeat=length)):
            if name not in taken and not keyword.iskeyword(name):
                yield name
