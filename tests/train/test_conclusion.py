"""How a run ends: what it exports is what was saved, and what it says at last is what is on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import before_step, flip_a_bit
from safetensors.torch import load_file

from hfgolf.errors import UserError
from hfgolf.train import loop


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def same_weights(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("averaged", [False, True])
def test_damaged_best_weights_are_not_exported(run, tiny_run, monkeypatch, validation_losses, caplog, damage, averaged):
    """The run ends with its last weights instead, and says so: in the log, the summary and the card."""
    name = "ema.safetensors" if averaged else "model.safetensors"
    options = {"optim__ema_decay": 0.9, "optim__ema_export": "true"} if averaged else {}
    validation_losses([2.0] * (1 + averaged) + [2.5])  # the best is step 3
    hurt = {6: lambda run_: damage(run_.folder.checkpoints / "step-000003" / name)}
    monkeypatch.setattr(loop, "train_step", before_step(hurt))
    folder = run(tiny_run(**options))
    (line,) = [line for line in caplog.messages if "the best weights" in line]
    assert line.startswith(f"the best weights, of step 3, are damaged: {name} ")
    assert line.endswith("; taking the last ones, of step 6")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["step"], summary["is_best"], summary["damaged_best_step"]) == (6, False, 3)
    assert same_weights(folder / "model" / "model.safetensors", folder / "checkpoints" / "step-000006" / name)
    assert "those of step 6, of 6 steps" in (folder / "model" / "README.md").read_text()
    assert "best weights by validation loss, of step 3, were damaged" in (folder / "model" / "README.md").read_text()


@pytest.mark.parametrize("damaged", [(4,), (2, 4)])
def test_weights_that_are_not_finite_are_replaced_by_the_newest_whole_ones(run, tiny_run, monkeypatch, caplog, damaged):
    def spoil(run_: Any) -> None:
        run_.raw_model.get_parameter("model.layers.0.mlp.up_proj.weight").data.fill_(float("nan"))
        for step in damaged:
            flip_a_bit(run_.folder.checkpoints / f"step-{step:06d}" / "model.safetensors")

    monkeypatch.setattr(loop, "train_step", before_step({6: spoil}))
    arguments = tiny_run(train__eval_every_steps=99, train__save_every_steps=2, train__keep_last=9)
    if len(damaged) == 1:
        folder = run(arguments)
        assert json.loads((folder / "summary.json").read_text())["step"] == 2
    else:
        with pytest.raises(UserError, match=r"not finite, and there is no whole checkpoint; nothing is exported"):
            run(arguments)
    assert "step-000004 is damaged: model.safetensors does not have the sha256" in caplog.text
