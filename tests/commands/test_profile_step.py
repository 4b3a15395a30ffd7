"""A profile covers real training steps and changes none of them."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from hfgolf.commands.profile_step import (
    DATA_BOUND,
    HEAD_HEAVY,
    KINDS,
    WARMUP_STEPS,
    Profile,
    profile_run,
    read_events,
    what_bounds,
)
from hfgolf.commands.scratch import scratch_run
from hfgolf.config.parse import load_config
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
    record, slowest = profile_run(run, STEPS, tmp_path / "trace.json.gz")

    assert sum(record["shares"].values()) == pytest.approx(1)
    assert sum(record["kinds"].values()) == pytest.approx(1)
    assert min(record["kinds"].values()) > 0 and set(record["kinds"]) == set(KINDS)
    assert min(record["shares"].values()) > 0 and "other" in record["shares"]
    assert record["kinds"]["head and loss"] < HEAD_HEAVY
    assert record["mfu"] == pytest.approx(256 / record["step_seconds"] * run.meter.flops_per_second_of_peak)
    assert "aten::mm" in slowest

    # they were the steps of training, and the run is left as it was
    assert run.state.step == WARMUP_STEPS + STEPS + 1 + STEPS
    for _ in range(run.state.step):
        train_step(straight, math.inf)
        straight.state.step += 1
    assert all(map(torch.equal, run.raw_model.parameters(), straight.raw_model.parameters()))
    assert attributes(run) == before and run.batches is batches


def test_compiled_model_has_the_kinds_of_uncompiled_steps(scratch, tmp_path):
    """Compiling itself is not tested: the model is called through the same attribute as a compiled one."""
    run = scratch()
    run.raw_model._compiled_call_impl = run.raw_model._call_impl
    record, _ = profile_run(run, STEPS, tmp_path / "trace.json.gz")
    assert record["is_compiled"] and record["kinds_are_of"] == "uncompiled"
    with gzip.open(tmp_path / "trace.json.gz", "rt", encoding="utf-8") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"step", "data", "forward", "backward"} <= names and "MLP" not in names
    assert record["kinds"]["MLP"] > 0 and sum(record["shares"].values()) == pytest.approx(1)
    assert record["shares"]["forward"] > 0.1
    assert run.raw_model._compiled_call_impl is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_gpu_shares_add_up(scratch, tmp_path, compiled):
    record, _ = profile_run(scratch(train__compile=compiled), STEPS, tmp_path / "trace.json.gz")
    assert sum(record["shares"].values()) == pytest.approx(1)
    assert sum(record["kinds"].values()) == pytest.approx(1)
    assert min(record["shares"].values()) > 0 and "idle" in record["shares"]
    assert min(record["kinds"].values()) > 0


def test_script_writes_into_the_run_folder(tiny_run, tmp_path, monkeypatch, hfgolf):
    status, said, error = hfgolf("profile", "--steps", 2, *tiny_run())
    assert status == 0, error
    folder = tmp_path / "runs" / "tiny"
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "trace.json.gz"]
    record = json.loads((folder / "profile.json").read_text())
    assert record["sentence"] in said and record["steps"] == 2 and record["machine"]["cores"]
    assert said.count("total          100.0%") == 2


MAIN, OTHER_THREAD, ON_GPU = 1, 2, 7


def span(name: str, start: float, end: float, *children: FunctionEvent, **options: Any) -> FunctionEvent:
    """Return an event of torch's profiler; times are in milliseconds."""
    event = FunctionEvent(1, name, options.pop("thread", MAIN), 1e3 * start, 1e3 * end, **options)
    for child in children:
        event.append_cpu_child(child)
        child.set_cpu_parent(event)
    return event


def scope(name: str, start: float, end: float, *children: FunctionEvent) -> FunctionEvent:
    return span(name, start, end, *children, is_user_annotation=True)


def node(start: float, end: float, number: int, *children: FunctionEvent, thread: int = MAIN) -> FunctionEvent:
    name = "autograd::engine::evaluate_function: MmBackward0"
    return span(name, start, end, *children, thread=thread, sequence_nr=number, fwd_thread=MAIN)


def sorted_events(*roots: FunctionEvent) -> list[FunctionEvent]:
    events, rest = [], [*roots]
    while rest:
        events.append(rest.pop())
        rest += events[-1].cpu_children
    return sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))


def forward() -> FunctionEvent:
    """The MLP called aten::view with number 5, too, but attention made that node."""
    mlp = [scope("norm", 20, 22), span("aten::view", 22, 23, sequence_nr=5)]
    product = span("aten::linear", 23, 36, span("aten::mm", 24, 35, sequence_nr=7), sequence_nr=6)
    attention = scope("attention", 36, 40, span("aten::mul", 37, 38, sequence_nr=5))
    return scope("forward", 12, 40, scope("MLP", 20, 36, *mlp, product), attention)


