"""What tests of a run in trouble share: a look into the run, gradients that go bad, fp16 without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hfgolf.train import loop, process, setup

SPOILT_PARAMETER = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def edit_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Return a function that has `edit` see every Run from here on, between its set-up and its first step."""
    real = loop.set_up

    def install(edit: Callable[[Any], None]) -> None:
        def set_up(resolved: Any) -> Any:
            run = real(resolved)
            edit(run)
            return run

        monkeypatch.setattr(loop, "set_up", set_up)

    return install


@pytest.fixture
def spoil_gradients(edit_run: Callable[[Callable[[Any], None]], None]) -> Callable[[Callable[[int], bool]], list[Any]]:
    """Return a function that makes the gradient of SPOILT_PARAMETER NaN on the batches that `is_bad` says.

    is_bad: of the step whose batch it would be without rollbacks. Returns the list that the runs will be in.
    """

    def install(is_bad: Callable[[int], bool]) -> list[Any]:
        runs: list[Any] = []

        def spoil(run: Any) -> None:
            def hook(gradient: torch.Tensor) -> torch.Tensor:
                bad = is_bad(run.state.next_positions(1)[0] // run.config.batch.sequences_per_step)
                return gradient * math.nan if bad else gradient

            run.raw_model.get_parameter(SPOILT_PARAMETER).register_hook(hook)
            runs.append(run)

        edit_run(spoil)
        return runs

    return install


@pytest.fixture
def fp16_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Return a function that puts a CPU's gradient scaler into the runs from here on: accelerate has it for GPUs only.

    It takes the scale to begin with; two steps without an overflow double it.
    """
    real = setup._build_accelerator

    def install(scale: float) -> None:
        def with_scaler(config: Any) -> Any:
            accelerator = real(config)
            accelerator.state._mixed_precision = "fp16"
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
            return accelerator

        monkeypatch.setattr(setup, "_build_accelerator", with_scaler)
        monkeypatch.setattr(process, "_device_type", lambda: "cuda")  # so that fp16 is let through
        monkeypatch.setattr(setup, "peak_flops", lambda device, precision: 1e12)

    yield install


@pytest.fixture
def validation_losses(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Return a function that has the evaluations find these losses, one after the other, and the last ever after."""

    def install(values: list[float]) -> None:
        real = setup.evaluate_loss
        left = list(values)

        def evaluate(*arguments: Any, **options: Any) -> Any:
            evaluation = real(*arguments, **options)
            loss = left.pop(0) if len(left) > 1 else left[0]
            return type(evaluation)(loss * evaluation.num_tokens, evaluation.num_tokens, evaluation.num_bytes)

        monkeypatch.setattr(setup, "evaluate_loss", evaluate)

    return install
