"""When a checkpoint is due, by time or on request."""

from __future__ import annotations

import math
import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest

from hfgolf.checkpoint.contents import Checkpointer
from hfgolf.checkpoint.state import TrainState
from hfgolf.config.sections import TrainSection
from hfgolf.system.signals import Signals
from hfgolf.train import clock


@pytest.fixture
def of_run(monkeypatch):
    """A Clock with the default config, and `now`, a list that holds its time."""
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    signals, stopwatch = Signals(), SimpleNamespace(training_seconds=lambda: 0.0)
    of_run = clock.Clock(TrainSection(max_steps=1), TrainState(), stopwatch, signals, step_limit=math.inf)
    return SimpleNamespace(clock=of_run, now=now, signals=signals)


def is_due(of_run, at_seconds):
    of_run.now[0] = at_seconds
    of_run.clock.synchronize()
    return of_run.clock.save_is_due


def test_saves_every_ten_minutes_by_default(of_run):
    assert not is_due(of_run, 599)
    assert is_due(of_run, 600)
    of_run.clock.note_save()
    assert not is_due(of_run, 1199)
    of_run.clock.note_save()  # for another reason, such as train.save_every_steps
    assert not is_due(of_run, 1798)
    assert is_due(of_run, 1799)


@pytest.mark.parametrize("ask", [clock.Clock.synchronize, clock.Clock.raise_if_stopped])
def test_stop_of_another_process_and_then_of_this_one_is_one_request(of_run, monkeypatch, ask):
    """When their launcher dies, one process notices it first; another may notice it on its way out of the loop."""
    agreed = [signal.SIGTERM] if ask is clock.Clock.raise_if_stopped else [0.0, signal.SIGTERM, 0.0, 0.0]
    monkeypatch.setattr(clock.Clock, "_maximum", lambda *_: agreed)
    with of_run.signals as signals:
        with pytest.raises(SystemExit), signals.deferred():
            with suppress(clock.Interrupted):
                ask(of_run.clock)
            raise SystemExit(128 + of_run.clock.stop_signal)
        signal.raise_signal(signal.SIGTERM)
    assert of_run.clock.stop_signal == signal.SIGTERM


@pytest.mark.parametrize(("minutes", "steps"), [(1e-9, [1, 2, 3, 4]), ("null", [4])])
def test_run_saves_after_the_configured_minutes(run, tiny_run, monkeypatch, minutes, steps):
    saved = []
    real = Checkpointer.save

    def save(self, **options):
        saved.append(self.state.step)
        real(self, **options)

    monkeypatch.setattr(Checkpointer, "save", save)
    never = {"train__save_every_steps": "null", "train__eval_every_steps": 100}
    run(tiny_run(train__max_steps=4, train__save_every_minutes=minutes, **never))
    assert saved == steps
