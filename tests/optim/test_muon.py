"""The optimizer compared with torch's Muon, AdamW and SGD, with arithmetic by hand, and under a gradient scaler."""

import pytest
import torch

from hfgolf.optim import muon as muon_module
from hfgolf.optim.muon import Muon
from hfgolf.optim.state import new_state

SHAPES = [(12, 12), (8, 24), (24, 8), (12, 12)]


def random_tensors(seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def parameters(seed: int = 0, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(tensor) for tensor in random_tensors(seed, shapes)]


def step_with_gradients(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], seed: int) -> None:
    shapes = [tuple(param.shape) for param in params]
    for param, grad in zip(params, random_tensors(seed, shapes), strict=True):
        param.grad = grad.to(param.dtype)
    optimizer.step()


def follow(ours: torch.optim.Optimizer, ours_params: list, oracle: torch.optim.Optimizer, oracle_params: list) -> None:
    """Take 20 steps of both with the same gradients, changing learning rate and decay at each step."""
    for step in range(20):
        for optimizer in (ours, oracle):
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (1 - step / 25)
                group["weight_decay"] = 0.1 + 0.01 * step if group["weight_decay"] else 0.0
                if "momentum" in group:
                    group["momentum"] = 0.85 + 0.005 * step
        step_with_gradients(ours, ours_params, 100 + step)
        step_with_gradients(oracle, oracle_params, 100 + step)


FOLLOWED = [*SHAPES, (64, 160), (160, 64)]  # the last two use pairs of iterations that share a Gram matrix


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_classic_matches_torch_muon(monkeypatch, dtype, scale):
    if dtype == "fp32":
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch.optim.Muon only supports bf16
    ours_params, oracle_params = parameters(shapes=FOLLOWED), parameters(shapes=FOLLOWED)
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.85}
    ours = Muon(
        ours_params, newton_schulz_coefficients="classic", newton_schulz_dtype=dtype, update_scale=scale, **options
    )
    oracle = torch.optim.Muon(oracle_params, adjust_lr_fn=scale, **options)
    follow(ours, ours_params, oracle, oracle_params)
    if dtype == "fp32":
        torch.testing.assert_close(ours_params, oracle_params, rtol=1e-4, atol=1e-4)
        return
    for start, a, b in zip(parameters(shapes=FOLLOWED), ours_params, oracle_params, strict=True):
        # 20 rounded updates: torch also rounds the norm to 8 bits
        assert torch.linalg.vector_norm(a - b) < 0.02 * torch.linalg.vector_norm(b - start)


def test_adamw_groups_match_torch_adamw_bitwise():
    shapes = [(7,), (5, 9), (1,)]
    ours_params, oracle_params = parameters(shapes=shapes), parameters(shapes=shapes)
    options = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    ours = Muon(ours_params, rule="adamw", **options)
    oracle = torch.optim.AdamW(oracle_params, fused=True, **options)
    follow(ours, ours_params, oracle, oracle_params)
    assert all(torch.equal(a, b) for a, b in zip(ours_params, oracle_params, strict=True))


