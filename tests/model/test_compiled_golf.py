"""torch.compile makes one graph of a training step, with the same loss and gradients."""

import shutil

import pytest
import torch
import torch._inductor.compile_fx
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional as F

from hfgolf.model import modeling_golf


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def losses_and_gradients(golf, token_ids):
    loss = golf(token_ids, shift_labels=token_ids.roll(-1, dims=1)).loss
    loss.backward()
    return [loss, *(parameter.grad for parameter in golf.parameters())]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training_step_compiles_to_one_graph_with_the_same_gradients(build_golf, token_ids, monkeypatch, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler on a CPU")
    monkeypatch.setattr(modeling_golf, "CHUNK_ELEMENTS_CPU", 30 * 61)  # two chunks
    options = {"num_hidden_layers": 1, "logit_soft_cap": 5.0, "num_key_value_heads": 2}
    expected = losses_and_gradients(build_golf(**options).train(), token_ids)
    golf, attention = build_golf(**options).train(), []

    def watched(graph, example_inputs):
        nodes = [node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention]
        attention.extend((node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in nodes)
        return lookup_backend(backend)(graph, example_inputs)

    golf.compile(backend=watched, fullgraph=True)
    for actual, wanted in zip(losses_and_gradients(golf, token_ids), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert not [name for name in golf.state_dict() if "_orig_mod" in name]
    assert attention == [(None, True)], "causal, and without a mask"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_compiled_loss_reads_and_writes_few_bytes_per_logit(monkeypatch):
    """As inductor counts them, in bf16, one chunk. The bound may only fall; with a scatter they were 25."""
    metrics, log = torch._inductor.metrics, torch._inductor.compile_fx.inductor_metrics_log
    monkeypatch.setattr(log, "isEnabledFor", lambda level: True)  # it counts only if it would log
    rows, width, vocabulary = 256, 64, 4096
    hidden, weight = (torch.randn(size, width, requires_grad=True) for size in (rows, vocabulary))
    metrics.reset()
    loss = torch.compile(modeling_golf.chunked_cross_entropy, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16), torch._inductor.config.patch(force_disable_caches=True):
        loss(hidden, weight, torch.zeros(rows, dtype=torch.long))
    assert 10 < metrics.num_bytes_accessed / (rows * vocabulary) < 17.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["golf_record", "bigram", "value_embedding", "poly5", "two_caps"])
def test_golf_switches_compile_to_one_graph(build_golf, all_options, token_ids, name):
    expected = losses_and_gradients(build_golf(**all_options[name]).train(), token_ids)
    golf = build_golf(**all_options[name]).train()
    golf.compile(backend="aot_eager", fullgraph=True)
    for actual, wanted in zip(losses_and_gradients(golf, token_ids), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_graph_follows_the_loop_flag(build_golf, token_ids):
    """It once did, for an entrant of the challenge: his quantization-aware training never ran (#315)."""
    golf, eager = (build_golf(loop=[0, 1, 3]).train() for _ in range(2))
    golf.compile(backend="aot_eager", fullgraph=True)
    losses = []
    for loop_active in (False, True, False):
        golf.config.loop_active = eager.config.loop_active = loop_active
        losses.append([model(token_ids, shift_labels=token_ids).loss for model in (golf, eager)])
    for compiled, wanted in losses:
        torch.testing.assert_close(compiled, wanted)
    assert abs(losses[0][0] - losses[1][0]) > 1e-3 and losses[0][0] == losses[2][0]
