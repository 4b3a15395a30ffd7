"""The report of one run, or of several side by side: one self-contained HTML page, and a picture of the losses.

Owns the content and the output files. The page is templates/report.html with its CSS; charts.py draws its charts. It
runs a script only while its run lasts: templates/reload.js.
"""

import dataclasses
import functools
import json
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from hfgolf import palette
from hfgolf.report.charts import EVENTS, draw_charts, draw_losses, line_style
from hfgolf.report.headlines import basis, headlines, notes_on_all
from hfgolf.run.record import (
    FIGURES,
    RunRecord,
    final_figures,
    format_figures,
    minute,
    seconds_by_kind,
    started_at,
    status,
)
from hfgolf.system.command import own_command
from hfgolf.system.durable import write_bytes, write_text
from hfgolf.system.redact import redact, redact_values
from hfgolf.system.wording import describe_overlap, describe_texts, dollars, duration, join_words

_TEMPLATES = Path(__file__).with_name("templates")
_RELOADS_EVERY = (5.0, 60.0)  # seconds, from and to
_RELOADS_FOR = (600.0, 10)  # seconds, or times the seconds between two rewrites: then the run has probably died
_MAX_LISTED = 100  # events, findings and samples per run, each; there may be one per step
_MAX_CHARACTERS = 300  # of an event's details: a step may list thousands of blocks
_NAME_KEYS = {"run.name", "run.output_dir"}
_COMMON_EVENT_KEYS = {"step", "event", "elapsed_seconds"}


def write_report(runs: Sequence[RunRecord], output: Path, price_per_hour: float | None = None) -> Path | None:
    """Write output as a self-contained x.html, and the losses as x/loss.png; return that file, None without losses.

    runs: from read_run, at least one. price_per_hour: dollars per hour for the machine; None: run.price_per_hour of
    each run's config. Raises OSError if the files cannot be written.
    """
    write_text(output.with_suffix(".html"), render_page(runs, price_per_hour))
    losses, picture = draw_losses(_with_distinct_names(runs)), output.with_suffix("") / "loss.png"
    if losses is None:
        return None
    picture.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(picture, losses.to_png())
    return picture


def render_page(
    runs: Sequence[RunRecord], price_per_hour: float | None = None, rewrite_seconds: float | None = None
) -> str:
    """Return the HTML page alone.

    rewrite_seconds: the run lasts, and the page is expected to be rewritten this often; it reloads itself until it has
    missed that for long. None: it never does.
    """
    runs = _with_distinct_names(runs)
    stated = [run.config.get("run.price_per_hour") if price_per_hour is None else price_per_hour for run in runs]
    prices = [price if isinstance(price, int | float) else None for price in stated]
    now, live = time.time(), None
    if rewrite_seconds is not None:
        reload_seconds = min(max(_RELOADS_EVERY[0], rewrite_seconds / 4), _RELOADS_EVERY[1])
        until_seconds = max(_RELOADS_FOR[0], _RELOADS_FOR[1] * rewrite_seconds)
        live = {"writtenAt": now, "everySeconds": reload_seconds, "untilSeconds": until_seconds}
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _NAME_KEYS)
    described = [_describe(run, number, price) for number, (run, price) in enumerate(zip(runs, prices, strict=True))]
    labels = [label for label, _ in FIGURES.values() if any(label in one["figures"] for one in described)]
    texts = {label: {one["figures"].get(label) for one in described} for label in labels}
    same = {label: text for label, (text, *others) in texts.items() if not others}
    content = {
        "runs": described,
        "labels": [label for label in labels if label not in same],
        "same": same,
        "notes": notes_on_all(runs),
        "differences": [key for key in keys if any(run.config.get(key) != runs[0].config.get(key) for run in runs)],
        "written": minute(now),
        "live": live,
        "light_lines": palette.LINES,
        "dark_lines": palette.DARK_LINES,
    }
    charts = [(drawing.chart, drawing.to_svg(), drawing.caption) for drawing in draw_charts(runs)]
    return f"{_template('report.html').render(redact_values(content) | {'charts': charts})}\n"


@functools.cache
def _template(name: str) -> Template:
    loader = FileSystemLoader(_TEMPLATES)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["dollars"] = dollars
    environment.globals["source"] = lambda file: (_TEMPLATES / file).read_text(encoding="utf-8")
    return environment.get_template(name)