def test_sgd_groups_match_torch_sgd():
    ours_params, oracle_params = parameters(), parameters()
    ours = Muon(ours_params, rule="sgd", lr=0.02, momentum=0.85)
    oracle = torch.optim.SGD(oracle_params, lr=0.02, momentum=0.85, nesterov=True)
    follow(ours, ours_params, oracle, oracle_params)
    torch.testing.assert_close(ours_params, oracle_params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta2", [None, 0.9])
def test_fused_rows_are_separate_matrices(beta2):
    rows = (6, 4, 4)
    fused = parameters(shapes=[(14, 10)])
    separate = [torch.nn.Parameter(piece.clone()) for piece in fused[0].data.split(rows)]
    options = {"normuon_beta2": beta2, "newton_schulz_dtype": "fp32"}
    ours, oracle = Muon([{"params": fused, "splits": [rows]}], **options), Muon(separate, **options)
    for step in range(3):
        step_with_gradients(ours, fused, step)
        for piece, grad in zip(separate, fused[0].grad.split(rows), strict=True):
            piece.grad = grad
        oracle.step()
    torch.testing.assert_close(fused[0].data, torch.cat([piece.data for piece in separate]), rtol=1e-5, atol=1e-5)
    if beta2 is not None:
        states = torch.cat([oracle.state[piece]["row_mean_square"] for piece in separate])
        torch.testing.assert_close(ours.state[fused[0]]["row_mean_square"], states)


def test_splits_follow_their_weight_if_another_has_no_gradient():
    params, alone = parameters(shapes=[(12, 4), (12, 4)]), parameters(shapes=[(12, 4), (12, 4)])[1:]
    params[1].grad = torch.ones_like(params[1]).tril()
    alone[0].grad = params[1].grad.clone()
    Muon([{"params": params, "splits": [None, (6, 6)]}]).step()
    Muon([{"params": alone, "splits": [(6, 6)]}]).step()
    assert torch.equal(params[1], alone[0])


ALL_OPTIONS = {"row_equilibration": True, "normuon_beta2": 0.9, "cautious_weight_decay": True}


@pytest.mark.parametrize("rows", [None, (12, 4, 8)])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS, {"update_scale": "match_rms_adamw"}])
def test_weights_stored_in_out_get_the_transposed_update(rows, options):
    options = {"newton_schulz_dtype": "fp32", "weight_decay": 0.2} | options
    out_in = parameters(shapes=[(24, 10), (24, 10)])
    in_out = [torch.nn.Parameter(param.detach().mT.contiguous()) for param in out_in]
    oracle = Muon([{"params": out_in, "splits": [rows, None]}], **options)
    ours = Muon([{"params": in_out, "splits": [rows, None], "in_out": True}], **options)
    for step in range(3):
        step_with_gradients(oracle, out_in, step)
        for param, transposed in zip(out_in, in_out, strict=True):
            transposed.grad = param.grad.mT.contiguous()
        ours.step()
    for param, transposed in zip(out_in, in_out, strict=True):
        torch.testing.assert_close(transposed.data, param.data.mT, rtol=1e-4, atol=1e-5)
        assert [value.shape for value in ours.state[transposed].values()][1:] == [
            value.shape for value in oracle.state[param].values()
        ][1:]


def test_normuon_by_hand():
    grads = random_tensors(3, [(6, 10), (6, 10)])
    plain, even = parameters(shapes=[(6, 10)]), parameters(shapes=[(6, 10)])
    options = {"lr": 1.0, "momentum": 0.0, "newton_schulz_dtype": "fp32"}
    plain_optimizer, even_optimizer = Muon(plain, **options), Muon(even, normuon_beta2=0.75, **options)
    mean_square = torch.zeros(6)
    for grad in grads:
        before = [plain[0].detach().clone(), even[0].detach().clone()]
        plain[0].grad, even[0].grad = grad, grad
        plain_optimizer.step()
        even_optimizer.step()
        update, even_update = before[0] - plain[0].detach(), before[1] - even[0].detach()
        mean_square = 0.75 * mean_square + 0.25 * update.square().mean(dim=1)
        expected = update / mean_square.sqrt()[:, None]
        expected *= update.norm() / expected.norm()
        torch.testing.assert_close(even_update, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(even_optimizer.state[even[0]]["row_mean_square"], mean_square)
    assert list(plain_optimizer.state[plain[0]]) == ["momentum_buffer"]


def test_row_equilibration_removes_row_scale():
    (grad,) = random_tensors(3, [(8, 12)])
    scaled = grad * torch.logspace(-3, 3, 8)[:, None]
    for is_on in (True, False):
        params = [parameters(shapes=[(8, 12)])[0] for _ in range(2)]
        for param, gradient in zip(params, (grad, scaled), strict=True):
            param.grad = gradient
            Muon([param], momentum=0.0, newton_schulz_dtype="fp32", row_equilibration=is_on).step()
        assert torch.allclose(*params, rtol=1e-4, atol=1e-5) == is_on


@pytest.mark.parametrize("num_zero_rows", [1, 8])
@pytest.mark.parametrize("options", [{}, {"row_equilibration": True}, {"normuon_beta2": 0.9}, ALL_OPTIONS])
def test_rows_without_a_gradient_do_not_change(options, num_zero_rows):
    """Dead neurons have such rows. Nothing is divided by 0."""
    (param,), (before,) = parameters(shapes=[(8, 12)]), parameters(shapes=[(8, 12)])
    param.grad = torch.zeros(8, 12)
    param.grad[num_zero_rows:] = random_tensors(3, [(8 - num_zero_rows, 12)])[0]
    Muon([param], newton_schulz_dtype="fp32", **options).step()
    assert param.isfinite().all()
    assert torch.equal(param[:num_zero_rows], before[:num_zero_rows])
    assert (param != before)[num_zero_rows:].all()


@pytest.mark.parametrize("rule", ["muon", "adamw", "sgd"])
def test_cautious_decay_applies_only_if_the_update_shrinks_the_weight(rule):
    cautious, plain = parameters(), parameters()
    optimizer = Muon(cautious, rule=rule, lr=0.1, weight_decay=0.5, cautious_weight_decay=True)
    oracle = Muon(plain, rule=rule, lr=0.1)
    for step in (50, 51):
        for param, twin in zip(cautious, plain, strict=True):
            twin.data.copy_(param)
        before = [param.detach().clone() for param in plain]
        step_with_gradients(oracle, plain, step)
        step_with_gradients(optimizer, cautious, step)
        for start, moved, param in zip(before, plain, cautious, strict=True):
            is_towards_zero = (start - moved) * start > 0
            assert 0.2 < is_towards_zero.float().mean() < 0.8
            torch.testing.assert_close(param.data, moved - 0.1 * 0.5 * start * is_towards_zero)


def test_bucket_size_does_not_change_results(monkeypatch):
    shapes = [(24, 24)] * 5 + [(24, 72)] * 3
    together, apart = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizer, one_by_one = Muon(together), Muon(apart)
    for step in range(2):
        step_with_gradients(optimizer, together, step)
    monkeypatch.setitem(muon_module.MAX_BUCKET_ELEMENTS, "cpu", 1)
    for step in range(2):
        step_with_gradients(one_by_one, apart, step)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float32])
