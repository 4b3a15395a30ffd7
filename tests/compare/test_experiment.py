"""Definitions of experiments: their expansion into runs, and one line per mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hfgolf.compare.experiment import load_experiment, plan_runs
from hfgolf.config.parse import load_config
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "benchmarks" / "experiments").glob("*.yaml"))

DEFINITION = """
base: {base}
seeds: [3, 1]
common: {{train.max_steps: 10, train.mixed_precision: no, optim.betas: [0.9, 0.99]}}
arms:
  muon: {{optim.name: muon}}
  adamw: {{optim.name: adamw, optim.learning_rate: 4e-3, optim.embedding_learning_rate: }}
grid:
  muon: {{optim.learning_rate: [0.010, 2e-2], optim.weight_decay: [0, 0.1]}}
baseline: adamw
"""


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    base = tmp_path / "base.yaml"
    base.write_text("optim: {momentum: 0.9}\ntrain: {max_steps: 99}\n")
    path = tmp_path / "question.yaml"
    path.write_text(DEFINITION.format(base=base))
    return path


def test_definition_expands_into_runs(definition, tmp_path):
    experiment = load_experiment(definition)
    muon = [f"muon[learning_rate={rate},weight_decay={decay}]" for rate in ("0.010", "2e-2") for decay in ("0", "0.1")]
    assert list(experiment.arms) == [*muon, "adamw"] and experiment.arms_of("muon") == muon
    runs = plan_runs(experiment, tmp_path / "out", ["--train.eval_every_steps=5", "--train.max_steps=20"])
    assert [(run.arm, run.seed) for run in runs] == [(arm, seed) for seed in (3, 1) for arm in experiment.arms]
    second, adamw = runs[1], runs[9]
    assert second.name == "muon-learning_rate-0.010-weight_decay-0.1-seed3"
    assert second.folder.path == tmp_path / "out" / second.name
    assert len({run.name for run in runs}) == 10
    config = second.resolved.config
    assert (config.optim.learning_rate, config.optim.weight_decay, config.optim.momentum) == (0.01, 0.1, 0.9)
    assert (config.train.max_steps, config.train.eval_every_steps, config.train.mixed_precision) == (20, 5, "no")
    assert config.optim.betas == (0.9, 0.99) and config.train.final_eval_tokens is None
    assert (adamw.resolved.config.run.seed, adamw.resolved.config.optim.learning_rate) == (1, 0.004)
    assert adamw.resolved.config.optim.embedding_learning_rate is None


def test_arguments_reproduce_the_planned_config(definition, tmp_path):
    """A run's command line gives exactly the planned config."""
    for run in plan_runs(load_experiment(definition), tmp_path / "out", []):
        assert load_config(run.arguments).config == run.resolved.config


