"""Where the bytes of a run's golf export are, and what rounding costs there: a table by tensor, and its sentences.

Reads the ledger and the table that the export left in the run's folder as plain JSON. Does not know how they were made.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hfgolf.run.metrics import is_number
from hfgolf.run.record import RunRecord

_COLUMNS = {  # {key in table.json: its unit, and how to write it}
    "bytes": (1e-3, "{:,.1f}"),
    "coded_bits": (1.0, "{:.2f} bits"),
    "predicted_loss": (1e3, "{:.3g}"),
    "measured_loss": (1e3, "{:.3g}"),
    "nats_per_kilobyte": (1e3, "{:.3g}"),
}
_MAX_FINDINGS = 10
_MAX_TENSORS = 60  # what one screen still shows


def artifact_bytes(run: RunRecord) -> tuple[list[dict[str, Any]], list[str]]:
    """Return bytes, loss and the gain of more bytes by tensor, the best place for them first, and sentences on them.

    Each row is {"name": text, column: {"text", "percent" of the largest}}. Both are empty without an export.
    """
    table, ledger = run.golf["table"], run.golf["ledger"]
    tensors, findings = (found if isinstance(found, list) else [] for found in map(table.get, ("tensors", "findings")))
    rows = [row for row in tensors if isinstance(row, dict) and isinstance(row.get("name"), str)]
    known = {key: [row.get(key) is not None and is_number(row[key]) for row in rows] for key in _COLUMNS}
    columns = [key for key in _COLUMNS if key != "measured_loss" or all(known[key])]  # measured only if asked for
    rows = [row for index, row in enumerate(rows) if all(known[key][index] for key in columns)]
    if not rows:
        return [], []
    names = [row["name"].removeprefix("model.").removesuffix(".weight") for row in rows]
    said = []
    with suppress(KeyError, TypeError, ValueError):  # a broken ledger
        files = [file for file in ledger["files"] if ledger["count"] in file["counted_by"]]
        each = ", ".join(f"{file['name']} {file['bytes']:,}" for file in files)
        said.append(
            f"{ledger['totals'][ledger['count']]:,} of {ledger['budget_bytes']:,} bytes ({each}):"
            f" {ledger['after']['bpb']:.4f} bits per byte, {ledger['before']['bpb']:.4f} before rounding."
        )
    if len(rows) > 1:
        first, last = rows[0]["nats_per_kilobyte"], rows[-1]["nats_per_kilobyte"]
        said.append(
            f"The next kilobyte is best spent on {names[0]}: {first:.2g} nats per token."
            f" It is best taken from {names[-1]}: {last:.2g}."
        )
    if len(rows) > _MAX_TENSORS:
        said.append(f"The first {_MAX_TENSORS} of {len(rows)} tensors; golf/table.json has all.")
    said += [text for text in findings if isinstance(text, str)][:_MAX_FINDINGS]
    cells: list[dict[str, Any]] = [{"name": name} for name in names[:_MAX_TENSORS]]
    for key in columns:
        unit, form = _COLUMNS[key]
        largest = max(abs(row[key]) for row in rows[:_MAX_TENSORS]) or 1
        for cell, row in zip(cells, rows, strict=False):
            percent = f"{100 * max(0.0, row[key]) / largest:.1f}"
            cell[key] = {"text": form.format(unit * row[key]), "percent": percent}
    return cells, said
