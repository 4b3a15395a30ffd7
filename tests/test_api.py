"""hfgolf.fit: from Python to a run, several times in one process, with objects of one's own."""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import shutil
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

import hfgolf
from hfgolf import api
from hfgolf.checkpoint.store import newest_first, verify
from hfgolf.config.parse import ResolvedConfig
from hfgolf.config.sections import TokenizerSection
from hfgolf.data.tokenizer import find_tokenizer
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.run.metrics import read_rows
from hfgolf.train import setup

TEXT = "To be, or not to be, that is the question: whether it is nobler in the mind to suffer. "
TINY: dict[str, Any] = {
    "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "batch": {"sequence_length": 32, "tokens_per_step": 128},
    "train": {
        **{"eval_every_steps": 2, "log_every_steps": 1, "compile": False, "mixed_precision": "no"},
        **{"cpu_threads": 1, "sample_tokens": 8},
    },
}


@pytest.fixture
def folder(tmp_path, monkeypatch, reset_accelerate):
    """A folder with my.txt, in which this process works, with a cache of its own."""
    reset_accelerate()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "my.txt").write_text(TEXT * 200)
    return tmp_path


@pytest.fixture
def resolved(monkeypatch) -> list[ResolvedConfig]:
    """What fit would train, instead of training it."""
    taken: list[ResolvedConfig] = []

    def take(resolved: ResolvedConfig, **_: Any) -> dict[str, Any]:
        taken.append(resolved)
        return {"model": "runs/my/model"}

    monkeypatch.setattr(api, "train_once", take)
    return taken


def fit(*arguments: Any, **options: Any) -> hfgolf.TrainedRun:
    sections = {name: TINY[name] | options.pop(name, {}) for name in ("batch", "train")}
    options = {"model": TINY["model"], "max_steps": 4} | options
    data = options.pop("data", {"cache_dir": "cache"})
    return hfgolf.fit(*arguments, data=data, **sections, **options)


class Seen(hfgolf.Hook):
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, run: Any) -> None:
        self.calls.append(("start", run.state.step))

    def after_step(self, run: Any, result: Any) -> None:
        torch.rand(7)  # must not change the run
        run.raw_model.eval()
        self.calls.append(("step", run.state.step, result.loss))

    def after_evaluate(self, run: Any, row: Any) -> None:
        self.calls.append(("evaluate", run.state.step, row["val_loss"]))

    def after_save(self, run: Any, checkpoint: Path) -> None:
        assert verify(checkpoint)["step"] == run.state.step
        self.calls.append(("save", run.state.step))

    def end(self, run: Any, summary: Any) -> None:
        self.calls.append(("end", run.state.step, summary["val_loss"]))


@pytest.mark.slow
def test_fit_returns_a_run_that_shows_what_it_reached(folder, capsys):
    run = fit("my.txt")
    assert capsys.readouterr().out.count("step 4/4") == 1
    assert run.folder == Path("runs/my") and f"validation loss {run.summary['val_loss']:.4f}" in repr(run)
    assert list(run.metrics.index) == [1, 2, 3, 4] and run.metrics.val_loss.notna().sum() == 2
    assert run.sample("To be", max_new_tokens=5, temperature=0).startswith("To be")
    with pytest.raises(hfgolf.UserError, match=r"prompt: 5 is not text; pass a string."):
        run.sample(5)
    assert not run.model.training and run.tokenizer("a")["input_ids"]
    shown = run.report()._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "bits per byte" in shown and "<script" not in shown
    assert repr(hfgolf.open_run("runs/my")) == repr(run)
    with pytest.raises(hfgolf.UserError, match="nothing is not the folder of a run"):
        hfgolf.open_run("nothing")
    (run.folder / "metrics.jsonl").write_text('{"step": 0, "event": "stopped", "elapsed_seconds": 0.0}\n')
    assert run.metrics.empty and run.metrics.index.name == "step"


