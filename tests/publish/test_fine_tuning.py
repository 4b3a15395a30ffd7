"""An exported model in the hands of Trainer, generate and AutoClasses: what fine-tuning rests on."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from datasets import Dataset
from tiny_export import build_tiny
from transformers import AutoTokenizer, Trainer, TrainingArguments, pipeline

from hfgolf.config.sections import TokenizerSection
from hfgolf.data.tokenizer import find_tokenizer
from hfgolf.publish.export import export_model
from hfgolf.publish.load import load_exported

AUTO_CLASSES = """
import json, sys
sys.modules["hfgolf"] = None  # makes importing it fail, even if it is installed
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForQuestionAnswering, AutoModelForSequenceClassification
from transformers import AutoModelForTokenClassification, AutoTokenizer

name = sys.argv[1]
saved = load_file(name + "/model.safetensors")
base = AutoModel.from_pretrained(name, trust_remote_code=True)
assert all(torch.equal(weight, saved["model." + key]) for key, weight in base.state_dict().items())
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
texts = tokenizer(["abc", "a"], return_tensors="pt", padding=True)

def train(kind, texts, **labels):
    model = kind.from_pretrained(name, trust_remote_code=True, num_labels=3)
    assert all(torch.equal(weight, saved["model." + key]) for key, weight in model.model.state_dict().items())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = model(**texts, **labels).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0], losses
    model.save_pretrained(sys.argv[2])
    return kind.from_pretrained(sys.argv[2], trust_remote_code=True)(**texts)

said = {}
said["text"] = train(AutoModelForSequenceClassification, texts, labels=torch.tensor([2, 0])).logits.argmax(-1).tolist()
texts = tokenizer(["abc", "cba"], return_tensors="pt")
tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
said["tokens"] = train(AutoModelForTokenClassification, texts, labels=tokens).logits.argmax(-1).tolist()
answer = {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 1])}
found = train(AutoModelForQuestionAnswering, texts, **answer)
said["answer"] = [found.start_logits.argmax(-1).tolist(), found.end_logits.argmax(-1).tolist()]
print(json.dumps(said))
"""


def training_rows(tokenizer, count=8):
    rows = [tokenizer(f"{number} and {number}")["input_ids"] for number in range(10, 10 + count)]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])


@pytest.mark.slow
def test_trainer_reports_the_loss_and_takes_back_the_best_model(tmp_path):
    model, tokenizer = build_tiny()
    rows = training_rows(tokenizer)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=24,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=True,
    )
    seen = []

    def measure(prediction):
        seen.append(prediction.predictions.shape)
        return {}

    trainer = Trainer(model, arguments, train_dataset=rows.select([0]), eval_dataset=rows, compute_metrics=measure)
    before = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        ids = torch.tensor(rows["input_ids"])
        assert before == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    assert seen == [(8, ids.shape[1], 257)], "Trainer keeps the logits alone"
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert len(losses) == 6 and min(losses) < before and losses[-1] > min(losses), "the best must not be the last"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-5)


def test_an_appended_end_of_text_is_one_token(exported, capfd):
    """Also for the tokenizer of an export of an export, and without a message from transformers."""
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    assert tokenizer("ab<|endoftext|>")["input_ids"] == [97, 98, 256]
    config = TokenizerSection(kind="pretrained", name_or_path=str(exported))
    capfd.readouterr()
    again = find_tokenizer(config, {}, exported)
    assert capfd.readouterr().err == ""
    model, _ = build_tiny()
    export_model(model, again, exported.with_name("again"), "card")
    written = json.loads((exported.with_name("again") / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only", "split_special_tokens"} & written.keys()
    assert again.init_kwargs["is_local"], "an export must not change the tokenizer it is given"


def test_the_callers_length_counts(exported, caplog):
    model, tokenizer = load_exported(str(exported))
    generation = json.loads((exported / "generation_config.json").read_text())
    assert not {"max_length", "max_new_tokens"} & generation.keys()
    ids = tokenizer("ab", return_tensors="pt")["input_ids"]
    with caplog.at_level(logging.WARNING, logger="transformers"):
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(exported, eos_token_id=None)
        assert model.generate(ids, max_length=20).shape == (1, 20)
        assert model.generate(ids, max_new_tokens=5).shape == (1, 7)
    assert not caplog.records


def test_learned_positions_bound_the_length_by_default(tmp_path):
    """A pipeline would otherwise ask for 256 tokens, and fail at the last position."""
    from transformers import GenerationConfig

    model, tokenizer = build_tiny(position_embedding="learned")
    export_model(model, tokenizer, tmp_path / "model", "card")
    model.generation_config = GenerationConfig.from_pretrained(tmp_path / "model", eos_token_id=None)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    ids = write("ab", return_tensors=True)[0]["generated_token_ids"]
    assert len(ids) == 32 == model.config.max_position_embeddings
    assert model.generate(torch.tensor([[97]]), max_length=9).shape == (1, 9)


@pytest.mark.slow
def test_base_model_and_classifiers_load_without_hfgolf(exported, python, tmp_path):
    outcome = python("-I", "-c", AUTO_CLASSES, exported, tmp_path / "classifier")
    assert outcome.returncode == 0, outcome.stderr
    said = json.loads(outcome.stdout)
    assert said == {"text": [2, 0], "tokens": [[0, 1, 2], [2, 1, 0]], "answer": [[0, 1], [2, 1]]}
