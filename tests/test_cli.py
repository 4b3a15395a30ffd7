"""The command `hfgolf`: its verbs, the shipped configs by name, and what a wheel of it contains."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hfgolf.cli import VERBS
from hfgolf.commands.options import Answer
from hfgolf.config.parse import find_config, load_config
from hfgolf.config.sections import TokenizerSection
from hfgolf.run.provenance import run_metadata
from hfgolf.system.command import own_command
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[1]


def test_help_lists_every_verb(hfgolf):
    status, out, _ = hfgolf("--help")
    assert status == 0 and [verb for verb in VERBS if f"  {verb} " not in out] == []
    status, out, _ = hfgolf("golf")
    of_golf = [verb for verb in VERBS if verb.startswith("golf ")]
    assert status == 0 and [verb for verb in VERBS if f"  {verb} " in out] == of_golf


def test_every_verb_answers_help_under_its_own_name_and_imports_nothing_heavy():
    program = """
import sys, hfgolf.cli
print("loaded:", *{"torch", "transformers", "numpy", "pydantic", "ruamel.yaml"} & sys.modules.keys())
for verb in hfgolf.cli.VERBS:
    try:
        hfgolf.cli.main([*verb.split(), "--help"])
    except SystemExit as ended:
        print(f"{verb} ended with {ended.code}, torch: {'torch' in sys.modules}")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("loaded:\n")
    for verb in VERBS:
        assert f"usage: hfgolf {verb} [-" in " ".join(done.stdout.split())
        assert f"{verb} ended with 0, torch: False\n" in done.stdout


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("train TINY", {"val_loss", "model"}),
        ("report RUN --output report.html", {"report", "losses"}),
        ("compare RUN --output_dir compared", {"arms", "baseline"}),
        ("generate RUN --max_new_tokens 3", {"model", "samples"}),
        ("export --run RUN --to native --output native", {"output", "form", "step"}),
        ("prepare TINY", {"train", "val", "folder"}),
        ("schedule TINY", {"corners", "steps", "values"}),
        ("golf plan --budget_bytes 60kB --tokens 1000000", {"candidates", "sources"}),
    ],
)
def test_json_is_one_object_on_stdout(hfgolf, shared_run, tiny_run, tmp_path, monkeypatch, command, names):
    run = str(shared_run())
    monkeypatch.chdir(tmp_path)
    words = [
        part for word in command.split() for part in (tiny_run() if word == "TINY" else [word.replace("RUN", run)])
    ]
    said = hfgolf(*words, "--json")
    assert said.status == 0, said.err
    assert names <= json.loads(said.out).keys()


def test_json_has_null_for_what_is_not_finite(hfgolf, monkeypatch):
    """An evaluation whose perplexity overflows; NaN and Infinity are words of Python's, not JSON."""
    figures = {"loss": 800.0, "perplexity": math.inf, "losses": [math.nan]}
    monkeypatch.setattr("hfgolf.commands.report.main", lambda: Answer(figures))
    said = hfgolf("report", "--json")
    assert said == (0, json.dumps({"loss": 800.0, "perplexity": None, "losses": [None]}, indent=1) + "\n", "")


def test_json_of_a_conversation_is_refused(hfgolf):
    said = hfgolf("chat", "runs/a", "--json")
    assert said == (2, "", "error: --json: chat is a conversation; `hfgolf generate --json` writes one text.\n")


def test_every_script_is_a_door_of_at_most_ten_lines_to_a_verb():
    verbs = set()
    for path in (ROOT / "scripts").glob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 10, path.name
        words = re.search(r'main\(verb="(.*)"\)', text)
        assert words, path.name
        verbs.add(words[1])
    assert verbs == {*VERBS}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "error: hfgolf: there is no command trian; did you mean `hfgolf train`?\n"),
        (["xyzzy"], "error: hfgolf: there is no command xyzzy; `hfgolf --help` lists the commands.\n"),
        (["golf", "exprt"], "error: hfgolf: there is no command golf exprt; did you mean `hfgolf golf export`?\n"),
    ],
)
def test_an_unknown_verb_is_one_line(hfgolf, arguments, said):
    assert hfgolf(*arguments) == (2, "", said)


@pytest.mark.parametrize("verb", ["find_lr", "prepare", "profile", "schedule", "verify_resume"])
def test_what_the_minutes_would_choose_is_not_guessed(hfgolf, verb):
    said = hfgolf(verb, "my.txt", "--minutes", 5)
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("error: --minutes: without a config, the minutes choose shape and rates")


