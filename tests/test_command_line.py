"""The config as a user writes it: YAML, options, sources, and one clear line per mistake."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError
from ruamel.yaml import YAML

from hfgolf.config.other_names import GONE, MOVED_TO_OVERRIDES, in_current_names
from hfgolf.config.parse import KEY_TYPES, SECTIONS, ResolvedConfig, as_yaml, has_type, load_config, read_settings
from hfgolf.config.sections import RunConfig
from hfgolf.model.configuration_golf import MODEL_FIELDS
from hfgolf.run.folder import run_folder
from hfgolf.system.command import run_command
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "configs" / "schema.json").read_text(encoding="utf-8"))
LEVELS = "abcdefghi"
ENDS = ["--train.max_steps", "10"]


@pytest.fixture
def config_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "my_run.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("stated", "key", "value"),
    [
        (["other.txt"], "data.files", ["other.txt"]),
        (["--data.files", "other.txt", "b c.txt"], "data.files", ["other.txt", "b c.txt"]),
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
        assert resolved.sources["train.max_minutes"] == "file" and "optim.eps" not in resolved.sources
        assert values["optim.eps"] == 1e-8 and values["run.name"] == "my_run"


@pytest.mark.parametrize(
    ("arguments", "origin"),
    [
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batch.sequence_length=300"], (2400, None)),
        (["--batch.sequence_length=512"], (2048, 64)),
        (["--batch.sequence_length=5000"], (5000, None)),
        (["--batch.sequence_length=64"], (2048, 64)),  # without effect, and what earlier runs recorded
        (["--batch.sequence_length=100", "--model.init_from=x"], (4000, None)),
        (["--batch.sequence_length=100", "--batch.tokens_per_step=700"], (700, None)),
    ],
)
def test_the_batch_of_a_shipped_config_fits_a_stated_sequence_length(arguments, expected):
    batch = load_config(["a.txt", *arguments]).config.batch
    assert (batch.tokens_per_step, batch.segment_length) == expected


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
    load_config(["--config", config_file("model: {overrides: {loop: [0, 1, 2]}, loop: null}\ntrain: {max_steps: 3}")])
    assert caplog.messages == [f"{path}: {moved}"]
    config_file("model: {unet_skips: gated, head_gate: 12, lanes: false}")
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


READ_AS: dict[str, dict[str, Any]] = {
    "optim: {learning_rate: '1e-5', betas: ['0.5', '0.75']}": {"optim.learning_rate": 1e-5, "optim.betas": (0.5, 0.75)},
    "optim: {row_equilibration: yes, ema_decay: 'null'}": {"optim.row_equilibration": True, "optim.ema_decay": None},
    "train: {compile: Off, mixed_precision: no}": {"train.compile": False, "train.mixed_precision": "no"},
    "train: {compile: On, mixed_precision: off}": {"train.compile": True, "train.mixed_precision": "no"},
    "train: {compile: 'true', mixed_precision: false}": {"train.compile": True, "train.mixed_precision": "no"},
    "run: {name: yes, seed: '007'}": {"run.name": "yes", "run.seed": 7},
    "optim: {nesterov: on, ema_half_life_tokens: '4096'}": {"optim.ema_decay": 0.5},
    "schedule: {warmdown_shape: linear}\ngolf: {damping: '0.01'}": {},
    "model: {lanes: on, norm_eps: '1e-5'}": {"model.overrides": {"lanes": True, "norm_eps": 1e-5}},
    "model: {lanes: off, norm_eps: '1e-6', head_gate: 'null'}": {"model.overrides": {}},
    "model: {overrides: {norm_eps: '1e-5', own: '1e-5'}}": {"model.overrides": {"norm_eps": 1e-5, "own": "1e-5"}},
}
"""{a file: values of its config}. Of a field of a model whose type nobody knows, text is text."""


@pytest.mark.parametrize("file", READ_AS)
def test_text_for_a_number_or_a_truth_value_is_what_yaml_reads_in_it(config_file, file):
    """Also as YAML 1.1 had it, which earlier versions read."""
    sections = YAML(typ="safe").load(file).items()
    values = {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}
    for call in ({"argv": [*ENDS, "--config", config_file(file)]}, {"argv": ENDS, "values": values}):
        config = load_config(**call).config.flat()
        assert {key: config[key] for key in READ_AS[file]} == READ_AS[file]


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


def test_values_are_those_of_yaml_1_2(config_file):
    text = "train: {max_steps: 1_000, log_every_steps: 010, mixed_precision: no, compile: false}"
    path = config_file(f"{text}\nrun: {{seed: 0x10, name: '007'}}\noptim: {{learning_rate: 3e-4, eps: 1e-10}}")
    config = load_config(["--config", path]).config
    assert (config.train.max_steps, config.train.log_every_steps, config.run.seed) == (1000, 10, 16)
    assert (config.train.mixed_precision, config.train.compile, config.run.name) == ("no", False, "007")
    assert (config.optim.learning_rate, config.optim.eps) == (3e-4, 1e-10)
    assert load_config(["--config", config_file("run: {name: 2026-01-31}"), *ENDS]).config.run.name == "2026-01-31"
    options = ["--optim.eps=1e-9", "--train.mixed_precision=no", "--train.compile", "true", "--run.name=010"]
    config = load_config([*ENDS, *options]).config
    assert (config.optim.eps, config.train.mixed_precision, config.train.compile) == (1e-9, "no", True)
    assert config.run.name == "010"


def test_written_config_reproduces_the_run(config_file, tmp_path: Path):
    arguments = [*ENDS, "--optim.betas", "[0.8, 0.99]", "--optim.learning_rate=3e-5", "--train.mixed_precision=no"]
    first = load_config([*arguments, "--run.name", "007"])
    (tmp_path / "again.yaml").write_text(first.to_yaml())
    assert load_config(["--config", str(tmp_path / "again.yaml")]).config == first.config
    assert "  learning_rate: 3.0e-05  # command line" in first.to_yaml().splitlines()


MISTAKES = {
    "--optim.learnin_rate 1": "the command line: unknown key optim.learnin_rate; did you mean optim.learning_rate?",
    "--max_steps 1": "unknown key max_steps; did you mean train.max_steps?",
    "--distill_form a": "unknown key distill_form; did you mean --distill_from?",
    "--minuts 1": "unknown key minuts; did you mean --minutes?",
    "--steps 1": "unknown key steps; docs/config.md has all keys",
    "--optim.name adam": "optim.name: 'adam' is not allowed; allowed: muon, adamw or sgd.",
    "--optim.learning_rate -1": "optim.learning_rate: -1 is not allowed; allowed: a number above 0, up to 10^38.",
    "--optim.betas '[.nan, 0.9]'": "nan is not allowed; allowed: a list of 2, each a number from 0 to below 1.",
    "--train.max_steps 1:30": "'1:30' is not allowed; allowed: a whole number from 1 to 1000000000 or null.",
    "--train.compile=1": "train.compile: 1 is not allowed; allowed: auto, true or false.",
    "--batch.tokens_per_step 1000": "1000 is not a multiple of batch.sequence_length 256; try 768 or 1024.",
    "--batch.segment_length 48": "48 is not allowed; allowed: null, a divisor of batch.sequence_length 256",
    "--batch.segment_length 64 --data.order sequential": "segment_length: 64 ... null, or data.order shuffled.",
    "--model.hidden_size 255": "255 is not divisible by model.num_attention_heads 4; try 252 or 256.",
    "--schedule.loop_start 0.5": "schedule.loop_start: it needs model.overrides.loop; set that, or leave it 0.",
    "--model.num_key_value_heads 3": "3 does not divide model.num_attention_heads 4; allowed: 1, 2, 4.",
    "--model.architecture=llama --model.qk_norm=false": "model.qk_norm: it is an option of architecture golf",
    "a.txt --data.old_text b.txt": "data.old_text requires model.init_from: other weights know no text yet.",
    "--data.source files": "data.files is empty, but data.source is files; name at least one path, folder, glob or",
    "--golf.qat_fraction 0.1": "golf.budget_bytes is null, but golf.qat_fraction is set; state the bytes to train for.",
    "--golf.qat_fraction=0.1 --golf.budget_bytes=9000 --optim.ema_export=true --optim.ema_decay=0.9": (
        "optim.ema_export: true does not go with golf.qat_fraction: averages are on no grid; drop one."
    ),
    "--hub.repo_id ./folder": "'./folder' is not allowed; allowed: user/name, each of letters, digits, . _ -",
    "--hub.push true": "hub.repo_id is null, but hub.push is true; name the repository, as user/name.",
    "--hub.language '[en, English]'": "'English' is not allowed; allowed: a list, each a code of ISO 639, code",
    "--optim.ema_export true": "optim.ema_export is true, but there is no EMA; set optim.ema_decay.",
    "--optim.newton_schulz_steps=6": "steps: 6 is not allowed; allowed: at most 5 with ...coefficients polar_express.",
    "-stray": "the command line: '-stray' is no option; options are --section.key VALUE.",
    "--run.seed": "the command line: --run.seed needs a value.",
    "--config": "the command line: --config needs a value.",
    "--config --run.seed=3": "the command line: --config needs a value.",
    "--print_config=yes": "the command line: --print_config takes no value.",
    f"--run.name {'é' * 101}": f"name: '{'é' * 47}...{'é' * 48}' is not allowed; allowed: letters, digits, . _ -",
    "--run.output_dir a\0b": "'a\\x00b' is not allowed; allowed: text in UTF-8, without NUL.",
    "--run.output_dir \udcff": "'\\udcff' is not allowed; allowed: text in UTF-8, without NUL.",
    "--model.overrides.rope_theta 1e39": "{'rope_theta': 1e+39} is not allowed; allowed: a mapping of names to finite",
    f"--optim.learning_rate {'[' * 700}{']' * 700}": f"rate '{'[' * 47}...{']' * 48}' is not YAML (",
    "--optim.betas '[0.9, 0.95'": "optim.betas '[0.9, 0.95' is not YAML (line 1: ",
    "--track.trackers '[wandb'": "track.trackers '[wandb' is not YAML (line 1: ",
    "--data.messages_column=a": "data.messages_column requires data.source hub or files, and data.split",
    "a.txt --data.messages_column=a --data.ids_column=b": "are both set",
    "--data.ids_column=ids": "data.ids_column requires data.source hub or files, and data.split documents",
    "--data.source=files --data.files=[a] --data.ids_column=ids": "has only tokens; set",
    "--data.source=shards": "data.files is empty, but data.source is shards",
    "--data.source=shards --data.files=[a.bin]": "data.val_files is empty, but data.source is shards",
    "--data.separator_id=1": "data.val_bytes_files and data.separator_id require data.source shards",
    "a.jsonl --data.messages_column=m --tokenizer.vocab_size=260": "260 is too small for data.messages_column",
    "a.jsonl --data.messages_column=m --golf.forecast_every_steps=5": "do not go with data.messages_column",
    "a.jsonl --data.messages_column=m --tokenizer.name_or_path=gpt2 --model.overrides.attention_span=document": (
        "model.overrides.attention_span: document does not go with data.messages_column"
    ),
    "my.txt --dollars 3": "--dollars: the price is not known; add --run.price_per_hour",
    "my.txt --dollars 3 --run.price_per_hour null": "--dollars: the price is not known; add --run.price_per_hour",
    "my.txt --dollars 3 --run.price_per_hour 0": (
        "run.price_per_hour: 0 is not allowed with --dollars; allowed: a number above 0."
    ),
    "my.txt --dollars 3 --run.price_per_hour two": "run.price_per_hour: 'two' is not allowed with --dollars",
    "my.txt --dollars none --run.price_per_hour 2": "'none' is not allowed; allowed: a number above 0.",
    "my.txt --dollars": "--dollars needs a value",
    "my.txt --dollars 2 --minutes 3": "--dollars and train.max_minutes both say how long to train",
    "my.txt --minutes 0": "train.max_minutes: 0 is not allowed",
    "my.txt --minutes": "--train.max_minutes needs a value",
}
"""{options: what the line says, "..." for anything between}."""


@pytest.mark.parametrize("options", MISTAKES, ids=lambda options: options[:50])
def test_mistake_on_the_command_line_is_one_line(options):
    with pytest.raises(UserError, match=r"^[^\n]{,300}$") as error:
        load_config([*ENDS, *shlex.split(options)])
    assert all(part in str(error.value) for part in MISTAKES[options].split("...")), error.value


OTHER_KINDS: list[tuple[Any, str]] = [
    *((None, "null"), (True, "true"), (1, "1"), (0.5, "0.5"), ("unheard-of", "'unheard-of'"), ([0.5], "0.5")),
    *(({"a": 1}, "{'a': 1}"), (math.nan, "nan"), (math.inf, "inf"), (1e308, "1e+308"), (10**400, "1000")),
]
"""A value of each kind, and how a message shows it."""


def bounds_and_beyond(kind: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the least and the largest numbers that a JSON Schema allows, and the ones that follow these."""
    least, largest = kind.get("minimum"), kind.get("maximum")
    above, below = kind.get("exclusiveMinimum"), kind.get("exclusiveMaximum")
    step = 1 if kind["type"] == "integer" else 1e30
    inside = [value for value in (least, largest) if value is not None]
    beyond = [*([] if least is None else [least - step]), *([] if largest is None else [largest + 10 * step])]
    return inside, [*beyond, *(value for value in (above, below) if value is not None)]