def test_products_use_the_configured_dtype(monkeypatch, fast):
    monkeypatch.setattr(muon_module, "fast_product_dtype", lambda device: fast)
    weights = {}
    for name in ("auto", "bf16", "fp32"):
        params = parameters()
        step_with_gradients(Muon(params, newton_schulz_dtype=name), params, 1)
        weights[name] = params
    same, other = ("bf16", "fp32") if fast == torch.bfloat16 else ("fp32", "bf16")
    assert all(torch.equal(a, b) for a, b in zip(weights["auto"], weights[same], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights["auto"], weights[other], strict=True))


def test_higher_dimensions_are_flattened_to_two():
    deep, flat = parameters(shapes=[(6, 2, 5)]), parameters(shapes=[(6, 10)])
    step_with_gradients(Muon(deep), deep, 1)
    step_with_gradients(Muon(flat), flat, 1)
    torch.testing.assert_close(deep[0].data.view(6, 10), flat[0].data)


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("options", [{}, {**ALL_OPTIONS, "state_dtype": "bf16"}, {"cautious_weight_decay": True}])
def test_matrices_take_turns(every, options):
    """In its turn, a matrix changes as in a step at so many times the rate; momentum follows every gradient."""
    settings = {"weight_decay": 0.1, "newton_schulz_dtype": "fp32", **options}
    params = parameters()
    optimizer = Muon(params, lr=0.02, muon_every_steps=every, **settings)
    alone = parameters()
    oracles = [Muon([param], **settings) for param in alone]
    updates = [0] * len(params)
    for step in range(2 * every):
        before = [param.detach().clone() for param in params]
        step_with_gradients(optimizer, params, step)
        for i, (param, old, own, oracle) in enumerate(zip(params, before, alone, oracles, strict=True)):
            is_due = not torch.equal(param, old)
            updates[i] += is_due
            own.grad = param.grad
            oracle.param_groups[0]["lr"] = every * 0.02 if is_due else 0.0
            oracle.create_state()
            averages = {name: value.clone() for name, value in oracle.state[own].items() if name == "row_mean_square"}
            oracle.step()
            if not is_due:  # the averages of NorMuon move only in a matrix's turn
                oracle.state[own].update(averages)
            torch.testing.assert_close(param, own)
            torch.testing.assert_close(optimizer.state[param], oracle.state[own])
    assert updates == [2] * len(params)


