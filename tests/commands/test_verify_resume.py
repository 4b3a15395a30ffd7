"""verify_resume finds every difference; a real run passes, and one that forgets its random state fails."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
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

from hfgolf.commands import verify_resume as verify_resume_module
from hfgolf.commands.evidence import diff_runs, diff_table, evidence, relative_difference, verdict
from hfgolf.commands.verify_resume import KillPlan, verify_resume
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
    return with_rows(lambda rows: rows[step - 1].update({column: change(rows[step - 1][column])}))


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


CHANGES: dict[str, tuple[Callable[[Path], None], str, bool]] = {
    # what was done: (how, the verdict's words, whether several processes and GPUs may do it)
    "a loss, by its last digit": (
        with_column(4, "train_losses", lambda losses: [math.nextafter(losses[0], 9)]),
        "at step 4: training losses",
        True,
    ),
    "a loss, by 1e-4": (
        with_column(4, "train_losses", lambda losses: [losses[0] * 1.0001]),
        "at step 4: training losses",
        False,
    ),
    "a loss that is not finite": (
        with_column(4, "train_losses", lambda losses: [None]),
        "at step 4: training losses",
        False,
    ),
    "a sample": (with_column(2, "sample_hashes", lambda hashes: ["0" * 16]), "at step 2: sample ids", False),
    "a validation loss": (with_column(4, "val_loss", lambda loss: loss * 1.001), "at step 4: validation losses", False),
    "a validation loss of the averages": (
        with_column(4, "val_loss_ema", lambda loss: loss * 1.001),
        "at step 4: validation losses",
        False,
    ),
    "a row that is missing": (with_rows(lambda rows: rows.pop(4)), "at step 5: sample ids, training losses", False),
    "a row that is there twice": (with_rows(lambda rows: rows.insert(4, rows[4])), "at step 5: sample ids", False),
    "a gradient norm": (
        with_column(3, "grad_norms", lambda norms: [norms[0] * 1.001]),
        "at step 3: gradient norms",
        True,
    ),
    "a weight's sign": (
        with_weight(lambda weight: -weight),
        "at step 6: weights (model.embed_tokens.weight)",
        False,
    ),
    "a weight's last bit": (
        with_weight(lambda weight: torch.nextafter(weight, torch.tensor(9.0))),
        "at step 6: weights (model.embed_tokens.weight)",
        True,
    ),
    "the optimizer": (with_pickle("optimizer.bin", halve_a_moment), "at step 6: optimizer (state.", False),
    "the averages": (lambda folder: (folder / LATEST / "ema.safetensors").unlink(), "at step 6: averaged", False),
    "the random state": (
        with_pickle("random_states_0.pkl", flip_a_random_byte),
        "at step 6: random states 0 (torch_manual_seed)",
        False,
    ),
    "the step": (with_state(step=5), "at step 6: train state (step)", False),
    "the blocks excluded": (with_state(excluded_blocks=[[3, 5]]), "at step 6: train state (excluded_blocks.0.0", False),
}


def test_every_difference_is_found(run, tiny_run, tmp_path):
    """Each single change in a copy of a run is named with its place; only rounding is tolerated."""
    options = {"optim__ema_decay": 0.9, "train__eval_every_steps": 2}
    straight = run(tiny_run(run__name="straight", **options))
    same = run(tiny_run(run__name="same", **options))
    # the clock and the session do not count
    with_state(elapsed_seconds=1e6, wandb_id="other")(same)
    with_pickle("random_states_0.pkl", lambda states: states.update(step=99))(same)
    with_column(2, "tokens_per_second", lambda speed: speed * 2)(same)
    assert judge(straight, same) == judge(straight, same, is_exact=False) == (True, "bitwise identical")
    for number, (what, (change, words, is_tolerated)) in enumerate(CHANGES.items()):
        changed = tmp_path / str(number)
        shutil.copytree(straight, changed, symlinks=True)
        change(changed)
        is_equal, text = judge(straight, changed)
        assert not is_equal and text.startswith(f"DIFFERENT {words}"), f"{what}: {text}"
        is_equal, text = judge(straight, changed, is_exact=False)
        assert is_equal == is_tolerated, f"{what}: {text}"
        assert text.startswith("equal within 1e-05" if is_tolerated else f"DIFFERENT {words}"), f"{what}: {text}"


def test_different_seeds_differ_from_the_first_step(run, tiny_run):
    one, other = run(tiny_run(run__name="one")), run(tiny_run(run__name="other", run__seed=3))
    for is_exact in (True, False):
        is_equal, text = judge(one, other, is_exact)
        assert not is_equal and text.startswith("DIFFERENT at step 1: sample ids, training losses")
    lines = diff_table(diff_runs(evidence(RunFolder(one)), evidence(RunFolder(other)))).splitlines()
    assert any(line.startswith("sample ids") and line.endswith("no: 6 differ, not comparable") for line in lines)


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


@pytest.mark.parametrize(("is_equal", "status"), [(True, 0), (False, 1)])
def test_exit_status_is_the_verdict(tiny_run, monkeypatch, run_script, is_equal, status):
    monkeypatch.setattr(verify_resume_module, "verify_resume", lambda *arguments: is_equal)
    assert run_script("verify_resume.py", "--steps", 5, *tiny_run()).status == status


def test_launcher_of_several_processes_is_refused(tiny_run, monkeypatch):
    """Its runs would wait for processes that nobody starts."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^verify_resume starts its processes itself; .*--num_processes`\.$"):
        verify_resume(tiny_run(), load_config(tiny_run()), KillPlan(6, 1, 0, 1))


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
        verify_resume(tiny_run(), load_config(tiny_run()), KillPlan(6, 1, 0, 1), [script])
    assert exit_.value.code == 128 + number
    assert not psutil.pid_exists(int(started.read_text()))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_killed_run_resumes_bitwise(tiny_run, run_script, num_processes):
    """Real processes, kill -9 between and inside saves, dropout and averages: bitwise equal on one process."""
    arguments = tiny_run(model__dropout=0.1, optim__ema_decay=0.9, batch__micro_batch_size=4)
    kills = 2 if num_processes == 1 else 1  # the second aims at a save
    options = ["--steps", 8, "--kills", kills, "--num_processes", num_processes]
    status, said, error = run_script("verify_resume.py", *options, *arguments)
    assert status == 0, said + error
    assert "session 1: started; kill -9 after step" in said
    assert "resumed from step" in said
    assert num_processes > 1 or "inside the save of step" in said or "aimed at a save" in said
    assert ("\nbitwise identical" if num_processes == 1 else "random states 1") in said


def test_resume_that_loses_state_is_detected(tiny_run, tmp_path, monkeypatch, caplog):
    """The same kills on a trainer that does not restore the random state: dropout reveals it."""
    script = tmp_path / "forgetful.py"
    script.write_text(
        "import sys, torch\n"
        "from hfgolf.checkpoint.contents import Checkpointer\n"
        "load = Checkpointer.load\n"
        "def forgetful(self, checkpoint):\n"
        "    load(self, checkpoint)\n"
        "    torch.manual_seed(0)\n"
        "Checkpointer.load = forgetful\n"
        f"sys.argv[0] = {str(ROOT / 'scripts' / 'train.py')!r}\n"
        "import runpy\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arguments = tiny_run(model__dropout=0.1)
    caplog.set_level("INFO", "hfgolf")
    assert not verify_resume(arguments, load_config(arguments), KillPlan(8, 1, kill_seed=1, num_processes=1), [script])
    assert "DIFFERENT at step" in caplog.text and "training losses" in caplog.text
    assert list(tmp_path.glob("verify_resume-*/killed/metrics.jsonl"))  # kept for inspection
