"""The memory prediction compared with the live bytes of real passes, and the micro-batch chosen from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import VOCABULARY, tiny_config, tiny_model
from tiny_golf import MODELS
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from hfgolf.commands.needs import Machine, find_needs, meta_model
from hfgolf.config.sections import BatchSection, ModelSection, OptimSection, RunConfig, TrainSection
from hfgolf.measure import memory
from hfgolf.measure.fake_pass import LiveBytes
from hfgolf.measure.memory import (
    MAX_CPU_TOKENS,
    MAX_GPU_TOKENS,
    USABLE_SHARE,
    TrainingMemory,
    block_bytes,
    choose_micro_batch_size,
    chunk_elements,
    expected_bytes,
    fragmented_bytes,
    run_memory,
    training_memory,
)
from hfgolf.model.causal_blocks import NAME as CAUSAL_BLOCKS
from hfgolf.model.causal_lm import checkpoint_layers
from hfgolf.model.configuration_golf import _CHOICES, GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import build_optimizer
from hfgolf.system.errors import UserError
from hfgolf.train.build import build_model

GPT2_BLOCK = MODELS["gpt2"]
# the stacks of the challenge: every switch of configs/golf_baseline.yaml and golf_record.yaml
BASELINE = MODELS["baseline"] | {"num_hidden_layers": 6, "num_key_value_heads": 2, "intermediate_size": 256}
RECORD = BASELINE | MODELS["record"] | {"num_hidden_layers": 6, "intermediate_size": 512, "exclude_self_value": "all"}
RECORD |= {"rope_dims": 16, "parallel_from": 4, "loop": [2, 3, 3]}
SHAPE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
MATRICES = 12 * 12 * 768**2  # per block: queries, keys, values and output 4 C^2, MLP 8 C^2


def predict(golf: GolfConfig | None = None, **sizes: Any) -> TrainingMemory:
    """Predict the memory of a model of GPT-2's size, or of another one."""
    golf = golf or GolfConfig(vocab_size=50_257, **SHAPE)
    return training_memory(golf, **{"batch": 1, "sequence": 1024} | sizes)


def test_weights_gradients_and_state_take_four_bytes_each():
    muon = predict()
    assert muon.weights == muon.gradients > 4 * (MATRICES + 50_257 * 768)
    rows = 12 * 9 * 768  # q, k, v, the output, 4 of up and 1 of down: NorMuon keeps a number for each
    assert muon.optimizer == 2 * muon.weights - 4 * MATRICES + 4 * rows
    assert predict(name="adamw").optimizer == 2 * muon.weights
    assert predict(name="sgd").optimizer == predict(ema_decay=0.9).ema == muon.weights


def test_gpt2_block_by_hand():
    """Per token with C channels: norms 4C + 4C each, qkv 12C, attention output 4C, MLP in 16C and out 16C."""
    golf = GolfConfig(**SHAPE, **GPT2_BLOCK)
    assert block_bytes(golf, 1024, half=False, device="cuda")[0] == (2 * 8 + 12 + 4 + 2 * 16) * 768
    assert block_bytes(golf, 1024, half=True, device="cuda")[0] == (2 * 6 + 6 + 2 + 2 * 8) * 768


def test_modern_block_by_hand():
    """On a GPU in bf16: norms 4C + 2C each; qkv 6C; queries and keys 8C in fp32 and 4C turned; attended in two layouts
    4C; MLP: what relu left 8C, squared 8C."""
    golf = GolfConfig(**SHAPE)
    kept = (2 * 6 + 6 + 8 + 4 + 4 + 8 + 8) * 768
    assert block_bytes(golf, 1024, half=True, device="cuda")[0] == kept
    masks = 2 * 768
    assert block_bytes(GolfConfig(**SHAPE, dropout=0.1), 1024, half=True, device="cuda")[0] == kept + masks


@pytest.mark.parametrize(
    ("options", "grows"),
    [
        ({"batch": 2}, True),
        ({"sequence": 2048}, True),
        ({"checkpointing": True, "batch": 8}, True),  # compared with one sequence
        ({"checkpointing": True}, False),
        ({"accumulation": 2}, True),
        ({"processes": 2}, True),
        ({"ema_decay": 0.9}, True),
        ({"name": "adamw"}, True),
        ({"cautious_weight_decay": True, "sequence": 16}, True),
    ],
)
def test_peak_responds_to_each_option(options, grows):
    before = predict(sequence=options["sequence"] if options.get("sequence") == 16 else 1024).peak
    assert (predict(**options).peak > before) is grows