@pytest.mark.parametrize("rule", ["muon", "adamw", "sgd"])
def test_parameters_without_gradient_do_not_change_but_have_state(rule):
    params = parameters()
    before = params[1].detach().clone()
    optimizer = Muon(params, rule=rule, weight_decay=0.5)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert torch.equal(params[1], before)
    assert all(set(optimizer.state[param]) == set(optimizer.state[params[0]]) for param in params)
    assert all(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())


def test_out_of_memory_in_a_step_changes_no_weight(monkeypatch):
    params, untroubled = parameters(), parameters()
    rules = ["muon", "sgd", "muon", "adamw"]
    optimizer, oracle = (
        Muon([{"params": [p], "rule": rule} for p, rule in zip(of, rules, strict=True)]) for of in (params, untroubled)
    )

    def out_of_memory(group: dict, param: torch.Tensor) -> dict[str, torch.Tensor]:
        if param is params[-1]:
            raise torch.OutOfMemoryError
        return new_state(group, param)

    monkeypatch.setattr(muon_module, "new_state", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        step_with_gradients(optimizer, params, 1)
    assert all(torch.equal(param, start) for param, start in zip(params, parameters(), strict=True))

    monkeypatch.undo()
    step_with_gradients(optimizer, params, 1)
    step_with_gradients(oracle, untroubled, 1)
    assert all(torch.equal(a, b) for a, b in zip(params, untroubled, strict=True))


@pytest.mark.parametrize("rule", ["muon", "adamw", "sgd"])
def test_bf16_parameters_have_fp32_state(rule):
    wide = parameters()
    narrow = [torch.nn.Parameter(param.detach().bfloat16()) for param in wide]
    wide = [torch.nn.Parameter(param.detach().float()) for param in narrow]
    narrow_optimizer, wide_optimizer = Muon(narrow, rule=rule, lr=0.01), Muon(wide, rule=rule, lr=0.01)
    for param, full, grad in zip(narrow, wide, random_tensors(5), strict=True):
        param.grad = grad.bfloat16()
        full.grad = param.grad.float()
    narrow_optimizer.step()
    wide_optimizer.step()
    for param, full in zip(narrow, wide, strict=True):
        for name, value in narrow_optimizer.state[param].items():
            assert value.dtype == torch.float32
            assert torch.equal(value, wide_optimizer.state[full][name])
        assert torch.equal(param, full.bfloat16())  # rounded once


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_gradient_scaler_unscales_once_and_skips_overflow(rule):
    params, plain = parameters(), parameters()
    optimizer, oracle = Muon(params, rule=rule), Muon(plain, rule=rule)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        weights = random_tensors(step)
        scaler.scale(sum((p * w).sum() for p, w in zip(params, weights, strict=True))).backward()
        scaler.unscale_(optimizer)  # like clipping, before the step
        scaler.step(optimizer)
        scaler.update()
        step_with_gradients(oracle, plain, step)
        optimizer.zero_grad()
    torch.testing.assert_close(params, plain, rtol=1e-5, atol=1e-5)

    before = [param.detach().clone() for param in params]
    scaler.scale(params[0].sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"rule": "lion"}, "lion"),
        ({"params": [torch.nn.Parameter(torch.ones(3))]}, "shape"),
        ({"splits": [(4, 4)]}, "add up"),
        ({"newton_schulz_coefficients": "cubic"}, "cubic"),
        ({"update_scale": "none"}, "update_scale"),
        ({"newton_schulz_dtype": "fp8"}, "newton_schulz_dtype"),
        ({"muon_every_steps": 0}, "muon_every_steps"),
        ({"state_dtype": "fp8"}, "fp32 or bf16"),
        ({"splits": [(6, 6)], "in_out": True}, "add up to the 4 outputs"),
        ({"params": [torch.nn.Parameter(torch.ones(3, 2, 2))], "in_out": True}, "shape"),
    ],
)
def test_invalid_groups_are_rejected(group, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": parameters(shapes=[(12, 4)]), **group}])
