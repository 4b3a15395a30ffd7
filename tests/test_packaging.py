"""What is pinned where, and that the house stands as DESIGN says: arrows run downward only."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# Each package may import those on its right; what stands beside errors may be imported by all.
MAY_IMPORT = {
    "model": set(),
    "data": set(),
    "optim": set(),
    "measure": {"data", "model", "optim"},
    "evaluate": {"data", "model", "optim"},
    "publish": {"data", "model", "optim"},
    "report": set(),
    "train": {"data", "model", "optim", "measure", "evaluate", "publish", "report"},
    "compare": {"data", "model", "optim", "measure", "evaluate", "publish", "report", "train"},
}
BASE = {"config", "errors", "command_line", "redact", "durable"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_image_pins_what_the_constraints_pin():
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert arguments["TORCH_VERSION"] == pins()["torch"]
    assert arguments["NUMPY_VERSION"] == pins()["numpy"]
    header = (ROOT / "constraints.txt").read_text().splitlines()[0]
    assert arguments["PYTHON_VERSION"].startswith(re.search(r"Python (\d+\.\d+)", header)[1] + ".")
    assert "CUDA_VERSION" in arguments and "org.opencontainers.image.revision" in (ROOT / "Dockerfile").read_text()


def test_every_dependency_is_a_range_that_holds_its_pin():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    texts = setup["options"]["install_requires"] + setup["options.extras_require"]["dev"]
    requirements = [Requirement(line) for line in texts.split("\n") if line]
    assert len(requirements) > 15
    for requirement in requirements:
        assert requirement.specifier.contains(pins()[requirement.name]), requirement


def imports(path: Path) -> set[str]:
    """Return the hfgolf modules a file imports, relative imports resolved."""
    names = set()
    package = [*path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            names.add(".".join([*prefix, *([node.module] if node.module else [])]))
    return {name for name in names if name.split(".")[0] == "hfgolf"}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_run_downward(package):
    files = list((ROOT / "hfgolf" / package).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            target = name.split(".")[1] if "." in name else ""
            is_pushed = package == "model" and path.name != "build.py"  # it runs where hfgolf is not
            allowed = MAY_IMPORT[package] | {package} | (set() if is_pushed else BASE | {""})
            assert target in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_every_package_is_in_the_house():
    assert {path.parent.name for path in (ROOT / "hfgolf").glob("*/__init__.py")} == set(MAY_IMPORT)


def test_importing_hfgolf_imports_no_torch():
    program = "import sys, hfgolf; print(hfgolf.__name__, [m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "hfgolf []"


@pytest.mark.parametrize(
    "imports",
    [
        "import hfgolf",
        "import hfgolf; hfgolf.train; import hfgolf.train.stopwatch",
        "import hfgolf.train.stopwatch",
        "from hfgolf.train.stopwatch import Stopwatch; import hfgolf",
    ],
)
def test_train_can_be_called_whatever_was_imported_first(imports):
    """A function of that name was replaced by the package as soon as a module of the package was imported."""
    program = f"""{imports}
import inspect, pickle
from hfgolf import train
assert train is hfgolf.train and pickle.loads(pickle.dumps(train)) is train
import hfgolf.train.stopwatch
assert train is hfgolf.train and hfgolf.train.stopwatch.Stopwatch
print(*inspect.signature(train).parameters, "train" in dir(hfgolf))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("config True", "")


def test_the_public_names_are_there():
    import hfgolf

    for name in hfgolf.__all__:
        assert getattr(hfgolf, name)
    assert set(hfgolf.__all__) <= set(dir(hfgolf))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hfgolf.nothing


def test_what_the_readme_names_is_there():
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\b(?:scripts|configs|docs|benchmarks|hfgolf|tests)/[\w/.-]+\.\w+", readme))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