def peak_of_a_pass(golf: GolfConfig, tokens: tuple[int, int], precision: str, checkpointing: bool) -> int:
    """Return the peak of live bytes, without the weights, in a pass of the real model on fake tensors."""
    with FakeTensorMode():
        model = GolfForCausalLM(golf).train()
        if checkpointing:
            checkpoint_layers(model)
        alive = LiveBytes()
        for parameter in model.parameters():
            alive.note(parameter)
        weights = alive.now
        ids = torch.zeros(tokens, dtype=torch.long)
        with alive:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(input_ids=ids, shift_labels=ids.clone()).loss
            loss.backward()
    return alive.peak - weights


@pytest.mark.parametrize(
    ("options", "precision", "attention", "checkpointing"),
    [
        ({}, "no", "sdpa", False),
        ({}, "bf16", CAUSAL_BLOCKS, False),
        ({}, "bf16", "sdpa", True),
        ({"num_key_value_heads": 2, "activation": "swiglu"}, "bf16", "sdpa", False),
        (GPT2_BLOCK, "no", "sdpa", True),
        (GPT2_BLOCK, "bf16", CAUSAL_BLOCKS, False),
        ({"dropout": 0.1}, "no", "sdpa", False),
        ({"attention_dropout": 0.1}, "no", "sdpa", False),
        ({"logit_soft_cap": 30.0}, "no", "sdpa", False),
        ({"vocab_size": 50_257}, "bf16", "sdpa", False),
        ({"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 6}, "bf16", "sdpa", True),
        ({"loop": [0, 2, 2]}, "no", "sdpa", False),
        ({"loop": [0, 2, 2], "lanes": True, "parallel_from": 3, "num_hidden_layers": 6}, "bf16", "sdpa", True),
        ({"parallel_from": 0, "head_gate": 12, "query_gain": 2.0}, "bf16", "sdpa", False),
        ({"logit_soft_cap": 30.0, "soft_cap_form": "poly5", "logit_soft_cap_negative": 9.0}, "no", "sdpa", False),
        (BASELINE, "no", "sdpa", False),
        (BASELINE, "bf16", "sdpa", True),
        (RECORD, "bf16", "sdpa", False),
        (RECORD, "bf16", "sdpa", True),
        *(({"activation": name}, "bf16", "sdpa", False) for name in _CHOICES["activation"]),
    ],
)
def test_prediction_matches_live_bytes(options, precision, attention, checkpointing):
    golf = GolfConfig(**{"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 3} | options)
    golf._attn_implementation = attention
    batch, sequence = 8, 256
    alive = peak_of_a_pass(golf, (batch, sequence), precision, checkpointing)
    memory = predict(
        golf,
        batch=batch,
        sequence=sequence,
        name="adamw",
        precision=precision,
        checkpointing=checkpointing,
        device="cpu",
    )
    predicted = memory.peak - memory.weights - memory.optimizer
    assert predicted == pytest.approx(alive, rel=0.08 if checkpointing else 0.03)


@pytest.mark.parametrize(
    ("gigabytes", "elements"), [(0, 2**26), (24, 2**26), (40, 2**27), (80, 2**28), (141, 2**29), (1000, 2**29)]
)
def test_chunks_of_the_loss_grow_with_the_card(gigabytes, elements):
    assert chunk_elements("cuda", gigabytes * 10**9) == elements
    assert chunk_elements("cpu", gigabytes * 10**9) == 2**24
    assert elements == 2**26 or 4 * elements <= gigabytes * 10**9 / 64


def test_a_plan_counts_the_chunks_that_the_card_will_have():
    config = gpu_config().replace(batch__micro_batch_size=32)
    plans = [
        find_needs(config, meta_model(config, 50_257, "cuda"), Machine(name, "cuda", 1, 1e15, size * 10**9))
        for name, size in (("H100", 80), ("H200", 141))
    ]
    small, large = (plan.memory.loss for plan in plans)
    assert large - small == pytest.approx(12 * 2**28, rel=1e-3)  # 12 bytes per logit; 2**29 logits, not 2**28


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"activation": "swiglu"}, {"intermediate_size": 128}])
def test_update_memory_matches_orthogonalization(request, options, ranks):
    if ranks > 1:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        request.addfinalizer(distributed.destroy_process_group)
    golf = GolfConfig(vocab_size=300, hidden_size=128, num_hidden_layers=6, **options)
    model = GolfForCausalLM(golf)
    optimizer = build_optimizer(model, OptimSection(newton_schulz_dtype="fp32"))
    optimizer.create_state()
    alive = LiveBytes()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values()):
            alive.note(tensor)
    before = alive.now
    with alive:
        optimizer.step()
    assert predict(golf, device="cpu", processes=ranks).update == pytest.approx(alive.peak - before, rel=0.01)


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "sgd"])
@pytest.mark.parametrize("architecture", ["golf", "gpt2"])
def test_frozen_weights_have_no_gradient_and_no_state(architecture, optimizer):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = RunConfig(
        model=ModelSection(architecture=architecture, **shape),
        optim=OptimSection(name=optimizer),
        train=TrainSection(max_steps=1, mixed_precision="no"),
    )
    names = [name for name, _ in build_model(config, 300, "cpu").named_parameters()]
    frozen = [name for name in names if "embed" in name or ".wte" in name or ".0." in name]
    model = build_model(config, 300, "cpu", frozen)
    whole, memory = (run_memory(config, each, 1, 1, "cpu") for each in (build_model(config, 300, "cpu"), model))
    built = build_optimizer(model, config.optim)
    built.create_state()
    assert sum(len(group["params"]) for group in built.param_groups) == len(names) - len(frozen)
    state = sum(value.numel() for each in built.state.values() for value in each.values() if value.ndim)
    assert memory.gradients == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert memory.optimizer == 4 * state and memory.weights == whole.weights
    assert memory.peak <= whole.peak - (whole.optimizer - memory.optimizer)