def test_grid_over_every_arm(definition):
    definition.write_text(
        "base: null\nbaseline:\nseeds: [1]\narms: {a: , b: {optim.row_equilibration: true}}\n"
        "grid: {optim.learning_rate: [1, 2]}\n"
    )
    experiment = load_experiment(definition)
    assert list(experiment.arms) == [f"{arm}[learning_rate={rate}]" for arm in "ab" for rate in (1, 2)]
    assert experiment.arms["b[learning_rate=2]"] == {"optim.row_equilibration": "true", "optim.learning_rate": "2"}
    assert (experiment.base, experiment.baseline) == (None, "a")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_definitions_are_valid(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    experiment = load_experiment(path)
    runs = plan_runs(experiment, tmp_path, [])
    assert len(runs) == len(experiment.arms) * len(experiment.seeds) > 1
    assert len({str(run.folder.path) for run in runs}) == len(runs)


def test_readme_definition_is_valid(definition, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    readme = (ROOT / "benchmarks" / "experiments" / "README.md").read_text()
    definition.write_text(re.search(r"```yaml\n(.*?)```", readme, re.DOTALL)[1])
    assert len(plan_runs(load_experiment(definition), tmp_path, [])) == (3 * 2 + 1) * 3


ARMS = "arms: {a: {}}\nseeds: [1]\n"
SHORT = ARMS + "common: {train.max_steps: 1}\n"
LONG = "b" * 250
MISTAKES = {
    "no YAML": ("arms: [", "question.yaml is not YAML: "),
    "a key twice": ("seeds: [1]\nseeds: [2]", "is not YAML: line 2: found duplicate key"),
    "no mapping": ("- a", "question.yaml: a definition: ['a'] is not allowed; allowed: keys and values"),
    "an unknown key": (ARMS + "sed: [1]", "question.yaml: unknown key sed; did you mean seeds?"),
    "no arms": ("seeds: [1]", "question.yaml: arms: there are none; add one"),
    "no seeds": ("arms: {a: {}}", "question.yaml: seeds: None is not allowed; allowed: a list of different numbers"),
    "a seed twice": ("arms: {a: {}}\nseeds: [1, 1]", "seeds: ['1', '1'] is not allowed"),
    "a seed alone": ("arms: {a: {}}\nseeds: 12", "seeds: '12' is not allowed"),
    "a name no folder can have": ("arms: {a/b: {}}\nseeds: [1]", "arms: 'a/b' is not allowed as a name"),
    "a key that is none": ("arms: {a: {optim.epps: 1}}\nseeds: [1]", "arms.a: unknown key optim.epps; did you mean"),
    "sections": ("arms: {a: {optim: {name: muon}}}\nseeds: [1]", "arms.a: unknown key optim; did you mean optim."),
    "a mapping as a value": (ARMS + "common: {optim.eps: {a: b}}", "common: optim.eps: {'a': 'b'} is not allowed;"),
    "what the experiment decides": (ARMS + "common: {run.seed: 1}", "common: the experiment sets run.seed"),
    "a grid of no arm": (ARMS + "grid: {b: {optim.eps: [1]}}", "grid: b is neither an arm (a) nor a key"),
    "an axis of one": (ARMS + "grid: {a: {optim.eps: 1}}", "grid.a: optim.eps: '1' is not allowed; allowed: a list"),
    "an axis that is none": (ARMS + "grid: {a: {optim.epps: [1]}}", "grid.a: unknown key optim.epps; did you mean"),
    "no such baseline": (ARMS + "baseline: b", "question.yaml: baseline: there is no arm b; allowed: a."),
    "values under base": (ARMS + "base: {optim.name: sgd}", "base: {'optim.name': 'sgd'} is not allowed"),
    "a base that is not there": (ARMS + "base: no.yaml", "question.yaml: a: --config: there is no file no.yaml"),
    "a value of the wrong type": ("arms: {a: {optim.eps: fast}}\nseeds: [1]", "yaml: a: optim.eps: 'fast' is not"),
    "arms with one folder": (SHORT + "grid: {a: {data.files: [b/c, b-c]}}", "would both be in a-files-b-c; write"),
    "a name that is too long": (SHORT + f"grid: {{a: {{data.files: [{LONG}]}}}}", f"{LONG}]: run.name: 'a-files-bbb"),
    "a value out of range": (SHORT + "grid: {a: {model.dropout: [0, -1]}}", "a[dropout=-1]: model.dropout: -1 is"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_a_definition_is_one_line(mistake, definition, tmp_path):
    text, message = MISTAKES[mistake]
    definition.write_text(text)
    with pytest.raises(UserError) as error:
        plan_runs(load_experiment(definition), tmp_path, [])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--optim.weight_decay=1", "--optim.weight_decay: the arms differ in this key; change it in "),
        ("--run.seed=1", "the command line: the experiment sets run.seed"),
        ("--optim.epps=1", "the command line: unknown key optim.epps; did you mean optim.eps?"),
    ],
)
def test_command_line_cannot_override_the_arms(definition, tmp_path, option, message):
    with pytest.raises(UserError) as error:
        plan_runs(load_experiment(definition), tmp_path, [option])
    assert str(error.value).startswith(message)
