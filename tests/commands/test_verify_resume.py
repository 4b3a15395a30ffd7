"""verify_resume finds every difference; a real run passes, and one that forgets its random state fails."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate.utils import load
from safetensors.torch import load_file, save_file

from hfgolf.commands.evidence import diff_runs, diff_table, evidence, relative_difference, verdict
from hfgolf.commands.verify_resume import FAULTS, PATTERN, KillPlan, Session, Trainer, own_trainer, verify_resume
from hfgolf.config.parse import load_config
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_rows
from hfgolf.system.errors import UserError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LATEST = Path("checkpoints") / "latest"


def judge(straight: Path, other: Path, is_exact: bool = True) -> tuple[bool, str]:
    findings = diff_runs(evidence(RunFolder(straight)), evidence(RunFolder(other)))
    return verdict(findings, 6, is_exact)


def with_rows(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    """Return a function that changes the rows of a run."""

    def apply(folder: Path) -> None:
        path = folder / "metrics.jsonl"
        rows = read_rows(path)
        change(rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return apply


def with_column(step: int, column: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return a function that changes a value of a row, or the first of its list."""

    def in_rows(rows: list[dict[str, Any]]) -> None:
        value = rows[step - 1][column]
        rows[step - 1][column] = [change(value[0])] if isinstance(value, list) else change(value)

    return with_rows(in_rows)


def with_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Return a function that changes the largest number of the first tensor."""

    def apply(folder: Path) -> None:
        path = folder / LATEST / "model.safetensors"
        tensors = load_file(path)
        flat = tensors["model.embed_tokens.weight"].view(-1)
        at = flat.abs().argmax()
        flat[at] = change(flat[at])
        save_file(tensors, path)

    return apply


def with_pickle(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = load(folder / LATEST / name)
        change(content)
        torch.save(content, folder / LATEST / name)

    return apply


def with_state(**values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / LATEST / "train_state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def flip_a_random_byte(states: dict[str, Any]) -> None:
    states["torch_manual_seed"][100] ^= 1


def halve_a_moment(optimizer: dict[str, Any]) -> None:
    next(tensor for state in optimizer["state"].values() for tensor in state.values() if tensor.ndim == 2).mul_(0.5)


LOSS, VALIDATION, WEIGHT = "training losses", "validation losses", "weights (model.embed_tokens.weight)"
RANDOM = "random states 0 (torch_manual_seed)"
CHANGES: dict[str, tuple[Callable[[Path], None], str, bool]] = {
    # what was done: (how, the verdict's words, whether several processes and GPUs may do it)
    "a loss, by a bit": (with_column(4, "train_losses", lambda loss: math.nextafter(loss, 9)), f"4: {LOSS}", True),
    "a loss, by 1e-4": (with_column(4, "train_losses", lambda loss: loss * 1.0001), f"4: {LOSS}", False),
    "a loss that is not finite": (with_column(4, "train_losses", lambda loss: None), f"4: {LOSS}", False),
    "a sample": (with_column(2, "sample_hashes", lambda sample: "0" * 16), "2: sample ids", False),
    "a validation loss": (with_column(4, "val_loss", lambda loss: loss * 1.001), f"4: {VALIDATION}", False),
    "that of the averages": (with_column(4, "val_loss_ema", lambda loss: loss * 1.001), f"4: {VALIDATION}", False),
    "a row that is missing": (with_rows(lambda rows: rows.pop(4)), f"5: sample ids, {LOSS}", False),
    "a row that is there twice": (with_rows(lambda rows: rows.insert(4, rows[4])), "5: sample ids", False),
    "a gradient norm": (with_column(3, "grad_norms", lambda norm: norm * 1.001), "3: gradient norms", True),
    "a weight's sign": (with_weight(lambda weight: -weight), f"6: {WEIGHT}", False),
    "a weight, by a bit": (with_weight(lambda weight: weight.nextafter(torch.tensor(9.0))), f"6: {WEIGHT}", True),
    "the optimizer": (with_pickle("optimizer.bin", halve_a_moment), "6: optimizer (state.", False),
    "the averages": (lambda folder: (folder / LATEST / "ema.safetensors").unlink(), "6: averaged", False),
    "the random state": (with_pickle("random_states_0.pkl", flip_a_random_byte), f"6: {RANDOM}", False),
    "the step": (with_state(step=5), "6: train state (step)", False),
    "the blocks excluded": (with_state(excluded_blocks=[[3, 5]]), "6: train state (excluded_blocks.0.0", False),
}


def test_every_difference_is_found(shared_run, tmp_path):
    """Each single change in a copy of a run is named with its place; only rounding is tolerated."""
    straight = shared_run(optim__ema_decay=0.9, train__eval_every_steps=2)
    same = shutil.copytree(straight, tmp_path / "same", symlinks=True)
    # the clock and the session do not count
    with_state(elapsed_seconds=1e6, wandb_id="other")(same)
    with_pickle("random_states_0.pkl", lambda states: states.update(step=99))(same)
    with_column(2, "tokens_per_second", lambda speed: speed * 2)(same)
    assert judge(straight, same) == judge(straight, same, is_exact=False) == (True, "bitwise identical")
    with_column(2, "sample_hashes", lambda sample: "0" * 16)(same)
    lines = diff_table(diff_runs(evidence(RunFolder(straight)), evidence(RunFolder(same)))).splitlines()
    assert any(line.startswith("sample ids") and line.endswith("no: 1 differ, not comparable") for line in lines)
    for number, (what, (change, words, is_tolerated)) in enumerate(CHANGES.items()):
        changed = tmp_path / str(number)
        shutil.copytree(straight, changed, symlinks=True)
        change(changed)
        words = f"DIFFERENT at step {words}"
        is_equal, text = judge(straight, changed)
        assert not is_equal and text.startswith(words), f"{what}: {text}"
        is_equal, text = judge(straight, changed, is_exact=False)
        assert is_equal == is_tolerated, f"{what}: {text}"
        assert text.startswith("equal within 1e-05" if is_tolerated else words), f"{what}: {text}"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (2.0, 1.5, 0.25),
        ([4.0, 1.0], [4.0, 2.0], 0.25),
        (torch.tensor([1.0, -8.0]), torch.tensor([2.0, -8.0]), 0.125),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([1.0]), torch.tensor([math.nan]), math.inf),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), math.inf),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), math.inf),
        (torch.tensor([1]), torch.tensor([2]), math.inf),
        (1, 2, math.inf),
        ("a", "b", math.inf),
    ],
)
def test_relative_difference(a, b, expected):
    assert relative_difference(a, b) == expected


def test_launcher_of_several_processes_is_refused(tiny_run, monkeypatch):
    """Its runs would wait for processes that nobody starts."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^verify_resume starts its processes itself; .*--num_processes`\.$"):
        own_trainer(tiny_run(), load_config(tiny_run()), 6, num_processes=1)