def test_a_run_shows_itself_before_its_first_step_and_without_its_folder(folder):
    Path("my").mkdir()
    Path("my/metrics.jsonl").write_text('{"step": 0, "event": "stopped", "elapsed_seconds": 0.0}\n')
    run = hfgolf.open_run("my")
    assert repr(run) == "<run my/metrics.jsonl holds no row: the run has logged nothing yet; wait for its first step.>"
    shutil.rmtree("my")
    assert "there is no folder my" in repr(run)


def test_a_stop_in_the_evaluation_before_the_first_step_is_an_interrupt(folder, monkeypatch):
    def stop(*_: Any, **__: Any) -> None:
        Path("runs/my").mkdir(parents=True)
        Path("runs/my/metrics.jsonl").write_text('{"step": 0, "event": "stopped", "elapsed_seconds": 0.0}\n')
        raise SystemExit(128 + signal.SIGINT)

    monkeypatch.setattr(api, "train_once", stop)
    with pytest.raises(KeyboardInterrupt):
        fit("my.txt")


@pytest.mark.slow
def test_same_call_returns_the_run_and_another_trains_a_new_one(folder, capsys):
    first = fit("my.txt")
    again = fit("my.txt")
    assert again.folder == first.folder and "runs/my is complete" in capsys.readouterr().out
    Path("my.txt").write_text(TEXT.upper() * 200)
    other = fit("my.txt")
    assert other.folder == Path("runs/my-2") and other.summary["val_loss"] != first.summary["val_loss"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "my-2"),
        ({"train": {"resume": "latest"}}, "my"),
        ({"run": {"name": "my"}}, "my"),
        ({"name": "my"}, "my"),
    ],
)
def test_what_names_a_run_or_resumes_it_means_that_run(folder, resolved, options, name):
    Path("runs/my").mkdir(parents=True)
    Path("runs/my/config.yaml").write_text("train: {max_steps: 3}")
    fit("my.txt", **options)
    assert resolved[0].config.run.name == name


def test_a_run_that_nobody_named_leaves_the_folders_of_others_alone(
    copied_run, tiny_run, hfgolf, reset_accelerate, tmp_path
):
    folder = copied_run()  # complete
    unnamed = [option for option in tiny_run() if not option.startswith("--run.name")]
    (tmp_path / "tiny.yaml").write_text("")

    def train(*options: str) -> Any:
        reset_accelerate()
        return hfgolf("train", "--config", tmp_path / "tiny.yaml", *unnamed, *options)

    assert f"{folder} is complete" in train().out
    other = train("--train.max_steps=3")
    assert f"run      {folder}-2, because {folder} holds a complete run with another text or config" in other.out
    assert "(train.max_steps 6 -> 3)" in other.out and other.status == 0
    assert f"{folder}-2 is complete" in train("--train.max_steps=3").out
    assert "holds a run with another config" in train("--train.max_steps=3", "--run.name=tiny").err
    assert f"{folder}-2 is complete" in train("--train.max_steps=3", "--train.resume=auto").out
    (folder / "summary.json").unlink()  # it can be continued
    assert f"{folder} holds an unfinished run; continue it with --train.resume auto" in train().err
    assert "is from a run with another config" in train("--train.max_steps=5", "--train.resume=auto").err
    assert "to continue that one: --train.resume latest" in train("--train.max_steps=4").out
    shutil.rmtree(folder / "checkpoints")
    other = train("--train.max_steps=4").out
    assert "unfinished run with another text" in other and "to continue that one" not in other, "nothing to continue"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny", "tiny-2", "tiny-3"]


@pytest.mark.slow
def test_hooks_see_the_run_and_do_not_change_it(folder):
    seen = Seen()
    dropout = TINY["model"] | {"dropout": 0.5}  # random numbers matter
    run = fit("my.txt", model=dropout, hooks=[seen])
    rows = {row["step"]: row for row in read_rows(run.folder / "metrics.jsonl")}
    losses = [("step", step, rows[step]["train_losses"][0]) for step in range(1, 5)]
    evaluated = [("evaluate", step, rows[step]["val_loss"]) for step in (2, 4)]
    assert seen.calls == [
        ("start", 0),
        *losses[:2],
        evaluated[0],
        ("save", 2),
        *losses[2:],
        evaluated[1],
        ("save", 4),
        ("end", 4, run.summary["val_loss"]),
    ]
    alone = fit("my.txt", model=dropout, name="alone")
    assert [row["train_losses"] for row in read_rows(alone.folder / "metrics.jsonl")] == [
        row["train_losses"] for row in rows.values()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["after_step", "after_evaluate"])
