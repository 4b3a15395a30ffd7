"""The report while the run lasts: written at evaluations, rarely enough, and never the end of a run."""

from __future__ import annotations

import itertools
import logging
import sys

import pytest

from hfgolf.hooks import report


@pytest.fixture
def pages(monkeypatch):
    """Return the list of the pages that a run writes before its end; time passes as `tick` says."""
    written = []
    monkeypatch.setattr(report, "write_text", lambda path, text: written.append((path.name, text)))
    return written


def tick(monkeypatch, seconds):
    clock = itertools.count()
    monkeypatch.setattr(report, "perf_counter", lambda: seconds * next(clock))


def test_page_is_rewritten_at_each_evaluation_and_reloads_until_the_end(run, tiny_run, monkeypatch, pages):
    monkeypatch.setattr(report, "_SHARE", float("inf"))
    path = run(tiny_run())  # evaluates at steps 3 and 6
    assert [name for name, _ in pages] == ["report.html", "report.html"]
    assert "Running: step 3." in pages[0][1] and "location.reload()" in pages[0][1]
    final = (path / "report.html").read_text()
    assert "Complete: 6 steps." in final and "<script" not in final


def test_page_takes_at_most_its_share_of_the_time(run, tiny_run, monkeypatch, pages):
    tick(monkeypatch, 10.0)  # each page takes 10 seconds, and comes 10 seconds after the last
    run(tiny_run(train__eval_every_steps=1))
    assert len(pages) == 1  # the first is only expected to take a moment; the next waits for 1,000 seconds


def test_failing_page_is_one_warning(run, tiny_run, monkeypatch, caplog):
    def fail(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(report, "render_page", fail)
    monkeypatch.setattr(report, "_SHARE", float("inf"))
    with caplog.at_level(logging.WARNING, logger="hfgolf"):
        path = run(tiny_run(train__eval_every_steps=1))
    assert caplog.text.count("report not rewritten until the end: disk full") == 1
    assert (path / "report.html").is_file()


def test_a_run_without_matplotlib_ends_with_its_model(run, tiny_run, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it fails
    monkeypatch.setattr(report, "_SHARE", float("inf"))
    with caplog.at_level(logging.WARNING, logger="hfgolf"):
        path = run(tiny_run())
    assert "report not rewritten until the end" in caplog.text and "report not written" in caplog.text
    assert (path / "model" / "model.safetensors").is_file()