def test_signal_stops_the_current_run_and_leaves_no_files(tiny_run, tmp_path, monkeypatch):
    number = signal.SIGINT
    temporary, started = tmp_path / "temporary", tmp_path / "started"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    script = tmp_path / "endless.py"
    script.write_text(f"import os, time\nopen({str(started)!r}, 'x').write(str(os.getpid()))\ntime.sleep(600)\n")

    def stop_when_it_runs() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop_when_it_runs, daemon=True).start()
    with pytest.raises(SystemExit) as exit_:
        verify_resume(own_trainer(tiny_run(), load_config(tiny_run()), 6, 1, [script]), KillPlan(1, 0, 1))
    assert exit_.value.code == 128 + number
    assert not psutil.pid_exists(int(started.read_text()))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_killed_run_resumes_bitwise(tiny_run, hfgolf, num_processes):
    """Real processes, kill -9 between and inside saves, dropout and averages: bitwise equal on one process."""
    arguments = tiny_run(model__dropout=0.1, optim__ema_decay=0.9, batch__micro_batch_size=4)
    kills = 2 if num_processes == 1 else 1  # the second aims at a save
    options = ["--steps", 8, "--kills", kills, "--num_processes", num_processes]
    status, said, error = hfgolf("verify_resume", *options, *arguments)
    assert status == 0, said + error
    assert "session 1: started; SIGKILL (status -9) after step" in said
    assert "resumed from step" in said
    assert num_processes > 1 or "files of a save begun" in said
    assert num_processes > 1 or "\nbitwise identical" in said
    for kind in ("sample ids", "weights", "averaged weights", "optimizer", f"random states {num_processes - 1}"):
        assert f"\n{kind}  " in said


OTHER_TRAINER = """
import json, os, random, sys, time
folder, kind = sys.argv[1:]
os.makedirs(folder, exist_ok=True)
path = os.path.join(folder, "state.bin")
random.seed(0)
step, weight = 0, 1.0
if os.path.exists(path) and kind != "starts over":
    step, weight, (version, numbers, gauss) = json.load(open(path))
    if kind == "exact":
        random.setstate((version, tuple(numbers), gauss))
while step < 40:
    step, weight = step + 1, weight * random.uniform(0.9, 1)
    print(f"step {step} begins")
    print(f"step {step}: loss {weight}")
    time.sleep(0.02)
    if step % 3 == 0:
        with open(path + ".new", "w") as file:
            json.dump([step, weight, random.getstate()], file)
        os.replace(path + ".new", path)
"""


