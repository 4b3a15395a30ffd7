"""The layers of the package: imports only go downward, without cycles.

Every import counts: those inside functions and those for type checkers only, too.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = {"config", "system"}
BELOW = {"run", "data", "model", "optim"}
MIDDLE = {"evaluate", "publish", "report", "doctor", "checkpoint", "measure"}
MAY_IMPORT: dict[str, set[str]] = {
    "system": set(),
    "config": GROUND,
    "model": set(),
    "run": GROUND,
    "data": GROUND,
    "optim": GROUND,
    "evaluate": GROUND | {"data", "model"},
    "publish": GROUND | {"run", "data", "model"},
    "report": GROUND | {"run"},
    "doctor": GROUND | {"run"},
    "checkpoint": GROUND | {"data", "model", "optim"},
    "measure": GROUND | {"model", "optim"},
    "train": GROUND | MIDDLE | BELOW,
    "golf": GROUND | {"train"} | MIDDLE | BELOW,
    "hooks": GROUND | {"golf", "train"} | MIDDLE | BELOW,
    "compare": GROUND | {"train", "run"},
    "commands": GROUND | {"compare", "hooks", "golf", "train"} | MIDDLE | BELOW,
}
"""What each package may import besides itself and the single files of hfgolf/; model may not import even those."""


def imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of hfgolf that a file imports, anywhere in the file."""
    package = [*path.relative_to(ROOT).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            for alias in node.names:
                names.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base)
    return {name for name in names if name.split(".")[0] == "hfgolf"}


def module_files() -> dict[str, Path]:
    """Return {module name: file} for the package."""
    files = {}
    for path in (ROOT / "hfgolf").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def room(module: str) -> str:
    """Return the subpackage of hfgolf that contains a module; empty for the single files."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / "hfgolf" / parts[1]).is_dir() else ""


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in (ROOT / "hfgolf").glob("*/__init__.py")}
    assert packages == set(MAY_IMPORT)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_run_downward(package):
    modules = module_files()
    own = {name: path for name, path in modules.items() if room(name) == package}
    assert own
    for name, path in own.items():
        for target in imported(path, modules):
            is_allowed = room(target) in {package, *MAY_IMPORT[package]}
            if not room(target):  # the single files; the modeling files also run without hfgolf
                is_allowed = package not in {"model", *GROUND} and (target != "hfgolf.api" or package == "commands")
            assert is_allowed, f"{name} imports {target}"


def test_single_files_but_the_api_import_only_the_ground():
    modules = module_files()
    for name, path in modules.items():
        if not room(name) and name not in ("hfgolf", "hfgolf.api"):
            assert not [target for target in imported(path, modules) if room(target) not in {"", *GROUND}], name


def test_no_import_cycles():
    modules = module_files()
    edges = {name: imported(path, modules) & modules.keys() - {name} for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> None:
        assert name not in above, " imports ".join([*above[above.index(name) :], name])
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, [*above, name])
            done.add(name)

    for name in sorted(modules):
        visit(name, [])
