"""What a comparison reports, and its caveats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfgolf.compare.comparison import compare_experiment, compare_outcomes, to_markdown, to_terminal
from hfgolf.compare.experiment import Experiment
from hfgolf.compare.plot import draw
from hfgolf.system.errors import UserError

RATES = ["0.01", "0.02", "0.04"]


@pytest.fixture
def experiment() -> Experiment:
    settings = {f"muon[learning_rate={rate}]": {"optim.learning_rate": rate} for rate in RATES}
    grids = {"muon": {"optim.learning_rate": RATES}}
    return Experiment(Path("question.yaml"), None, [1, 2, 3], {"adamw": {}} | settings, grids, "adamw")


@pytest.fixture
def outcomes(outcome) -> dict:
    def arm(*finals):
        return {seed: outcome(seed, 4.0, 3.0, final) for seed, final in enumerate(finals, 1)}

    return {
        "adamw": arm(2.0, 2.1, 2.2),
        "muon[learning_rate=0.01]": arm(2.05, 2.02, 2.24),
        "muon[learning_rate=0.02]": arm(1.5, 1.61, 1.69),
        "muon[learning_rate=0.04]": arm(1.0, 1.0),
    }


def row(page: str, arm: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{arm}` |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_page_marks_differences_within_noise(experiment, outcomes):
    failures = {"muon[learning_rate=0.04]": {3: "it diverged"}}
    comparison = compare_experiment(experiment, "the command", outcomes, failures)
    page = to_markdown(comparison)
    assert row(page, "adamw")[:3] == ["2.1000", "0.1000", "2.0000 to 2.2000"]
    assert row(page, "adamw")[5:] == ["baseline", "30", "3.0"]
    assert row(page, "muon[learning_rate=0.02]")[3:6] == ["-0.5000 ± 0.0100", "< 0.001", "better"]
    assert row(page, "muon[learning_rate=0.02]")[6:] == ["26 (0.88x)", "2.6 (0.88x)"]
    noise = row(page, "muon[learning_rate=0.01]")
    assert noise[5] == "within noise"
    assert noise[6] == "29 (0.98x), 2 of 3 seeds"
    assert row(page, "muon[learning_rate=0.04]")[0] == "1.0000 (1 of 3 failed)"
    arms = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert arms == [f"muon[learning_rate={rate}]" for rate in ("0.04", "0.02")] + ["adamw", "muon[learning_rate=0.01]"]
    assert "This page makes 3 comparisons." in page and "here, about 0.2." in page
    # the arm that failed once cannot be the best, but its value still brackets it
    assert "best is `muon[learning_rate=0.02]`; bracketed: optim.learning_rate: yes.\n" in page
    assert "- `muon[learning_rate=0.04]` failed with seed 3: it diverged" in page
    assert "Measured on an abacus, 2 cores; torch 2, hfgolf 1; commit abc." in page
    assert "(the whole validation set); 3 seeds (1, 2, 3)" in page and "not comparable" not in page


def test_a_terminal_shows_columns_and_no_markdown(experiment, outcomes):
    failures = {"muon[learning_rate=0.04]": {3: "it diverged"}}
    command = "hfgolf compare x.yaml " + "--a.long_option 1 " * 9
    shown = to_terminal(compare_experiment(experiment, command.strip(), outcomes, failures), 110)
    assert not any(mark in shown for mark in ("|", "`", "**", "![", "# "))
    table = shown[shown.index("arm  ") :].split("\n\n")[0].splitlines()
    verdicts = ["verdict", "better", "better", "baseline", "within noise"]
    assert [line[table[0].index("verdict") :].split("  ")[0] for line in table] == verdicts
    assert f"Repeat it: {command.strip()}" in shown.splitlines() and "it diverged" in shown


def test_best_at_the_edge_of_a_grid_is_flagged(experiment, outcomes):
    page = to_markdown(compare_experiment(experiment, "", outcomes, {}))
    assert "best is `muon[learning_rate=0.04]`; bracketed: optim.learning_rate: no. If it is not" in page


def test_baseline_may_be_the_best_of_a_grid(experiment, outcomes):
    experiment = Experiment(**vars(experiment) | {"baseline": "muon"})
    comparison = compare_experiment(experiment, "", outcomes, {})
    assert comparison.baseline == "muon[learning_rate=0.04]"
    assert row(to_markdown(comparison), "adamw")[5:] == ["worse", "never", "never"]


def test_one_seed_gives_no_verdict(experiment, outcomes):
    single = {arm: {1: runs[1]} for arm, runs in outcomes.items()}
    page = to_markdown(compare_experiment(experiment, "", single, {}))
    cells = row(page, "muon[learning_rate=0.02]")
    assert cells[1:6] == ["", "1.5000 to 1.5000", "-0.5000", "", "one seed: cannot tell"]
    assert "t-test" not in page


def test_failed_arms_are_reported(experiment, outcomes):
    failures = {"adamw": {1: "no memory"}}
    page = to_markdown(compare_experiment(experiment, "", outcomes | {"adamw": {}}, failures))
    assert row(page, "adamw")[0] == "failed" and "No run of the baseline finished" in page
    nothing, all_failed = {arm: {} for arm in outcomes}, {arm: {1: f"no memory for {arm}"} for arm in outcomes}
    with pytest.raises(UserError, match="no run finished; the first failure: no memory for adamw"):
        compare_experiment(experiment, "", nothing, all_failed)


def test_a_page_says_which_seeds_differences_are_of(experiment, outcomes):
    said = to_markdown(compare_experiment(experiment, "", outcomes, {}))
    assert "Note: muon[learning_rate=0.04] and adamw share seeds 1, 2 only: their difference is of these" in said
    assert said.count("share") == 1
    others = {arm: {seed + 6 * (arm != "adamw"): run for seed, run in runs.items()} for arm, runs in outcomes.items()}
    said = to_markdown(compare_experiment(experiment, "", others, {}))
    assert said.count("and adamw share no seed, so there is no difference between them.") == 3


def test_page_lists_caveats(outcome):
    metadata = outcome(1, 2.0).metadata
    runs = {
        "one": {1: outcome(1, 2.0, is_whole=False)},
        "two": {1: outcome(1, 2.0, metadata=metadata | {"environment": {"HFGOLF_CONCURRENT_RUNS": "2"}})},
        "three": {1: outcome(1, 2.0, metadata=metadata | {"hardware": {"device": "a GPU", "cores": 9}})},
        "four": {1: outcome(1, 2.0, config={"train.cpu_threads": 1})},
        "five": {1: outcome(1, 2.0, summary={"skipped_steps": 3, "rollbacks": 1})},
    }
    page = to_markdown(compare_outcomes("five", "", runs))
    assert "**The seconds are not comparable**: runs shared the machine with other runs (`--jobs`), runs used" in page
    assert "different machines, runs used different numbers of threads." in page
    assert "run-seed1 was unstable: 3 skipped steps and 1 rollbacks" in page
    for said in ("the beginning of the validation set", "summary and report have the figure of the exported step"):
        assert said in page
    assert "Measured on an abacus, 2 cores and a GPU, 9 cores;" in page


def test_different_validation_data_is_rejected(outcome):
    runs = {"one": {1: outcome(1, 2.0)}, "two": {1: outcome(1, 2.0, evaluated_on=(4000, 5100))}}
    with pytest.raises(UserError, match=r"on 5,000 tokens of 5,100 bytes, .* on 4,000 tokens of 5,100 bytes; compare"):
        compare_outcomes("two", "", runs)


ONE = {"source": "files", "val_fraction": 0.05, "files": [["a.txt", 9, "aa"]], "val_files": []}
APART = {"val_files": [["v.txt", 5, "vv"]]}


@pytest.mark.parametrize(
    ("one", "other", "is_compared"),
    [
        pytest.param(ONE, ONE | {"files": [["b.txt", 9, "bb"]]}, False, id="other text of the same size"),
        pytest.param(ONE, ONE | {"val_fraction": 0.1}, False, id="another part of it"),
        pytest.param(ONE, ONE | APART, False, id="the end of one, a file of its own"),
        pytest.param(ONE, ONE | {"files": [["renamed.txt", 9, "aa"]]}, True, id="another name"),
        pytest.param(ONE | APART, ONE | APART | {"files": [["b.txt", 9, "bb"]]}, True, id="other training text"),
        pytest.param(ONE | {"shares": [1, 2]}, ONE | {"shares": [2, 1]}, True, id="other shares of a mixture"),
        pytest.param({"entry 0: files": ["a"]}, {"entry 0: files": ["b"]}, False, id="another text of a mixture"),
        pytest.param(ONE | {"piece_characters": 1}, ONE | {"piece_characters": 2}, True, id="another version"),
        pytest.param(ONE, None, True, id="a run of a version that did not say"),
    ],
)
def test_runs_that_validate_on_other_text_are_refused(outcome, one, other, is_compared):
    """As many tokens and bytes: of byte tokens, say, on which final_eval_tokens sets a limit."""
    runs = {
        name: {1: outcome(1, 2.0, metadata=outcome(1, 2.0).metadata | {"corpus": corpus})}
        for name, corpus in (("one", one), ("two", other))
    }
    if is_compared:
        assert compare_outcomes("two", "", runs).baseline == "one"
    else:
        with pytest.raises(UserError, match="were evaluated on different texts of the same size"):
            compare_outcomes("two", "", runs)


def test_what_each_start_of_an_arm_chose_is_told(outcome):
    """As with --minutes, which choose a width by the speed of the moment."""
    runs = {seed: outcome(seed, 2.0, config={"model.hidden_size": width}) for seed, width in ((1, 128), (2, 160))}
    page = to_markdown(compare_outcomes("one", "", {"one": runs}))
    assert "Note: the runs of one differ in model.hidden_size, which each start chose." in page
    assert "each start chose" not in to_markdown(compare_outcomes("one", "", {"one": {1: runs[1]}}))


def test_existing_runs_are_labeled_by_their_differing_settings(outcome):
    runs = {
        name: {1: outcome(1, 2.0, config={"optim.learning_rate": rate, "run.name": name, "optim.eps": 1})}
        for name, rate in (("slow", 0.01), ("fast", 0.02))
    }
    comparison = compare_outcomes("both", "", runs)
    assert comparison.settings == {"slow": {"optim.learning_rate": 0.01}, "fast": {"optim.learning_rate": 0.02}}
    assert comparison.baseline == "slow"


def test_json_contains_no_secret(outcome):
    metadata = outcome(1, 2.0).metadata | {"commit": "hf_" + "x" * 34}
    comparison = compare_outcomes("one", f"--x {metadata['commit']}", {"one": {1: outcome(1, 2.0, metadata=metadata)}})
    assert metadata["commit"] not in comparison.to_json() + to_markdown(comparison)
    assert json.loads(comparison.to_json())["arms"]["one"]["final_losses"] == {"1": 2.0}


def test_plot_shows_the_best_of_a_grid_with_its_band(experiment, outcomes, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    draw(compare_experiment(experiment, "", outcomes, {}), outcomes, tmp_path / "x.png", experiment)
    by_steps, by_seconds, grid = drawn[0].axes
    assert [line.get_label() for line in by_steps.lines] == ["adamw", "muon[learning_rate=0.04]"]
    assert list(by_steps.lines[0].get_xdata()) == [10, 20, 30]
    assert list(by_steps.lines[0].get_ydata()) == pytest.approx([4.0, 3.0, 2.1])
    band = by_steps.collections[0].get_paths()[0].vertices
    of_last = band[band[:, 0] == 30, 1]
    assert (of_last.min(), of_last.max()) == (2.0, 2.2)
    assert list(by_seconds.lines[0].get_xdata()) == [1.0, 2.0, 3.0]
    assert [list(line.get_xdata()) for line in grid.lines[:1]] == [[0.01, 0.02, 0.04]]
