"""A run that starts from weights: it begins exactly with them, refuses what they are not, and needs them only once."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from faults import assert_same_course, before_step, same, train_on_two
from hub_server import Repository, serving_here
from safetensors.torch import load_file, save_file
from tiny_export import build_tiny
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer

from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.config.sections import RunConfig
from hfgolf.data import tokenizer as tokenizer_module
from hfgolf.data.token_cache import load_tokens
from hfgolf.evaluate.loss import evaluate_loss
from hfgolf.evaluate.sample import text_ids
from hfgolf.golf.source import run_source
from hfgolf.publish.export import export_model
from hfgolf.publish.load import load_exported
from hfgolf.publish.native import to_native
from hfgolf.run.metrics import read_metrics, read_rows
from hfgolf.system.errors import UserError
from hfgolf.train import init_from, loop, setup, validation
from hfgolf.train.init_from import take_architecture, weights_sha256
from hfgolf.train.run import Run
from hfgolf.train.validation import evaluate

NATIVE: dict[str, dict[str, Any]] = {  # tests/publish/test_native.py converts all of them
    "Llama": {"activation": "swiglu", "qk_norm": False, "intermediate_size": 48},
    "GPT2": {"norm": "layernorm", "qk_norm": False, "activation": "gelu_new", "embedding_norm": False}
    | {"position_embedding": "learned"},
}
SHAPE = ("model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads", "tokenizer.kind")


@pytest.fixture
def exported(tmp_path) -> Callable[..., Path]:
    """Return a function that writes a tiny model with these options, as Golf or native."""

    def write(name: str = "weights", native: bool = False, **options: Any) -> Path:
        model, tokenizer = build_tiny(**options)
        export_model(to_native(model) if native else model, tokenizer, tmp_path / name, "")
        return tmp_path / name

    return write


@pytest.fixture
def from_weights(tiny_run) -> Callable[..., list[str]]:
    """Return the command line of the tiny run without a shape or a tokenizer, which those of the weights replace."""

    def arguments(weights: object, **options: Any) -> list[str]:
        stated = [
            option for option in tiny_run(**options) if not option.startswith(tuple(f"--{key}=" for key in SHAPE))
        ]
        return [*stated, f"--model.init_from={weights}"]

    return arguments


@pytest.fixture
def build(from_weights, reset_accelerate) -> Callable[..., Run]:
    """Return a function that sets up a run from weights, like a new process."""

    def build_(weights: object, **options: Any) -> Run:
        reset_accelerate()
        return setup.set_up(load_config(from_weights(weights, **options)))

    return build_


def resolve(*options: str) -> ResolvedConfig:
    return take_architecture(load_config([*options, "--train.max_steps=1"]))


def taken(*options: str) -> RunConfig:
    return resolve(*options).config


def test_the_weights_decide_the_architecture_and_the_run_its_dropout(exported):
    weights = exported(hidden_size=24, num_key_value_heads=1, dropout=0.5, rope_theta=77.0, norm_eps=1e-4)
    resolved = resolve(f"--model.init_from={weights}", "--model.attention_dropout=0.25")
    model = resolved.config.model
    assert (model.hidden_size, model.num_key_value_heads, model.intermediate_size) == (24, 1, 96)
    assert (model.max_position_embeddings, model.vocab_size) == (32, 257)
    assert model.overrides == {"rope_theta": 77.0, "norm_eps": 1e-4}
    assert (model.dropout, model.attention_dropout) == (0.0, 0.25)
    assert resolved.config.tokenizer.kind == "pretrained" and resolved.config.tokenizer.name_or_path == str(weights)
    assert resolved.sources["model.hidden_size"] == resolved.sources["tokenizer.kind"] == "model.init_from"
    assert "  hidden_size: 24  # model.init_from\n" in resolved.to_yaml()


def test_a_head_of_its_own_that_the_config_ties_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=31, n_embd=8, n_layer=1, n_head=1)
    original, model = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    original.lm_head.weight = torch.nn.Parameter(torch.ones(31, 8))
    with pytest.raises(UserError, match=r"the weights have a \S+ of its own, which their config.json ties"):
        init_from._load_other(original, model)


@pytest.mark.parametrize("native", ["Llama", "GPT2"])
def test_text_and_weights_are_enough(exported, tmp_path, native):
    weights = exported(native=True, hidden_size=24, **NATIVE[native])
    resolved = resolve(str(tmp_path / "my.txt"), f"--model.init_from={weights}")
    config, finetune = resolved.config, load_config("finetune").config
    assert (config.model.hidden_size, config.tokenizer.name_or_path) == (24, str(weights))
    assert (config.optim, config.schedule) == (finetune.optim, finetune.schedule)
    assert config.batch.sequence_length == (32 if native == "GPT2" else 256)  # its positions are learned
    assert config.data.files == [str(tmp_path / "my.txt")] and not config.data.old_text
    kind = f"--model.architecture={native.lower()}"
    as_it_is = resolve(str(tmp_path / "my.txt"), f"--model.init_from={weights}", kind).config
    assert as_it_is.batch.sequence_length == 32
    with pytest.raises(UserError, match=r"than this config: model.num_hidden_layers 1 \(the weights: 2\); leave"):
        resolve(str(tmp_path / "my.txt"), f"--model.init_from={weights}", "--model.num_hidden_layers=1")


def test_a_stated_shape_that_agrees_is_accepted(exported, tmp_path):
    weights = exported(loop=[0, 1, 2], exclude_self_value=2)
    stated = "{init_from: %s, hidden_size: 32, intermediate_size: null, num_key_value_heads: null, "
    stated = (
        stated % weights
        + "num_hidden_layers: 2, num_attention_heads: 2, overrides: {loop: [0, 1, 2], exclude_self_value: all}}"
    )
    (tmp_path / "config.yaml").write_text(f"model: {stated}")
    assert taken(f"--config={tmp_path / 'config.yaml'}").model.overrides == {"loop": [0, 1, 2], "exclude_self_value": 2}
    replay = resolve(f"--config={tmp_path / 'config.yaml'}")
    (tmp_path / "replay.yaml").write_text(replay.to_yaml())
    again = taken(f"--config={tmp_path / 'replay.yaml'}")
    assert again.model == replay.config.model and again.tokenizer == replay.config.tokenizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.hidden_size=64"], r"architecture .*: model.hidden_size 64 \(the weights: 32\); leave"),
        (
            ["--model.norm=layernorm", "--model.num_attention_heads=4"],
            r"heads 4 \(.* 2\), model.norm layernorm \(.*rms",
        ),
        (["--model.activation=silu"], r"model.activation silu \(the weights: relu2\)"),
        (
            ["--model.num_hidden_layers=1", "--model.vocab_size=300"],
            r"layers 1 \(.* 2\), model.vocab_size 300 \(.* 257",
        ),
        (["--tokenizer.kind=char"], r"tokenizer.kind: char would train a tokenizer .*tokenizer.name_or_path /"),
        (["--tokenizer.vocab_size=500"], r"^tokenizer.vocab_size: 500 is not the 257 entries of .*; leave it out"),
        (["--tokenizer.vocab_size=257"], None),
        (["--batch.sequence_length=64"], None),  # rotary positions have no end
    ],
    ids=str,
)
def test_what_the_weights_are_not_is_refused_with_the_difference(exported, options, message):
    arguments = [f"--model.init_from={exported()}", *options]
    if message is None:
        assert taken(*arguments).model.hidden_size == 32
        return
    with pytest.raises(UserError, match=message):
        taken(*arguments)


def test_learned_positions_limit_the_sequences(exported):
    weights = f"--model.init_from={exported(**NATIVE['GPT2'])}"
    assert taken(weights, "--batch.sequence_length=32").max_positions == 32
    assert taken(weights, "--batch.sequence_length=16").max_positions == 32  # the table keeps its rows
    # as in the config.yaml of a run from random weights, which states every key
    nulls = ["--model.max_position_embeddings=null", "--model.vocab_size=null", "--batch.sequence_length=16"]
    model = taken(weights, *nulls).model
    assert (model.max_position_embeddings, model.vocab_size) == (32, 257)
    with pytest.raises(UserError, match=r"batch.sequence_length: 64 is longer than the 32 positions of the weights"):
        taken(weights, "--batch.sequence_length=64")


def test_errors_name_what_was_written(exported, from_weights, tmp_path, reset_accelerate):
    """Of weights without a tokenizer, with half of one, and of a text shorter than a sequence that nobody asked for."""
    weights, short = exported(**NATIVE["GPT2"]), tmp_path / "short.txt"
    short.write_text("To be or not to be")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(weights / name, bare)
    cut = shutil.copytree(weights, tmp_path / "cut")
    (cut / "tokenizer.json").write_bytes((weights / "tokenizer.json").read_bytes()[:200])
    for source, options, message in (
        (bare, {}, r"model\.init_from: '.*bare' has no tokenizer"),
        (cut, {}, r"model\.init_from: .*cut"),
        (
            weights,
            {"data__files": short},
            r"data: the training text has \d+ tokens, .* or set batch.sequence_length 16 or",
        ),
    ):
        reset_accelerate()
        with pytest.raises(UserError, match=message) as error:
            setup.set_up(load_config(from_weights(source, **options)))
        assert "tokenizer.name_or_path" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "fields", "advice"),
    [
        ("mistral", {}, "architecture mistral"),
        ("vit", {}, "vit is no causal"),
        ("bert", {}, "bert is no causal"),
        ("bert", {"is_decoder": True}, "architecture bert"),
    ],
)
def test_only_a_language_model_is_said_to_train_as_it_is(tmp_path, kind, fields, advice):
    AutoConfig.for_model(kind, **fields).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=advice):
        taken(f"--model.init_from={tmp_path}")


def test_another_vocabulary_is_refused_and_the_same_accepted(exported, tmp_path):
    weights = exported()
    assert taken(f"--model.init_from={weights}", "--tokenizer.kind=byte").tokenizer.kind == "byte"
    copy = shutil.copytree(weights, tmp_path / "copy")
    stated = ["--tokenizer.kind=pretrained", f"--tokenizer.name_or_path={copy}"]
    assert taken(f"--model.init_from={weights}", *stated).tokenizer.name_or_path == str(copy)
    rules = json.loads((copy / "tokenizer.json").read_text())
    vocab = rules["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (copy / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(UserError, match=r"257 entries here, 257 there, 2 differ; 'a' has id 98 here and 97 there"):
        taken(f"--model.init_from={weights}", *stated)


def test_names_that_hold_no_weights_are_one_line(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # "runs here" names those of the working folder
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^model.init_from: there is no model in .*empty; runs here: none\.$"):
        taken(f"--model.init_from={tmp_path / 'empty'}")
    with pytest.raises(UserError, match=r"^model.init_from: cannot load nobody/nothing: "):
        taken("--model.init_from=nobody/nothing")
    weights = exported()
    (weights / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"^model.init_from: .*config.json is not a JSON object"):
        taken(f"--model.init_from={weights}")
    (weights / "config.json").write_text('{"model_type": "opt"}')
    with pytest.raises(UserError, match=r"^model.init_from: OPTConfig cannot .* Apertus,.* model.architecture opt\.$"):
        taken(f"--model.init_from={weights}")


def test_a_run_begins_with_the_loss_of_the_weights(build, exported, caplog):
    caplog.set_level(logging.INFO, "hfgolf")
    weights = exported(rope_theta=50.0, norm_eps=1e-3, num_key_value_heads=1)
    run = build(weights, optim__ema_decay=0.9)
    model, _ = load_exported(str(weights))
    options: dict[str, Any] = {"sequence_length": 32, "batch_size": 4}
    expected = evaluate_loss(model.to(run.accelerator.device), run.tokens.val, run.accelerator, **options)
    assert evaluate(run).loss == pytest.approx(expected.loss, rel=1e-6)
    with run.ema.applied():
        assert evaluate(run).loss == pytest.approx(expected.loss, rel=1e-6)
    assert run.state.step == 0 and run.init_from["sha256"] == weights_sha256(model)
    assert f"weights: {weights} (GolfForCausalLM, as it was), sha256 {weights_sha256(model)[:16]}" in caplog.text
    metadata = json.loads(run.folder.metadata.read_text())
    assert metadata["init_from"] == {"name": str(weights), "revision": None, "sha256": weights_sha256(model)}


def test_the_vocabulary_may_be_smaller_than_the_embedding(build, exported):
    """As in many models on the Hub, whose embeddings are padded to a multiple of 64."""
    model, tokenizer = build_tiny()
    model.resize_token_embeddings(320)
    weights = exported("padded")
    export_model(model, tokenizer, weights, "")
    run = build(weights)
    assert run.raw_model.config.vocab_size == 320 == len(run.raw_model.get_input_embeddings().weight)
    assert torch.equal(run.raw_model.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_an_embedding_smaller_than_the_vocabulary_is_one_line(build, exported):
    model, tokenizer = build_tiny()
    model.config.bos_token_id = model.config.eos_token_id = model.config.pad_token_id = 0
    model.resize_token_embeddings(100)
    weights = exported("small")
    export_model(model, tokenizer, weights, "")
    with pytest.raises(UserError, match=r"model.init_from: .*: an embedding with 100 rows is too small .* 257 entries"):
        build(weights)


def test_a_native_model_that_was_trained_since_starts_as_what_it_is_now(run, copied_run, from_weights):
    weights = copied_run(train__max_steps=1) / "model"
    tensors = load_file(weights / "model.safetensors")
    tensors["model.embed_tokens.weight"] += 0.01
    save_file(tensors, weights / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"trained since hfgolf exported them, .*; remove that entry\.$"):
        run(from_weights(weights, run__name="more", train__max_steps=1))
    config = json.loads((weights / "config.json").read_text())
    assert config.pop("golf") == {"embedding_norm": True, "tie_word_embeddings": True, "pad_token_id": 256}
    (weights / "config.json").write_text(json.dumps(config))
    run(from_weights(weights, run__name="more", train__max_steps=1))


@pytest.mark.slow
def test_a_run_its_model_and_its_checkpoint_are_weights(run, tiny_run, from_weights):
    before = run(tiny_run(run__name="before", train__max_steps=3))
    run_first = run(from_weights(before, run__name="a", train__max_steps=1))
    run_second = run(from_weights(before / "checkpoints" / "step-000003", run__name="b", train__max_steps=1))
    assert same(*(load_file(folder / "model" / "model.safetensors") for folder in (run_first, run_second)))
    shutil.rmtree(before / "model")
    with pytest.raises(UserError, match=r"no exported model in .*before; name its checkpoint .*step-000003"):
        taken(f"--model.init_from={before}")


@pytest.mark.parametrize("repeats", ["--config={}/config.yaml", "--distill_from={}"])
def test_a_config_whose_sizes_are_null_resumes_from_weights(hfgolf, shared_run, tmp_path, monkeypatch, repeats):
    before = shared_run()
    assert "  vocab_size: null" in (before / "config.yaml").read_text()
    command = ["train", repeats.format(before), f"--model.init_from={before}", f"--run.output_dir={tmp_path}"]
    command.append("--run.name=next")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", before_step({3: lambda run: signal.raise_signal(signal.SIGTERM)}))
        assert hfgolf(*command).status == 128 + signal.SIGTERM
    assert "holds an unfinished run; continue it with --train.resume auto" in hfgolf(*command).err
    resumed = hfgolf(*command, "--train.resume=auto")
    assert resumed.status == 0, resumed.err


@pytest.mark.slow
def test_a_resume_is_exact_without_the_weights_it_started_from(run, from_weights, exported, monkeypatch):
    weights = exported()
    options = {"schedule__name": "constant", "model__dropout": 0.1, "optim__ema_decay": 0.9}
    straight = run(from_weights(weights, run__name="straight", **options))
    run(from_weights(weights, run__name="parts", train__max_steps=3, **options))
    shutil.rmtree(weights)
    monkeypatch.setattr(init_from, "load_model_config", lambda *arguments: pytest.fail("it read the weights again"))
    parts = run(from_weights(weights, run__name="parts", train__resume="latest", **options))
    for name in ("model.safetensors", "ema.safetensors"):
        assert same(*(load_file(folder / "checkpoints" / "latest" / name) for folder in (straight, parts)))
    for name in ("metadata.json", "checkpoints/latest/run.json"):
        one, other = (json.loads((folder / name).read_text())["init_from"] for folder in (straight, parts))
        assert one == other and one["name"] == str(weights)
    assert len(run_source(parts).tokens.val) > 0  # nor does a golf export need them
    with pytest.raises(UserError, match=r"does not fit this config \(model.init_from .*weights -> elsewhere\)"):
        run(from_weights("elsewhere", run__name="parts", train__resume="latest", **options))
    with pytest.raises(UserError, match=r"model.dropout 0.1 -> 0.0"):  # what the weights do not decide is compared
        run(
            from_weights(
                weights, run__name="parts", train__resume="auto", schedule__name="constant", train__max_steps=9
            )
        )


@pytest.mark.slow
def test_a_name_on_the_hub_is_weights(build, exported, monkeypatch, tmp_path):
    weights = exported(native=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cached"))
    with serving_here(monkeypatch) as hub:
        files = {path.name: path.read_bytes() for path in weights.iterdir()}
        hub.repositories["user/name"] = Repository(files=files, commits=["first"])
        run = build("user/name")
        assert run.init_from["name"] == "user/name" and run.init_from["revision"] == hub.repositories["user/name"].sha
    assert run.init_from["sha256"] == build(weights, run__name="other").init_from["sha256"]


@pytest.mark.slow
def test_the_old_text_is_watched_and_changes_nothing_else(run, tiny_run, from_weights, tmp_path):
    """Trackers get its losses, too, and the evaluation before the first step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    before = run(tiny_run(run__name="before"))
    other = tmp_path / "other.txt"
    other.write_text("Quite another text. " * 200)
    new = {"data__files": other, "data__split": "contiguous", "optim__ema_decay": 0.9, "optim__ema_export": "true"}
    without = run(from_weights(before, run__name="without", **new))
    options = new | {"data__old_text": before, "track__trackers": "[tensorboard]"}
    watched = run(from_weights(before, run__name="watched", **options))
    old_loss = json.loads((before / "summary.json").read_text())["val_loss"]
    events = read_metrics(watched / "metrics.jsonl").events
    start = next(event for event in events if event["event"] == "init_from")
    assert start["step"] == 0
    assert start["old_val_loss"] == pytest.approx(old_loss, rel=1e-6)  # the run's own text, with its own weights
    rows = read_rows(watched / "metrics.jsonl")
    evaluated = [row for row in rows if row["val_loss"] is not None]
    assert len({start["old_val_loss"], *(row["old_val_loss"] for row in evaluated)}) == 1 + len(evaluated)
    assert [row for row in rows if "old_val_loss" in row] == evaluated
    assert (watched / "model" / "model.safetensors").read_bytes() == (without / "model/model.safetensors").read_bytes()
    for name in ("train_losses", "val_loss"):
        assert [row.get(name) for row in rows] == [row.get(name) for row in read_rows(without / "metrics.jsonl")]
    summary = json.loads((watched / "summary.json").read_text())
    assert summary["old_val_loss"] == evaluated[-1]["old_val_loss"] and summary["val_loss"] < start["val_loss"]
    assert summary["init_from"]["val_loss"] == start["val_loss"] and summary["init_from"]["name"] == str(before)
    report = (watched / "report.html").read_text()
    change = summary["old_val_bits_per_byte"] - start["old_val_bits_per_byte"]
    assert f"<dt>change of the old text since step 0</dt><dd>{change:+.4f}</dd>" in report
    assert f"<dt>bits per byte before the first step</dt><dd>{start['val_bits_per_byte']:.4f}</dd>" in report
    assert "chart-old_bits_per_byte" in report
    assert "trained from the weights of before (sha256 " in (watched / "model" / "README.md").read_text()
    written = EventAccumulator(str(next(watched.rglob("events.out.tfevents*")).parent))
    written.Reload()
    for column, name in {"val_loss": "val/loss", "old_val_loss": "val/old_loss"}.items():
        found = {event.step: event.value for event in written.Scalars(name)}
        assert found == pytest.approx({row["step"]: row[column] for row in (start, *evaluated)}, rel=1e-6)


