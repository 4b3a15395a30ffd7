"""Profiles of hand-made traces in closed form, on a CPU and a GPU, and the conclusion drawn from them."""

from __future__ import annotations

import dataclasses
import gzip
import json
from typing import Any

import pytest

from hfgolf.commands.trace import (
    DATA_BOUND,
    KINDS,
    MAX_POINTS,
    PYTHON,
    SMALL_OPERATION_SECONDS,
    Profile,
    Work,
    profile_events,
    read_trace,
    what_bounds,
)

MAIN, OTHER_THREAD = 11, 12


def span(name: str, start: float, end: float, category: str = "cpu_op", thread: int = MAIN, **args: Any) -> dict:
    """Return an event of a trace; times are in milliseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "tid": thread,
        "ts": 1e3 * start,
        "dur": 1e3 * (end - start),
        "args": {key.replace("_", " "): value for key, value in args.items()},
    }


def scope(name: str, start: float, end: float) -> dict:
    return span(name, start, end, "user_annotation")


def node(start: float, end: float, number: int | None, thread: int = MAIN) -> dict:
    args = {} if number is None else {"Sequence_number": number, "Fwd_thread_id": 1}
    return span("autograd::engine::evaluate_function: MmBackward0", start, end, thread=thread, **args)


FORWARD = [
    scope("step", 0, 100),
    scope("data", 0, 10),
    scope("forward", 12, 40),
    scope("attention", 14, 20),
    span("aten::view", 14, 15, Sequence_number=5),
    span("aten::mm", 15, 20, Sequence_number=5),
    scope("MLP", 20, 36),
    scope("norm", 20, 22),
    span("aten::view", 22, 23, Sequence_number=6),
    span("aten::linear", 23, 36, Sequence_number=6),
    span("aten::mm", 24, 35, Sequence_number=7),
]
BACKWARD_ON_CPU = [
    scope("backward", 40, 80),
    node(41, 61, 7),
    span("aten::mm", 42, 60),
    node(61, 70, 5),
    span("aten::mm", 62, 70),
    node(70, 74, None),  # AccumulateGrad has no number
    scope("Optimizer.step#Muon.step", 82, 95),
    span("aten::bmm", 85, 95),
]


def test_cpu_phases_add_up_to_the_wall_clock():
    profile = profile_events(FORWARD + BACKWARD_ON_CPU)
    expected = {"data": 0.10, "forward": 0.28, "backward": 0.40, "optimizer": 0.20, "other": 0.02}
    assert profile.shares == pytest.approx(expected)
    assert profile.wall_seconds == pytest.approx(0.1)


def test_backward_operation_has_the_kind_of_its_module():
    kinds = profile_events(FORWARD + BACKWARD_ON_CPU).kinds
    computing = 28 + 40 + 20
    expected = {"attention": 6 + 9, "MLP": 14 + 20, "norm": 2, "optimizer": 20}
    expected["rest"] = computing - sum(expected.values())
    assert kinds == pytest.approx(dict.fromkeys(KINDS, 0.0) | {k: ms / computing for k, ms in expected.items()})


def test_autograd_node_belongs_to_the_last_operation_with_its_number():
    """The MLP called aten::view with number 6, too; then attention called an operation that has a node."""
    events = [*FORWARD, scope("attention", 36, 40), span("aten::mul", 37, 38, Sequence_number=6)]
    kinds = profile_events([*events, scope("backward", 40, 80), node(40, 80, 6)]).kinds
    assert kinds["attention"] == pytest.approx((6 + 4 + 40) / (28 + 40 + 20))


def test_recomputed_operation_has_the_kind_of_its_module():
    events = [*FORWARD, scope("backward", 40, 80), node(40, 80, 5), scope("MLP", 50, 60), span("aten::mm", 52, 58)]
    kinds = profile_events(events).kinds
    assert kinds["MLP"] == pytest.approx((14 + 10) / 88)
    assert kinds["attention"] == pytest.approx((6 + 30) / 88)


def test_operations_are_listed_without_their_callees():
    top = profile_events(FORWARD + BACKWARD_ON_CPU).top(limit=99)
    rows = {(row["operation"], row["phase"], row["kind"]): row for row in top}
    assert rows["aten::mm", "backward", "MLP"]["milliseconds_per_step"] == pytest.approx(18)
    assert rows["aten::mm", "backward", "MLP"]["share"] == pytest.approx(0.18)
    assert rows["aten::linear", "forward", "MLP"]["milliseconds_per_step"] == pytest.approx(2)
    assert rows[PYTHON, "optimizer", None]["milliseconds_per_step"] == pytest.approx(10)
    assert sum(row["share"] for row in top) == pytest.approx(1)


def test_time_between_two_steps_is_counted():
    later = [event | {"ts": event["ts"] + 110e3} for event in FORWARD + BACKWARD_ON_CPU]
    profile = profile_events([*FORWARD, *BACKWARD_ON_CPU, *later])
    assert profile.wall_seconds == pytest.approx(0.21)
    assert profile.shares["other"] == pytest.approx((2 + 10 + 2) / 210)
    assert sum(profile.shares.values()) == pytest.approx(1)
    calls = {(row["operation"], row["phase"], row["kind"]): row["calls_per_step"] for row in profile.top()}
    assert calls["aten::mm", "backward", "MLP"] == 1


def kernel(name: str, launch: float, start: float, end: float, number: int, thread: int = MAIN) -> list[dict]:
    return [
        span("cudaLaunchKernel", launch, launch + 0.1, "cuda_runtime", thread, correlation=number),
        span(name, start, end, "kernel", thread=7, correlation=number),
    ]


ON_GPU = [
    *FORWARD,
    scope("backward", 40, 50),
    node(41, 45, 7, OTHER_THREAD),  # on a GPU, another thread runs the backward pass
    *kernel("copy", 5, 8, 10, 1),  # idle until 8, waiting for data
    *kernel("sum_of_hashes", 11, 12, 13, 8),  # 5 ms idle around it
    *kernel("attention_gemm", 16, 16, 30, 2),
    *kernel("mlp_gemm", 25, 30, 50, 3),
    *kernel("mlp_gemm", 42, 50, 80, 4, OTHER_THREAD),
    *kernel("other_stream", 43, 60, 85, 5, OTHER_THREAD),  # overlaps the previous one except for its last 5 ms
    *kernel("update", 90, 90, 98, 6),
    *kernel("last", 95, 99.5, 100.5, 9),  # by the GPU's clock
    *kernel("of_a_step_before", -5, -5, 1, 7),
    scope("gpu_user_annotation", 0, 100) | {"cat": "gpu_user_annotation", "tid": 7},
]


def test_gpu_phases_are_those_that_launched_the_kernels():
    profile = profile_events(ON_GPU)
    expected = {"data": 8 + 2, "forward": 1 + 14 + 20, "backward": 30 + 5, "optimizer": 8.5, "idle": 5 + 5 + 1.5}
    assert profile.shares == pytest.approx({phase: ms / 100 for phase, ms in expected.items()})
    assert profile.is_on_gpu and profile.overhead_share == 0


def test_gpu_time_is_grouped_by_kernel_kind():
    kinds = profile_events(ON_GPU).kinds
    computing = 1 + 14 + 20 + 30 + 25 + 9
    assert kinds["MLP"] == pytest.approx((20 + 30 + 25) / computing)
    assert kinds["attention"] == pytest.approx(14 / computing)
    assert kinds["optimizer"] == pytest.approx(9 / computing)
    assert sum(kinds.values()) == pytest.approx(1)


def test_trace_without_a_step_gives_none():
    with pytest.raises(ValueError, match="no scope named step"):
        profile_events([event for event in FORWARD if event["name"] != "step"])


def test_trace_is_read_from_a_file(tmp_path):
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": FORWARD + BACKWARD_ON_CPU}, file)
    assert read_trace(tmp_path / "trace.json.gz") == profile_events(FORWARD + BACKWARD_ON_CPU)


def memory(moment: float, held: int, change: int, device: int = 0) -> dict:
    args = {"Total Allocated": held, "Bytes": change, "Device Type": device}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": MAIN, "ts": 1e3 * moment, "args": args}


def test_memory_is_measured_above_the_start_of_the_step():
    changes = [memory(-1, 900, 900), memory(15, 1100, 100), memory(45, 1600, 500), memory(90, 1000, -600)]
    on_a_gpu = memory(50, 10**9, 10**9, device=1)
    record = profile_events([*FORWARD, *BACKWARD_ON_CPU, *changes, on_a_gpu]).memory_record()
    assert record["bytes"] == [100, 600, 0]
    assert record["milliseconds"] == pytest.approx([15, 45, 90])
    assert (record["peak_bytes"], record["peak_phase"]) == (600, "backward")


def test_long_memory_curve_retains_its_peak():
    changes = [memory(i / 100, i if i != 1234 else 10**6, 0) for i in range(9999)]
    record = profile_events([*FORWARD, *BACKWARD_ON_CPU, *changes]).memory_record()
    assert len(record["bytes"]) <= MAX_POINTS
    assert max(record["bytes"]) == record["peak_bytes"] == 10**6


def made_of(work: list[Work] | None = None, **phases: float) -> Profile:
    seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0) | phases
    last = {"idle": seconds.pop("idle")} if "idle" in seconds else {"other": 0.0}
    seconds["forward"] += 1 - sum(seconds.values()) - sum(last.values())
    return Profile(1, 1.0, seconds | last, work or [Work("aten::mm", "MLP", "forward", 1.0)], [])


SMALL = [Work("aten::add", "rest", "forward", SMALL_OPERATION_SECONDS / 2)] * 10
LARGE = [Work("aten::mm", "MLP", "forward", 5 * SMALL_OPERATION_SECONDS)]
BALANCED = dict.fromkeys(KINDS, 0.0) | {"MLP": 0.6, "head and loss": 0.3, "attention": 0.1}


@pytest.mark.parametrize(
    ("profile", "head", "mfu", "begins", "tries"),
    [
        (made_of(data=0.11), 0.3, 0.9, "The step waits for data 11% of its time (above 10%)", "data.num_workers"),
        (made_of(idle=0.2), 0.3, 0.9, "The GPU waits 20% of the time (above 15%)", "batch.micro_batch_size"),
        (made_of(SMALL + LARGE), 0.3, 0.9, "Many small operations bound the step: 50%", "train.compile true"),
        (made_of(optimizer=0.2), 0.3, 0.9, "The optimizer takes 20% of the step (above 15%)", "batch.tokens_per_step"),
        (made_of(), 0.5, 0.9, "Head and loss take 50% of the computing", "tokenizer.vocab_size"),
        (made_of(), 0.3, 0.6, "Matrix products near the machine's limit bound the step (MFU 60%", "smaller model"),
        (
            made_of(),
            0.3,
            0.4,
            "No single thing bounds the step: MFU 40%, most of the computing time is MLP",
            "compile true",
        ),
        (made_of(data=DATA_BOUND - 0.01), 0.3, 0.6, "Matrix products", "smaller model"),
    ],
)
def test_advice_names_the_bottleneck_and_a_remedy(profile, head, mfu, begins, tries):
    sentence = what_bounds(profile, BALANCED | {"head and loss": head}, mfu, is_compiled=False)
    assert sentence.startswith(begins) and tries in sentence.split("try" if "try" in sentence else "only")[1]


@pytest.mark.parametrize("profile", [made_of(idle=0.2), made_of(SMALL + LARGE), made_of()])
def test_compiled_model_gets_no_advice_to_compile(profile):
    assert "train.compile" in what_bounds(profile, BALANCED, 0.1, is_compiled=False)
    assert "train.compile" not in what_bounds(profile, BALANCED, 0.1, is_compiled=True)


def test_python_time_counts_as_overhead():
    python = dataclasses.replace(LARGE[0], name=PYTHON)
    assert made_of([python, *LARGE]).overhead_share == pytest.approx(0.5)
