"""Measure everything for a device in parts, each with a time limit, and write benchmarks/tables.md.

    python benchmarks/run_all.py                  (or: make bench-cpu)
    python benchmarks/run_all.py --device cuda    (or: make bench-gpu)

Each part is a process of its own: a benchmark, a command, or the tests that need a GPU. When it ends, it leaves
benchmarks/results/NAME_cpu.json or NAME_gpu.json, which also stores what it printed. A part that has been measured with
the same code, torch and device is skipped, so the command continues after whatever ended it. A part that fails is
named, and the others go on; it runs again when the code changes, or by --only. What a part prints is also in
runs/benchmarks/NAME_cpu.log or NAME_gpu.log. The page is made from all existing files, from any machine.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
PAGE = ROOT / "benchmarks" / "tables.md"
SUFFIXES = {"cpu": "cpu", "cuda": "gpu"}
LIMITS = {"cpu": None, "cuda": 9 * 60}
"""Seconds that a part may take."""
SHORTEST = 60
"""Seconds that must be left of --minutes to start a part."""
MEASURED_CODE = ("hfgolf", "scripts", "benchmarks", "configs")

SMALL = ("--config", "configs/small.yaml")
CHARACTERS = (
    *("--tokenizer.kind=byte", "--model.num_hidden_layers=6", "--model.hidden_size=384"),
    *("--model.num_attention_heads=6", "--batch.tokens_per_step=4096", "--batch.micro_batch_size=16"),
)
GPT2_124M = (
    *("--config", "configs/fineweb_124m.yaml", "--data.source=python_stdlib", "--data.val_fraction=0.002"),
    *("--tokenizer.kind=bpe", "--tokenizer.vocab_size=50257"),
    "--batch.tokens_per_step=131072",
)
TINY_RUN = (
    *(
        "--tokenizer.kind=byte",
        "--model.num_hidden_layers=1",
        "--model.hidden_size=64",
        "--model.num_attention_heads=2",
    ),
    *("--batch.sequence_length=64", "--batch.tokens_per_step=256", "--batch.micro_batch_size=4"),
)
ONCE = ("--repetitions", "1")
SMALL_ONCE = (*ONCE, "--model", "small")


@dataclass(frozen=True)
class Part:
    """What measures: a Python file, or a folder of tests."""

    path: str
    options: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()
    """Options that --dry_run adds."""
    written: str = ""
    """The JSON that it writes to its output folder; the others write the file that they are told to."""


def _profile(*options: str, compiled: bool) -> Part:
    tiny = (*TINY_RUN, "--steps", "1", "--train.compile=false")
    options = (*options, f"--train.compile={str(compiled).lower()}")
    return Part("hfgolf/commands/profile.py", options, tiny, "profile.json")


def _roofline(*options: str) -> Part:
    return Part("benchmarks/roofline.py", options, TINY_RUN, "roofline.json")


def _throughput(*shapes: str) -> Part:
    one_step = ("--sequences", "1", "--steps", "1", "--warmup_steps", "1", *ONCE)
    tiny = ("--shapes", "small", "--arms", "trainer_fp32", "hfgolf_fp32", *one_step)
    return Part("benchmarks/train_throughput.py", ("--shapes", *shapes) if shapes else (), tiny)


def _memory(*cases: str) -> Part:
    return Part("benchmarks/memory_prediction.py", ("--cases", *cases) if cases else (), ("--cases", "small, fp32"))


LADDER_ONCE = (*TINY_RUN, *ONCE, "--losses", "1", "--train.compile=false")
LADDER = Part("benchmarks/ladder.py", SMALL, LADDER_ONCE, "ladder.json")
COMMON = {
    "against_gpt2": Part("benchmarks/against_gpt2.py", (), (*ONCE, "--shape", "small")),
    "checkpoint": Part("benchmarks/checkpoint.py", (), SMALL_ONCE),
    "generate": Part("benchmarks/generate.py", (), (*SMALL_ONCE, "--new_tokens", "4")),
    "optimizer_step": Part("benchmarks/optimizer_step.py", (), SMALL_ONCE),
    "saving": Part("benchmarks/saving.py", (), (*ONCE, *TINY_RUN[:3])),
    "startup": Part("benchmarks/startup.py", (), ONCE),
}
PARTS: dict[str, dict[str, Part]] = {
    "cpu": {
        **COMMON,
        "busy_machine": Part("benchmarks/busy_machine.py", (), (*ONCE, "--widths", "128", "--spins", "default")),
        "cpu_kernels": Part("benchmarks/cpu_kernels.py", (), (*ONCE, "--lengths", "128")),
        "data_loading": Part("benchmarks/data_loading.py", (), (*ONCE, "--tokens", "1000000", "--batches", "10")),
        "growth": Part(
            "benchmarks/growth.py",
            ("--picture", "docs/growth.png"),
            (*ONCE, "--points", "1", "--gigabytes", "0.01", "--picture", "runs/benchmarks/growth.png"),
        ),
        "kept_memory": Part("benchmarks/kept_memory.py", (), ONCE),
        "ladder": LADDER,
        "memory_prediction": _memory(),
        "profile_characters": _profile(*SMALL, *CHARACTERS, compiled=True),
        "profile_small": _profile(*SMALL, compiled=False),
        "profile_small_compiled": _profile(*SMALL, compiled=True),
        "roofline": _roofline(*SMALL),
        "tokenize_text": Part("benchmarks/tokenize_text.py", (), ONCE),
        "train_throughput": _throughput(),
    },
    "cuda": {  # in the order that they run: what decides what to mend comes first
        "tests": Part("tests", ("-m", "gpu"), ("--collect-only",)),
        "roofline": _roofline(*GPT2_124M),
        "profile_124m": _profile(*GPT2_124M, compiled=False),
        "profile_124m_compiled": _profile(*GPT2_124M, compiled=True),
        "train_throughput_gpt2_124m": _throughput("gpt2_124m"),
        "ladder": LADDER,
        "memory_prediction_small": _memory(
            "small, fp32", "small, bf16", "small, fp32, checkpointing", "small, bf16, compiled"
        ),
        "memory_prediction_124m": _memory("124M, fp32", "124M, bf16", "124M, bf16, checkpointing"),
        "train_throughput_small": _throughput("small"),
        "train_throughput_settings": _throughput("gpt2_124m_settings"),
        "train_throughput_gpt2_350m": _throughput("gpt2_350m"),
        "train_throughput_characters": _throughput("characters"),
        "memory_prediction_characters": _memory(
            "shakespeare_char, fp32", "shakespeare_char, bf16", "shakespeare_char, bf16, compiled"
        ),
        **COMMON,
        "optimizer_step": Part("benchmarks/optimizer_step.py", ("--compiled",), SMALL_ONCE),
    },
}
"""For each device: {name: part}."""


def command(part: Part, device: str, output: Path, is_tiny: bool) -> list[str]:
    """Return the arguments for Python that measure a part.

    output: the JSON to write, or the folder if the part says what it writes there.
    """
    options = [*part.options, *(part.tiny if is_tiny else ())]
    path = ROOT / part.path
    if path.is_dir():  # only the files that have such tests: others need what a bare image lacks
        files = [
            str(file.relative_to(ROOT)) for file in sorted(path.rglob("test_*.py")) if "mark.gpu" in file.read_text()
        ]
        return ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *options]
    if path.parent.name == "commands":
        return ["-m", "hfgolf", path.stem, *options, "--output", str(output)]
    takes_device = not part.written and '"--device"' in path.read_text()  # the others use a GPU if there is one
    return [part.path, *options, "--output", str(output), *(("--device", device) if takes_device else ())]


def measure(name: str, device: str, seconds: float | None = None, is_tiny: bool = False) -> str | None:
    """Run a part, show its output and store it in its JSON. Return None, or what went wrong.

    seconds: after which the part is ended. is_tiny: run it small, on a CPU, and store nothing in benchmarks/results.
    """
    part = PARTS[device][name]
    folder, label = ROOT / "runs" / "benchmarks" / ("tiny" if is_tiny else "."), f"{name}_{SUFFIXES[device]}"
    folder.mkdir(parents=True, exist_ok=True)
    result = (folder if is_tiny else FOLDER / "results") / f"{label}.json"
    output = folder / label if part.written else folder / f"{label}.json"
    print(f"\n{name}", flush=True)
    run_on = "cpu" if is_tiny else device
    printed, error = show(command(part, run_on, output, is_tiny), folder / f"{label}.log", seconds)
    if error:
        return error
    measured: dict[str, Any] = {}
    if part.written:
        measured = json.loads((output / part.written).read_text())
        metadata = measured["metadata"]
        metadata.pop("environment", None)  # full of this machine's folders
        versions = {"torch": metadata["packages"]["torch"], "hfgolf": metadata["commit"]}
        measured |= {"hardware": metadata["hardware"], "versions": versions}
    elif output.is_file():
        measured = json.loads(output.read_text())
    else:
        measured = dict(here())
    if (measured_commit := commit()) is not None:
        measured |= {"versions": measured["versions"] | {"hfgolf": measured_commit}}
    kept = json.dumps(measured | {"measured_with": identity(part), "printed": printed}, indent=1)
    result.write_text(without_folders(kept) + "\n")
    return None


def without_folders(text: str) -> str:
    """Return a text with paths relative to the checkout and the home folder, not paths of this machine."""
    return text.replace(f"{ROOT}{os.sep}", "").replace(str(Path.home()), "~")


def show(arguments: list[str], log: Path, seconds: float | None) -> tuple[str, str | None]:
    """Run Python and show its standard output. Return it, and an error or None.

    log: gets standard output and errors. After `seconds`, the process ends, and all that it started.
    """
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds or threading.TIMEOUT_MAX, end)
    timer.daemon = True
    log.write_text("")
    printed = []
    with log.open("a") as file:
        command = [sys.executable, "-u", *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT, env=environment(), start_new_session=True
        )
        timer.start()
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
                printed.append(line)
            process.wait()
        except BaseException:  # Ctrl-C, SIGTERM: the part must not run on by itself
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            timer.cancel()
    if is_late.is_set():
        return "", f"not done after {seconds:,.0f} s"
    if process.returncode:
        last = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-15:])
        return "", f"exit status {process.returncode}, {log.relative_to(ROOT)} ends with:\n{last}"
    return "".join(printed).strip("\n"), None


def environment() -> dict[str, str]:
    """Return the environment of a part: hfgolf need not be installed."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)}


