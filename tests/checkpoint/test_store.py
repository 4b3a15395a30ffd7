"""A checkpoint is complete or absent: any damage is named, and nothing in it is ever executed."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from faults import differences, flip_a_bit, read, remove, rewrite_manifest, same, truncate, valid_steps
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

from hfgolf.checkpoint import contents
from hfgolf.checkpoint.state import TrainState
from hfgolf.checkpoint.store import (
    Rejected,
    begin_checkpoint,
    choose_checkpoint,
    clean_up,
    commit_checkpoint,
    make_latest,
    prune,
    replace_link,
    saved_step,
    set_aside,
    verify,
)
from hfgolf.config.parse import load_config
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import build_optimizer
from hfgolf.system import durable, hardware
from hfgolf.system.errors import UserError
from hfgolf.train import loop, setup

STATE_FILES = ["ema.safetensors", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "train_state.json"]
BESIDE_WEIGHTS = [
    "config.json",
    "configuration_golf.py",
    "generation_config.json",
    "layers_golf.py",
    "modeling_golf.py",
    "tokenizer.json",
    "tokenizer_config.json",
]


def commit(folder: Path, step: int, content: str = "weights", best_step: int = 0) -> Path:
    """Write a checkpoint with one small file and, if there is a best step, a state that names it."""
    partial = begin_checkpoint(folder, step)
    (partial / "model").write_text(content)
    if best_step:
        (partial / "train_state.json").write_text(json.dumps(TrainState(best_step=best_step).state_dict()))
    return commit_checkpoint(partial, step, processes=1)


def choose(folder: Path, which: str) -> Path | None:
    chosen = choose_checkpoint(folder, which)
    if chosen is not None:
        make_latest(folder, chosen)
    return chosen


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_complete_save_without_its_name_is_renamed_at_the_next_start(tmp_path):
    """The power failed between the two renames of a step that is saved again."""
    whole, half = (commit(tmp_path, step).rename(tmp_path / f".partial-step-{step:06d}") for step in (3, 6))
    truncate(half / "model")
    clean_up(tmp_path)
    assert names(tmp_path) == ["latest", "step-000003"] and not whole.exists()
    assert choose(tmp_path, "auto") == tmp_path / "step-000003"


def test_killed_second_save_of_a_step_leaves_the_first(tmp_path):
    """The kill came before the old one was set aside: both are complete, and the old one has the name."""
    first = commit(tmp_path, 3, "first")
    again = commit(tmp_path / "elsewhere", 3, "again").rename(tmp_path / ".partial-step-000003")
    clean_up(tmp_path)
    assert (first / "model").read_text() == "first" and not again.exists()


@pytest.mark.parametrize("damage", [truncate, remove])
def test_newest_reported_checkpoint_is_complete(tmp_path, damage):
    commit(tmp_path, 3)
    newest = commit(tmp_path, 6)
    assert saved_step(tmp_path) == 6
    damage(newest / "model")
    assert saved_step(tmp_path) == 3


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(truncate, "bytes instead of|not readable"), (remove, "is missing"), (flip_a_bit, "sha256|manifest")],
)
def test_damaged_checkpoint_is_named_and_the_previous_one_used(shared_run, tmp_path, caplog, damage, reason):
    checkpoints = shared_run(optim__ema_decay=0.9, model__dropout=0.1) / "checkpoints"
    whole = checkpoints / "step-000006"
    assert names(whole) == sorted([*STATE_FILES, *BESIDE_WEIGHTS, "manifest.json", "run.json"])
    for name in names(whole):
        folder = tmp_path / name
        shutil.copytree(checkpoints, folder, symlinks=True)
        damage(folder / "step-000006" / name)
        caplog.clear()
        assert choose(folder, "latest") == folder / "step-000003"
        (line,) = [line for line in caplog.messages if line.startswith("checkpoint rejected")]
        assert line.startswith("checkpoint rejected: step-000006: ")
        assert name in line or name == "manifest.json", line  # its flipped bit may be in the hash of another file
        assert any(part in line for part in reason.split("|")), line
        assert (folder / "abandoned-step-000006").is_dir() and not (folder / "step-000006").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 1}, "saved by another version of hfgolf .format 1; this version reads 3 and 4."),
        ({"step": 7}, "manifest.json belongs to step 7"),
        ({"processes": None}, "manifest.json is not valid"),
        ({"files": {"model": "7 bytes"}}, "manifest.json is not valid"),
        ({"files": {"model": {"bytes": 7}}}, "manifest.json is not valid"),
        ({"files": {"a\0b": {"bytes": 7, "sha256": ""}}}, "manifest.json is not valid"),
        ({"files": {"n" * 300: {"bytes": 7, "sha256": ""}}}, "nnn is not readable"),
        ({"files": {"../secret": {"bytes": 7, "sha256": ""}}}, "../secret leads out of the folder"),
        ({"files": {"/etc/passwd": {"bytes": 7, "sha256": ""}}}, "/etc/passwd leads out of the folder"),
        ({"files": {}}, "model is not in manifest.json"),
    ],
)
def test_mismatched_manifest_is_rejected(tmp_path, changes, reason):
    checkpoint = commit(tmp_path / "checkpoints", 6)
    (tmp_path / "checkpoints" / "secret").write_text("secret!")
    rewrite_manifest(checkpoint, **changes)
    with pytest.raises(UserError, match=f"no valid checkpoint in .* .step-000006: .*{reason}") as error:
        choose(tmp_path / "checkpoints", "auto")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "6", "{", "{}", "[" * 100_000, "\xff"])
def test_malformed_manifest_is_rejected(tmp_path, text):
    checkpoint = commit(tmp_path, 6)
    (checkpoint / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(Rejected, match=r"manifest.json is (missing or not readable|not valid)"):
        verify(checkpoint)


def test_links_that_leave_the_checkpoint_or_dangle_are_rejected(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "model").write_text("weights")
    checkpoint = commit(tmp_path / "checkpoints", 6)
    verify(checkpoint)

    (checkpoint / "more").symlink_to(tmp_path / "outside")
    with pytest.raises(Rejected, match=r"^more is not in manifest.json$"):
        verify(checkpoint)
    (checkpoint / "more").unlink()

    (checkpoint / "model").unlink()
    (checkpoint / "model").symlink_to(tmp_path / "outside" / "model")  # the very bytes of the manifest
    with pytest.raises(Rejected, match=r"^model leads out of the folder$"):
        verify(checkpoint)

    (checkpoint / "model").unlink()
    (checkpoint / "model").symlink_to("model")
    with pytest.raises(Rejected, match=r"^model is (not readable|missing)"):
        verify(checkpoint)


def test_unreadable_file_is_rejected(tmp_path, monkeypatch):
    checkpoint = commit(tmp_path, 6)

    def bad_sector(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable, "file_sha256", bad_sector)
    with pytest.raises(Rejected, match=r"^model is not readable \(.*Input/output error\)$"):
        verify(checkpoint)


def test_one_line_names_every_rejected_checkpoint(tmp_path):
    for step, damage in ((3, truncate), (6, remove), (9, flip_a_bit)):
        damage(commit(tmp_path, step) / "model")
    with pytest.raises(UserError) as error:
        choose(tmp_path, "latest")
    assert str(error.value) == (
        f"train.resume: no valid checkpoint in {tmp_path} (step-000009: model does not match its sha256;"
        " step-000006: model is missing; step-000003: model has 6 bytes instead of 7); restore one, or start a new run"
        " with another --run.name."
    )
    assert names(tmp_path) == ["latest", "step-000003", "step-000006", "step-000009"]


@pytest.mark.parametrize("which", ["best", "a path"])
def test_named_checkpoint_is_never_replaced_by_another(tmp_path, which):
    for step in (3, 6, 9):
        commit(tmp_path, step, best_step=min(step, 6))
    replace_link(tmp_path / "best", tmp_path / "step-000006")
    which = str(tmp_path / "step-000006") if which == "a path" else which
    flip_a_bit(tmp_path / "step-000006" / "model")
    with pytest.raises(UserError, match=r"^train.resume: .*step-000006 rejected: model does not match .*; choose an"):
        choose(tmp_path, which)
    assert names(tmp_path) == ["best", "latest", "step-000003", "step-000006", "step-000009"]

    flip_a_bit(tmp_path / "step-000006" / "model")
    assert choose(tmp_path, which) == tmp_path / "step-000006"
    assert names(tmp_path) == ["abandoned-step-000009", "best", "latest", "step-000003", "step-000006"]
    assert (tmp_path / "latest").resolve() == tmp_path / "step-000006"


def test_abandoned_checkpoint_can_be_resumed(tmp_path, monkeypatch):
    """A later checkpoint of that step is set aside under another name, without overwriting it."""
    set_aside(commit(tmp_path, 6, "first"))
    commit(tmp_path, 6, "second")
    monkeypatch.setenv("HOME", str(tmp_path))
    chosen = choose(tmp_path, "~/abandoned-step-000006")
    assert chosen is not None and (chosen / "model").read_text() == "first"
    assert (tmp_path / "abandoned-step-000006-2" / "model").read_text() == "second"


def test_auto_starts_over_only_without_checkpoints(tmp_path):
    assert choose(tmp_path, "auto") is None
    with pytest.raises(UserError, match=r"no valid checkpoint in .* \(it has none\)"):
        choose(tmp_path, "latest")
    begin_checkpoint(tmp_path, 3)  # killed in its first save
    assert choose(tmp_path, "auto") is None


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    for step in (1, 2, 3, 4, 5, 1_000_000):  # by number, not by name
        commit(tmp_path, step, best_step=2)
    replace_link(tmp_path / "best", tmp_path / "step-000003")  # an old link, on a file system that makes no new one
    prune(tmp_path, 2)
    assert valid_steps(tmp_path) == [2, 5, 1_000_000]
    assert names(tmp_path) == ["best", "latest", "step-000002", "step-000005", "step-1000000"]


@pytest.mark.parametrize("where", [contents, durable])  # while other files are written; when all are
def test_failed_commit_deletes_nothing(run, tiny_run, monkeypatch, caplog, where):
    """Whichever disk operation fails, nothing is deleted before the new checkpoint is complete."""
    real_sync, seen = durable.sync, {}

    def failing(path: Path) -> None:
        if "step-000004" in path.parent.name:
            raise OSError(28, "No space left on device")
        real_sync(path)

    def look(run_: Any, **options: Any) -> None:
        run_.checkpoints.wait()
        seen[run_.state.step] = names(run_.folder.checkpoints)

    real_save = loop.save

    def save(run_: Any) -> None:
        real_save(run_)
        look(run_)

    monkeypatch.setattr(where, "sync", failing)
    monkeypatch.setattr(loop, "save", save)
    run(tiny_run(train__save_every_steps=2, train__eval_every_steps=99, train__keep_last=1))
    assert seen[2] == seen[4] == ["latest", "step-000002"]
    assert seen[6] == ["best", "latest", "step-000006"]
    assert [line for line in caplog.messages if "not written" in line] == [
        "checkpoint of step 4 not written: [Errno 28] No space left on device; the newest is of step 2"
    ]


def test_checkpoint_has_the_files_of_accelerate(run, tiny_run, tmp_path, monkeypatch, reset_accelerate):
    """Same names and contents as save_state writes and load_state reads."""
    real_save = loop.save

    def save_twice(run_: Any) -> None:
        real_save(run_)
        run_.accelerator.save_state(str(tmp_path / f"oracle-{run_.state.step}"))

    monkeypatch.setattr(loop, "save", save_twice)
    arguments = tiny_run(optim__ema_decay=0.9, model__dropout=0.1, batch__micro_batch_size=4)
    folder = run(arguments)
    for step in (3, 6):
        ours, oracle = folder / "checkpoints" / f"step-{step:06d}", tmp_path / f"oracle-{step}"
        more = ["train_state.json", "run.json", "manifest.json", "ema.safetensors", *BESIDE_WEIGHTS]
        assert names(ours) == sorted([*names(oracle), *more])
        assert all(same(read(ours / name), read(oracle / name)) for name in names(oracle))

    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    model = GolfForCausalLM.from_pretrained(ours)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    config = load_config(arguments).config
    optimizer = build_optimizer(model, config.optim)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(str(ours))
    weights = load_file(ours / "model.safetensors")
    assert weights and all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    assert same(optimizer.state_dict(), read(ours / "optimizer.bin"))
    assert torch.equal(torch.get_rng_state(), read(ours / "random_states_0.pkl")["torch_manual_seed"])


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("is_zipped", [True, False])
def test_checkpoint_code_is_never_executed(run, tiny_run, copied_run, tmp_path, monkeypatch, is_zipped):
    """By an attacker who also fixes the manifest; with a scaler, so that its file is read."""
    folder, mark = copied_run(), tmp_path / "executed"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.is_dir(), "the bomb does not go off"
    mark.rmdir()

    def with_scaler(**options: Any) -> Accelerator:
        accelerator = Accelerator(**options)
        accelerator.scaler = torch.amp.GradScaler("cpu")
        return accelerator

    monkeypatch.setattr(setup, "Accelerator", with_scaler)
    checkpoint, kept = folder / "checkpoints" / "step-000006", tmp_path / "kept"
    torch.save(torch.amp.GradScaler("cpu").state_dict(), checkpoint / "scaler.pt")
    shutil.copytree(checkpoint, kept)
    for name in ("optimizer.bin", "random_states_0.pkl", "scaler.pt"):
        shutil.rmtree(checkpoint)
        shutil.copytree(kept, checkpoint)
        bomb = {"state": Bomb(mark)}
        if is_zipped:
            torch.save(bomb, checkpoint / name)
        else:
            (checkpoint / name).write_bytes(pickle.dumps(bomb))
        rewrite_manifest(checkpoint)
        verify(checkpoint)
        with pytest.raises(UserError, match="holds a pickle that would run code") as error:
            run(tiny_run(train__resume="latest"))
        assert "\n" not in str(error.value)
        assert not mark.exists(), f"{name} was executed"


def test_wrong_file_content_is_one_line(copied_run, tiny_run):
    """With a matching manifest, unlike damage by a disk: still no traceback."""
    folder = copied_run(optim__ema_decay=0.9)
    fresh = setup.set_up(load_config(tiny_run(optim__ema_decay=0.9, train__resume="latest")))
    checkpoint = folder / "checkpoints" / "step-000006"
    accepted = []
    for name in STATE_FILES:
        whole = (checkpoint / name).read_bytes()
        for content in (None, b"", b"something else", b"\x80\x04.", pickle.dumps([1, 2]), torch.zeros(2), {}, {"a": 1}):
            if isinstance(content, bytes):
                (checkpoint / name).write_bytes(content)
            elif name.endswith(".json"):
                (checkpoint / name).write_text(json.dumps(content if isinstance(content, dict | None) else [1]))
            else:
                torch.save(content, checkpoint / name)
            try:
                fresh.checkpoints.load(checkpoint)
                accepted.append((name, content))
            except UserError as error:
                assert "\n" not in str(error)
        (checkpoint / name).write_bytes(whole)
    fresh.checkpoints.load(checkpoint)
    assert accepted == []


def test_checkpoint_of_another_tokenizer_or_without_random_state_is_rejected(run, tiny_run, copied_run):
    """With a matching manifest."""
    checkpoint = copied_run() / "checkpoints" / "step-000006"
    identity = json.loads((checkpoint / "run.json").read_text())
    (checkpoint / "run.json").write_text(json.dumps(identity | {"tokenizer_sha256": "0" * 64}))
    rewrite_manifest(checkpoint)
    with pytest.raises(UserError, match=r"^train.resume: step-000006 was trained with another tokenizer"):
        run(tiny_run(train__resume="latest"))
    earlier = checkpoint.with_name("step-000003")
    (earlier / "random_states_0.pkl").unlink()
    rewrite_manifest(earlier)
    with pytest.raises(UserError, match=r"random_states_0.pkl is missing; choose an earlier checkpoint"):
        run(tiny_run(train__resume=earlier))
    assert checkpoint.is_dir(), "it was not set aside for a checkpoint that is refused"


def test_best_follows_the_run_back(copied_run, tiny_run, reset_accelerate):
    """It is the best of the valid steps, and retention must not delete it in favor of an abandoned one."""
    folder = copied_run()
    best = folder / "checkpoints" / "best"
    assert best.resolve().name == "step-000006"
    flip_a_bit(folder / "checkpoints" / "step-000006" / "model.safetensors")
    reset_accelerate()
    resumed = setup.set_up(load_config(tiny_run(train__resume="latest")))
    assert resumed.state.best_step == 3 and best.resolve().name == "step-000003"

    reset_accelerate()
    path = folder / "checkpoints" / "step-000003"
    other = setup.set_up(load_config(tiny_run(run__name="other", train__resume=path)))
    best_of_other = other.state.best_step, other.state.best_val_loss
    assert other.state.step == 3 and best_of_other == (0, math.inf), "the best of another run is not in this folder"


@pytest.mark.slow
def test_update_waits_until_a_save_has_read_the_weights(run, tiny_run, monkeypatch):
    """The thread writes the weights and the optimizer's state themselves, not copies."""
    straight = run(tiny_run(run__name="straight"))
    write = contents.write_file

    def write_late(path: Path, content: Any) -> dict[str, Any]:
        time.sleep(0.3)  # as long as many steps
        return write(path, content)

    monkeypatch.setattr(contents, "write_file", write_late)
    late = run(tiny_run(run__name="late", batch__micro_batch_size=8, data__in_memory="false"))
    for name in ("step-000003", "step-000006"):
        assert differences(late / "checkpoints" / name, straight / "checkpoints" / name) == []


