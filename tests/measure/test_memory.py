"""The micro-batch that memory rules choose: it divides, it fits, and the next larger one would not."""

from __future__ import annotations

import pytest
import torch

from hfgolf.config import BatchConfig
from hfgolf.errors import UserError
from hfgolf.measure.memory import USABLE_SHARE, choose_micro_batch_size, training_memory

SHAPE = {
    "parameters": 124_000_000,
    "matrix_parameters": 85_000_000,
    "layers": 12,
    "width": 768,
    "intermediate": 3072,
    "precision": "bf16",
}
GPU = torch.device("cuda")


def test_weights_gradients_and_state_are_four_bytes_each():
    muon = training_memory(batch=1, sequence=8, **SHAPE)
    assert muon.weights == muon.gradients == 4 * 124_000_000
    assert muon.optimizer == 4 * 85_000_000 + 8 * 39_000_000
    assert training_memory(batch=1, sequence=8, optimizer="adamw", **SHAPE).optimizer == 8 * 124_000_000
    assert muon.total == muon.weights + muon.gradients + muon.optimizer + muon.activations + muon.logits


def test_activations_grow_with_the_tokens_and_shrink_with_checkpointing():
    one, eight = (training_memory(batch=batch, sequence=1024, **SHAPE).activations for batch in (1, 8))
    assert eight == 8 * one
    assert training_memory(batch=8, sequence=1024, gradient_checkpointing=True, **SHAPE).activations < eight / 3


@pytest.mark.parametrize("free_gib", [4, 8, 16, 80])
def test_the_largest_that_fits_is_chosen(free_gib):
    batch = BatchConfig(sequence_length=1024, tokens_per_step=524288)
    free = free_gib * 2**30
    size = choose_micro_batch_size(batch, 1, GPU, free, **SHAPE)
    assert 512 % size == 0
    assert training_memory(batch=size, sequence=1024, **SHAPE).total <= free * USABLE_SHARE
    if size < 512:
        assert training_memory(batch=size * 2, sequence=1024, **SHAPE).total > free * USABLE_SHARE


def test_each_process_takes_its_share():
    batch = BatchConfig(sequence_length=1024, tokens_per_step=8 * 1024)
    assert choose_micro_batch_size(batch, 4, GPU, 80 * 2**30, **SHAPE) == 2
    with pytest.raises(UserError, match="on 3 processes"):
        choose_micro_batch_size(batch, 3, GPU, 80 * 2**30, **SHAPE)


def test_too_little_memory_is_one_line():
    batch = BatchConfig(sequence_length=1024, tokens_per_step=1024)
    with pytest.raises(UserError, match=r"not even one sequence of 1024 tokens fits: it needs .* try model"):
        choose_micro_batch_size(batch, 1, GPU, 2**30, **SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_close_to_what_autograd_saves(checkpointing):
    """Sum the distinct storages that the forward pass keeps for the backward pass of a real model."""
    from hfgolf.model.configuration_golf import GolfConfig
    from hfgolf.model.modeling_golf import GolfForCausalLM

    config = GolfConfig(vocab_size=256, hidden_size=128, num_hidden_layers=4, num_attention_heads=4)
    model = GolfForCausalLM(config).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no storage is used twice
        return tensor

    ids = torch.randint(0, 256, (8, 128))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, shift_labels=ids).loss
    kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    predicted = training_memory(
        parameters=0,
        matrix_parameters=0,
        batch=8,
        sequence=128,
        layers=4,
        width=128,
        intermediate=512,
        gradient_checkpointing=checkpointing,
    ).activations
    if checkpointing:
        kept += predicted - 8 * 128 * (4 * 4 * 128 + 16 * 128)  # one block is whole during the backward pass
    print(f"kept {kept:,} predicted {predicted:,} ratio {predicted / kept:.2f}")
    assert predicted == pytest.approx(kept, rel=0.1)
    del loss
