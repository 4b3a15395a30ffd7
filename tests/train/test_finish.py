"""How a run ends: it exports what was saved, and reports what is on disk."""

from __future__ import annotations

import errno
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import before_step, events, flip_a_bit, losses, rows
from safetensors.torch import load_file
from tiny_export import exported_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfgolf.checkpoint import contents
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.load import load_exported
from hfgolf.run.folder import RunFolder
from hfgolf.system.errors import UserError
from hfgolf.train import finish, loop, validation


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(("damage", "averaged"), [(Path.unlink, False), (flip_a_bit, True)])
def test_damaged_best_weights_are_not_exported(run, tiny_run, monkeypatch, validation_losses, caplog, damage, averaged):
    """The run exports its last weights instead, and says so in the log, the summary and the card."""
    name = "ema.safetensors" if averaged else "model.safetensors"
    options = {"optim__ema_decay": 0.9, "optim__ema_export": "true"} if averaged else {}
    validation_losses([2.0] * (1 + averaged) + [2.5])  # the best is step 3
    hurt = {6: lambda run_: damage(run_.folder.checkpoints / "step-000003" / name)}
    monkeypatch.setattr(loop, "train_step", before_step(hurt))
    folder = run(tiny_run(**options))
    (line,) = [line for line in caplog.messages if "the best weights" in line]
    assert line.startswith(f"the best weights, of step 3, are damaged: {name} ")
    assert line.endswith("; using the last ones, of step 6")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["step"], summary["is_best"], summary["damaged_best_step"]) == (6, False, 3)
    exported, last = exported_weights(folder / "model"), load_file(folder / "checkpoints" / "latest" / name)
    assert last and all(torch.equal(exported[name], last[name]) for name in last)
    assert "weights of step 6. The run took 6 steps" in (folder / "model" / "README.md").read_text()
    assert "best weights by validation loss, from step 3, were damaged" in (folder / "model" / "README.md").read_text()


def test_the_model_of_a_run_needs_only_transformers_and_is_its_checkpoint(run, tiny_run, caplog):
    """Without trust_remote_code. hfgolf reads the model that was trained from it, to the last bit.

    tests/publish loads such folders in a process without hfgolf.
    """
    folder = run(tiny_run())
    exported = folder / "model"
    assert not list(exported.glob("*.py")) and "trust_remote_code" not in caplog.text
    config = json.loads((exported / "config.json").read_text())
    assert [name for name, value in config.items() if value is None] == ["pad_token_id"]  # its default is a token
    (line,) = [line for line in caplog.messages if line.startswith("exported as ")]
    assert "ApertusForCausalLM" in line and "parameters instead of" in line and "logits within" in line
    model, tokenizer = load_exported(str(folder))
    best = load_file(folder / "checkpoints" / "best" / "model.safetensors")
    assert isinstance(model, GolfForCausalLM) and all(
        torch.equal(model.state_dict()[k].cpu(), v) for k, v in best.items()
    )
    native = AutoModelForCausalLM.from_pretrained(exported)
    ids = tokenizer("one and two", return_tensors="pt").input_ids
    assert type(native).__name__ == "ApertusForCausalLM"
    assert AutoTokenizer.from_pretrained(exported)("one and two").input_ids == ids[0].tolist()
    written, expected = (one.cpu().generate(ids, max_new_tokens=8, do_sample=False) for one in (native, model))
    assert torch.equal(written, expected)


def test_a_model_without_a_native_form_is_exported_as_golf_and_says_why(run, tiny_run, caplog):
    folder = run(tiny_run(model__overrides="{logit_soft_cap: 15.0}", train__max_steps=1))
    (line,) = [line for line in caplog.messages if line.startswith("exported as ")]
    assert line.startswith(
        "exported as GolfForCausalLM, which needs trust_remote_code: no architecture of transformers"
    )
    assert (folder / "model" / "modeling_golf.py").is_file()
    assert f'from_pretrained("{folder / "model"}", trust_remote_code=True)' in caplog.text
    assert None not in json.loads((folder / "model" / "config.json").read_text()).values()