def test_hook_ends_a_run_as_if_it_were_complete(folder, method):
    hook = type("Stop", (hfgolf.Hook,), {method: lambda self, run, _: run.stop() if run.state.step == 2 else None})
    run = fit("my.txt", max_steps=20, hooks=[hook()])
    assert run.summary["steps"] == 2 and run.metrics.val_loss.notna().sum() == 1
    assert verify(newest_first(run.folder / "checkpoints")[0])["step"] == 2


class Fails(hfgolf.Hook):
    def after_step(self, run: Any, result: Any) -> None:
        raise ZeroDivisionError("of the user")


@pytest.mark.slow
def test_error_of_a_hook_ends_the_run_and_the_next_call_continues(folder):
    with pytest.raises(ZeroDivisionError, match="of the user"):
        fit("my.txt", hooks=[Fails()])
    assert fit("my.txt").summary["steps"] == 4


class Interrupts(hfgolf.Hook):
    def after_step(self, run: Any, result: Any) -> None:
        if run.state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_stop_button_saves_and_the_next_call_continues(folder, capsys):
    handlers, log = signal.getsignal(signal.SIGINT), logging.getLogger("hfgolf")
    before = log.handlers, log.propagate, log.level
    run = fit("my.txt", hooks=[Interrupts()])
    assert "stopped by SIGINT at step 3; saved up to step 3" in capsys.readouterr().out
    assert run.summary == {} and "step 3" in repr(run)
    assert run.sample("To be", max_new_tokens=2).startswith("To be")  # from the checkpoint
    with pytest.raises(hfgolf.UserError, match="not complete"):
        run.push("user/name")
    assert (log.handlers, log.propagate, log.level) == before and signal.getsignal(signal.SIGINT) == handlers
    seen = Seen()
    assert fit("my.txt", hooks=[seen]).summary["steps"] == 4
    assert seen.calls[0] == ("start", 3)


@pytest.mark.slow
def test_second_run_takes_another_precision_and_the_first_is_freed(folder, monkeypatch):
    models = []
    real = setup.build_model

    def build(*arguments: Any, **options: Any) -> Any:
        model = real(*arguments, **options)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(setup, "build_model", build)
    fit("my.txt")
    fit("my.txt", train={"mixed_precision": "bf16"})
    gc.collect()
    assert len(models) >= 2 and not any(model() is not None for model in models)


@pytest.mark.slow
def test_dataset_or_strings_of_ones_own(folder):
    documents = [f"{TEXT * 3} {number}" for number in range(60)]
    data = Dataset.from_dict({"text": documents, "other": range(60)})
    options = {"name": "own", "tokenizer": {"kind": "byte"}, "max_steps": 2}
    sections = {name: TINY[name] for name in ("model", "batch", "train")}
    run = hfgolf.fit(data=data, **options, **sections)
    same = hfgolf.fit(data=documents, **options | {"name": "strings"}, **sections)
    assert same.summary["val_loss"] == run.summary["val_loss"]
    assert "is complete" not in repr(run) and hfgolf.fit(data=data, **options, **sections).folder == run.folder


