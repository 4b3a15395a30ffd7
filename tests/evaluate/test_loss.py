"""Loss and bits per byte, compared with closed forms and a plain computation, with each token counted once."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tiny_streams import plain_nats
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from hfgolf.evaluate.bits_per_byte import Evaluation, bits_per_byte
from hfgolf.evaluate.loss import evaluate_loss, evaluate_plan, plan_documents
from hfgolf.evaluate.windows import zero_nats


class Shard:
    """A stand-in for one process of several. Its reduce adds nothing."""

    def __init__(self, accelerator, rank, world):
        self.device, self.process_index, self.num_processes = accelerator.device, rank, world
        self.autocast = accelerator.autocast

    def reduce(self, tensor, how):
        assert how == "sum"
        return tensor


def test_uniform_model_costs_log2_of_the_vocabulary(build_model, stream, accelerator):
    model = build_model()
    torch.nn.init.zeros_(model.lm_head.weight)  # also the embeddings, because they are tied
    evaluation = evaluate_loss(model, stream, accelerator, sequence_length=8, batch_size=3)
    assert (evaluation.num_tokens, evaluation.num_bytes) == (63, 69)
    assert evaluation.bits_per_byte == pytest.approx(math.log2(257) * 63 / 69, rel=1e-6)
    assert evaluation.perplexity == pytest.approx(257, rel=1e-6)


def test_bits_per_byte_is_nats_over_ln_2_over_bytes():
    assert bits_per_byte(math.log(2) * 24, 8) == pytest.approx(3)
    assert Evaluation(nats=2000.0, num_tokens=2, num_bytes=1).perplexity == math.inf
    assert math.isnan(Evaluation(nats=2.0, num_tokens=2, num_bytes=0).bits_per_byte)


@pytest.mark.parametrize("length", [1, 5, 8, 10, 52, 63, 64, 100])
def test_per_document_is_each_document_by_itself(build_model, stream, accelerator, tokenizer, length):
    """The stream holds documents of 52 and 10 tokens; tests/ecosystem compares with lm-eval itself."""
    model = build_model(max_position_embeddings=128)
    windows = []
    for start, end in ((0, 52), (53, 63)):  # the separator in front, and the last token
        for done in range(start, end, length):
            last = min(done + length, end)
            windows.append((max(start, last - length), done + 1, last))
    plan, num_bytes = plan_documents(stream, tokenizer, length)
    evaluation = evaluate_plan(model, stream, accelerator, plan, num_bytes, batch_size=3)
    assert (evaluation.num_tokens, evaluation.num_bytes) == (62, 69)
    nats = plain_nats(lambda ids: model(ids).logits, stream.tokens, windows)
    assert evaluation.nats == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize("budget", [None, 60, 52, 19, 1])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_loss_is_the_plain_sum_over_whole_pieces(build_model, stream, accelerator, budget, batch_size):
    model = build_model()
    num_targets, num_bytes = {None: (63, 69), 60: (52, 59), 52: (52, 59), 19: (19, 19), 1: (19, 19)}[budget]
    windows = [(start, start + 1, min(start + 8, num_targets)) for start in range(0, num_targets, 8)]
    settings = {"sequence_length": 8, "batch_size": batch_size, "budget_tokens": budget}
    evaluation = evaluate_loss(model, stream, accelerator, **settings)
    assert (evaluation.num_tokens, evaluation.num_bytes) == (num_targets, num_bytes)
    nats = plain_nats(lambda ids: model(ids).logits, stream.tokens, windows)
    assert evaluation.nats == pytest.approx(nats, rel=1e-6)


def test_foreign_model_is_evaluated_by_its_own_loss(stream, accelerator):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=64, n_embd=16, n_layer=1, n_head=2)).eval()
    evaluation = evaluate_loss(model, stream, accelerator, sequence_length=63, batch_size=2)
    ids = torch.from_numpy(stream.tokens.astype("int64"))[None]
    with torch.no_grad():
        assert evaluation.loss == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_restores_the_mode_even_after_an_error(build_model, stream, accelerator, training):
    model = build_model(dropout=0.5).train(training)
    settings = {"sequence_length": 8, "batch_size": 2}
    first, second = (evaluate_loss(model, stream, accelerator, **settings) for _ in range(2))
    assert first == second, "dropout must be off"
    assert model.training is training
    model.forward = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        evaluate_loss(model, stream, accelerator, **settings)
    assert model.training is training


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_evaluation_uses_the_precision_of_the_run_without_gradients(build_model, stream, precision, dtype):
    model = build_model()
    seen = set()
    layer = model.model.layers[0].self_attn.qkv_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.add((output.dtype, output.requires_grad)))
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    evaluate_loss(model, stream, accelerator, sequence_length=8, batch_size=2)
    assert seen == {(dtype, False)}


@pytest.mark.parametrize("budget", [None, 19])
@pytest.mark.parametrize("world", [1, 2])
def test_only_masked_targets_count(build_model, stream, accelerator, budget, world):
    model = build_model()
    stream = dataclasses.replace(stream, is_target=(np.arange(len(stream.tokens)) % 3 == 1).astype(np.uint8))
    num_targets, num_bytes = (63, 69) if budget is None else (19, 19)
    tokens = torch.from_numpy(stream.tokens.astype("int64"))
    nats = num_counted = 0
    for start in range(0, num_targets, 8):
        places = torch.arange(start, min(start + 8, num_targets))
        with torch.no_grad():
            losses = F.cross_entropy(model.eval()(tokens[places][None]).logits[0], tokens[places + 1], reduction="none")
        counted = (places + 1) % 3 == 1
        nats, num_counted = nats + losses[counted].sum().item(), num_counted + int(counted.sum())
    settings = {"sequence_length": 8, "batch_size": 3, "budget_tokens": budget}
    parts = [evaluate_loss(model, stream, Shard(accelerator, rank, world), **settings) for rank in range(world)]
    assert {(part.num_tokens, part.num_bytes) for part in parts} == {(num_counted, num_bytes)}
    assert sum(part.nats for part in parts) == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize(("device", "place"), [("mps", "cpu"), ("xpu", "cpu"), ("cpu", "cpu")])
def test_nats_are_summed_in_fp64_on_the_host_if_the_device_may_have_no_fp64(device, place):
    nats = zero_nats(torch.device(device))
    assert (nats.dtype, nats.device.type) == (torch.float64, place)
