"""Plans: the arithmetic, budgets, errors, and the whole script."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sharded import needs_fsdp2
from tiny_export import build_tiny

from hfgolf.commands import needs
from hfgolf.commands.needs import (
    Machine,
    TokenCounts,
    affordable_steps,
    assumed_speed,
    count_tokens,
    evaluation_seconds,
    find_needs,
    machine_with,
    meta_model,
    run_length,
)
from hfgolf.config.parse import load_config
from hfgolf.config.sections import RunConfig
from hfgolf.measure.flops import token_flops
from hfgolf.publish.export import export_model
from hfgolf.system.errors import UserError
from hfgolf.train.build import build_model
from hfgolf.train.init_from import FROZEN

ROOT = Path(__file__).parents[2]
SMALL = ["--config", str(ROOT / "configs" / "small.yaml"), "--train.mixed_precision=no"]
SMALL += ["--batch.tokens_per_step=4096", "--train.max_steps=150", "--train.eval_every_steps=50"]
CPU = Machine("a CPU", "cpu", processes=1, peak_flops=1e12, free_bytes=16 * 2**30)
DATA = TokenCounts(vocabulary=4096, train_tokens=3_072_000, val_tokens=30_000)
FAST = 4096.0 * 10  # ten steps a second


def config_of(*options: str) -> RunConfig:
    return load_config([*SMALL, *options]).config


def plan_of(config: RunConfig, machine: Machine = CPU) -> needs.Needs:
    return find_needs(config, meta_model(config, 4096, machine.device), machine)


@pytest.mark.parametrize("options", [[], ["--model.tie_word_embeddings=false", "--model.use_bias=true"]])
def test_every_parameter_is_of_one_kind_and_under_one_rule(options):
    config = config_of(*options, "--model.position_embedding=learned")
    model = meta_model(config, 4096, "cpu")
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    planned, whole = find_needs(config, model, CPU), build_model(config, 4096, "cpu")
    assert sum(planned.parameters.values()) == sum(planned.rules.values()) == whole.num_parameters()
    assert planned.parameters["embedding"] == (4096 + 256) * 256
    assert planned.parameters["head"] == (4096 * 256 if options else 0)
    assert planned.parameters["matrix"] == planned.rules["muon"] == 5 * 12 * 256**2


def test_frozen_weights_are_counted_apart_and_take_no_gradients_and_no_state(tmp_path):
    whole, parameters = plan_of(config_of()), meta_model(config_of(), 4096, "cpu").named_parameters()
    names = {name: parameter.numel() for name, parameter in parameters if ".layers.0." in name}
    (tmp_path / FROZEN).write_text(json.dumps([*names]))
    planned = plan_of(config_of().replace(model__init_from=str(tmp_path)))
    assert planned.parameters["frozen"] == sum(names.values()) > 12 * 256**2 and whole.parameters["frozen"] == 0
    assert sum(planned.parameters.values()) == sum(whole.parameters.values())
    assert sum(planned.rules.values()) == sum(whole.rules.values()) - planned.parameters["frozen"]
    assert planned.flops.useful < whole.flops.useful
    for item in ("gradients", "optimizer"):
        assert getattr(planned.memory, item) < getattr(whole.memory, item)


def test_time_tokens_and_cost_in_closed_form():
    length = run_length(config_of(), DATA, FAST, 150, 36.0)
    assert length.tokens == 150 * 4096
    assert length.epochs == pytest.approx(0.2, rel=1e-3)
    assert length.seconds == pytest.approx(15)
    assert length.evaluation_seconds == pytest.approx(3 * 30_000 / (3 * 40_960))
    assert length.dollars == pytest.approx((15 + length.evaluation_seconds) / 100)
    unknown = run_length(config_of(), TokenCounts(4096), FAST, 150, None)
    assert unknown.epochs is unknown.evaluation_seconds is unknown.dollars is None
    with pytest.raises(UserError, match="the training text has 256 tokens, but a sequence takes 256"):  # as train says
        run_length(config_of(), TokenCounts(4096, 256, 30), FAST, 150, None)


@pytest.mark.parametrize(
    ("options", "steps", "tokens"),
    [
        ([], 150, 3 * 30_000),
        ([], 101, 3 * 30_000),
        ([], 100, 2 * 30_000),
        (["--train.eval_every_steps=151"], 150, 30_000),
        (["--optim.ema_decay=0.99", "--train.eval_tokens=null"], 150, 2 * 3 * 30_000),
        (["--optim.ema_decay=0.99"], 150, 2 * (3 * 15_360 + 30_000)),
        (["--train.eval_every_steps=10"], 150, 15 * 6144 + 30_000),
        (["--train.eval_tokens=1000"], 150, 3 * 1000 + 30_000),
        (["--train.eval_tokens=100000"], 150, 3 * 30_000),
        (["--train.eval_tokens=1000", "--train.final_eval_tokens=5000"], 150, 3 * 1000 + 5000),
        (["--train.eval_tokens=1000", "--train.final_eval_tokens=auto"], 20, 1000 + 0.15 * 20 * 4096),
    ],
)
def test_evaluation_costs_a_third_of_training_per_token(options, steps, tokens):
    seconds = evaluation_seconds(config_of(*options), DATA, FAST, steps)
    assert seconds == pytest.approx(tokens / FAST / 3)


def test_assumed_speed_is_a_share_of_the_peak():
    flops = token_flops(meta_model(config_of(), 4096, "cpu"), 256)
    speed = assumed_speed(flops, CPU, recomputes=False)
    assert speed * flops.useful == pytest.approx(0.4e12)  # as docs/experiments.md promises
    slower = assumed_speed(flops, CPU, recomputes=True)
    assert slower * (flops.useful + flops.recomputation) == pytest.approx(0.4e12)
    assert "40%" in CPU.assumed() and "a CPU" in CPU.assumed()


def test_processes_share_the_step():
    eight = machine_with("H100", "bf16", 8)[0]
    assert eight.peak_flops == 8 * 989e12
    planned = plan_of(config_of("--train.mixed_precision=bf16", "--batch.tokens_per_step=32768"), eight)
    assert planned.micro_batch_size * planned.accumulation_steps * 8 * 256 == 32768
    assert planned.memory.buckets == planned.memory.weights


@needs_fsdp2
def test_processes_share_weights_and_state_under_fsdp2(script, tiny_run, monkeypatch):
    """As the trainer predicts, which tests/measure/test_sharded_memory.py compares with a fake world of four."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    options = [*tiny_run(batch__micro_batch_size=1), "--device", "H100"]
    copied = numbers(script(*options, "--json"))["memory"]
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, value)
    shared = numbers(script(*options, "--json"))["memory"]
    for part in ("weights", "gradients", "optimizer"):
        assert shared[part] == math.ceil(copied[part] / 4)
    said = script(*options)
    assert "4 processes, FSDP2, uncompiled" in said and "gathered by FSDP2" in said and "DDP" not in said
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert "FSDP version 1, its default, flattens" in script(*options, fails=True)