@pytest.mark.parametrize("limit", [{}, {"train__patience_evals": 1}, {"train__max_minutes": 5}])
def test_the_evaluations_before_the_first_step_and_after_the_last_read_the_same(
    run, from_weights, exported, corpus_file, tmp_path, monkeypatch, limit
):
    """Of 60,000 tokens in pieces of 8,200: 5 % of the compute as planned, or train.eval_tokens if minutes limit it."""
    worse = iter(range(1, 99))
    monkeypatch.setattr(validation.Evaluation, "loss", property(lambda self: float(next(worse))))
    (tmp_path / "val.txt").write_bytes((2 * corpus_file.read_bytes())[:60_000])
    options = {"data__val_files": f"[{tmp_path / 'val.txt'}]", "train__eval_tokens": 9000, "train__eval_every_steps": 1}
    options |= {"batch__tokens_per_step": 32_768, "train__max_steps": 4}
    folder = run(from_weights(exported(), **options, **limit))
    summary = json.loads((folder / "summary.json").read_text())
    start = summary["init_from"]
    assert start["val_tokens"] == summary["val_tokens"] and start["val_bytes"] == summary["val_bytes"]
    assert (summary["val_tokens"] > 9000) == ("train__max_minutes" not in limit)
    assert summary["steps"] == (2 if "train__patience_evals" in limit else 4)


