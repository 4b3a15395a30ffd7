"""Forecasts during training: they change nothing, and count what an export of the model counts."""

from __future__ import annotations

import pytest
import torch

from hfgolf.config.parse import load_config
from hfgolf.golf.ledger import files_besides
from hfgolf.publish.load import load_exported
from hfgolf.run.metrics import read_rows
from hfgolf.system.errors import UserError


def log(folder):
    rows = read_rows(folder / "metrics.jsonl")
    return [
        {key: row[key] for key in ("step", "train_losses", "grad_norms", "val_loss", "sample_hashes")} for row in rows
    ]


@pytest.mark.slow
def test_forecasts_do_not_change_training(run, tiny_run):
    plain = run(tiny_run(model__dropout=0.1, train__log_every_steps=2))
    options = {"golf__forecast_every_steps": 4, "golf__budget_bytes": 30_000, "model__dropout": 0.1}
    with_forecasts = run(tiny_run(**options, run__name="with", train__log_every_steps=2))
    rows = read_rows(with_forecasts / "metrics.jsonl")
    assert [row["step"] for row in rows if "golf_bytes" in row] == [4, 6]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6]
    assert log(plain) == log(with_forecasts)
    for row in rows:
        if "golf_bytes" in row:
            assert row["golf_margin_bytes"] == 30_000 - row["golf_bytes"] and row["golf_step"] > 0


@pytest.mark.slow
def test_a_forecast_counts_what_the_export_will_count(run, tiny_run):
    options = {"train__max_steps": 2, "golf__forecast_every_steps": 2}
    challenge = read_rows(run(tiny_run(**options)) / "metrics.jsonl")[-1]
    folder = run(tiny_run(**options, run__name="all", golf__count="everything"))
    model, tokenizer = load_exported(str(folder / "model"))
    files = files_besides(model.config, tokenizer, load_config(str(folder / "config.yaml")).config)
    besides = sum(len(content) for content, counted_by in files.values() if "challenge" not in counted_by)
    assert besides > 0
    assert read_rows(folder / "metrics.jsonl")[-1]["golf_bytes"] == challenge["golf_bytes"] + besides


@pytest.mark.slow
def test_nonfinite_weights_get_no_forecast(run, tiny_run, edit_run, tmp_path):
    def spoil(run_):
        real = run_.optimizer.step

        def step(*arguments):
            real(*arguments)
            with torch.no_grad():
                run_.raw_model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan

        run_.optimizer.step = step

    edit_run(spoil)
    with pytest.raises(UserError, match="holds nonfinite values"):  # at its end, and there is nothing to export
        run(tiny_run(train__max_steps=1, golf__forecast_every_steps=1))
    (row,) = read_rows(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert "golf_bytes" not in row
