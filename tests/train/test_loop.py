"""The loop's invariants: exact accumulation, exact resume, exact rows."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import math
import platform
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import assert_same_course, losses, rows, same, train_on_two
from safetensors.torch import load_file

import hfgolf
from hfgolf.config.parse import load_config
from hfgolf.system.errors import UserError
from hfgolf.system.stopwatch import Stopwatch
from hfgolf.train import loop, setup, validation
from hfgolf.train.console import show_log

ALL_AT_THE_END = {"data__val_fraction": 0.5, "train__eval_tokens": 9000, "train__eval_every_steps": 1}
ALL_AT_THE_END |= {"train__final_eval_tokens": "null"}


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def test_run_writes_all_documented_files(run, tiny_run):
    folder = run(
        tiny_run(train__max_steps=60, train__eval_every_steps=30, train__log_every_steps=7, train__save_every_steps=25)
    )
    table = rows(folder)
    assert [row["step"] for row in table] == sorted({1, *range(7, 60, 7), 25, 50, 30, 60})
    assert abs(table[0]["train_loss"] - math.log(257)) < 0.3
    assert table[-1]["train_loss"] < 2.5 < table[0]["train_loss"]
    assert table[-1]["tokens"] == 60 * 256
    assert [row["step"] for row in table if row["val_loss"] is not None] == [30, 60]
    assert len(losses(folder)) == 60
    for row in table:
        assert row["data_seconds"] + row["compute_seconds"] == pytest.approx(
            256 * len(row["train_losses"]) / row["tokens_per_second"]
        )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_bits_per_byte"] == pytest.approx(
        summary["val_loss"] * summary["val_tokens"] / math.log(2) / summary["val_bytes"]
    )
    assert summary["peak_memory_bytes"] >= max(row["memory_bytes"] for row in table) > 10**8
    assert summary["predicted_memory_bytes"] > 10**8, "includes the memory of Python and torch"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["seed"] == 1337 and metadata["packages"]["torch"] == importlib.metadata.version("torch")
    assert metadata["python"] == platform.python_version() and metadata["hardware"]["cpu"]
    assert (folder / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_accumulation_is_exact(run, tiny_run):
    """1x16 = 4x4 = 16x1, with the optimizer that people have: only tokens_per_step matters, not the micro-batches."""
    options = {"batch__tokens_per_step": 512, "train__max_steps": 5}
    options |= {"train__eval_every_steps": 100, "train__save_every_steps": "null"}
    first, *others = (
        run(tiny_run(run__name=f"micro{size}", batch__micro_batch_size=size, **options)) for size in (16, 4, 1)
    )
    for other in others:
        assert losses(other) == pytest.approx(losses(first), rel=1e-5)
        for name, tensor in weights(first / "checkpoints" / "latest").items():
            saved = weights(other / "checkpoints" / "latest")[name]
            torch.testing.assert_close(saved, tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("options", "clip"), [({}, 1.0), ({"train__max_grad_norm": 0.25}, 0.25)])
def test_update_matches_sgd_by_hand(run, tiny_run, monkeypatch, options, clip):
    """SGD computed by hand: mean gradient of two micro-batches, clipped, warmup's rate; only matrices decay."""
    real_step = loop.train_step
    norms = []

    def watched_step(run_: Any, total_steps: float) -> Any:
        micro_batches = [next(run_.batches) for _ in range(2)]
        run_.batches = itertools.chain([dict(batch) for batch in micro_batches], run_.batches)
        named = dict(run_.raw_model.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        loss = sum(run_.raw_model(b["input_ids"], shift_labels=b["shift_labels"]).loss for b in micro_batches) / 2
        gradients = dict(zip(named, torch.autograd.grad(loss, named.values()), strict=True))
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        rate = 0.3 * (run_.state.step + 1) / 4
        result = real_step(run_, total_steps)
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
        for name, parameter in named.items():
            decay = 0.1 if name.endswith("_proj.weight") else 0.0
            expected = before[name] * (1 - rate * decay) - rate * min(1, clip / norm) * gradients[name]
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)
            assert parameter.grad is None
        norms.append(norm)
        return result

    monkeypatch.setattr(loop, "train_step", watched_step)
    sgd = {"optim__name": "sgd", "optim__learning_rate": 0.3, "optim__momentum": 0}
    schedule = {"schedule__name": "constant", "schedule__warmup_steps": 4, "optim__weight_decay": 0.1}
    folder = run(tiny_run(**sgd, **schedule, **options, batch__micro_batch_size=4, train__max_steps=3))
    assert len(norms) == 3 and max(norms) > clip
    assert [row["learning_rate"] for row in rows(folder)] == pytest.approx([0.075, 0.15, 0.225])


