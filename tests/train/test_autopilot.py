"""hfgolf train my.txt --minutes 10: what is open is chosen, said, recorded and kept."""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faults import train_on_two

from hfgolf import Hook, api
from hfgolf.config.parse import AUTOPILOT, _say_once, base_for, load_config
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_rows
from hfgolf.train import autopilot, setup
from hfgolf.train.autopilot import Choice, Question, Speed
from hfgolf.train.decisions import decide
from hfgolf.train.law import Shape, Text, rates_of, tokens_per_step_of

QUICK = ["--train.cpu_threads=1", "--train.compile=false", "--train.sample_tokens=null", "--batch.sequence_length=64"]


@pytest.fixture
def text(tmp_path, monkeypatch, reset_accelerate):
    """A text in the working folder, for which few small shapes are candidates."""
    reset_accelerate()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(autopilot, "TIMED_SECONDS", 0.01)
    monkeypatch.setattr(autopilot, "WIDTHS", (128, 160))
    words = [f"w{number:x}" for number in range(3000)]
    (tmp_path / "my.txt").write_text(" ".join(random.Random(0).choices(words, k=20_000)))
    return "my.txt"


def folder(name="my"):
    return RunFolder(Path("runs", name))


def first_loss(name):
    return read_rows(folder(name).metrics)[0]["train_loss"]


def test_minutes_choose_what_nobody_states(text, hfgolf):
    said = hfgolf("train", text, "--minutes", 0.03, *QUICK, "--model.hidden_size", 64, "--optim.learning_rate", 0.015)
    assert said.status == 0, said.err
    lines = {line.partition(" ")[0]: line for line in (said.out + said.err).splitlines()}
    assert "of width 64" in lines["chosen"] and "million" not in lines["chosen"]
    assert "twice the time" in lines["instead"] and "width" not in lines["instead"]
    assert lines["instead"].endswith("(bits per byte; the law knows no text so short)")
    config = folder().read_config()
    assert config["model.hidden_size"] == 64 and config["optim.learning_rate"] == 0.015
    assert config["train.max_steps"] is None and config["train.max_minutes"] == 0.03
    rows = read_rows(folder().metrics)
    assert sum(row["val_loss"] is not None for row in rows) < 5  # for ten, two seconds are too few
    written = folder().config.read_text()
    for key in set(AUTOPILOT) - {"model.hidden_size", "optim.learning_rate"}:
        line = next(line for line in written.splitlines() if line.startswith(f"  {key.split('.')[1]}:"))
        assert line.endswith("# auto"), line


@pytest.mark.parametrize(
    ("steps", "unknown", "known"),
    [(99, "", "knows no training so short"), (100, "", "is off by 2%"), (100, "dropout", "knows no dropout")],
)
def test_no_figure_is_said_of_what_the_law_cannot_know(steps, unknown, known):
    def choice(bits_per_byte):
        return Choice(Shape(128, 3, 512), 2048, steps * 2048, 1.0, 60.0, True, bits_per_byte, False)

    others = {"width 160": choice(2.04), "half the time": choice(0.5), "twice the time": choice(40.0)}
    lines = autopilot._described(choice(2.0), others, unknown, False)
    said = "width 160 +2.0%, half the time unknown, twice the time unknown"
    assert lines[1] == f"instead  {said} (bits per byte; the law {known})"


def test_what_the_first_start_chose_stays_in_the_same_command_a_resume_and_the_recorded_config(
    text, hfgolf, monkeypatch
):
    command = ["train", text, *QUICK]
    assert hfgolf(*command, "--minutes", 0.02).status == 0
    before, loss = folder().read_config(), first_loss("my")
    again = hfgolf(*command, "--minutes", 0.02)
    assert again.status == 0 and "is complete" in again.out + again.err
    assert folder().read_config() == before
    monkeypatch.setattr(autopilot, "choose", None)  # it must not be asked again
    assert hfgolf("train", "--config", "runs/my/config.yaml", "--run.name", "again").status == 0
    assert first_loss("again") == loss
    longer = hfgolf(*command, "--minutes", 0.04, "--train.resume", "latest")
    assert longer.status == 0 and "deciding again" not in longer.out
    assert folder().read_config() == before | {"train.max_minutes": 0.04}
    over = hfgolf(*command, "--minutes", 9, "--train.max_tokens", 64, "--train.resume", "latest")
    assert "nothing is left to train: the run has reached train.max_tokens 64 (command line); state more" in over.out


