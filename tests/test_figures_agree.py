"""One score, wherever a person reads it: that of the last evaluation, although those before read less."""

from __future__ import annotations

import pytest

from hfgolf.compare.outcome import read_outcome
from hfgolf.run.folder import RunFolder
from hfgolf.run.record import final_figures, read_run


@pytest.mark.slow
def test_last_evaluation_summary_report_card_and_comparison_agree(run, tiny_run, tmp_path, corpus_file):
    """tests/evaluate compares hfgolf evaluate with the summary."""
    val = tmp_path / "val.txt"
    val.write_bytes(corpus_file.read_bytes().decode().encode("ascii", "replace")[-20_000:])
    folder = RunFolder(
        run(tiny_run(data__val_files=f"[{val}]", train__eval_tokens=9000, train__final_eval_tokens="null"))
    )
    record = read_run(folder.path)
    first, last = (row for row in record.metrics.rows if row["val_loss"] is not None)
    assert first["val_tokens"] == last["subset_val_tokens"] < last["val_tokens"] == 20_000

    loss, bits = record.summary["val_loss"], record.summary["val_bits_per_byte"]
    assert (last["val_loss"], last["val_bits_per_byte"]) == (loss, bits)
    assert last["subset_val_loss"] != pytest.approx(loss, abs=1e-4), "else this test shows nothing"
    assert final_figures(record, None)["val_loss"] == loss
    assert read_outcome(folder).curve[-1].final_loss == loss
    assert f"{loss:.4f}" in folder.report.read_text(encoding="utf-8")
    assert f"{loss:.4f}" in (folder.model / "README.md").read_text(encoding="utf-8")
