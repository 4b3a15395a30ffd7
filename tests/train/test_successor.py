"""Of the minutes that a short text leaves, a second model learns from the first."""

from __future__ import annotations

import logging

import pytest

from hfgolf import Hook, api
from hfgolf.config.parse import ResolvedConfig, load_config, read_settings
from hfgolf.config.sections import RunConfig
from hfgolf.run.folder import run_folder
from hfgolf.system.signals import BEFORE_THE_FIRST_STEP, Signals
from hfgolf.train.process import session
from hfgolf.train.successor import has_time, successor

USED_UP = {"train__max_steps": "null", "train__max_tokens": 1536, "train__max_minutes": 5}


def chosen(arguments: list[str], source: str = "auto") -> ResolvedConfig:
    """Return a config whose tokens the autopilot has chosen."""
    resolved = load_config(arguments)
    return ResolvedConfig(resolved.config, resolved.sources | {"train.max_tokens": source})


def test_a_training_and_its_repetition_with_a_teacher_have_to_fit():
    assert has_time(60, 7 / 3) and not has_time(61, 7 / 3) and not has_time(1, None)


def test_a_second_model_learns_from_the_first_once(run, tiny_run, caplog):
    arguments = tiny_run(**USED_UP)
    first = run(arguments)
    with caplog.at_level(logging.INFO, "hfgolf"):
        summary = api.train_once(chosen(arguments))
    taught = first.with_name("tiny-taught")
    assert summary["run"] == "tiny-taught" and summary["steps"] == 6
    settings = read_settings(taught / "config.yaml")
    assert settings["train.distill_from"] == [str(first)] and settings["run.seed"] == RunConfig().run.seed + 1
    assert 4 < settings["train.max_minutes"] < 5, "what the first one left"
    assert f"then     {first} teaches another model in the 4 min" in caplog.text
    assert f"than {first}, nats per token" in caplog.text and "better " not in caplog.text
    ended_at = (taught / "summary.json").stat().st_mtime_ns
    again = api.train_once(chosen(arguments))
    assert again["run"] == "tiny-taught" and (taught / "summary.json").stat().st_mtime_ns == ended_at


def test_nothing_follows_what_the_autopilot_did_not_end_early(run, tiny_run, monkeypatch):
    arguments = tiny_run(**USED_UP)
    run(arguments)
    assert successor(chosen(arguments)) is not None
    assert successor(chosen(arguments, "command line")) is None
    short = chosen(tiny_run(**USED_UP | {"train__max_minutes": 0.001}))
    assert successor(short) is None, "no time left"
    assert api.train_once(chosen(arguments), [Hook()])["run"] == "tiny", "a hook is of one run"
    monkeypatch.setattr(api, "changed_text", lambda folder, config: ["a file"])
    assert api.train_once(chosen(arguments))["run"] == "tiny", "nobody teaches another text"


def test_nothing_follows_a_training_that_took_all_of_its_minutes(run, tiny_run):
    arguments = tiny_run(train__max_minutes=5)
    run(arguments)
    assert successor(chosen(arguments)) is None


def test_only_the_first_run_of_a_command_begins_with_the_process(tiny_run):
    config = load_config(tiny_run()).config
    with Signals() as signals:
        seconds = []
        for _ in range(2):
            signals.stop_message = "after the last step"
            with session(config, signals) as (_, stopwatch):
                seconds.append(stopwatch.seconds()["setup"])
                assert signals.stop_message == BEFORE_THE_FIRST_STEP
    assert seconds[1] < 1 < seconds[0]
    assert not run_folder(config).summary.exists()


@pytest.mark.parametrize("resume", [None, "auto", "latest"])
def test_it_resumes_if_the_first_one_may(run, tiny_run, resume):
    arguments = tiny_run(**USED_UP)
    run(arguments)
    said = chosen(arguments)
    follows = successor(ResolvedConfig(said.config.replace(train__resume=resume), said.sources))
    assert follows is not None and follows.config.train.resume == (resume and "auto")
