"""The learning-rate finder sweeps what it reports, suggests by a rule robust to noise, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hfgolf.commands import lr_sweep
from hfgolf.commands.find_lr import sweep_rates
from hfgolf.commands.lr_sweep import (
    DIVERGED_NATS,
    LEAD_IN_STEPS,
    Sweep,
    find_lr,
    has_diverged,
    moving_averages,
    suggest,
    suggested_values,
)
from hfgolf.config.parse import load_config
from hfgolf.config.sections import OptimSection
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[2]
RATES = sweep_rates(1e-4, 10.0, 20)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that records the finder's steps: step, sample hash, loss, learning rates, kinds that changed."""
    made: list[dict[str, Any]] = []
    real = lr_sweep.train_step

    def train_step(run: Any, total_steps: float) -> Any:
        groups = {group["kind"]: group for group in run.optimizer.param_groups}
        before = {kind: [param.detach().clone() for param in group["params"]] for kind, group in groups.items()}
        result = real(run, total_steps)
        moved = {kind for kind, group in groups.items() if not all(map(torch.equal, group["params"], before[kind]))}
        row = {"step": run.state.step, "hash": result.sample_hash.item(), "loss": result.loss, "moved": moved}
        made.append(row | {kind: group["lr"] for kind, group in groups.items()})
        return result

    monkeypatch.setattr(lr_sweep, "train_step", train_step)
    return made


@pytest.mark.parametrize(
    ("options", "swept"),
    [
        ({}, {"learning_rate": {"matrix"}, "adamw_learning_rate": {"embedding", "vector"}}),
        ({"optim__name": "adamw", "fp16": True}, {"learning_rate": {"matrix", "embedding", "vector"}}),
    ],
)
def test_sweeps_start_from_the_same_state_and_change_only_their_groups(
    temporary, tiny_run, steps, fp16_on_cpu, options, swept
):
    """Same batches, same first loss; other groups keep the config's rate, embeddings their ratio; no file is left."""
    is_fp16 = options.get("fp16", False)
    if is_fp16:
        fp16_on_cpu(2.0**10)  # its scaler is part of the state, and skips steps
    options = {key: value for key, value in options.items() if key != "fp16"}
    options |= {"optim__learning_rate": 0.02, "optim__adamw_learning_rate": 0.01, "train__max_steps": 3}
    resolved = load_config(tiny_run(optim__embedding_learning_rate=0.03, model__dropout=0.1, **options))
    sweeps = find_lr(resolved, RATES)
    assert {sweep.key for sweep in sweeps} == set(swept)
    lead_in, rest = steps[:LEAD_IN_STEPS], iter(steps[LEAD_IN_STEPS:])
    assert [row["step"] for row in lead_in] == list(range(LEAD_IN_STEPS))
    peaks = {kind: getattr(resolved.config.optim, key) for key, kinds in swept.items() for kind in kinds}
    peaks["embedding"] = 0.03
    for sweep in sweeps:
        ratios = {kind: peaks[kind] / getattr(resolved.config.optim, sweep.key) for kind in swept[sweep.key]}
        at_rest = list(itertools.islice(rest, len(RATES)))
        # excludes the step after the last one, which diverged
        made = list(itertools.islice(rest, len(sweep.losses) + sweep.has_diverged))
        assert [row["step"] for row in at_rest] == list(range(LEAD_IN_STEPS, LEAD_IN_STEPS + len(RATES)))
        for part in (at_rest, made):
            same = steps[LEAD_IN_STEPS : LEAD_IN_STEPS + len(part)]
            assert [(row["step"], row["hash"]) for row in part] == [(row["step"], row["hash"]) for row in same]
            assert part[0]["loss"] == steps[LEAD_IN_STEPS]["loss"]
        for rates, part in (([0.0] * len(RATES), at_rest), (RATES, made)):
            for rate, row in zip(rates, part, strict=False):
                moved = {kind for kind in peaks if rate or kind not in ratios}
                assert row["moved"] == moved or (is_fp16 and not row["moved"])
                for kind, peak in peaks.items():
                    expected = rate * ratios[kind] if kind in ratios else peak
                    assert row[kind] == pytest.approx(expected), (sweep.key, kind)
        assert sweep.losses == [row["loss"] for row in made][: len(sweep.losses)]
        assert sweep.losses_at_rest == [row["loss"] for row in at_rest][: len(sweep.losses)]
        assert sweep.learning_rates == RATES[: len(sweep.losses)]
    assert list(rest) == []
    assert list(temporary.iterdir()) == []