@pytest.mark.parametrize("damaged", [(4,), (2, 4)])
def test_nonfinite_weights_are_replaced_by_the_newest_finite_ones(run, tiny_run, monkeypatch, caplog, damaged):
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
        with pytest.raises(
            UserError, match=r"nonfinite values, and there is no undamaged checkpoint, so nothing was exported"
        ):
            run(arguments)
    assert "step-000004 is damaged: model.safetensors does not match its sha256" in caplog.text


@pytest.mark.parametrize(
    ("path", "damage", "reason"),
    [
        ("summary.json", cut, "summary.json is not readable"),
        ("summary.json", lambda path: path.write_text("[" * 100_000), "summary.json is not readable"),
        ("model", shutil.rmtree, "model/config.json is missing"),
        ("model/model.safetensors", flip_a_bit, "model/model.safetensors does not match its sha256"),
        ("model/tokenizer.json", empty, "model/tokenizer.json has 0 bytes instead of"),
    ],
)
def test_what_a_complete_run_has_lost_is_found(copied_run, path, damage, reason):
    folder = copied_run()
    assert RunFolder(folder).find_damage() is None
    damage(folder / path)
    assert str(RunFolder(folder).find_damage()).startswith(reason)


@pytest.mark.slow
def test_run_is_complete_only_with_valid_summary_and_model(run, tiny_run, run_script, reset_accelerate):
    """The same command rebuilds only what is damaged, from the checkpoints."""
    folder = run(tiny_run())

    def model() -> dict[str, bytes]:
        drawn = "loss.png"  # over the seconds of this time
        files = {path.name: path.read_bytes() for path in (folder / "model").iterdir() if path.name != drawn}
        card = files["README.md"]
        return files | {"README.md": re.sub(rb"( training tokens.*) in [^,]*", rb"\1", card)}  # nor how long it took

    before = model()
    summary, steps = json.loads((folder / "summary.json").read_text()), rows(folder)

    def again() -> str:
        reset_accelerate()
        said = run_script("train.py", *tiny_run())
        assert said.status == 0, said.err
        return said.out + said.err

    (folder / "model" / "README.md").write_text("as a push or its owner may edit it")
    assert "is complete" in again()
    for path, damage, reason in (
        ("summary.json", cut, "summary.json is not readable"),
        ("model/model.safetensors", flip_a_bit, "model/model.safetensors does not match its sha256"),
    ):
        damage(folder / path)
        assert f"{folder}: {reason}" in again()
        assert model() == before
        now = json.loads((folder / "summary.json").read_text())
        assert all(now[key] == summary[key] for key in ("step", "steps", "val_loss"))
        assert rows(folder) == steps

    shutil.rmtree(folder / "checkpoints")
    assert "is complete" in again()
    empty(folder / "summary.json")
    said = run_script("train.py", *tiny_run())
    assert said.status == 2 and "summary.json is not readable, and there is no checkpoint" in said.err
    assert model() == before and rows(folder) == steps


def test_complete_run_warns_if_its_text_changed(run, tiny_run, run_script, tmp_path, reset_accelerate):
    text = tmp_path / "text.txt"
    text.write_text("one line and another\n" * 500)
    arguments = tiny_run(data__files=text)
    folder = run(arguments)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def again() -> str:
        reset_accelerate()
        said = run_script("train.py", *arguments)
        assert said.status == 0 and "is complete" in said.out, said.err
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        return said.out

    assert "other text" not in again()
    text.write_text("one line and another\n" * 501)
    assert "the text has changed since it was trained (files (text.txt))\n" in again()
    text.unlink()
    assert "other text" not in again()


