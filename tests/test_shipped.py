"""What ships works: every config takes two steps, and the README's scripts do what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_export import build_tiny

from hfgolf.publish.export import export_model

ROOT = Path(__file__).parents[1]
SHRUNK = {
    "data.hub_name": "null",
    "data.hub_config": "null",
    "data.max_documents": "null",
    "data.old_text": "[]",
    "data.val_files": "[]",
    "tokenizer.name_or_path": "null",
    "model.hidden_size": 32,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": "null",
    "model.intermediate_size": "null",
    "batch.sequence_length": 32,
    "batch.tokens_per_step": 128,
    "batch.micro_batch_size": "auto",
    "train.max_steps": 2,
    "train.max_tokens": "null",
    "train.max_minutes": "null",
    "train.eval_tokens": 500,
    "train.sample_tokens": 8,
    "schedule.warmup_steps": 2,
}


@pytest.mark.parametrize("config", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_config_takes_two_steps(run, config, tmp_path, corpus_file):
    """With a small corpus, model and warmup, but the config's own optimizer, schedule and intervals."""
    layers = {"model.num_hidden_layers": 11} if config.startswith("golf_") else {}  # their loops and lanes name layers
    options = (
        SHRUNK
        | layers
        | {
            "run.output_dir": tmp_path / "runs",
            "data.source": "files",
            "data.files": corpus_file,
            "data.split": "contiguous",
            "data.cache_dir": tmp_path / "cache",
            "tokenizer.kind": "byte",
            "train.cpu_threads": 1,
        }
    )
    if config == "finetune.yaml":
        export_model(*build_tiny(num_hidden_layers=1), tmp_path / "weights", "")
        options |= {"model.init_from": tmp_path / "weights"}
    folder = run(["--config", str(ROOT / "configs" / config), *(f"--{key}={value}" for key, value in options.items())])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    start = summary.get("init_from", {"val_loss": 5.5})["val_loss"]  # or below ln 257
    assert summary["val_loss"] < start  # two steps have taught it something


def test_a_run_ends_with_its_figures_a_sample_and_how_to_load_it(reset_accelerate, tiny_run, run_script, tmp_path):
    options = tiny_run(train__mixed_precision="null", batch__micro_batch_size="auto", train__compile="auto")
    first = run_script("train.py", *options, "--verbose").out
    reset_accelerate()
    second = run_script("train.py", *options).out
    assert "tiny is complete; to train again" in second
    assert "step 1/" in first and "step 1/" not in second
    for line in ("validation loss", "bits per byte", "tokens/s", "sample", "run folder", "AutoModelForCausalLM"):
        assert line in first and line in second
    assert re.search(r"^compile: no, because \w+", first, re.MULTILINE), "what auto decided, and why"
    config = (tmp_path / "runs" / "tiny" / "config.yaml").read_text()
    for line in ("compile: false  # auto", "max_steps: 6  # command line", "eps: 1.0e-08  # default"):
        assert f"  {line}\n" in config
