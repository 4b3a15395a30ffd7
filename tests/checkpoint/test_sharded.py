"""The files of a sharded checkpoint, written and read in one process. tests/train/test_fsdp.py has runs of two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import same
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from hfgolf.checkpoint.sharded import load_optimizer, save_optimizer, write_weights
from hfgolf.checkpoint.store import begin_checkpoint, commit_checkpoint, read_manifest, verify
from hfgolf.optim.muon import Muon
from hfgolf.system.errors import UserError


@pytest.fixture
def mesh() -> Iterator[Any]:
    """One process as a world of its own, in which tensors are sharded."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def build(mesh: Any = None, width: int = 4) -> Muon:
    """Return an optimizer, sharded if there is a mesh, whose every rule has updated a parameter twice."""
    torch.manual_seed(0)
    groups = []
    for rule in ("muon", "adamw", "sgd"):
        weight = torch.randn(6, width)
        param = nn.Parameter(weight if mesh is None else distribute_tensor(weight, mesh, [Shard(0)]))
        groups.append({"params": [param], "rule": rule, "param_names": [f"layer.{rule}"]})
    optimizer = Muon(groups, normuon_beta2=0.9, newton_schulz_dtype="fp32")
    for _ in range(2):
        for group in groups:
            param, gradient = group["params"][0], torch.randn(6, width)
            param.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
    return optimizer


def whole_state(optimizer: Muon) -> list[dict[str, Any]]:
    return [
        {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        for state in optimizer.state.values()
    ]


@pytest.mark.parametrize("saved_sharded", [True, False])
def test_optimizer_moves_between_sharded_and_whole(mesh, tmp_path, saved_sharded):
    save_optimizer(build(mesh if saved_sharded else None), tmp_path / "optimizer", is_main=True)
    fresh = build(None if saved_sharded else mesh)
    for state in fresh.state.values():
        for value in state.values():
            value.zero_()
    load_optimizer(fresh, tmp_path / "optimizer")
    assert same(whole_state(fresh), whole_state(build()))


def test_no_file_of_a_sharded_optimizer_is_a_pickle(mesh, tmp_path):
    save_optimizer(build(mesh), tmp_path, is_main=True)
    suffixes = {path.suffix for path in tmp_path.iterdir()}
    assert suffixes == {".safetensors", ".json"}
    json.loads((tmp_path / "groups.json").read_text())
    assert load_file(next(tmp_path.glob("*.safetensors")))


def test_optimizer_of_another_model_is_refused_and_nothing_changes(mesh, tmp_path):
    save_optimizer(build(mesh), tmp_path, is_main=True)
    other = build(width=5)
    with pytest.raises(UserError, match=r"holds momentum_buffer \(6, 4\), .* for layer.muon, but here it is"):
        load_optimizer(other, tmp_path)
    assert same(whole_state(other), whole_state(build(width=5)))


def test_optimizer_that_cannot_be_written_is_an_os_error(mesh, tmp_path):
    (tmp_path / "optimizer").write_text("a file is in the way")
    with pytest.raises(OSError, match="optimizer"):
        save_optimizer(build(mesh), tmp_path / "optimizer", is_main=True)


def test_weights_are_written_with_the_bytes_of_safetensors(mesh, tmp_path):
    """One tensor after the other, sharded or not; a tied weight once."""
    tied = torch.randn(3, 5)
    plain = {
        "b": torch.randn(7),
        "a": tied,
        "half": torch.randn(3).bfloat16(),
        "z": torch.randn(2, 3, 4),
        "one": torch.tensor(2.0),
        "none": torch.empty(0, 3),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        "count": torch.tensor([3]),
        "double": torch.randn(3, dtype=torch.float64),
    }
    save_file(plain, tmp_path / "expected", metadata={"format": "pt"})
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in plain.items() if tensor.ndim}
    mixed: dict[str, Any] = plain | sharded
    write_weights(tmp_path / "ours", mixed | {"tied": mixed["a"]})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("is_writing", [True, False])
def test_each_process_gathers_every_tensor_even_if_the_disk_is_full(monkeypatch, is_writing):
    """Otherwise the others would wait for it forever."""
    gathered = []
    monkeypatch.setattr("hfgolf.checkpoint.sharded.full_tensor", lambda tensor: gathered.append(tensor.shape) or tensor)
    tensors = {"a": torch.zeros(100_000), "b": torch.zeros(2)}
    if is_writing:
        with pytest.raises(OSError, match="No space left"):
            write_weights(Path("/dev/full"), tensors)
    else:
        write_weights(None, tensors)
    assert gathered == [(100_000,), (2,)]


def test_manifest_covers_subfolders_and_has_its_own_format(tmp_path):
    for step, name in ((1, "model"), (2, "optimizer/shard")):
        partial = begin_checkpoint(tmp_path, step)
        (partial / "optimizer").mkdir()
        (partial / name).write_text("content")
        checkpoint = commit_checkpoint(partial, step, processes=2)
        assert verify(checkpoint)["format"] == step + 2
        assert list(read_manifest(checkpoint)["files"]) == [name]
        (checkpoint / name).write_text("CONTENT")
        with pytest.raises(Exception, match=f"{name} does not match its sha256"):
            verify(checkpoint)
