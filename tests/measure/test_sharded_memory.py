"""The memory prediction under FSDP2 compared with the live bytes of one rank; the other three of its world are fake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hfgolf.config.sections import BatchSection, OptimSection, RunConfig, TrainSection
from hfgolf.measure.fake_pass import LiveBytes
from hfgolf.measure.memory import run_memory
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import build_optimizer

RANKS = 4


@pytest.fixture
def fake_world() -> Iterator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    distributed.destroy_process_group()


def follow_storages(monkeypatch: pytest.MonkeyPatch, live: LiveBytes) -> None:
    """Let `live` see that FSDP2 frees gathered weights by resizing their storages."""
    for name in ("free_storage", "alloc_storage"):
        real = getattr(_fsdp_param, name)

        def resize(tensor: Tensor, real=real) -> None:
            storage = tensor.untyped_storage()
            real(tensor)
            live.now += storage.nbytes() - live._sizes.get(storage._cdata, 0)
            live._sizes[storage._cdata] = storage.nbytes()
            live.peak = max(live.peak, live.now)

        monkeypatch.setattr(_fsdp_param, name, resize)


@pytest.mark.parametrize("batch", [1, 16])
def test_fsdp2_needs_what_is_predicted(fake_world, monkeypatch, batch):
    golf = GolfConfig(vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
    model = GolfForCausalLM(golf)
    config = RunConfig(
        batch=BatchSection(sequence_length=64, tokens_per_step=batch * 64 * RANKS),
        optim=OptimSection(ema_decay=0.9),
        train=TrainSection(max_steps=1, mixed_precision="no"),
    )
    predicted = run_memory(config, model, batch, RANKS, "cpu", is_sharded=True)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, OptimSection(newton_schulz_dtype="fp32"))
    optimizer.create_state()
    weights = list(model.parameters())
    state = [value for values in optimizer.state.values() for value in values.values()]
    shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (*weights, *state)]
    num_bytes = sum(shard.nbytes for shard in shards)
    assert predicted.weights + predicted.optimizer == pytest.approx(num_bytes, rel=1e-3)
    assert predicted.ema == predicted.gradients == predicted.weights

    tokens = torch.randint(0, 512, (batch, 64))
    with LiveBytes() as live:
        follow_storages(monkeypatch, live)
        for shard in shards:
            live.note(shard)
        model(input_ids=tokens, labels=tokens).loss.backward()
        in_pass, live.peak = live.peak, live.now
        optimizer.step()
        in_update = live.peak
    expected_pass = predicted.buckets + predicted.activations + max(predicted.loss, predicted.backward) + num_bytes
    assert expected_pass == pytest.approx(in_pass, rel=0.05)
    expected_update = predicted.gradients + predicted.update + num_bytes
    assert in_update <= expected_update <= 1.1 * in_update
    assert predicted.peak - predicted.ema == pytest.approx(max(expected_pass, expected_update), rel=1e-3)
