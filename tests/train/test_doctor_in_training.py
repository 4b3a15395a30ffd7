"""The doctor names exactly the fault injected into a real run: in the log, in metrics.jsonl and offline."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hfgolf.api import open_run
from hfgolf.config.parse import load_config
from hfgolf.data.batches import MicroBatches, block_starts
from hfgolf.doctor.finding import Finding
from hfgolf.evaluate import loss
from hfgolf.evaluate.windows import batches
from hfgolf.system import stopwatch
from hfgolf.system.command import own_command
from hfgolf.system.errors import UserError
from hfgolf.train import loop
from hfgolf.train.feed import blocks_per_epoch

pytestmark = pytest.mark.slow

AT_THE_END = {"train__eval_every_steps": 1000, "train__save_every_steps": 1000}
Install = Callable[[Callable[[Any], None]], None]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 70 kB of random words with different frequencies, harder to learn than the text of other tests."""
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlucmfwypvbgk", k=chance.randint(1, 9))) for _ in range(2000)]
    drawn = chance.choices(words, [1 / rank for rank in range(1, 2001)], k=12_000)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(drawn))
    return path


@pytest.fixture
def tiny_run(tiny_run, text):
    """Return the command line of a tiny run on that text."""
    return lambda **options: tiny_run(**{"data__files": text, "train__eval_tokens": 1000} | options)


