"""The config as a person types it: YAML, options, sources, and one clear line for every mistake."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from hfgolf.command_line import KEY_TYPES, SECTIONS, load_config, run_command
from hfgolf.errors import UserError

ROOT = Path(__file__).parents[1]
ENDS = ["--train.max_steps", "10"]


@pytest.fixture
def config_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "my_run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(config_file):
    path = config_file("optim: {learning_rate: 0.5, momentum: 0.9}\ntrain: {max_steps: 7}")
    resolved = load_config(["--config", path, "--optim.momentum=0.8"])
    assert resolved.config.optim.learning_rate == 0.5
    assert resolved.config.optim.momentum == 0.8
    assert resolved.config.optim.eps == 1e-8
    assert resolved.sources["optim.learning_rate"] == "file"
    assert resolved.sources["optim.momentum"] == "command line"
    assert "optim.eps" not in resolved.sources
    assert resolved.config.run.name == "my_run"


def test_numbers_and_no_mean_what_people_mean(config_file):
    path = config_file("optim: {learning_rate: 3e-4}\ntrain: {mixed_precision: no, compile: no, max_steps: 5}")
    config = load_config(["--config", path]).config
    assert config.optim.learning_rate == 3e-4
    assert config.train.mixed_precision == "no"
    assert config.train.compile is False
    config = load_config(
        [*ENDS, "--optim.eps", "1e-10", "--train.mixed_precision", "no", "--train.compile", "true"]
    ).config
    assert (config.optim.eps, config.train.mixed_precision, config.train.compile) == (1e-10, "no", True)


def test_a_list_takes_what_a_shell_makes_of_a_glob():
    config = load_config(
        [*ENDS, "--data.source", "files", "--data.files", "a.txt", "b c.txt", "--run.seed", "3"]
    ).config
    assert config.data.files == ["a.txt", "b c.txt"]
    assert config.run.seed == 3


def test_the_written_config_repeats_the_run(config_file, tmp_path: Path):
    arguments = [*ENDS, "--optim.betas", "[0.8, 0.99]", "--optim.learning_rate=3e-5", "--train.mixed_precision=no"]
    first = load_config([*arguments, "--run.name", "007"])
    (tmp_path / "again.yaml").write_text(first.to_yaml())
    assert load_config(["--config", str(tmp_path / "again.yaml")]).config == first.config
    assert "  learning_rate: 3.0e-05  # command line" in first.to_yaml().splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--optim.learnin_rate", "1"],
            "the command line: unknown key optim.learnin_rate; did you mean optim.learning_rate?",
        ),
        (["--max_steps", "1"], "the command line: unknown key max_steps; did you mean train.max_steps?"),
        (
            ["--optim.learning_rate", "fast"],
            "the command line: optim.learning_rate: 'fast' is not allowed; allowed: a number.",
        ),
        (["--optim.name", "adam"], "the command line: optim.name: 'adam' is not allowed; allowed: muon, adamw or sgd."),
        (["--optim.learning_rate", "-1"], "optim.learning_rate: -1.0 is out of range; allowed: a number above 0."),
        (["--data.val_fraction", "1"], "data.val_fraction: 1.0 is out of range; allowed: a number between 0 and 1."),
        (
            ["--batch.micro_batch_size", "0.5"],
            "the command line: batch.micro_batch_size: '0.5' is not allowed; allowed: a whole number or auto.",
        ),
        (
            ["--batch.tokens_per_step", "1000"],
            "batch.tokens_per_step: 1000 is not a multiple of batch.sequence_length 256; try 768 or 1024.",
        ),
        (
            ["--model.hidden_size", "255"],
            "model.hidden_size: 255 is not divisible by model.num_attention_heads 4; try 252 or 256.",
        ),
        (
            ["--model.num_key_value_heads", "3"],
            "model.num_key_value_heads: 3 does not divide model.num_attention_heads 4; allowed: 1, 2, 4.",
        ),
        (
            ["--data.source", "files"],
            "data.files is empty while data.source is files; name at least one path, glob or URL.",
        ),
        (["--hub.push", "true"], "hub.repo_id is null while hub.push is true; name the repository, as user/name."),
        (["--optim.ema_decay", "1"], "optim.ema_decay: 1.0 is out of range; allowed: a number between 0 and 1."),
        (
            ["--optim.ema_half_life_tokens", "0"],
            "optim.ema_half_life_tokens: 0 is out of range; allowed: a number above 0.",
        ),
        (
            ["--optim.ema_decay", "0.9", "--optim.ema_half_life_tokens", "5000"],
            "optim.ema_decay: 0.9 and optim.ema_half_life_tokens 5000 both say how fast the average moves;"
            " set one and leave the other null.",
        ),
        (
            ["--optim.ema_export", "true"],
            "optim.ema_export is true while no average is kept; set optim.ema_decay or optim.ema_half_life_tokens.",
        ),
        (["--run.name", "../up"], "run.name: '../up' is out of range; allowed: letters, digits, . _ -."),
        (["stray"], "unrecognized arguments: stray."),
    ],
)
def test_a_mistake_is_one_clear_line(arguments, message):
    with pytest.raises(UserError) as error:
        load_config([*ENDS, *arguments])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optm: {name: muon}", "unknown section optm; did you mean optim?"),
        ("optim: {lerning_rate: 1}", "unknown key optim.lerning_rate; did you mean optim.learning_rate?"),
        ("optim: fast", "optim: 'fast' is not allowed; allowed: keys, as `optim: {key: value}`."),
        ("optim: {learning_rate: }", "optim.learning_rate: null is not allowed; allowed: a number."),
        ("optim: {name: 3}", "optim.name: 3 is not allowed; allowed: muon, adamw or sgd."),
        ("- optim", "must hold sections (run, data, tokenizer, model, batch, optim, schedule, train, track, hub)."),
        ("optim: {", "is not YAML"),
        (
            "run: {seed: 1}",
            "the run has no end; set one of train.max_steps, train.max_tokens, train.max_epochs, train.max_minutes.",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_clear_line(config_file, text, message):
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        load_config(["--config", config_file(text)])
    assert message in str(error.value)


def test_a_missing_file_names_those_there_are(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"no file configs/smal.yaml; there are .*configs/small.yaml"):
        load_config(["--config", "configs/smal.yaml"])


@pytest.mark.parametrize(
    ("micro_batch_size", "processes", "accumulation"), [(16, 1, 1), (8, 2, 1), (4, 2, 2), (1, 1, 16)]
)
def test_accumulation_is_derived(micro_batch_size, processes, accumulation):
    batch = load_config([*ENDS, "--batch.tokens_per_step", "4096"]).config.batch
    assert batch.accumulation_steps(micro_batch_size, processes) == accumulation


def test_an_indivisible_batch_names_the_nearest_that_work():
    batch = load_config([*ENDS, "--batch.tokens_per_step", "4096"]).config.batch
    with pytest.raises(UserError) as error:
        batch.accumulation_steps(5, 1)
    assert "tokens_per_step 3840 or 5120 or batch.micro_batch_size 2, 4, 8." in str(error.value)
    for size in (2, 4, 8):
        assert batch.accumulation_steps(size, 1) * size == 16
    with pytest.raises(UserError, match=r"3 processes; try batch.tokens_per_step 3072 or 4608\.$"):
        batch.accumulation_steps(2, 3)


def test_every_key_is_documented():
    documented = set()
    for section, cls in SECTIONS.items():
        body = ast.parse(inspect.getsource(cls)).body[0].body
        for key, docstring in itertools.pairwise(body):
            if isinstance(key, ast.AnnAssign) and isinstance(docstring, ast.Expr):
                documented.add(f"{section}.{key.target.id}")
    assert documented == set(KEY_TYPES)


def test_sections_are_frozen():
    config = load_config(ENDS).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.learning_rate = 1.0


def test_a_user_error_is_printed_without_a_traceback_and_exits_with_2(capsys):
    def main() -> None:
        raise UserError("what; where; what to do.")

    with pytest.raises(SystemExit) as exit_:
        run_command(main)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: what; where; what to do.\n"


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.py")))
def test_every_script_answers_help_without_importing_torch(script):
    program = (
        "import runpy, sys; sys.argv = [sys.argv[1], '--help']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, str(ROOT / "scripts" / script)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "usage:" in answer.stdout
    assert answer.stderr.strip() == "False"


@pytest.mark.parametrize("config", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_config_that_ships_loads(config):
    assert load_config(["--config", str(ROOT / "configs" / config)]).config.run.name == config.removesuffix(".yaml")
