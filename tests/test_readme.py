"""What the pages show works: commands, options, keys, files."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from hfgolf.cli import VERBS
from hfgolf.config.parse import KEY_TYPES, load_config

ROOT = Path(__file__).parents[1]
GENERATED = {"benchmarks/tables.md", "docs/metrics.md"}
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        ROOT / "benchmarks" / "experiments" / "README.md",
    ]
    if path.relative_to(ROOT).as_posix() not in GENERATED
}
PAST = "CHANGELOG.md"
"""It names what was, commands and files that may be gone."""
ARCHITECTURE = PAGES["ARCHITECTURE.md"]


def commands(start: str) -> list[str]:
    """Return the commands in the pages that begin so, in shell blocks and in code within a line, without comments."""
    text = re.sub(r"\\\n +", "", "\n".join(text for page, text in PAGES.items() if page != PAST))
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return sorted({line for line in lines if line.startswith(start)})


@pytest.mark.parametrize("page", sorted(PAGES))
def test_files_and_links_on_a_page_exist(page):
    text = PAGES[page]
    named = set(re.findall(r"(?<![\w/.])(?:scripts|configs|docs|benchmarks|hfgolf|tests)/[\w/.-]+\.\w+", text))
    links = {link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link}
    assert page == PAST or [name for name in named if not (ROOT / name).exists()] == []
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_every_docs_page_is_reachable_from_the_readme():
    reached, new = set(), {"README.md"}
    while new:
        reached |= new
        linked = {
            (ROOT / page).parent.joinpath(link).resolve()
            for page in new
            if (ROOT / page).suffix == ".md"
            for link in re.findall(r"\]\(([^)#\s]+\.md)\)", (ROOT / page).read_text(encoding="utf-8"))
            if "://" not in link
        }
        new = {path.relative_to(ROOT).as_posix() for path in linked} - reached
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")} - reached == set()


def test_site_has_every_page_once():
    def pages(entries: list[dict[str, object]]) -> list[str]:
        values = [value for entry in entries for value in entry.values()]
        return [page for value in values for page in (pages(value) if isinstance(value, list) else [value])]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted({*PAGES, *GENERATED})


def test_architecture_lists_every_file_of_the_package():
    tree = ARCHITECTURE.split("## The files")[1].split("```text\n")[1].split("```")[0]
    folders: list[str] = []
    listed = []
    for line in tree.splitlines():
        name = line.split()[0]
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        if name.endswith("/"):
            folders.append(name)
        else:
            listed.append("".join(folders) + name)
            assert line.split()[1:], f"{listed[-1]} has no line of text"
    suffixes = {".py", ".md", ".html", ".css", ".js"}
    files = [path for path in (ROOT / "hfgolf").rglob("*") if path.suffix in suffixes and path.name != "__init__.py"]
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in files)


def test_architecture_names_existing_functions_for_each_decision():
    rows = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \| (`.+`) \|$", ARCHITECTURE, re.MULTILINE)
    assert len(rows) > 20
    for file, names in rows:
        tree = ast.parse((ROOT / "hfgolf" / file).read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert set(re.findall(r"`(\w+)`", names)) <= defined, file


def make(*arguments: str, **environment: str) -> str:
    """Return what make would run, had nothing been set up."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", *arguments]
    own = (
        "ARGS",
        "CONFIG",
        "MAKEFLAGS",
        "MFLAGS",
        "MAKEOVERRIDES",
        "MAKELEVEL",
    )  # of the `make test ARGS=...` that runs these tests
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    environment = inherited | {"HF_HOME": "/nowhere"} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def checks() -> list[str]:
    """Return what `make check` runs once all is set up."""
    lines = make("check").splitlines()
    set_up = next(number for number, line in enumerate(lines) if line.startswith("touch "))
    return [line.strip().removesuffix(" .") for line in lines[set_up + 1 :]]


def test_make_installs_pinned_versions_and_passes_on_config_and_options(tmp_path):
    (install,) = (line for line in make("setup").splitlines() if "pip install" in line)
    assert '-c constraints.txt -e ".[dev]"' in install and "--quiet" not in install
    assert ".venv/bin/hfgolf train --config configs/small.yaml" in make("train")
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").touch()
    launched = make("train", HF_HOME=str(tmp_path))
    assert ".venv/bin/accelerate launch --quiet scripts/train.py --config configs/small.yaml" in launched
    (shown,) = commands("make train CONFIG")
    trains = make(*shlex.split(shown)[1:]).splitlines()[-1]
    assert trains.endswith("train --config configs/shakespeare_char.yaml --optim.learning_rate 0.01 --run.name slower")
    quick, slow = (shlex.split(make(target).splitlines()[-1])[1:] for target in ("test", "test-slow"))
    assert quick[:2] == slow[:2] == ["-m", "pytest"] and (quick[-2:], slow[-2:]) == (["-m", "not slow"], ["-m", "slow"])
    assert quick[2:-2] == slow[2:-2], "the same processes"
    assert {Path(check.split()[0]).name for check in checks()} == {"ruff", "mypy"}


