"""Small source computes the same."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from hfgolf.golf.minify import Bare, drop_unused_methods, indented_by_one, rename, specialized

PROGRAM = '''
"""Docstring."""
import math

FACTOR: int = 3


def absent(is_there, value):
    return value if is_there else None


def noisy(x, rate):
    return x * rate


def scale(values: list[int], factor: int = 1, **rest: int) -> list[int]:
    """Docstring."""
    total = [value * factor for value in values]

    def inner(value):
        return value + total[0]

    return [inner(value) for value in total if (lambda factor: factor)(value) is not None]


class Model:
    def __init__(self, config):
        self.config = config
        self.gain = absent(config.gain, 5)
        self.width: int = config.width
        self.counter = 0

    def forward(self, x):
        assert x
        if self.gain is not None:
            return self.boost(x)
        self.counter += 1
        if self.config.kind == "plain" and not self.config.gain or x == 0:
            x = [*x, self.width, FACTOR]
        else:
            x = []
        return noisy(scale(x, factor=len(x)), 2)

    def boost(self, x):
        return [self.gain[0], *x]


def main(config):
    model = Model(config)
    return model.forward([1, 2]), model.counter, math.floor(2.5)
'''


def run(source, config):
    names = {}
    exec(compile(source, "program", "exec", dont_inherit=True), names)
    return names["main"](config)


def shrunk(values):
    statements = Bare(("noisy",)).visit(ast.parse(PROGRAM)).body
    statements = specialized(statements, values, ("absent",))
    drop_unused_methods(statements, ("forward",))
    rename(statements, ("main",))
    return indented_by_one(ast.unparse(ast.fix_missing_locations(ast.Module(statements, []))))


@pytest.mark.parametrize("kind", ["plain", "other"])
def test_minified_program_computes_the_same(kind):
    values = {"gain": None, "width": 7, "kind": kind}
    config = SimpleNamespace(**values)
    source = shrunk(values)
    assert run(source, config) == run(PROGRAM.replace("x * rate", "x"), config)
    assert len(source) < 0.6 * len(PROGRAM)
    assert "boost" not in source, "no value of gain, no method that needs one"
    assert "config." not in source and "assert" not in source and "Docstring" not in source and "->" not in source
    assert "factor=len" in source and "def main(" in source, "keywords and kept names stay"
    assert "counter += 1" in source, "an attribute that changes is no constant"


def test_multiline_string_is_rejected():
    with pytest.raises(ValueError, match="a string of several lines"):
        indented_by_one('if x:\n    y = """a\n    b"""\n')
