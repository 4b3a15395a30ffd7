"""lm-eval on hfgolf's models: by itself, and as hfgolf evaluate --tasks runs it: `make test-ecosystem`."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from tiny_export import SUMMARY, build_tiny, card_of

from hfgolf.config.sections import RunConfig
from hfgolf.publish.export import export_model
from hfgolf.publish.load import load_exported

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed; run make test-ecosystem")
pytestmark = [pytest.mark.ecosystem, pytest.mark.slow]


@pytest.fixture
def evaluate(hfgolf):
    """Run the script and return (exit status, stdout, stderr)."""
    return partial(hfgolf, "evaluate")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model of a run, with its card."""
    folder = tmp_path / "runs" / "tiny" / "model"
    folder.parent.mkdir(parents=True)
    (folder.parent / "config.yaml").write_text("run: {name: tiny}\n")
    export_model(*build_tiny(), folder, card_of(RunConfig().replace(run__name="tiny"), SUMMARY))
    return folder


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A file of short and long documents; the model reads 32 tokens, which are bytes."""
    texts = ["a", "short", "x" * 32, "y" * 33, "naïve " * 11, "z" * 64, "The quick brown fox. " * 9]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text, "answer": len(text) % 2}) + "\n" for text in texts))
    return path


def write_task(path: Path, data: Path, **options: Any) -> Path:
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    path.write_text(yaml.safe_dump({"task": path.stem, **common, **options}))
    return path


@pytest.fixture
def rolling(tmp_path: Path, documents: Path) -> Path:
    metrics = [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}]
    options = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    return write_task(tmp_path / "rolling.yaml", documents, metric_list=metrics, **options)


@pytest.fixture
def choice(tmp_path: Path, documents: Path) -> Path:
    options = {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_target": "{{answer}}"}
    return write_task(tmp_path / "choice.yaml", documents, doc_to_choice=["even", "odd"], **options)


def test_per_document_is_the_figure_of_lm_eval(model, documents, rolling, evaluate):
    status, printed, _ = evaluate(
        "--model", model, "--files", documents, "--per_document", "--mixed_precision", "no", "--json"
    )
    ours = json.loads(printed)
    assert status == 0 and ours["coverage"]["separators"] == "skipped"
    status, printed, _ = evaluate("--model", model, "--tasks", rolling, "--mixed_precision", "no", "--json")
    theirs = json.loads(printed)["rolling"]["metrics"]["bits_per_byte,none"]
    assert ours["bits_per_byte"] == pytest.approx(theirs, abs=1e-5)
    _, printed, _ = evaluate("--model", model, "--files", documents, "--mixed_precision", "no", "--json")
    assert abs(json.loads(printed)["bits_per_byte"] - theirs) > 1e-3, "rows end to end are another figure"


def test_tasks_give_the_results_of_lm_eval_itself(model, choice, evaluate):
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    status, printed, _ = evaluate("--model", model, "--tasks", choice, "--mixed_precision", "no", "--json")
    assert status == 0
    loaded, tokenizer = load_exported(str(model))
    config = EvaluatorConfig(tasks=[str(choice)])
    manager = config.process_tasks()
    harness = HFLM(loaded, backend="causal", tokenizer=tokenizer)
    direct = lm_eval.simple_evaluate(harness, tasks=config.tasks, task_manager=manager, log_samples=False)
    found = json.loads(printed)["choice"]
    for metric in ("acc,none", "acc_norm,none", "acc_stderr,none"):
        assert found["metrics"][metric] == direct["results"]["choice"][metric]
    assert found["num_fewshot"] == 0 and found["num_samples"] == 7


def test_results_are_recorded_in_the_run_and_in_the_card(model, choice, rolling, evaluate):
    before = ModelCard.load(model / "README.md")
    for tasks in ((rolling, choice), (choice,)):  # the same tasks again are replaced, and others stay
        status, printed, said = evaluate("--model", model, "--tasks", *tasks, "--batch_size", 3)
        assert status == 0 and "|choice" in printed
        assert said.endswith(f"recorded in {model.parent / 'tasks.json'} and {model / 'README.md'}\n")
    recorded = json.loads((model.parent / "tasks.json").read_text())
    assert recorded.keys() == {"rolling", "choice"}
    assert recorded["choice"]["model"] == "model" and "model.safetensors" in recorded["choice"]["weights"]
    after = ModelCard.load(model / "README.md")
    assert after.text == before.text
    data: Any = after.data
    assert data.library_name == "transformers" and data.model_name == "tiny"
    figures = {(result.dataset_type, result.metric_type): result for result in data.eval_results}
    assert figures["python_stdlib", "bits_per_byte"].metric_value == 1.5
    assert figures.keys() == {
        *(("python_stdlib", metric) for metric in ("loss", "bits_per_byte", "perplexity")),
        *(("choice", metric) for metric in ("acc", "acc_norm")),
        *(("rolling", metric) for metric in ("bits_per_byte", "word_perplexity")),
    }
    accuracy = figures["choice", "acc"]
    assert accuracy.metric_value == round(recorded["choice"]["metrics"]["acc,none"], 4)
    assert accuracy.source_name.startswith("lm-eval 0.") and accuracy.dataset_args == {"num_few_shot": 0}


@pytest.mark.parametrize("task, message", [("no_such_task", "Tasks not found: no_such_task"), ("broken.yaml", "")])
def test_a_task_that_cannot_be_loaded_is_one_line(model, evaluate, tmp_path, monkeypatch, task, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("task: broken\ndataset_path: json\ndataset_kwargs: {data_files: missing}\n")
    status, printed, said = evaluate("--model", model, "--tasks", task)
    assert (status, printed) == (2, "")
    [line] = [line for line in said.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: --tasks: {message}")