TEXTS = [TEXT, TEXT.upper()]
TABLE = {"number": [1, 2], "text": TEXTS}
HAVE_TEXT: dict[str, Any] = {
    "Dataset": lambda: Dataset.from_dict(TABLE),
    "its column": lambda: Dataset.from_dict(TABLE)["text"],
    "DataFrame": lambda: pd.DataFrame(TABLE, index=[7, 9]),
    "DataFrame with columns that are no table": lambda: pd.DataFrame({"a": [1, "b"], "text": TEXTS, "c": [{1}, int]}),
    "rows that are no table": lambda: [{"text": text, "a": value} for text, value in zip(TEXTS, (1, "b"), strict=True)],
    "Series": lambda: pd.Series(TEXTS, index=[7, 9]),
    "Table": lambda: pa.table(TABLE),
    "Arrow's array": lambda: pa.array(TEXTS),
    "numpy's array": lambda: np.array(TEXTS),
    "list": lambda: TEXTS,
    "generator": lambda: (text for text in TEXTS),
    "rows": lambda: [{"text": text} for text in TEXTS],
}
HAVE_NONE: dict[str, Any] = {
    "table of 61 columns": (pd.DataFrame({f"c{i}": ["a"] for i in range(61)}), r"no column text; .* \(c0, .*52 more\)"),
    "table without text that Arrow refuses": (pd.DataFrame({"a": [1, "b"]}), "DataFrame cannot be read"),
    "table with a lone surrogate": (pd.DataFrame({"text": ["a\udcff"]}, dtype=object), "surrogates not allowed"),
    "DatasetDict": (DatasetDict(a=Dataset.from_dict(TABLE)), "DatasetDict has no split called train; name one .*: a"),
    "splits of which one is no text": ({"train": TEXTS, "test": [5]}, "data: list cannot be read: item 0 is 5"),
    "table of messages": (pd.DataFrame({"messages": [[]]}), "data.text_column; or data.messages_column to messages"),
    "stream": (Dataset.from_dict(TABLE).to_iterable_dataset(), "IterableDataset has no order or no known end"),
    "set": ({*TEXTS}, "set has no order"),
    "messages": ([{"role": "user", "content": "Hi."}], r"no column text; .* \(role, content\)"),
    "conversations": ([[{"role": "user", "content": "Hi."}]], r"item 0 is \[\{"),
    "a missing text": ([TEXT, None], "item 1 is None"),
    "numbers": (np.arange(3), "ndarray cannot be read: item 0 is"),
    "bytes": (b"abc", "b'abc' is one bytes; pass paths as files"),
    "one text": (TEXT, "is one str; pass paths as files"),
    "path": (Path("my.txt"), "is one .*Path; pass paths as files"),
    "names of files": (["my.txt"], "'my.txt' is a file; pass paths as files"),
    "handle": (io.StringIO(TEXT), "is one StringIO; pass paths"),
    "number": (5, "int cannot be read"),
    "nothing": ([], "there is nothing in it"),
    "lone surrogate": (["a\udcff"], "is not text .*surrogates not allowed"),
    "value of no type": (
        {"max_documents": object()},
        "data.max_documents: <object object .*> is not allowed; allowed:",
    ),
    "null": ({"files": None}, "data.files: null is not allowed; allowed: a list"),
}


@pytest.mark.parametrize("kind", HAVE_TEXT)
def test_any_object_with_text_is_read_by_its_text(folder, resolved, kind):
    hfgolf.fit(data=HAVE_TEXT[kind](), max_steps=1)
    assert Dataset.from_parquet(resolved[0].config.data.files)["text"][:] == TEXTS


SPLITS: dict[str, Any] = {
    "DatasetDict": lambda: DatasetDict({name: Dataset.from_dict({"text": [name]}) for name in ("test", "train")}),
    "dict of tables": lambda: {name: pd.DataFrame({"text": [name], "n": [1]}) for name in ("train", "test", "other")},
    "dict of lists": lambda: {"test": ["test"], "train": ["train"]},
}


@pytest.mark.parametrize("kind", SPLITS)
def test_splits_of_an_object_train_and_validate(folder, resolved, kind):
    hfgolf.fit(data=SPLITS[kind](), max_steps=1)
    data = resolved[0].config.data
    assert [Dataset.from_parquet(files)["text"][:] for files in (data.files, data.val_files)] == [["train"], ["test"]]


