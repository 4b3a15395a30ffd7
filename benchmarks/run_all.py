"""Run every benchmark that has figures for this device, one after another, and write docs/benchmarks.md.

    python benchmarks/run_all.py                  (or: make bench-cpu)
    python benchmarks/run_all.py --device cuda    (or: make bench-gpu)

Each writes benchmarks/results/NAME_cpu.json or NAME_gpu.json, which holds what it printed, too; the page is made from
the files that are there, whichever machine they are from.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
NO_BENCHMARKS = ("ladder", "run_all")  # the ladder is climbed by scripts/ladder.py
ONLY_ON_CPU = ("cpu_kernels", "data_loading", "large_corpus", "tokenize_text")
SUFFIXES = {"cpu": "cpu", "cuda": "gpu"}


def names(device: str) -> list[str]:
    """Return the benchmarks that have figures for a device."""
    others = NO_BENCHMARKS if device == "cpu" else NO_BENCHMARKS + ONLY_ON_CPU
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in others)


def run(name: str, device: str) -> bool:
    """Run a benchmark, showing what it prints, and keep that in its JSON; say whether it went well."""
    script, output = FOLDER / f"{name}.py", FOLDER / "results" / f"{name}_{SUFFIXES[device]}.json"
    command = [sys.executable, "-u", str(script), "--output", str(output)]
    if "--device" in script.read_text():  # the others take the GPU where there is one
        command += ["--device", device]
    print(f"\n{name}", flush=True)
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            printed.append(line)
    if process.returncode:
        return False
    measured = json.loads(output.read_text()) | {"printed": "".join(printed).strip("\n")}
    output.write_text(json.dumps(measured, indent=1) + "\n")
    return True


def page() -> str:
    """Return docs/benchmarks.md: for each kind of device what each benchmark printed, on which machine."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench-cpu` and `make bench-gpu`. How each is measured is said at the top of its file.",
    ]
    for title, suffix in (("CPU", "cpu"), ("GPU", "gpu")):
        found = {path: json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob(f"*_{suffix}.json"))}
        printed = {path: measured for path, measured in found.items() if "printed" in measured}
        lines += ["", f"## {title}"] if printed else []
        for path, measured in printed.items():
            name = path.stem.removesuffix(f"_{suffix}")
            what = str(ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))).splitlines()[0]
            lines += ["", f"### {name}", "", what, "", f"{machine(measured)}.", "", "```text"]
            lines += [*measured["printed"].splitlines(), "```"]
    return "\n".join(lines) + "\n"


def machine(measured: dict[str, Any]) -> str:
    """Return the machine and the versions that a measurement was made with, in a line."""
    hardware, versions = measured.get("hardware", {}), measured.get("versions", {})
    parts = [str(hardware.get("device", "unknown machine")), f"{hardware.get('cores', '?')} cores"]
    return ", ".join([*parts, *(f"{name} {version}" for name, version in versions.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SUFFIXES, default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="benchmarks, such as train_throughput")
    arguments = parser.parse_args()
    known = names(arguments.device)
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(
            f"no benchmark for {arguments.device} is called {', '.join(unknown)}; there are {', '.join(known)}"
        )
    failed = [name for name in arguments.only or known if not run(name, arguments.device)]
    PAGE.write_text(page())
    print(f"\nwrote {PAGE.relative_to(ROOT)}")
    if failed:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
