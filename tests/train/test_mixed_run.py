"""A run on a mixture: a resume is exact in any stage, and what it says of each text adds up to the whole."""

from __future__ import annotations

import json

import pytest
from faults import same
from safetensors.torch import load_file
from test_resume import run_in_parts, without_timings

from hfgolf.run.metrics import read_rows
from hfgolf.system.errors import UserError

LINES = [f"{i} and {i * 7 % 10} make {i + i * 7 % 10}." for i in range(900)]


@pytest.fixture
def mixed_run(tiny_run, tmp_path):
    """Return the command line of a tiny run on a mixture, whose second stage begins within its fourth step."""
    (tmp_path / "sums.txt").write_text("\n".join(LINES))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"body": line.upper()}) for line in LINES[:300]))
    mixture = (
        f"[{{files: {tmp_path}/sums.txt, weight: {{0: 3, 900: 1}}}},"
        f" {{files: {tmp_path}/rows.jsonl, weight: 1, text_column: body, split: documents}}]"
    )
    defaults = {"data__source": "mixture", "data__files": "[]", "data__mixture": mixture, "train__max_steps": 9}
    return lambda **options: tiny_run(**defaults | options)


@pytest.mark.slow
def test_a_run_resumed_in_each_stage_matches_a_straight_one_bitwise(run, mixed_run, monkeypatch):
    options = {"batch__segment_length": 8, "batch__segmented_tokens": 1300, "model__dropout": 0.1}
    straight = run(mixed_run(run__name="straight", **options))
    broken = run_in_parts(run, mixed_run, (2, 4, 7), monkeypatch, **options)
    assert without_timings(broken) == without_timings(straight)
    assert same(*(load_file(folder / "model" / "model.safetensors") for folder in (broken, straight)))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (broken, straight)]
    one, other = ({key: figure for key, figure in summary.items() if "/" in key} for summary in summaries)
    assert one == other


def test_the_figures_of_each_text_add_up_to_those_of_the_whole(run, mixed_run, caplog):
    folder = run(mixed_run(train__max_steps=6))
    said = [record.getMessage() for record in caplog.records]
    assert any(" sums: " in line and "75%, 50% from 900 tokens on; " in line for line in said)
    summary = json.loads((folder / "summary.json").read_text())
    evaluated = [row for row in read_rows(folder / "metrics.jsonl") if row["val_loss"] is not None]
    for figures in (summary, *evaluated):
        of_texts = [
            [figures[f"{key}/{name}"] for key in ("val_loss", "val_tokens", "val_bytes", "val_bits_per_byte")]
            for name in ("sums", "rows")
        ]
        losses, tokens, num_bytes, scores = zip(*of_texts, strict=True)
        assert (sum(tokens), sum(num_bytes)) == (figures["val_tokens"], figures["val_bytes"])
        nats = sum(loss * count for loss, count in zip(losses, tokens, strict=True))
        assert figures["val_loss"] == pytest.approx(nats / sum(tokens), rel=1e-6)
        bits = sum(score * count for score, count in zip(scores, num_bytes, strict=True))
        assert figures["val_bits_per_byte"] == pytest.approx(bits / sum(num_bytes), rel=1e-6)
    # 29 sequences of 3 to 1, the rest of 48 by turns; 22 of the first are of sums
    assert [summary[f"tokens/{name}"] for name in ("sums", "rows")] == [32 * (22 + 10), 32 * (7 + 9)]
    assert summary["tokens/sums"] + summary["tokens/rows"] == summary["tokens"]
    for name in ("sums", "rows"):
        assert (
            f"Bits per byte of {name}: {summary[f'val_bits_per_byte/{name}']:.4f}"
            in (folder / "report.html").read_text()
        )
        assert summary[f"bytes/{name}"] == pytest.approx(summary[f"tokens/{name}"], rel=0.05)  # bytes are the tokens
        assert summary[f"epochs/{name}"] > 0
    card = (folder / "model" / "README.md").read_text()
    assert "sums.txt and rows.jsonl" in card


def test_a_resume_refuses_other_weights_and_says_which(run, mixed_run):
    run(mixed_run(train__max_steps=4))
    arguments = [argument.replace("weight: 1,", "weight: 2,") for argument in mixed_run(train__resume="latest")]
    with pytest.raises(UserError, match=r"shares \(3:1 from token 0, 1:1 from token 900 -> 3:2 from token 0"):
        run(arguments)
