"""The FLOP count compared with torch's own counter, and the resulting MFU."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from architectures import OVERRIDES, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from hfgolf.config.parse import load_config
from hfgolf.measure.flops import token_flops, training_flops_per_token
from hfgolf.model.causal_lm import checkpoint_layers
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.system.stopwatch import Stopwatch
from hfgolf.train import setup
from hfgolf.train.build import build_model
from hfgolf.train.meter import Meter, StepResult

CPU = torch.device("cpu")
B, T = 3, 16


def counted(model: PreTrainedModel) -> dict[str, float]:
    """Return torch's count for a forward and backward pass: FLOPs per token by operation."""
    ids = torch.randint(model.config.vocab_size, (B, T))
    with FlopCounterMode(display=False) as counter:
        model.train()(input_ids=ids, shift_labels=ids).loss.backward()
    return {str(operation): count / (B * T) for operation, count in counter.get_flop_counts()["Global"].items()}


def golf(**options: object) -> GolfConfig:
    config = GolfConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, **options)
    config._attn_implementation = "eager"  # torch does not count fused attention on a CPU
    return config


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False},
        {"activation": "swiglu"},
        {"num_key_value_heads": 1},
        {"position_embedding": "learned", "intermediate_size": 80},
        {"loop": [0, 1, 3]},
        {"loop": [0, 1, 3], "loop_active": False},
        {"loop": [0, 0, 2], "unet_skips": "gated", "branch_scale": True, "embedding_residual": True},
        {"head_gate": 12, "query_gain": 2.0, "exclude_self_value": "all"},
        {"embedding_size": 8},
        {"embedding_size": 8, "tie_word_embeddings": False},
        {"bigram_buckets": 20, "bigram_size": 8},
        {"value_embedding_layers": 1, "value_embedding_size": 8, "num_key_value_heads": 1},
        {"parallel_from": 1},
        {"parallel_from": 1, "lanes": True, "loop": [0, 0, 3], "smear_gate": 12},
    ],
)
def test_flops_match_torch(options):
    """Eager attention uses bmm, which the counter lists separately, and computes the full square of scores."""
    model = GolfForCausalLM(golf(**options))
    flops = token_flops(model, T)
    by_torch = counted(model)
    assert by_torch.pop("aten.bmm") == 2 * flops.attention  # the causal half need not be computed
    assert sum(by_torch.values()) == flops.matrices + flops.head
    assert flops.useful == flops.matrices + flops.attention + flops.head


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "relu2"},
        {"activation": "swiglu"},
        {"loop": [0, 1, 3]},
        {"branch_scale": True},
        {"head_gate": 12, "parallel_from": 1},
        {"parallel_from": 1, "lanes": True, "branch_scale": True},
    ],
)
def test_recomputation_matches_the_cost_of_checkpointing(options):
    model = GolfForCausalLM(golf(**options))
    flops, plain = token_flops(model, T), sum(counted(model).values())
    checkpoint_layers(model)
    added = sum(counted(model).values()) - plain
    assert added == flops.recomputation + flops.attention / 3  # plus the noncausal half of its forward products


def test_mfu_excludes_compiling_and_evaluating():
    class Seconds:
        spent = dict.fromkeys(("setup", "compile", "data", "train", "evaluate", "checkpoint", "other"), 0.0)

        def seconds(self) -> dict[str, float]:
            return dict(self.spent)

    stopwatch = Seconds()
    meter = Meter(CPU, tokens_per_step=1000, flops_per_token=1.0, peak_flops=1e3, stopwatch=stopwatch)
    for sample_hash in (1, -1):
        meter.add(StepResult(1.0, 1.0, None, torch.tensor(sample_hash)))
    stopwatch.spent |= {"compile": 100.0, "evaluate": 50.0, "checkpoint": 25.0, "other": 12.0}
    stopwatch.spent |= {"data": 1.0, "train": 3.0}
    row = meter.row(lambda tensor, how: tensor)
    assert row["tokens_per_second"] == 2000 / 4
    assert row["mfu"] == pytest.approx(0.5)
    assert row["sample_hashes"] == ["0" * 15 + "1", "f" * 16]
    stopwatch.spent |= {"data": 1.5, "train": 4.5}
    meter.add(StepResult(1.0, 1.0, None, torch.tensor(0)))
    row = meter.row(lambda tensor, how: tensor)
    assert (row["tokens_per_second"], row["data_seconds"], row["compute_seconds"]) == (500, 0.5, 1.5)


