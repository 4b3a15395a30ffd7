"""Whatever a config enables is enabled in the run that set_up builds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DistributedType
from faults import rewrite_manifest

from hfgolf.config.parse import load_config
from hfgolf.data.batches import Segments, block_starts, part_starts, sample_hash
from hfgolf.hooks import push, standard_hooks
from hfgolf.system import ranks
from hfgolf.system.errors import UserError
from hfgolf.train import decisions, setup, validation
from hfgolf.train.feed import blocks_per_epoch, epoch, start_batches
from hfgolf.train.hooks import Hook, Hooks
from hfgolf.train.process import seed_everything, session
from hfgolf.train.run import Run


@pytest.fixture
def build(tiny_run, reset_accelerate) -> Callable[..., Run]:
    """Return a function that sets up the tiny run with some options, like a new process."""

    def build_(**options: Any) -> Run:
        reset_accelerate()
        resolved = load_config(tiny_run(**options))
        return setup.set_up(resolved, Hooks(standard_hooks(resolved.config)))

    return build_


@pytest.fixture
def own_determinism(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that the run's setting is undone
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_kernels_follow_the_config(build, own_determinism, deterministic):
    build(train__deterministic=str(deterministic).lower())
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


def test_the_kernels_of_a_run_are_not_those_of_the_next(tiny_run, own_determinism):
    config = load_config(tiny_run(train__deterministic="true")).config
    with session(config, None):
        seed_everything(1, config.train.deterministic)
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("precision", "stated", "decided"),
    [("no", "auto", "fp32"), ("bf16", "auto", "bf16"), ("no", "bf16", "bf16"), ("bf16", "fp32", "fp32")],
)
def test_muon_multiplies_in_the_precision_of_the_run(build, monkeypatch, precision, stated, decided):
    """On hardware that is fast at bf16: rounding an update to bf16 would amplify the last bit of a gradient."""
    monkeypatch.setattr(decisions, "fast_product_dtype", lambda device: torch.bfloat16)
    run = build(train__mixed_precision=precision, optim__newton_schulz_dtype=stated)
    assert {group["newton_schulz_dtype"] for group in run.optimizer.param_groups} == {decided}


def test_a_run_from_before_newton_schulz_was_decided_resumes_by_auto(copied_run, build):
    checkpoint = copied_run(train__max_steps=3) / "checkpoints" / "step-000003"
    identity = json.loads((checkpoint / "run.json").read_text())
    identity["config"]["optim.newton_schulz_dtype"] = "auto"
    (checkpoint / "run.json").write_text(json.dumps(identity))
    rewrite_manifest(checkpoint)
    resumed = build(train__resume="auto", train__max_steps=3)
    assert resumed.state.step == 3 and resumed.optimizer.param_groups[0]["newton_schulz_dtype"] == "fp32"


@pytest.mark.parametrize("seed", [7, 8])
def test_run_seed_sets_the_data_order(build, seed):
    run = build(run__seed=seed)
    starts = block_starts(seed, np.arange(8), blocks_per_epoch(run), 32)
    assert next(run.batches)["sample_hash"] == sample_hash(starts)


def test_the_loader_goes_on_after_what_was_read_without_what_is_excluded(build):
    run = build(batch__micro_batch_size=4)
    run.state.blocks, run.state.excluded_blocks = 16, [[18, 21]]
    start_batches(run)
    positions = np.array([16, 17, *range(21, 27)])
    starts = block_starts(run.config.order_seed, positions, blocks_per_epoch(run), 32)
    assert [next(run.batches)["sample_hash"] for _ in range(2)] == [sample_hash(starts[:4]), sample_hash(starts[4:])]
    run.state.blocks = 24
    assert epoch(run) == 27 / blocks_per_epoch(run), "excluded blocks count as read"


@pytest.mark.parametrize(("tokens", "blocks"), [("96", 3), ("97", 4), ("null", None)])
def test_the_first_segmented_tokens_are_read_as_segments(build, tokens, blocks):
    run = build(batch__segment_length=8, batch__segmented_tokens=tokens)
    starts, length = part_starts(run.config.order_seed, np.arange(8), blocks_per_epoch(run), 32, Segments(8, blocks))
    assert length == 8 and starts.shape == (32,)
    assert next(run.batches)["sample_hash"] == sample_hash(starts)


def test_chunks_of_the_loss_are_as_large_on_all_ranks(build, monkeypatch):
    on_this_rank, on_another = 2**20, 2**19
    monkeypatch.setattr(decisions, "chunk_elements", lambda *_: on_this_rank)
    monkeypatch.setattr(decisions, "gather", lambda value: [value, on_another] if value == on_this_rank else [value])
    assert build().raw_model.chunk_elements == on_another


@pytest.mark.parametrize(
    ("options", "name", "line"),
    [
        (
            {},
            "the checkpoint",
            r"^the checkpoint: .* on rank 0 \(\S+\), but other on rank 1 \(second\); .* resume from",
        ),
        (
            {"train__mixed_precision": "null"},
            "train.mixed_precision",
            r"^train\.mixed_precision: .*; state this key\.$",
        ),
        ({}, "data: ", r"^data: \w+: .* on rank 0 .*, but other on rank 1 .*same text"),
    ],
)
def test_ranks_that_read_or_decide_something_else_are_told(build, monkeypatch, options, name, line):
    """In test_ranks.py, two processes exchange such values."""

    def gather(value: Any) -> list[Any]:
        if isinstance(value, tuple) and isinstance(value[-1], dict) and (key := next(iter(value[-1]))).startswith(name):
            return [value, ("second", value[-1] | {key: "other"})]
        return [value]

    monkeypatch.setattr(ranks, "gather", gather)
    with pytest.raises(ranks.RankError, match=line):
        build(**options)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ({"model__architecture": "llama"}, r"^model\.architecture: llama does not train under FSDP2, only golf"),
        ({"optim__state_dtype": "bf16"}, r"^optim\.state_dtype: under FSDP2, .* it must be fp32"),
    ],
)
def test_what_fsdp2_cannot_train_is_refused_in_one_line(build, monkeypatch, option, line):
    real = setup._build_accelerator

    def sharding(config: Any) -> Accelerator:
        accelerator = real(config)
        accelerator.state.distributed_type = DistributedType.FSDP
        return accelerator

    monkeypatch.setattr(setup, "_build_accelerator", sharding)
    with pytest.raises(UserError, match=line):
        build(**option)


def test_a_start_that_fails_leaves_no_folder(build, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfd" * 99)
    with pytest.raises(UserError, match="is not utf-16-le"):
        build(data__files=tmp_path / "bad.txt")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_own_dropout(build, monkeypatch, rank):
    monkeypatch.setattr(Accelerator, "process_index", rank)
    build(run__seed=7)
    assert torch.initial_seed() == 7 + rank


@pytest.mark.parametrize(("checkpointing", "passes"), [("false", 1), ("true", 2)])
def test_gradient_checkpointing_recomputes_each_layer(build, checkpointing, passes):
    run = build(model__gradient_checkpointing=checkpointing)
    layers = run.raw_model.model.layers
    calls: list[int] = []
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(lambda *call, number=number: calls.append(number))
    batch = next(run.batches)
    del batch["sample_hash"]
    run.model.train()
    run.model(**batch).loss.backward()
    assert sorted(calls) == sorted([*range(len(layers))] * passes)


def test_muon_orthogonalizes_q_k_and_v_separately(build):
    groups = build().optimizer.param_groups
    splits = {name: rows for group in groups for name, rows in zip(group["param_names"], group["splits"], strict=True)}
    assert {name: rows for name, rows in splits.items() if rows} == {
        f"model.layers.{layer}.self_attn.qkv_proj.weight": (32, 32, 32) for layer in range(2)
    }


class Halving(Hook):
    """Lets each pass have half of the embedding."""

    @contextmanager
    def weights(self, run: Run) -> Iterator[None]:
        weight = run.raw_model.get_input_embeddings().weight
        kept, weight.data = weight.data, weight.data / 2
        yield
        weight.data = kept


def test_averages_are_evaluated_with_the_weights_that_hooks_want(build):
    run = build(optim__ema_decay=0.9)
    plain = validation.evaluate(run).loss
    run.hooks = Hooks([Halving()])
    row = validation.validate(run, lambda: None)
    assert row["val_loss_ema"] == row["val_loss"] != plain, "before the first step, the averages are the weights"


@pytest.mark.parametrize("is_averaged", [False, True])
def test_samples_and_pushes_use_the_exported_weights(build, monkeypatch, is_averaged):
    run = build(optim__ema_decay=0.9, optim__ema_export=str(is_averaged).lower())
    weight = run.raw_model.lm_head.weight
    initial = weight.detach().clone()
    weight.data = initial + 1  # the average stays behind
    expected = initial if is_averaged else initial + 1
    seen: list[bool] = []

    def look(*arguments: Any, **options: Any) -> None:
        seen.append(torch.equal(weight, expected))

    monkeypatch.setattr(validation, "generate_text", look)
    monkeypatch.setattr(push, "export_model", look)
    monkeypatch.setattr(push.HubPusher, "push_later", lambda *arguments: None)
    validation.write_sample(run)
    push.Push(1, push.HubPusher("user/name", private=False)).after_step(run, None)
    assert seen == [True, True]
    assert torch.equal(weight, initial + 1)


def test_a_native_form_that_does_not_exist_is_refused_before_training(build):
    pushed = {"hub__push": "true", "hub__repo_id": "user/name"}
    with pytest.raises(
        UserError, match=r"^hub\.format: no architecture .* Apertus needs model\.overrides\.logit_soft_cap"
    ):
        build(**pushed, hub__format="native", model__overrides="{logit_soft_cap: 15}")
    assert build(**pushed, model__overrides="{logit_soft_cap: 15}").config.hub.format == "auto"


def test_second_run_of_a_process_cannot_have_another_precision(build, tiny_run):
    build(run__name="first")
    with pytest.raises(
        UserError, match=r"train\.mixed_precision: this process computes in no and cannot change to bf16"
    ):
        setup.set_up(load_config(tiny_run(run__name="second", train__mixed_precision="bf16")))


@pytest.mark.parametrize("low_memory", [False, True])
def test_low_memory_halves_the_state_recomputes_and_takes_no_large_pages(build, monkeypatch, low_memory):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    run = build(train__low_memory=str(low_memory).lower())
    assert all(run.optimizer.state[parameter] for parameter in run.raw_model.parameters()), "before the first step"
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == ("0" if low_memory else "1")
    small = {"step", "row_mean_square"}  # one number per tensor or row
    kept = {value.dtype for state in run.optimizer.state.values() for name, value in state.items() if name not in small}
    assert kept == {torch.bfloat16 if low_memory else torch.float32}
    assert run.raw_model.model.layers[0].gradient_checkpointing is low_memory
    assert f"low_memory: {str(low_memory).lower()}" in run.folder.config.read_text()
