"""hfgolf train my.txt --minutes 10: what is open is chosen, said, recorded and kept."""

from __future__ import annotations

import math
import random

import pytest

from hfgolf.config.parse import AUTOPILOT, load_config
from hfgolf.run.folder import run_folder
from hfgolf.run.metrics import read_rows
from hfgolf.train import autopilot
from hfgolf.train.autopilot import Speed
from hfgolf.train.law import Shape

QUICK = ["--train.cpu_threads=1", "--train.compile=false", "--train.sample_tokens=null", "--batch.sequence_length=64"]


@pytest.fixture
def text(tmp_path, monkeypatch, reset_accelerate):
    """A text in the working folder, for which few small shapes are candidates."""
    reset_accelerate()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(autopilot, "TIMED_SECONDS", 0.01)
    monkeypatch.setattr(autopilot, "WIDTHS", (96, 128))
    words = [f"w{number:x}" for number in range(3000)]
    (tmp_path / "my.txt").write_text(" ".join(random.Random(0).choices(words, k=20_000)))
    return "my.txt"


def saved(name="my"):
    return run_folder(load_config(["--run.name", name, "--train.max_steps=1"]).config).read_config()


def test_minutes_choose_what_nobody_states(text, hfgolf):
    said = hfgolf("train", text, "--minutes", 0.03, *QUICK, "--model.hidden_size", 64, "--optim.learning_rate", 0.015)
    assert said.status == 0, said.err
    lines = {line.partition(" ")[0]: line for line in (said.out + said.err).splitlines()}
    assert "of width 64" in lines["chosen"] and "million" not in lines["chosen"]
    assert "half the minutes" in lines["instead"] and "width" not in lines["instead"]
    config = saved()
    assert config["model.hidden_size"] == 64 and config["optim.learning_rate"] == 0.015
    assert config["train.max_steps"] is None and config["train.max_minutes"] == 0.03
    written = (run_folder(load_config(["--run.name=my", "--train.max_steps=1"]).config).config).read_text()
    for key in set(AUTOPILOT) - {"model.hidden_size", "optim.learning_rate"}:
        line = next(line for line in written.splitlines() if line.startswith(f"  {key.split('.')[1]}:"))
        assert line.endswith("# auto"), line


def test_same_command_again_is_the_same_run(text, hfgolf):
    command = ("train", text, "--minutes", 0.02, *QUICK)
    assert hfgolf(*command).status == 0
    before = saved()
    again = hfgolf(*command)
    assert again.status == 0 and "is complete" in again.out + again.err
    assert saved() == before


def test_resumed_run_keeps_what_its_first_start_chose(text, hfgolf, monkeypatch):
    command = ["train", text, *QUICK]
    assert hfgolf(*command, "--minutes", 0.02).status == 0
    before = saved()
    monkeypatch.setattr(autopilot, "choose", None)  # it must not be asked again
    longer = hfgolf(*command, "--minutes", 0.04, "--train.resume", "latest")
    assert longer.status == 0, longer.err
    assert saved() == before | {"train.max_minutes": 0.04}


def test_recorded_config_repeats_the_run(text, hfgolf):
    assert hfgolf("train", text, "--minutes", 0.02, *QUICK).status == 0
    losses = [first_loss("my")]
    assert hfgolf("train", "--config", "runs/my/config.yaml", "--run.name", "again").status == 0
    assert [*losses, first_loss("again")] == losses * 2


def first_loss(name):
    return read_rows(run_folder(load_config(["--run.name", name, "--train.max_steps=1"]).config).metrics)[0][
        "train_loss"
    ]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--dollars", "3"], "--dollars: the price is not known; add --run.price_per_hour"),
        (["--dollars", "none", "--run.price_per_hour", "2"], "--dollars: 'none' is not allowed"),
        (["--minutes", "0"], "train.max_minutes: 0 is not allowed"),
        (["--minutes", "1", "--data.messages_column", "turns"], "nothing is known of data.messages_column yet"),
        (["--minutes", "1", "--model.num_attention_heads", "7"], "no candidate has a width that 7 heads divide"),
    ],
)
def test_bad_input_is_one_line(text, hfgolf, options, problem):
    said = hfgolf("train", text, *options, *QUICK)
    assert said.status == 2 and problem in said.err
    assert len(said.err.splitlines()) == 1


def test_dollars_are_minutes_at_a_price():
    config = load_config(["my.txt", "--dollars", "2", "--run.price_per_hour", "3"]).config
    assert config.train.max_minutes == 40


def test_untimed_steps_follow_from_the_nearest_timed_ones():
    small, middle, large = Shape(64, 2, 256), Shape(128, 3, 256), Shape(256, 5, 256)
    flops = {shape: 2048 * shape.flops_per_token(256) for shape in (small, middle, large)}
    speed = Speed(1e11, 256)
    assert speed.seconds(small, 2048) == pytest.approx(flops[small] / 1e11)
    for shape in (middle, large):
        speed.timed[shape.width, 256, 2048] = flops[shape], 0.08 + flops[shape] / 1e11
        assert speed.seconds(shape, 2048) == 0.08 + flops[shape] / 1e11
    assert speed.seconds(small, 2048) == pytest.approx(0.08 + flops[small] / 1e11)
    speed.timed[64, 256, 2048] = flops[small], math.inf  # does not fit
    assert speed.seconds(small, 2048) == math.inf
    assert speed.seconds(large, 4096) == pytest.approx(0.08 + 2 * flops[large] / 1e11)