@pytest.mark.parametrize("kind", HAVE_NONE)
def test_any_other_object_is_one_line(folder, resolved, kind):
    data, line = HAVE_NONE[kind]
    with pytest.raises(hfgolf.UserError, match=rf"^[^\n]*{line}[^\n]*$"):
        hfgolf.fit(data=data, max_steps=1)
    assert not resolved and not Path("runs").exists()


def test_the_column_of_text_may_be_named_in_the_config(folder, resolved):
    Path("own.yaml").write_text("data: {text_column: body, cache_dir: own}\ntrain: {max_steps: 1}")
    hfgolf.fit(data=pd.DataFrame({"body": TEXTS}), config="own.yaml")
    assert resolved[0].config.data.text_column == "body" and list(Path("own/passed").iterdir())


@pytest.mark.parametrize(
    ("key", "name"), [("messages_column", "completion"), ("ids_column", "ids"), ("text_column", "nested.body")]
)
def test_another_column_may_be_named_in_the_config_beside_one_of_text(folder, resolved, key, name):
    row = {"text": "a", "prompt": "b", "completion": "c", "ids": [1], "nested": {"body": "d"}}
    Path("own.yaml").write_text(f"data: {{{key}: {name}}}\ntokenizer: {{kind: byte}}\ntrain: {{max_steps: 1}}")
    for data in ([row], pd.DataFrame([row]), Dataset.from_list([row])):
        hfgolf.fit(data=data, config="own.yaml")
        assert {*Dataset.from_parquet(resolved[-1].config.data.files).column_names} == {*row}


def test_equal_values_under_other_names_are_another_table(folder, resolved):
    for column in ("text", "body"):
        hfgolf.fit(
            data=pd.DataFrame({column: TEXTS}),
            config=hfgolf.load_config("small").config.replace(data__text_column=column, data__cache_dir="own"),
        )
        assert Dataset.from_parquet(resolved[-1].config.data.files)[column][:] == TEXTS


def test_processes_that_start_together_copy_an_object_once(tmp_path):
    written: list[Path] = []

    def write(partial: Path) -> None:
        written.append(partial)
        time.sleep(0.1)
        (partial / "file").write_text("content")

    with ThreadPoolExecutor(2) as pool:
        folders = {*pool.map(lambda _: api._once({"data.cache_dir": tmp_path}, "0" * 64, write), range(2))}
    assert len(folders) == len(written) == 1


