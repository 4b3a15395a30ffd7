"""A profile covers real training steps and changes none of them."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hfgolf.commands.profile_step import WARMUP_STEPS, profile_run
from hfgolf.commands.scratch import scratch_run
from hfgolf.commands.trace import DATA_BOUND, HEAD_HEAVY, KINDS, read_trace
from hfgolf.config.parse import load_config
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.train import build
from hfgolf.train.loop import train_step
from hfgolf.train.run import Run

STEPS = 2


@pytest.fixture
def scratch(tiny_run, reset_accelerate, tmp_path, monkeypatch) -> Iterator[Callable[..., Run]]:
    """Return a function that sets up a tiny run, ready to step, in a temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = []

    def open_run(**options: Any) -> Run:
        reset_accelerate()
        opened.append(scratch_run(load_config(tiny_run(batch__micro_batch_size=4, **options)), "test"))
        return opened[-1].__enter__()

    yield open_run
    for context in reversed(opened):
        context.__exit__(None, None, None)
    assert not list(tmp_path.glob("test-*"))


def attributes(run: Run) -> list[set[str]]:
    return [set(vars(owner)) for owner in (*run.raw_model.modules(), run.accelerator)]


def test_profile_of_a_run_is_complete(scratch, tmp_path):
    run, straight = scratch(), scratch()
    before, batches = attributes(run), run.batches
    record = profile_run(run, STEPS, tmp_path / "trace.json.gz")

    assert sum(record["shares"].values()) == pytest.approx(1)
    assert sum(record["kinds"].values()) == pytest.approx(1)
    assert min(record["kinds"].values()) > 0 and set(record["kinds"]) == set(KINDS)
    assert min(record["shares"].values()) > 0 and "other" in record["shares"]
    assert record["kinds"]["head and loss"] < HEAD_HEAVY
    assert record["mfu"] == pytest.approx(256 / record["step_seconds"] * run.meter.flops_per_second_of_peak)
    gradients = sum(parameter.nbytes for parameter in run.raw_model.parameters())
    assert record["memory"]["peak_bytes"] > gradients

    # each weight has a product forward and two backward, in 2 layers and 2 micro-batches
    work = read_trace(tmp_path / "trace.json.gz").work
    calls = Counter((w.phase, w.kind) for w in work if w.name == "aten::mm")
    assert calls["forward", "MLP"] == calls["forward", "attention"] == STEPS * 8
    assert calls["backward", "MLP"] == calls["backward", "attention"] == STEPS * 16
    # the loss in chunks goes back at once; a third product is added to the weight's gradient, by addmm
    assert calls["forward", "head and loss"] == STEPS * 2 * 2

    # they were the steps of training, and the run is left as it was
    assert run.state.step == WARMUP_STEPS + STEPS + 1 + STEPS
    for _ in range(run.state.step):
        train_step(straight, math.inf)
        straight.state.step += 1
    assert all(map(torch.equal, run.raw_model.parameters(), straight.raw_model.parameters()))
    assert attributes(run) == before and run.batches is batches


@pytest.mark.slow
def test_slow_data_iterator_is_the_bottleneck(scratch, tmp_path):
    run = scratch()

    def slowly(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            time.sleep(0.1)
            yield batch

    run.batches = slowly(run.batches)
    record = profile_run(run, STEPS, tmp_path / "trace.json.gz")
    assert record["shares"]["data"] > DATA_BOUND
    assert record["sentence"].startswith("The step waits for data")
    kinds = record["kinds"]
    assert sum(kinds.values()) == pytest.approx(1) and kinds["rest"] < 0.5  # waiting is no computing


def test_huge_vocabulary_shows_in_head_and_loss(scratch, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "GolfConfig", lambda **shape: GolfConfig(**shape | {"vocab_size": 20_000}))
    record = profile_run(scratch(), STEPS, tmp_path / "trace.json.gz")
    assert record["kinds"]["head and loss"] == max(record["kinds"].values())


def test_compiled_model_has_the_same_kinds_as_uncompiled(scratch, tmp_path):
    """Compiling itself is not tested: the model is called through the same attribute as a compiled one."""
    run = scratch()
    run.raw_model._compiled_call_impl = run.raw_model._call_impl
    record = profile_run(run, STEPS, tmp_path / "trace.json.gz")
    assert record["is_compiled"] and record["kinds_are_of"] == "uncompiled"
    assert {row["kind"] for row in record["top"]} == {None}
    assert {w.kind for w in read_trace(tmp_path / "trace.json.gz").work} == {None}
    assert record["kinds"]["MLP"] > 0 and sum(record["shares"].values()) == pytest.approx(1)
    assert record["shares"]["forward"] > 0.1
    assert run.raw_model._compiled_call_impl is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_gpu_shares_add_up(scratch, tmp_path, compiled):
    record = profile_run(scratch(train__compile=compiled), STEPS, tmp_path / "trace.json.gz")
    assert sum(record["shares"].values()) == pytest.approx(1)
    assert sum(record["kinds"].values()) == pytest.approx(1)
    assert min(record["shares"].values()) > 0 and "idle" in record["shares"]
    assert min(record["kinds"].values()) > 0
    assert record["memory"]["peak_bytes"] > 0


def test_script_writes_into_the_run_folder(tiny_run, tmp_path, monkeypatch, run_script):
    status, said, error = run_script("profile_step.py", "--steps", 2, *tiny_run())
    assert status == 0, error
    folder = tmp_path / "runs" / "tiny"
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "trace.json.gz"]
    record = json.loads((folder / "profile.json").read_text())
    assert record["sentence"] in said and record["steps"] == 2 and record["machine"]["cores"]
    assert said.count("total          100.0%") == 2
    assert read_trace(folder / "trace.json.gz").shares == pytest.approx(record["shares"])
