"""Pushing with the real client to a Hub on loopback: what arrives, how often, and what the user sees if it fails."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hub_server import TOKEN
from huggingface_hub import (
    EvalResultEntry,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
    parse_eval_result_entries,
)
from tiny_export import SUMMARY, build_tiny, card_of, contents
from transformers import AutoModelForCausalLM

from hfgolf.publish import hub as hub_module
from hfgolf.publish.convert import convert_folder
from hfgolf.publish.export import export_model
from hfgolf.publish.hub import HubPusher, push_model, set_location
from hfgolf.publish.model_card import add_task_results, gguf_card
from hfgolf.system.command import own_command
from hfgolf.system.durable import list_files
from hfgolf.system.errors import UserError


@pytest.fixture
def pushes_here(monkeypatch):
    """Let a HubPusher push in this process; test_failed_push_in_a_run_is_a_warning starts real ones."""

    def run(command, **options):
        _, folder, *arguments = json.loads(command[-1])
        try:
            return subprocess.CompletedProcess(command, 0, push_model(Path(folder), *arguments), "")
        except UserError as error:
            return subprocess.CompletedProcess(command, 2, "", f"error: {error}\n")

    here = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(hub_module, "subprocess", here)


def test_push_is_one_complete_commit(exported, hub, push):
    said = push("--format", "golf")
    assert said == (0, f"pushed to {hub.endpoint}/user/name\n", said.err) and TOKEN not in said.err, said.err
    repository = hub.repositories["user/name"]
    assert repository.files == contents(exported)
    assert len(repository.commits) == 1
    assert not repository.private
    assert not any(TOKEN.encode() in content for content in contents(exported).values())
    card = repository.files["README.md"].decode()
    assert card.count('from_pretrained("user/name"') == 2 and "runs/tiny" not in card

    (exported / "README.md").write_text(f"{card}\nEdited.\n")
    again = push("--format", "golf", "--message", "second")
    assert again.status == 0, again.err
    assert repository.commits == ["Push with hfgolf", "second"]
    assert repository.files == contents(exported)


def test_a_push_is_native_by_default_and_needs_no_trust(exported, hub, push, python):
    """The repository holds no code, its card loads as it says, and the run folder stays as it is."""
    before = contents(exported)
    (exported / "README.md").write_text(before["README.md"].decode().replace("It continues text", "It continues prose"))
    said = push()
    assert said.status == 0, said.err
    assert said.out.startswith(f"pushed to {hub.endpoint}/user/name as ApertusForCausalLM, its embedding's norm")
    files = hub.repositories["user/name"].files
    assert set(files) == {name for name in before if not name.endswith(".py")}
    assert hub.repositories["user/name"].commits == ["Push with hfgolf"]
    card = files["README.md"].decode()
    assert "trust_remote_code" not in card and card.count('from_pretrained("user/name")') == 2
    assert '["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]' in card and "continues prose" in card
    assert "\n\n\n" not in card and "## How good it is" in card
    example = card.split("```python\n")[1].split("```")[0]
    program = f"{example}\nprint(type(model).__name__, tokenizer('a').input_ids)"
    loaded = python("-I", "-c", program, endpoint=hub.endpoint)
    assert loaded.stdout == "ApertusForCausalLM [97]\n", loaded.stderr
    after = contents(exported)
    assert {name for name in before if before[name] != after[name]} == {"README.md"}


def test_a_model_without_a_native_form_is_pushed_as_golf(hub, tmp_path, tiny_config):
    folder = tmp_path / "runs" / "tiny" / "model"
    folder.parent.mkdir(parents=True)
    export_model(*build_tiny(logit_soft_cap=15.0), folder, card_of(tiny_config, SUMMARY))
    with pytest.raises(UserError, match=r"Apertus needs model\.overrides\.logit_soft_cap null"):
        push_model(folder, "user/name", private=False, message="m", format="native")
    assert not hub.repositories
    said = push_model(folder, "user/name", private=False, message="m")
    assert " as GolfForCausalLM: no architecture of transformers computes this model." in said and "\n" not in said
    assert hub.repositories["user/name"].files == contents(folder)


def test_a_native_folder_is_pushed_as_it_is_or_as_the_golf_model_that_it_was(exported, hub, tmp_path):
    native = tmp_path / "runs" / "native" / "model"
    convert_folder(str(exported), native, "native")
    assert push_model(native, "user/native", private=False, message="m") == f"{hub.endpoint}/user/native"
    assert hub.repositories["user/native"].files == contents(native)
    push_model(native, "user/golf", private=False, message="m", format="golf")
    files = hub.repositories["user/golf"].files
    for name, content in contents(exported).items():
        assert name == "README.md" or files[name] == content, name
    assert "trust_remote_code" in files["README.md"].decode()


@pytest.mark.slow
def test_accelerate_estimates_the_memory_of_a_pushed_model(exported, hub, python):
    push_model(exported, "user/native", private=False, message="m")
    push_model(exported, "user/golf", private=False, message="m", format="golf")
    estimate = ("-m", "accelerate.commands.accelerate_cli", "estimate-memory")
    for options in (["user/native"], ["user/golf", "--trust_remote_code"]):
        outcome = python(*estimate, *options, endpoint=hub.endpoint)
        assert f"Memory Usage for loading `{options[0]}`" in outcome.stdout, outcome.stderr


def test_private_is_sent_and_never_dropped_silently(exported, hub):
    push_model(exported, "user/secret", private=True, message="m")
    assert hub.repositories["user/secret"].private
    push_model(exported, "user/open", private=False, message="m")
    before = dict(hub.repositories["user/open"].files)
    (exported / "config.json").write_text("{}")
    with pytest.raises(UserError, match="user/open is already public"):
        push_model(exported, "user/open", private=True, message="m")
    assert hub.repositories["user/open"].files == before


@pytest.mark.parametrize(
    ("status", "path"), [(401, "create"), (403, "create"), (500, "create"), (403, "/storage/"), (403, "/commit/")]
)
def test_rejection_by_the_hub_is_one_line(exported, hub, status, path):
    hub.fail_with, hub.failing_path = status, path
    with pytest.raises(UserError, match=r"^cannot push to user/name: .*hf auth login") as caught:
        push_model(exported, "user/name", private=False, message="m")
    assert "\n" not in str(caught.value) and str(status) in str(caught.value)


def test_failed_push_in_a_run_is_a_warning(exported, hub, pushes_here, caplog):
    hub.fail_with = 500
    pusher = HubPusher("user/name", private=False, format="golf")
    with caplog.at_level(logging.INFO, logger="hfgolf"):
        pusher.push_now(exported, "step 6")
        pusher.push_now(exported.with_name("deleted"), "step 6")
        pusher.push_later(exported.with_name("deleted"), "step 6")
        hub.fail_with = None
        pusher.push_now(exported, "step 7")
    levels = [record.levelname for record in caplog.records]
    assert levels == [*["WARNING"] * 3, "INFO"], caplog.text
    assert all("No such file or directory" in message for message in caplog.messages[1:3])
    assert f"--run {exported.parent} --repo user/name" in caplog.messages[0]
    assert caplog.messages[2].endswith("The next push will try again."), "there is no such model in the run yet"
    assert hub.repositories["user/name"].commits == ["step 7"]


def test_the_command_that_repeats_a_push_works_as_printed_and_keeps_the_model_private(
    exported, hub, pushes_here, caplog, hfgolf
):
    folder = exported.parent.rename(exported.parent.with_name("a run"))
    hub.fail_with = 500
    HubPusher("user/secret", private=True, format="golf").push_now(folder / "model", "last")
    hub.fail_with = None
    command = caplog.messages[-1].partition("To try again: ")[2].removeprefix(f"{own_command()} push ")
    said = hfgolf("push", *shlex.split(command))
    assert said.status == 0, said.err
    assert hub.repositories["user/secret"].private


def test_pushes_never_overlap(exported, hub, pushes_here, caplog):
    """While it runs, the next push is skipped, a new export may replace the folder, and the last push waits for it."""
    before = contents(exported)
    hub.never_answers = True
    pusher = HubPusher("user/name", private=False, format="golf")
    with caplog.at_level(logging.INFO, logger="hfgolf"):
        pusher.push_later(exported, "first")
        assert not exported.exists()
        shutil.copytree(exported.with_name(".pushing-model"), exported)
        (exported / "config.json").write_text("{}")
        pusher.push_later(exported, "second")
        hub.released.set()
        pusher.push_now(exported, "last")
    repository = hub.repositories["user/name"]
    assert repository.commits == ["first", "last"], caplog.text
    assert repository.files["config.json"] == b"{}" != before["config.json"]
    assert list(exported.parent.iterdir()) == [exported]


@pytest.mark.slow
def test_silent_hub_times_out(exported, hub, monkeypatch, caplog):
    hub.never_answers = True
    monkeypatch.setattr(hub_module, "PUSH_TIMEOUT_SECONDS", 2)
    pusher = HubPusher("user/name", private=False, format="golf")
    pusher.push_now(exported, "step 6")
    again = f"To try again: {own_command()} push --run {exported.parent} --repo user/name --format golf"
    assert caplog.messages == [f"hub: not pushed: it did not finish within 2 s. {again}"]
    monkeypatch.setattr(hub_module, "RESPONSE_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"cannot push to user/name: .*timed? ?out"):
        push_model(exported, "user/name", private=False, message="m")


def test_only_exported_files_are_pushed(exported, hub, tmp_path, caplog):
    before = set(contents(exported))
    (exported / ".env").write_text("HF_TOKEN=secret")
    (exported / "notes.json").write_text("{}")
    for name in ("model-secret.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.bak"):
        (exported / name).write_bytes(b"of another model")
    (exported / "checkpoints").mkdir()
    push_model(exported, "user/name", private=False, message="m", format="golf")
    assert set(hub.repositories["user/name"].files) == before
    assert caplog.messages == [
        "hub: not pushed, because an export does not write it: '.env', 'checkpoints',"
        " 'model-00001-of-00002.safetensors', 'model-secret.safetensors', 'model.safetensors.bak', 'notes.json'"
    ]
    (tmp_path / "private").write_text("what nobody should read")
    (exported / "vocab.json").symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match=r"vocab.json is not a file that an export wrote, so nothing was pushed"):
        push_model(exported, "user/other", private=False, message="m")
    assert "user/other" not in hub.repositories


@pytest.mark.parametrize("name", ["README.md", "model.safetensors"])
def test_a_folder_without_card_or_weights_is_refused_before_anything_is_created(exported, hub, name):
    (exported / name).unlink()
    with pytest.raises(UserError, match=f"has no {name}, so nothing was pushed; export the model again"):
        push_model(exported, "user/name", private=False, message="m", format="golf")
    assert hub.repositories == {}


def test_a_branch_and_a_tag_load_by_their_names(exported, hub, hfgolf, tmp_path):
    """The branch holds only what was pushed to it, and its card says what it loads; main stays as it is."""
    assert hfgolf("push", exported.parent, "--repo", "user/name", "--format=golf").status == 0
    refused = hfgolf("push", "--run", exported.parent, "--repo", "./folder")
    assert refused.err == "error: --repo: './folder' names no repository; allowed: user/name.\n"
    main = dict(hub.repositories["user/name"].files)
    how = [exported, "--repo", "user/name", "--revision", "chck_1M", "--tag", "v1"]
    said = hfgolf("push", *how)
    assert said.out.startswith(f"pushed to {hub.endpoint}/user/name/tree/chck_1M as Apertus"), said.err
    repository = hub.repositories["user/name"]
    assert repository.files == main and repository.branches.keys() == {"chck_1M"}
    branch = repository.branches["chck_1M"]
    assert branch.files.keys() == {name for name in main if not name.endswith(".py")}
    assert repository.tags == {"v1": branch.sha}
    assert branch.files["README.md"].decode().count('from_pretrained("user/name", revision="chck_1M")') == 2
    for name in ("chck_1M", "v1"):
        loaded = AutoModelForCausalLM.from_pretrained("user/name", revision=name, cache_dir=tmp_path / name)
        assert type(loaded).__name__ == "ApertusForCausalLM"

    again = hfgolf("push", *how)
    assert (again.status, len(branch.commits)) == (2, 1)
    assert again.err == "error: --tag: user/name already has the tag v1, so nothing was pushed; use another name.\n"
    for where in (["--model", exported.parent], ["--run", exported]):
        nowhere = hfgolf("push", *where, "--repo", "user/name")
        assert nowhere.status == 2 and nowhere.err.startswith(f"error: {where[0]}: there is no exported model in")
    set_location(exported / "README.md", "user/other")
    card = (exported / "README.md").read_text()
    assert card.count('from_pretrained("user/other"') == 2 and "revision=" not in card


def test_a_gguf_file_has_a_repository_whose_card_names_the_model(hub, hfgolf, tmp_path):
    file = tmp_path / "small-q8_0.gguf"
    file.write_bytes(b"GGUF and the rest")
    how = ["--model", file, "--repo", "user/small-gguf", "--base_model", "user/small"]
    said = hfgolf("push", *how)
    assert (said.status, said.out) == (0, f"pushed to {hub.endpoint}/user/small-gguf\n"), said.err
    files = hub.repositories["user/small-gguf"].files
    assert files.keys() == {"README.md", file.name} and files[file.name] == file.read_bytes()
    card = ModelCard(files["README.md"].decode())
    card.validate()
    assert (card.data.get("base_model"), card.data.get("base_model_relation")) == ("user/small", "quantized")
    assert f"hf download user/small-gguf {file.name}" in card.text
    assert "base_model" not in gguf_card(file.name, "user/small-gguf", None)
    file.write_bytes(b"text")
    assert "is not a GGUF file" in hfgolf("push", *how).err
    assert "--format: only a folder has it" in hfgolf("push", *how, "--format", "native").err
    refused = hfgolf("push", "--model", tmp_path, *how[2:])
    assert refused.status == 2 and refused.err.startswith("error: --base_model: only a GGUF file has it;")


def test_the_hub_accepts_every_card(exported, hub, tiny_config):
    """Also of a model that began with another one, and with results of tasks; the client writes the same metadata."""
    origin = {"init_from": {"name": "user/small", "revision": "1f2e", "sha256": "0123456789abcdef" * 4}}
    (exported / "README.md").write_text(
        card_of(tiny_config.replace(hub__license="mit", hub__language=["en"]), SUMMARY | origin)
    )
    assert add_task_results(exported / "README.md", {"some_task": {"acc": 0.5}}, {"some_task": 5}, "lm-eval 0.4.13")
    card = ModelCard.load(exported / "README.md")
    card.validate()
    data = card.data.to_dict()
    assert data["base_model_relation"] == "finetune" and ModelCardData(**data).to_dict() == data
    card.data.base_model_relation = "cousin"
    with pytest.raises(ValueError, match="base_model_relation"):
        card.validate()


def test_results_on_benchmarks_are_pushed_with_a_model_in_any_form(exported, hub, caplog):
    results = exported / ".eval_results"
    results.mkdir()
    entry = EvalResultEntry(dataset_id="openai/gsm8k", task_id="gsm8k", value=0.25, notes="5-shot")
    text = yaml.safe_dump(eval_result_entries_to_yaml([entry]))
    (results / "gsm8k.yaml").write_text(text)
    (results / "notes.txt").write_text("mine")
    for form in ("golf", "native"):
        push_model(exported, f"user/{form}", private=False, message="m", format=form)
        files = hub.repositories[f"user/{form}"].files
        assert {name for name in files if "/" in name} == {".eval_results/gsm8k.yaml"}
        assert parse_eval_result_entries(yaml.safe_load(files[".eval_results/gsm8k.yaml"])) == [entry]
    assert not caplog.messages
    shutil.move(results, exported.with_name("elsewhere"))
    results.symlink_to(exported.with_name("elsewhere"))
    with pytest.raises(UserError, match="is not a file that an export wrote"):
        push_model(exported, "user/other", private=False, message="m")


def test_pushes_to_branches_wait_for_each_other_and_none_is_skipped(exported, hub, pushes_here, caplog):
    hub.never_answers = True
    pusher = HubPusher("user/name", private=False, format="golf")
    with caplog.at_level(logging.INFO, logger="hfgolf"):
        for name in ("chck_1M", "chck_2M"):
            pusher.push_branch(Path(shutil.copytree(exported, exported.with_name(name))), name)
        hub.released.set()
        pusher.push_now(exported, "last")
    repository = hub.repositories["user/name"]
    assert repository.commits == ["last"] and pusher.pushed == {"chck_1M", "chck_2M"}, caplog.text
    assert [repository.branches[name].commits for name in ("chck_1M", "chck_2M")] == [["chck_1M"], ["chck_2M"]]
    hub.fail_with = 500
    pusher.push_branch(exported.with_name("chck_2M"), "again")
    assert pusher._running is not None
    pusher._running.join()
    assert f"push --model {exported.with_name('chck_2M')} --revision chck_2M --repo user/name" in caplog.text


def test_a_model_that_changed_since_its_run_is_not_pushed(hfgolf, tmp_path):
    """The card has the scores of the weights that the run ended with."""
    weights = tmp_path / "tiny" / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"trained")
    (weights.parent / "config.json").write_text("{}")
    files = list_files(weights.parent, [weights])
    (tmp_path / "tiny" / "summary.json").write_text(json.dumps({"val_loss": 1.0, "weights": "raw", "files": files}))
    weights.write_bytes(b"others!")
    said = hfgolf("push", "--run", tmp_path / "tiny", "--repo", "user/name")
    assert (said.status, said.out) == (2, "")
    assert said.err == (
        "error: --run: model/model.safetensors does not match its sha256, so the card says nothing of these files;"
        " restore them.\n"
    )


def test_parts_of_weights_are_pushed_as_the_index_names_them(tmp_path):
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    places = {"a": parts[0], "b": parts[1], "c": "../model-00001-of-00001.safetensors", "d": "model-secret.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    for name in (*parts, "model-secret.safetensors", "model-00003-of-00003.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in hub_module.exported_files(tmp_path)] == [*parts, index.name]
    (tmp_path / parts[1]).unlink()
    with pytest.raises(UserError, match=rf"lacks its weights {parts[1]}, so nothing was pushed"):
        hub_module.exported_files(tmp_path)
    for damaged in ('{"weight_map": 3}', '{"weight_map": {"a": 5}}'):
        index.write_text(damaged)
        with pytest.raises(UserError, match=r"index.json is damaged, so nothing was pushed"):
            hub_module.exported_files(tmp_path)


@pytest.mark.slow
def test_run_pushes_during_training_and_at_the_end(tiny_run, hub, run_script, tmp_path):
    options = {"hub.push": "true", "hub.repo_id": "user/trained", "hub.every_steps": 3}
    status, said, error = run_script("train.py", *tiny_run(**options))
    assert status == 0 and TOKEN not in said + error, said + error
    repository = hub.repositories["user/trained"]
    assert repository.commits[0] == "step 3" and "validation loss" in repository.commits[-1]
    exported = contents(tmp_path / "runs" / "tiny" / "model")
    assert set(repository.files) == {name for name in exported if not name.endswith(".py")}, "native by default"
    assert json.loads(repository.files["config.json"])["model_type"] == "apertus"
    assert repository.files["tokenizer.json"] == exported["tokenizer.json"]


@pytest.mark.slow
def test_a_run_pushes_milestones_to_branches_also_what_an_earlier_session_did_not(
    tiny_run, hub, pushes_here, run_script, tmp_path
):
    options = {"hub.push": "true", "hub.repo_id": "user/trained", "train.milestones": "[0.5k, 1k]"}
    hub.failing_path, hub.fail_with = "/branch/", 500
    assert run_script("train.py", *tiny_run(**options, train__max_steps=3)).status == 0
    assert not hub.repositories["user/trained"].branches
    hub.fail_with = None
    more = {"train.resume": "latest", "train.max_steps": 5}
    assert run_script("train.py", *tiny_run(**options, **more)).status == 0
    repository = hub.repositories["user/trained"]
    assert {name: branch.commits for name, branch in repository.branches.items()} == {
        "chck_0.5k_tokens": ["chck_0.5k_tokens, exported before"],
        "chck_1k_tokens": ["chck_1k_tokens: step 4, 1,024 tokens"],
    }
    folders = tmp_path / "runs" / "tiny" / "milestones"
    for name, branch in repository.branches.items():
        assert branch.files == contents(folders / name)
        assert f'revision="{name}")' in branch.files["README.md"].decode()
    again = {"train.resume": "latest", "train.max_steps": 6}
    assert run_script("train.py", *tiny_run(**options, **again)).status == 0
    assert [len(branch.commits) for branch in repository.branches.values()] == [1, 1], "once each"
