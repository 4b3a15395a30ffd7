"""Version pins, and importing the package."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def pins(path: Path = ROOT / "constraints.txt") -> dict[str, str]:
    lines = path.read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def set_up() -> configparser.ConfigParser:
    """Return what setup.cfg says."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def requirements() -> list[Requirement]:
    """Return what setup.cfg requires."""
    return [Requirement(line) for line in set_up()["options"]["install_requires"].splitlines() if line]


def dockerfile() -> str:
    """Return the Dockerfile's steps, each on one line, without comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return text.replace("\\\n", "")


def run_step(containing: str) -> str:
    (step,) = (line for line in dockerfile().splitlines() if line.startswith("RUN ") and containing in line)
    return step.removeprefix("RUN ")


def test_image_pins_python_apt_and_pip_packages():
    bases = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", dockerfile(), re.MULTILINE)
    from_outside = [base for base, _ in bases if base not in {stage for _, stage in bases}]
    tested_with = re.search(r"Python (\d+\.\d+)", (ROOT / "constraints.txt").read_text().splitlines()[0])[1]
    assert len(from_outside) == 1 and re.fullmatch(rf"python:{tested_with}\.\d+-slim-bookworm(@\S+)?", from_outside[0])

    assert re.search(r"^ARG SNAPSHOT=\d{8}T\d{6}Z$", dockerfile(), re.MULTILINE)
    apt = run_step("apt-get install")
    assert "snapshot.debian.org" in apt and apt.index("$SNAPSHOT") < apt.index("apt-get")
    installs = re.findall(r"pip install .*", dockerfile())
    assert len(installs) == 2 and all("-c constraints.txt" in install for install in installs)
    assert "--no-build-isolation" in installs[-1]  # otherwise pip builds hfgolf with the newest setuptools
    assert {"torch", "numpy", "setuptools", "nvidia-ml-py", "triton", "cuda-toolkit", "nvidia-cublas"} <= set(pins())


def test_snapshot_replaces_every_mirror(tmp_path):
    """Runs the Dockerfile's own sed on the sources of a Debian image."""
    sources = tmp_path / "debian.sources"
    sources.write_text("URIs: http://deb.debian.org/debian\nURIs: http://deb.debian.org/debian-security\n")
    sed = run_step("snapshot").split("&&")[0].replace("/etc/apt/sources.list.d/debian.sources", str(sources))
    subprocess.run(["sh", "-c", sed], env={"SNAPSHOT": "20300101T000000Z", "PATH": os.environ["PATH"]}, check=True)
    assert sources.read_text() == (
        "URIs: http://snapshot.debian.org/archive/debian/20300101T000000Z\n"
        "URIs: http://snapshot.debian.org/archive/debian-security/20300101T000000Z\n"
    )


@pytest.mark.parametrize(
    ("commit", "is_taken"),
    [("0123456789" * 4, True), ("0123456789" * 4 + "-dirty", True), ("", False), ("main", False)],
)
def test_image_build_requires_its_commit(commit, is_taken, tmp_path):
    step = run_step("$COMMIT").replace("/commit", str(tmp_path / "commit"))
    environment = {"COMMIT": commit, "PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", "-c", step], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is is_taken
    error = f"error: COMMIT is '{commit}', no commit; build with: make image\n"
    assert done.stderr == ("" if is_taken else error)
    assert "COPY --from=commit" in dockerfile()  # otherwise the builder skips the stage with this step
    assert "ENV HFGOLF_COMMIT=$COMMIT" in dockerfile()


