"""Fixtures for all tests: a small corpus, the arguments of a tiny run, and a clean Accelerate state between tests."""

from __future__ import annotations

import functools
import logging
import math
import os
import random
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may contact the Hub; those that use a loopback Hub override this
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that tests start
torch.set_num_threads(1)  # products this small are slower with more threads, and much slower on a busy machine

ROOT = Path(__file__).parents[1]
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
TORCH_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
]
SPOILED_PARAMETER = "model.layers.0.mlp.up_proj.weight"


def _reset_accelerate() -> None:
    """Accelerate keeps its state globally: a second Accelerator would reset the accumulation of the first."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    _reset_accelerate()


@pytest.fixture(autouse=True)
def same_process_state() -> Iterator[None]:
    """Restore what runs and scripts change in their process, so that no test depends on those before it."""
    environment = dict(os.environ)
    log = logging.getLogger("hfgolf")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    of_signals = {number: signal.getsignal(number) for number in SIGNALS}
    settings = [get() for get, _ in TORCH_SETTINGS]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)
    for number, handler in of_signals.items():
        signal.signal(number, handler)
    for (get, set_), value in zip(TORCH_SETTINGS, settings, strict=True):
        if get() != value:
            set_(value)


@pytest.fixture
def reset_accelerate() -> Callable[[], None]:
    """Return a function that resets Accelerate, like a new process."""
    return _reset_accelerate


@pytest.fixture
def run() -> Callable[[list[str]], Path]:
    """Return a function that trains with a command line, like a new process, and returns the run's folder."""

    return _train


def _train(arguments: list[str]) -> Path:
    import hfgolf
    from hfgolf.run.folder import run_folder

    _reset_accelerate()
    logging.getLogger("hfgolf").setLevel(logging.INFO)  # as the command does
    resolved = hfgolf.load_config(arguments)
    hfgolf.train(resolved)
    return run_folder(resolved.config).path


class Said(NamedTuple):
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str


