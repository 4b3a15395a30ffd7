"""A checkpoint loads for inference, and export.py turns it into a model, even if its run was killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import before_step, flip_a_bit
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny_export import USE, exported_weights

from hfgolf.publish.load import load_exported
from hfgolf.train import loop


class Killed(Exception):
    pass


def die(run_: Any) -> None:
    raise Killed


@pytest.fixture
def killed(run, tiny_run, monkeypatch, validation_losses):
    """Return a function that trains a run with best step 3 that is killed after step 6."""

    def make(**options: Any) -> Path:
        validation_losses([2.0, 2.5])
        arguments = tiny_run(train__max_steps=9, **options)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(loop, "train_step", before_step({7: die}))
            run(arguments)
        folder = Path(next(a for a in arguments if a.startswith("--run.output_dir=")).split("=")[1]) / "tiny"
        assert not (folder / "summary.json").exists() and not (folder / "model").exists()
        return folder

    return make


@pytest.mark.slow
def test_every_checkpoint_loads_without_hfgolf(killed, tmp_path, hfgolf, reset_accelerate):
    folder = killed()
    best = folder / "checkpoints" / "best"
    ids = torch.randint(0, 257, (2, 24))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    command = [sys.executable, "-I", "-c", USE, str(best), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"HF_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    theirs = load_file(tmp_path / "logits.safetensors")
    model, _ = load_exported(str(folder / "checkpoints" / "step-000003"))
    with torch.no_grad():
        torch.testing.assert_close(theirs["logits"], model.cpu()(ids).logits)
    saved = load_file(best / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name].cpu(), saved[name]) for name in saved)

    said = hfgolf("generate", "--model", best, "--prompt", "one and", "--max_new_tokens", 4)
    assert said.status == 0 and said.out.startswith("one and")
    reset_accelerate()
    text = tmp_path / "text.txt"
    text.write_text("one and two make three.")
    said = hfgolf("evaluate", "--model", best, "--files", text, "--json")
    assert said.status == 0 and json.loads(said.out)["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [False, True])
def test_export_from_a_killed_run_matches_the_final_export(killed, run, tiny_run, hfgolf, averaged):
    """From the best checkpoint: the same files, and a card with the figures of that step."""
    options = {"optim__ema_decay": 0.9, "optim__ema_export": "true"} if averaged else {}
    folder = killed(**options)
    said = hfgolf("export", "--run", folder)
    assert said.status == 0, said.err
    (line,) = said.out.splitlines()
    assert line.startswith(f"exported step 3 to {folder / 'model'} as Apertus")
    exported = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    card = ModelCard(exported.pop("README.md").decode())
    run(tiny_run(train__max_steps=9, **options, train__resume="auto"))
    assert json.loads((folder / "summary.json").read_text())["step"] == 3
    assert {name: (folder / "model" / name).read_bytes() for name in exported} == exported

    metrics = {m["type"]: m["value"] for m in card.data.to_dict()["model-index"][0]["results"][0]["metrics"]}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    row = next(row for row in rows if row["step"] == 3 and "val_loss" in row)
    assert metrics["loss"] == 2.0 == row["val_loss"]
    weights = "moving-average weights" if averaged else "weights"
    assert f"These are the {weights} of step 3, the best by validation loss." in str(card)
    assert "The run took 3 steps and 768 training tokens" in str(card)


def test_export_ignores_later_changes_to_the_config_file(killed, hfgolf):
    """It is empty after a power cut, from a later start with other values, or deleted."""
    folder = killed()
    for text in ("", "optim: {ema_decay: 0.9, ema_export: true}\ntrain: {max_steps: 1}", None):
        if text is None:
            (folder / "config.yaml").unlink()
        else:
            (folder / "config.yaml").write_text(text)
        said = hfgolf("export", "--run", folder)
        assert said.status == 0, said.err
        (line,) = said.out.splitlines()
        assert line.startswith(f"exported step 3 to {folder / 'model'} as Apertus")
        assert "# tiny" in (folder / "model" / "README.md").read_text()
        shutil.rmtree(folder / "model")


def test_any_checkpoint_exports_without_overwriting(killed, hfgolf, tmp_path):
    folder = killed()
    for which, step in (("latest", 6), (folder / "checkpoints" / "step-000003", 3)):
        output = tmp_path / f"model-{step}"
        said = hfgolf("export", "--run", folder, "--checkpoint", which, "--output", output)
        assert said.status == 0, said.err
        (line,) = said.out.splitlines()
        assert line.startswith(f"exported step {step} to {output} as Apertus")
        weights = exported_weights(output)
        saved = load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
        assert all(torch.equal(weights[name], saved[name]) for name in saved)
    said = hfgolf("export", "--run", folder, "--checkpoint", "latest", "--to", "native")
    started = f"exported step 6 to {folder / 'model-native'} as ApertusForCausalLM, its embedding's norm folded"
    assert said.status == 0 and said.out.startswith(started) and "logits within" in said.out, said.err
    assert said.err == "" and json.loads((folder / "model-native" / "config.json").read_text())["vocab_size"] == 257

    def refused(*arguments: object) -> str:
        said = hfgolf("export", "--run", folder, *arguments)
        assert said.status == 2 and said.err.count("\n") == 1
        return said.err

    assert "already exists; name a new folder" in refused("--output", tmp_path)
    assert "model-native already exists; name a new folder" in refused("--to", "native")
    assert "--output: cannot write to" in refused("--output", folder / "config.yaml" / "model")
    assert "there is no nothing in" in refused("--checkpoint", "nothing")
    (folder / "summary.json").write_text("{}")
    assert "is complete and its model is in" in refused()
    (folder / "summary.json").unlink()
    flip_a_bit(folder / "checkpoints" / "step-000003" / "optimizer.bin")
    assert "step-000003 rejected: optimizer.bin does not match its sha256" in refused()
    shutil.rmtree(folder / "checkpoints")
    assert "the run has no checkpoints" in refused()
    (folder / "config.yaml").unlink()
    assert "--run: there is no run in" in refused()
    said = hfgolf("export", tmp_path / "nothing")
    assert said.err.startswith(f"error: --run: there is no run in {tmp_path / 'nothing'}; ")