@pytest.mark.parametrize(
    ("kind", "faults", "says"),
    [
        ("exact", list(FAULTS), "bitwise identical"),
        ("forgets its random state", ["SIGKILL"] * 3, "DIFFERENT at step"),
        ("starts over", ["SIGKILL"] * 3, "NOT RESUMED"),
    ],
)
def test_another_trainer_is_judged_by_its_log_and_its_files(tmp_path, hfgolf, kind, faults, says):
    """Each fault hits real processes; those that hang are found and killed."""
    script, folder = tmp_path / "trainer.py", tmp_path / "out"
    script.write_text(OTHER_TRAINER)
    command = shlex.join([sys.executable, str(script), str(folder), kind])
    options = ["--command", command, "--folder", folder, "--kills", len(faults), "--faults", *faults]
    if kind == "exact":  # of two lines for each step, the first has no loss
        options += ["--pattern", r"step (?P<step>\d+)(: loss (?P<loss>\S+))?"]
    as_json = kind == "starts over"
    status, said, error = hfgolf("verify_resume", *options, *(["--json"] if as_json else []))
    assert status == (says != "bitwise identical"), said + error
    if as_json:
        assert json.loads(said) == {"equal": False, "verdict": "NOT RESUMED: each session began with the first step"}
        said = error
    assert f"\n{says}" in said
    for fault in faults:
        assert fault in said
    if kind == "exact":
        assert "\nstate.bin" in said and said.count("(a hang, ended after 2 s)") == 2  # SIGSTOP and GIL
        assert [path.name for path in tmp_path.iterdir()] == ["trainer.py"]
    else:
        assert sorted(path.name for path in next(tmp_path.glob("verify_resume-*")).glob("*/")) == ["killed", "straight"]


def test_a_process_that_outlives_its_parent_is_killed_too(tmp_path):
    """Otherwise it would write to the folder of the next session: a shell ends at SIGTERM, a trainer may save first."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('step 1: loss 2'); time.sleep(600)"
    command = ["sh", "-c", f'{sys.executable} -uc "{deaf}"; true']
    trainer = Trainer(command, tmp_path / "run", tmp_path, lambda folder: {})
    with Session(trainer, command, "straight") as session:
        assert session.wait(lambda: session.last_step == 1)
        child = next(one for one in psutil.Process().children(recursive=True) if "-uc" in one.cmdline())
        session.strike("SIGTERM", 1.0)
        assert not child.is_running()


def test_a_trainer_that_cannot_resume_is_one_line(tmp_path, hfgolf):
    script, folder = tmp_path / "trainer.py", tmp_path / "out"
    script.write_text(OTHER_TRAINER)
    resume = f"{sys.executable} -c 'raise SystemExit(3)'"
    command = shlex.join([sys.executable, str(script), str(folder), "exact"])
    status, _, error = hfgolf(
        "verify_resume", "--command", command, "--resume", resume, "--folder", folder, "--kills", 2
    )
    assert status == 2 and error.startswith("error: the killed-") and error.count("\n") == 1, error
    assert "run failed with status 3; see its log" in error


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ("transformers_trainer", "bitwise identical"),
        ("accelerate_loop", "DIFFERENT at step 11: training losses"),
        ("nanogpt_loop", "DIFFERENT at step 11: training losses"),
    ],
)
def test_the_trainers_of_the_docs_resume_as_they_say(tmp_path, hfgolf, trainer, says):
    folder = tmp_path / "out"
    command = shlex.join([sys.executable, str(ROOT / "examples" / "resume" / f"{trainer}.py"), str(folder), "30"])
    options = ["--command", command, "--resume", f"{command} --resume", "--folder", folder]
    _, said, error = hfgolf("verify_resume", *options, "--kills", 1, "--faults", "SIGKILL", "--kill_seed", 9)
    assert "session 2: resumed from step 10" in said, said + error
    assert f"\n{says}" in said


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"step": 3, "loss": 4.1e-05}', ("3", "4.1e-05")),
        ("step 4/30  loss 4.1234  val loss 5.0", ("4", "4.1234")),
        ("iter 3: loss 4.5, time 3ms", ("3", "4.5")),
        ("{'loss': '10.8', 'grad_norm': 2, 'step': 7}", ("7", "10.8")),
        ('{"step": 3, "loss": NaN}', ("3", "NaN")),
        ("Step: 4 - loss: -0.25.", ("4", "-0.25")),
        ('{"step": 60, "loss": null}', None),
        ("step 12 train_loss 3", None),
    ],
)
def test_step_and_loss_are_found_in_usual_lines(line, found):
    match = re.search(PATTERN, line)
    assert (match and (match["step"], match["loss"])) == found
