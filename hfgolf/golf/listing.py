"""What an export prints: the files, where their bytes are, and the score."""

from __future__ import annotations

from typing import Any

from hfgolf.golf.budget import COUNTS
from hfgolf.golf.export import Exported
from hfgolf.golf.table import aligned, findings, folded, table_text
from hfgolf.system.wording import duration


def as_data(exported: Exported) -> dict[str, Any]:
    """Return everything as plain JSON: the ledger, the table, the certificate's line and the problems."""
    return {
        "folder": str(exported.folder),
        "certificate": exported.certificate.line,
        "ledger": exported.figures,
        "table": exported.table,
        "problems": exported.problems,
    }


def as_text(exported: Exported) -> str:
    """Return everything as text for a terminal; bits per byte only if the certificate holds."""
    if not exported.certificate.holds:
        return exported.certificate.line
    parts = [_files(exported), table_text(folded(exported.rows))]
    said = [*exported.quantized.findings, *findings(exported.rows)] if exported.quantized else []
    parts += ["\n".join(said)] if said else []
    return "\n\n".join([*parts, _score(exported)])


def _files(exported: Exported) -> str:
    ledger = exported.ledger
    if ledger is None:
        return ""
    lines = [["file", "bytes", "counted", "sha256"]]
    for entry in ledger.entries:
        counted = "yes" if entry in ledger.counted() else "no"
        lines.append([entry.name, f"{entry.num_bytes:,}", counted, entry.sha256[:16]])
    totals = ", ".join(f"{ledger.total(count):,} counting {count}" for count in COUNTS)
    left = f"{abs(ledger.excess_bytes):,} bytes {'over' if ledger.excess_bytes > 0 else 'free'}"
    total = f"{ledger.total():,} of {ledger.budget_bytes:,} bytes, {left} ({totals})"
    return f"{aligned(lines, 'lrll')}\n{total}"


def _score(exported: Exported) -> str:
    before, after, quantized = exported.before, exported.after, exported.quantized
    if quantized is None:
        return ""
    mode = after["mode"] if after["mode"] == "flat" else f"{after['mode']}, stride {after['stride']}"
    seconds = ", ".join(f"{step} {duration(spent)}" for step, spent in exported.seconds.items())
    change = after["bpb"] - before["bpb"]
    rows = {
        "steps": f"D = {quantized.scale:.4g}, on average those of SDClip with k = {quantized.sdclip_k:.2f} at 6 bits",
        "scored": f"by score.py on these files alone, {mode}, {after['tokens']:,} tokens, {after['bytes']:,} bytes",
        "bits per byte": f"{before['bpb']:.4f} before, {after['bpb']:.4f} after ({change:+.4f})",
        "time": f"{duration(sum(exported.seconds.values()))}: {seconds}",
        "folder": str(exported.folder),
    }
    return "\n".join([exported.certificate.line, *(f"{name:<15}{value}" for name, value in rows.items())])