def test_plan_suggests_a_micro_batch_that_fits():
    config = config_of("--batch.micro_batch_size=16")
    roomy = plan_of(config, dataclasses.replace(CPU, device="cuda"))
    assert roomy.fits and roomy.largest_micro_batch == roomy.micro_batch_size == 16
    tight = plan_of(config, dataclasses.replace(CPU, device="cuda", free_bytes=300 * 2**20))
    assert not tight.fits and tight.micro_batch_size == 16
    again = plan_of(config_of(f"--batch.micro_batch_size={tight.largest_micro_batch}"), CPU)
    assert again.memory.peak <= 300 * 2**20
    hopeless = plan_of(config, dataclasses.replace(CPU, free_bytes=2**20))
    assert not hopeless.fits and hopeless.largest_micro_batch is None


def test_budget_buys_the_most_steps_it_covers():
    config = config_of()
    assert affordable_steps(config, TokenCounts(4096), FAST, 10.0) == 100
    assert affordable_steps(config, TokenCounts(4096), FAST, 0.3) == 3, "0.3 / 0.1 is less than 3 in binary"
    for seconds in (1.0, 10.0, 33.3):
        steps = affordable_steps(config, DATA, FAST, seconds)
        lasting = [n / 10 + evaluation_seconds(config, DATA, FAST, n) for n in (steps, steps + 1)]
        assert lasting[0] <= seconds < lasting[1]


def test_small_text_is_counted_and_cached(tiny_run, monkeypatch):
    config = load_config(tiny_run()).config
    counted = count_tokens(config)
    assert counted.vocabulary == 257 and counted.note == ""
    assert counted.train_tokens == pytest.approx(9 * counted.val_tokens, rel=0.05)
    monkeypatch.setattr(needs, "MAX_CHEAP_BYTES", 0)
    assert count_tokens(config) == counted


