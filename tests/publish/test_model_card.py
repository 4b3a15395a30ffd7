"""The card: valid metadata, correct figures, nothing about this machine, and a sample that cannot break it."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from tiny_export import SUMMARY, build_tiny, card_of

from hfgolf.config.parse import load_config
from hfgolf.config.sections import DataSection, RunConfig
from hfgolf.publish.hub import set_location
from hfgolf.publish.model_card import add_task_results, usage


def test_metadata_has_the_fields_the_hub_indexes(exported):
    card = ModelCard.load(exported / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "text-generation"
    [entry] = data["model-index"]
    assert entry["name"] == "tiny"
    metrics = {metric["type"]: metric["value"] for result in entry["results"] for metric in result["metrics"]}
    assert metrics == {"loss": 3.25, "bits_per_byte": 1.5, "perplexity": 25.79}
    assert "datasets" not in data


def test_data_license_and_language_are_those_of_the_run_or_absent(tiny_config):
    texts = DataSection(source="hub", hub_name="some/texts", hub_config="small", hub_split="all")
    card = card_of(RunConfig(data=texts).replace(run__name="tiny"), SUMMARY)
    data: Any = ModelCard(card).data
    assert data.datasets == ["some/texts"]
    result = data.eval_results[0]
    assert (result.dataset_type, result.dataset_config) == ("some/texts", "small")
    assert "on [some/texts](https://huggingface.co/datasets/some/texts) (small, all) with hfgolf" in card
    data = ModelCard(card_of(RunConfig(data=DataSection(hub_name="some/texts")), SUMMARY)).data
    assert data.datasets is None and {result.dataset_type for result in data.eval_results} == {"python_stdlib"}
    assert not {"license", "language", "datasets"} & ModelCard(card_of(tiny_config, SUMMARY)).data.to_dict().keys()
    config = tiny_config.replace(hub__license="apache-2.0", hub__language=["en", "no"])
    data = ModelCard(card_of(config, SUMMARY)).data
    assert data.license == "apache-2.0" and data.language == ["en", "no"]


def test_card_says_what_the_run_took_and_cost(tiny_config):
    timed = SUMMARY | {"seconds_train": 1700.0, "seconds_setup": 100.0, "logged_at": 1e9}
    assert "training tokens on an abacus in 30 min 00 s.\n" in card_of(tiny_config, timed)
    card = card_of(tiny_config.replace(run__price_per_hour=2.5), timed)
    assert "on an abacus in 30 min 00 s, which cost $1.25 at $2.50 per hour.\n" in card


def test_text_is_well_formed_and_has_no_local_paths(exported, tiny_config):
    card = (exported / "README.md").read_text()
    assert "A GPT with 27,456 parameters, trained from scratch on corpus.txt with hfgolf" in card
    assert card.count('from_pretrained("runs/tiny/model"') == 2
    assert "| bits per byte | 1.5000 |\n| perplexity | 25.7900 |\n\nA sample" in card
    assert "On 1,000 held-out tokens (3,126 bytes of raw UTF-8 text):\n\n| measure" in card
    assert "These are the weights of step 5. The run took 6 steps and 24,576 training tokens on an abacus." in card
    assert "/home/somebody/runs" not in card and "/home/somebody/cache" not in card
    assert "\n\n\n" not in card and card.endswith("```\n")
    assert f"````text\n{SUMMARY['sample']}\n````\n" in card, "a sample cannot close its code block"
    lossy = card_of(tiny_config, SUMMARY | {"tokenizer_loss": "the tokenizer loses text"})
    assert "| perplexity | 25.7900 |\n\nNote: the tokenizer loses text.\n\nA sample" in lossy


def test_file_names_are_escaped():
    data = DataSection(source="files", files=["texts/x](http:evil)\n---\n# Owned <img src=x>.txt"])
    config = RunConfig(data=data).replace(run__name="tiny")
    text = card_of(config, SUMMARY)
    assert r"on x\](http:evil) --- # Owned \<img src=x\>.txt with hfgolf" in text
    assert [line for line in text.splitlines() if line.startswith("# ")] == ["# tiny"]
    [entry] = ModelCard(text).data.to_dict()["model-index"]
    assert entry["results"][0]["dataset"]["name"].startswith(data.files[0].removeprefix("texts/"))


def test_config_in_the_card_is_valid(exported, tmp_path, tiny_config):
    text = (exported / "README.md").read_text().split("```yaml\n")[1].split("\n```")[0]
    (tmp_path / "again.yaml").write_text(text)
    again = load_config(["--config", str(tmp_path / "again.yaml")]).config
    assert again.model == tiny_config.model and again.data.files == tiny_config.data.files
    assert yaml.safe_load(text)["run"]["output_dir"] == "runs"


def test_card_during_training_omits_unknown_figures(tiny_config):
    card = card_of(tiny_config, {"step": 3, "val_loss": float("inf")})
    assert "How good" not in card and "inf" not in card and "None" not in card and "\n\n\n" not in card
    assert "model-index" not in ModelCard(card).data.to_dict()


def test_package_that_is_only_on_the_path_gets_a_card(monkeypatch, tiny_config):
    """A run that trained to its end once failed here."""

    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert " with hfgolf." in card_of(tiny_config, SUMMARY)


def test_card_has_no_secret_and_its_config_is_still_yaml(monkeypatch, tmp_path):
    token, key = "hf_" + "aB3dE" * 7, "0123456789abcdef" * 2 + "01234567"
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("WANDB_API_KEY", key)
    files = ["https://somebody:" + "opensesame@host/corpus.txt", "https://host/more.txt?" + "sig=opensesame&sp=r"]
    config = RunConfig(data=DataSection(source="files", files=files)).replace(run__name="tiny", track__project=key)
    card = card_of(config, SUMMARY | {"sample": f"TOKEN = '{token}'"})
    assert not [secret for secret in (token, key, "opensesame", "somebody") if secret in card]
    assert "TOKEN = '[redacted]'" in card
    assert "trained from scratch on https://[redacted]@host/corpus.txt" in card
    assert ModelCard(card).data.to_dict()["model-index"][0]["name"] == "tiny"
    (tmp_path / "again.yaml").write_text(card.split("```yaml\n")[1].split("\n```")[0])
    again = load_config(["--config", str(tmp_path / "again.yaml")]).config
    assert again.data.files == ["https://[redacted]@host/corpus.txt", "https://host/more.txt?sig=[redacted]&sp=r"]
    assert again.track.project == "[redacted]" and again.run.name == "tiny"
    monkeypatch.setenv("PROJECT_KEY", "shakespeare")  # a run named like a secret still gets a card
    assert "shakespeare" not in card_of(RunConfig().replace(run__name="shakespeare"), {"step": 3})


def test_only_the_example_repository_is_renamed(tiny_config, tmp_path):
    sample = 'x = Y.from_pretrained("z")'
    path = tmp_path / "README.md"
    path.write_text(card_of(tiny_config, SUMMARY | {"sample": sample}))
    set_location(path, "user/name")
    set_location(path, "other/name")
    card = path.read_text()
    assert card.count('from_pretrained("other/name"') == 2 and "user/name" not in card and sample in card


@pytest.mark.parametrize(
    ("revision", "sentence", "base_model"),
    [
        (None, "trained from the weights of small (sha256 0123456789abcdef) on", None),
        ("1f2e", "trained from the weights of [user/small](https://huggingface.co/user/small) on", "user/small"),
    ],
)
def test_card_says_which_weights_training_began_with(tiny_config, revision, sentence, base_model):
    init_from = {"name": "user/small", "revision": revision, "sha256": "0123456789abcdef" * 4}
    card = card_of(tiny_config, SUMMARY | {"init_from": init_from})
    data = ModelCard(card).data
    assert sentence in card and data.get("base_model") == base_model
    assert data.get("base_model_relation") == (base_model and "finetune")
    assert "trained from scratch on" in card_of(tiny_config, SUMMARY)


@pytest.mark.parametrize(("switches", "advice"), [({}, "--to native"), ({"smear_gate": 12}, "cannot run it")])
def test_a_card_advises_only_exports_that_exist(switches, advice):
    text = usage(build_tiny(**switches)[0], "user/name", is_chat=False)
    assert advice in text and ("--to native" in text) == (not switches)


def test_results_of_tasks_go_only_into_a_valid_card_of_ours(tiny_config, tmp_path):
    path = tmp_path / "README.md"
    results = ({"some_task": {"acc": 0.51239, "f1,strict": 1.0}}, {"some_task": 5}, "lm-eval 0.4.13")
    assert not add_task_results(path, *results) and not path.exists()
    for foreign in ("# A card\n", "---\nmodel-index: 3\n---\n# A card\n", "---\ntags: other\n---\n# A card\n"):
        path.write_text(foreign)
        assert not add_task_results(path, *results) and path.read_text() == foreign
    path.write_text(card_of(tiny_config, {"step": 3}))  # without figures of its own
    assert add_task_results(path, *results) and add_task_results(path, *results)
    data: Any = ModelCard.load(path).data
    assert [(result.metric_type, result.metric_name, result.metric_value) for result in data.eval_results] == [
        ("acc", "acc", 0.5124),
        ("f1", "f1,strict", 1.0),
    ]
    assert {result.dataset_args["num_few_shot"] for result in data.eval_results} == {5}
