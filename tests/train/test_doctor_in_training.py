"""The doctor names exactly the fault injected into a real run: in the log, in metrics.jsonl and offline.

tests/doctor has each symptom, on synthetic logs; here are those that follow from events, hashes and restored states.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hfgolf.api import open_run
from hfgolf.config.parse import load_config
from hfgolf.data.batches import block_starts
from hfgolf.doctor.finding import Finding
from hfgolf.system.command import own_command
from hfgolf.system.errors import UserError
from hfgolf.train.feed import blocks_per_epoch

pytestmark = pytest.mark.slow

AT_THE_END = {"train__eval_every_steps": 1000, "train__save_every_steps": 1000}


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


def test_healthy_run_has_no_finding(run, tiny_run, caplog):
    folder = run(tiny_run(train__max_steps=120, train__eval_every_steps=20, train__log_every_steps=5))
    assert findings(folder) == []
    assert not [line for line in caplog.messages if line.startswith("doctor")]


def test_exploding_learning_rate(run, tiny_run, caplog):
    """The run fails before a row is due, and the finding is still reported."""
    options = {"optim__name": "adamw", "optim__learning_rate": 1e15, "optim__weight_decay": 0}
    arguments = tiny_run(train__max_steps=20, train__log_every_steps=10, **options, **AT_THE_END)
    with pytest.raises(UserError, match="not finite"):
        run(arguments)
    folder = Path(load_config(arguments).config.run.output_dir) / "tiny"
    finding = the_finding(folder)
    assert (finding.symptom, finding.step) == ("immediate NaN", 2)
    assert "a learning rate that is much too high" in finding.causes[0]
    assert finding.fix == {"optim.learning_rate": 0.003, "schedule.warmup_steps": 100}
    (line,) = (line for line in caplog.messages if line.startswith("doctor"))
    assert line.startswith(f"doctor: {finding}, or find them: {own_command()} find_lr --config ") and "\n" not in line


def test_restarted_data_order(run, tiny_run, edit_run):
    def restart(run_: Any) -> None:
        run_.batches = map(dict, itertools.cycle(list(itertools.islice(run_.batches, 5))))

    edit_run(restart)
    folder = run(tiny_run(train__max_steps=20, train__log_every_steps=5, **AT_THE_END))
    finding = the_finding(folder)
    assert (finding.symptom, finding.step) == ("same batches again", 6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps_before = [line["step"] for line in itertools.takewhile(lambda line: line.get("event") != "finding", lines)]
    assert steps_before[-1] == 10, "reported at once, not at the end"
    assert "step 6 that of 1, 7 that of 2, 8 that of 3" in finding.saw
    assert "restarts instead of continuing" in finding.causes[0]


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
