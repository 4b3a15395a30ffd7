"""Where the bytes of a run's golf export are, and what rounding costs there: a picture by tensor, and its sentences.

Reads the ledger and the table that the export left in the run's folder as plain JSON. Does not know how they were made.
"""

from __future__ import annotations

from typing import Any

from hfgolf import palette
from hfgolf.report.charts import Chart
from hfgolf.report.figures import Drawing
from hfgolf.run.metrics import is_number
from hfgolf.run.record import RunRecord

TITLE = "Where the bytes are"
_FIGURES = ("bytes", "coded_bits", "predicted_loss", "nats_per_kilobyte")
_MAX_FINDINGS = 10
_MAX_TENSORS = 60  # a picture that one screen still shows


def draw_tensors(run: RunRecord, number: int) -> Drawing | None:
    """Draw bytes, loss and the gain of more bytes by tensor, the best place for them first; None without an export.

    number: of the run, for the name of the picture.
    """
    from matplotlib.figure import Figure

    rows = _rows(run)[:_MAX_TENSORS]
    if not rows:
        return None
    measured = [row["measured_loss"] for row in rows if _is_figure(row.get("measured_loss"))]
    with palette.style():
        figure = Figure(figsize=(11, 1.0 + 0.2 * len(rows)), layout="constrained")
        in_bytes, in_loss, in_gain = figure.subplots(1, 3, sharey=True, width_ratios=(5, 3, 3))
        places = range(len(rows))
        in_bytes.set_yticks(places, [_label(row) for row in rows], parse_math=False)
        in_bytes.barh(places, [row["bytes"] / 1000 for row in rows], color=palette.BLUE)
        in_bytes.set_xlim(0, 1.2 * max(row["bytes"] for row in rows) / 1000 or 1.0)
        for place, row in enumerate(rows):
            end = row["bytes"] / 1000, place
            bits = f"{row['coded_bits']:.2f} bits"
            in_bytes.annotate(bits, end, xytext=(3, 0), textcoords="offset points", va="center")
        in_bytes.set_title("kB in the artifact, and bits per weight")
        in_loss.barh(places, [1000 * row["predicted_loss"] for row in rows], color=palette.ORANGE, label="predicted")
        if len(measured) == len(rows):
            in_loss.plot([1000 * rise for rise in measured], places, "D", color=palette.INK, label="measured")
            in_loss.legend()
        in_loss.set_title("rounding costs (millinats per token)")
        in_gain.barh(places, [1000 * row["nats_per_kilobyte"] for row in rows], color=palette.GREEN)
        in_gain.set_title("one more kB saves (millinats)")
        for axes in (in_bytes, in_loss, in_gain):
            axes.set_axisbelow(True)
            axes.tick_params(axis="y", length=0)
            axes.grid(visible=False, axis="y")
            axes.locator_params(axis="x", nbins=5)
        in_bytes.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
    return Drawing(Chart(f"golf_tensors_{number}", TITLE), figure)


def tensor_bars(run: RunRecord) -> list[dict[str, Any]]:
    """Return the same as cells of a table, each {"text", "percent" of the largest}; [] without an export."""
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
