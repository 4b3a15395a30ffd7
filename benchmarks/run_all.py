"""Run every benchmark and profiling script for a device, and write docs/benchmarks.md.

    python benchmarks/run_all.py                  (or: make bench-cpu)
    python benchmarks/run_all.py --device cuda    (or: make bench-gpu)

Each one writes benchmarks/results/NAME_cpu.json or NAME_gpu.json, which also stores what it printed. The page is made
from all existing files, from any machine.
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
NO_BENCHMARKS = ("ladder", "machine", "run_all")  # scripts/ladder.py runs the ladder
ONLY_ON_CPU = ("cpu_kernels", "data_loading", "kept_memory", "large_corpus", "tokenize_text")
SUFFIXES = {"cpu": "cpu", "cuda": "gpu"}
SMALL = ("--config", "configs/small.yaml")
CHARACTERS = (
    *("--tokenizer.kind=byte", "--model.num_hidden_layers=6", "--model.hidden_size=384"),
    *("--model.num_attention_heads=6", "--batch.micro_batch_size=16"),
)
GPT2_124M = (
    *("--config", "configs/fineweb_124m.yaml", "--data.source=python_stdlib", "--tokenizer.kind=bpe"),
    *("--tokenizer.vocab_size=50257", "--batch.tokens_per_step=16384", "--batch.micro_batch_size=16"),
)
SCRIPTS = {
    "cpu": {
        "ladder": ("ladder", *SMALL),
        "profile_characters": ("profile_step", *SMALL, *CHARACTERS, "--train.compile=true"),
        "profile_small": ("profile_step", *SMALL, "--train.compile=false"),
        "profile_small_compiled": ("profile_step", *SMALL, "--train.compile=true"),
        "roofline": ("roofline", *SMALL),
    },
    "cuda": {
        "ladder": ("ladder", *SMALL),
        "profile_124m": ("profile_step", *GPT2_124M, "--train.compile=false"),
        "profile_124m_compiled": ("profile_step", *GPT2_124M, "--train.compile=true"),
        "roofline": ("roofline", *GPT2_124M),
    },
}
"""For each device: {measurement: (script in scripts/, *options)}."""
WRITTEN_BY = {"profile_step": "profile.json"}


def names(device: str) -> list[str]:
    """Return the names of a device's benchmarks."""
    others = NO_BENCHMARKS if device == "cpu" else NO_BENCHMARKS + ONLY_ON_CPU
    return sorted([path.stem for path in FOLDER.glob("*.py") if path.stem not in others] + [*SCRIPTS[device]])


def run(name: str, device: str) -> bool:
    """Run a benchmark, show its output and store it in its JSON. Return whether it succeeded."""
    output = FOLDER / "results" / f"{name}_{SUFFIXES[device]}.json"
    if name in SCRIPTS[device]:
        script, *options = SCRIPTS[device][name]
        folder = f"runs/benchmarks/{name}"
        printed = show([f"scripts/{script}.py", *options, "--output", folder])
        if printed is None:
            return False
        measured = json.loads((ROOT / folder / WRITTEN_BY.get(script, f"{script}.json")).read_text())
        metadata = measured["metadata"]
        metadata.pop("environment", None)  # contains folders of this machine
        versions = {"torch": metadata["packages"]["torch"], "hfgolf": metadata["commit"]}
        measured |= {"hardware": metadata["hardware"], "versions": versions}
    else:
        path = FOLDER / f"{name}.py"
        takes_device = "--device" in path.read_text()  # the others use a GPU if there is one
        printed = show([str(path), "--output", str(output), *(("--device", device) if takes_device else ())])
        if printed is None:
            return False
        measured = json.loads(output.read_text())
    output.write_text(json.dumps(measured | {"printed": printed}, indent=1) + "\n")
    return True


def show(command: list[str]) -> str | None:
    """Run a Python script, show its output, and return it with ~ for the home folder. Return None if it fails."""
    print(f"\n{Path(command[0]).stem}", flush=True)
    printed = []
    command = [sys.executable, "-u", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            printed.append(line)
    return None if process.returncode else "".join(printed).strip("\n").replace(str(Path.home()), "~")


def page() -> str:
    """Return the text of docs/benchmarks.md: for each kind of device, the output and machine of each benchmark."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench-cpu` and `make bench-gpu`. The top of each benchmark's file says how it measures.",
    ]
    for title, suffix in (("CPU", "cpu"), ("GPU", "gpu")):
        found = {path: json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob(f"*_{suffix}.json"))}
        printed = {path: measured for path, measured in found.items() if "printed" in measured}
        lines += ["", f"## {title}"] if printed else []
        for path, measured in printed.items():
            name = path.stem.removesuffix(f"_{suffix}")
            what = str(ast.get_docstring(ast.parse(source(name).read_text()))).splitlines()[0].split(": python ")[0]
            lines += ["", f"### {name}", "", f"{what.rstrip('.')}.", "", f"{machine(measured)}.", "", "```text"]
            lines += [*measured["printed"].splitlines(), "```"]
    return "\n".join(lines) + "\n"


def source(name: str) -> Path:
    """Return the path of the script that makes a measurement."""
    scripts = {name: script for measurements in SCRIPTS.values() for name, (script, *_) in measurements.items()}
    return ROOT / "scripts" / f"{scripts[name]}.py" if name in scripts else FOLDER / f"{name}.py"


def machine(measured: dict[str, Any]) -> str:
    """Return one line with the machine and versions of a measurement."""
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
            f"no benchmark for {arguments.device} is called {', '.join(unknown)}; choose from {', '.join(known)}"
        )
    failed = [name for name in arguments.only or known if not run(name, arguments.device)]
    PAGE.write_text(page())
    print(f"\nwrote {PAGE.relative_to(ROOT)}")
    if failed:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
