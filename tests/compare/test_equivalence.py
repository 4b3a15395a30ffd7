"""The test for equivalence against statsmodels; how a page says it."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from hfgolf.compare.comparison import compare_outcomes, to_markdown
from hfgolf.compare.statistics import equivalence

ROOT = Path(__file__).parents[2]
ALIKE = [0.0012, -0.0007, 0.0021, 0.0004, -0.0015]
UNCLEAR = [0.004, 0.001, 0.0065, 0.003]
APART = [0.02, 0.018, 0.023]


@pytest.mark.parametrize(
    ("differences", "margin", "p_value", "low", "high"),
    [
        (ALIKE, 0.005, 0.0009382100926757385, -0.0010733462232642124, 0.0016733462232642114),
        (ALIKE, 0.002, 0.028822974267749542, -0.0010733462232642124, 0.0016733462232642114),
        (UNCLEAR, 0.005, 0.15769758583730606, 0.0009342382356459923, 0.006315761764354006),
        (UNCLEAR, 0.002, 0.8748181654986694, 0.0009342382356459923, 0.006315761764354006),
        (APART, 0.005, 0.9955699756268575, 0.016090692646214044, 0.024575974020452616),
    ],
)
def test_p_value_and_interval_match_statsmodels(differences, margin, p_value, low, high):
    """Figures of `ttost_paired(differences, 0, -margin, margin)` (statsmodels 0.15) and `scipy.stats.t.interval`."""
    for sign in (1, -1):
        found = equivalence([sign * difference for difference in differences], margin)
        assert found is not None
        assert found.p_value == pytest.approx(p_value, rel=1e-9)
        assert sorted(abs(end) for end in found.interval) == pytest.approx(sorted(map(abs, (low, high))), rel=1e-9)
    assert found.is_shown == (p_value < 0.05)
    assert found.is_refuted == (low > margin)


@pytest.mark.parametrize(("difference", "p_value"), [(0.001, 0.0), (0.005, 1.0), (-0.006, 1.0)])
def test_differences_without_noise(difference, p_value):
    found = equivalence([difference] * 3, 0.005)
    assert found is not None and (found.p_value, found.interval) == (p_value, (difference, difference))
    assert equivalence([difference], 0.005) is equivalence([], 0.005) is None


def test_the_figures_that_an_agent_judges_by_are_in_the_json(outcome):
    runs = {"best": {1: outcome(1, 2.0), 2: outcome(2, 2.1)}, "new": {1: outcome(1, 1.0), 2: outcome(2, 1.2)}}
    figures = compare_outcomes("page", "", runs, 0.005).figures()
    text = (ROOT / "examples/autoresearch/program.md").read_text()
    named = set(re.findall(r"`arms\.new\.([a-z_.]+)`", text))
    assert len(named) >= 4 and "its `p_value`" in text and "p_value" in figures["arms"]["new"]["difference"]
    for name in named:
        assert functools.reduce(dict.__getitem__, name.split("."), figures["arms"]["new"]) is not None


def test_page_says_what_is_equivalent_in_words(outcome):
    arms = {"alike": ALIKE, "unclear": UNCLEAR, "apart": APART, "single": [0.001], "just beyond": [0.004, 0.009, 0.003]}
    arms |= {"noise": [0.9, -0.9, 0.01]}
    runs = {"baseline": {seed: outcome(seed, 2.0) for seed in range(1, 6)}}
    for arm, differences in arms.items():
        runs[arm] = {seed: outcome(seed, 2.0 + difference) for seed, difference in enumerate(differences, 1)}
    comparison = compare_outcomes("page", "", runs, 0.005)
    page = to_markdown(comparison)
    last = {line.split("`")[1]: line.split("|")[-2].strip() for line in page.splitlines() if line.startswith("| `")}
    assert last == {
        "baseline": "",
        "alike": "yes (p < 0.001)",
        "unclear": "not shown (p = 0.158)",
        "apart": "no (p = 0.996)",
        "single": "",
        "just beyond": "not shown (p = 0.563)",
        "noise": "not shown (p = 0.499)",
    }
    interval = "90 % confidence interval of the difference: -0.0011 to"
    assert f"- `alike`: equivalent within 0.005 nats (p < 0.001). {interval}" in page
    assert "- `unclear`: not shown to be equivalent (p = 0.158)." in page
    assert "- `apart`: not equivalent; it differs by more than 0.005 nats." in page
    assert "- `single`: one seed; it takes two or more." in page
    found = json.loads(comparison.to_json())
    assert found["margin"] == 0.005
    assert found["arms"]["baseline"]["equivalence"] is None
    without = to_markdown(compare_outcomes("page", "", runs))
    assert "equivalent" not in without
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1, "a row has more or fewer cells than the header"
