"""The chunked loss, compared with torch's cross-entropy on the full logits."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hfgolf.model import modeling_golf
from hfgolf.model.modeling_golf import chunked_cross_entropy

N, C, V = 23, 8, 31


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(modeling_golf, "CHUNK_ELEMENTS_CPU", 5 * V)  # 5 chunks, the last with 3 rows


def build_operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, C, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, C, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    targets[[0, 7, 22]] = -100
    return hidden, weight, targets


def plain_nats(hidden, weight, targets, soft_cap=None, negative=None, form="tanh"):
    logits = hidden @ weight.T
    if soft_cap is not None:
        cap = soft_cap if negative is None else torch.where(logits > 0, soft_cap, negative)
        x = logits / cap
        inner = x.clamp(-2, 2)
        logits = cap * (x.tanh() if form == "tanh" else (inner - inner**3 / 3 + inner**5 / 15).clamp(-1, 1))
    return F.cross_entropy(logits, targets, reduction="sum")


CAPS = [(None,), (3.0,), (3.0, 1.5), (3.0, None, "poly5"), (3.0, 1.5, "poly5"), (0.5, None, "poly5")]


@pytest.mark.parametrize("caps", CAPS)
def test_chunked_loss_and_gradients_equal_the_plain_loss(caps):
    hidden, weight, targets = build_operands()
    expected = plain_nats(hidden, weight, targets, *caps)
    actual = chunked_cross_entropy(hidden, weight, targets, *caps)
    torch.testing.assert_close(actual, expected)
    scale = 0.37  # a loss is scaled after the sum: by the token count, by accumulation, by the fp16 scaler
    expected_gradients = torch.autograd.grad(expected * scale, (hidden, weight))
    actual_gradients = torch.autograd.grad(actual * scale, (hidden, weight))
    torch.testing.assert_close(actual_gradients, expected_gradients)


@pytest.mark.parametrize("rows", [1, 7, N])
def test_chunks_may_have_any_size(rows):
    hidden, weight, targets = build_operands()
    results = [chunked_cross_entropy(hidden, weight, targets, chunk_elements=size) for size in (None, rows * V + 1)]
    expected, actual = ((nats, *torch.autograd.grad(nats, (hidden, weight))) for nats in results)
    torch.testing.assert_close(actual, expected)


def test_a_model_says_how_large_chunks_are(build_golf):
    golf = build_golf(vocab_size=1000, hidden_size=16).train()
    ids = torch.randint(1000, (8, 64))
    largest = []
    for rows in (100, 50):
        golf.chunk_elements = rows * 1000
        with Watch() as watch:
            golf(ids, labels=ids).loss.backward()
        largest.append(watch.largest)
    assert largest == [100_000, 50_000]


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_operand_gets_no_gradient(frozen):
    hidden, weight, targets = build_operands()
    free = weight if frozen == "hidden" else hidden
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    (expected,) = torch.autograd.grad(plain_nats(hidden, weight, targets, None), free)
    (actual,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets), free)
    torch.testing.assert_close(actual, expected)


def test_no_gradient_is_computed_unless_needed():
    hidden, weight, targets = build_operands()
    num_flops = []
    for is_wanted in (True, False):
        with torch.set_grad_enabled(is_wanted), FlopCounterMode(display=False) as counter:
            nats = chunked_cross_entropy(hidden, weight, targets)
        num_flops.append(counter.get_total_flops())
        torch.testing.assert_close(nats, plain_nats(hidden, weight, targets, None))
    assert num_flops == [6 * hidden.shape[0] * weight.numel(), 2 * hidden.shape[0] * weight.numel()]


class Watch(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operation creates."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in tensors)])
        return output


def test_logits_of_the_whole_batch_never_exist():
    hidden, weight, targets = build_operands()
    with Watch() as watch:
        chunked_cross_entropy(hidden, weight, targets).backward()
    assert watch.largest == V * C  # the weight's gradient; a chunk of logits is 5 * V, all of them N * V


def test_backward_may_run_twice():
    hidden, weight, targets = build_operands()
    nats = chunked_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(nats / 7, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(nats / 7, (hidden, weight))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_bf16_autocast_is_close_and_sums_in_fp32():
    hidden, weight, targets = build_operands()
    expected = plain_nats(hidden, weight, targets, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = chunked_cross_entropy(hidden, weight, targets)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0.01, atol=0)
    for exact, rounded in zip(
        torch.autograd.grad(expected, (hidden, weight)), torch.autograd.grad(actual, (hidden, weight)), strict=True
    ):
        assert rounded.dtype == torch.float32
        assert (rounded - exact).norm() < 0.02 * exact.norm()


def test_fp16_gradients_over_many_tokens_do_not_underflow():
    hidden, weight, targets = build_operands()
    num_tokens, loss_scale = 2**22, 2.0**16  # a large batch, and the scale fp16 training starts with
    expected = torch.autograd.grad(plain_nats(hidden, weight, targets, None) / num_tokens, (hidden, weight))
    with torch.autocast("cpu", dtype=torch.float16):
        nats = chunked_cross_entropy(hidden, weight, targets)
    unscaled = [g / loss_scale for g in torch.autograd.grad(nats / num_tokens * loss_scale, (hidden, weight))]
    for exact, rounded in zip(expected, unscaled, strict=True):
        assert (rounded - exact).norm() < 0.01 * exact.norm()
    unscaled = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets) / num_tokens, (hidden, weight))
    torch.testing.assert_close(unscaled, expected)


@pytest.mark.parametrize("wrong", [-1, V])
def test_a_target_that_is_no_id_is_refused(wrong):
    """nanoGPT ignores -1; here it must not count as another token."""
    hidden, weight, targets = build_operands()
    targets[3] = wrong
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_cross_entropy(hidden, weight, targets)


def test_fp16_gradients_of_many_rows_do_not_overflow(monkeypatch):
    """Each row adds 1/2 to the gradient: as one fp16 product, 2^18 rows would give 131,072, beyond its 65,504."""
    monkeypatch.setattr(modeling_golf, "CHUNK_ELEMENTS_CPU", 2**20)
    rows = 2**18
    hidden, weight = torch.ones(rows, 1), torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        nats = chunked_cross_entropy(hidden, weight, torch.zeros(rows, dtype=torch.long))
    (gradient,) = torch.autograd.grad(nats, weight)
    assert gradient.flatten().tolist() == [-rows / 2, rows / 2]


@pytest.mark.parametrize("caps", CAPS)
def test_padded_head_changes_nothing(caps, monkeypatch):
    """A GPU pads the head in 16 bits, because its products need even sizes; here the CPU is made to."""
    hidden, weight, targets = build_operands()
    expected = chunked_cross_entropy(hidden, weight, targets, *caps)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight))
    monkeypatch.setattr(modeling_golf, "_head_rows", lambda vocabulary, device, dtype: vocabulary + 33)
    actual = chunked_cross_entropy(hidden, weight, targets, *caps)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(actual, (hidden, weight))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "dtype", "rows"),
    [
        ("cpu", torch.bfloat16, 50257),
        ("cuda", torch.float32, 50257),
        ("cuda", torch.bfloat16, 50304),
        ("cuda", torch.float16, 50304),
        ("xpu", torch.bfloat16, 50304),
    ],
)
def test_head_is_padded_only_for_16_bit_products_of_an_accelerator(device, dtype, rows):
    assert modeling_golf._head_rows(50257, device, dtype) == rows
    assert modeling_golf._head_rows(50304, device, dtype) == 50304


@pytest.mark.parametrize("caps", CAPS)
def test_gradient_by_comparison_has_the_same_bits(caps, monkeypatch):
    """A compiled loss compares where an eager one scatters."""
    hidden, weight, targets = build_operands()
    expected = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, *caps), (hidden, weight))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    actual = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, *caps), (hidden, weight))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
