"""The config as a user writes it: YAML, options, sources, and one clear line per mistake."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
from pathlib import Path

import pytest
import yaml

from hfgolf.config.other_names import GONE, MOVED_TO_OVERRIDES, in_current_names
from hfgolf.config.parse import (
    KEY_TYPES,
    SECTIONS,
    ResolvedConfig,
    as_yaml,
    load_config,
    read_settings,
    run_command,
)
from hfgolf.config.sections import RunConfig
from hfgolf.model.configuration_golf import MODEL_FIELDS
from hfgolf.run.folder import run_folder
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[1]
LEVELS = "abcdefghi"
ENDS = ["--train.max_steps", "10"]


@pytest.fixture
def config_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "my_run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_command_line_overrides_file_and_file_overrides_default(config_file):
    path = config_file("optim: {learning_rate: 0.5, momentum: 0.9}\ntrain: {max_steps: 7}")
    resolved = load_config(["--config", path, "--optim.momentum=0.8"])
    assert resolved.config.optim.learning_rate == 0.5
    assert resolved.config.optim.momentum == 0.8
    assert resolved.config.optim.eps == 1e-8
    assert resolved.sources["optim.learning_rate"] == "file"
    assert resolved.sources["optim.momentum"] == "command line"
    assert "optim.eps" not in resolved.sources
    assert resolved.config.run.name == "my_run"


@pytest.mark.parametrize(
    ("stated", "key", "value"),
    [
        (["other.txt"], "data.files", ["other.txt"]),
        (["--data.files", "other.txt", "b.txt"], "data.files", ["other.txt", "b.txt"]),
        (["--data.files+", "other.txt", "b.txt"], "data.files", ["s.txt", "other.txt", "b.txt"]),
        (["--train.max_steps", "77"], "train.max_steps", 77),
        (["--model.overrides={a: 1}"], "model.overrides", {"a": 1}),
        (["--optim.betas=[0.5, 0.6]"], "optim.betas", (0.5, 0.6)),
        (["--tokenizer.name_or_path=null"], "tokenizer.name_or_path", None),
        (["--train.max_steps=5", "--train.max_steps", "77"], "train.max_steps", 77),
        (["--data.files=1e3"], "data.files", ["1e3"]),
        (["[draft] notes.txt"], "data.files", ["[draft] notes.txt"]),
        (["--train.max_steps=77", "null", "007", "a=b.txt"], "data.files", ["null", "007", "a=b.txt"]),
    ],
    ids=str,
)
def test_the_command_line_wins_wherever_the_config_stands(config_file, stated, key, value):
    path = config_file(
        "data: {files: s.txt}\ntrain: {max_steps: 3, max_minutes: 5}\noptim: {betas: [0.8, 0.9]}\n"
        "model: {architecture: llama, overrides: {b: 2}}\ntokenizer: {name_or_path: own}\nrun: {seed: 7}"
    )
    for order in itertools.permutations([stated, ["--config", path], ["--run.seed=8"]]):
        resolved = load_config([*itertools.chain(*order)])
        values = resolved.config.flat()
        assert values[key] == value and values["run.seed"] == 8 and values["train.max_minutes"] == 5
        assert resolved.sources[key] == resolved.sources["run.seed"] == "command line"
        assert resolved.sources["train.max_minutes"] == "file"


@pytest.mark.parametrize(
    ("arguments", "origin"),
    [
        (["a.txt", "--batch.sequence_length=300"], " It is from small."),
        ([*ENDS, "--batch.sequence_length=300"], " It is from the defaults."),
        (["a.txt", "--batch.sequence_length=300", "--batch.segment_length=7"], ""),
        (["a.txt", "--model.num_attention_heads=3"], " It is from small."),
        (["a.txt", "--model.hidden_size=250"], ""),
    ],
)
def test_a_value_that_nobody_wrote_is_blamed_with_its_origin(arguments, origin):
    with pytest.raises(UserError, match=r"^(batch|model)\.") as error:
        load_config(arguments)
    assert str(error.value).endswith(origin) and (origin or "from" not in str(error.value))


def test_after_two_dashes_all_are_texts():
    config = load_config(["--train.max_steps", "3", "--", "-a.txt", "--train.max_steps"]).config
    assert config.data.files == ["./-a.txt", "./--train.max_steps"] and config.train.max_steps == 3


@pytest.mark.parametrize(
    ("stated", "overrides"),
    [
        ([], {"loop": [0, 1, 2], "norm_eps": 1e-5}),
        (["--model.overrides.smear_gate", "8"], {"loop": [0, 1, 2], "norm_eps": 1e-5, "smear_gate": 8}),
        (
            ["--model.overrides.loop=null", "--model.overrides.lanes=true"],
            {"loop": None, "norm_eps": 1e-5, "lanes": True},
        ),
        (["--model.overrides={lanes: true}"], {"lanes": True}),
        (["--model.overrides={}", "--model.overrides.norm_eps=1e-7"], {"norm_eps": 1e-7}),
        (["--model.loop=[1, 2, 3]"], {"loop": [1, 2, 3], "norm_eps": 1e-5}),  # its name in earlier versions
        (["--model.loop=null"], {"loop": None, "norm_eps": 1e-5}),
        (["--model.head_gate=null"], {"loop": [0, 1, 2], "norm_eps": 1e-5}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "file", ["{overrides: {loop: [0, 1, 2], norm_eps: 1e-5}}", "{loop: [0, 1, 2], norm_eps: 1e-5}"]
)
def test_the_command_line_wins_for_each_field_of_overrides(config_file, file, stated, overrides):
    path = config_file(f"model: {file}\ntrain: {{max_steps: 3}}")
    for arguments in ([*stated, "--config", path], ["--config", path, *stated]):
        resolved = load_config(arguments)
        assert resolved.config.model.overrides == overrides
        is_of_file = not stated or stated == ["--model.head_gate=null"]  # its default, which changes nothing
        assert resolved.sources["model.overrides"] == ("file" if is_of_file else "command line")
    Path(path).write_text(resolved.to_yaml())
    assert load_config(["--config", path]).config == resolved.config


def test_what_moved_or_is_gone_is_no_key_and_has_its_default():
    assert {name: MODEL_FIELDS[name] for name in MOVED_TO_OVERRIDES} == MOVED_TO_OVERRIDES
    assert (
        not {f"model.{name}" for name in MOVED_TO_OVERRIDES} & KEY_TYPES.keys() and not GONE.keys() & KEY_TYPES.keys()
    )


def test_a_key_that_moved_is_said_once_and_defaults_move_in_silence(config_file, caplog):
    listed = ", ".join(f"{name}: {as_yaml(value)}" for name, value in MOVED_TO_OVERRIDES.items())
    path = config_file(f"model: {{{listed}}}\ntrain: {{max_steps: 3}}")
    assert load_config(["--config", path]).config.model.overrides == {} and not caplog.messages
    path = config_file("model: {unet_skips: gated, head_gate: 12, lanes: false}\ntrain: {max_steps: 3}")
    for _ in range(2):
        assert load_config(["--config", path]).config.model.overrides == {"unet_skips": "gated", "head_gate": 12}
    moved = "model.unet_skips, model.head_gate moved; now model.overrides: {head_gate: 12, unet_skips: gated}"
    assert caplog.messages == [f"{path}: {moved}"]
    read = read_settings(path)
    assert read["model.overrides"] == {"unet_skips": "gated", "head_gate": 12} and "model.lanes" not in read


@pytest.mark.parametrize("arguments", [[], ["--batch.tokens_per_step", "2048"]])
def test_a_half_life_of_earlier_versions_is_the_decay_that_it_was(config_file, caplog, arguments):
    path = config_file("optim: {ema_half_life_tokens: 270000}\ntrain: {max_steps: 3}")
    resolved = load_config(["--config", path, *arguments])
    decay = 0.5 ** (resolved.config.batch.tokens_per_step / 270000)
    assert resolved.config.optim.ema_decay == decay and resolved.sources["optim.ema_decay"] == "file"
    assert caplog.messages == [f"optim.ema_half_life_tokens 270000 is now optim.ema_decay {decay}"]
    assert load_config(["--config", path, "--optim.ema_half_life_tokens=null"]).config.optim.ema_decay is None
    assert load_config(["--config", path, "--optim.ema_decay=0.9"]).config.optim.ema_decay == 0.9
    assert in_current_names({"optim.ema_half_life_tokens": 270000})["optim.ema_decay"] == 0.5 ** (4096 / 270000)


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_keeps_its_default_and_says_what_to_do(config_file, key):
    default, advice = GONE[key]
    section, _, name = key.partition(".")
    ends = "" if section == "train" else "train: {max_steps: 3}\n"
    is_ended = {"train": "max_steps: 3, "}.get(section, "")
    path = config_file(f"{ends}{section}: {{{is_ended}{name}: {as_yaml(default)}}}")
    assert (
        load_config(["--config", path]).config == load_config(["--config", path, f"--{key}", as_yaml(default)]).config
    )
    other = -1 if default is None else "other"
    path = config_file(f"{ends}{section}: {{{is_ended}{name}: {other}}}")
    for where, arguments in ((path, ["--config", path]), ("the command line", [*ENDS, f"--{key}={other}"])):
        with pytest.raises(UserError) as error:
            load_config(arguments)
        assert str(error.value) == f"{where}: {key} is gone; {advice}."


def test_a_second_config_is_refused(config_file):
    with pytest.raises(UserError, match=r"^--config: named more than once \(small, .*my_run.yaml\); name one, and"):
        load_config(["--config", "small", "a.txt", "--config", config_file("run: {seed: 1}")])


def test_yaml_numbers_and_no_are_read_as_intended(config_file):
    path = config_file("optim: {learning_rate: 3e-4}\ntrain: {mixed_precision: no, compile: no, max_steps: 5}")
    config = load_config(["--config", path]).config
    assert config.optim.learning_rate == 3e-4
    assert config.train.mixed_precision == "no"
    assert config.train.compile is False
    config = load_config(
        [*ENDS, "--optim.eps", "1e-10", "--train.mixed_precision", "no", "--train.compile", "true"]
    ).config
    assert (config.optim.eps, config.train.mixed_precision, config.train.compile) == (1e-10, "no", True)


def test_plain_yaml_numbers_are_accepted(config_file):
    path = config_file("train: {max_steps: 1_000, log_every_steps: 007}\nrun: {seed: 0x10, name: '010'}")
    config = load_config(["--config", path]).config
    assert (config.train.max_steps, config.train.log_every_steps) == (1000, 7)
    assert (config.run.seed, config.run.name) == (16, "010")


def test_list_options_accept_an_expanded_glob():
    config = load_config(
        [*ENDS, "--data.source", "files", "--data.files", "a.txt", "b c.txt", "--run.seed", "3"]
    ).config
    assert config.data.files == ["a.txt", "b c.txt"]
    assert config.run.seed == 3


def test_written_config_reproduces_the_run(config_file, tmp_path: Path):
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
            ["--batch.segment_length", "48"],
            "batch.segment_length: 48 is out of range; allowed: null, a divisor of batch.sequence_length 256, or more"
            " than it (which changes nothing).",
        ),
        (
            ["--batch.segment_length", "64", "--data.order", "sequential"],
            "batch.segment_length: 64 reads the text in another order than data.order sequential; set"
            " batch.segment_length null, or data.order shuffled.",
        ),
        (
            ["--batch.segment_length", "0"],
            "batch.segment_length: 0 is out of range; allowed: null, a divisor of"
            " batch.sequence_length 256, or more than it (which changes nothing).",
        ),
        (
            ["--batch.segmented_tokens", "0"],
            "batch.segmented_tokens: 0 is out of range; allowed: a number above 0, up to 1152921504606846976.",
        ),
        (
            ["--model.hidden_size", "255"],
            "model.hidden_size: 255 is not divisible by model.num_attention_heads 4; try 252 or 256.",
        ),
        (
            ["--schedule.loop_start", "0.5"],
            "schedule.loop_start: it needs model.overrides.loop; set that, or leave it 0.",
        ),
        (["--schedule.loop_start", "1"], "schedule.loop_start: 1.0 is out of range; allowed: from 0 to below 1."),
        (
            ["--model.num_key_value_heads", "3"],
            "model.num_key_value_heads: 3 does not divide model.num_attention_heads 4; allowed: 1, 2, 4.",
        ),
        (
            ["--data.source", "files"],
            "data.files is empty, but data.source is files; name at least one path, folder, glob or URL.",
        ),
        (
            ["--golf.qat_fraction", "0.1"],
            "golf.budget_bytes is null, but golf.qat_fraction is set; state the bytes to train for.",
        ),
        (
            ["--golf.qat_fraction=0.1", "--golf.budget_bytes=9000", "--optim.ema_export=true", "--optim.ema_decay=0.9"],
            "optim.ema_export: true does not go with golf.qat_fraction, because averages are on no grid; drop one.",
        ),
        (["--golf.budget_bytes", "0"], "golf.budget_bytes: 0 is out of range; allowed: a number above 0."),
        (["--hub.push", "true"], "hub.repo_id is null, but hub.push is true; name the repository, as user/name."),
        (
            ["--hub.license", "Apache 2.0"],
            "hub.license: 'Apache 2.0' is out of range; allowed: a name in lower case such as apache-2.0.",
        ),
        (
            ["--hub.language", "[en, English]"],
            "hub.language: 'English' is out of range; allowed: codes of ISO 639 such as en or deu, code and"
            " multilingual.",
        ),
        (["--optim.ema_decay", "1"], "optim.ema_decay: 1.0 is out of range; allowed: from 0 to below 1."),
        (
            ["--optim.ema_export", "true"],
            "optim.ema_export is true, but there is no EMA; set optim.ema_decay.",
        ),
        (["--run.name", "../up"], "run.name: '../up' is out of range; allowed: letters, digits, . _ -."),
        (["-stray"], "unrecognized arguments: -stray."),
        (
            ["--train.max_steps", "1e400"],
            "the command line: train.max_steps: '1e400' is not allowed; allowed: a whole number or null.",
        ),
        (
            ["--train.max_steps", str(10**18)],
            "train.max_steps: 1000000000000000000 is out of range; allowed: a number above 0, up to 1000000000.",
        ),
        (["--train.max_minutes", ".inf"], "train.max_minutes: inf is out of range; allowed: numbers up to 1e+38."),
        (["--train.max_epochs", "1e308"], "train.max_epochs: 1e+308 is out of range; allowed: numbers up to 1e+38."),
        (["--optim.learning_rate", ".nan"], "optim.learning_rate: nan is out of range; allowed: a number above 0."),
        (["--optim.weight_decay", ".inf"], "optim.weight_decay: inf is out of range; allowed: numbers up to 1e+38."),
        (
            ["--optim.betas", "[.nan, 0.9]"],
            "optim.betas: (nan, 0.9) is out of range; allowed: two numbers from 0 to below 1.",
        ),
        (
            ["--run.seed", str(2**64)],
            "run.seed: 18446744073709551616 is out of range; allowed: 0 to 9223372036854775807.",
        ),
        (
            ["--model.hidden_size", str(10**9)],
            "model.hidden_size: 1000000000 is out of range; allowed: a number above 0, up to 131072.",
        ),
        (
            ["--model.num_hidden_layers", str(10**9)],
            "model.num_hidden_layers: 1000000000 is out of range; allowed: a number above 0, up to 1000.",
        ),
        (
            ["--batch.sequence_length", str(10**12)],
            "batch.sequence_length: 1000000000000 is out of range; allowed: 2 to 16777216.",
        ),
        (
            ["--batch.tokens_per_step", str(10**15)],
            "batch.tokens_per_step: 1000000000000000 is out of range; allowed: a number above 0, up to 1099511627776.",
        ),
        (["--data.num_workers", "1000000"], "data.num_workers: 1000000 is out of range; allowed: 0 to 1024."),
        (["--run.name", "x" * 300], f"run.name: '{'x' * 47}...{'x' * 48}' is out of range; allowed: up to 200 bytes."),
        (
            ["--run.output_dir", "a\0b"],
            "run.output_dir: 'a\\x00b' is out of range; allowed: text in UTF-8, without NUL.",
        ),
        (
            ["--run.output_dir", "\udcff"],
            "run.output_dir: '\\udcff' is out of range; allowed: text in UTF-8, without NUL.",
        ),
        (
            ["--train.max_steps", "1:30"],
            "the command line: train.max_steps: '1:30' is not allowed; allowed: a whole number or null.",
        ),
        (
            ["--optim.betas", "[0.9, 0:0.5]"],
            "the command line: optim.betas: '[0.9, 0:0.5]' is not allowed; allowed: a list of 2, each a number.",
        ),
        (
            ["--optim.learning_rate", "[" * 5000 + "]" * 5000],
            "the command line: a value is nested too deeply."
            if sys.version_info < (3, 13)  # its parser goes deeper
            else f"the command line: optim.learning_rate: '{'[' * 47}...{']' * 48}' is not allowed; allowed: a number.",
        ),
    ],
)
def test_mistake_on_the_command_line_is_one_line(arguments, message):
    with pytest.raises(UserError) as error:
        load_config([*ENDS, *arguments])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optm: {name: muon}", "unknown section optm; did you mean optim?"),
        ("optim: {lerning_rate: 1}", "unknown key optim.lerning_rate; did you mean optim.learning_rate?"),
        ("optim: fast", "optim: 'fast' is not allowed; allowed: keys and values, as in `optim: {key: value}`."),
        ("optim: {learning_rate: }", "optim.learning_rate: null is not allowed; allowed: a number."),
        ("optim: {name: 3}", "optim.name: 3 is not allowed; allowed: muon, adamw or sgd."),
        (
            "- optim",
            "must hold sections (run, data, tokenizer, model, batch, optim, schedule, train, track, hub, golf).",
        ),
        ("optim: {", "is not YAML"),
        ("train:\n  max_steps: 010", "line 2: YAML reads 010 as 8; write 8 if you mean that, or put text in quotes."),
        (
            "train:\n  max_minutes: 1:30",
            "line 2: YAML reads 1:30 as 90; write 90 if you mean that, or put text in quotes.",
        ),
        (
            "run: {name: 1:30.5}",
            "line 1: YAML reads 1:30.5 as 90.5; write 90.5 if you mean that, or put text in quotes.",
        ),
        (
            "run: {seed: 1}",
            "the run has no limit; set train.max_steps, train.max_tokens, train.max_epochs or train.max_minutes.",
        ),
    ],
)
def test_mistake_in_the_file_is_one_line(config_file, text, message):
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        load_config(["--config", config_file(text)])
    assert message in str(error.value)


def _bomb(levels: int) -> str:
    """Each level holds ten aliases of the level below."""
    lines = [
        f"{name}: &{name} [{','.join([below] * 10)}]"
        for below, name in zip(["x", *(f"*{name}" for name in LEVELS)], LEVELS[:levels], strict=False)
    ]
    return "\n".join(lines)


HOSTILE_FILES: dict[str, tuple[str | bytes, str]] = {
    "a key twice": ("train:\n  max_steps: 5\n  max_steps: 6", "max_steps appears twice, the second time in line 3."),
    "a section twice": ("train: {max_steps: 5}\ntrain: {}", "train appears twice, the second time in line 2."),
    "an alias bomb": (_bomb(9), "its aliases expand to more than 100,000 values."),
    "an alias to itself": ("data: &a\n  files: *a", "its aliases expand to more than 100,000 values."),
    "deep lists": ("[" * 100_000, "nested too deeply."),
    "deep mappings": ("data: " + "{a: " * 3000 + "1" + "}" * 3000, "nested too deeply."),
    "a nested value": ("data: {files: [[[[[a]]]]]}", "data.files: [[[[['a']]]]] is not allowed; allowed: a list"),
    "binary junk": (bytes(range(256)), "is not YAML: 'utf-8' codec can't decode"),
    "a NUL": ("train: {max_steps: 5}\0", "is not YAML: unacceptable character"),
    "UTF-16": ("train: {max_steps: 5}".encode("utf-16"), "is not YAML: 'utf-8' codec can't decode"),
    "a thirteenth month": ("run: {name: 2020-13-45}", "is not YAML: month must be in 1..12."),
    "5,000 digits": (f"train: {{max_steps: {'9' * 5000}}}", "is not YAML: Exceeds the limit"),
    "300 digits": (f"train: {{max_steps: {'9' * 300}}}", "is out of range; allowed: a number above 0"),
    "two documents": ("train: {max_steps: 5}\n---\n", "is not YAML: expected a single document"),
    "a list as a key": ("? [a, b]\n: c", "is not YAML"),
    "Python's tags": ("run: {name: !!python/object/apply:os.system [echo]}", "could not determine a constructor"),
    "lone surrogates": (
        'run: {output_dir: "\\ud800"}\ntrain: {max_steps: 1}',
        "run.output_dir: '\\ud800' is out of range; allowed: text in UTF-8, without NUL.",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_hostile_file_is_one_line(name, tmp_path):
    content, message = HOSTILE_FILES[name]
    path = tmp_path / "hostile.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"^[^\n]{,600}$") as error:
        load_config(["--config", str(path)])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", ". is a folder, not a file"),
        ("x" * 5000, "there is no file xxx"),
        ("", "there is no file "),
        ("/proc/self/mem", "/proc/self/mem cannot be read (Input/output error)."),
    ],
)
def test_unreadable_config_file_is_one_line(path, message):
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        load_config(["--config", path])
    assert message in str(error.value)


def test_ordinary_yaml_aliases_are_accepted(config_file):
    text = "optim: {learning_rate: &rate 0.5, adamw_learning_rate: *rate}\ntrain: {max_steps: 5}"
    assert load_config(["--config", config_file(text)]).config.optim.adamw_learning_rate == 0.5


def test_tilde_expands_to_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config([*ENDS, "--run.output_dir", "~/runs", "--run.name", "x"]).config
    assert run_folder(config).path == Path("/home/somebody/runs/x")


def test_missing_config_file_lists_existing_ones(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"no file configs/smal.yaml; name a file, or one that hfgolf has: .*, small, "):
        load_config(["--config", "configs/smal.yaml"])


@pytest.mark.parametrize(
    ("micro_batch_size", "processes", "accumulation"), [(16, 1, 1), (8, 2, 1), (4, 2, 2), (1, 1, 16)]
)
def test_accumulation_is_derived(micro_batch_size, processes, accumulation):
    batch = load_config([*ENDS, "--batch.tokens_per_step", "4096"]).config.batch
    assert batch.accumulation_steps(micro_batch_size, processes) == accumulation


def test_indivisible_batch_names_the_nearest_valid_sizes():
    batch = load_config([*ENDS, "--batch.tokens_per_step", "4096"]).config.batch
    with pytest.raises(UserError) as error:
        batch.accumulation_steps(5, 1)
    assert "tokens_per_step 3840 or 5120 or batch.micro_batch_size 2, 4, 8." in str(error.value)
    for size in (2, 4, 8):
        assert batch.accumulation_steps(size, 1) * size == 16
    with pytest.raises(UserError, match=r"3 processes; try batch.tokens_per_step 3072 or 4608\.$"):
        batch.accumulation_steps(2, 3)


def test_print_config_prints_the_resolved_config(config_file, capsys):
    arguments = ["--config", config_file("optim: {learning_rate: 0.5}\ntrain: {max_steps: 7}"), "--optim.momentum=0.8"]
    with pytest.raises(SystemExit) as exit_:
        load_config([*arguments, "--print_config"])
    assert not exit_.value.code
    printed = yaml.safe_load(capsys.readouterr().out)
    of_values = {f"{section}.{key}": value for section, keys in printed.items() for key, value in keys.items()}
    assert of_values.keys() == set(KEY_TYPES)
    assert (of_values["optim.learning_rate"], of_values["optim.momentum"], of_values["train.max_steps"]) == (
        0.5,
        0.8,
        7,
    )


def test_every_key_is_documented():
    documented = set()
    for section, cls in SECTIONS.items():
        (definition,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(definition, ast.ClassDef)
        for key, docstring in itertools.pairwise(definition.body):
            if isinstance(key, ast.AnnAssign) and isinstance(docstring, ast.Expr):
                assert isinstance(key.target, ast.Name)
                documented.add(f"{section}.{key.target.id}")
    assert documented == set(KEY_TYPES)


def test_sections_are_frozen():
    config = load_config(ENDS).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.learning_rate = 1.0


def test_user_error_prints_no_traceback_and_exits_with_2(capsys):
    def main() -> None:
        raise UserError("what; where; what to do.")

    with pytest.raises(SystemExit) as exit_:
        run_command(main)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: what; where; what to do.\n"


@pytest.mark.parametrize("config", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_shipped_config_loads(config):
    assert load_config(["--config", str(ROOT / "configs" / config)]).config.run.name == config.removesuffix(".yaml")


def test_low_memory_sets_what_is_not_stated():
    resolved = load_config([*ENDS, "--train.low_memory=true", "--optim.state_dtype=fp32"])
    assert resolved.config.model.gradient_checkpointing and resolved.config.optim.state_dtype == "fp32"
    assert resolved.sources["model.gradient_checkpointing"] == "train.low_memory"
    config = RunConfig().replace(train__low_memory=True)
    assert ResolvedConfig.from_code(config).config.optim.state_dtype == "bf16"
    with pytest.raises(UserError, match=r"optim\.betas: 0\.999 .*at most 0\.98 with optim\.state_dtype bf16"):
        load_config([*ENDS, "--train.low_memory=true", "--optim.betas=[0.9,0.999]"])