def test_a_step_without_a_finite_gradient_changes_nothing_and_others_move_the_average(
    run, tiny_run, monkeypatch, spoil_gradients
):
    """Step 2 of 3 is spoiled. The average follows by hand, with its smaller decays at the start."""
    spoil_gradients(lambda step: step == 1)
    real_step, changed = loop.train_step, []

    def kept(run_: Any) -> list[torch.Tensor]:
        state = [value for of_parameter in run_.optimizer.optimizer.state.values() for value in of_parameter.values()]
        tensors = [*run_.raw_model.parameters(), *state, *run_.ema.state_dict().values()]
        return [tensor.detach().clone() for tensor in tensors]

    def watched_step(run_: Any, total_steps: float) -> Any:
        before, averages = kept(run_), {name: value.clone() for name, value in run_.ema.state_dict().items()}
        result = real_step(run_, total_steps)
        changed.append(any(not torch.equal(old, new) for old, new in zip(before, kept(run_), strict=True)))
        assert (result.nonfinite_parameter is None) == changed[-1]
        if changed[-1]:
            decay = min(0.9, (2 + run_.state.step) / (11 + run_.state.step))  # of the updates with this one
            for name, parameter in run_.raw_model.named_parameters():
                expected = decay * averages[name] + (1 - decay) * parameter.detach()
                torch.testing.assert_close(run_.ema.state_dict()[name], expected, rtol=1e-5, atol=1e-6)
        return result

    monkeypatch.setattr(loop, "train_step", watched_step)
    folder = run(tiny_run(train__max_steps=3, optim__ema_decay=0.9))
    assert changed == [True, False, True]
    assert [row["skipped_steps"] for row in rows(folder)] == [0, 1, 1]


