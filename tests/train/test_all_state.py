"""All state of a run is in its checkpoints: a run killed and resumed at random steps holds what a straight one holds.

No list of stateful objects is kept here. Before each step, everything that the loop can reach is written down: what its
local variables hold, and what the modules of hfgolf hold, attribute by attribute. What differs from the straight run at
the same step is lost by a resume, unless EXEMPT says why it may differ.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import pkgutil
import random
import re
import sys
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import differences, same
from safetensors.torch import load_file
from test_resume import TIMINGS, Interrupted, latest, without_timings

import hfgolf
from hfgolf.golf import hooks
from hfgolf.train import loop, meter, recovery

pytestmark = pytest.mark.slow

EXEMPT = {
    r"^(result|row|step|last|evaluating|saving|logging_is_due)\b": "the loop sets it anew in each step",
    r"\._?(seconds|elapsed_seconds|since|saved_at|written_at)\b": "times",
    r"\._on_switch\.self\.": "the progress bar: this session, the last row",
    r"optimizer\.state_dict\['param_groups'\]": "the schedule sets the rates before each update",
    r"\bclock\._batches$": "how often evaluations ask for a stop",
    r"^run\.final_evaluations": "what is missing at the end is evaluated again",
    r"\.tokens\.(train|val)\._places\b": "how the file is read, worked out by the first read",
    r"\._rounding\b": "made from the grid in the state when it is needed",
    r"\._metrics\.": "the rows so far, for the report; those of the file are compared",
    r"^run\.speeds": "times",
    r"\._doctor\.": "made again from the rows so far; its findings are compared",
    r"^run\.first_step$|^run\.tokens\.is_hit$|^run\.predicted_memory_bytes$": "of this session",
    r"\btrain\.resume(_with_other)?\b": "how the session was started",
    r"^run\.decisions\.(sources|config\.(train\.compile|batch\.micro_batch_size)$)": "open, or of the run so far",
    r"^hfgolf\.run\.folder\.RunFolder\._locks": "the number of an open file",
    r"\.folder\._made\b": "the folders that this session made, which a failed start would remove",
}
"""{part of a path: why it may differ after a resume}."""
FOREIGN = ("torch", "accelerate", "transformers", "datasets", "tokenizers", "threading", "concurrent", "logging", "_")
"""Modules whose objects are not looked into. Models, optimizers and generators are, by their own state."""


Held = tuple[tuple[int, int], dict[str, str]]
"""(step, rollbacks), and what was held before the next step: {path: value}."""
PLAIN = (types.NoneType, bool, int, float, str, bytes, Path, type)


def leaves(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield (path, value) for everything plain that a value leads to."""
    if isinstance(value, PLAIN):
        yield path, repr(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        yield path, f"{value.dtype}{value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
        return
    inner: dict[str, Any] | None = None
    if isinstance(value, dict) and not type(value).__module__.startswith(FOREIGN):
        inner = {
            f"[{key!r}]" if isinstance(key, str | int | Path | type | None) else f"[#{i}]": each
            for i, (key, each) in enumerate(value.items())
        }
    elif isinstance(value, list | tuple | deque):
        inner = {f"[{i}]": each for i, each in enumerate(value)}
    elif isinstance(value, set | frozenset):
        yield path, repr(sorted(map(repr, value)))
        return
    elif isinstance(value, torch.Generator):
        inner = {".state": value.get_state()}
    elif isinstance(value, np.random.Generator):
        inner = {".state": value.bit_generator.state}
    elif isinstance(value, random.Random):
        inner = {".state": value.getstate()}
    elif isinstance(value, torch.nn.Module):
        inner = {".state_dict": dict(value.state_dict()), ".training": value.training, ".config": vars(value.config)}
    elif hasattr(value, "param_groups"):
        inner = {".state_dict": value.state_dict()}
    elif isinstance(value, functools.partial):
        inner = {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    elif isinstance(value, types.MethodType):
        inner = {".self": value.__self__}
    elif isinstance(value, types.FunctionType):
        inner = {
            f".{name}": cell.cell_contents
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        }
    elif type(value).__module__.startswith(FOREIGN) or isinstance(value, types.ModuleType | types.GeneratorType):
        return
    else:
        names = {
            *getattr(value, "__dict__", {}),
            *(n for c in type(value).__mro__ for n in getattr(c, "__slots__", ())),
        }
        names = {name for name in names if not name.startswith("__")}  # of pydantic
        inner = {f".{name}": getattr(value, name) for name in sorted(names) if hasattr(value, name)}
    for name, each in inner.items():
        yield from leaves(each, path + name, seen)


def everything(frame: types.FrameType) -> dict[str, str]:
    """Return {path: value} of all that the loop's local variables and hfgolf's modules hold, and of the generators."""
    held: dict[str, Any] = {"state": frame.f_locals["run"].state, **frame.f_locals}
    held["random"] = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
    for name, module in list(sys.modules.items()):
        if name.startswith("hfgolf"):
            own = {key: value for key, value in vars(module).items() if not key.startswith("__")}
            classes = {key: value for key, value in own.items() if isinstance(value, type) and value.__module__ == name}
            own |= {
                f"{key}.{inner}": value
                for key, each in classes.items()
                for inner, value in vars(each).items()
                if not inner.startswith("__")  # of pydantic and dataclasses: what a class is
            }
            held |= {
                f"{name}.{key}": value
                for key, value in own.items()
                if isinstance(value, dict | list | set | deque) or type(value).__module__.startswith("hfgolf")
            }
    seen: set[int] = set()
    return {path: value for name, each in held.items() for path, value in leaves(each, name, seen)}


class Counting(hfgolf.Hook):
    """Overrides every method, so that a run calls them all."""

    def start(self, run: Any) -> None: ...
    def after_step(self, run: Any, result: Any) -> None: ...
    def after_evaluate(self, run: Any, row: Any) -> None: ...
    def after_save(self, run: Any, checkpoint: Path) -> None: ...


OPTIONS = {
    "train__max_steps": 30,
    "train__save_every_steps": 2,
    "train__eval_every_steps": 4,
    "train__log_every_steps": 3,
    "train__eval_tokens": 500,
    "train__keep_last": 9,
    "train__patience_evals": 50,
    "train__rollback_on": "[nonfinite, spike, divergence]",
    "train__max_skipped_steps": 3,
    "model__dropout": 0.1,
    "batch__micro_batch_size": 4,
}
KINDS = {
    "averages, loops and segments in bf16": {
        "optim__ema_decay": 0.9,
        "optim__ema_export": "true",
        "model__overrides.loop": "[0,1,2]",
        "schedule__loop_start": 0.4,
        "optim__name": "adamw",
        "optim__learning_rate": 0.003,
        "train__mixed_precision": "bf16",
        "batch__segment_length": 8,
    },
    "rounding": {
        "golf__qat_fraction": 0.5,
        "golf__budget_bytes": 22_000,
        "golf__forecast_every_steps": 8,
        "golf__calibration_tokens": 512,
        "golf__count": "everything",
    },
}


@pytest.fixture
def trouble(monkeypatch, spoil_gradients):
    """Give later runs spikes and nonfinite gradients on certain batches, one alone and some in a row, as data may."""
    spoil_gradients(lambda step: step in (3, 9, 10, 22, 23, 24))
    real = loop.accumulate_gradients

    def accumulate_gradients(run: Any) -> Any:
        batch = run.state.next_position // run.config.batch.sequences_per_step
        loss, hashes = real(run)
        return loss * (4 if batch in (12, 15, 16, 17) else 1), hashes

    monkeypatch.setattr(loop, "accumulate_gradients", accumulate_gradients)
    monkeypatch.setattr(recovery, "LEVEL_STEPS", 10)
    monkeypatch.setattr(hooks, "GRIDS", 2)


@pytest.fixture
def trace(monkeypatch, reset_accelerate):
    """Return a function that trains, killed before the given steps, and returns the folder and what it held.

    in_a_new_process: what else a new process would not have.
    """
    from hfgolf.config.parse import load_config
    from hfgolf.run.folder import run_folder

    for module in pkgutil.walk_packages(hfgolf.__path__, "hfgolf."):  # one that is imported later holds something new
        importlib.import_module(module.name)
    real = loop.train_step

    def train(arguments: list[str], kills: list[int], in_a_new_process: Any = lambda: None) -> tuple[Path, list[Held]]:
        kills, held = [*kills], list[Held]()
        folder = run_folder(load_config(arguments).config).path
        place = str(folder.parents[1])

        def train_step(run: Any, expected_steps: float) -> Any:
            at = (run.state.step, run.state.rollbacks)
            found = everything(sys._getframe(1))
            held.append((at, {path: value.replace(place, "") for path, value in found.items()}))
            if kills and run.state.step == kills[0]:
                del kills[0]
                raise Interrupted
            return real(run, expected_steps)

        monkeypatch.setattr(loop, "train_step", train_step)
        while True:
            reset_accelerate()
            resume = ["--train.resume=auto"] if held else []
            try:
                hfgolf.train(load_config(arguments + resume), hooks=[Counting()])
                return folder, held
            except Interrupted:
                in_a_new_process()

    return train


def lost(straight: list[Held], broken: list[Held]) -> set[str]:
    """Return the paths of what differs before the same step, except for what is exempt."""
    expected, found = dict(straight), set()
    for at, held in broken:
        before = expected[at]
        found |= {path for path in before.keys() | held.keys() if before.get(path) != held.get(path)}
    return {path for path in found if not any(re.search(part, path) for part in EXEMPT)}


def told(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run, findings included, each once: a resumed run repeats some. Without what times say."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = [line for line in lines if line.get("event", "resumed") not in ("resumed", "stopped")]
    of_times = ("throughput falling", "data-bound", "costly evaluations")
    events = [event for event in events if event.get("symptom") not in of_times]
    unique = {json.dumps({key: value for key, value in event.items() if key != "elapsed_seconds"}) for event in events}
    return sorted((json.loads(event) for event in unique), key=lambda event: (event["step"], event["event"]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_at_random_steps_is_a_straight_one(tiny_run, tmp_path, trouble, trace, kind):
    seed = random.SystemRandom().randrange(10**6)
    kills = sorted(random.Random(seed).sample(range(1, 30), 3))
    options = OPTIONS | KINDS[kind]
    straight, held = trace(tiny_run(**options, run__output_dir=tmp_path / "one" / "runs"), [])
    broken, held_again = trace(tiny_run(**options, run__output_dir=tmp_path / "two" / "runs"), kills)
    assert max(rollbacks for (_, rollbacks), _ in held) == 2, "by a spike, and by nonfinite gradients"
    assert not lost(held, held_again), f"killed before the steps {kills}"
    assert told(broken) == told(straight), f"killed before the steps {kills}"
    assert {"rollback", "skipped_step"} <= {event["event"] for event in told(straight)}
    assert without_timings(broken) == without_timings(straight)
    assert differences(latest(broken), latest(straight)) == []
    assert same(*(load_file(folder / "model" / "model.safetensors") for folder in (broken, straight)))
    of_the_session = {"commit", "commits", "model", "files", "train_seconds", *TIMINGS}
    of_the_session |= {"predicted_memory_bytes", "peak_memory_bytes"}
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (broken, straight)]
    one, other = ({key: summary[key] for key in summary.keys() - of_the_session} for summary in summaries)
    assert one == other


def test_new_state_outside_of_the_checkpoint_is_found(tiny_run, tmp_path, trace, monkeypatch):
    """In an object that the loop holds, too, deep in an object of the run, and in a module."""
    real = loop.review
    latest: dict[int, float] = {}
    monkeypatch.setattr(meter, "_LATEST", latest, raising=False)

    def review(run: Any, result: Any) -> Any:
        run.clock.count = getattr(run.clock, "count", 0) + 1
        deep = run.metrics
        deep.lowest = min(getattr(deep, "lowest", math.inf), result.loss)
        latest[run.state.step] = result.loss
        return real(run, result)

    monkeypatch.setattr(loop, "review", review)
    options = {"train__max_steps": 8, "train__save_every_steps": 3, "train__eval_every_steps": 8}
    _, held = trace(tiny_run(**options, run__output_dir=tmp_path / "one" / "runs"), [])
    latest.clear()
    _, held_again = trace(tiny_run(**options, run__output_dir=tmp_path / "two" / "runs"), [5], latest.clear)
    found = {re.sub(r"\[.*", "", path) for path in lost(held, held_again)}
    assert found == {"run.clock.count", "run.metrics.lowest", "hfgolf.train.meter._LATEST"}