@pytest.fixture
def run_script(
    hfgolf: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Return a function that runs a script or a benchmark, or a verb of `hfgolf`, in this process."""

    def run_(name: str, *arguments: object) -> Said:
        if not name.endswith(".py"):
            return hfgolf(name, *arguments)
        path = next(path for path in (ROOT / "scripts" / name, ROOT / "benchmarks" / name) if path.is_file())
        monkeypatch.setattr(sys, "argv", [str(path.relative_to(ROOT)), *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(path), run_name="__main__")
        return Said(int(exit_.value.code or 0), *capsys.readouterr())

    return run_


@pytest.fixture
def hfgolf(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Return a function that runs the command `hfgolf` in this process."""

    def run_(*arguments: object) -> Said:
        from hfgolf.cli import main

        monkeypatch.setattr(sys, "argv", ["hfgolf"])
        with pytest.raises(SystemExit) as exit_:
            main([*map(str, arguments)])
        return Said(int(exit_.value.code or 0), *capsys.readouterr())

    return run_


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()


@pytest.fixture(autouse=True, scope="session")
def one_measured_peak() -> None:
    """Measure this machine's FLOP/s once, not in each run."""
    from hfgolf.system import hardware

    hardware.measured_peak_flops = functools.cache(hardware.measured_peak_flops)


@pytest.fixture(autouse=True, scope="session")
def one_image_per_chart() -> None:
    """Only the first run in this process draws the PNG images of its report; the others copy them.

    They are a sixth of a tiny run. tests/report draws its own.
    """
    from hfgolf.report.charts import Drawing

    to_png = Drawing.to_png
    images: dict[str, bytes] = {}

    @functools.wraps(to_png)
    def draw_once(drawing: Drawing) -> bytes:
        if drawing.chart.name not in images:
            images[drawing.chart.name] = to_png(drawing)
        return images[drawing.chart.name]

    Drawing.to_png = draw_once


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 40 kB of text with structure to learn, one document."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    words = ["one", "two", "three", "four", "fünf", "six", "seven", "eight", "nine", "ten"]
    lines = [f"{words[i % 10]} and {words[(i * 7 + 3) % 10]} make {(i % 10) + (i * 7 + 3) % 10}." for i in range(1800)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def tiny_run(tmp_path: Path, corpus_file: Path) -> Callable[..., list[str]]:
    """Return the command line of a tiny run; keyword `section__key=value` adds or replaces an option."""
    return functools.partial(_tiny_arguments, tmp_path, corpus_file)


@pytest.fixture(scope="session")
def tiny_run_in(corpus_file: Path) -> Callable[..., list[str]]:
    """Return what tiny_run does, for fixtures that outlive a test: the first argument is a folder of their own."""
    return lambda folder, **options: _tiny_arguments(folder, corpus_file, **options)


def _tiny_arguments(folder: Path, corpus_file: Path, **options: Any) -> list[str]:
    settings = {
        "run.name": "tiny",
        "run.output_dir": folder / "runs",
        "data.source": "files",
        "data.files": corpus_file,
        "data.split": "contiguous",
        "data.val_fraction": 0.1,
        "data.cache_dir": folder / "cache",
        "tokenizer.kind": "byte",
        "model.hidden_size": 32,
        "model.num_hidden_layers": 2,
        "model.num_attention_heads": 2,
        "batch.sequence_length": 32,
        "batch.tokens_per_step": 256,
        "batch.micro_batch_size": 8,
        "optim.adamw_learning_rate": 0.01,
        "train.max_steps": 6,
        "train.mixed_precision": "no",  # fp32: losses are compared to the last digits, on any machine
        "train.cpu_threads": 1,  # sums in one order on any number of cores
        "train.log_every_steps": 1,
        "train.eval_every_steps": 3,
        "train.sample_tokens": 8,  # 64 would take longer than the steps between them
        "train.save_every_steps": 3,
    } | {key.replace("__", "."): value for key, value in options.items()}
    return [f"--{key}={value}" for key, value in settings.items()]


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Callable[..., Path]:
    """Return a function that returns the folder of a tiny run with these options, trained once per process.

    Tests only read it, and call it before they patch anything.
    """
    folder, trained = tmp_path_factory.mktemp("shared"), dict[str, Path]()

    def train_(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in trained:
            trained[key] = _train(_tiny_arguments(folder, corpus_file, run__name=f"run{len(trained)}", **options))
            _reset_accelerate()
        return trained[key]

    return train_


@pytest.fixture
def copied_run(shared_run: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies such a run to where tiny_run's options name it, for tests that change it."""
    return lambda **options: shutil.copytree(shared_run(**options), tmp_path / "runs" / "tiny", symlinks=True)


@pytest.fixture(params=["layers", "model"])
def graphs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[], tuple[int, int]]:
    """Let training compile with a fast backend; return a function for the graphs of the warm-up pass and of all.

    It compiles the layers, the loss and the norms as on a CPU, and in a second test the whole model as on a GPU.
    """
    import torch
    from torch._dynamo.utils import counters

    from hfgolf.train import compilation

    torch._dynamo.reset()
    counters.clear()
    compile_, compile_in_place, of_warm_up = torch.nn.Module.compile, compilation.compile_in_place, []

    def warm_up(*arguments: Any) -> None:
        compile_in_place(*arguments)
        of_warm_up.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_(self, backend="aot_eager", **options)
    )
    monkeypatch.setattr(compilation, "compile_in_place", warm_up)
    if request.param == "model":
        monkeypatch.setattr(compilation, "modules_to_compile", lambda model: [model])
    return lambda: (of_warm_up[0], counters["stats"]["unique_graphs"])


@pytest.fixture
def edit_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Return a function that calls `edit` with every later Run, between its setup and its first step."""
    from hfgolf.train import loop

    real = loop.set_up

    def install(edit: Callable[[Any], None]) -> None:
        def set_up(*arguments: Any) -> Any:
            run = real(*arguments)
            edit(run)
            return run

        monkeypatch.setattr(loop, "set_up", set_up)

    return install


@pytest.fixture
def spoil_gradients(edit_run: Callable[[Callable[[Any], None]], None]) -> Callable[[Callable[[int], bool]], list[Any]]:
    """Return a function that makes the gradient of SPOILED_PARAMETER NaN on the batches chosen by `is_bad`.

    is_bad: takes the step that would read the batch without rollbacks. Returns the list that collects the runs.
    """

    def install(is_bad: Callable[[int], bool]) -> list[Any]:
        runs: list[Any] = []

        def spoil(run: Any) -> None:
            def hook(gradient: Any) -> Any:
                bad = is_bad(run.state.next_position // run.config.batch.sequences_per_step)
                return gradient * math.nan if bad else gradient

            run.raw_model.get_parameter(SPOILED_PARAMETER).register_hook(hook)
            runs.append(run)

        edit_run(spoil)
        return runs

    return install


@pytest.fixture
def fp16_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives later runs a CPU gradient scaler; accelerate has one only for GPUs.

    It takes the initial scale, and the number of steps without overflow after which the scale doubles.
    """
    from hfgolf.train import decisions, setup

    real = setup.Accelerator

    def install(scale: float, growth_interval: int = 2) -> None:
        def with_scaler(**options: Any) -> Any:
            accelerator = real(**options)
            accelerator.state._mixed_precision = "fp16"
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
            return accelerator

        monkeypatch.setattr(setup, "Accelerator", with_scaler)
        monkeypatch.setattr(decisions, "choose_precision", lambda said, before: ("fp16", "command line"))
        monkeypatch.setattr(setup, "peak_flops", lambda device, precision: 1e12)

    return install


@pytest.fixture
def validation_losses(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Return a function that makes evaluations return these losses in order, and then repeat the last one."""

    def install(values: list[float]) -> None:
        from hfgolf.train import validation

        real = validation.evaluate_loss
        left = list(values)

        def evaluate(*arguments: Any, **options: Any) -> Any:
            evaluation = real(*arguments, **options)
            loss = left.pop(0) if len(left) > 1 else left[0]
            return type(evaluation)(loss * evaluation.num_tokens, evaluation.num_tokens, evaluation.num_bytes)

        monkeypatch.setattr(validation, "evaluate_loss", evaluate)

    return install
