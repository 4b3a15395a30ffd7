"""A run learns from the models of other runs: the loss is what it should be, and nothing unknown may teach."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import before_step, losses, train_on_two
from tiny_golf import build_model
from torch.nn import functional as F

from hfgolf.config.parse import load_config
from hfgolf.doctor import doctor
from hfgolf.hooks import distillation
from hfgolf.hooks.distillation import SHARE, Distillation, DistillationLoss
from hfgolf.model.layers_golf import cap_logits
from hfgolf.run.folder import RunFolder
from hfgolf.system.errors import UserError
from hfgolf.train import loop


def as_option(folders: list[Path]) -> str:
    return f"[{', '.join(map(str, folders))}]"


LEARNED = {"model__position_embedding": "learned"}
RUNS = ({"run__seed": 1}, {"run__seed": 2})


@pytest.fixture
def teachers(shared_run) -> list[Path]:
    return [shared_run(**options) for options in RUNS]


def test_loss_and_gradients_are_those_of_the_definition_and_each_chunk_is_computed_once(monkeypatch):
    student, *others = (build_model(logit_soft_cap=cap, hidden_size=width) for cap, width in ((8.0, 32), (None, 64)))
    others += [build_model(logit_soft_cap=5.0, hidden_size=32)]
    for seed, model in enumerate((student, *others)):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(student.config.vocab_size, (3, 16))
    targets = torch.randint(student.config.vocab_size, (3, 16))
    targets[0, :5] = -100
    student.train()
    logits = student(ids).logits.log_softmax(-1)
    with torch.no_grad():
        mean = sum(model.eval()(ids).logits.softmax(-1) for model in others) / 2
    counted = targets != -100
    hard = F.cross_entropy(logits[counted], targets[counted])
    soft = -(mean * logits).sum(-1)[counted].mean()
    expected = (1 - SHARE) * hard + SHARE * soft
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()
    student.cross_entropy = DistillationLoss(student, others)
    student.chunk_elements = 28 * student.config.vocab_size  # 48 rows in 7 chunks
    with monkeypatch.context() as patch:
        computed: list[Any] = []
        patch.setattr(distillation, "cap_logits", lambda *given: computed.append(given) or cap_logits(*given))
        loss = student.train()(ids, shift_labels=targets).loss
        loss.backward()
    assert len(computed) == 7 * 3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for model in others for parameter in model.parameters())
    assert not any("teacher" in name for name in student.state_dict())
    evaluated = student.eval()(ids, shift_labels=targets).loss
    assert evaluated.item() == pytest.approx(hard.item(), rel=1e-5)  # an evaluation is of the text alone


def test_many_chunks_lose_no_precision_in_bf16():
    student, teacher = (build_model(tie_word_embeddings=False) for _ in range(2))
    ids, targets = torch.randint(student.config.vocab_size, (2, 64, 16), generator=torch.Generator().manual_seed(0))
    student.cross_entropy = DistillationLoss(student, [teacher])
    student.train()
    gradients = []
    for rows in (1, 1024):
        student.zero_grad()
        student.chunk_elements = 4 * rows * student.config.vocab_size
        with torch.autocast("cpu", torch.bfloat16):
            student(ids, shift_labels=targets).loss.backward()
        gradients.append(student.lm_head.weight.grad.clone())
    assert (gradients[0] - gradients[1]).norm() < 0.005 * gradients[1].norm()


def test_the_command_repeats_the_first_run_and_resumes_to_the_bit(hfgolf, teachers, tmp_path, monkeypatch):
    resumable = [f"--run.output_dir={tmp_path}", "--train.resume=auto", "--train.save_every_steps=2"]
    command = ["train", "--distill_from", *teachers, *resumable]
    said = hfgolf(*command, "--run.name=whole")
    assert said.status == 0 and "50% of the loss is what they say" in said.out
    whole = RunFolder(tmp_path / "whole")
    summary, before = (json.loads((folder / "summary.json").read_text()) for folder in (whole.path, teachers[0]))
    assert summary["steps"] == before["steps"] and summary["parameters"] == before["parameters"]
    assert losses(whole.path) != losses(teachers[0])
    assert "from scratch, with 2 models of the same text as teachers, on " in (whole.model / "README.md").read_text()
    config = load_config([f"--config={whole.config}"]).config
    assert config.train.distill_from == [*map(str, teachers)] and config.run.seed == 3
    stop = before_step({3: lambda run: signal.raise_signal(signal.SIGTERM)})
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop)
        assert hfgolf(*command, "--run.name=stopped").status == 128 + signal.SIGTERM
    assert hfgolf(*command, "--run.name=stopped").status == 0
    assert losses(tmp_path / "stopped") == losses(whole.path)


def test_the_limits_of_the_first_run_are_replaced_by_its_steps_and_nothing_else(run, tiny_run):
    kept = {"train__max_skipped_steps": 7, "train__max_rollbacks": 2, "hub__private": "true"}
    folder = run(tiny_run(train__max_minutes=5, **kept))
    config = load_config(["--distill_from", str(folder)]).config
    assert (config.train.max_steps, config.train.max_minutes) == (6, None)
    assert (config.train.max_skipped_steps, config.train.max_rollbacks, config.hub.private) == (7, 2, False)


def test_a_run_that_read_its_text_often_says_that_it_can_teach(hfgolf, teachers, monkeypatch):
    command = ["train", f"--config={teachers[0] / 'config.yaml'}"]
    assert "better" not in hfgolf(*command).out
    monkeypatch.setattr(doctor, "OFTEN", 0.01)
    said = hfgolf(*command)
    assert said.status == 0 and f" train --distill_from {teachers[0]}\n" in said.out


def test_a_resume_needs_the_models_that_the_run_began_with(hfgolf, teachers, tmp_path, monkeypatch):
    teacher, other = (Path(shutil.copytree(path, tmp_path / path.name, symlinks=True)) for path in teachers)
    resumable = [f"--run.output_dir={tmp_path}", "--train.resume=auto", "--run.name=student"]
    command = ["train", "--distill_from", teacher, *resumable]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", before_step({3: lambda run: signal.raise_signal(signal.SIGTERM)}))
        assert hfgolf(*command).status == 128 + signal.SIGTERM
    shutil.rmtree(teacher / "model")
    shutil.copytree(other / "model", teacher / "model", symlinks=True)
    said = hfgolf(*command)
    assert said.status == 2 and "the run began with other weights" in said.err
    said = hfgolf(*command[:2], other, *command[3:])
    assert said.status == 2 and "--distill_from" in said.err and "restore these keys" in said.err


def change_corpus(folder: Path) -> None:
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["corpus"]["val_fraction"] = 0.3
    (folder / "metadata.json").write_text(json.dumps(metadata))


def test_who_cannot_teach_is_refused(hfgolf, run, tiny_run, shared_run, tmp_path):
    unknown = hfgolf("train", "--distill_from", tmp_path / "nothing")
    assert unknown.status == 2 and "nothing is not a complete run; name folders such as runs/small." in unknown.err
    teacher = shutil.copytree(shared_run(**RUNS[0]), tmp_path / "teacher", symlinks=True)
    change_corpus(teacher)
    refused = (
        ({}, teacher, "was trained on other text"),
        ({"tokenizer__kind": "char"}, shared_run(**RUNS[0]), "has another tokenizer"),
        ({"model__architecture": "gpt2"}, shared_run(**RUNS[0]), "only a golf model learns from others"),
        ({"model__vocab_size": 300}, shared_run(**RUNS[0]), "257 rows in its embedding, and this run 300"),
        (
            {"batch__sequence_length": 64, "batch__tokens_per_step": 512},
            shared_run(**LEARNED),
            "positions for 32 tokens, but batch.sequence_length",
        ),
    )
    for number, (options, folder, message) in enumerate(refused):
        with pytest.raises(UserError, match=message):
            run(tiny_run(**options, run__name=f"student{number}", train__distill_from=folder))
    with pytest.raises(UserError, match="is not a complete run"):
        Distillation([str(tmp_path / "nothing")])


def test_teachers_do_not_break_a_compiled_run(run, tiny_run, teachers, graphs):
    options: dict[str, Any] = {"train__distill_from": as_option(teachers), "train__max_steps": 3}
    eager = run(tiny_run(**options, run__name="eager"))
    compiled = run(tiny_run(**options, run__name="compiled", train__compile="true"))
    of_warm_up, of_all = graphs()
    assert of_warm_up == of_all > 0
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-5)


@pytest.mark.distributed
def test_two_processes_learn_as_one(run, tiny_run, teachers, tmp_path):
    options: dict[str, Any] = {"train__distill_from": as_option(teachers), "batch__micro_batch_size": 4}
    one = run(tiny_run(**options, run__name="one"))
    train_on_two(tiny_run(**options, run__name="two"), tmp_path / "output")
    assert losses(one.with_name("two")) == pytest.approx(losses(one), rel=1e-4)


def test_a_rollback_keeps_one_loss(run, tiny_run, teachers, spoil_gradients):
    spoiled = spoil_gradients(lambda step: step == 4)
    options = {"train__max_skipped_steps": 1, "train__max_steps": 8, "train__save_every_steps": 2}
    run(tiny_run(train__distill_from=as_option(teachers), **options))
    (finished,) = spoiled
    loss = finished.raw_model.cross_entropy
    assert finished.state.rollbacks and not isinstance(loss.plain, DistillationLoss)
