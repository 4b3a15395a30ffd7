"""A run on conversations: the loss of a step counts its targets once, a resume is exact, and the model answers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import same, train_on_two
from safetensors.torch import load_file
from test_resume import run_in_parts, without_timings
from tiny_export import exported_weights
from transformers import pipeline

from hfgolf.run.metrics import read_metrics, read_rows
from hfgolf.system.errors import UserError
from hfgolf.train import feed

pytestmark = pytest.mark.slow

ANSWERS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Cuba": "Havana"}
COMPARED = ("train_losses", "grad_norms", "sample_hashes", "val_loss", "val_bits_per_byte", "val_tokens", "val_bytes")


@pytest.fixture
def chat_run(tiny_run, tmp_path):
    """Return the command line of a tiny run on 200 questions and answers, some of them much longer than others."""
    lines = []
    for number in range(200):
        country = [*ANSWERS][number % 5]
        question = f"{'Please. ' * (number % 7)}What is the capital of {country}?"
        turns = [("user", question), ("assistant", ANSWERS[country])]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    defaults = {"data__files": tmp_path / "chat.jsonl", "data__split": "documents", "data__messages_column": "messages"}
    return lambda **options: tiny_run(**defaults | options)


def compared(folder: Path) -> list[list[Any]]:
    return [[row.get(name) for name in COMPARED] for row in read_rows(folder / "metrics.jsonl")]


def test_accumulation_does_not_change_the_loss(run, chat_run):
    """Micro-batches with few targets and with many: the mean is over the targets of the whole step."""
    options = {"optim__name": "adamw", "optim__learning_rate": 0.003, "model__architecture": "llama"}
    whole = run(chat_run(run__name="whole", **options, batch__micro_batch_size=8))
    parts = run(chat_run(run__name="parts", **options, batch__micro_batch_size=2))
    for one, other in zip(compared(whole), compared(parts), strict=True):
        assert one[2] == other[2]
        assert other[0] == pytest.approx(one[0], rel=1e-6) and other[1] == pytest.approx(one[1], rel=1e-5)


@pytest.mark.distributed
def test_two_processes_that_accumulate_match_one_that_does_not(run, chat_run, tmp_path):
    one = run(chat_run(run__name="one", optim__name="adamw"))
    train_on_two(chat_run(run__name="two", optim__name="adamw", batch__micro_batch_size=2), tmp_path / "output")
    for ours, theirs in zip(compared(one), compared(one.with_name("two")), strict=True):
        assert ours[2] == theirs[2] and ours[5:] == theirs[5:]
        assert theirs[0] == pytest.approx(ours[0], rel=1e-5) and theirs[1] == pytest.approx(ours[1], rel=1e-4)
        assert theirs[3] is None or theirs[3:5] == pytest.approx(ours[3:5], rel=1e-5)


def test_resumed_run_matches_a_straight_run_bitwise(run, chat_run, monkeypatch):
    options = {"data__num_workers": 1, "data__order": "sequential", "batch__micro_batch_size": 2}
    straight = run(chat_run(run__name="straight", **options))
    broken = run_in_parts(run, chat_run, (4,), monkeypatch, **options)
    assert without_timings(broken) == without_timings(straight)
    assert same(*(load_file(folder / "model" / "model.safetensors") for folder in (broken, straight)))


def test_step_without_a_target_changes_nothing_but_the_step(run, chat_run, monkeypatch):
    """Its loss and its gradients are 0, not NaN."""
    real = feed.build_loader

    def build_loader(stream, **options):
        return real(replace(stream, is_target=np.zeros_like(stream.is_target)), **options)

    monkeypatch.setattr(feed, "build_loader", build_loader)
    folder = run(chat_run(train__max_steps=2))
    assert [row["train_losses"] for row in read_rows(folder / "metrics.jsonl")] == [[0.0], [0.0]]
    assert [row["grad_norms"] for row in read_rows(folder / "metrics.jsonl")] == [[0.0], [0.0]]


@pytest.mark.parametrize("graphs", ["model"], indirect=True)
def test_compiled_model_compiles_once(run, chat_run, graphs):
    """The warm-up pass has the divisor of the loss, too, or the first step would compile again."""
    folder = run(chat_run(train__compile="true", train__max_steps=3))
    of_warm_up, of_all = graphs()
    assert of_all == of_warm_up > 0
    assert len(read_rows(folder / "metrics.jsonl")) == 3


def test_a_run_on_text_cannot_continue_on_conversations(run, copied_run, chat_run):
    copied_run(train__max_steps=1)
    with pytest.raises(UserError, match=r"data\.messages_column: the tokenizer has no chat template") as caught:
        run(chat_run(train__resume="latest", train__resume_with_other="data"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("tied", "architecture"), [("true", "golf"), ("false", "llama")])
def test_base_model_keeps_its_weights_and_gets_rows_for_the_chat_tokens(run, tiny_run, chat_run, tied, architecture):
    form = {"model__tie_word_embeddings": tied, "model__architecture": architecture}
    base = run(tiny_run(run__name="base", train__max_steps=2, **form))
    shape = ("--model.", "--tokenizer.")
    still = {"optim__learning_rate": 1e-12, "optim__adamw_learning_rate": 1e-12, "train__max_steps": 2}
    options = [option for option in chat_run(run__name="chat", **still) if not option.startswith(shape)]
    options += [f"--model.architecture={architecture}", f"--model.init_from={base}"]
    folder = run(options)
    before, after = (exported_weights(path / "model") for path in (base, folder))
    for name, weights in before.items():
        assert torch.allclose(after[name][: len(weights)], weights, atol=1e-6), name
        assert len(after[name]) == len(weights) + (4 if len(weights) == 257 else 0)
    if architecture == "golf":  # others read the config of their weights again
        shutil.rmtree(base)
    resumed = run([*options, "--train.max_steps=3", "--train.resume=latest"])
    assert [row["step"] for row in read_rows(resumed / "metrics.jsonl")] == [1, 2, 3]


def test_small_chat_model_answers_and_stops(run, chat_run, hfgolf, tmp_path):
    """From conversations to answers, in Golf's form and in the native one, which transformers reads alone."""
    options = {"model__hidden_size": 64, "batch__sequence_length": 128, "batch__tokens_per_step": 2048}
    folder = run(
        chat_run(
            **options,
            train__max_steps=120,
            train__eval_every_steps=60,
            batch__micro_batch_size=16,
            train__sample_tokens=16,
        )
    )
    events = read_metrics(folder / "metrics.jsonl").events
    sample = [event["text"] for event in events if event["event"] == "sample"][-1]
    assert sample.startswith("<|endoftext|><|user|>") and sample.endswith("<|end|>") and "<|assistant|>" in sample
    card = (folder / "model" / "README.md").read_text()
    assert "held-out tokens of the assistant's turns" in card and "## How to chat with it" in card
    assert "Losses and bits per byte are of the assistant" in (folder / "report.html").read_text()
    golf = tmp_path / "golf"
    assert hfgolf("export", "--model", folder / "model", "--to", "golf", "--output", golf).status == 0
    assert "## How to chat with it" in (golf / "README.md").read_text()
    question = "What is the capital of Japan?"
    for model in (folder / "model", golf):
        stops = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
        assert stops == [256, 260]
        said = hfgolf("generate", "--model", model, "--temperature", 0, "--message", question)
        assert (said.status, said.out) == (0, "Tokyo\n")
    chat = pipeline("text-generation", model=str(folder / "model"))
    answer = chat([{"role": "user", "content": question}], max_new_tokens=40, do_sample=False)
    assert answer[0]["generated_text"][-1] == {"role": "assistant", "content": "Tokyo"}