def gpu_config(**options: Any) -> RunConfig:
    settings = {"model": ModelSection(**SHAPE), "train": TrainSection(max_steps=1, mixed_precision="bf16")}
    return RunConfig(
        batch=BatchSection(sequence_length=1024, tokens_per_step=options.pop("tokens_per_step", 524288)), **settings
    )


@pytest.mark.parametrize("free_gib", [4, 8, 16, 40])
def test_largest_fitting_micro_batch_is_chosen(free_gib):
    config = gpu_config()
    model, free = meta_model(config, 50_257, "cuda"), free_gib * 2**30
    size = choose_micro_batch_size(config, model, 1, "cuda", free)
    assert 512 % size == 0
    assert run_memory(config, model, size, 1, "cuda").peak <= free * USABLE_SHARE
    assert run_memory(config, model, size * 2, 1, "cuda").peak > free * USABLE_SHARE


@pytest.mark.parametrize(("device", "tokens"), [("cpu", MAX_CPU_TOKENS), ("cuda", MAX_GPU_TOKENS)])
def test_micro_batch_stays_in_the_cache_of_a_cpu_and_short_enough_to_compile_for_a_gpu(device, tokens):
    config = gpu_config()
    model = meta_model(config, 50_257, device)
    assert choose_micro_batch_size(config, model, 1, device, 2**50) * 1024 == tokens


def test_processes_split_the_batch():
    config = gpu_config(tokens_per_step=8 * 1024)
    model = meta_model(config, 50_257, "cuda")
    assert choose_micro_batch_size(config, model, 4, "cuda", 80 * 2**30) == 2
    with pytest.raises(UserError, match="on 3 processes"):
        choose_micro_batch_size(config, model, 3, "cuda", 80 * 2**30)


def test_too_little_memory_is_one_line():
    config = gpu_config()
    with pytest.raises(UserError, match=r"not even one sequence of 1024 tokens fits: it needs .* try model"):
        choose_micro_batch_size(config, meta_model(config, 50_257, "cuda"), 1, "cuda", 2**30)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_prediction_matches_gpu_allocations(checkpointing):
    config = gpu_config(tokens_per_step=16 * 1024).replace(model__gradient_checkpointing=checkpointing)
    with torch.device("cuda"):
        model = build_model(config, 50_257, "cuda").train()
    optimizer = build_optimizer(model, config.optim)
    optimizer.create_state()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.zeros(8, 1024, dtype=torch.long, device="cuda")
    for _ in range(2):
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, shift_labels=ids.clone()).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    predicted = run_memory(config, model, 8, 1, "cuda").peak
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)


