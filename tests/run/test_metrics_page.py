"""docs/metrics.md names what a real run writes, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tiny_export import build_tiny

from hfgolf.publish.export import export_model

ROOT = Path(__file__).parents[2]
ROWS, EVENTS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").split("## Events")
COLUMNS = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", ROWS, re.MULTILINE))
KINDS = {
    kind: {"step", "event", "elapsed_seconds", *re.findall(r"`(\w+)`:", keys)}
    for kind, keys in re.findall(r"^\| `(\w+)` \|(.*) \|$", EVENTS, re.MULTILINE)
}


def test_run_writes_the_columns_and_events_of_the_page(run, tiny_run, tmp_path, corpus_file):
    export_model(*build_tiny(), tmp_path / "weights", "")
    weights = {"model__init_from": tmp_path / "weights", "data__old_text": corpus_file}
    golf = {"golf__forecast_every_steps": 3, "golf__budget_bytes": 40_000, "golf__qat_fraction": 0.2}
    subset = {"data__val_fraction": 0.5, "train__eval_tokens": 9000, "train__final_eval_tokens": "null"}
    folder = run(tiny_run(optim__ema_decay=0.9, **subset, **golf, **weights))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "event" not in line]
    evaluated = [row for row in rows if row["val_loss"] is not None]
    assert len(rows) == 6 and len(evaluated) == 2
    optional = {name for name, meaning in COLUMNS.items() if "; only " in meaning}
    for row in rows:
        assert row.keys() - optional == COLUMNS.keys() - optional
    first, last = evaluated
    assert first.keys() == {name for name, meaning in COLUMNS.items() if "; only in a last row" not in meaning}
    assert last.keys() == COLUMNS.keys()
    events = [line for line in lines if "event" in line]
    assert {event["event"] for event in events} == {"sample", "init_from"}
    for event in events:
        assert event.keys() == KINDS[event["event"]]


def test_every_event_in_the_code_is_on_the_page():
    folders = [ROOT / "hfgolf" / name for name in ("train", "hooks", "golf")]
    code = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    assert set(re.findall(r"run\.event\(\s*\"(\w+)\"", code)) == KINDS.keys()