class StopAt(hfgolf.Hook):
    """Signals the process, as a cluster does before it takes the machine."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Any, result: Any) -> None:
        if run.state.step == self.step:
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_saves_and_the_resumed_run_is_the_straight_one(run, tiny_run, shared_run, tmp_path):
    options = {"train__max_steps": 4, "train__eval_every_steps": 4, "train__save_every_steps": 100}
    straight = shared_run(**options)
    arguments = tiny_run(run__name="stopped", **options, train__resume="auto")
    with pytest.raises(SystemExit) as ended:
        hfgolf.train(hfgolf.load_config(arguments), hooks=[StopAt(2)])
    assert ended.value.code == 143
    assert (tmp_path / "runs" / "stopped" / "checkpoints" / "step-000002").is_dir()
    stopped = run(arguments)
    assert losses(stopped) == losses(straight)
    assert same(*(weights(folder / "checkpoints" / "latest") for folder in (straight, stopped)))


@pytest.mark.slow
def test_compiled_model_compiles_once(run, tiny_run, graphs):
    """The warm-up pass must look like a training step, or the first step recompiles."""
    options = {"batch__micro_batch_size": 4, "model__dropout": 0.1}
    folder = run(tiny_run(run__name="compiled", train__compile="true", **options))
    of_warm_up, of_all = graphs()
    assert of_all == of_warm_up > 0
    assert len(losses(folder)) == 6
    assert rows(folder)[0]["seconds_compile"] > 0
    plain = run(tiny_run(run__name="plain", train__compile="false", **options))
    assert losses(folder) == pytest.approx(losses(plain), rel=1e-5), "the compiling pass changed the result"


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_match_one(shared_run, tiny_run, tmp_path):
    options = {"train__max_steps": 8, "train__eval_every_steps": 4}
    one, two = shared_run(**options), tmp_path / "runs" / "two"
    train_on_two(tiny_run(run__name="two", batch__micro_batch_size=2, **options), tmp_path / "output")
    assert "2 processes" in (tmp_path / "output").read_text()
    assert_same_course(two, one, of_norms=1e-4)


@pytest.mark.parametrize("ema", [{}, {"optim__ema_decay": 0.9, "optim__ema_export": "true"}])
def test_only_the_last_evaluation_reads_all_tokens(run, tiny_run, ema):
    folder = run(tiny_run(**ALL_AT_THE_END, **ema, train__max_steps=2))
    first, last = (row for row in rows(folder) if row["val_loss"] is not None)
    summary = json.loads((folder / "summary.json").read_text())
    assert 4000 < first["val_tokens"] == last["subset_val_tokens"] <= 9000 < 15_000 < last["val_tokens"]
    assert not any(key.startswith("subset_") for key in first)
    assert {key.removeprefix("subset_") for key in last if key.startswith("subset_")} < set(last)
    for prefix, row in (("", first), ("", last), ("subset_", last)):
        bits = row[f"{prefix}val_loss"] * row[f"{prefix}val_tokens"] / math.log(2) / row[f"{prefix}val_bytes"]
        assert row[f"{prefix}val_bits_per_byte"] == pytest.approx(bits)
    assert summary["step"] == 2 and last["subset_val_loss"] < first["val_loss"]
    assert all(summary[key] == last[key] for key in ("val_loss", "val_tokens"))


def test_the_step_is_judged_by_the_tokens_of_the_evaluations_before(run, tiny_run, monkeypatch):
    """The whole text has a lower loss than its start, which must not make the last step the best one."""
    real = validation.evaluate_loss
    worse = itertools.count(1)

    def evaluated(*arguments: Any, budget_tokens: int | None, **options: Any) -> Any:
        evaluation = real(*arguments, budget_tokens=budget_tokens, **options)
        factor = 0.1 if budget_tokens is None else next(worse)
        return dataclasses.replace(evaluation, nats=evaluation.nats * factor)

    monkeypatch.setattr(validation, "evaluate_loss", evaluated)
    folder = run(tiny_run(**ALL_AT_THE_END, train__max_steps=3))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step"] == 1
    last = rows(folder)[-1]
    assert last["val_tokens"] == summary["val_tokens"] > last["subset_val_tokens"]


def test_an_early_stop_is_the_last_evaluation_too(run, tiny_run, validation_losses):
    validation_losses([2.0, 2.5])
    folder = run(tiny_run(**ALL_AT_THE_END, train__patience_evals=1, train__max_steps=9))
    evaluated_rows = [row for row in rows(folder) if row["val_loss"] is not None]
    assert [row["step"] for row in evaluated_rows] == [1, 2]
    assert ["subset_val_loss" in row for row in evaluated_rows] == [False, True]


@pytest.fixture
def long_validation(tmp_path, corpus_file):
    """Options of runs of 2 steps, or 4 of half as many tokens, with 60,000 validation tokens in pieces of 8,200."""
    (tmp_path / "val.txt").write_bytes((2 * corpus_file.read_bytes())[:60_000])
    options = {"data__val_files": f"[{tmp_path / 'val.txt'}]", "train__eval_tokens": 9000, "train__eval_every_steps": 1}
    return options | {"batch__tokens_per_step": 65_536, "train__max_steps": 2, "schedule__name": "constant"}


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, 0.15 * 2 * 65_536),
        ({"optim__ema_decay": 0.9}, 0.15 * 65_536),
        ({"batch__tokens_per_step": 256}, 9000),
        ({"train__final_eval_tokens": 40_000}, 40_000),
    ],
    ids=["5 % of the compute", "in two passes", "as many as any other", "a number"],
)
def test_the_last_evaluation_has_a_budget_and_says_what_it_read(
    run, tiny_run, long_validation, options, budget, capsys
):
    show_log(is_main_process=True)
    folder = run(tiny_run(**long_validation | options))
    first, last = (row for row in rows(folder) if row["val_loss"] is not None)
    summary = json.loads((folder / "summary.json").read_text())
    read = summary["val_tokens"]
    assert first["val_tokens"] == last.get("subset_val_tokens", read) <= read == last["val_tokens"] <= budget
    assert read > budget - 8500, "a piece of text is read whole or not at all"
    share = summary["val_share_read"]
    assert share == last["val_share_read"] == pytest.approx(read / 60_000, rel=0.02)
    said = capsys.readouterr().out
    assert f"first {share:.0%} of the validation set, {read:,} tokens" in said
    assert (f"; {read:,} at the last step" in said) == (read > first["val_tokens"])
    shown = (folder / "report.html").read_text(encoding="utf-8")
    assert f"on the first {read:,} validation tokens" in shown and f"{share:.0%} of them" in shown


@pytest.mark.parametrize(
    ("final", "said"),
    [
        ("auto", "; at the last step, as many as take 5% of all compute"),
        ("null", "; all of them at the last step"),
        (40_000, "; 33,"),
        (1, "of their compute"),
    ],
)
def test_the_start_says_what_the_last_evaluation_reads_if_minutes_end_the_run(
    tiny_run, long_validation, reset_accelerate, final, said, caplog
):
    reset_accelerate()
    limits = {"train__max_steps": "null", "train__max_minutes": 5, "train__final_eval_tokens": final}
    with caplog.at_level("INFO", "hfgolf"):
        setup.set_up(load_config(tiny_run(**long_validation | limits)))
    (line,) = (message for message in caplog.messages if message.startswith("evaluate"))
    assert said in line and line.endswith(said) == (said != "; 33,")


def test_the_last_evaluation_of_a_resumed_or_rebuilt_run_reads_what_that_of_a_straight_one_does(
    run, tiny_run, long_validation
):
    options = long_validation | {"batch__tokens_per_step": 32_768, "train__max_steps": 4}
    straight = json.loads((run(tiny_run(**options)) / "summary.json").read_text())
    resumed = tiny_run(**options, run__name="resumed")
    folder = run([*resumed, "--train.max_steps=2"])
    assert json.loads((folder / "summary.json").read_text())["val_tokens"] < straight["val_tokens"]
    for resume in ("latest", "auto"):
        run([*resumed, f"--train.resume={resume}"])
        found = json.loads((folder / "summary.json").read_text())
        assert all(found[key] == straight[key] for key in ("step", "val_loss", "val_tokens", "val_share_read"))
        (folder / "summary.json").unlink()


def test_full_evaluation_is_not_repeated_at_the_end(run, tiny_run, monkeypatch):
    real = validation.evaluate_loss
    budgets = []

    def noted(*arguments: Any, budget_tokens: int | None, **options: Any) -> Any:
        budgets.append(budget_tokens)
        return real(*arguments, budget_tokens=budget_tokens, **options)

    monkeypatch.setattr(validation, "evaluate_loss", noted)
    folder = run(tiny_run(train__eval_tokens="null", train__eval_every_steps=2, train__max_steps=4))
    assert budgets == [None, None]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_loss"] == rows(folder)[-1]["val_loss"]


@pytest.mark.slow
def test_max_minutes_ends_the_run_and_its_schedule(run, tiny_run):
    folder = run(
        tiny_run(
            train__max_steps=100000, train__max_minutes=0.03, train__eval_every_steps=100000, schedule__name="linear"
        )
    )
    last = rows(folder)[-1]
    assert last["step"] < 100000
    assert last["elapsed_seconds"] >= 1.8
    assert last["val_loss"] is not None
    assert last["learning_rate"] < 0.2 * 0.02


@pytest.mark.parametrize("crossing", ["evaluate_loss", "generate_text"])
def test_an_evaluation_in_which_the_minutes_end_is_the_last(run, tiny_run, long_validation, monkeypatch, crossing):
    """No step at a learning rate of 0 follows, and no evaluation of the same weights."""
    more, real, training_seconds = [0.0], getattr(validation, crossing), Stopwatch.training_seconds

    def use_up(*arguments: Any, **options: Any) -> Any:
        more[0] = 300.0
        return real(*arguments, **options)

    monkeypatch.setattr(validation, crossing, use_up)
    monkeypatch.setattr(Stopwatch, "training_seconds", lambda stopwatch: training_seconds(stopwatch) + more[0])
    options = {"train__max_steps": "null", "train__max_minutes": 5, "train__final_eval_tokens": 40_000}
    options |= {"batch__tokens_per_step": 256, "train__eval_every_steps": 3, "train__save_every_steps": 100}
    folder = run(tiny_run(**long_validation | options))
    table, summary = rows(folder), json.loads((folder / "summary.json").read_text())
    assert [row["step"] for row in table if row["val_loss"] is not None] == [table[-1]["step"]] == [3]
    assert (folder / "checkpoints" / "step-000003").is_dir()
    assert summary["steps"] == 3 and summary["val_tokens"] > 30_000
    assert ("subset_val_loss" in table[-1]) == (crossing == "evaluate_loss")


def test_max_epochs_counts_passes_over_the_blocks(run, tiny_run):
    folder = run(tiny_run(train__max_steps=1000, train__max_epochs=0.1))
    last = rows(folder)[-1]
    assert 0.1 <= last["epoch"] < 0.1 + 256 / 32 / 1000


@pytest.mark.parametrize("resume", ["null", "auto"])
def test_only_a_run_with_a_checkpoint_is_said_to_go_on(run, tiny_run, copied_run, resume):
    folder = copied_run()
    (folder / "summary.json").unlink()
    other = tiny_run(train__max_steps=4, train__resume=resume)
    with pytest.raises(UserError, match=r"train\.resume latest"):
        run(other)
    shutil.rmtree(folder / "checkpoints")  # killed before the first
    with pytest.raises(UserError, match=r"another --run.name, or delete that folder, which has no checkpoint\.$"):
        run(other)


def test_unwritable_output_folder_is_one_line(run, tiny_run, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"run.output_dir: cannot write to .*; choose another --run.output_dir"):
        run(tiny_run(run__output_dir=tmp_path / "file"))
