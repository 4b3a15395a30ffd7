"""What the figures of a run mean: its three headlines, what they rest on, and whether several runs compare.

The figures are those of run/record.py; nothing here computes them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hfgolf.run.metrics import is_number, on_subset
from hfgolf.run.record import FIGURES, RunRecord, final_figures, format_figures, validates_on_other_text

_UNITS = {"val_loss": "nats per token", "train_loss": "nats per token"}
_BITS_OF_A_BYTE = 8
_NATS_OF_A_GUESS = 13  # ln of 440,000 tokens


def headlines(run: RunRecord, price_per_hour: float | None) -> list[dict[str, str]]:
    """Return up to three figures, each {"label", "value", "unit", "means"}; the training loss if none is validated."""
    figures = final_figures(run, price_per_hour)
    texts = format_figures(figures)
    loss = "val_loss" if FIGURES["val_loss"][0] in texts else "train_loss"
    said = []
    for key in (loss, "val_bits_per_byte", "seconds"):
        label = FIGURES[key][0]
        if label in texts:
            means = _meaning(key, figures, texts, run.summary)
            said.append({"label": label, "value": texts[label], "unit": _UNITS.get(key, ""), "means": means})
    return said


def _meaning(key: str, figures: dict[str, Any], texts: dict[str, str], summary: dict[str, Any]) -> str:
    if key == "seconds":
        parts = [
            f"{texts['steps']} {'step' if figures['steps'] == 1 else 'steps'}",
            *([f"{figures['tokens']:,} tokens"] if figures["tokens"] else []),
        ]
        speed = texts.get(FIGURES["tokens_per_second"][0])
        return ", ".join(parts) + (f", {speed} tokens/s." if speed else ".")
    value = figures[key]
    if key == "val_bits_per_byte" and value > _BITS_OF_A_BYTE:
        return "More than the 8 bits of a plain byte: the model knows nothing of this text."
    if key == "val_bits_per_byte":
        return f"The text takes {value / 8:.1%} of its bytes, if this model compresses it.{_compressors(summary)}"
    if value > _NATS_OF_A_GUESS:
        return "Worse than a guess among all tokens of any vocabulary."
    return f"Each token is as uncertain as a fair choice among {math.exp(value):,.0f}. Lower is better."


def _compressors(summary: dict[str, Any]) -> str:
    """Say what gzip and xz make of the text; if they were not run on it, what is better."""
    keys = ("gzip_bits_per_byte", "xz_bits_per_byte", "compressed_bytes")
    if not all(summary.get(key) is not None and is_number(summary[key]) for key in keys):
        return " Lower is better."
    gzip, xz, num_bytes = (summary[key] for key in keys)
    part = f" of its first {num_bytes:,} bytes" if num_bytes != summary.get("val_bytes") else ""
    return f" gzip -9 makes it {gzip / 8:.1%}, xz -9e {xz / 8:.1%}{part}."


def _evaluated_on(run: RunRecord) -> tuple[int, int] | None:
    """Return the tokens and bytes behind the run's validation figures; None if they are not known."""
    rows = (row for row in reversed(run.metrics.rows) if row.get("val_loss") is not None)
    source = run.summary if run.summary.get("val_loss") is not None else next(rows, {})
    tokens, num_bytes = source.get("val_tokens"), source.get("val_bytes")
    return None if tokens is None or num_bytes is None else (int(tokens), int(num_bytes))


def basis(run: RunRecord) -> list[str]:
    """Say of which weights and which text the validation figures are, and why the curve ends elsewhere if it does."""
    behind, rows = _evaluated_on(run), [row for row in run.metrics.rows if row.get("val_loss") is not None]
    if behind is None:
        return []
    last = on_subset(rows[-1]) if rows else None
    if run.summary.get("val_loss") is None:
        extent = f"{behind[0]:,} validation tokens ({behind[1]:,} bytes)"
        return [f"The validation figures are of step {last['step']:,}, on {extent}."] if last else []
    weights = "averaged weights" if run.summary.get("weights") == "ema" else "weights"
    step = run.summary.get("step")
    share = run.summary.get("val_share_read") or 1.0  # earlier versions read all
    extent = f"all {behind[0]:,}" if share == 1 else f"the first {behind[0]:,}"
    part = "" if share == 1 else f", {share:.0%} of them; train.final_eval_tokens says how many"
    said = [
        f"The validation figures are of the exported {weights}{'' if step is None else f' (step {step:,})'}, on"
        f" {extent} validation tokens ({behind[1]:,} bytes){part}."
    ]
    if last is not None and last["val_loss"] != run.summary["val_loss"]:
        tokens = last.get("val_tokens")
        part = f", on the first {tokens:,} tokens" if tokens is not None and tokens != behind[0] else ""
        said.append(f"The curve ends at {last['val_loss']:.4f}, the evaluation of step {last['step']:,}{part}.")
    return said


def notes_on_all(runs: Sequence[RunRecord]) -> list[str]:
    """Say which figures of several runs can't be compared."""
    evaluated = [(run, found) for run in runs if (found := _evaluated_on(run))]
    behind = [found for _, found in evaluated]
    what = "amounts of text" if len({num_bytes for _, num_bytes in behind}) > 1 else ""
    if any(validates_on_other_text(run.metadata, evaluated[0][0].metadata) for run, _ in evaluated):
        what = "texts"
    if what:
        return [f"The runs were evaluated on different {what}, so their losses and bits per byte do not compare."]
    if len({tokens for tokens, _ in behind}) > 1:
        return ["The runs cut the same text into different tokens, so their losses do not compare; bits per byte do."]
    return []