def test_hooks_and_hosted_ci_run_the_same_checks():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"].removesuffix(" --force-exclude") for hook in hooks] == checks()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job, newest = workflow["jobs"]["checks"], workflow["jobs"]["newest"]
    assert newest["steps"][-1]["run"] == "make test-newest" and "schedule" in newest["if"]
    assert "schedule" in workflow[True], "YAML 1.1 reads the key `on` as true"
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    (python,) = (step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert f"on Python {python['python-version']}." in (ROOT / "constraints.txt").read_text().splitlines()[0]


@pytest.mark.parametrize("command", commands("make "))
def test_make_knows_every_target(command):
    assert make(*shlex.split(command)[1:])


def test_every_command_uses_existing_options(hfgolf, monkeypatch):
    """A key of the config must be one; an option of the command must be in its --help."""
    monkeypatch.chdir(ROOT)
    known = {verb: set(re.findall(r"--([a-z_.]+)", hfgolf(verb, "--help").out)) for verb in VERBS}
    for command in [*commands("accelerate launch "), *commands("hfgolf ")]:
        words = shlex.split(command.replace("scripts/train.py", "hfgolf train"))
        arguments = words[words.index("hfgolf") + 1 :]
        verb = " ".join(arguments[: 2 if arguments[0] == "golf" else 1])
        options = {argument.removeprefix("--") for argument in arguments if argument.startswith("--")} - {"help"}
        assert verb == "--help" or options <= known[verb] | {*KEY_TYPES, "config"}, command
        config = arguments[arguments.index("--config") + 1] if "config" in options else "runs/"
        if not config.startswith("runs/"):
            keys = [f"--{key}" for key in options & set(KEY_TYPES)]
            load_config(["--config", config, *(f"{key}={arguments[arguments.index(key) + 1]}" for key in keys)])


def test_no_command_on_a_page_leaves_a_file_for_git():
    """What it writes is in runs/, or a name that git ignores."""
    shown = "\n".join(commands("hfgolf "))
    written = re.findall(r"--(?:output|certificate) ([\w./-]+)", shown)
    files = [*(ROOT / "hfgolf" / "commands").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    code = "".join(path.read_text() for path in files)
    written += re.findall(r'"--output", type=Path, default=Path\("([^"]+)"\)', code)
    assert len(written) > 7
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert [path for path in written if not path.startswith("runs/") and f"/{path}" not in ignored] == []


def test_gpt2_options_build_gpt2():
    from hfgolf.publish.native import to_native
    from hfgolf.train.build import build_model

    (command,) = (command for command in commands("hfgolf train") if "layernorm" in command)
    options = re.split(r"small(?:\.yaml)? ", command, maxsplit=1)[1]
    small = "--model.hidden_size 16 --model.num_hidden_layers 1 --model.num_attention_heads 2 --train.max_steps 1"
    config = load_config([*options.split(), *small.split(), "--train.mixed_precision", "no"]).config
    gpt2 = to_native(build_model(config, 61, "cpu"))  # it refuses what GPT-2 is not
    assert type(gpt2).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_config_header_has_its_command_and_expected_results(path):
    header = re.match(r"(?:#.*\n)+", path.read_text())[0]
    assert re.search(rf"^#   (accelerate launch .*)?hfgolf train --config {path.stem}$", header, re.MULTILINE)
    assert "Measured on" in header or "What to expect: " in header


def test_small_config_trains_without_a_network(run, tiny_run, tmp_path, monkeypatch):
    """The text of configs/small.yaml is the interpreter's own; its tokenizer is trained."""
    small = yaml.safe_load((ROOT / "configs" / "small.yaml").read_text())
    assert small["data"]["source"] == "python_stdlib" and small["tokenizer"]["kind"] == "bpe"

    def connect(*arguments: object) -> None:
        pytest.fail(f"tried to connect to {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # otherwise the Hub is never contacted
    of_data = {"data__source": "python_stdlib", "data__files": "[]", "data__split": "documents"}
    folder = run(tiny_run(**of_data, data__val_fraction=0.002, train__eval_tokens=500))
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6