def test_gpu_tensors_are_not_copied_without_free_memory(tiny_run, monkeypatch):
    """They are then written like a CPU's tensors, while the next update waits."""
    checkpoints = setup.set_up(load_config(tiny_run())).checkpoints
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    tensors = checkpoints._tensors()
    copies = checkpoints._copy_to_host(tensors)
    pairs = zip(tree_leaves(copies), tree_leaves(tensors), strict=True)
    pairs = [(copy, leaf) for copy, leaf in pairs if isinstance(leaf, torch.Tensor)]
    assert pairs and all(copy is not leaf and torch.equal(copy, leaf) for copy, leaf in pairs)
    checkpoints = setup.set_up(load_config(tiny_run())).checkpoints
    monkeypatch.setattr(hardware, "free_cgroup_bytes", lambda: 0)  # a container's limit, not the machine's memory
    assert checkpoints._copy_to_host(tensors) is None


@pytest.mark.parametrize("change", [{"excluded_blocks": [["a"]]}, "deep", "less"])
def test_invalid_train_state_with_a_matching_manifest_is_rejected(tmp_path, change):
    """The previous checkpoint is used, as for any other damage."""
    for step in (3, 6):
        commit(tmp_path, step, best_step=3)
    file = tmp_path / "step-000006" / "train_state.json"
    state = json.loads(file.read_text())
    text = {"deep": "[" * 100_000, "less": json.dumps({"step": 6})}.get(change) if isinstance(change, str) else None
    file.write_text(text or json.dumps(state | change))
    rewrite_manifest(file.parent)
    with pytest.raises(Rejected, match=r"^train_state.json is not valid$"):
        verify(file.parent)
    assert choose(tmp_path, "latest") == tmp_path / "step-000003"


def test_random_state_of_every_gpu_is_saved_and_compared(monkeypatch, tmp_path):
    states = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    saved = contents._random_states(0)
    assert saved["torch_cuda_manual_seed"] == states
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index])
    contents._check_random_states(saved, tmp_path, torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[0])
    with pytest.raises(UserError, match=r"train.resume: the random state in .* could not be restored"):
        contents._check_random_states(saved, tmp_path, torch.device("cuda", 1))
