"""Every reader of a run's files copes with any damage, or reports it in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hfgolf.compare.comparison import compare_outcomes, to_markdown
from hfgolf.compare.outcome import group_by_arm, read_outcome
from hfgolf.doctor.doctor import examine
from hfgolf.report import report as report_module
from hfgolf.report.curves import read_curve
from hfgolf.report.report import render_page
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_metrics
from hfgolf.run.record import read_run
from hfgolf.system.errors import UserError

JUNK: dict[str, Any] = {
    "a text": "junk",
    "a list": [1, "a", None],
    "an object": {"a": [1]},
    "400 digits": 10**400,
    "NaN": float("nan"),
    "1e300": 1e300,
    "-1e30": -1e30,
    "null": None,
}
EVENTS = [
    {"step": 10, "event": "skipped_step", "first_parameter": "x", "block_starts": [0, 64]},
    {"step": 14, "event": "skipped_step", "first_parameter": "x", "block_starts": [0, 64]},
    {"step": 10, "event": "rollback", "from_step": 14},
    {"step": 20, "event": "finding", "symptom": "spike", "saw": "a", "causes": ["a"], "fix": {}},
    {"step": 20, "event": "sample", "text": "a"},
]
SUMMARY = {"weights": "raw", "step": 40, "val_loss": 2.0, "val_tokens": 5, "commits": ["a"], "seconds_train": 40.0}
SUMMARY |= {"val_bits_per_byte": 1.0, "val_bytes": 10, "val_share_read": 1.0, "sample": "a", "model": "runs/a/model"}
METADATA: dict[str, Any] = {
    **{"seed": 1, "config": {}, "sources": {}, "environment": {}, "hardware": {}, "packages": {}, "commit": "a"},
    "corpus": {"files": [["a.txt", 9, "aa"]]},
}
CONFIG = "train: {max_grad_norm: 1.0, max_steps: 40}\nrun: {price_per_hour: 2.0}\nschedule: {warmup_steps: 5}\n"


def lines() -> list[dict[str, Any]]:
    rows = [
        {
            "step": step,
            "epoch": step / 100,
            "tokens": 100 * step,
            "train_loss": 3.0,
            "train_losses": [3.0] * 10,
            "grad_norms": [1.0] * 10,
            "sample_hashes": [f"{number:016x}" for number in range(step, step + 10)],
            "val_loss": 3.0,
            "val_tokens": 5,
            "val_bytes": 10,
            "tokens_per_second": 100.0,
            "memory_bytes": 1000,
            "data_seconds": 1.0,
            "compute_seconds": 9.0,
            "elapsed_seconds": float(step),
            "seconds_train": float(step),
            "logged_at": 1_700_000_000.0 + step,
        }
        for step in (10, 20, 30, 40)
    ]
    return [*rows[:2], *EVENTS, *rows[2:]]


def write(folder: Path, name: str, content: Any) -> None:
    many = content if name == "metrics.jsonl" else [content]
    text = content if isinstance(content, str) else "".join(json.dumps(part) + "\n" for part in many)
    (folder / name).write_text(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report_module, "draw_charts", lambda runs: [])  # slow; read_curve has what it reads
    folder = tmp_path / "run"
    folder.mkdir()
    for name, content in {
        "metrics.jsonl": lines(),
        "summary.json": SUMMARY,
        "metadata.json": METADATA,
        "config.yaml": CONFIG,
    }.items():
        write(folder, name, content)
    return folder


def report(folder: Path) -> None:
    record = read_run(folder)
    render_page([record])
    for key in ("train_losses", "grad_norms", "val_loss", "learning_rate", "memory_bytes"):
        read_curve(record.metrics.rows, key)


def compare(folder: Path) -> None:
    outcomes = group_by_arm([read_outcome(RunFolder(folder))])
    to_markdown(compare_outcomes("name", "command", outcomes))


def read_all(folder: Path) -> list[str]:
    """Read a run with every reader, and return their error lines."""
    refusals = []
    for read in (report, examine, compare):
        try:
            read(folder)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
            refusals.append(str(error))
    return refusals


def test_every_reader_reads_an_intact_run(folder):
    assert read_all(folder) == []


@pytest.mark.parametrize("key", lines()[0])
def test_wrong_value_in_a_row_counts_as_a_broken_line(key, folder):
    *others, last = lines()
    write(folder, "metrics.jsonl", [*others, *(last | {key: value} for value in JUNK.values()), last])
    assert [refusal for refusal in read_all(folder) if "is damaged" not in refusal] == []
    write(folder, "metrics.jsonl", [{k: v for k, v in line.items() if k != key} for line in lines()])
    read_all(folder)


@pytest.mark.parametrize("event", EVENTS[1:], ids=lambda event: f"{event['event']} at {event['step']}")
def test_wrong_value_in_an_event_is_ignored(event, folder):
    for key in event:
        write(folder, "metrics.jsonl", [*lines(), *(event | {key: value} for value in JUNK.values())])
        assert read_all(folder) == []
        without = {k: v for k, v in event.items() if k != key}
        write(folder, "metrics.jsonl", [without if line == event else line for line in lines()])
        read_all(folder)


@pytest.mark.parametrize(("name", "sound"), [("summary.json", SUMMARY), ("metadata.json", METADATA)])
def test_wrong_value_in_a_json_file_is_reported_as_damage(name, sound, folder):
    for key in sound:
        for value in JUNK.values():
            write(folder, name, sound | {key: value})
            assert all("is damaged" in refusal for refusal in read_all(folder))
        write(folder, name, {k: v for k, v in sound.items() if k != key})
        assert all("is damaged" in refusal for refusal in read_all(folder))


@pytest.mark.parametrize("value", ["junk", "[1]", "{a: 1}", "9" * 400, ".nan", "null", "true"])
def test_wrong_value_in_the_config_falls_back_to_the_default(value, folder):
    write(folder, "config.yaml", CONFIG.replace("1.0", value).replace("2.0", value).replace("5", value))
    assert read_all(folder) == []


FILES: dict[str, bytes | None] = {
    "empty": b"",
    "zeros": b"\0" * 4000,
    "binary junk": bytes(range(256)) * 20,
    "deep": b'{"step": 1, "a": ' + b"[" * 50_000,
    "UTF-16": "{}".encode("utf-16"),
    "5,000 digits": b'{"step": ' + b"9" * 5000 + b"}",
    "no object": b"[1, 2]",
    "a folder": None,
}


@pytest.mark.parametrize("damage", FILES)
@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "metadata.json", "config.yaml", "profile.json"])
def test_damaged_file_is_one_line(name, damage, folder):
    path, content = folder / name, FILES[damage]
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    refusals = read_all(folder)
    assert len(refusals) == {"metrics.jsonl": 3, "summary.json": 1, "metadata.json": 1}.get(name, 0)


def test_one_flipped_bit_loses_only_its_line(folder):
    content = bytearray((folder / "metrics.jsonl").read_bytes())
    content[len(content) // 2] ^= 0x80  # no longer UTF-8
    (folder / "metrics.jsonl").write_bytes(content)
    assert read_metrics(folder / "metrics.jsonl").broken_lines == 1
    assert read_all(folder) == []


def test_unreadable_metrics_are_one_line(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/proc/self/mem")  # a file that cannot be read
    assert all("cannot be read (Input/output error)" in refusal or "damaged" in refusal for refusal in read_all(folder))
    assert len(read_all(folder)) == 3
