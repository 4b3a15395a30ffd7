"""examples/autoresearch/program.md: the figures that it tells an agent to judge by are in what the commands print."""

from __future__ import annotations

import json
import re
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "examples/autoresearch/program.md"


def test_the_figures_of_the_program_are_in_the_json_of_compare(hfgolf, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arm, rate in (("best", 0.01), ("new", 0.02)):
        for seed in (1, 2):
            options = {"run__seed": seed, "run__name": f"{arm}-seed{seed}", "optim__adamw_learning_rate": rate}
            said = hfgolf("train", *tiny_run(run__output_dir="runs", **options), "--json")
            assert said.status == 0, said.err
    runs = sorted(map(str, Path("runs").iterdir()))
    compared = json.loads(hfgolf("compare", *runs, "--equivalent", "0.005", "--json").out)
    text = PROGRAM.read_text()
    named = set(re.findall(r"`(arms\.new\.[a-z_.]+)`", text))
    assert len(named) >= 4
    assert "its `p_value`" in text and "p_value" in compared["arms"]["new"]["difference"]
    for name in named:
        value = compared
        for part in name.split("."):
            value = value[part]
        assert value is not None