def test_a_cache_that_takes_no_copy_is_one_line(tmp_path):
    def write(partial: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    line = rf"^data.cache_dir: cannot write to {tmp_path} \(No space left on device\); free up space there"
    with pytest.raises(hfgolf.UserError, match=line):
        api._once({"data.cache_dir": tmp_path}, "0" * 64, write)
    (tmp_path / "passed.lock").unlink(missing_ok=True)
    (tmp_path / "passed.lock").mkdir()  # no lock file can be there
    with pytest.raises(hfgolf.UserError, match=r"^data.cache_dir: cannot write"):
        api._once({"data.cache_dir": tmp_path}, "0" * 64, write)


@pytest.mark.parametrize("files", [pd.DataFrame(TABLE), b"my.txt", None, 5, [TEXTS], io.StringIO("my.txt"), {"a": 1}])
def test_what_names_no_files_is_one_line(folder, resolved, files):
    with pytest.raises(hfgolf.UserError, match=r"^files: [^\n]* tables or texts as data="):
        hfgolf.fit(files)


def test_values_of_numpy_and_paths_are_values(folder, resolved):
    data = {"files": [Path("my.txt")], "cache_dir": Path("cache"), "max_documents": np.int64(5)}
    hfgolf.fit(data=data, max_steps=np.int32(3), optim={"learning_rate": np.float32(0.5), "betas": (0.5, 0.75)})
    config = resolved[0].config
    assert (config.data.files, config.data.cache_dir, config.data.max_documents) == (["my.txt"], "cache", 5)
    assert (config.train.max_steps, config.optim.learning_rate, config.optim.betas) == (3, 0.5, (0.5, 0.75))
    overrides = {"loop": np.array([0, 1, 2]), "norm_eps": np.float64(1e-5), "lanes": np.True_, "own": {"a": Path("b")}}
    hfgolf.fit("my.txt", max_minutes="5", model={"overrides": overrides}, optim={"betas": np.array([0.5, 0.75])})
    config = resolved[1].config
    plain = {"loop": [0, 1, 2], "norm_eps": 1e-5, "lanes": True, "own": {"a": "b"}}
    assert (config.model.overrides, config.optim.betas, config.train.max_minutes) == (plain, (0.5, 0.75), 5)


@pytest.mark.parametrize("objects", ["data", "tokenizer", "model"])
def test_objects_are_copied_to_a_cache_of_any_kind_of_path(folder, resolved, objects):
    tokenizer = find_tokenizer(TokenizerSection(kind="byte"), {}, folder)
    of_cache = {"files": "my.txt", "data": {"cache_dir": Path("cache")}}
    passed: dict[str, dict[str, Any]] = {
        "data": {"data": TEXTS, "config": hfgolf.load_config("small").config.replace(data__cache_dir=Path("cache"))},
        "tokenizer": {"tokenizer": tokenizer} | of_cache,
        "model": {"model": OwnModel(OwnConfig()), "tokenizer": tokenizer} | of_cache,
    }
    hfgolf.fit(**passed[objects])
    assert resolved[0].config.data.cache_dir == "cache" and list(Path("cache/passed").iterdir())


class OwnConfig(PreTrainedConfig):
    model_type = "own-of-the-test"

    def __init__(self, vocab_size: int = 257, hidden_size: int = 16, **others: Any) -> None:
        super().__init__(**others)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = self.num_attention_heads = 1


class OwnModel(PreTrainedModel):
    """Predicts a token from the one before it."""

    config_class = OwnConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Any, **others: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(self.embed(input_ids)))


@pytest.mark.slow
def test_model_of_ones_own(folder):
    tokenizer = find_tokenizer(TokenizerSection(kind="byte"), {}, folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    model = OwnModel(OwnConfig(vocab_size=len(tokenizer)))
    first = fit("my.txt", name="golf")
    golf = fit("my.txt", model=first.model, tokenizer=first.tokenizer)
    assert golf.summary["init_from"]["val_loss"] == pytest.approx(first.summary["val_loss"], abs=1e-4)
    own = fit("my.txt", model=model, tokenizer=tokenizer, name="own")
    assert isinstance(own.model, OwnModel)
    assert own.summary["val_loss"] < own.summary["init_from"]["val_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["golf", "gpt2 in bf16"])
def test_what_is_frozen_stays_so_also_in_a_resumed_run(folder, kind):
    tokenizer = find_tokenizer(TokenizerSection(kind="byte"), {}, folder)
    torch.manual_seed(0)
    model: Any
    if kind == "golf":
        model = GolfForCausalLM(GolfConfig(vocab_size=257, **TINY["model"], max_position_embeddings=32))
    else:
        shape = {"vocab_size": 257, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
        config: Any = CONFIG_MAPPING["gpt2"].from_dict(shape | {"max_position_embeddings": 32})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "wte" not in name and ".0." not in name)
    before = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}

    def trained(name: str, *hooks: Any) -> Any:
        optim = {"name": "adamw", "weight_decay": 0.1, "embedding_weight_decay": 0.1}
        return fit("my.txt", model=model, tokenizer=tokenizer, name=name, optim=optim, hooks=hooks)

    straight = trained("straight")
    trained("stopped", Interrupts())
    resumed = trained("stopped")
    moved = dict(resumed.model.named_parameters())
    assert resumed.model.dtype == torch.float32 and moved.keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(moved[name], before[name]) != parameter.requires_grad, name
    assert resumed.summary["val_loss"] == straight.summary["val_loss"]


class Hooked(nn.Module):
    def forward(self, states: Any) -> Any:
        return states * 2


def _hooked(model: Any) -> None:
    model.head.register_forward_hook(lambda module, inputs, output: output * 2)


def _replaced(model: Any) -> None:
    model.head = nn.Sequential(model.head, Hooked())


def _frozen(model: Any) -> None:
    model.requires_grad_(False)


def _headless(model: Any) -> None:
    model.forward = lambda input_ids: input_ids


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_hooked, "model: saved and loaded again, its logits differ by"),
        (_replaced, "model: (cannot load|/.* lacks weights)"),
        (_frozen, "model: all of its parameters are frozen"),
        (_headless, "model: OwnModel computes no logits from input_ids"),
        (lambda model: model.to("meta"), "model: it is on the meta device"),
    ],
)
def test_what_a_passed_model_would_lose_is_refused(folder, resolved, change, line):
    model = OwnModel(OwnConfig())
    change(model)
    model.train()
    with pytest.raises(hfgolf.UserError, match=line):
        hfgolf.fit("my.txt", model=model, tokenizer=find_tokenizer(TokenizerSection(kind="byte"), {}, folder))
    assert not resolved and model.training