def test_a_run_whose_samples_fail_is_complete(run, tiny_run, run_script, monkeypatch, reset_accelerate):
    def no_text(*arguments: Any, **options: Any) -> str:
        raise RuntimeError("no text today")

    with monkeypatch.context() as patch:
        patch.setattr(validation, "generate_text", no_text)
        folder = run(tiny_run())
    assert events(folder)[-1]["event"] == "sample_failed"
    assert "A sample, generated" not in (folder / "model" / "README.md").read_text()
    before = (folder / "summary.json").read_bytes()
    assert "sample" not in json.loads(before)
    reset_accelerate()
    said = run_script("train.py", *tiny_run())
    assert said.status == 0 and "is complete" in said.out, said.err
    assert (folder / "summary.json").read_bytes() == before


def test_peak_memory_is_read_last(run, tiny_run, monkeypatch):
    """The report and the export need memory, too."""
    made = ["training"]
    real = finish.export_model
    monkeypatch.setattr(finish, "export_model", lambda *given: (real(*given), made.append("model")))
    monkeypatch.setattr(finish, "used_memory_bytes", lambda device: 10**9 * len(made))
    summary = json.loads((run(tiny_run()) / "summary.json").read_text())
    assert summary["peak_memory_bytes"] == 2 * 10**9


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its heap is what the prediction knows")
def test_memory_of_a_run_matches_the_prediction_and_top(tiny_run, tmp_path):
    """Without heap fragmentation, the prediction was 0.7 of the peak."""
    shape = {"model__hidden_size": 128, "model__num_hidden_layers": 6, "batch__sequence_length": 512}
    steps = {"batch__tokens_per_step": 4096, "batch__micro_batch_size": 8, "train__max_steps": 2}
    options = tiny_run(**shape, **steps, train__mixed_precision="bf16")
    log, seen = tmp_path / "log.txt", 0
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "scripts/train.py", *options], stdout=output)
        # not ru_maxrss of the child: it begins with what this process had when it forked
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            seen = max(seen, *(1024 * int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line), 0)
            time.sleep(0.01)
    said = log.read_text()
    assert process.returncode == 0, said
    folder = Path(next(line.split()[-1] for line in said.splitlines() if line.startswith("run folder")))
    summary = json.loads((folder / "summary.json").read_text())
    predicted, peak = summary["predicted_memory_bytes"], summary["peak_memory_bytes"]
    assert peak == pytest.approx(seen, rel=0.05)
    assert 0.75 < predicted / peak < 1.45
    assert f"memory           predicted {predicted / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB" in said


def full_disk(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("saved", "advice"),
    [
        ("all", "checkpoints hold step 6 of 6; free disk space, then run the same command with --train.resume auto."),
        ("one", "checkpoints hold step 3 of 6; free disk space, then run the same command with --train.resume auto."),
        ("none", "no checkpoint could be written either, so the weights are lost; free disk space and train again."),
    ],
)
def test_checkpoint_advice_reflects_the_disk(run, tiny_run, monkeypatch, caplog, saved, advice):
    def fill(run_: Any) -> None:
        monkeypatch.setattr(contents, "write_file", full_disk)

    actions = {} if saved == "all" else {1 if saved == "none" else 5: fill}
    monkeypatch.setattr(loop, "train_step", before_step(actions))
    monkeypatch.setattr(finish, "export_model", full_disk)
    with pytest.raises(UserError, match=r"cannot write the model to .*No space left") as error:
        run(tiny_run())
    assert str(error.value).endswith(advice)
    if saved == "all":
        monkeypatch.undo()
        folder = run(tiny_run(train__resume="auto"))
        assert (folder / "model" / "model.safetensors").is_file() and len(losses(folder)) == 6
    newest = {"all": [], "one": ["the newest is of step 3"], "none": ["no checkpoint exists"] * 2}[saved]
    assert [line.split("; ")[1] for line in caplog.messages if "not written" in line] == newest