def findings(folder: Path) -> list[Finding]:
    """Return the findings made during training, after checking that the offline doctor finds the same."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [event for event in events if event.get("event") == "finding"]
    told = [Finding(*(event[key] for key in ("symptom", "step", "saw", "causes", "fix"))) for event in found]
    offline = open_run(folder).findings
    assert [str(finding) for finding in offline] == [str(finding) for finding in told]
    return told


def the_finding(folder: Path) -> Finding:
    (finding,) = findings(folder)
    options = re.findall(r"--\S+ \S+", finding.options)
    load_config(["--train.max_steps=1", *(option.replace(" ", "=") for option in options)])  # it can be done
    return finding


def with_batches(edit_run: Install, change: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    def edit(run: Any) -> None:
        run.batches = change(run.batches)

    edit_run(edit)


def test_healthy_run_has_no_finding(run, tiny_run, caplog):
    with caplog.at_level(logging.INFO, "hfgolf"):
        folder = run(tiny_run(train__max_steps=120, train__eval_every_steps=20, train__log_every_steps=5))
    assert findings(folder) == []
    assert not [line for line in caplog.messages if line.startswith("doctor")]


def test_exploding_learning_rate(run, tiny_run, caplog):
    """The run fails before a row is due, and the finding is still reported."""
    options = {"optim__name": "adamw", "optim__learning_rate": 1e15, "optim__weight_decay": 0}
    arguments = tiny_run(train__max_steps=20, train__log_every_steps=10, **options, **AT_THE_END)
    with caplog.at_level(logging.INFO, "hfgolf"), pytest.raises(UserError, match="not finite"):
        run(arguments)
    folder = Path(load_config(arguments).config.run.output_dir) / "tiny"
    finding = the_finding(folder)
    assert (finding.symptom, finding.step) == ("immediate NaN", 2)
    assert "a learning rate that is much too high" in finding.causes[0]
    assert finding.fix == {"optim.learning_rate": 0.003, "schedule.warmup_steps": 100}
    (line,) = (line for line in caplog.messages if line.startswith("doctor"))
    assert line.startswith(f"doctor: {finding}, or find them: {own_command()} find_lr --config ") and "\n" not in line


def test_gradient_always_clipped(run, tiny_run):
    folder = run(tiny_run(train__max_steps=110, train__max_grad_norm=0.01, **AT_THE_END))
    finding = the_finding(folder)
    assert (finding.symptom, finding.step) == ("gradient constantly clipped", 99)
    assert "0.01 in 100% of the last 50 steps" in finding.saw
    assert finding.fix["train.max_grad_norm"] > 0.1


def test_one_bad_batch(run, tiny_run, edit_run):
    def spoil(batches: Iterator[Any]) -> Iterator[Any]:
        for step, batch in enumerate(batches, 1):
            yield batch | {"shift_labels": 255 - batch["shift_labels"]} if step == 60 else batch

    with_batches(edit_run, spoil)
    finding = the_finding(run(tiny_run(train__max_steps=70, **AT_THE_END)))
    assert (finding.symptom, finding.step) == ("isolated loss spike", 60)
    assert "back after 1 step; spike number 1" in finding.saw and "unusual batch" in finding.causes[0]


def test_learning_rate_too_low_to_learn(run, tiny_run):
    rates = {"optim__learning_rate": 1e-6, "optim__adamw_learning_rate": 1e-6}
    finding = the_finding(run(tiny_run(train__max_steps=105, train__log_every_steps=5, **rates, **AT_THE_END)))
    assert (finding.symptom, finding.step) == ("early plateau", 100)
    assert finding.causes[0] == "a learning rate that is too low"
    assert finding.fix == {"optim.learning_rate": 0.02, "optim.adamw_learning_rate": 0.003}


def test_restarted_data_order(run, tiny_run, edit_run):
    with_batches(edit_run, lambda batches: map(dict, itertools.cycle(list(itertools.islice(batches, 5)))))
    folder = run(tiny_run(train__max_steps=20, train__log_every_steps=5, **AT_THE_END))
    finding = the_finding(folder)
    assert (finding.symptom, finding.step) == ("same batches again", 6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps_before = [line["step"] for line in itertools.takewhile(lambda line: line.get("event") != "finding", lines)]
    assert steps_before[-1] == 10, "reported at once, not at the end"
    assert "step 6 that of 1, 7 that of 2, 8 that of 3" in finding.saw
    assert "restarts instead of continuing" in finding.causes[0]


def test_overfitted_text(run, tiny_run, tmp_path):
    noise = random.Random(0)
    text = tmp_path / "noise.txt"
    text.write_text("".join(noise.choices("abcdefghijklmnop", k=600)))
    options = {"train__max_steps": 90, "train__eval_every_steps": 10, "train__save_every_steps": 1000}
    options |= {"model__hidden_size": 64, "model__induction_heads": 0}  # with them, the gradient spikes later
    finding = the_finding(run(tiny_run(data__files=text, **options)))
    assert (finding.symptom, finding.step) == ("validation loss rising", 10)  # where it was lowest
    assert "too little text for this model" in finding.causes[0]
    assert finding.fix == {"train.patience_evals": 3, "model.dropout": 0.1, "optim.weight_decay": 0.2}


def test_wrong_weights_restored(run, tiny_run, edit_run):
    def disturb(run_: Any) -> None:
        with torch.no_grad():
            for parameter in run_.raw_model.parameters() if run_.state.step else ():
                parameter.copy_(parameter.flip(0))

    edit_run(disturb)
    options = {"schedule__name": "constant", **AT_THE_END}
    run(tiny_run(train__max_steps=60, **options))
    folder = run(tiny_run(train__max_steps=75, train__resume="latest", **options))
    finding = the_finding(folder)
    assert (finding.symptom, finding.step) == ("divergence after a restore", 60)
    assert "state that does not match the weights" in finding.causes[0] and finding.fix == {"train.resume": "best"}


def test_nan_on_the_same_block_every_time(run, tiny_run, spoil_gradients, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("it is the same block that goes wrong in each of the epochs. " * 200)
    runs: list[Any] = []

    def holds_token_550(step: int) -> bool:
        starts = block_starts(1337, 8 * step + np.arange(8), blocks_per_epoch(runs[0]), 32)
        return bool(((starts <= 550) & (starts + 32 > 550)).any())

    runs = spoil_gradients(holds_token_550)
    calm = {"optim__learning_rate": 0.003, "optim__adamw_learning_rate": 0.003}  # or gradients spike on so short a text
    options = AT_THE_END | calm | {"data__files": text, "train__max_steps": 150, "train__log_every_steps": 10}
    folder = run(tiny_run(**options))
    finding = the_finding(folder)
    bad = [step + 1 for step in range(150) if holds_token_550(step)]
    assert (finding.symptom, finding.step) == ("NaN on specific tokens", bad[0])
    assert f"({', '.join(map(str, bad[:3]))})" in finding.saw
    first, last = map(int, re.search(r"read the train tokens (\d+) to (\d+)", finding.saw).groups())
    assert first <= 550 <= last < first + 32 and "ids outside its embedding" in finding.causes[0]


def test_unshifted_targets(run, tiny_run, monkeypatch):
    real = MicroBatches.__getitem__

    def not_shifted(dataset: MicroBatches, item: int) -> Any:
        batch = real(dataset, item)
        return batch | {"shift_labels": batch["input_ids"].clone()}

    def not_shifted_either(*arguments: Any) -> Iterator[Any]:
        for inputs, _ in batches(*arguments):
            yield inputs, inputs.clone()

    monkeypatch.setattr(MicroBatches, "__getitem__", not_shifted)
    monkeypatch.setattr(loss, "batches", not_shifted_either)
    finding = the_finding(run(tiny_run(train__max_steps=80, train__eval_every_steps=20)))
    assert finding.symptom == "near-zero loss" and "on validation at step" in finding.saw
    assert "labels equal to the inputs" in finding.causes[0]


@pytest.fixture
def slow_clock(edit_run, monkeypatch) -> Callable[[Callable[[int], tuple[float, float]]], None]:
    """Return a function that fakes the stopwatch: {step: (data, compute) seconds}."""
    now = [time.perf_counter()]
    clock = SimpleNamespace(**{**vars(time), "perf_counter": lambda: now[0]})
    monkeypatch.setattr(stopwatch, "time", clock)

    def install(seconds: Callable[[int], tuple[float, float]]) -> None:
        real_step = loop.train_step

        def step(run: Any, total_steps: float) -> Any:
            now[0] += seconds(run.state.step + 1)[1]
            return real_step(run, total_steps)

        def late(run: Any) -> None:
            real_batches = run.batches

            def batches() -> Iterator[Any]:
                for batch in real_batches:
                    now[0] += seconds(run.state.step + 1)[0]
                    yield batch

            run.batches = batches()

        monkeypatch.setattr(loop, "train_step", step)
        edit_run(late)

    return install


@pytest.mark.parametrize(
    ("data", "compute", "cause"),
    [(0.01, 6.0, "other programs on this machine"), (12.0, 6.0, "a data loader that falls behind")],
)
def test_slowing_steps(run, tiny_run, slow_clock, data, compute, cause):
    slow_clock(lambda step: (0.01, 1.0) if step <= 20 else (data, compute if data < 1 else 1.0))
    folder = run(tiny_run(train__max_steps=48, train__log_every_steps=1, **AT_THE_END))
    told = [finding for finding in findings(folder) if finding.symptom != "data-bound"]
    assert [(finding.symptom, finding.step) for finding in told] == [("throughput falling", 21)]
    assert cause in told[0].causes[0]
    assert ("data.num_workers" in told[0].fix) == (data > 1)


def test_steps_waiting_for_data(run, tiny_run, slow_clock):
    slow_clock(lambda step: (0.11, 1.0))
    finding = the_finding(run(tiny_run(train__max_steps=60, train__log_every_steps=10, **AT_THE_END)))
    assert finding.symptom == "data-bound" and "11% of compute time" in finding.saw
    assert finding.fix == {"data.num_workers": 2, "data.in_memory": True}