def test_suggestion_preserves_the_ratios_of_own_learning_rates():
    own = {"embedding_learning_rate": 0.03, "vector_learning_rate": 0.005}
    optim = OptimSection(learning_rate=0.02, adamw_learning_rate=0.01, **own)
    losses = [5.0 - min(i, 40 - i) / 40 for i in range(41)]
    rates = sweep_rates(1e-4, 1.0, 41)
    sweeps = [Sweep(key, rates, losses, [5.0] * 41, False) for key in ("learning_rate", "adamw_learning_rate")]
    values = suggested_values(sweeps, optim)
    assert list(values) == ["optim.learning_rate", "optim.adamw_learning_rate", *(f"optim.{name}" for name in own)]
    assert values["optim.vector_learning_rate"] == pytest.approx(values["optim.adamw_learning_rate"] / 2, rel=0.05)
    assert values["optim.learning_rate"] == values["optim.adamw_learning_rate"]
    assert values["optim.embedding_learning_rate"] == pytest.approx(3 * values["optim.adamw_learning_rate"], rel=0.05)
    assert list(suggested_values(sweeps, OptimSection())) == ["optim.learning_rate", "optim.adamw_learning_rate"]
    alone = suggested_values(sweeps[:1], optim.replace(name="adamw"))
    assert alone["optim.embedding_learning_rate"] == pytest.approx(1.5 * alone["optim.learning_rate"], rel=0.05)


@pytest.mark.slow
def test_script_prints_config_options_and_writes_two_files(temporary, tiny_run, tmp_path, monkeypatch, hfgolf):
    monkeypatch.chdir(temporary)
    before = sorted(tmp_path.rglob("*"))
    arguments = tiny_run(optim__embedding_learning_rate=0.02, train__cpu_threads=1)
    status, out, error = hfgolf("find_lr", "--output", "rates.png", "--steps", 30, *arguments)
    assert status == 0, error
    assert "parameters of" not in out and "attention: " not in out, "what --verbose of hfgolf train shows"
    suggestion = out.splitlines()[-1].split()
    optim = load_config([*arguments, *suggestion]).config.optim
    results = json.loads((temporary / "rates.json").read_text())
    assert results["suggestion"] == {
        f"optim.{key}": getattr(optim, key)
        for key in ("learning_rate", "adamw_learning_rate", "embedding_learning_rate")
    }
    for sweep in results["sweeps"]:
        kept = Sweep(**{field.name: sweep[field.name] for field in dataclasses.fields(Sweep)})
        assert suggest(kept) == results["suggestion"][f"optim.{kept.key}"]
        assert 0.001 < suggest(kept) < 0.5
    assert (temporary / "rates.png").read_bytes().startswith(b"\x89PNG")
    cache = tmp_path / "cache"
    left = {path for path in tmp_path.rglob("*") if cache not in (path, *path.parents)} - set(before)
    assert left == {temporary / "rates.png", temporary / "rates.json"}


def test_a_config_that_diverges_is_one_line(temporary, tiny_run, monkeypatch, hfgolf):
    monkeypatch.chdir(temporary)
    status, _, error = hfgolf("find_lr", *tiny_run(), "--optim.adamw_learning_rate", "1e30")
    assert (status, error.count("\n")) == (2, 1) and "the loss or the gradient is not finite even at" in error
    assert list(temporary.iterdir()) == []


def test_interrupted_sweep_is_one_line_and_leaves_no_files(temporary, tiny_run, monkeypatch, hfgolf):
    number = signal.SIGTERM
    monkeypatch.chdir(temporary)
    real = lr_sweep.train_step

    def train_step(run: Any, total_steps: float) -> Any:
        assert list(temporary.glob("find_lr-*"))
        if run.state.step == LEAD_IN_STEPS + 2:
            signal.raise_signal(signal.SIGUSR1)  # there is nothing to save, and nothing ends
        if run.state.step == LEAD_IN_STEPS + 3:
            signal.raise_signal(number)
        return real(run, total_steps)

    monkeypatch.setattr(lr_sweep, "train_step", train_step)
    status, _, error = hfgolf("find_lr", *tiny_run())
    assert status == 128 + number
    assert error == f"stopped by {number.name} before the end; nothing was written\n"
    assert list(temporary.iterdir()) == []