def of_schema(key: str) -> list[dict[str, Any]]:
    """Return what the JSON Schema says of a key: each kind of value that it takes."""
    definition = SCHEMA["$defs"][SECTIONS[key.split(".")[0]].__name__]["properties"][key.split(".")[1]]
    return definition.get("anyOf", [definition])


@pytest.mark.parametrize("key", KEY_TYPES)
def test_each_key_takes_its_bounds_and_refuses_in_one_line_what_is_beyond(config_file, key):
    kinds = of_schema(key)
    numbers = [bounds_and_beyond(kind) for kind in kinds if kind.get("type") in ("integer", "number")]
    assert len(numbers) == any(kind.get("type") in ("integer", "number") for kind in kinds)
    for inside, beyond in numbers:
        assert inside or beyond, "it has bounds"
        assert [value for value in inside if not has_type(value, KEY_TYPES[key])] == []
    check = jsonschema.Draft202012Validator({"anyOf": kinds})
    others = [(value, shown) for value, shown in OTHER_KINDS if not check.is_valid(value) or value != value]
    # an option of these takes any text, for the value or for an item
    takes_text = any(
        kind.get("type") == "array" or (kind.get("type") == "string" and not {"enum", "const"} & {*kind})
        for kind in kinds
    )
    ends = ENDS if key != "train.max_steps" else []
    assert len(others) >= 5
    section, _, name = key.partition(".")
    for value, shown in [*others, *((value, str(value)) for _, beyond in numbers for value in beyond)]:
        path = config_file(f"{section}: {{{name}: {as_yaml(value)}}}")
        calls: dict[str, dict[str, Any]] = {path: {"argv": [*ends, f"--config={path}"]}}
        calls["hfgolf.fit"] = {"argv": ends, "values": {key: value}, "where": "hfgolf.fit"}
        if not takes_text:
            calls["the command line"] = {"argv": [*ends, f"--{key}={as_yaml(value)}"]}
        for where, call in calls.items():
            with pytest.raises(UserError) as error:
                load_config(**call)
            said = str(error.value).removeprefix(f"{where}: {key}: ")
            assert re.fullmatch(r"[^\n]{1,110} is not allowed; allowed: [^\n]{4,120}\.", said), said
            assert shown[:20] in said.partition(" is not allowed")[0], said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optm: {name: muon}", "unknown section optm; did you mean optim?"),
        ("optim: {lerning_rate: 1}", "unknown key optim.lerning_rate; did you mean optim.learning_rate?"),
        ("train: {minutes: 5}", "unknown key train.minutes; did you mean train.max_minutes?"),
        ("optim: fast", "optim: 'fast' is not allowed; allowed: keys and values, as in `optim: {key: value}`."),
        ("optim: {learning_rate: }", "optim.learning_rate: null is not allowed; allowed: a number above 0, up to"),
        (
            "- optim",
            "must hold sections (run, data, tokenizer, model, batch, optim, schedule, train, track, hub, golf).",
        ),
        ("optim: {", "is not YAML"),
        ("train: {compile: y}", "train.compile: 'y' is not allowed; allowed: auto, true or false."),
        ("run: {name: 1e5}", "run.name: 100000.0 is not allowed; allowed: letters, digits, . _ -, up to 200 bytes or"),
        ("run: {name: 1e5}", "or null; put text in quotes."),
        ("data: {files: [2024]}", "data.files: 2024 is not allowed; allowed: a list, each text; put text in quotes."),
        (
            "optim: {ema_half_life_tokens: 270000}\nbatch: {tokens_per_step: many}\ntrain: {max_steps: 3}",
            "my_run.yaml: batch.tokens_per_step: 'many' is not allowed; allowed: a whole number from 1",
        ),
        (
            "optim: {ema_half_life_tokens: -1}\nbatch: {tokens_per_step: many}",
            "my_run.yaml: optim.ema_half_life_tokens is gone; set optim.ema_decay to 0.5 **",
        ),
        ("model: {overrides: 5, norm_eps: 1e-5}\ntrain: {max_steps: 3}", "model.overrides: 5 is not allowed; allowed:"),
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
    "a key twice": ("train:\n  max_steps: 5\n  max_steps: 6", 'is not YAML: line 3: found duplicate key "max_steps".'),
    "a section twice": ("train: {max_steps: 5}\ntrain: {}", 'is not YAML: line 2: found duplicate key "train".'),
    "an alias bomb": (_bomb(9), "its aliases expand to more than 100,000 values."),
    "an alias to itself": ("data: &a\n  files: *a", "its aliases expand to more than 100,000 values."),
    "deep lists": ("[" * 700, "nested too deeply."),
    "deep mappings": ("data: " + "{a: " * 700 + "1" + "}" * 700, "nested too deeply."),
    "a nested value": ("data: {files: [[[[[a]]]]]}", "data.files: [[[['a']]]] is not allowed; allowed: a list"),
    "binary junk": (bytes(range(256)), "is not YAML: 'utf-8' codec can't decode"),
    "a NUL": ("train: {max_steps: 5}\0", "is not YAML: unacceptable character"),
    "UTF-16": ("train: {max_steps: 5}".encode("utf-16"), "is not YAML: 'utf-8' codec can't decode"),
    "5,000 digits": (f"train: {{max_steps: {'9' * 5000}}}", "is not YAML: Exceeds the limit"),
    "300 digits": (f"train: {{max_steps: {'9' * 300}}}", "is not allowed; allowed: a whole number from 1"),
    "two documents": (
        "train: {max_steps: 5}\n---\n",
        "is not YAML: line 2: expected a single document in the stream",
    ),
    "a list as a key": ("? [a, b]\n: c", "unknown section ('a', 'b')"),
    "Python's tags": ("run: {name: !!python/object/apply:os.system [echo]}", "could not determine a constructor"),
    "lone surrogates": (
        'run: {output_dir: "\\ud800"}\ntrain: {max_steps: 1}',
        "run.output_dir: '\\ud800' is not allowed; allowed: text in UTF-8, without NUL.",
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


def test_indivisible_batch_names_the_nearest_valid_sizes():
    batch = load_config([*ENDS, "--batch.tokens_per_step", "4096"]).config.batch
    with pytest.raises(UserError) as error:
        batch.accumulation_steps(5, 1)
    assert "tokens_per_step 3840 or 5120 or batch.micro_batch_size 2, 4, 8." in str(error.value)
    for size in (2, 4, 8):
        assert batch.accumulation_steps(size, 1) * size == batch.accumulation_steps(size, 2) * size * 2 == 16
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


def test_sections_are_frozen():
    config = load_config(ENDS).config
    with pytest.raises(ValidationError, match="frozen"):
        config.optim.learning_rate = 1.0


@pytest.mark.parametrize(
    ("stated", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_do_not_spin_for_long_unless_the_user_says_so(stated, spins, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run_command(lambda: None)
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_low_memory_sets_what_is_not_stated():
    resolved = load_config([*ENDS, "--train.low_memory=true", "--optim.state_dtype=fp32"])
    assert resolved.config.model.gradient_checkpointing and resolved.config.optim.state_dtype == "fp32"
    assert resolved.sources["model.gradient_checkpointing"] == "train.low_memory"
    config = RunConfig().replace(train__low_memory=True)
    assert ResolvedConfig.from_code(config).config.optim.state_dtype == "bf16"
    with pytest.raises(UserError, match=r"optim\.betas: 0\.999 .*at most 0\.98 with optim\.state_dtype bf16"):
        load_config([*ENDS, "--train.low_memory=true", "--optim.betas=[0.9,0.999]"])


def test_minutes_and_dollars_limit_a_run_by_time():
    """They replace the steps of the config that a text alone begins with, but not those of a config that is named."""
    by_time = load_config(["my.txt", "--minutes", "10"])
    assert (by_time.config.train.max_minutes, by_time.config.train.max_steps) == (10, None)
    assert load_config(["my.txt", "--minutes", "10", "--train.max_steps=7"]).config.train.max_steps == 7
    assert load_config(["--config", "small", "--minutes=10"]).config.train.max_steps == 300
    assert load_config(["my.txt", "--dollars", "2", "--run.price_per_hour", "3"]).config.train.max_minutes == 40