def test_heads_that_no_width_has_are_refused_in_one_line(text, hfgolf):
    said = hfgolf("train", text, "--minutes", 1, "--model.num_attention_heads", 7, *QUICK)
    assert (
        said.status == 2 and "no shape that would be chosen goes with what is stated; model.hidden_size: " in said.err
    )
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    "stated",
    [
        {"data.messages_column": "turns"},
        {"data.ids_column": "ids"},
        {"data.source": "shards"},
        {"optim.name": "adamw"},
        {"model.architecture": "gpt2"},
    ],
)
def test_what_the_law_does_not_know_keeps_the_shape_of_small(stated, caplog):
    minutes = {"train.max_minutes": 3}
    assert base_for(minutes).is_open and not caplog.text
    _say_once.cache_clear()
    base = base_for(minutes | stated)
    assert f"the minutes only limit this run: shape and rates are not chosen with {next(iter(stated))} " in caplog.text
    assert not base.is_open and base.sources["model.hidden_size"] == "small"
    assert "train.max_steps" not in base.sources


def test_a_stated_length_takes_segments_that_divide_it():
    config = load_config(["my.txt", "--minutes=3", "--batch.sequence_length=100"]).config
    assert config.batch.segment_length is None and config.batch.tokens_per_step % 100 == 0


def ranks_are_of_different_speed() -> None:
    is_second = os.environ["RANK"] == "1"
    autopilot.TIMED_SECONDS = 0.2
    autopilot.peak_flops = lambda *_: 1e12 if is_second else 1e10
    real = autopilot.seconds_of
    autopilot.seconds_of = lambda work, device: real(lambda: (work(), time.sleep(0.02 * is_second)), device)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_of_different_speed_choose_alike(text, tmp_path):
    """Each times the same steps: in a step, they exchange Muon's updates."""
    train_on_two([text, "--minutes=0.05", *QUICK], tmp_path / "output", ranks_are_of_different_speed)
    assert "\nchosen " in (tmp_path / "output").read_text()
    assert folder().read_config()["batch.tokens_per_step"] % 128 == 0


def test_untimed_steps_follow_from_the_nearest_timed_ones():
    small, middle, large = Shape(64, 2, 256), Shape(128, 3, 256), Shape(256, 5, 256)
    flops = {shape: 2048 * shape.flops_per_token(256) for shape in (small, middle, large)}
    speed = Speed(1e11, 256)
    assert speed.seconds(small, 2048) == pytest.approx(flops[small] / 1e11)
    for shape in (middle, large):
        speed.timed[shape, 2048] = 0.08 + flops[shape] / 1e11
        assert speed.seconds(shape, 2048) == 0.08 + flops[shape] / 1e11
    assert speed.seconds(small, 2048) == pytest.approx(0.08 + flops[small] / 1e11)
    speed.timed[small, 2048] = math.inf  # does not fit
    assert speed.seconds(small, 2048) == math.inf
    assert speed.seconds(large, 4096) == pytest.approx(0.08 + 2 * flops[large] / 1e11)


