"""Run the tests with other versions of Python, torch and transformers, and print a table.

    python tests/versions.py [--only oldest] [pytest's options]      (or: make test-versions ARGS="--only oldest")

Each file of constraints/ is a set of versions; its first line names its Python. It gets a virtual environment of its
own in .venv-versions/, and its output next to it. A set is not run if its Python is not installed, or pip cannot bring
its versions. A set without versions, newest, gets what was released that day. pip reads PIP_CONSTRAINT and
PIP_EXTRA_INDEX_URL, for a CPU build of torch.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-versions"
SHOWN = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "numpy")


def run_set(constraints: Path, options: list[str]) -> tuple[bool, list[str]]:
    """Install a set of versions, and run the tests that are not slow. Return whether they passed, and its row."""
    named = re.match(r"# Python (\d\.\d+)", constraints.read_text())
    assert named, f"the first line of {constraints} must name its Python"
    python, row = f"python{named[1]}", [constraints.stem, named[1]]
    if not shutil.which(python):
        return False, [*row, f"not run: no {python} on the path"]
    binaries = FOLDER / constraints.stem / "bin"
    pip = [binaries / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    newest = ["--upgrade", "--upgrade-strategy", "eager"]
    for command in ([python, "-m", "venv", binaries.parent], [*pip, *newest, "-c", constraints, "-e", ".[dev]"]):
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
            return False, [*row, f"not run: {errors[-1]}"]
    versions = "from importlib.metadata import version; import sys; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([binaries / "python", "-c", versions, *SHOWN], capture_output=True, text=True, check=True)
    log = FOLDER / f"{constraints.stem}.log"
    with log.open("w") as file:
        tests = [binaries / "python", "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *options]
        done = subprocess.run(tests, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode == 0, [*row, *found.stdout.split(), log.read_text().splitlines()[-1].strip("= ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sets = {path.stem: path for path in sorted((ROOT / "constraints").glob("*.txt"))}
    parser.add_argument("--only", nargs="+", choices=sets, metavar="SET", help=f"of {', '.join(sets)}")
    arguments, options = parser.parse_known_args()
    FOLDER.mkdir(exist_ok=True)
    done = [run_set(sets[name], options) for name in arguments.only or sets]
    for row in [["", "Python", *SHOWN], *(row for _, row in done)]:
        print("".join(f"{cell:<16}" for cell in row))
    if not all(passed for passed, _ in done):
        raise SystemExit("error: not all sets were run and passed; .venv-versions/ has the output of each")


if __name__ == "__main__":
    main()
