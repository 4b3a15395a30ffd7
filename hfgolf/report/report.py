"""The report of one run, or of several side by side: a self-contained HTML page, and Markdown with images.

Owns the content and the output files. The layout is in templates/ and the charts are in figures.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfgolf.durable import write_bytes, write_text
from hfgolf.redact import redact, redact_values
from hfgolf.report.artifact_bytes import draw_tensors, sentences
from hfgolf.report.figures import EVENTS, draw_charts, line_style
from hfgolf.run.record import FIGURES, RunRecord, final_figures, format_figures, seconds_by_kind, stated_price, status
from hfgolf.wording import dollars, duration

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATES = Path(__file__).with_name("templates")
_MAX_LISTED = 100  # events, findings and samples per run, each; there may be one per step
_MAX_CHARACTERS = 300  # of an event's details: a step may list thousands of blocks
_NAME_KEYS = {"run.name", "run.output_dir"}
_COMMON_EVENT_KEYS = {"step", "event", "elapsed_seconds"}


def write_report(runs: Sequence[RunRecord], output: Path, price_per_hour: float | None = None) -> None:
    """Write output as a self-contained x.html, plus x.md with its images in the folder x.

    runs: from read_run, at least one. price_per_hour: dollars per hour for the machine; None: run.price_per_hour of
    each run's config. Raises OSError if the files cannot be written.
    """
    runs = _with_distinct_names(runs)
    drawings = draw_charts(runs)
    pages = [_describe(run, number, price_per_hour) for number, run in enumerate(runs)]
    content = {
        "runs": pages,
        "labels": [label for label, _ in FIGURES.values() if any(label in page["figures"] for page in pages)],
        "differences": _differing_keys(runs),
        "pictures": output.stem,
    }
    pictures = output.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    for drawing in [*drawings, *(page["tensors"] for page in pages if page["tensors"])]:
        write_bytes(pictures / f"{drawing.chart.name}.png", drawing.to_png())
    for suffix in (".html", ".md"):
        page = _template(f"report{suffix}").render(content, drawings=drawings)
        write_text(output.with_suffix(suffix), f"{page}\n")


@functools.cache
def _template(name: str) -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,  # HTML entities also work in Markdown
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["dollars"] = dollars
    return environment.get_template(name)


def _with_distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Add a number to the name of each run that shares its name with another."""
    names = [run.name for run in runs]
    numbers = [names[: index + 1].count(name) if names.count(name) > 1 else 0 for index, name in enumerate(names)]
    return [
        dataclasses.replace(run, name=f"{run.name} ({number})") if number else run
        for run, number in zip(runs, numbers, strict=True)
    ]


def _describe(run: RunRecord, number: int, price_per_hour: float | None) -> dict[str, Any]:
    """Return the template values of one run, with secrets redacted. number: its index, for its line style."""
    price = stated_price(run) if price_per_hour is None else price_per_hour
    seconds = seconds_by_kind(run)
    total = sum(seconds.values())
    counts = Counter(event["event"] for event in run.metrics.events)
    events = [event for event in run.metrics.events if event["event"] in EVENTS.keys() - {"finding"}]
    samples = run.events("sample")[-_MAX_LISTED:]
    # The summary's sample is from the exported weights, and longer than the one logged at their step.
    if run.summary.get("sample") is not None:
        last = {"step": run.summary.get("step"), "text": run.summary["sample"]}
        samples = [sample for sample in samples if sample["step"] != last["step"]] + [last]
    page = {
        "name": run.name,
        "style": line_style(number),
        "status": status(run),
        "notes": _notes(run),
        "figures": format_figures(final_figures(run, price)),
        "price": price,
        "times": [_time(kind, spent, total, price) for kind, spent in seconds.items()],
        "wall_clock": _time("wall clock", total, total, price),
        "marks": [(sign, name, counts[kind]) for kind, (_, sign, name) in EVENTS.items() if counts[kind]],
        "events": [_describe_event(event) for event in events[:_MAX_LISTED]],
        "more_events": max(0, len(events) - _MAX_LISTED),
        "findings": [_describe_finding(event) for event in run.events("finding")[:_MAX_LISTED]],
        "export": sentences(run),
        "samples": samples,
        "profile": run.profile,
        "config": run.config_yaml,
        "config_values": run.config,
        "metadata": json.dumps(redact_values(run.metadata), indent=1) if run.metadata else "",
    }
    return redact_values(page) | {"tensors": draw_tensors(run, number)}


def _time(kind: str, seconds: float, total: float, price: float | None) -> dict[str, Any]:
    share = 100 * seconds / total if total else 0.0
    cost = None if price is None else dollars(seconds / 3600 * price)
    return {"kind": kind, "time": duration(seconds), "percent": f"{share:.1f}", "cost": cost}


def _notes(run: RunRecord) -> list[str]:
    """Return notes about the data behind the curves that a reader should know."""
    notes = []
    if run.metrics.is_sampled:
        notes.append(
            f"metrics.jsonl is too long to read whole. This report uses {len(run.metrics.rows):,} of its rows: the"
            " evaluations, and an even sample of the others. Curves, medians and peaks do not include the rest."
        )
    if run.metrics.broken_lines:
        notes.append(f"Broken lines skipped in metrics.jsonl: {run.metrics.broken_lines:,}.")
    if run.config.get("data.messages_column"):
        notes.append("Losses and bits per byte are of the assistant's turns only.")
    if all(row.get("val_loss") is None for row in run.metrics.rows):
        notes.append("metrics.jsonl has no evaluations.")
    return notes


def _describe_event(event: dict[str, Any]) -> dict[str, Any]:
    details = {key: value for key, value in event.items() if key not in _COMMON_EVENT_KEYS and value is not None}
    text = redact(", ".join(f"{key} {value}" for key, value in details.items()))  # before shortening
    _, sign, name = EVENTS[event["event"]]
    shortened = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
    return {"step": event["step"], "sign": sign, "name": name, "details": shortened}


def _describe_finding(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": event["step"],
        "symptom": event.get("symptom", ""),
        "saw": event.get("saw", ""),
        "causes": _lines(event.get("causes")),
        "fix": _lines(event.get("fix")),
    }


def _lines(value: Any) -> list[str]:
    """Return the lines of a string, a list or a dict."""
    if isinstance(value, dict):
        return [f"{key}: {inner}" for key, inner in value.items()]
    return [str(line) for line in (value if isinstance(value, list) else [value] if value else [])]


def _differing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return each "section.key" whose value differs between the runs' configs."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _NAME_KEYS)
    return [key for key in keys if any(run.config.get(key) != runs[0].config.get(key) for run in runs)]