@pytest.mark.parametrize(
    ("epochs", "options", "is_averaged"),
    [
        (3.5, [], True),
        (2.5, [], False),
        (3.5, ["--optim.ema_decay=0.5"], False),
        (3.5, ["--optim.ema_export=false"], False),
        (3.5, ["--golf.qat_fraction=0.1", "--golf.budget_bytes=400000"], False),
    ],
)
def test_a_text_that_is_read_often_takes_averages_of_the_weights_and_no_segments(
    epochs, options, is_averaged, text, monkeypatch
):
    monkeypatch.setattr(autopilot, "seconds_per_step", lambda *_: 0.01)
    steps = round(epochs * Path(text).stat().st_size / 2048)
    stated = ["--tokenizer.kind=byte", "--batch.tokens_per_step=2048", f"--train.max_steps={steps}", *options]
    decisions = decide(load_config([text, "--minutes=9", "--train.max_tokens=null", *stated]), {})
    chosen = autopilot.choose(decisions, torch.device("cpu"), 1, may_teach=True)
    optim = decisions.config.replace(**chosen.values).optim
    assert optim.ema_export == is_averaged == (", averaged weights; about" in chosen.lines[0])
    of_tenth = pytest.approx(1 - 1 / (1 + 0.1 * steps), abs=1e-5)
    assert optim.ema_decay == (of_tenth if is_averaged else decisions.config.optim.ema_decay)
    assert chosen.values["batch__segment_length"] == (None if epochs > 3 else 64)
    rates = optim.learning_rate, optim.adamw_learning_rate
    factor = 1.4 if is_averaged else 1
    assert rates == pytest.approx([factor * rate for rate in rates_of(chosen.values["model__hidden_size"])], rel=0.03)


@pytest.mark.parametrize(
    ("train", "hooks", "teaches"),
    [(api.train_once, [], True), (api.train_once, [Hook()], False), (api.train, [], False)],
    ids=["alone", "with a hook", "hfgolf.train"],
)
def test_another_model_is_promised_only_where_it_follows(text, monkeypatch, train, hooks, teaches):
    class Asked(Exception):
        pass

    def ask(*arguments):
        raise Asked(autopilot.choose(*arguments))

    monkeypatch.setattr(autopilot, "seconds_per_step", lambda *_: 0.01)
    monkeypatch.setattr(setup, "choose", ask)
    with pytest.raises(Asked) as asked:
        train(load_config([text, "--minutes=9", *QUICK]), hooks)
    (chosen,) = asked.value.args
    assert chosen.values["train__max_tokens"] and chosen.lines[0].endswith("; then it teaches another model") == teaches


def seconds_of(shape, tokens_per_step):
    return 0.03 + tokens_per_step * shape.flops_per_token(256) / 3e11


def shape_of(config, vocabulary):
    return Shape(config.model.hidden_size, config.model.num_hidden_layers, vocabulary)


def test_steps_are_as_large_as_goes_with_their_tokens(text):
    """Part of a step's time is the same for all sizes, so larger ones see more tokens."""
    speed = SimpleNamespace(seconds=seconds_of)

    def choices_of(minutes, open_keys):
        config = load_config([text, f"--minutes={minutes}"]).config
        question = Question(config, open_keys, Text(2e9, 2.0, {2048: 0.3}), 1, may_teach=True)
        return list(question.choices([Shape(128, 3, 2048)], speed))

    for minutes, of_whole in ((1, 4096), (100, 32768)):
        choices = choices_of(minutes, set(AUTOPILOT))
        assert all(choice.tokens_per_step == tokens_per_step_of(choice.tokens) for choice in choices)
        assert choices[0].is_whole and choices[0].tokens_per_step == of_whole
    stated = choices_of(100, set(AUTOPILOT) - {"batch.tokens_per_step"})
    assert {choice.tokens_per_step for choice in stated} == {2048}


def test_choice_follows_from_timed_steps_of_two_widths_not_from_the_assumed_speed(text, monkeypatch):
    timed: list[int] = []

    def seconds_per_step(config, vocabulary, *_):
        timed.append(config.model.hidden_size)
        return seconds_of(shape_of(config, vocabulary), config.batch.tokens_per_step)

    monkeypatch.setattr(autopilot, "seconds_per_step", seconds_per_step)
    decisions = decide(load_config([text, "--minutes=0.5"]), {})
    choices = []
    for peak in (1e10, 1e11, 1e12, 1e13):
        timed.clear()
        monkeypatch.setattr(autopilot, "peak_flops", lambda *_, peak=peak: peak)
        choices.append(autopilot.choose(decisions, torch.device("cpu"), 1, may_teach=True))
        assert len(set(timed)) > 1
    assert choices == [choices[0]] * 4
