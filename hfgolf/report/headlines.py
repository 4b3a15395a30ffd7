"""What the figures of a run mean: its three headlines, what they rest on, and several runs against the first.

The figures are those of run/record.py; nothing here computes them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hfgolf.run.metrics import is_number, on_subset
from hfgolf.run.record import FIGURES, RunRecord, final_figures, format_figures

HEADLINES = ("val_loss", "val_bits_per_byte", "seconds")
_LEAST = ("val_loss", "val_bits_per_byte", "old_val_bits_per_byte", "train_loss", "seconds", "dollars", "memory_bytes")
_MOST = ("tokens_per_second", "mfu")
_IN_UNITS = ("val_loss", "val_bits_per_byte", "old_val_bits_per_byte", "train_loss")  # the others differ in percent
_BITS_OF_A_BYTE = 8
_NATS_OF_A_GUESS = 13  # ln of 440,000 tokens


def headlines(run: RunRecord, price_per_hour: float | None) -> list[dict[str, str]]:
    """Return up to three figures, each {"label", "value", "unit", "means"}; the training loss if none is validated."""
    figures = final_figures(run, price_per_hour)
    texts = format_figures(figures)
    loss = "val_loss" if FIGURES["val_loss"][0] in texts else "train_loss"
    units = {"val_loss": "nats per token", "train_loss": "nats per token", "val_bits_per_byte": "", "seconds": ""}
    said = []
    for key in (loss, *HEADLINES[1:]):
        label = FIGURES[key][0]
        if label in texts:
            means = _meaning(key, figures, texts, run.summary)
            said.append({"label": label, "value": texts[label], "unit": units[key], "means": means})
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
    said = [
        f"The validation figures are of the exported {weights}{'' if step is None else f' (step {step:,})'}, on all"
        f" {behind[0]:,} validation tokens ({behind[1]:,} bytes)."
    ]
    key = "val_loss_ema" if run.summary.get("weights") == "ema" else "val_loss"
    if last is not None and last.get(key) is not None and last[key] != run.summary["val_loss"]:
        tokens = last.get("val_tokens")
        part = f", on the first {tokens:,} tokens" if tokens is not None and tokens != behind[0] else ""
        said.append(f"The curve ends at {last[key]:.4f}, the evaluation of step {last['step']:,}{part}.")
    return said


def side_by_side(runs: Sequence[RunRecord], prices: Sequence[float | None]) -> dict[str, Any]:
    """Return {"labels", "rows", "same", "notes"}: the figures that differ, against the first run, the best marked.

    rows: one {label: {"text", "delta", "is_best"}} per run. same: {label: text} of what all runs have in common.
    """
    figures = [final_figures(run, price) for run, price in zip(runs, prices, strict=True)]
    texts = [format_figures(of_run) for of_run in figures]
    behind, incomparable, notes = [found for run in runs if (found := _evaluated_on(run))], set[str](), list[str]()
    if len({num_bytes for _, num_bytes in behind}) > 1:
        incomparable = {*_IN_UNITS}
        notes = [
            "The runs were evaluated on different amounts of text, so their losses and bits per byte do not compare."
        ]
    elif len({tokens for tokens, _ in behind}) > 1:
        incomparable = {"val_loss", "train_loss"}
        notes = ["The runs cut the same text into different tokens, so their losses do not compare; bits per byte do."]
    same, labels = {}, []
    rows: list[dict[str, Any]] = [{} for _ in runs]
    for key, (label, _) in FIGURES.items():
        shown = [of_run.get(label) for of_run in texts]
        if not any(shown):
            continue
        if len(set(shown)) == 1 and key not in HEADLINES:
            same[label] = str(shown[0])
            continue
        labels.append(label)
        known = [of_run[key] for of_run, text in zip(figures, shown, strict=True) if text is not None]
        choose = None if key in incomparable else min if key in _LEAST else max if key in _MOST else None
        best = choose(known) if choose and len(known) > 1 and len(set(shown)) > 1 else None
        for row, of_run, text in zip(rows, figures, shown, strict=True):
            value = of_run[key] if text is not None else None
            delta, baseline = "", figures[0][key]
            if choose and row is not rows[0] and None not in (value, baseline) and math.isfinite(value - baseline):
                relative = f"{100 * (value / baseline - 1):+.1f} %" if baseline else ""
                delta = f"{value - baseline:+.4f}" if key in _IN_UNITS else relative
            row[label] = {"text": text or "", "delta": delta, "is_best": best is not None and value == best}
    return {"labels": labels, "rows": rows, "same": same, "notes": notes}
