"""What an export prints: the files, where their bytes are, other coders, and the score."""

from __future__ import annotations

from typing import Any

from hfgolf.golf.budget import COUNTS
from hfgolf.golf.export import Outcome
from hfgolf.golf.table import as_text as table_as_text
from hfgolf.golf.table import findings, folded
from hfgolf.wording import duration


def as_data(outcome: Outcome) -> dict[str, Any]:
    """Return everything as plain JSON: the ledger, the table, the certificate's line and the problems."""
    return {
        "folder": str(outcome.folder),
        "certificate": outcome.certificate.line,
        "ledger": outcome.figures,
        "table": outcome.table,
        "problems": outcome.problems,
    }


def as_text(outcome: Outcome) -> str:
    """Return everything as text for a terminal; bits per byte only if the certificate holds."""
    if not outcome.certificate.holds:
        return outcome.certificate.line
    parts = [_files(outcome), table_as_text(folded(outcome.rows)), _coders(outcome)]
    said = [*outcome.quantized.findings, *findings(outcome.rows)] if outcome.quantized else []
    parts += ["\n".join(said)] if said else []
    return "\n\n".join([*parts, _score(outcome)])


def _files(outcome: Outcome) -> str:
    ledger = outcome.ledger
    if ledger is None:
        return ""
    lines = [["file", "bytes", "counted", "sha256"]]
    for entry in ledger.entries:
        counted = "yes" if entry in ledger.counted() else "no"
        lines.append([entry.name, f"{entry.num_bytes:,}", counted, entry.sha256[:16]])
    totals = ", ".join(f"{ledger.total(count):,} counting {count}" for count in COUNTS)
    left = f"{abs(ledger.excess_bytes):,} bytes {'over' if ledger.excess_bytes > 0 else 'free'}"
    total = f"{ledger.total():,} of {ledger.budget_bytes:,} bytes, {left} ({totals})"
    return f"{_aligned(lines, 'lrll')}\n{total}"


def _coders(outcome: Outcome) -> str:
    lines = [["the same integers by", "bytes", "to entropy", "order", "seconds"]]
    results = outcome.compressors
    entropy = next((result.num_bytes for result in results if "entropy" in result.name), None)
    for result in results:
        if result.num_bytes is None:
            lines.append([result.name, "", "", result.note, ""])
            continue
        distance = f"{result.num_bytes / entropy - 1:+.2%}" if entropy else ""
        lines.append([result.name, f"{result.num_bytes:,}", distance, result.order, f"{result.seconds:.1f}"])
    return _aligned(lines, "lrrlr")


def _score(outcome: Outcome) -> str:
    before, after, quantized = outcome.before, outcome.after, outcome.quantized
    if quantized is None:
        return ""
    mode = after["mode"] if after["mode"] == "flat" else f"{after['mode']}, stride {after['stride']}"
    seconds = ", ".join(f"{step} {duration(spent)}" for step, spent in outcome.seconds.items())
    change = after["bpb"] - before["bpb"]
    rows = {
        "steps": f"D = {quantized.scale:.4g}, on average those of SDClip with k = {quantized.sdclip_k:.2f} at 6 bits",
        "scored": f"by score.py on these files alone, {mode}, {after['tokens']:,} tokens, {after['bytes']:,} bytes",
        "bits per byte": f"{before['bpb']:.4f} before, {after['bpb']:.4f} after ({change:+.4f})",
        "time": f"{duration(sum(outcome.seconds.values()))}: {seconds}",
        "folder": str(outcome.folder),
    }
    return "\n".join([outcome.certificate.line, *(f"{name:<15}{value}" for name, value in rows.items())])


def _aligned(lines: list[list[str]], sides: str) -> str:
    """Return columns of text. sides: l or r for each column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(line, widths, sides, strict=True)
        ).rstrip()
        for line in lines
    )