@functools.cache
def here() -> dict[str, Any]:
    """Return the hardware and the versions, asked in another process, because CUDA would keep memory in this one."""
    code = "import json, torch; from hfgolf.system.hardware import fingerprint"
    code += "; from hfgolf.run.provenance import git_commit"
    code += "; versions = {'torch': torch.__version__, 'hfgolf': git_commit()}"
    code += "; print(json.dumps({'hardware': fingerprint(), 'versions': versions}))"
    asked = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(), check=True
    )
    return dict(json.loads(asked.stdout.splitlines()[-1]))


def commit() -> str | None:
    """Return the commit, with -dirty if measured code differs; None without a checkout.

    What the parts say of themselves is -dirty as soon as the first of them has written its results.
    """
    git = ["git", "-C", str(ROOT)]
    code = [f"{folder}/*{suffix}" for folder in MEASURED_CODE for suffix in (".py", ".yaml")]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    is_clean = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code]).returncode == 0
    return head if is_clean else f"{head}-dirty"


def identity(part: Part) -> str:
    """Return 16 hexadecimal digits that change with the code that a part measures, its options, torch or the device."""
    folders = {*MEASURED_CODE, *([part.path] if (ROOT / part.path).is_dir() else ())}
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml"))
    digest = hashlib.sha256()
    for path in paths:
        if path != Path(__file__):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    now = here()
    digest.update(repr((part.path, part.options, now["versions"]["torch"], now["hardware"]["device"])).encode())
    return digest.hexdigest()[:16]