def _with_distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Add a number to the name of each run that shares its name with another."""
    names = [run.name for run in runs]
    numbers = [names[: index + 1].count(name) if names.count(name) > 1 else 0 for index, name in enumerate(names)]
    return [
        dataclasses.replace(run, name=f"{run.name} ({number})") if number else run
        for run, number in zip(runs, numbers, strict=True)
    ]


def _describe(run: RunRecord, number: int, price: float | None) -> dict[str, Any]:
    """Return the template values of one run. number: its index, for its line style. price: dollars per hour."""
    seconds = seconds_by_kind(run)
    idle = seconds.pop("idle", 0.0)
    work = sum(seconds.values())
    counts = Counter(event["event"] for event in run.metrics.events)
    events = [event for event in run.metrics.events if event["event"] in EVENTS.keys() - {"finding"}]
    model, prompt = run.summary.get("model"), run.config.get("train.sample_prompt")
    prompted = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    return {
        "name": run.name,
        "number": number,
        "dashes": line_style(number)[1],
        "status": status(run),
        "notes": _notes(run),
        "figures": format_figures(final_figures(run, price)),
        "headlines": headlines(run, price),
        "basis": basis(run),
        "facts": _facts(run),
        "sample_command": f"{own_command()} generate {shlex.quote(str(Path(model).parent))}{prompted}"
        if model
        else None,
        "price": price,
        "times": [_time(kind, spent, work, price) for kind, spent in seconds.items()],
        "work": _time("work", work, work, price),
        "idle": _time("idle", idle, work, price),
        "wall_clock": _time("wall clock", work + idle, work, price),
        "marks": [(sign, name, counts[kind]) for kind, (_, sign, name) in EVENTS.items() if counts[kind]],
        "events": [_describe_event(event) for event in events[:_MAX_LISTED]],
        "more_events": max(0, len(events) - _MAX_LISTED),
        "findings": [
            {"saw": "", **event, "causes": _lines(event.get("causes")), "fix": _lines(event.get("fix"))}
            for event in run.events("finding")[:_MAX_LISTED]
        ],
        "samples": _samples(run),
        "profile": run.profile,
        "config": run.config_yaml,
        "config_values": run.config,
        "metadata": json.dumps(redact_values(run.metadata), indent=1) if run.metadata else "",
    }


def _time(kind: str, seconds: float, total: float, price: float | None) -> dict[str, Any]:
    share = 100 * seconds / total if total else 0.0
    cost = None if price is None else dollars(seconds / 3600 * price)
    return {"kind": kind, "time": duration(seconds), "percent": f"{share:.1f}", "cost": cost}


def _notes(run: RunRecord) -> list[str]:
    """Return notes about the data behind the curves that a reader should know."""
    notes = []
    if run.metrics.is_sampled:
        notes.append(
            f"metrics.jsonl is too long to draw whole. This report uses {len(run.metrics.rows):,} of its rows: the"
            " evaluations, and a sample of the others. Curves, medians and peaks do not include the rest."
        )
    if run.metrics.broken_lines:
        notes.append(f"Broken lines skipped in metrics.jsonl: {run.metrics.broken_lines:,}.")
    if run.config.get("data.messages_column"):
        notes.append("Losses and bits per byte are of the assistant's turns only.")
    notes += [f"Bits per byte of {line}." for line in describe_texts(run.summary)]
    if overlap := describe_overlap(run.summary):
        notes.append(f"{overlap}.")
    if all(row.get("val_loss") is None for row in run.metrics.rows):
        notes.append("metrics.jsonl has no evaluations.")
    return notes


def _facts(run: RunRecord) -> dict[str, str]:
    """Return what a reader needs to place the run: when, on which text, by which command."""
    start, command = started_at(run), run.metadata.get("command")
    names = ("data.files", "data.hub_name", "data.source")
    data = next((run.config[name] for name in names if run.config.get(name)), None)
    if isinstance(data, list):
        data = join_words(data, maximum=3)
    facts = {
        "started": None if start is None else minute(start),
        "text": None if data is None else str(data),
        "command": shlex.join(map(str, command)) if isinstance(command, list) else None,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _samples(run: RunRecord) -> list[dict[str, Any]]:
    """Return each sample with its prompt apart, and with the validation loss of its weights, if there is one."""
    samples = run.events("sample")[-_MAX_LISTED:]
    # the summary's sample is from the exported weights, and longer than the one logged at their step
    if run.summary.get("sample") is not None:
        last = {"step": run.summary.get("step"), "text": run.summary["sample"]}
        samples = [sample for sample in samples if sample["step"] != last["step"]] + [last]
    losses = {row["step"]: f"{row['val_loss']:.4f}" for row in run.metrics.rows if row.get("val_loss")}
    said = []
    for sample in samples:
        text, prompt = sample["text"], str(run.config.get("train.sample_prompt") or "")
        prompt = prompt if text.startswith(prompt) else ""
        written = {"prompt": prompt, "text": text.removeprefix(prompt)}
        said.append({"step": sample["step"], **written, "loss": losses.get(sample["step"])})
    return said


def _describe_event(event: dict[str, Any]) -> dict[str, Any]:
    details = {key: value for key, value in event.items() if key not in _COMMON_EVENT_KEYS and value is not None}
    text = redact(", ".join(f"{key} {value}" for key, value in details.items()))  # before shortening
    _, sign, name = EVENTS[event["event"]]
    shortened = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
    return {"step": event["step"], "sign": sign, "name": name, "details": shortened}


def _lines(value: Any) -> list[str]:
    """Return the lines of a string, a list or a dict."""
    if isinstance(value, dict):
        return [f"{key}: {inner}" for key, inner in value.items()]
    return [str(line) for line in (value if isinstance(value, list) else [value] if value else [])]
