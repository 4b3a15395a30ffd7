"""Which precision, how many threads, which commit: every answer with its source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hfgolf.command_line import load_config
from hfgolf.errors import UserError
from hfgolf.train import environment
from hfgolf.train.compilation import should_compile

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def resolved(*arguments: str):
    return environment.resolve_precision(load_config(["--train.max_steps=1", *arguments]))


@pytest.fixture
def launched_by(monkeypatch, tmp_path):
    """Pretend that `accelerate launch` with these words started this process and exported this precision."""

    def pretend(precision: str, *words: str) -> None:
        from accelerate.commands.config import config_args

        class Parent:
            def parent(self):
                return self

            def cmdline(self):
                return ["accelerate", "launch", *words]

        monkeypatch.setattr(environment.psutil, "Process", Parent)
        monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none.yaml"))
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)

    return pretend


@pytest.mark.parametrize(
    ("precision", "words", "outcome", "source"),
    [
        ("bf16", (), "bf16", "accelerate"),
        ("no", ("--mixed_precision", "no"), "no", "accelerate"),
        ("no", ("--config_file", "x.yaml"), "no", "accelerate"),
        ("no", (), "bf16", "auto"),
    ],
)
def test_what_accelerate_was_told_wins_over_the_hardware(launched_by, monkeypatch, precision, words, outcome, source):
    monkeypatch.setattr(environment, "fast_product_dtype", lambda device: torch.bfloat16)
    launched_by(precision, *words)
    answer = resolved()
    assert answer.config.train.mixed_precision == outcome
    assert answer.sources["train.mixed_precision"] == source


def test_the_config_wins_over_accelerate(launched_by):
    launched_by("no", "--mixed_precision", "no")
    answer = resolved("--train.mixed_precision=bf16")
    assert (answer.config.train.mixed_precision, answer.sources["train.mixed_precision"]) == ("bf16", "command line")


@pytest.mark.parametrize(("fast", "outcome"), [(torch.bfloat16, "bf16"), (torch.float32, "no")])
def test_without_a_word_the_hardware_decides(monkeypatch, fast, outcome):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(environment, "fast_product_dtype", lambda device: fast)
    assert resolved().config.train.mixed_precision == outcome


def test_a_precision_from_accelerate_that_does_not_exist_here_is_one_line(launched_by):
    launched_by("fp8")
    with pytest.raises(UserError, match=r"train.mixed_precision: fp8 \(from accelerate\) does not run on this device"):
        resolved()


def test_cores_are_shared_over_processes(monkeypatch):
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    before = torch.get_num_threads()
    try:
        assert [environment.set_cpu_threads("auto", processes) for processes in (1, 2, 4, 12)] == [6, 3, 1, 1]
        assert environment.set_cpu_threads(2, 1) == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_seeds_reach_every_generator():
    import random

    import numpy as np

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    environment.seed_everything(7)
    first = draw()
    environment.seed_everything(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
    environment.seed_everything(7)
    assert draw() == first


def test_the_commit_of_an_image_is_in_the_metadata(monkeypatch):
    def no_git(*arguments, **options):
        raise FileNotFoundError

    monkeypatch.setattr(environment.subprocess, "run", no_git)
    monkeypatch.setenv("HFGOLF_COMMIT", "0123abc")
    assert environment.run_metadata(load_config(["--train.max_steps=1"]))["commit"] == "0123abc"


def test_compiling_must_pay(monkeypatch):
    monkeypatch.setattr("hfgolf.train.compilation.has_compiler", lambda device: True)
    assert should_compile("auto", CPU, 3600.0)[0]
    assert not should_compile("auto", CPU, 60.0)[0]
    assert should_compile(True, CPU, 0.0)[0]
    monkeypatch.setattr("hfgolf.train.compilation.has_compiler", lambda device: False)
    assert should_compile("auto", CPU, 3600.0) == (False, "there is no compiler for this device")


@pytest.mark.slow
def test_accelerate_launch_trains_with_what_it_was_told_and_with_all_cores(tiny_run, tmp_path):
    options = [option for option in tiny_run() if "mixed_precision" not in option and "cpu_threads" not in option]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "bf16", "scripts/train.py"]
    variables = {"HF_HOME": str(tmp_path)}
    clean = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run([*accelerate, *options], cwd=ROOT, env=clean | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    assert f"1 process, {cores} threads each" in done.stdout
    assert "precision: bf16 (accelerate)" in done.stdout
    assert "attention: sdpa, q, k and v in torch.bfloat16" in done.stdout
    config = (tmp_path / "runs" / "tiny" / "config.yaml").read_text()
    assert "  mixed_precision: bf16  # accelerate" in config.splitlines()


@pytest.mark.slow
def test_a_failing_compiler_falls_back_with_one_line(run, tiny_run, monkeypatch, caplog):
    import torch._inductor.config

    eager = run(tiny_run(run__name="eager", train__max_steps=3))
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    compiled = run(tiny_run(run__name="compiled", train__max_steps=3, train__compile="true"))
    lines = [line for line in caplog.messages if line.startswith("compile: failed, going on without")]
    assert len(lines) == 1 and "\n" not in lines[0]
    losses = [[json.loads(row)["train_loss"] for row in (f / "metrics.jsonl").open()] for f in (eager, compiled)]
    assert losses[0] == losses[1]