def test_oldest_versions_are_those_that_are_tested():
    oldest = pins(ROOT / "constraints" / "oldest.txt")
    assert list(oldest) == [requirement.name for requirement in requirements()]
    for requirement in requirements():
        (lowest,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
        assert Version(lowest) == Version(oldest[requirement.name])


def test_each_set_of_versions_names_a_python_that_is_supported():
    config = set_up()
    tested = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    paths = [ROOT / "constraints.txt", *(ROOT / "constraints").glob("*.txt")]
    named = [re.search(r"Python (3\.\d+)", path.read_text().splitlines()[0])[1] for path in paths]
    assert set(tested) <= set(named) and config["options"]["python_requires"] == f">={tested[0]}"


def with_requirements(*names: str) -> set[str]:
    """Return the names of packages and of all that they need, as they are installed."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name not in found or wanted.extras:
            found.add(name)
            for line in requires(name) or ():
                needed = Requirement(line)
                if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in wanted.extras or {""}):
                    waiting.append(needed)
    return found


def test_wheels_are_what_a_bare_image_lacks():
    if version("pandas") != pins()["pandas"]:
        pytest.skip("requirements are those of the installed versions: an older pandas also needs pytz")
    needed = [str(requirement) for requirement in requirements() if requirement.name != "wandb"]
    needed = with_requirements(*needed, "pytest", "pytest-timeout", "python-minifier") | {"nvidia-ml-py"}
    wheels = (ROOT / "benchmarks" / "wheels.txt").read_text().splitlines()
    listed = {canonicalize_name(line) for line in wheels if not line.startswith("#")}
    of_image = with_requirements("torch", "transformers", "accelerate", "numpy")
    own = with_requirements("pydantic") - {"typing-extensions"}  # typer has it, too, but not its older versions
    assert listed == needed - of_image | own
    assert listed <= {canonicalize_name(name) for name in pins()}


def test_make_image_passes_the_commit():
    done = subprocess.run(["make", "--dry-run", "image"], cwd=ROOT, capture_output=True, text=True, check=True)
    option = re.search(r"--build-arg COMMIT=\$\(git (.*?)\) ", done.stdout)[1]
    described = subprocess.run(["git", *shlex.split(option)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", described.stdout.strip())


def test_every_dependency_range_contains_its_pin():
    extras = set_up()["options.extras_require"]
    wanted = [*requirements(), *(Requirement(line) for line in (extras["dev"] + extras["gpu"]).split("\n") if line)]
    assert len(wanted) > 15
    for requirement in wanted:
        assert requirement.specifier.contains(pins()[requirement.name]), requirement


def test_every_imported_library_is_declared():
    """Optional ones as extras: a transitive dependency may disappear."""
    config = set_up()
    texts = "\n".join([config["options"]["install_requires"], *config["options.extras_require"].values()])
    declared = {re.sub(r"[^a-z0-9]", "", Requirement(line).name.lower()) for line in texts.split("\n") if line}
    names = {"ruamel": "ruamelyaml", "pynvml": "nvidiamlpy"}
    imported: set[str] = set()
    for path in [*(ROOT / "hfgolf").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    libraries = imported - sys.stdlib_module_names - {"hfgolf", "benchmarks"}
    assert len(libraries) > 12
    undeclared = {name for name in libraries if names.get(name, name.replace("_", "")) not in declared}
    assert not undeclared


@pytest.mark.parametrize(
    "imports",
    [
        "import hfgolf; hfgolf.train; import hfgolf.system.stopwatch",
        "from hfgolf.system.stopwatch import Stopwatch; import hfgolf",
    ],
)
def test_train_is_callable_in_any_import_order(imports):
    """A function of that name would be replaced by the package when one of its modules is imported."""
    program = f"""{imports}
import inspect, pickle
from hfgolf import train
assert train is hfgolf.train and pickle.loads(pickle.dumps(train)) is train
import hfgolf.system.stopwatch
assert train is hfgolf.train and hfgolf.system.stopwatch.Stopwatch
print(*inspect.signature(train).parameters, "train" in dir(hfgolf))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("config hooks True", "")


def test_public_names_exist():
    import hfgolf

    for name in hfgolf.__all__:
        assert getattr(hfgolf, name)
    assert set(hfgolf.__all__) <= set(dir(hfgolf))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hfgolf.nothing
