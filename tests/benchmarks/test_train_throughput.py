"""hfgolf and Trainer do the same work, and the benchmark compares them in every round."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("benchmarks.train_throughput")


class Losses:
    """A stand-in for Turns that ends after a number of steps."""

    def __init__(self, number: int) -> None:
        self.number, self.losses, self.said = number, [], {}

    def begin(self, **what: Any) -> None:
        self.said = what

    def made_step(self, loss: Any) -> None:
        self.losses.append(float(loss))

    @property
    def are_over(self) -> bool:
        return len(self.losses) == self.number


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_both_loops_train_the_same_model_on_the_same_tokens(
    throughput, tmp_path, corpus_file, monkeypatch, reset_accelerate, precision
):
    """Clipping is active, and batch order matters, so a difference in either would change the losses."""
    of_shape = throughput.hfgolf_options
    options = ["--data.source=files", f"--data.files={corpus_file}", "--data.split=contiguous"]
    options += [f"--data.cache_dir={tmp_path}"]
    monkeypatch.setattr(throughput, "hfgolf_options", lambda *of: of_shape(*of) + options)
    monkeypatch.setattr(throughput, "LEARNING_RATE", 0.03)
    shape = throughput.Shape(2, 32, 2, 32, 4, "byte", 257)
    throughput.write_tokens(shape, 6, tmp_path / "tokens.npy")
    losses = {}
    for program in ("hfgolf", "trainer"):
        reset_accelerate()
        turns = Losses(6)
        arm = throughput.Arm(program, precision, is_compiled=False)
        job = throughput.Job(arm, shape, "cpu", 1, tmp_path / "tokens.npy")
        getattr(throughput, f"train_{program}")(job, turns)
        losses[program] = turns.losses
        assert turns.said["parameters"] == 2 * (12 * 32**2 + 13 * 32) + 2 * 32 + (257 + 32) * 32  # GPT-2's
    assert losses["hfgolf"] == pytest.approx(losses["trainer"], abs=1e-5 if precision == "no" else 0.03)
    assert losses["hfgolf"][-1] < losses["hfgolf"][0] - 1  # the tolerance is small compared with this


def row(seconds: list[float], peak_bytes: int = 100, losses: tuple[float, ...] = (5.0, 4.0, 3.0)) -> dict[str, Any]:
    return {"seconds": seconds, "peak_bytes": peak_bytes, "losses": list(losses)}


def test_arms_are_compared_with_the_best_trainer_arm_in_each_round(throughput):
    """The machine is ten times slower in the last two rounds, so medians and ratios come from different rounds."""
    rows = {
        "trainer_fp32": row([4, 40, 400]),
        "trainer_bf16_compiled": row([2, 20, 30], 200),
        "hfgolf_bf16_compiled": row([1, 16, 15], 100),
        "hfgolf_muon": row([4, 10, 30], 300, (5.0, 1.0, 1.0)),
        "litgpt": {"error": "not installed"},
    }
    throughput.compare(rows, warmup_steps=2)
    assert rows["trainer_bf16_compiled"]["faster"] == rows["trainer_bf16_compiled"]["memory"] == 1
    assert rows["hfgolf_bf16_compiled"]["faster"] == 2  # of 2, 1.25 and 2
    assert rows["hfgolf_bf16_compiled"]["memory"] == 0.5
    assert rows["hfgolf_muon"]["faster"] == 1  # of 0.5, 2 and 1
    assert rows["trainer_fp32"]["faster"] == 0.5
    assert rows["litgpt"] == {"error": "not installed"}


@pytest.mark.parametrize(("off_by", "is_same"), [(1e-3, True), (0.01, False)])
def test_arm_with_different_losses_is_rejected(throughput, off_by, is_same):
    rows = {"trainer_fp32": row([1]), "hfgolf_fp32": row([1], losses=(5.0, 4.0 + off_by, 9.0))}
    if is_same:
        throughput.compare(rows, warmup_steps=2)
    else:
        with pytest.raises(ValueError, match=r"hfgolf_fp32: its losses differ by 0.0100 nats per token from"):
            throughput.compare(rows, warmup_steps=2)
