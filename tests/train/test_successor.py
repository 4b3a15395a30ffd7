"""Of the minutes that a short text leaves, another model learns from the first, or from two."""

from __future__ import annotations

import logging

import pytest

from hfgolf import Hook, api
from hfgolf.config.parse import ResolvedConfig, load_config, read_settings
from hfgolf.config.sections import RunConfig
from hfgolf.run.folder import RunFolder, run_folder
from hfgolf.system.signals import BEFORE_THE_FIRST_STEP, Signals
from hfgolf.train import successor
from hfgolf.train.process import session
from hfgolf.train.successor import count_teachers, taught, teachers_in_time

USED_UP = {"train__max_steps": "null", "train__max_tokens": 1536, "train__max_minutes": 5}
SEED = RunConfig().run.seed


def chosen(arguments: list[str], source: str = "auto") -> ResolvedConfig:
    """Return a config whose tokens the autopilot has chosen."""
    resolved = load_config(arguments)
    return ResolvedConfig(resolved.config, resolved.sources | {"train.max_tokens": source})


def test_all_trainings_have_to_fit():
    minutes = {0: (0.1, 2.3), 1: (2.34, 3.6), 2: (3.67, 100)}
    assert all(count_teachers(60, each) == count for count, some in minutes.items() for each in some)


@pytest.mark.parametrize("count", [1, 2])
def test_another_model_learns_from_the_first_ones_once(run, tiny_run, caplog, monkeypatch, count):
    monkeypatch.setattr(successor, "COSTS", {each: successor.COSTS[each] for each in range(1, count + 1)})
    arguments = tiny_run(**USED_UP)
    first = run(arguments)
    with caplog.at_level(logging.INFO, "hfgolf"):
        summary = api.train_once(chosen(arguments))
    last = first.with_name("tiny-taught")
    teachers = [first, first.with_name("tiny-second")][:count]
    assert summary["run"] == "tiny-taught" and summary["steps"] == 6
    settings = read_settings(last / "config.yaml")
    assert settings["train.distill_from"] == [*map(str, teachers)] and settings["run.seed"] == SEED + count
    assert 4 < settings["train.max_minutes"] < 5, "what the others left"
    assert "# command line" not in (last / "config.yaml").read_text(), "nobody stated it"
    assert {folder.name for folder in first.parent.iterdir()} == {*(each.name for each in teachers), last.name}
    if count > 1:
        second = read_settings(teachers[1] / "config.yaml")
        assert second["train.distill_from"] == [] and second["run.seed"] == SEED + 1
        assert second["train.max_steps"] == 6 and 1.5 < second["train.max_minutes"] < 1.875
    who = ("teaches another model", "and a second model teach another one")[count - 1]
    assert f"then     {first} {who}" in caplog.text
    assert f"than {first}, nats per token" in caplog.text and "better " not in caplog.text
    ended_at = (last / "summary.json").stat().st_mtime_ns
    again = api.train_once(chosen(arguments))
    assert again["run"] == "tiny-taught" and (last / "summary.json").stat().st_mtime_ns == ended_at


def test_nothing_follows_what_the_autopilot_did_not_end_early_and_what_follows_resumes_as_the_first(
    run, tiny_run, monkeypatch
):
    arguments = tiny_run(**USED_UP)
    first = RunFolder(run(arguments))
    said = chosen(arguments)
    for resume in (None, "auto", "latest"):
        follows = taught(ResolvedConfig(said.config.replace(train__resume=resume), said.sources), [first])
        assert follows.config.train.resume == (resume and "auto")
    assert teachers_in_time(said) == 2
    assert teachers_in_time(chosen(arguments, "command line")) == 0
    assert teachers_in_time(chosen(tiny_run(**USED_UP | {"train__max_minutes": 0.001}))) == 0, "no time left"
    assert api.train_once(said, [Hook()])["run"] == "tiny", "a hook is of one run"
    monkeypatch.setattr(api, "changed_text", lambda folder, config: ["a file"])
    assert api.train_once(said)["run"] == "tiny", "nobody teaches another text"
    config = first.config.read_text()
    first.config.write_text(config.replace("max_tokens: 1536", "max_tokens: null"))
    assert config != first.config.read_text() and teachers_in_time(said) == 0, "it took all of its minutes"


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