def test_a_printed_command_is_found_where_it_is_typed(tmp_path, monkeypatch):
    for name in ("python", "hfgolf"):
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / "bin" / name).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_command() == ".venv/bin/hfgolf"  # after make train, which activates nothing
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert own_command() == f"{tmp_path}/.venv/bin/hfgolf"
    monkeypatch.setenv("PATH", f"{tmp_path}/.venv/bin")
    assert own_command() == "hfgolf"
    (tmp_path / ".venv" / "bin" / "hfgolf").unlink()
    assert own_command() == f"{tmp_path}/.venv/bin/python -m hfgolf"


@pytest.mark.parametrize("verb", ["train", "prepare"])
@pytest.mark.parametrize("options", [[], ["--minutes=5"], ["--run.name=a", "--train.max_steps=3"]], ids=str)
def test_a_text_or_a_config_is_named(hfgolf, verb, options):
    said = hfgolf(verb, *options)
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith("error: name your text, a config, or both") and f"\n  hfgolf {verb} my.txt\n" in said.err


@pytest.mark.parametrize("name", ["a.txt", "--data.source=python_stdlib", "--data.hub_name=a/b", "--config=small"])
def test_each_name_of_a_text_or_a_config_is_one(name):
    assert load_config([name, "--train.max_steps=3"], verb="train") == load_config([name, "--train.max_steps=3"])


def test_a_bare_name_is_a_shipped_config_unless_such_a_file_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(["--config", "small"]) == load_config(["--config", str(ROOT / "configs" / "small.yaml")])
    assert find_config("configs/small.yaml") == "configs/small.yaml"  # a path stays a path
    Path("small").write_text("train: {max_steps: 3}")
    assert load_config(["--config", "small"]).config.train.max_steps == 3


def test_the_record_of_a_run_shows_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hfgolf train", "--config", "small"])
    assert run_metadata(load_config(["--config", "small"]))["command"] == ["hfgolf", "train", "--config", "small"]


def test_run_on_the_present_folder_has_its_name(tmp_path, monkeypatch):
    (folder := tmp_path / "letters").mkdir()
    monkeypatch.chdir(folder)
    assert load_config(["."]).config.run.name == load_config(["../letters/"]).config.run.name == "letters"


def test_texts_without_options_are_trained_with_the_small_config():
    resolved = load_config(["my songs.v2.txt", "more", "--train.max_steps", "3"])
    config, small = resolved.config, load_config(["--config", "small"]).config
    assert config.data.files == ["my songs.v2.txt", "more"] and config.data.source == "files"
    assert (config.run.name, config.train.max_steps) == ("my_songs", 3)
    assert resolved.sources["data.source"] == "auto"
    assert (config.model, config.optim) == (small.model, small.optim)
    assert resolved.sources["model.hidden_size"] == "small"
    assert config.tokenizer == TokenizerSection()  # whose size depends on the text
    assert resolved.config.train.sample_prompt == ""  # small's fits its text, not any text
    assert load_config(["a.txt", "--config", "tinystories"]).config.run.name == "tinystories"
    with pytest.raises(UserError, match=r"b.txt: data.files names the text already"):
        load_config(["b.txt", "--data.files", "a.txt"])


def test_a_run_takes_its_text_s_name_as_far_as_that_fits():
    for name in ("a" * 240 + ".txt", "ä" * 120 + ".txt"):
        run = load_config([name]).config.run.name
        assert len(run.encode()) == 100 and name.startswith(run)


def test_weights_that_exist_read_no_segments_unless_it_is_said(tmp_path):
    weights = "--model.init_from=gpt2"
    for options, segment_length, source in (
        (["a.txt"], 64, "small"),
        (["a.txt", "--model.init_from=null"], 64, "small"),
        (["a.txt", "--config=small", weights], None, "model.init_from"),
        (["a.txt", weights], None, None),
        (["a.txt", weights, "--batch.segment_length=32"], 32, "command line"),
    ):
        resolved = load_config(options)
        assert resolved.config.batch.segment_length == segment_length
        assert resolved.sources.get("batch.segment_length") == source
        assert not resolved.is_open, "nothing is left to choose"
    text = "model: {init_from: gpt2}\nbatch: {segment_length: 64}\ntrain: {max_steps: 1}"
    (tmp_path / "own.yaml").write_text(text)
    assert load_config(["--config", str(tmp_path / "own.yaml")]).config.batch.segment_length == 64