EVEN_RATES = sweep_rates(1e-4, 1.0, 81)  # 20 a decade
BEST = 0.02


def sweep(noise: float = 0.0, progress: float = 0.0, size: float = 0.5, best: float = BEST, seed: int = 0) -> Sweep:
    """Return a sweep whose gain is a parabola over log rate, of `size` nats at `best` and 0 two decades away.

    noise: standard deviation of the batches' loss; progress: nats a step by which the other groups make it fall.
    """
    numbers = random.Random(seed)
    at_rest = [5.0 - progress * step + numbers.gauss(0, noise) for step in range(len(EVEN_RATES))]
    gains = [size * (1 - (math.log10(rate / best) / 2) ** 2) for rate in EVEN_RATES]
    losses = [rest - gain for rest, gain in zip(at_rest, gains, strict=True)]
    return Sweep("learning_rate", EVEN_RATES, losses, at_rest, has_diverged=False)


def test_rates_are_spaced_geometrically():
    assert EVEN_RATES[0] == 1e-4 and EVEN_RATES[-1] == pytest.approx(1.0)
    assert [after / before for before, after in pairwise(EVEN_RATES)] == pytest.approx([10 ** (1 / 20)] * 80)


def test_loss_far_above_its_start_counts_as_diverged():
    at_rest = [5.0] * 60
    for above, diverges in ((0.9 * DIVERGED_NATS, False), (1.1 * DIVERGED_NATS, True), (math.inf, True)):
        assert has_diverged([5.0 + above] * 50, at_rest) is diverges
    assert has_diverged([5.0] * 10 + [math.nan], at_rest)
    # a single bad batch does not count, nor does a loss that also rises at rest
    assert not has_diverged([4.5] * 20 + [6.5], at_rest)
    assert not has_diverged([5.0] * 20 + [9.0] * 20, [5.0] * 20 + [9.0] * 20)


def test_suggestion_is_the_lowest_of_equally_good_rates():
    for bump in (65, 75):  # no matter where on the plateau the largest gain is
        gains = [min(1.0, rate / BEST) for rate in EVEN_RATES]
        gains[bump] += 0.1
        losses = [5 - gain for gain in gains]
        flat = Sweep("learning_rate", EVEN_RATES, losses, [5.0] * len(EVEN_RATES), has_diverged=False)
        assert flat.gains.index(max(flat.gains)) == bump
        assert BEST < suggest(flat) < 4 * BEST < EVEN_RATES[bump] / 2


@pytest.mark.parametrize("seed", range(5))
def test_suggestion_is_robust_to_batch_noise_and_progress(seed):
    """The raw loss would mislead in both cases: its minimum is far above."""
    harder = sweep(noise=0.3, progress=0.02, seed=seed)
    smoothed = moving_averages(harder.losses)
    assert EVEN_RATES[smoothed.index(min(smoothed))] > 3 * BEST
    assert suggest(harder) == suggest(sweep())


def test_sweep_without_gain_is_rejected():
    falling = sweep(size=-0.5)
    worse = [loss + 0.01 * step for step, loss in enumerate(falling.losses_at_rest)]
    for losses in (worse, falling.losses_at_rest):
        with pytest.raises(UserError, match=r"optim.learning_rate: no learning rate .* --lowest") as error:
            suggest(dataclasses.replace(falling, losses=losses))
        assert "\n" not in str(error.value)


def test_short_sweep_is_rejected_unless_it_diverged():
    rising = sweep(best=1.0)
    rising = dataclasses.replace(rising, losses=[rest - i for i, rest in enumerate(rising.losses_at_rest)])
    with pytest.raises(UserError, match=r"the highest learning rate, 1, is the best; raise --highest"):
        suggest(rising)
    assert 0.5 < suggest(dataclasses.replace(rising, has_diverged=True)) < 1