def test_uncounted_text_is_explained(tiny_run, monkeypatch):
    monkeypatch.setattr(needs, "MAX_CHEAP_BYTES", 0)
    assert count_tokens(load_config(tiny_run()).config) == TokenCounts(257, note="not tokenized yet: 0 MB of files")
    missing = count_tokens(load_config(tiny_run(data__files="nowhere.txt", tokenizer__kind="bpe")).config)
    assert missing.vocabulary == 4096 and missing.train_tokens is None
    assert "no file matches 'nowhere.txt'" in missing.note


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "is empty; remove it or add text to it"),
        ("pictures/a.png", b"\x89PNG\r\n\x1a\n", "is a picture, not text"),
        ("folder/notes", b"\x00", "holds no file of a known kind"),
    ],
)
def test_a_text_that_no_training_can_use_has_no_plan(tiny_run, tmp_path, name, content, said):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    named = tmp_path / name.split("/")[0]
    with pytest.raises(UserError, match=said):
        count_tokens(load_config(tiny_run(data__files=str(named))).config)


@pytest.fixture
def script(hfgolf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs the script in this process and returns what it said; with `fails`, on stderr."""
    monkeypatch.setattr("hfgolf.system.hardware.measured_peak_flops", lambda device, dtype, size=0: 1e12)

    def run(*arguments: object, fails: bool = False) -> str:
        said = hfgolf("plan", *arguments)
        assert said.status == (2 if fails else 0), said.err
        assert not fails or said.err.count("\n") == 1
        return said.err if fails else said.out

    return run


def numbers(said: str) -> dict[str, Any]:
    return json.loads(said)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_shipped_config_has_a_plan(script, tiny_run, tmp_path, name):
    """With the config's own model, batch, optimizer and length, on the tests' text."""
    of_data = [option for option in tiny_run() if option.startswith("--data.")]
    own = ["--data.hub_name=null", "--data.hub_config=null", "--data.max_documents=null", "--tokenizer.kind=byte"]
    own += ["--data.val_files=[]"]
    if name == "finetune.yaml":  # its model comes from a run
        export_model(*build_tiny(), tmp_path / "weights", "")
        own += [f"--model.init_from={tmp_path / 'weights'}"]
    planned = numbers(script("--config", ROOT / "configs" / name, *of_data, *own, "--json", "--tokens_per_second", 1e5))
    length = planned["length"]
    assert planned["fits"] and length["steps"] > 0
    assert length["tokens"] == pytest.approx(length["seconds"] * 1e5)
    assert 1 <= length["epochs"] * planned["data"]["train_tokens"] / length["tokens"] < 1.2
    assert planned["memory"]["peak"] <= planned["usable_bytes"]


@pytest.mark.parametrize(("num_bytes", "blocks"), [(64, 1), (65, 2), (100, 3)])
def test_an_epoch_is_what_a_training_counts(script, tiny_run, tmp_path, num_bytes, blocks):
    """It reads whole blocks, each with the token after it."""
    for name, size in (("train", num_bytes - 1), ("val", 40)):  # and the end of text
        (tmp_path / f"{name}.txt").write_text("x" * size)
    texts = {
        f"data__{key}": [str(tmp_path / f"{name}.txt")] for key, name in (("files", "train"), ("val_files", "val"))
    }
    options = tiny_run(**texts, tokenizer__kind="byte", batch__sequence_length=32, batch__tokens_per_step=256)
    planned = numbers(script(*options, "--json"))
    assert planned["data"]["train_tokens"] == num_bytes
    assert planned["length"]["epochs"] == planned["length"]["tokens"] / (32 * blocks)


def test_text_and_json_output_agree(script, tiny_run):
    options = [*tiny_run(run__price_per_hour=2)]
    said, planned = script(*options), numbers(script(*options, "--json"))
    total, length = sum(planned["parameters"].values()), planned["length"]
    assert f"tiny: {total:,} parameters, vocabulary 257" in said
    assert f"{length['steps']} steps, {length['tokens']:,} tokens" in said
    assert f"speed: {planned['speed']['tokens_per_second']:,.0f} tokens/s (assumed: 40% of the peak of " in said
    assert 0 < length["dollars"] < 0.005 and f"cost: ${length['dollars']:.4f} at $2 per hour" in said
    assert f"{planned['data']['train_tokens']:,} train tokens" in said
    peaks = [planned[f"memory_{how}_checkpointing"]["peak"] / 1e6 for how in ("without", "with")]
    (line,) = (line for line in said.splitlines() if line.startswith("  peak"))
    assert line.split() == ["peak", f"{peaks[0]:.1f}", "MB", f"{peaks[1]:.1f}", "MB"]
    assert "fits into" in said and planned["budget"] is None
    assert ("of heap fragmentation" in said) == (planned["machine"]["device"] == "cpu")
    assert f"shows {planned['fragmented_bytes'] / 1e6:.1f} MB of heap" in said or "of heap" not in said


def test_script_plans_for_a_budget(script, tiny_run):
    options = [*tiny_run(train__eval_every_steps=10**6), "--tokens_per_second", 256]
    dollars = ["--dollars", 1, "--run.price_per_hour", 6]
    by_money = numbers(script(*options, *dollars, "--json"))["budget"]
    evaluating = by_money["evaluation_seconds"]
    assert by_money["steps"] == by_money["seconds"] == int(600 - evaluating) > 400
    assert by_money["dollars"] <= 1
    assert numbers(script(*options, "--minutes", 9, "--json"))["budget"]["steps"] < by_money["steps"]
    said = script(*options, *dollars)
    assert "run: 6 steps" in said
    endless = numbers(script(*options, *dollars, "--train.max_steps", 10**6, "--json"))
    assert endless["length"] == endless["budget"] == by_money  # one number of steps, not two
    assert f"budget: 10 min 00 s, $1.00 at $6 per hour, pay for {by_money['steps']} steps" in said
    assert "; the config's 6 steps fit" in said
    too_long = script(*options, "--train.max_steps", 1000, "--minutes", 1)
    assert "; the config's 1,000 steps do not fit, but --train.max_steps " in too_long


def test_script_plans_what_training_would_choose(script, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("hfgolf.train.autopilot.TIMED_SECONDS", 0.01)
    (tmp_path / "my.txt").write_text(" ".join(str(number) for number in range(30_000)))
    options = ["--minutes", 0.5, "--model.hidden_size", 64, "--tokenizer.kind", "byte"]
    said = script(tmp_path / "my.txt", *options)
    assert said.startswith("chosen   3 layers of width 64") and "\nmy: " in said and "budget: 30 s pay for" in said
    for option, value in (("--device", "H100"), ("--tokens_per_second", 9)):
        refused = script(tmp_path / "my.txt", "--minutes", 0.5, option, value, fails=True)
        assert f"{option}: the minutes choose by steps that are timed here; leave it out" in refused


def test_script_plans_for_an_absent_gpu(script, tiny_run):
    planned = numbers(script(*tiny_run(train__mixed_precision="null"), "--device", "nvidia a100", "--json"))
    assert planned["precision"] == "bf16"
    assert planned["machine"]["peak_flops"] == 312e12
    assert planned["machine"]["free_bytes"] == 80e9
    assert numbers(script(*tiny_run(train__mixed_precision="null"), "--device", "T4", "--json"))["precision"] == "fp16"


def test_max_minutes_and_max_tokens_limit_the_steps(script, tiny_run, tmp_path):
    (tmp_path / "minute.yaml").write_text("train: {max_minutes: 1}")
    options = ["--config", tmp_path / "minute.yaml", *tiny_run()]
    by_clock = numbers(script(*options, "--tokens_per_second", 256 / 30, "--json"))
    assert by_clock["length"]["steps"] == 2 and by_clock["note"].startswith("limited by train.max_minutes")
    by_epochs = script(*tiny_run(train__max_epochs=0.01), "--json")
    tokens = numbers(by_epochs)["data"]["train_tokens"]
    assert numbers(by_epochs)["length"]["steps"] == -(-(0.01 * ((tokens - 1) // 32 * 32)) // 256)
    (tmp_path / "minute.yaml").write_text("data: {files: nowhere.txt}")
    absent = [word for word in tiny_run(train__max_steps="null", train__max_epochs=1) if "data.files" not in word]
    unknown = ["--config", tmp_path / "minute.yaml", *absent]
    said = script(*unknown)
    assert "run: number of steps unknown (train.max_epochs" in said and "data: not counted (data.files" in said
    assert numbers(script(*unknown, "--json"))["length"] is None


def test_plan_says_when_milestones_are_due(script, tiny_run):
    """Also of words, if the text is tokenized; a run on it then says the same steps."""
    options = tiny_run(train__milestones="[1k, 200 words, 1M words]", train__max_steps=8)
    names = [line.split() for line in script(*options).split("milestones:\n")[1].splitlines()[:3]]
    assert names[0] == ["chck_1k_tokens", "step", "4"] and names[1][:2] == ["chck_200", "step"]
    assert names[2][0] == "chck_1M" and names[2][-2:] == ["(not", "reached)"]
    steps = numbers(script(*options, "--json"))["milestones"]
    assert (steps["chck_1k_tokens"], steps["chck_200"]) == (4, int(names[1][2]))


def test_words_of_a_text_that_is_not_tokenized_are_unknown(tiny_run, monkeypatch):
    monkeypatch.setattr(needs, "MAX_CHEAP_BYTES", 100)
    config = load_config(tiny_run(train__milestones="[1k, 200 words]")).config
    assert needs.milestone_steps(config, count_tokens(config)) == {"chck_1k_tokens": 4, "chck_200": None}