def test_a_tokenizer_of_ones_own_is_used(folder, resolved):
    tokenizer = find_tokenizer(TokenizerSection(kind="byte"), {}, folder)
    hfgolf.fit("my.txt", tokenizer=tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|over|>"})
    tokenizer.chat_template = "{{ messages }}"
    hfgolf.fit("my.txt", tokenizer=tokenizer)
    first, second = (find_tokenizer(each.config.tokenizer, {}, folder) for each in resolved)
    assert (first.eos_token, second.eos_token) == ("<|endoftext|>", "<|over|>")
    assert second.chat_template == "{{ messages }}"


BAD = {
    "section": ({"modle": {"a": 1}}, "hfgolf.fit: unknown key modle.a"),
    "option of the command line": ({"minutes": 5}, "unknown key minutes; did you mean train.max_minutes?"),
    "other name": ({"lr": 0.1}, "hfgolf.fit: unknown key lr; here: optim.learning_rate"),
    "key": ({"model": {"depth": 3}}, "hfgolf.fit: unknown key model.depth; did you mean"),
    "set": ({"track": {"trackers": {"wandb"}}}, "hfgolf.fit: track.trackers: {'wandb'} is not allowed; allowed: a"),
    "set of a field": ({"model": {"overrides": {"a": {1}}}}, r"hfgolf.fit: model.overrides: {'a': \{1\}} is not"),
    "range": ({"max_steps": -1}, "hfgolf.fit: train.max_steps: -1 is not allowed"),
    "twice": ({"max_minutes": 5, "train": {"max_minutes": 3}}, r"max_minutes: also stated in train=\{...\}; pass one"),
    "no text": ({"max_minutes": 5}, "files: they name no text; pass some, tables or texts as data=, or a config="),
    "glob without a match": ({"files": []}, "files: they name no text"),
    "empty section": ({"data": {}}, "files: they name no text"),
    "file": ({"files": "nowhere.txt"}, "no file matches 'nowhere.txt'"),
    "config": ({"config": "nowhere.yaml"}, "--config: there is no file nowhere.yaml"),
    "hook": ({"files": "my.txt", "hooks": [print]}, "hooks: .* is not one"),
    "no list of hooks": ({"files": "my.txt", "hooks": hfgolf.Hook()}, "hooks: .* is no list; pass hooks=\\[...\\]"),
    "model": ({"files": "my.txt", "model": nn.Linear(1, 1)}, "model: Linear is not a PreTrainedModel"),
    "tokenizer": (
        {"files": "my.txt", "model": OwnModel(OwnConfig())},
        "tokenizer: must be a PreTrainedTokenizerFast, and the",
    ),
}


@pytest.mark.parametrize("wrong", BAD)
def test_wrong_arguments_are_one_line_and_leave_no_folder(folder, wrong):
    options, line = BAD[wrong]
    with pytest.raises(hfgolf.UserError, match=line) as raised:
        hfgolf.fit(**options)
    assert raised.value._render_traceback_() == [f"error: {raised.value}"]
    assert not Path("runs").exists()


def test_what_is_no_config_is_refused():
    with pytest.raises(
        hfgolf.UserError, match=r"config: 5 is none; pass a RunConfig, or the path or name of a config."
    ):
        hfgolf.train(5)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["train", "fit in a program with a log of its own"])
