"""What the name of a model means: a run, a checkpoint, an exported folder, or a name that only the Hub can have."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import flip_a_bit, start
from tiny_export import build_tiny

from hfgolf.checkpoint.store import begin_checkpoint, commit_checkpoint, prune
from hfgolf.config.parse import load_config
from hfgolf.config.sections import TokenizerSection
from hfgolf.data.downloads import is_cached_only
from hfgolf.data.tokenizer import find_tokenizer
from hfgolf.publish import load
from hfgolf.publish.load import load_exported
from hfgolf.run import find_model as module
from hfgolf.run.find_model import find_model
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[2]


def save(run: Path, step: int, *parts: object) -> Path:
    """Save a checkpoint as a run does, with parts that have save_pretrained, or else without a loadable model."""
    partial = begin_checkpoint(run / "checkpoints", step)
    (partial / "config.json").write_text("{}")
    (partial / "model.safetensors").write_bytes(b"weights")
    (partial / "optimizer.bin").write_bytes(b"moments")
    for part in parts:
        part.save_pretrained(partial)  # type: ignore[attr-defined]
    return commit_checkpoint(partial, step, 1)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The folder runs/small of a run that has started, in the working directory."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/small")
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    return run


def finish(run: Path) -> None:
    (run / "model").mkdir(exist_ok=True)
    (run / "model" / "config.json").write_text("{}")
    (run / "summary.json").write_text("{}")


def test_a_run_means_its_model_once_it_is_complete_and_before_that_its_newest_checkpoint(small):
    with pytest.raises(UserError, match=r"^--model: runs/small has no model and no checkpoint yet; a run saves one"):
        find_model("runs/small")
    checkpoints = [save(small, step) for step in (9, 100)]
    assert find_model("runs/small") == find_model("./runs/small/") == str(checkpoints[1])
    assert find_model(str(checkpoints[0])) == str(checkpoints[0])
    finish(small)
    assert find_model("runs/small") == "runs/small/model" == find_model("runs/small/model/")
    (small / "summary.json").unlink()  # it trains on
    assert find_model("runs/small") == str(checkpoints[1])
    shutil.rmtree(small / "checkpoints")
    assert find_model("runs/small") == "runs/small/model"


def test_weights_to_train_from_are_exported_ones(small):
    checkpoint = save(small, 9)
    with pytest.raises(UserError, match=rf"^key: there is no exported model in runs/small; name .* {checkpoint}\.$"):
        find_model("runs/small", "key", is_final=True)
    assert find_model(str(checkpoint), is_final=True) == str(checkpoint)
    finish(small)
    (small / "summary.json").unlink()
    assert find_model("runs/small", is_final=True) == "runs/small/model"


@pytest.mark.parametrize("damage", [flip_a_bit, lambda path: path.write_bytes(b""), lambda path: path.unlink()])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(small, damage, name):
    good, bad = save(small, 1), save(small, 2)
    damage(bad / name)
    if name == "manifest.json" and damage is flip_a_bit:
        (bad / name).write_bytes(b"{}")
    assert find_model("runs/small") == str(good)
    (good / "optimizer.bin").unlink()  # a model without moments is a model
    assert find_model("runs/small") == str(good)


def test_a_run_may_save_and_delete_while_it_is_looked_at(small, monkeypatch):
    save(small, 1)
    real = module._is_undamaged

    def check(checkpoint: Path) -> bool:
        if checkpoint.name == "step-000001":
            save(small, 2)
            prune(small / "checkpoints", keep_last=1)
        return real(checkpoint)

    monkeypatch.setattr(module, "_is_undamaged", check)
    assert find_model("runs/small") == "runs/small/checkpoints/step-000002"


def test_a_checkpoint_that_is_deleted_while_it_loads_is_followed_by_the_newest(small, monkeypatch):
    parts = build_tiny()
    save(small, 1, *parts)
    real = load.load_model

    def load_model(name: str) -> object:
        if name.endswith("step-000001"):
            save(small, 2, *parts)
            prune(small / "checkpoints", keep_last=1)
        return real(name)

    monkeypatch.setattr(load, "load_model", load_model)
    model, _ = load_exported("runs/small")
    assert model.name_or_path == "runs/small/checkpoints/step-000002"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("runs/smal", "did you mean runs/small?"),
        ("runs/smal/model", "did you mean runs/small?"),
        ("./smal", "did you mean runs/small?"),
        ("~/nowhere", "runs here: runs/small."),
        ("~nobody_here/small", "did you mean runs/small?"),
        ("a/b/c", "runs here: runs/small."),
        ("runs/small/config.yaml", "runs here: runs/small."),
        ("two words", "runs here: runs/small."),
    ],
)
def test_a_path_that_does_not_exist_never_reaches_the_hub(small, name, says):
    (small / "model").mkdir()
    with pytest.raises(UserError) as caught:
        find_model(name)
    assert str(caught.value) == f"--model: there is no model {name}; {says}"


def test_a_name_below_runs_is_a_path_even_where_no_run_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--model: there is no model runs/smal; runs here: none\.$"):
        find_model("runs/smal")


def test_looking_for_a_model_imports_nothing_heavy():
    program = "import sys, hfgolf.run.find_model, hfgolf.commands.chat; print({'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_only_what_the_hub_can_have_is_left_to_it(small):
    assert [find_model(name) for name in ("gpt2", "owner/name")] == ["gpt2", "owner/name"]
    Path("owner").mkdir()
    with pytest.raises(UserError, match="there is no model owner/name"):
        find_model("owner/name")


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """Point the client at a port where nothing listens, with an empty cache; return how long it has waited to retry."""
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(constants + "HF_HUB_OFFLINE", False)
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        monkeypatch.setattr(constants + name, "http://127.0.0.1:9")
    monkeypatch.setattr(constants + "HF_HUB_CACHE", str(tmp_path / "hub"))
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    is_cached_only.cache_clear()
    yield waits
    is_cached_only.cache_clear()


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(small, no_network):
    with pytest.raises(UserError) as caught:
        load_exported("smal")
    line = str(caught.value)
    assert line.startswith("--model: cannot load smal: no such folder here, and from the Hub: ConnectError")
    assert line.endswith("; did you mean runs/small?") and "\n" not in line and not no_network


def test_without_a_network_a_model_in_the_cache_loads_at_once(small, no_network, tmp_path):
    commit = "0123456789" * 4
    repository = tmp_path / "hub" / "models--user--name"
    for part in build_tiny():
        part.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    model, _ = load_exported("user/name")
    tokenizer = find_tokenizer(TokenizerSection(kind="pretrained", name_or_path="user/name"), {}, tmp_path)
    assert model.config.vocab_size == len(tokenizer) == 257 and not no_network
    with pytest.raises(UserError, match=r"^tokenizer\.name_or_path: 'user/other' cannot be loaded .*; check the name"):
        find_tokenizer(TokenizerSection(kind="pretrained", name_or_path="user/other"), {}, tmp_path)
    assert not no_network


@pytest.mark.slow
def test_a_run_that_trains_in_another_process_is_sampled_meanwhile(tiny_run, tmp_path, hfgolf):
    """It deletes each checkpoint two saves later."""
    endless = {"train__max_steps": 10**6, "train__eval_every_steps": 10**6}
    endless |= {"train__save_every_steps": 1, "train__keep_last": 1}
    folder = tmp_path / "runs" / "tiny"
    training = start(load_config(tiny_run(**endless)), tmp_path / "output")
    try:
        while not list(folder.glob("checkpoints/step-*")):
            assert training.is_alive(), (tmp_path / "output").read_text()
            time.sleep(0.1)
        used: set[str] = set()
        while len(used) < 3:
            assert training.is_alive()
            used.add(load_exported(str(folder))[0].name_or_path)
        said = hfgolf("generate", folder, "one and", "--max_new_tokens", 4)
        assert said.status == 0 and said.out.startswith("one and")
        assert said.err.startswith(f"model: {folder / 'checkpoints' / 'step-'}")
    finally:
        training.kill()
        training.join()
