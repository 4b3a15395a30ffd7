"""The average compared with torch's own, its mean age, and the bit-exact return of the raw weights."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.ema import Ema
from hfgolf.system.errors import UserError
from hfgolf.train.law import decay_of

LATE = 10**9  # a step after the warmup of every decay here
INPUT_IDS = torch.arange(24).view(2, 12) % 17


def build_golf(**options: bool) -> GolfForCausalLM:
    torch.manual_seed(0)
    golf = GolfForCausalLM(
        GolfConfig(vocab_size=17, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **options)
    )
    move(golf, 1)
    return golf.eval()


@torch.no_grad()
def move(model: torch.nn.Module, seed: int) -> None:
    """Change every weight, like a training step."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.add_(0.3 * torch.randn(param.shape, generator=generator).to(param.dtype))


def averaged(model: torch.nn.Module, steps: int = 5) -> Ema:
    """Return an average that differs from the model in every weight."""
    ema = Ema(model.named_parameters(), 0.9)
    for step in range(1, steps + 1):
        move(model, 10 + step)
        ema.update(step)
    return ema


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=INPUT_IDS).logits


def test_matches_torch_bitwise_after_warmup():
    model = build_golf()
    ema, oracle = Ema(model.named_parameters(), 0.97), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.97))
    oracle.update_parameters(model)  # its first call copies
    for step in range(20):
        move(model, step)
        ema.update(LATE + step)
        oracle.update_parameters(model)
    assert are_equal(ema.state_dict(), bits(oracle.module))


def test_warmup_forgets_the_initial_weights():
    """Without it, a tenth of the random start would remain after 2,300 steps with decay 0.999. With it, none does."""
    param = torch.nn.Parameter(torch.ones(1))
    ema = Ema([("weight", param)], 0.999)
    param.data.zero_()
    for step in range(1, 31):
        ema.update(step)
    assert ema.state_dict()["weight"] < 1e-6
    assert [ema.decay_at(step) for step in (0, 1, LATE)] == [0.1, 2 / 11, 0.999]


@pytest.mark.parametrize("decay", [decay_of(900), 0.9999])
def test_an_average_is_at_most_a_tenth_of_the_steps_old(decay):
    """A weight that grows by 1 in each step lags behind by the mean age."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    ema = Ema([("weight", param)], decay)
    for step in range(1, 901):
        param.data.fill_(step)
        ema.update(step)
    assert 900 - ema.state_dict()["weight"].item() == pytest.approx(90, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applied_swaps_in_the_average_and_restores_weights_bitwise(dtype):
    model = build_golf().to(dtype)
    ema = averaged(model)
    raw, average = bits(model), copy.deepcopy(ema.state_dict())
    params, storages = list(model.parameters()), [param.data_ptr() for param in model.parameters()]
    with pytest.raises(KeyboardInterrupt), ema.applied():
        assert are_equal(bits(model), {name: value.to(dtype) for name, value in average.items()})
        assert all(is_ is was for is_, was in zip(model.parameters(), params, strict=True))
        assert not any(torch.equal(param, raw[name]) for name, param in model.named_parameters())
        raise KeyboardInterrupt
    assert are_equal(bits(model), raw)
    assert are_equal(ema.state_dict(), average)
    assert [param.data_ptr() for param in model.parameters()] == storages


def compiled(model: GolfForCausalLM) -> torch.nn.Module:
    torch.compiler.reset()  # other tests' graphs of the same functions would count as recompilations
    model.compile(backend="eager")  # the compiler's guards, without the slow backend
    return model


def distributed(model: GolfForCausalLM) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


@pytest.fixture
def one_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [pytest.param(compiled, marks=pytest.mark.slow), distributed])
@pytest.mark.usefixtures("one_process_group")
@torch._dynamo.config.patch(error_on_recompile=True)
def test_wrapped_models_use_the_average_without_recompiling(wrap):
    model = build_golf()
    ema = averaged(model)
    oracle = copy.deepcopy(model)
    wrapped = wrap(model)
    raw_logits = logits(wrapped)
    oracle.load_state_dict(ema.state_dict(), strict=False)
    with ema.applied():
        torch.testing.assert_close(logits(wrapped), logits(oracle))
        assert not torch.allclose(logits(wrapped), raw_logits, atol=0.1)
    assert torch.equal(logits(wrapped), raw_logits)


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_weights_are_averaged_once(is_tied):
    model = build_golf(tie_word_embeddings=is_tied)
    ema = averaged(model)
    assert list(ema.state_dict()) == [name for name, _ in model.named_parameters()]
    assert ("lm_head.weight" in ema.state_dict()) != is_tied
    with ema.applied():
        average = ema.state_dict()["model.embed_tokens.weight"]
        assert torch.equal(model.model.embed_tokens.weight, average)
        assert torch.equal(model.lm_head.weight, average) == is_tied
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied


def test_bf16_parameters_have_fp32_averages():
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    ema = Ema([("weight", param)], 0.9999)
    param.data.fill_(1.0)
    for step in range(10_000):
        ema.update(LATE + step)
    average = ema.state_dict()["weight"]
    assert average.dtype == torch.float32
    # bf16 has 8 significant bits: above about 0.03, it would round away a step of 1e-4 times the difference
    torch.testing.assert_close(average, torch.full((4,), 1 - 0.9999**10_000), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"a": torch.ones(2)}, "lacks b"),
        ({"a": torch.ones(2), "b": torch.ones(3, 2), "c": torch.ones(1)}, "has c, which this model lacks"),
        ({"a": torch.ones(2), "b": torch.ones(2, 3)}, r"has shape \(2, 3\) for b, but here it is \(3, 2\)"),
    ],
)
def test_average_of_another_model_is_rejected(saved, message):
    ema = Ema([("a", torch.zeros(2)), ("b", torch.zeros(3, 2))], 0.9)
    with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*$"):
        ema.load_state_dict(saved)
    assert all(not average.any() for average in ema.state_dict().values())