@pytest.mark.parametrize(
    ("data", "options", "source"),
    [
        ("{files: a.txt}", [], "files"),
        ("{files: [a.txt, b.txt]}", [], "files"),
        ("{source: python_stdlib}", ["--data.files", "a.txt"], "files"),
        ("{source: hub, hub_name: a/b}", ["--data.files", "a.txt"], "files"),
        ("{source: shards, files: a.bin, val_files: b.bin}", ["--tokenizer.kind=byte", "--data.files=c.bin"], "shards"),
        ("{source: python_stdlib}", ["--data.files=[]"], "python_stdlib"),
        ("{hub_name: a/b}", [], "hub"),
        ("{files: a.txt}", ["--data.hub_name", "a/b", "--data.files=[]"], "hub"),
        ("{hub_name: a/b}", ["a.txt"], "files"),
        ("{hub_name: a/b}", ["--data.source", "python_stdlib"], "python_stdlib"),
    ],
)
def test_files_and_a_name_on_the_hub_imply_their_source(tmp_path, data, options, source):
    (tmp_path / "x.yaml").write_text(f"data: {data}\ntrain: {{max_steps: 1}}")
    config = load_config(["--config", str(tmp_path / "x.yaml"), *options]).config.data
    assert config.source == source and all(isinstance(file, str) and len(file) > 1 for file in config.files)


@pytest.mark.parametrize("limit", ["--train.max_steps=1", "--minutes=1"])
def test_text_in_order_is_read_without_the_segments_of_a_shipped_config(limit, tmp_path):
    resolved = load_config(["a.txt", "--data.order=sequential", limit])
    assert resolved.config.batch.segment_length is None and resolved.sources["batch.segment_length"] == "data.order"
    assert resolved.is_open == (limit == "--minutes=1")
    (tmp_path / "own.yaml").write_text("batch: {segment_length: 64}\ntrain: {max_steps: 1}")
    for stated in (["a.txt", "--batch.segment_length=64"], [f"--config={tmp_path / 'own.yaml'}"]):
        with pytest.raises(UserError, match=r"batch.segment_length: 64 reads the text in another order"):
            load_config([*stated, "--data.order=sequential", limit])


def test_minutes_choose_heads_that_go_with_those_of_keys():
    model = load_config(["a.txt", "--minutes=1", "--model.num_key_value_heads=7"]).config.model
    assert model.num_attention_heads == 7 and model.hidden_size % 7 == 0


def test_names_of_the_text_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match=r"^data.hub_name and data.files both name the text; state one of them.$"):
        load_config(["a.txt", "--data.hub_name=a/b"])
    with pytest.raises(UserError, match=r"require data.source files or shards, not python_stdlib"):
        load_config(["a.txt", "--data.source", "python_stdlib"])


@pytest.mark.parametrize("limit", ["--train.max_steps=1", "--minutes=1"])
def test_the_name_of_a_tokenizer_implies_its_kind(limit):
    """Also if minutes choose the vocabulary, which nobody then trains."""
    stated = ["a.txt", "--tokenizer.name_or_path=gpt2", limit]
    resolved = load_config(stated)
    assert resolved.config.tokenizer.kind == "pretrained"
    assert resolved.sources["tokenizer.kind"] == "tokenizer.name_or_path"
    assert load_config([*stated, "--tokenizer.kind=byte"]).config.tokenizer.kind == "byte"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["train", "nowhere.txt"], "data.files: no file matches 'nowhere.txt'"),
        (["plan", "nowhere.txt"], "data.files: no file matches 'nowhere.txt'"),
        (["evaluate", "m", "nowhere.txt"], "--files: no file matches 'nowhere.txt'"),
        (["train", "my.txt", "--minutes=ten"], "the command line: --minutes: 'ten' is not allowed"),
        (["train", "my.txt", "--minutes"], "the command line: --minutes needs a value."),
        (["train", "my.txt", "--model.init_from=./no"], "model.init_from: there is no model ./no; runs here: none."),
    ],
)
def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path, arguments, said):
    (tmp_path / "my.txt").write_text("To be, or not to be.")
    program = f"import sys; from hfgolf import cli\ntry: cli.main({arguments})\nfinally: print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.startswith(f"error: {said}")


@pytest.mark.slow
def test_a_wheel_works_from_any_folder(tmp_path):
    """Installed into a folder of its own, without a checkout: the verbs, the configs, the first line in time."""
    source = tmp_path / "source"
    for name in ("hfgolf", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run(wheel, check=True, timeout=120)
    (built,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(built).extractall(installed)
    assert "hfgolf = hfgolf.cli:main" in next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    shutil.rmtree(source)

    def hfgolf(*arguments: str) -> str:
        program = f"import sys; sys.path.insert(0, {str(installed)!r}); import hfgolf.cli; hfgolf.cli.main()"
        command = [sys.executable, "-P", "-c", program, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60).stdout

    assert "find_lr" in hfgolf()
    assert "max_steps: 300" in hfgolf("train", "--config", "small", "--print_config")
    packed = zipfile.ZipFile(built).namelist()
    assert {"hfgolf/configs/small.yaml", "hfgolf/configs/accelerate/ddp.yaml", "hfgolf/commands/train.py"} <= {*packed}
