"""Reading metrics.jsonl, healthy or damaged."""

from __future__ import annotations

import json
import math

from hfgolf.run import metrics
from hfgolf.run.metrics import read_metrics, read_rows

EVALUATED = {"val_loss": 2.0, "val_tokens": 5}


def write(path, rows, tail=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def test_rows_and_events_are_separated_and_broken_lines_counted(tmp_path):
    rows = [{"step": 1, "train_loss": None}, {"step": 2, "event": "skipped_step"}, {"step": 2, "train_loss": 3.0}]
    path = write(tmp_path / "metrics.jsonl", rows, '[1]\n{"loss": 1}\n{"step": 3, "train_l')
    read = read_metrics(path)
    assert read.rows == [rows[0], rows[2]] == read_rows(path) and read.events == [rows[1]]
    assert (read.broken_lines, read.is_sampled) == (3, False)


def test_of_too_many_rows_the_evaluations_the_events_and_a_sample_are_kept(tmp_path, monkeypatch):
    rows = [{"step": step, "val_loss": None} | (EVALUATED if step % 100 == 7 else {}) for step in range(10_000)]
    rows.insert(5_000, {"step": 4_999, "event": "rollback"})
    path = write(tmp_path / "metrics.jsonl", rows)
    whole = read_metrics(path)
    monkeypatch.setattr(metrics, "MAX_ROWS", 400)
    read = read_metrics(path)
    assert read.is_sampled and read.events == whole.events
    assert [row for row in read.rows if row["val_loss"]] == [row for row in whole.rows if row["val_loss"]]
    steps = [row["step"] for row in read.rows]
    assert steps == sorted(set(steps)) and (steps[0], steps[-1]) == (0, 9_999) and 200 <= len(steps) <= 400


def test_too_many_evaluations_are_sampled(tmp_path, monkeypatch):
    path = write(tmp_path / "metrics.jsonl", [{"step": step} | EVALUATED for step in range(10_000)])
    monkeypatch.setattr(metrics, "MAX_ROWS", 200)
    read = read_metrics(path)
    assert 100 <= len(read.rows) <= 200 and read.rows[-1]["step"] == 9_999


def test_rows_after_the_resumed_step_and_broken_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \xb2}\n{"step": 3, "event": "x"}\n{"step": 3}\n{"step": 4, "tr')
    metrics.MetricsFile(path).rewind(2)
    assert path.read_text() == '{"step": 1}\n{"step": 3, "event": "x"}\n'


def test_what_is_appended_is_returned_as_it_is_read_back_and_nonfinite_numbers_are_null(tmp_path):
    """The report of a run at its end is made of these; that of a finished one of what was read."""
    path = tmp_path / "metrics.jsonl"
    event = {"step": 3, "event": "finding", "symptom": "plateau", "causes": ("a", "b"), "fix": {"optim.x": 0.1}}
    row = {"step": 4, "train_loss": math.inf, "train_losses": (1.5, math.nan)}
    written = [metrics.MetricsFile(path).append(line) for line in (event, row)]
    found = metrics.read_metrics(path)
    assert written == [*found.events, *found.rows]
    assert path.read_text().endswith('{"step": 4, "train_loss": null, "train_losses": [1.5, null]}\n')


def test_a_secret_in_an_event_is_redacted_as_it_is_written(tmp_path):
    secret = "password = 'opensesame'"
    written = metrics.MetricsFile(tmp_path / "metrics.jsonl").append({"step": 1, "event": "sample", "text": secret})
    assert written["text"] == "password = '[redacted]'" and "opensesame" not in (tmp_path / "metrics.jsonl").read_text()