def is_measured(name: str, device: str) -> bool:
    """Return whether benchmarks/results has the part, measured with this code, torch and device."""
    path = FOLDER / "results" / f"{name}_{SUFFIXES[device]}.json"
    return path.exists() and json.loads(path.read_text()).get("measured_with") == identity(PARTS[device][name])


def failure(name: str, device: str) -> Path:
    """Return the file that remembers that a part failed: it holds the identity of what failed."""
    return ROOT / "runs" / "benchmarks" / f"{name}_{SUFFIXES[device]}.failed"


def has_failed(name: str, device: str) -> bool:
    path = failure(name, device)
    return path.exists() and path.read_text() == identity(PARTS[device][name])


def page() -> str:
    """Return the text of benchmarks/tables.md: for each kind of device, the output and machine of each benchmark."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench-cpu` and `make bench-gpu`. The top of each benchmark's file says how it measures.",
    ]
    for title, device in (("CPU", "cpu"), ("GPU", "cuda")):
        suffix = SUFFIXES[device]
        found = {path: json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob(f"*_{suffix}.json"))}
        printed = {path: measured for path, measured in found.items() if "printed" in measured}
        lines += ["", f"## {title}"] if printed else []
        for path, measured in printed.items():
            name = path.stem.removesuffix(f"_{suffix}")
            lines += ["", f"### {name}", "", f"{about(PARTS[device][name])}.", "", f"{machine(measured)}.", ""]
            lines += ["```text", *measured["printed"].splitlines(), "```"]
    return "\n".join(lines) + "\n"


def about(part: Part) -> str:
    """Return what a part measures: the first line of its file, without the command and the full stop."""
    if (ROOT / part.path).is_dir():
        return f"pytest {' '.join(part.options)}"
    docstring = str(ast.get_docstring(ast.parse((ROOT / part.path).read_text())))
    return re.split(": (?:python|hfgolf) ", docstring.splitlines()[0])[0].rstrip(".")


def machine(measured: dict[str, Any]) -> str:
    """Return one line with the machine and versions of a measurement."""
    hardware, versions = measured.get("hardware", {}), measured.get("versions", {})
    parts = [str(hardware.get("device", "unknown machine")), f"{hardware.get('cores', '?')} cores"]
    return ", ".join([*parts, *(f"{name} {version}" for name, version in versions.items())])


def missing() -> list[str]:
    """Return the packages of benchmarks/wheels.txt that are needed and not installed."""
    names = [line for line in (FOLDER / "wheels.txt").read_text().splitlines() if re.match(r"\w", line)]
    installed = {str(found.name).lower().replace("_", "-") for found in importlib.metadata.distributions()}
    installed.add("nvidia-ml-py")  # rows of metrics.jsonl have two figures less without it
    return [name for name in names if name.lower().replace("_", "-") not in installed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SUFFIXES, default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts, such as roofline, measured in any case")
    parser.add_argument("--list", action="store_true", help="say which parts there are and which are measured")
    parser.add_argument("--dry_run", action="store_true", help="run each part small, on a CPU, and keep no figure")
    parser.add_argument("--minutes", type=float, help="end after this long; the next call goes on from there")
    arguments = parser.parse_args()
    device, parts = arguments.device, PARTS[arguments.device]
    if unknown := set(arguments.only or ()) - set(parts):
        parser.error(f"no part for {device} is called {', '.join(unknown)}; choose from {', '.join(parts)}")
    if arguments.list:
        for name in parts:
            state = "measured" if is_measured(name, device) else "failed" if has_failed(name, device) else "to do"
            print(f"{name:<32}{state}")
        return
    if arguments.minutes is not None and 60 * arguments.minutes <= SHORTEST:
        parser.error(f"--minutes {arguments.minutes:g} is too short; a part needs up to 9")
    if absent := missing():
        parser.error(f"not installed: {', '.join(absent)}; without network: docs/gpu.md, `make wheels`")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by SIGTERM; the same command continues"))
    names = arguments.only or list(parts)
    if arguments.dry_run:
        failed = []
        for name in names:
            if error := measure(name, device, is_tiny=True):
                print(f"{name} failed: {error}", flush=True)
                failed.append(name)
        print(f"\ndry run: {len(names) - len(failed)} of {len(names)} parts work")
    else:
        failed = run_parts(names, device, is_forced=bool(arguments.only), minutes=arguments.minutes)
        PAGE.write_text(page())
        print(f"\nwrote {PAGE.relative_to(ROOT)}")
    if failed:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


def run_parts(names: list[str], device: str, is_forced: bool, minutes: float | None) -> list[str]:
    """Measure parts until the minutes are over. Return those that failed.

    is_forced: also those that are measured or failed before.
    """
    ends_at = time.monotonic() + 60 * minutes if minutes else float("inf")
    failed = []
    for position, name in enumerate(names):
        if not is_forced and is_measured(name, device):
            print(f"{name}: measured before")
            continue
        if not is_forced and has_failed(name, device):
            print(f"{name}: failed before; once more: --only {name}")
            failed.append(name)
            continue
        left = ends_at - time.monotonic()
        if left < SHORTEST:
            print(f"\nthe time is over; the same command continues with: {', '.join(names[position:])}")
            break
        limit = LIMITS[device] or float("inf")
        seconds = min(limit, left)
        error = measure(name, device, None if seconds == float("inf") else seconds)
        if error and left < limit and time.monotonic() >= ends_at:
            print(f"{name}: cut off by --minutes; the next call begins with it")
            break
        failure(name, device).unlink(missing_ok=True)
        if error:
            print(f"{name} failed: {error}", flush=True)
            failure(name, device).write_text(identity(PARTS[device][name]))
            failed.append(name)
    return failed


if __name__ == "__main__":
    main()