def test_cpu_time_belongs_to_phases_and_modules_in_the_backward_pass_too():
    recomputed = scope("norm", 50, 54, span("aten::mul", 50, 54))
    backward = scope("backward", 40, 80, node(41, 61, 7, span("aten::mm", 42, 49), recomputed), node(61, 70, 5))
    update = scope("Optimizer.step#Muon.step", 82, 95, span("aten::bmm", 85, 95))
    profile = read_events(sorted_events(scope("step", 0, 100, scope("data", 0, 10), forward(), backward, update)))
    expected = {"data": 0.10, "forward": 0.28, "backward": 0.40, "optimizer": 0.20, "other": 0.02}
    assert profile.seconds == pytest.approx(0.1) and profile.shares == pytest.approx(expected)
    computing = 28 + 40 + 20
    kinds = {"MLP": 14 + 16, "norm": 2 + 4, "attention": 4 + 9, "optimizer": 20}
    kinds["rest"] = computing - sum(kinds.values())
    assert profile.kinds == pytest.approx(dict.fromkeys(KINDS, 0.0) | {k: ms / computing for k, ms in kinds.items()})
    in_operations = 1 + 13 + 1 + (20 - 4) + 4 + 9 + 10
    assert profile.overhead_share == pytest.approx(1 - in_operations / computing)


def kernel(start: float, end: float) -> FunctionEvent:
    return span("gemm", start, end, thread=ON_GPU, device_type=DeviceType.CUDA)


def launch(name: str, at: float, milliseconds: float, **options: Any) -> FunctionEvent:
    event = span(name, at, at + 0.1, **options)
    event.append_kernel("gemm", 0, 1e3 * milliseconds)
    return event


def test_gpu_time_belongs_to_what_launched_the_kernels():
    attention = scope("attention", 14, 20, launch("aten::mm", 15, 14, sequence_nr=5))
    mlp = scope("MLP", 20, 36, launch("aten::mm", 24, 20, sequence_nr=7))
    data = scope("data", 0, 10, launch("aten::copy_", 5, 2))
    parts = [launch("aten::sum", 11, 1), scope("forward", 12, 40, attention, mlp), scope("backward", 40, 50)]
    step = scope("step", 0, 100, data, *parts, launch("aten::bmm", 90, 8))
    in_backward = launch("aten::mm", 42, 30, thread=OTHER_THREAD)
    on_gpu = [(8, 10), (12, 13), (16, 30), (30, 50), (50, 80), (60, 80), (90, 98)]  # two at once from 60 to 80
    kernels = [kernel(*times) for times in on_gpu]
    profile = read_events(sorted_events(step, node(41, 45, 7, in_backward, thread=OTHER_THREAD), *kernels))
    shares = {"data": 8 + 2, "forward": 1 + 14 + 20, "backward": 30, "optimizer": 8, "idle": 2 + 3 + 10 + 2}
    assert profile.shares == pytest.approx({phase: ms / 100 for phase, ms in shares.items()})
    kinds = {"attention": 14 / 73, "MLP": 50 / 73, "optimizer": 8 / 73, "rest": 1 / 73}
    assert profile.kinds == pytest.approx(dict.fromkeys(KINDS, 0.0) | kinds)
    assert profile.overhead_share == 0


@pytest.mark.parametrize(
    ("shares", "overhead", "head", "mfu", "begins", "tries"),
    [
        ({"data": 0.11}, 0.0, 0.3, 0.9, "The step waits for data 11% of its time (above 10%)", "data.num_workers"),
        ({"idle": 0.2}, 0.0, 0.3, 0.9, "The GPU waits 20% of the time for what", "train.compile true"),
        ({}, 0.5, 0.3, 0.9, "Many small operations bound the step: 50%", "train.compile true"),
        ({"optimizer": 0.2}, 0.0, 0.3, 0.9, "The optimizer takes 20% of the step", "batch.tokens_per_step"),
        ({}, 0.0, 0.5, 0.9, "Head and loss take 50% of the computing", "tokenizer.vocab_size"),
        ({}, 0.0, 0.3, 0.6, "Matrix products near the machine's limit bound the step: MFU 60%", "smaller model"),
        ({}, 0.0, 0.3, 0.4, "No single thing bounds the step: MFU 40%", "train.compile true"),
        ({"data": DATA_BOUND - 0.01}, 0.0, 0.3, 0.6, "Matrix products", "smaller model"),
    ],
)
def test_advice_names_the_bottleneck_and_a_remedy(shares, overhead, head, mfu, begins, tries):
    kinds = dict.fromkeys(KINDS, 0.0) | {"MLP": 0.6, "head and loss": head}
    profile = Profile(1.0, {"data": 0.0, "optimizer": 0.0} | shares, kinds, overhead)
    sentence = what_bounds(profile, kinds, mfu, is_compiled=False)
    assert sentence.startswith(begins) and tries in sentence
    assert "train.compile" not in what_bounds(profile, kinds, mfu, is_compiled=True)
