"""A resume continues the same run (text, tokenizer, order, decisions), or says what differs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import column, rows

from hfgolf.checkpoint import identity
from hfgolf.checkpoint.identity import UNDECIDED, Change, check_text, config_changes, rule, run_identity
from hfgolf.config.other_names import GONE, MOVED_TO_OVERRIDES
from hfgolf.config.parse import KEY_TYPES, ResolvedConfig, load_config
from hfgolf.config.sections import ModelSection, RunConfig, RunSection
from hfgolf.data.batches import block_starts, sample_hash
from hfgolf.system.errors import UserError
from hfgolf.train import compilation, decisions, loop, setup

pytestmark = pytest.mark.slow

CONSTANT = {"schedule__name": "constant"}


@pytest.fixture
def text(tmp_path: Path, corpus_file: Path) -> Path:
    """A text file that a test may change."""
    return Path(shutil.copy(corpus_file, tmp_path / "text.txt"))


def state_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "checkpoints" / f"step-{step:06d}" / "train_state.json").read_text())


def test_every_key_has_a_rule_and_every_rule_has_keys():
    assert {key for key in KEY_TYPES if not isinstance(rule(key), Change)} == set()
    unused = [prefix for prefix in identity._RULES if not any(key.startswith(prefix) for key in KEY_TYPES)]
    assert unused == ["data.prefetch_factor"]  # which a checkpoint of an earlier version may have
    assert rule("train.max_steps") is rule("optim.learning_rate") is Change.REPORTED
    assert rule("train.resume") is rule("hub.push") is Change.FREE
    assert rule("run.seed") is rule("batch.sequence_length") is rule("batch.segment_length") is Change.DATA
    assert rule("data.files") is rule("data.val_fraction") is Change.TEXT
    assert rule("model.activation") is rule("tokenizer.vocab_size") is Change.FIXED


@pytest.mark.parametrize(
    ("stated", "changed"),
    [
        ({"head_gate": 8, "norm_eps": 1e-5}, []),
        ({"head_gate": 8, "norm_eps": 1e-5, "lanes": False}, []),  # a default, stated
        ({"norm_eps": 1e-5}, ["model.overrides.head_gate 8 -> None"]),
        ({"head_gate": 8, "norm_eps": 1e-5, "smear_gate": 4}, ["model.overrides.smear_gate None -> 4"]),
    ],
)
def test_a_checkpoint_with_the_keys_of_earlier_versions_knows_its_run(tmp_path, stated, changed):
    earlier = {f"model.{name}": value for name, value in MOVED_TO_OVERRIDES.items()}
    earlier |= {key: gone[0] for key, gone in GONE.items()} | {"model.head_gate": 8, "model.norm_eps": 1e-5}
    (tmp_path / "run.json").write_text(json.dumps({"config": RunConfig().flat() | earlier, "corpus": {}}))
    before = identity.read_identity(tmp_path)["config"]
    assert before.keys() == KEY_TYPES.keys()
    resolved = ResolvedConfig.from_code(RunConfig(run=RunSection(name="x"), model=ModelSection(overrides=stated)))
    assert list(config_changes(before, resolved).values()) == changed


@pytest.mark.parametrize("key", GONE)
def test_a_resume_is_refused_if_a_key_that_is_gone_had_an_effect(key):
    before = RunConfig().flat() | {key: "other"}
    resolved = ResolvedConfig.from_code(RunConfig(run=RunSection(name="x")))
    if rule(key) is Change.FREE:
        assert identity.check_config("step-1", before, resolved) == []
        return
    with pytest.raises(UserError, match=rf"^train\.resume: step-1 is of a run with {key} other, which this version"):
        identity.check_config("step-1", before, resolved)


@pytest.mark.parametrize(
    ("change", "refused_under"),
    [
        ({"train__log_every_steps": 3, "train__keep_last": 1, "batch__micro_batch_size": 4}, set()),
        ({"optim__learning_rate": 0.01}, {"auto"}),
        ({"run__seed": 7}, {"auto", "latest"}),
        ({"model__hidden_size": 64}, {"auto", "latest"}),
    ],
)
def test_each_changed_key_is_accepted_or_rejected_as_documented(tiny_run, change, refused_under):
    """One case per kind of key; text and validation split have their own test, and the runs below each kind."""
    before = load_config(tiny_run()).config.flat()
    for resume in ("auto", "latest"):
        resolved = load_config(tiny_run(train__resume=resume, **change))
        if resume in refused_under:
            with pytest.raises(UserError, match=r"^train\.resume: step-1 "):
                identity.check_config("step-1", before, resolved)
        else:
            identity.check_config("step-1", before, resolved)


def test_automatic_settings_match_any_saved_value_and_a_key_newer_than_the_run_counts_as_its_default():
    before = RunConfig().flat() | {"train.mixed_precision": "bf16", "train.compile": True, "train.cpu_threads": 7}
    assert not config_changes(before, load_config(["--train.max_steps=1000"]))
    assert [*config_changes(before, load_config(["--train.max_steps=1000", "--train.mixed_precision=no"]))] == [
        "train.mixed_precision"
    ]
    older = {key: before[key] for key in before.keys() - {"model.attention_dropout", "optim.betas"}}
    assert not config_changes(older, load_config(["--train.max_steps=1000"]))
    changed = config_changes(older, load_config(["--train.max_steps=1000", "--model.attention_dropout=0.1"]))
    assert [*changed.values()] == ["model.attention_dropout 0.0 -> 0.1"]


def test_changed_text_is_rejected_before_any_change(run, tiny_run, text):
    """A tokenizer trained on other text would assign different ids."""
    options = {"data__files": text, "tokenizer__kind": "bpe", "tokenizer__vocab_size": 300}
    folder, whole = run(tiny_run(**options, train__max_steps=3)), text.read_text()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    for written, resume, more, told in (
        (f"{whole}one line more\n", "auto", {}, r"files \(text.txt\)"),
        ("other words entirely, " * 2000, "latest", {"train__max_steps": 6}, r"files \(text.txt\)"),
        (whole, "auto", {"data__val_fraction": 0.2}, r"val_fraction \(0.1 -> 0.2\)"),
    ):
        text.write_text(written)
        with pytest.raises(UserError, match=rf"step-000003 was trained on other text \({told}\); restore") as error:
            run(tiny_run(**options | {"train__max_steps": 3} | more, train__resume=resume))
        assert "--train.resume_with_other data" in str(error.value) and "\n" not in str(error.value)
        assert {path: path.read_bytes() for path in before} == before


def test_resume_with_new_text_keeps_the_tokenizer(run, tiny_run, text, caplog):
    options = {**CONSTANT, "data__files": text, "tokenizer__kind": "bpe", "tokenizer__vocab_size": 300}
    options["train__save_every_steps"] = 20
    first = run(tiny_run(**options, train__max_steps=40))
    tokenizer = (first / "model" / "tokenizer.json").read_bytes()
    text.write_text(text.read_text().replace("seven", "sept").replace("make", "font"))
    options["train__resume"] = "latest"
    run(tiny_run(**options, train__max_steps=43, train__resume_with_other="data"))
    assert "changed since then: train.max_steps 40 -> 43, files (text.txt)" in caplog.messages
    assert (first / "model" / "tokenizer.json").read_bytes() == tokenizer
    losses = [loss for row in rows(first) for loss in row["train_losses"]]
    assert max(losses[40:]) < losses[0] - 0.5, "the weights fit these ids"
    state = state_of(first, 43)
    assert (state["step"], state["tokens"], state["blocks"]) == (43, 43 * 256, 3 * 8)
    assert rows(first)[42]["epoch"] < rows(first)[39]["epoch"] / 10, "3 steps of the new text after 40 of the old"
    run(tiny_run(**options, train__max_steps=45))
    assert state_of(first, 45)["blocks"] == 5 * 8, "the run is one of the new text now"


def test_many_files_are_recorded_briefly_and_still_compared():
    config = load_config(["--train.max_steps=3"]).config
    corpus = {"source": "files", "files": [[f"{number}.txt", f"hash of {number}"] for number in range(2001)]}
    saved = run_identity(config, corpus, "0" * 64)["corpus"]
    assert len(json.dumps(saved)) < 1000
    assert check_text("step-000003", saved, corpus, config) == []
    corpus["files"][1000][1] = "another"
    with pytest.raises(UserError, match=r"^train.resume: step-000003 was trained on other text \(files"):
        check_text("step-000003", saved, corpus, config)


def test_moved_text_is_accepted(run, tiny_run, text, tmp_path):
    folder = run(tiny_run(data__files=text, train__max_steps=3))
    (tmp_path / "elsewhere").mkdir()
    moved = text.rename(tmp_path / "elsewhere" / text.name)
    elsewhere = {"data__files": moved, "data__cache_dir": tmp_path / "other-cache"}
    run(tiny_run(**elsewhere, train__max_steps=4, train__resume="latest"))
    assert rows(folder)[-1]["step"] == 4


def test_changed_tokens_per_step_continues_with_the_next_block(run, tiny_run):
    options = {**CONSTANT, "train__save_every_steps": 3, "train__eval_every_steps": 100}
    first = run(tiny_run(**options, train__max_steps=3))
    run(tiny_run(**options, train__max_steps=6, batch__tokens_per_step=512, train__resume="latest"))
    state = state_of(first, 6)
    assert (state["tokens"], state["blocks"]) == (3 * 256 + 3 * 512, 3 * 8 + 3 * 16)
    num_blocks = round(24 / rows(first)[2]["epoch"])
    steps = [np.arange(8 * i, 8 * i + 8) for i in range(3)] + [np.arange(24 + 16 * i, 40 + 16 * i) for i in range(3)]
    expected = [sample_hash(block_starts(1337, positions, num_blocks, 32)) % 2**64 for positions in steps]
    assert column(first, "sample_hashes") == [f"{number:016x}" for number in expected]
    assert [row["tokens"] for row in rows(first)] == [256, 512, 768, 1280, 1792, 2304]
    assert rows(first)[-1]["epoch"] == 72 / num_blocks
    summary = json.loads((first / "summary.json").read_text())
    assert summary["tokens"] == 2304
    assert "2,304 training tokens" in (first / "model" / "README.md").read_text()


def test_changed_data_order_needs_consent(run, copied_run, tiny_run):
    folder = copied_run(**CONSTANT, train__max_steps=3)
    change = {"batch__sequence_length": 64, "batch__micro_batch_size": 4}
    told = r"step-000003 read the data in another order \(batch\.sequence_length 32 -> 64\); restore"
    with pytest.raises(UserError, match=told):
        run(tiny_run(**CONSTANT, train__max_steps=4, train__resume="latest", **change))
    with_consent = {"train__resume": "latest", "train__resume_with_other": "data"}
    run(tiny_run(**CONSTANT, train__max_steps=4, **with_consent, **change))
    state = state_of(folder, 4)
    assert (state["tokens"], state["blocks"]) == (4 * 256, 256 // 64)


def test_auto_resume_compares_with_the_checkpoint_not_config_yaml(run, copied_run, tiny_run):
    """config.yaml edited by hand, emptied by a power failure, or missing."""
    folder = copied_run(**CONSTANT, train__max_steps=3)
    (folder / "summary.json").unlink()
    written = (folder / "config.yaml").read_text()
    for text in (written.replace("learning_rate: 0.02", "learning_rate: 0.5"), "", None):
        if text is None:
            (folder / "config.yaml").unlink()
        else:
            assert text != written
            (folder / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"with another config \(optim.learning_rate 0.02 -> 0.5\).*resume latest"):
            run(tiny_run(**CONSTANT, train__max_steps=3, optim__learning_rate=0.5, train__resume="auto"))
        run(tiny_run(**CONSTANT, train__max_steps=3, train__resume="auto"))
        assert "learning_rate: 0.02 " in (folder / "config.yaml").read_text()
        (folder / "summary.json").unlink()


def test_changes_are_one_line_and_part_of_the_event(run, copied_run, tiny_run, caplog):
    folder = copied_run(**CONSTANT, train__max_steps=3)
    changes = {"train__max_steps": 4, "optim__learning_rate": 0.01, "train__log_every_steps": 2}
    run(tiny_run(**CONSTANT, train__resume="latest") + tiny_run(**CONSTANT, train__resume="latest", **changes))
    line = "changed since then: optim.learning_rate 0.02 -> 0.01, train.max_steps 3 -> 4"
    assert [message for message in caplog.messages if message.startswith("changed")] == [line]
    events = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines() if '"resumed"' in row]
    assert [event["changed"] for event in events] == [line.removeprefix("changed since then: ").split(", ")]
    assert [row["learning_rate"] for row in rows(folder)] == [0.02, 0.02, 0.02, 0.01]


def test_resume_reuses_earlier_decisions(run, tiny_run, monkeypatch, caplog):
    """Precision, compilation, threads and micro-batch, although this machine would now decide differently."""
    undecided = {key.replace(".", "__"): value or "null" for key, value in UNDECIDED.items()}
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})  # more threads are slow on a busy machine
    monkeypatch.setattr(compilation, "should_compile", lambda *a, **k: (True, "it pays"))
    monkeypatch.setattr(compilation, "compile_in_place", lambda model, run_once: run_once())
    monkeypatch.setattr(decisions, "choose_micro_batch_size", lambda *a: 4)
    monkeypatch.setattr(decisions, "fast_product_dtype", lambda device: torch.bfloat16)
    folder = run(tiny_run(train__max_steps=3, **undecided))
    decided = {"train.mixed_precision": "bf16", "optim.newton_schulz_dtype": "bf16"}
    decided |= {"train.compile": True, "batch.micro_batch_size": 4}
    saved = json.loads((folder / "checkpoints" / "step-000003" / "run.json").read_text())["config"]
    assert {key: saved[key] for key in decided} == decided and isinstance(saved["train.cpu_threads"], int)

    monkeypatch.setattr(compilation, "should_compile", lambda *a, **k: (False, "it does not pay"))
    monkeypatch.setattr(decisions, "choose_micro_batch_size", lambda *a: 3)
    monkeypatch.setattr(decisions, "fast_product_dtype", lambda device: torch.float32)
    seen: list[Any] = []
    real = loop.set_up
    monkeypatch.setattr(loop, "set_up", lambda *arguments: seen.append(real(*arguments)) or seen[-1])
    run(tiny_run(train__max_steps=4, train__resume="latest", **undecided))
    config = seen[0].resolved.config.flat()
    assert {key: config[key] for key in decided} == decided
    assert "  compile: true  # the run so far\n" in (folder / "config.yaml").read_text()
    run(tiny_run(train__max_steps=5, train__resume="latest", **undecided, batch__tokens_per_step=96))
    said = "batch.micro_batch_size: the run used 4, which is not possible here; deciding again"
    assert said in caplog.messages and seen[1].micro_batch_size == 3


def test_each_start_saves_its_config_metadata_and_patch(run, tiny_run, monkeypatch):
    patches = iter(["a patch", None, "another patch"])
    monkeypatch.setattr(setup, "uncommitted_changes", lambda: next(patches))
    commits = iter(["bbb", "aaa-dirty", "aaa-dirty"])
    real = setup.run_metadata
    monkeypatch.setattr(setup, "run_metadata", lambda resolved: real(resolved) | {"commit": next(commits)})
    folder = run(tiny_run(**CONSTANT, train__max_steps=3))
    for steps in (4, 5):
        run(tiny_run(**CONSTANT, train__max_steps=steps, train__resume="latest"))
    starts = sorted((folder / "starts").iterdir())
    assert [path.name for path in starts] == ["001", "002", "003"]
    assert [(path / "uncommitted.patch").is_file() for path in starts] == [True, False, True]
    assert (starts[0] / "uncommitted.patch").read_text() == "a patch"
    metadata = [json.loads((path / "metadata.json").read_text()) for path in starts]
    assert [of_start["commit"] for of_start in metadata] == ["bbb", "aaa-dirty", "aaa-dirty"]
    assert ["max_steps: 3" in (path / "config.yaml").read_text() for path in starts] == [True, False, False]
    assert (folder / "uncommitted.patch").read_text() == "another patch"
    assert json.loads((folder / "summary.json").read_text())["commits"] == ["bbb", "aaa-dirty"]


def test_config_of_a_resumed_run_reproduces_it(run, tiny_run):
    """Although the run was resumed, there is nothing to resume in a new folder."""
    straight = run(tiny_run(**CONSTANT, train__max_steps=3))
    run(tiny_run(**CONSTANT, train__max_steps=6, train__resume="latest"))
    again = run([f"--config={straight / 'config.yaml'}", "--run.name=again"])
    assert column(again, "train_losses") == column(straight, "train_losses")
    assert "resume: null" in (again / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("changed", "keeps_best"),
    [
        ({"train__log_every_steps": 7, "train__eval_every_steps": 1}, True),
        ({"train__eval_tokens": 1000}, False),
        ({"optim__ema_export": "true"}, False),
    ],
)
def test_a_best_step_is_forgotten_once_evaluations_do_not_compare_with_it(copied_run, tiny_run, changed, keeps_best):
    """Or a lucky few tokens would keep the weights of then as the best, whatever the run learns since."""
    options = {"optim__ema_decay": 0.9, "train__max_steps": 2}
    copied_run(**options)
    resumed = tiny_run(**options | {"train__max_steps": 4, "train__resume": "latest"} | changed)
    state = setup.set_up(load_config(resumed)).state
    assert state.step == 2 and (state.best_step, state.best_val_loss < math.inf) == (2 * keeps_best, keeps_best)
