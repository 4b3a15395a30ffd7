"""The schema of metrics.jsonl matches what a real run writes, and docs/metrics.md is generated from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_type_hints

from tiny_export import build_tiny

from hfgolf.publish.export import export_model
from hfgolf.run.schema import EVENTS, Event, Row, SubsetColumns, markdown

ROOT = Path(__file__).parents[2]


def test_run_writes_the_columns_and_events_of_the_schema(run, tiny_run, tmp_path, corpus_file):
    export_model(*build_tiny(), tmp_path / "weights", "")
    weights = {"model__init_from": tmp_path / "weights", "data__old_text": corpus_file}
    golf = {"golf__forecast_every_steps": 3, "golf__budget_bytes": 40_000, "golf__qat_fraction": 0.2}
    subset = {"data__val_fraction": 0.5, "train__eval_tokens": 9000}
    folder = run(tiny_run(optim__ema_decay=0.9, **subset, **golf, **weights))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "event" not in line]
    evaluated = [row for row in rows if row["val_loss"] is not None]
    assert len(rows) == 6 and len(evaluated) == 2
    for row in rows:
        assert row.keys() - Row.__optional_keys__ == Row.__required_keys__
    first, last = evaluated
    assert first.keys() == get_type_hints(Row).keys() - SubsetColumns.__optional_keys__
    assert last.keys() == get_type_hints(Row).keys()
    events = [line for line in lines if "event" in line]
    assert {event["event"] for event in events} == {"sample", "init_from"}
    for event in events:
        assert event.keys() == get_type_hints(Event).keys() | EVENTS[event["event"]][1].keys()


def test_every_event_in_the_code_is_in_the_schema():
    folders = [ROOT / "hfgolf" / name for name in ("train", "hooks", "golf")]
    code = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    assert set(re.findall(r"run\.event\(\s*\"(\w+)\"", code)) == EVENTS.keys()


def test_page_is_up_to_date():
    """To regenerate: python -m hfgolf.run.schema > docs/metrics.md"""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == markdown()