def test_libraries_are_quiet_however_a_run_is_started(folder, capsys, caplog, monkeypatch, call):
    logging.getLogger("accelerate.utils.other").setLevel(logging.WARNING)
    logging.getLogger("transformers.generation.stopping_criteria").setLevel(logging.WARNING)
    transformers.utils.logging.enable_progress_bar()
    sections = TINY | {"train": TINY["train"] | {"max_steps": 1, "sample_tokens": 40}, "data": {"files": "my.txt"}}
    values = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    if call == "train":
        hfgolf.train(hfgolf.load_config([], values=values))
    else:
        monkeypatch.setattr(logging.getLogger("hfgolf"), "handlers", [logging.NullHandler()])
        hfgolf.fit(**sections)
    assert "Removed shared tensor" not in caplog.text
    assert "Writing model shards" not in (said := capsys.readouterr().err) and "predefined maximum length" not in said


def test_config_by_path_name_or_object_is_the_same(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("run: {name: mine}\ntrain: {max_steps: 3}\n")
    by_path = hfgolf.load_config(path)
    assert by_path.config == hfgolf.load_config(str(path)).config == hfgolf.load_config(["--config", str(path)]).config
    assert hfgolf.load_config("small").config.run.name == "small"


@pytest.mark.parametrize("kind", ["path", "RunConfig", "ResolvedConfig"])
def test_the_arguments_win_over_the_config(folder, resolved, kind):
    Path("other.txt").write_text(TEXT)
    Path("tiny.yaml").write_text("data: {files: my.txt}\ntrain: {max_steps: 3, log_every_steps: 5}\nrun: {seed: 2}")
    loaded = hfgolf.load_config("tiny.yaml")
    config = {"path": "tiny.yaml", "RunConfig": loaded.config, "ResolvedConfig": loaded}[kind]
    hfgolf.fit("other.txt", config=config, seed=8)
    train = resolved[0].config.train
    assert resolved[0].config.data.files == ["other.txt"] and resolved[0].config.run.seed == 8
    assert (train.max_steps, train.log_every_steps) == (3, 5)
    sources = [resolved[0].sources[key] for key in ("data.files", "run.seed", "train.max_steps")]
    assert sources == ["hfgolf.fit", "hfgolf.fit", "code" if kind == "RunConfig" else "file"]
    hfgolf.fit(config=config)
    assert resolved[1].config.data.files == ["my.txt"] and resolved[1].config.run.name == "tiny"


def test_a_config_of_code_keeps_its_limit_and_its_name_and_implies_what_a_file_does(folder, resolved):
    config = hfgolf.RunConfig().replace(data__hub_name="user/books", tokenizer__name_or_path="gpt2")
    hfgolf.fit(config=config)
    for taken in (api.as_resolved(config).config, resolved[0].config):
        assert (taken.data.source, taken.tokenizer.kind, taken.train.max_steps) == ("hub", "pretrained", 1000)
    hfgolf.fit("my.txt", config=hfgolf.RunConfig())
    hfgolf.fit("my.txt", config=hfgolf.RunConfig().replace(run__name="mine"))
    assert [each.config.run.name for each in resolved] == ["default", "my", "mine"]


def test_one_limit_replaces_both_of_the_config(folder, resolved):
    hfgolf.fit(config="small", max_minutes=5)
    hfgolf.fit(config="small", max_steps=7)
    hfgolf.fit(config=hfgolf.load_config("small").config.replace(train__log_every_steps=9))
    small, taken = hfgolf.load_config("small").config.train, [each.config.train for each in resolved]
    limits = [(train.max_minutes, train.max_steps) for train in taken]
    assert limits == [(5, None), (None, 7), (small.max_minutes, small.max_steps)]
    assert taken[2].log_every_steps == 9 and small.log_every_steps != 9
