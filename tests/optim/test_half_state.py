"""Momentum and moments that are kept in bf16 between steps."""

import pytest
import torch

from hfgolf.optim import muon as muon_module
from hfgolf.optim.muon import Muon

RULES = ("muon", "adamw", "sgd")
SHAPES = [(12, 8), (40, 16), (5,)]


def trained(rule: str, steps: int = 6, **settings) -> tuple[list[torch.Tensor], Muon]:
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES[:2] if rule == "muon" else SHAPES
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = Muon(params, rule=rule, lr=0.01, weight_decay=0.1, newton_schulz_dtype="fp32", **settings)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() for param in params], optimizer


@pytest.mark.parametrize("rule", RULES)
def test_state_is_half_as_large_and_the_result_nearly_equal(rule):
    exact, _ = trained(rule)
    rounded, optimizer = trained(rule, state_dtype="bf16")
    for state in optimizer.state.values():
        assert {value.dtype for name, value in state.items() if name != "step"} == {torch.bfloat16}
    if rule == "muon":
        _, normalized = trained(rule, state_dtype="bf16", normuon_beta2=0.95)
        for state in normalized.state.values():
            assert state["row_mean_square"].dtype == torch.float32 and state["row_mean_square"].min() > 0
    for one, other in zip(exact, rounded, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, atol=4e-3, rtol=0)  # a step is about 0.01


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cautious", [False, True])
def test_pieces_do_not_change_the_result(rule, cautious, monkeypatch):
    settings = {"state_dtype": "bf16", "cautious_weight_decay": cautious}
    whole, optimizer = trained(rule, **settings)
    monkeypatch.setattr(muon_module, "PIECE_ELEMENTS", 50)  # rows of the second weight: 3 at a time, and 1 at the end
    monkeypatch.setattr(muon_module, "MAX_BUCKET_ELEMENTS", {"cpu": 50})
    pieces, in_pieces = trained(rule, **settings)
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other)
    if rule == "adamw":
        assert [state["step"].item() for state in in_pieces.state.values()] == [6.0] * 3
    for one, other in zip(optimizer.state.values(), in_pieces.state.values(), strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name])


@pytest.mark.parametrize("rule", RULES)
def test_a_small_portion_is_widened_at_a_time(rule, monkeypatch):
    """Otherwise the fp32 copies of all states would exist at once, and nothing would be saved at the peak."""
    sizes = []
    monkeypatch.setattr(muon_module, "PIECE_ELEMENTS", 64)
    monkeypatch.setattr(muon_module, "MAX_BUCKET_ELEMENTS", {"cpu": 64})
    apply = Muon._apply
    monkeypatch.setattr(
        Muon, "_apply", lambda self, group, params, *rest: (sizes.append(params), apply(self, group, params, *rest))[1]
    )
    trained(rule, steps=1, state_dtype="bf16")
    elements = [sum(param.numel() for param in params) for params in sizes]
    assert max(elements) <= (640 if rule == "muon" else 64)  # Muon needs whole matrices
    assert sum(elements) == sum(torch.Size(shape).numel() for shape in (SHAPES[:2] if rule == "muon" else SHAPES))


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_a_saved_state_gets_the_dtype_of_the_optimizer_that_loads_it(before, after):
    _, saved = trained("adamw", state_dtype=before)
    _, loaded = trained("adamw", steps=0, state_dtype=after)
    loaded.load_state_dict(saved.state_dict())
    expected = torch.bfloat16 if after == "bf16" else torch.float32
    states = zip(saved.state.values(), loaded.state.values(), strict=True)
    for old, new in states:
        assert new["exp_avg"].dtype == new["exp_avg_sq"].dtype == expected
        assert new["step"].dtype == torch.float32
        torch.testing.assert_close(new["exp_avg"], old["exp_avg"].to(expected))
    for param in loaded.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    loaded.step()
