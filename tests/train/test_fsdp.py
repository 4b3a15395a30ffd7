"""FSDP2 on two CPU processes: the same run as with DDP, with the same files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pkgutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import assert_same_course, column, losses, rows, start_two, train_on_two, valid_steps
from hub_server import serving, take_for_the_hub
from safetensors.torch import load, load_file
from sharded import needs_fsdp2, shard
from tiny_export import exported_weights

from hfgolf.commands.evidence import diff_runs, evidence, verdict
from hfgolf.run.folder import RunFolder
from hfgolf.train import validation

pytestmark = [pytest.mark.distributed, pytest.mark.slow, needs_fsdp2]

OPTIONS = {
    "batch__micro_batch_size": 2,  # two micro-batches per step
    "optim__ema_decay": 0.9,
    "train__max_grad_norm": 0.5,
    "schedule__name": "constant",
}


def assert_same_weights(ours: Path, theirs: Path) -> None:
    one, other = load_file(ours), load_file(theirs)
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-4, atol=1e-5)


def worsen() -> None:
    """Let validation get worse with each evaluation, so that the weights of the first one are the best."""
    real, calls = validation.evaluate_loss, itertools.count()

    def worsening(*arguments: Any, **options: Any) -> Any:
        evaluation = real(*arguments, **options)
        return dataclasses.replace(evaluation, nats=evaluation.nats * (1 + next(calls)))

    validation.evaluate_loss = worsening


def worsen_shards_and_push(endpoint: str) -> None:
    """The same under FSDP2, with this server for the Hub."""
    worsen()
    shard()
    take_for_the_hub(pytest.MonkeyPatch(), endpoint)


def test_fsdp2_trains_saves_exports_and_pushes_as_ddp_does(tiny_run, tmp_path):
    """With accumulation, clipping, averages, samples, checkpoints and an export of the best weights."""
    options = OPTIONS | {"model__tie_word_embeddings": "false", "optim__ema_export": "true"}
    pushes = {"hub__push": "true", "hub__repo_id": "user/sharded", "hub__every_steps": 3, "hub__format": "golf"}
    train_on_two(tiny_run(run__name="ddp", **options), tmp_path / "output", worsen)
    with serving() as server:
        prepare = functools.partial(worsen_shards_and_push, server.endpoint)
        train_on_two(tiny_run(run__name="fsdp", **options, **pushes), tmp_path / "output", prepare)
        repository = server.repositories["user/sharded"]
    ddp, fsdp = tmp_path / "runs" / "ddp", tmp_path / "runs" / "fsdp"
    assert_same_course(fsdp, ddp)
    for name in ("model/model.safetensors", *(f"checkpoints/latest/{n}.safetensors" for n in ("model", "ema"))):
        assert_same_weights(fsdp / name, ddp / name)
    files = [{path.name for path in (folder / "checkpoints" / "latest").iterdir()} for folder in (fsdp, ddp)]
    assert files[0] ^ files[1] == {"optimizer", "optimizer.bin"}
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (fsdp, ddp)]
    assert summaries[0]["val_loss"] == pytest.approx(summaries[1]["val_loss"], rel=1e-5)
    assert summaries[0]["parameters"] == summaries[1]["parameters"] and "sample" in summaries[0]
    assert [summary["step"] for summary in summaries] == [3, 3]
    exported, best = exported_weights(fsdp / "model"), load_file(fsdp / "checkpoints" / "best" / "ema.safetensors")
    folded = {"model.embed_norm.weight", "model.embed_tokens.weight"}  # for good, because the head is not tied
    assert best.keys() > folded
    assert all(torch.equal(exported[name], weight) for name, weight in best.items() if name not in folded)
    samples = [(folder / "metrics.jsonl").read_text().count('"sample"') for folder in (fsdp, ddp)]
    assert samples[0] == samples[1] > 0
    assert repository.commits[0] == "step 3" and "validation loss" in repository.commits[-1]
    pushed = load(repository.files["model.safetensors"])
    assert pushed and all(torch.equal(exported[name], weight) for name, weight in pushed.items())


def test_fsdp2_trains_in_bf16_with_gradient_checkpointing(shared_run, tiny_run, tmp_path):
    """One process computes the same in bf16 up to its rounding; FSDP2 also rounds the weights that it gathers."""
    options = OPTIONS | {"train__mixed_precision": "bf16", "model__gradient_checkpointing": "true"}
    train_on_two(tiny_run(run__name="fsdp", **options), tmp_path / "output", shard)
    assert losses(tmp_path / "runs" / "fsdp") == pytest.approx(losses(shared_run(**options)), rel=5e-3)


def compile_cheaply() -> None:
    """Trace as a compiled run does, with gradients, but generate no code; shard."""
    real = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, **options: real(self, **options | {"backend": "aot_eager"})
    shard()


def test_compiled_fsdp2_computes_as_uncompiled(shared_run, tiny_run, tmp_path):
    """The pass that compiles leaves no gradients behind."""
    options = OPTIONS | {"train__max_steps": 3}
    straight = shared_run(**options)
    arguments = tiny_run(run__name="fsdp", **options, train__compile="true")
    train_on_two(arguments, tmp_path / "output", compile_cheaply)
    assert losses(tmp_path / "runs" / "fsdp") == pytest.approx(losses(straight), rel=1e-5)
    norms = [rows(folder)[0]["grad_norm"] for folder in (tmp_path / "runs" / "fsdp", straight)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_run_moves_between_one_process_ddp_and_fsdp2(run, tiny_run, shared_run, copied_run, tmp_path):
    """Odd numbers of steps at each change."""
    straight = shared_run(**OPTIONS, train__max_steps=9)
    copied_run(**OPTIONS, train__max_steps=3)
    options = OPTIONS | {"train__resume": "latest"}
    train_on_two(tiny_run(**options, train__max_steps=5), tmp_path / "output")
    train_on_two(tiny_run(**options, train__max_steps=8), tmp_path / "output", shard)
    moved = run(tiny_run(**options, train__max_steps=9))
    assert column(moved, "sample_hashes") == column(straight, "sample_hashes")
    for name in ("train_losses", "grad_norms"):
        assert column(moved, name) == pytest.approx(column(straight, name), rel=1e-5)
    assert_same_weights(moved / "model" / "model.safetensors", straight / "model" / "model.safetensors")


SAVE, COMMIT = ("hfgolf.checkpoint.contents", "save_optimizer"), ("hfgolf.checkpoint.contents", "commit_checkpoint")
WRITE = ("torch.distributed.checkpoint:HuggingFaceStorageWriter", "write_data")


def fault_on(rank: int, function: tuple[str, str], call: int, fault: Callable[[], object]) -> None:
    """Train with FSDP2; on this rank, call `fault` before the n-th call of a function. function: owner and name."""
    shard()
    owner, name = pkgutil.resolve_name(function[0]), function[1]
    real, calls = getattr(owner, name), itertools.count(1)

    def faulty(*arguments: Any, **options: Any) -> Any:
        if os.environ["RANK"] == str(rank) and next(calls) == call:
            fault()
        return real(*arguments, **options)

    setattr(owner, name, faulty)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    raise OSError(28, "No space left on device")


def test_fsdp2_run_that_is_killed_in_its_saves_ends_as_one_that_is_not(tiny_run, tmp_path):
    """One process dies before it writes its shards, then one between them and the manifest; then a disk is full."""
    options = OPTIONS | {"train__save_every_steps": 2, "train__keep_last": 9, "model__dropout": 0.1}
    train_on_two(tiny_run(run__name="straight", **options), tmp_path / "output", shard)
    arguments = tiny_run(run__name="killed", **options, train__resume="auto")
    straight, killed = tmp_path / "runs" / "straight", tmp_path / "runs" / "killed"
    for number, (rank, function, call) in enumerate([(1, SAVE, 2), (0, COMMIT, 2)], start=1):
        processes = start_two(arguments, tmp_path / "output", functools.partial(fault_on, rank, function, call, kill))
        processes[rank].join(120)
        assert processes[rank].exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()
        processes[1 - rank].kill()  # as torchrun does
        processes[1 - rank].join()
        assert valid_steps(killed / "checkpoints") == [2, 3][:number]  # the best, of step 3, is saved, too
        partial = killed / "checkpoints" / f".partial-step-{number + 2:06d}"
        assert (partial / "optimizer" / "groups.json").exists() == (rank == 0)
    prepare = functools.partial(fault_on, 1, WRITE, 1, fill_disk)
    train_on_two(tiny_run(run__name="killed", **options, train__resume="auto"), tmp_path / "output", prepare)
    assert "checkpoint of step 4 not written: [Errno 28] No space left" in (tmp_path / "output").read_text()
    assert valid_steps(killed / "checkpoints") == [2, 3, 6]
    assert losses(killed) == losses(straight)
    assert verdict(diff_runs(evidence(RunFolder(straight)), evidence(RunFolder(killed))), 6, is_exact=True)[0]