@pytest.mark.slow
def test_a_stop_before_the_first_step_starts_over(run, from_weights, exported, monkeypatch):
    real, weights = validation.evaluate_loss, exported()

    def evaluate_loss(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(validation, "evaluate_loss", real)
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(validation, "evaluate_loss", evaluate_loss)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run(from_weights(weights, train__resume="auto"))
    folder = run(from_weights(weights, train__resume="auto"))
    events = [event["event"] for event in read_metrics(folder / "metrics.jsonl").events]
    assert events.count("init_from") == 1 and events[0] == "stopped"
    assert json.loads((folder / "summary.json").read_text())["init_from"]["val_tokens"] > 0


def test_scripts_before_a_run_read_no_weights(exported, from_weights, hfgolf):
    weights = exported(hidden_size=24)
    (weights / "model.safetensors").unlink()
    arguments = from_weights(weights)
    prepared = hfgolf("prepare", *arguments)
    assert prepared.status == 0, prepared.err
    plan = hfgolf("plan", *arguments, "--json")
    assert plan.status == 0, plan.err
    model, _ = build_tiny(hidden_size=24)
    assert sum(json.loads(plan.out)["parameters"].values()) == model.num_parameters()
    assert json.loads(plan.out)["data"]["vocabulary"] == 257


@pytest.mark.slow
def test_old_text_in_files_is_tokenized_once(build, exported, corpus_file, caplog):
    caplog.set_level(logging.DEBUG, "hfgolf")
    weights = exported()
    run = build(weights, run__name="a", data__old_text=corpus_file)
    assert run.old_text is not None and run.old_text.num_bytes == corpus_file.stat().st_size
    caplog.clear()
    build(weights, run__name="b", data__old_text=corpus_file)
    assert caplog.text.count("cache hit") == 2 and "tokenizing" not in caplog.text
    with pytest.raises(UserError, match=r"^data.old_text: no file matches 'nothing.txt'"):
        build(weights, run__name="c", data__old_text="nothing.txt")


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_train_as_one_from_weights_of_another_architecture(run, from_weights, exported, tmp_path):
    weights = exported(native=True, **NATIVE["Llama"])
    options = {"model__architecture": "llama", "batch__micro_batch_size": 4}
    options |= {"optim__name": "adamw", "optim__learning_rate": 0.003}
    one = run(from_weights(weights, run__name="one", **options))
    train_on_two(from_weights(weights, run__name="two", **options), tmp_path / "output")
    assert "2 processes" in (tmp_path / "output").read_text()
    assert_same_course(one.with_name("two"), one, of_norms=1e-4)


@pytest.fixture
def weights_with_bos(tmp_path) -> Path:
    """Return the folder of a tiny Llama whose tokenizer puts <s> in front of a text."""
    model, tokenizer = build_tiny(**NATIVE["Llama"] | {"vocab_size": 258})
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    export_model(to_native(model), tokenizer, tmp_path / "weights", "")
    return tmp_path / "weights"


def test_documents_begin_as_the_weights_know_them(weights_with_bos, from_weights, run, tmp_path):
    for name, text in (("train", "One text. " * 200), ("val", "Another.")):
        (tmp_path / f"{name}.txt").write_text(text)
    files = {"data__files": tmp_path / "train.txt", "data__val_files": tmp_path / "val.txt", "train__max_steps": 2}
    folder = run(from_weights(weights_with_bos, **files))
    model, tokenizer = load_exported(str(folder / "model"))
    assert (model.config.bos_token_id, model.config.eos_token_id) == (257, 256)
    assert model.generation_config.bos_token_id == 257
    assert tokenizer("ab")["input_ids"] == text_ids(tokenizer, "ab") == [257, 97, 98]
    config = load_config([f"--config={folder / 'config.yaml'}"]).config
    assert load_tokens(config.data, config.tokenizer).val.tokens.tolist() == [256, 257, *b"Another."]


@pytest.mark.parametrize("is_old", [True, False])
def test_a_run_from_weights_with_bos_resumes_with_its_tokens(weights_with_bos, from_weights, run, monkeypatch, is_old):
    constant = {"schedule__name": "constant"}
    with monkeypatch.context() as patch:
        if is_old:  # older versions did not look for <s>
            patch.setattr(tokenizer_module, "added_around", lambda _: ([], []))
        straight = read_rows(run(from_weights(weights_with_bos, run__name="straight", **constant)) / "metrics.jsonl")
        run(from_weights(weights_with_bos, **constant, train__max_steps=3))
    folder = run(from_weights(weights_with_bos, **constant, train__resume="latest"))
    resumed = read_rows(folder / "metrics.jsonl")
    for column in ("step", "train_losses", "sample_hashes", "val_loss"):
        assert [row.get(column) for row in resumed] == [row.get(column) for row in straight], column
    assert load_exported(str(folder / "model"))[0].config.bos_token_id == (256 if is_old else 257)


def test_a_stated_tokenizer_that_begins_documents_differently_is_refused(weights_with_bos, tmp_path):
    other = AutoTokenizer.from_pretrained(weights_with_bos)
    other.backend_tokenizer.post_processor = None
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"begins documents differently from .* \(ids 256 here, 256 257 there\)"):
        taken(
            f"--model.init_from={weights_with_bos}",
            "--tokenizer.kind=pretrained",
            f"--tokenizer.name_or_path={tmp_path / 'other'}",
        )