def test_mfu_uses_the_peak_of_all_processes(tiny_run, monkeypatch):
    config = load_config(tiny_run()).config
    model = build_model(config, 257, "cpu")
    monkeypatch.setattr(setup, "peak_flops", lambda device, precision: 1e12)
    accelerator = SimpleNamespace(device=CPU, num_processes=4)
    run = SimpleNamespace(config=config, raw_model=model, accelerator=accelerator, stopwatch=Stopwatch())
    run.decisions = SimpleNamespace(precision="no")
    meter = setup._build_meter(run)
    assert meter.flops_per_second_of_peak == pytest.approx(training_flops_per_token(model, 32) / 4e12)
    assert meter.tokens_per_step == 256


@pytest.mark.parametrize(
    ("limit", "norms", "share"),
    [
        (1.0, [0.5, 1.0, 1.5, math.nan, math.inf], 1 / 3),
        (1.0, [2.0, 3.0], 1.0),
        (1.0, [math.nan], None),
        (None, [2.0], None),
    ],
)
def test_row_has_the_share_of_clipped_steps(limit, norms, share):
    """Steps without an update, whose norm is not finite, are not clipped; a norm at the limit stays as it is."""
    meter = Meter(CPU, 1, 1.0, 1.0, Stopwatch(), limit)
    meter.stopwatch.switch("train")
    for _ in range(2):  # the second row counts only its own steps
        for norm in norms:
            meter.add(StepResult(1.0, norm, None, torch.tensor(0)))
        row = meter.row(lambda tensor, how: tensor)
        finite = [norm for norm in norms if math.isfinite(norm)]
        mean = sum(finite) / len(finite) if finite else math.nan
        assert (row["clipped_share"], row["grad_norm"]) == (share, pytest.approx(mean, nan_ok=True))
        meter.add(StepResult(1.0, 9.0, None, torch.tensor(0)))
        meter.restart()


@pytest.mark.parametrize("name", OVERRIDES)
def test_matmuls_of_any_architecture_match_torchs_count(name):
    """Eager attention computes all scores, half of which are useful. torch miscounts grouped convolutions; the routers
    of a mixture are not counted.
    """
    model = tiny_model(name)
    has_attention = name not in ("mamba", "mamba2", "rwkv")
    if has_attention:
        model.set_attn_implementation("eager")
    if name in ("mixtral", "qwen3_moe"):
        model.set_experts_implementation("eager")
    counts = counted(model)
    flops = token_flops(model, T)
    convolutions = 6 * sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Conv1d))
    matmuls = sum(count for operation, count in counts.items() if operation in ("aten.mm", "aten.addmm"))
    routers = 6 * sum(p.numel() for key, p in model.named_parameters() if key.endswith("mlp.gate.weight"))
    assert matmuls == pytest.approx(flops.matrices - convolutions + routers + flops.head)
    scores = sum(count for operation, count in counts.items() if operation in ("aten.bmm", "aten.baddbmm"))
    # a thousandth: transformers 5.17 also computes its rotary angles as products
    assert flops.attention == (pytest.approx(scores / 2, rel=1e-3) if has_attention else 0)


FROZEN = {
    "embedding": ("embed", "wte", "wpe"),
    "first layer": ("embed", "wte", "wpe", ".0."),
    "last layer": (".1.",),
    "all but head and norm": ("embed", "wte", "wpe", ".0.", ".1."),
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("name", ["golf", "llama", "gpt2"])
def test_frozen_weights_have_no_gradient_to_count(name, frozen):
    model = GolfForCausalLM(golf(tie_word_embeddings=False)) if name == "golf" else tiny_model(name)
    model.set_attn_implementation("eager")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in key for part in FROZEN[frozen]))
    counts = counted(model)
    flops = token_flops(model, T)
    assert sum(counts.get(f"aten.{name}", 0) for name in ("mm", "addmm")) == flops.matrices + flops.head
    scores = sum(counts.get(f"aten.{name}", 0) for name in ("bmm", "baddbmm"))
    assert flops.attention == pytest.approx(scores / 2, rel=2e-3)


def test_window_bounds_the_context():
    model = tiny_model("gemma3_text", {"sliding_window": 4, "query_pre_attn_scalar": 16})
    assert token_flops(model, T).attention == 6 * 2 * 32 * 4
