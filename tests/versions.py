"""Run the tests with other versions of Python, torch and transformers, and print a table.

    python tests/versions.py [--only oldest] [pytest's options]      (or: make test-versions ARGS="--only oldest")

Each file of constraints/ is a set of versions; its first line names its Python. It gets a virtual environment of its
own in .venv-versions/, and its result next to it. A set whose tests passed is skipped until the code, the tests or the
versions change. A set is not run if its Python is not installed, or pip cannot bring its versions.

A set without versions, newest, is resolved anew each time, to what was released that day, and always run. pip reads
PIP_CONSTRAINT and PIP_EXTRA_INDEX_URL, for a CPU build of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-versions"
CODE = ("benchmarks", "configs", "hfgolf", "scripts", "tests")
SHOWN = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "numpy")


def run_set(constraints: Path, options: list[str]) -> dict[str, Any]:
    """Install a set of versions if needed, and run the tests that are not slow. Return its row of the table."""
    python = re.match(r"# Python (\d\.\d+)", constraints.read_text())
    assert python, f"the first line of {constraints} must name its Python"
    row = {"set": constraints.stem, "python": python[1], "code": digest(constraints, *options)}
    kept = FOLDER / f"{constraints.stem}.json"
    if is_pinned(constraints) and kept.exists():
        before = json.loads(kept.read_text())
        if before["code"] == row["code"] and before["passed"]:
            return before | {"said": f"{before['said']} (before)"}
    if not shutil.which(f"python{python[1]}"):
        return row | {"said": f"not run: no python{python[1]} on the path"}
    binaries = FOLDER / constraints.stem / "bin"
    if error := install(constraints, f"python{python[1]}", binaries):
        return row | {"said": f"not run: {error}"}

    versions = "from importlib.metadata import version; import sys; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([binaries / "python", "-c", versions, *SHOWN], capture_output=True, text=True, check=True)
    row |= dict(zip(SHOWN, found.stdout.split(), strict=True))
    started_at = time.monotonic()
    log = FOLDER / f"{constraints.stem}.log"
    with log.open("w") as file:
        command = [binaries / "python", "-m", "pytest", "-q", "-m", "not slow", *options]
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    summary = log.read_text().splitlines()[-1].strip("= ")
    row |= {"passed": done.returncode == 0, "said": summary, "seconds": time.monotonic() - started_at}
    kept.write_text(json.dumps(row, indent=1) + "\n")
    return row


def install(constraints: Path, python: str, binaries: Path) -> str:
    """Make the virtual environment of a set, unless it is there. Return what went wrong, or an empty string."""
    wanted = digest(constraints)
    ready = binaries.parent / ".ready"
    if is_pinned(constraints) and ready.exists() and ready.read_text() == wanted:
        return ""
    pip = [binaries / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    make = [python, "-m", "venv", *["--clear"] * is_pinned(constraints), binaries.parent]
    newest = [] if is_pinned(constraints) else ["--upgrade", "--upgrade-strategy", "eager"]
    for command in (make, [*pip, *newest, "-c", constraints, "-e", ".[dev]"]):
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return (errors or done.stderr.splitlines() or [f"{command[0]} failed"])[-1]
    ready.write_text(wanted)
    return ""


def is_pinned(constraints: Path) -> bool:
    """Return whether a set names versions."""
    return any(not line.startswith("#") for line in constraints.read_text().split("\n") if line)


def digest(constraints: Path, *options: str) -> str:
    """Return a sha256 of the versions that a set asks for; with options, also of the code and the tests."""
    paths = [constraints, ROOT / "setup.cfg", ROOT / "constraints.txt"]
    if options:
        kinds = (".py", ".yaml", ".json", ".txt", ".md")
        paths += sorted(path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in kinds)
    sha256 = hashlib.sha256(repr(options).encode())
    for path in paths:
        sha256.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return sha256.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sets = {path.stem: path for path in sorted((ROOT / "constraints").glob("*.txt"))}
    parser.add_argument("--only", nargs="+", choices=sets, metavar="SET", help=f"of {', '.join(sets)}")
    arguments, options = parser.parse_known_args()
    FOLDER.mkdir(exist_ok=True)
    rows = []
    for name in arguments.only or sets:
        print(f"{name} ...", flush=True)
        rows.append(run_set(sets[name], ["-p", "no:cacheprovider", *options]))
    print(f"\n{'':<12}{'Python':<8}" + "".join(f"{name:<15}" for name in SHOWN))
    for row in rows:
        found = "".join(f"{row.get(name, ''):<15}" for name in SHOWN)
        print(f"{row['set']:<12}{row['python']:<8}{found}{row['said']}")
    if not all(row.get("passed") for row in rows):
        raise SystemExit("error: not all sets were run and passed; .venv-versions/ has the output of each")


if __name__ == "__main__":
    main()
