"""Heads that start as induction heads: what they attend to, what a model learns with them, and which have no room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hfgolf.config.parse import load_config
from hfgolf.train.build import build_model

LENGTH, ENTRIES = 32, 200
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(**values: Any) -> Any:
    torch.manual_seed(1)
    stated = {f"model.{key}": value for key, value in (SHAPE | values).items()}
    stated |= {"batch.sequence_length": 2 * LENGTH, "batch.segment_length": None}
    return build_model(load_config(["--config", "small"], values=stated).config, ENTRIES, "cpu")


def twice(rows: int = 16) -> torch.Tensor:
    """Return (rows, 2 x LENGTH) random ids, of which the second half repeats the first."""
    return torch.randint(ENTRIES, (rows, LENGTH)).repeat(1, 2)


@pytest.mark.parametrize("shared", [None, 2, 1], ids=["", "two groups", "one group"])
def test_heads_attend_to_the_token_before_and_to_what_followed_the_same_one(shared):
    model = build(induction_heads=2, num_key_value_heads=shared)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        first, second = model(input_ids=twice(), output_attentions=True).attentions
    before = first.diagonal(-1, 2, 3).mean((0, 2))
    followed = second.diagonal(1 - LENGTH, 2, 3).mean((0, 2))
    starts = [0, 1] if shared is None else [0, 2] if shared == 2 else [0]
    for head in range(4):
        assert (before[head] > 0.4) == (head in starts), before
        assert (followed[head] > 3 / (2 * LENGTH)) == (head in starts), followed


def test_a_model_with_them_learns_to_copy_and_one_without_does_not():
    def loss_of_copies(heads: int) -> float:
        model = build(induction_heads=heads).train()
        optimizer = torch.optim.AdamW(model.parameters(), 0.005)
        for _ in range(40):
            ids = twice()
            model(input_ids=ids[:, :-1], shift_labels=ids[:, 1:]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ids = twice()
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, LENGTH:-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, LENGTH + 1 :].flatten()).item()

    assert loss_of_copies(2) < loss_of_copies(0) - 1


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 1},
        {"position_embedding": "learned"},
        {"qk_norm": False},
        {"overrides": {"rope_dims": 4}},
        {"overrides": {"norm_weight": False}},
        {"overrides": {"embedding_size": 16}},
    ],
    ids=lambda values: "-".join(values),
)
def test_a_shape_without_room_starts_as_without_them(values):
    with_heads, without = build(**values, induction_heads=2), build(**values, induction_heads=0)
    for name, weight in with_heads.state_dict().items():
        assert torch.equal(weight, without.state_dict()[name]), name
