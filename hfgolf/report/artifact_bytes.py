"""Where the bytes of a run's golf export are, and what rounding costs there: a table by tensor, and its sentences.

Reads the ledger and the table that the export left in the run's folder as plain JSON. Does not know how they were made.
"""

from __future__ import annotations

from typing import Any

from hfgolf.run.metrics import is_number
from hfgolf.run.record import RunRecord

TITLE = "Where the bytes are"
_FIGURES = ("bytes", "coded_bits", "predicted_loss", "nats_per_kilobyte")
_MAX_FINDINGS = 10
_MAX_TENSORS = 60  # what one screen still shows


def tensor_bars(run: RunRecord) -> list[dict[str, Any]]:
    """Return bytes, loss and the gain of more bytes by tensor, the best place for them first; [] without an export.

    Each is a cell of a table, {"text", "percent" of the largest}.
    """
    rows = _rows(run)[:_MAX_TENSORS]
    columns = {
        "bytes": lambda row: f"{row['bytes'] / 1000:,.1f}",
        "coded_bits": lambda row: f"{row['coded_bits']:.2f} bits",
        "predicted_loss": lambda row: f"{1000 * row['predicted_loss']:.3g}",
        "nats_per_kilobyte": lambda row: f"{1000 * row['nats_per_kilobyte']:.3g}",
    }
    measured = bool(rows) and all(_is_figure(row.get("measured_loss")) for row in rows)
    if measured:
        columns["measured_loss"] = lambda row: f"{1000 * row['measured_loss']:.3g}"
    largest = {key: max((abs(row[key]) for row in rows), default=0) or 1 for key in columns}
    return [
        {
            "name": _label(row),
            **{
                key: {"text": write(row), "percent": f"{100 * max(0.0, row[key]) / largest[key]:.1f}"}
                for key, write in columns.items()
            },
        }
        for row in rows
    ]


def sentences(run: RunRecord) -> list[str]:
    """Return what a reader should know of the export: its bytes and score, where more bytes go first, the findings."""
    rows, ledger = _rows(run), run.golf["ledger"]
    if not rows:
        return []
    said: list[str] = []
    said += _score(ledger)
    first, last = rows[0], rows[-1]
    if len(rows) > 1:
        said.append(
            f"The next kilobyte is best spent on {_label(first)}: {first['nats_per_kilobyte']:.2g} nats per token."
            f" It is best taken from {_label(last)}: {last['nats_per_kilobyte']:.2g}."
        )
    if len(rows) > _MAX_TENSORS:
        said.append(f"The first {_MAX_TENSORS} of {len(rows)} tensors; golf/table.json has all.")
    return said + _findings(run)


def _rows(run: RunRecord) -> list[dict[str, Any]]:
    """Return the tensors of the table, as they are sorted there; none if the table is broken."""
    rows = run.golf["table"].get("tensors")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    rows = [row for row in rows if isinstance(row.get("name"), str)]
    return [row for row in rows if all(_is_figure(row.get(key)) for key in _FIGURES)]


def _is_figure(value: Any) -> bool:
    return value is not None and is_number(value)


def _findings(run: RunRecord) -> list[str]:
    findings = run.golf["table"].get("findings")
    return [text for text in findings if isinstance(text, str)][:_MAX_FINDINGS] if isinstance(findings, list) else []


def _score(ledger: dict[str, Any]) -> list[str]:
    """Return the sentence on bytes and score; none if the ledger is broken."""
    try:
        files = [file for file in ledger["files"] if ledger["count"] in file["counted_by"]]
        each = ", ".join(f"{file['name']} {file['bytes']:,}" for file in files)
        return [
            f"{ledger['totals'][ledger['count']]:,} of {ledger['budget_bytes']:,} bytes ({each}):"
            f" {ledger['after']['bpb']:.4f} bits per byte, {ledger['before']['bpb']:.4f} before rounding."
        ]
    except (KeyError, TypeError, ValueError):
        return []


def _label(row: dict[str, Any]) -> str:
    name: str = row["name"]
    return name.removeprefix("model.").removesuffix(".weight")
