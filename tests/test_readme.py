"""What the README shows works: its commands, options and keys; and each test that a table of docs/ names is there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from hfgolf.command_line import KEY_TYPES, load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TABLES = ("docs/promises.md", "docs/faults.md")


def commands(start: str) -> list[str]:
    """Return the lines of the README's shell blocks that begin so, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(start)]


def promises() -> list[tuple[str, str]]:
    """Return each fragment of the README that docs/promises.md quotes, and what holds it."""
    return re.findall(r'^\| "(.+?)" \| (.+?) \|', (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)


def test_what_the_readme_names_is_there():
    named = set(re.findall(r"\b(?:scripts|configs|docs|benchmarks|hfgolf|tests)/[\w/.-]+\.\w+", README))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_promise_is_one_of_the_readme_and_has_a_test_or_a_file():
    readme = " ".join(README.split())
    assert len(promises()) > 90
    assert [fragment for fragment, _ in promises() if fragment not in readme] == []
    assert [fragment for fragment, holds in promises() if not re.search(r"`[^`]+`", holds)] == []


@pytest.mark.parametrize("table", TABLES)
def test_what_a_table_names_is_there(table):
    """Tests by `path::name`, and the files that figures are from."""

    def is_defined(test: str) -> bool:
        path, name = test.split("::")
        file = ROOT / "tests" / path.removeprefix("tests/")
        tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
        return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)

    text = (ROOT / table).read_text()
    tests = re.findall(r"`([^`]+::[^`]+)`", text)
    files = re.findall(r"`((?:benchmarks|docs|configs|scripts|tests|hfgolf)/[^`:*\s]+)`", text)
    assert len(tests) > 40
    assert [test for test in tests if not is_defined(test)] == []
    assert [file for file in files if not (ROOT / file).exists()] == []


def make(*arguments: str) -> str:
    """Return what make would run, had nothing been set up."""
    command = ["make", "--dry-run", "--always-make", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_installs_pinned_versions_and_passes_on_config_and_options():
    (install,) = (line for line in make("setup").splitlines() if "pip install" in line)
    assert '-c constraints.txt -e ".[dev]"' in install
    assert "scripts/train.py --config configs/small.yaml" in make("train")
    (shown,) = commands("make train CONFIG")
    trains = make(*shlex.split(shown)[1:]).splitlines()[-1]
    assert trains.endswith(
        "scripts/train.py --config configs/shakespeare_char.yaml --optim.learning_rate 0.01 --run.name slower"
    )
    assert make("test").splitlines()[-1].split()[1:] == ["-m", "pytest"]
    assert [line.split("/")[-1].split()[0] for line in make("check").splitlines()[-3:]] == ["ruff", "ruff", "mypy"]


@pytest.mark.parametrize("command", commands("python scripts/"))
def test_every_command_has_only_options_that_its_script_takes(command, run_script):
    """A key of the config must be one; an option of the script must be in its --help."""
    script, *arguments = shlex.split(command)[1:]
    options = {argument.removeprefix("--") for argument in arguments if argument.startswith("--")}
    said = run_script(Path(script).name, "--help")
    known = set(re.findall(r"--([a-z_.]+)", said.out)) | set(KEY_TYPES)
    assert said.status == 0 and options - {"config"} <= known
    if "config" in options:
        keys = [f"--{key}" for key in options & set(KEY_TYPES)]
        stated = [f"{key}={arguments[arguments.index(key) + 1]}" for key in keys]
        load_config(["--config", str(ROOT / arguments[arguments.index("--config") + 1]), *stated])


def test_the_keys_that_the_table_of_the_config_names_are_keys_with_these_values():
    table = README.split("| section | says | keys to know |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (.+) \|$", table, re.MULTILINE)
    named = {f"{section}.{key}" for section, keys in rows for key in re.findall(r"`(\w+)`", keys)}
    assert len(rows) == len({key.split(".")[0] for key in KEY_TYPES}) and len(named) > 40
    assert named - set(KEY_TYPES) == set()
    shown = {"schedule.name": "constant, linear, cosine, cosine_warmdown, wsd", "optim.name": "muon, adamw, sgd"}
    for key, values in shown.items():
        assert f"`{key.split('.')[1]}` ({values})" in table
        for value in values.split(", "):
            load_config([f"--{key}={value}", "--train.max_steps=9"])


def test_the_options_that_the_readme_gives_for_gpt2_make_it():
    from hfgolf.model.convert_gpt2 import gpt2_from_golf
    from hfgolf.train.build import build_golf

    (options,) = re.findall(r"`(--model\.norm layernorm[^`]+)`", README)
    small = "--model.hidden_size 16 --model.num_hidden_layers 1 --model.num_attention_heads 2 --train.max_steps 1"
    config = load_config([*options.split(), *small.split(), "--train.mixed_precision", "no"]).config
    gpt2 = gpt2_from_golf(build_golf(config, 61, "cpu"))  # it refuses what GPT-2 is not
    assert type(gpt2).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_begins_with_its_command_and_what_to_expect(path):
    header = re.match(r"(?:#.*\n)+", path.read_text())[0]
    assert f"#   accelerate launch scripts/train.py --config configs/{path.name}" in header
    assert "Measured on" in header or "What to expect: " in header


def test_small_trains_without_a_network(run, tiny_run, tmp_path, monkeypatch):
    """The text of configs/small.yaml is the interpreter's own; its tokenizer is trained."""
    small = yaml.safe_load((ROOT / "configs" / "small.yaml").read_text())
    assert small["data"]["source"] == "python_stdlib" and small["tokenizer"]["kind"] == "bpe"

    def connect(*arguments: object) -> None:
        pytest.fail(f"it looked for {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # else nobody would ask the Hub at all
    of_data = {"data__source": "python_stdlib", "data__files": "[]", "data__split": "documents"}
    folder = run(tiny_run(**of_data, data__val_fraction=0.002, train__eval_tokens=500))
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6