def test_heap_fragmentation_is_a_share_of_freed_memory(monkeypatch):
    """Memory kept between steps leaves no holes. Other C libraries than glibc were not measured."""
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("glibc", "2.36"))
    small, large, averaged = (predict(device="cpu", **options) for options in ({}, {"batch": 8}, {"ema_decay": 0.9}))
    assert fragmented_bytes(large) > 2 * fragmented_bytes(small) > 0
    assert averaged.peak > small.peak and fragmented_bytes(averaged) == fragmented_bytes(small)
    on_cpu, on_gpu = (expected_bytes(small, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert on_gpu == small.peak
    held = memory.process_memory_bytes()
    assert on_cpu == pytest.approx(held + small.peak - small.weights + fragmented_bytes(small), rel=0.05)
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))
    assert fragmented_bytes(large) == 0


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'pynvml'"), Exception("Not Supported")])
def test_a_gpu_without_its_monitor_is_said_at_most_once_and_ends_no_run(monkeypatch, caplog, error):
    """NVML's own errors derive from Exception: a slice of a GPU (MIG), a vGPU and WSL raise NotSupported."""

    def fail(device):
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    monkeypatch.setattr(torch.cuda, "device_memory_used", fail)
    memory._warn_that_nvml_is_missing.cache_clear()
    for kind in ("cuda", "cuda", "cpu"):
        assert memory.gpu_utilization(torch.device(kind)) is memory.gpu_memory_bytes(torch.device(kind)) is None
    is_missing = isinstance(error, ModuleNotFoundError)
    assert ["pip install nvidia-ml-py" in message for message in caplog.messages] == [True] * is_missing


def test_peak_matches_resident_memory(monkeypatch):
    before = memory.used_memory_bytes(torch.device("cpu"))
    block = torch.ones(3 * 10**8, dtype=torch.uint8)
    del block
    assert memory.used_memory_bytes(torch.device("cpu")) >= max(before, memory.process_memory_bytes())
    assert memory.used_memory_bytes(torch.device("cpu")) > 3 * 10**8
    monkeypatch.setattr(memory.Path, "read_text", lambda path: "VmRSS: 5 kB")  # a sandbox that does not say the peak
    assert memory.used_memory_bytes(torch.device("cpu")) == pytest.approx(memory.process_memory_bytes(), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba2", "opt"])
def test_prediction_for_any_architecture_matches_live_bytes(name):
    """Four real sequences, predicted from fake passes over one and two, and for mamba2 from shorter rows."""
    wider = {"num_heads": 8} if name == "mamba2" else {}
    config = tiny_config(name, wider, hidden_size=64).replace(batch__sequence_length=64, batch__tokens_per_step=256)
    model = build_model(config, VOCABULARY, "cpu", bos_token_id=0, eos_token_id=0, pad_token_id=0).train()
    live = LiveBytes()
    for parameter in model.parameters():
        live.note(parameter)
    ids = torch.zeros(4, 64, dtype=torch.long)
    with live:
        model(ids, shift_labels=ids.clone()).loss.backward()
    predicted = run_memory(config.replace(optim__name="sgd"), model, 4, 1, "cpu")
    assert predicted.weights == predicted.optimizer == 4 * model.num_parameters()
    assert predicted.peak - predicted.optimizer == pytest.approx(live.peak, rel=0.08)


def test_pass_that_fake_tensors_cannot_run_is_said_once(caplog):
    model = tiny_model("mixtral", {"num_local_experts": 3})
    sizes = [run_memory(tiny_config("mixtral"), model, size, 1, "cpu") for size in (1, 2)]
    (message,) = caplog.messages
    assert message.startswith("memory: the activations of mixtral are unknown, counted as 0 (")
    assert sizes[0].activations == 0 and sizes[0].weights == 4 * model.num_parameters()
