"""In the minutes that a short text leaves, another model learns from the first."""

from __future__ import annotations

import json
import logging

import pytest

from hfgolf import Hook, api
from hfgolf.config.parse import ResolvedConfig, load_config, read_settings
from hfgolf.config.sections import RunConfig
from hfgolf.run.folder import RunFolder, run_folder
from hfgolf.system.signals import BEFORE_THE_FIRST_STEP, Signals
from hfgolf.train.law import decay_of
from hfgolf.train.process import session
from hfgolf.train.successor import has_time_to_teach, is_used_up, taught

USED_UP = {"train__max_steps": "null", "train__max_tokens": 1536, "train__max_minutes": 5}
AVERAGED = {"optim__ema_decay": 0.5, "optim__ema_export": True}
SEED = RunConfig().run.seed


def chosen(arguments: list[str], source: str = "auto") -> ResolvedConfig:
    """Return a config whose tokens the autopilot has chosen."""
    resolved = load_config(arguments)
    averages = dict.fromkeys(("optim.ema_decay", "optim.ema_export"), source)
    return ResolvedConfig(resolved.config, resolved.sources | {"train.max_tokens": source} | averages)


def test_both_trainings_have_to_fit():
    assert not has_time_to_teach(60, 2.3) and has_time_to_teach(60, 2.34)


def test_another_model_learns_from_the_first_once(run, tiny_run, caplog):
    arguments = tiny_run(**USED_UP | AVERAGED)
    first = run(arguments)
    with caplog.at_level(logging.INFO, "hfgolf"):
        summary = api.train_once(chosen(arguments))
    last = first.with_name("tiny-taught")
    assert summary["run"] == "tiny-taught" and summary["steps"] == 12
    settings = read_settings(last / "config.yaml")
    assert settings["train.distill_from"] == [str(first)] and settings["run.seed"] == SEED + 1
    assert settings["optim.ema_decay"] == decay_of(12) and settings["optim.ema_export"]
    assert 4 < settings["train.max_minutes"] < 5, "what the first one left"
    assert "# command line" not in (last / "config.yaml").read_text(), "nobody stated it"
    assert {folder.name for folder in first.parent.iterdir()} == {first.name, last.name}
    assert f"then     {first} teaches another model" in caplog.text
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
        second = taught(ResolvedConfig(said.config.replace(train__resume=resume), said.sources))
        assert second.config.train.resume == (resume and "auto")
    assert is_used_up(said)
    assert not is_used_up(chosen(arguments, "command line"))
    assert api.train_once(said, [Hook()])["run"] == "tiny", "a hook is of one run"
    monkeypatch.setattr(api, "changed_text", lambda folder, config: ["a file"])
    assert api.train_once(said)["run"] == "tiny", "nobody teaches another text"
    config = first.config.read_text()
    first.config.write_text(config.replace("max_tokens: 1536", "max_tokens: null"))
    assert config != first.config.read_text() and not is_used_up(said), "it took all of its minutes"


def test_of_a_slow_teacher_a_model_learns_for_fewer_steps_and_the_end_says_if_none_does(run, tiny_run, caplog):
    """train.max_minutes are 5, and the setup is none of them."""
    arguments = tiny_run(**USED_UP)
    folder, said = RunFolder(run(arguments)), chosen(arguments)
    summary = json.loads(folder.summary.read_text())
    summary |= {key: 0.0 for key in summary if key.startswith("seconds_")} | {"seconds_setup": 1000.0}
    for seconds, steps in ((150.0, 4), (180.0, 3), (181.0, None)):
        summary |= {"seconds_train": seconds - 40, "seconds_evaluate": 30.0, "seconds_other": 10.0}
        folder.summary.write_text(json.dumps(summary))
        second = taught(said)
        assert (second and second.config.train.max_steps) == steps
        assert second is None or second.config.train.final_eval_tokens == summary["val_tokens"], "or they don't compare"
    with caplog.at_level(logging.INFO, "hfgolf"):
        assert api.train_once(said)["run"] == "tiny"
    assert "taught           no other model, because too little of the 5 min 00 s is left" in caplog.messages


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


@pytest.mark.parametrize(("losses", "better"), [((3.0, 2.0), "second"), ((2.0, 3.0), "first")])
def test_the_better_model_is_returned(losses, better, tiny_run, monkeypatch, caplog):
    said = chosen(tiny_run())
    summaries = [{"run": name, "val_loss": loss} for name, loss in zip(("first", "second"), losses, strict=True)]
    shown = iter(summaries)
    monkeypatch.setattr(api, "_train_or_show", lambda *args, **kwargs: (said, next(shown), []))
    monkeypatch.setattr(api, "is_used_up", lambda said: True)
    monkeypatch.setattr(api, "taught", lambda said: said)
    with caplog.at_level(logging.INFO, "hfgolf"):
        assert api.train_once(said)["run"] == better
    assert f"1.0000 {'lower' if better == 'second' else 'higher'} than " in caplog.text
