"""Muon in the hands of transformers' Trainer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from sharded import needs_fsdp2
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hfgolf import muon_for_trainer
from hfgolf.optim.groups import group_rows
from hfgolf.optim.shards import full_tensor
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[2]
LENGTH = 32
TEXT = (ROOT / "LICENSE").read_bytes()
IDS = torch.tensor([list(TEXT[start : start + LENGTH]) for start in range(0, len(TEXT) - LENGTH, LENGTH)])
DATA = Dataset.from_dict({"input_ids": IDS.tolist(), "labels": IDS.tolist()})
LLAMA = LlamaConfig(
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
)
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH)),
    "llama": lambda: LlamaForCausalLM(LLAMA),
}
RULES = {
    "gpt2": {
        "muon in 3 parts": {"c_attn.weight"},
        "muon": {"c_proj.weight", "c_fc.weight"},
        "adamw": {"wte.weight", "wpe.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight", "ln_1.bias", "ln_2.bias"}
        | {"ln_f.bias", "c_attn.bias", "c_proj.bias", "c_fc.bias"},
    },
    "llama": {
        "muon": {f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")},
        "adamw": {"embed_tokens.weight", "lm_head.weight", "input_layernorm.weight", "norm.weight"}
        | {"post_attention_layernorm.weight"},
    },
}


class Seen(TrainerCallback):
    """The learning rate of each group at each step."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_pre_optimizer_step(self, args, state, control, **of_trainer):
        self.rates.append([group["lr"] for group in of_trainer["optimizer"].param_groups])


def arguments(folder, **values):
    given = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.01, "save_strategy": "no"}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    return TrainingArguments(str(folder), **quiet, **given | values)


def trained(model, args, seen=None, resume=None, optimizer="muon", **settings):
    """Return the trainer of a model, or of a new one by its name, after its training."""
    torch.manual_seed(0)
    model = MODELS[model]() if isinstance(model, str) else model
    factory = muon_for_trainer(args, **settings) if optimizer == "muon" else None
    callbacks = [] if seen is None else [seen]
    trainer = Trainer(model, args, train_dataset=DATA, optimizer_cls_and_kwargs=factory, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer):
    return {name: full_tensor(weight).detach().clone() for name, weight in trainer.model.named_parameters()}


def difference(first, second):
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def loss(model):
    with torch.no_grad():
        return model.eval()(IDS, labels=IDS).loss.item()


def test_it_ends_below_adamw_at_adamws_best_rate(tmp_path):
    """AdamW's best rate of 0.003, 0.01 and 0.03."""
    args = arguments(tmp_path, max_steps=40, per_device_train_batch_size=8, learning_rate=0.03)
    losses = {optimizer: loss(trained("gpt2", args, optimizer=optimizer).model) for optimizer in ("adamw", "muon")}
    assert losses["muon"] + 0.1 < losses["adamw"], losses


@pytest.mark.parametrize("name", MODELS)
def test_names_decide_the_rule_and_weight_decay_is_trainers(name, tmp_path):
    args = arguments(tmp_path, max_steps=1, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6)
    trainer = trained(name, args)
    rules: dict[str, set[str]] = {}
    for row in group_rows(trainer.optimizer):
        rules.setdefault(row["rule"], set()).add(".".join(row["parameters of"].split(".")[-2:]))
    assert rules == RULES[name]
    groups = trainer.optimizer.param_groups
    assert {(g["initial_lr"], g["betas"], g["eps"], g["update_scale"]) for g in groups} == {
        (0.01, (0.8, 0.9), 1e-6, "match_rms_adamw")
    }
    decayed = {name for group in groups if group["weight_decay"] == 0.1 for name in group["param_names"]}
    names = {name for group in groups for name in group["param_names"]}
    assert decayed == names & {*trainer.get_decay_parameter_names(trainer.model)}
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}


@pytest.mark.parametrize(
    ("name", "floor"),
    [("cosine_with_min_lr", "min_lr"), ("polynomial", "lr_end"), ("cosine_warmup_with_min_lr", "min_lr")],
)
def test_a_floor_of_the_schedule_is_that_of_trainers_rate(name, floor, tmp_path):
    """Every rate, also one that is stated, ends at the share at which AdamW's ends."""
    args = arguments(tmp_path, learning_rate=0.05, lr_scheduler_type=name, lr_scheduler_kwargs={floor: 0.005})
    adamw = trained("llama", args, optimizer="adamw").optimizer.param_groups[0]["lr"] / 0.05
    groups = trained("llama", args, adamw_learning_rate=0.002).optimizer.param_groups
    assert adamw < 1 and {group["initial_lr"] for group in groups} == {0.05, 0.002}
    assert [group["lr"] / group["initial_lr"] for group in groups] == pytest.approx([adamw] * len(groups))


def test_a_resume_gives_the_same_bits_with_the_schedule_of_every_group(tmp_path):
    """GPT-2 has dropout. Warmup, decay, accumulation, clipping and bf16 are on."""
    options = {"max_steps": 6, "warmup_steps": 2, "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2}
    args = arguments(tmp_path, **options, bf16=True, save_strategy="steps", save_steps=3, max_grad_norm=0.1)
    settings = {"adamw_learning_rate": 0.002, "normuon_beta2": 0.9, "muon_every_steps": 2}
    straight, resumed = Seen(), Seen()
    expected = weights(trained("gpt2", args, straight, **settings))
    again = trained("gpt2", args, resumed, resume=str(tmp_path / "checkpoint-3"), **settings)
    assert difference(expected, weights(again)) == 0
    assert resumed.rates == straight.rates[3:]
    shares = [[rate / peak for rate, peak in zip(step, (0.01, 0.002, 0.002), strict=True)] for step in straight.rates]
    assert all(max(step) == pytest.approx(min(step)) for step in shares), "one multiplier for all groups"
    assert [step[0] for step in shares[:3]] == [0.0, 0.5, 1.0] and shares[3] > shares[4] > shares[5]


def test_a_search_over_rates_reaches_the_optimizer(tmp_path):
    """Trainer sets the values of a trial in its arguments and builds the optimizer again."""
    args = arguments(tmp_path)
    trainer = Trainer(MODELS["gpt2"](), args, optimizer_cls_and_kwargs=muon_for_trainer(args, adamw_learning_rate=0.5))
    args.learning_rate, args.weight_decay = 0.25, 0.75
    groups = trainer.create_optimizer().param_groups
    assert {(group["kind"], group["lr"], group["weight_decay"]) for group in groups} == {
        ("matrix", 0.25, 0.75),
        ("embedding", 0.5, 0.75),
        ("vector", 0.5, 0.0),
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rate": -1}, "optim.learning_rate: -1 is not allowed; allowed: a number above 0"),
        ({"momentom": 0.9}, "optim.momentom: there is no such key."),
        ({"ema_decay": 0.9, "name": "adamw"}, "muon_for_trainer: ema_decay, name works only in hfgolf's own loop"),
    ],
)
def test_a_wrong_setting_ends_at_once(settings, said, tmp_path):
    with pytest.raises(UserError, match=re.escape(said)):
        muon_for_trainer(arguments(tmp_path), **settings)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("DEEPSPEED", "DEEPSPEED"),
        ("FSDP", "FSDP1"),
        ("NO", "a model that was sharded before"),
    ],
)
def test_what_divides_matrices_is_refused(kind, said, tmp_path, monkeypatch):
    args = arguments(tmp_path)
    trainer = Trainer(MODELS["gpt2"](), args, optimizer_cls_and_kwargs=muon_for_trainer(args))
    AcceleratorState().fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    PartialState._shared_state["distributed_type"] = DistributedType(kind)
    monkeypatch.setattr("hfgolf.optim.trainer.is_sharded", lambda _: kind == "NO")
    with pytest.raises(UserError, match=f"no Muon with {said}; train in one process, or several with DDP or FSDP2."):
        trainer.create_optimizer()


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: nn.Linear(2, 2), "Linear is no model of transformers"),
        (lambda: MODELS["gpt2"]().requires_grad_(False), "all of its parameters are frozen"),
    ],
)
def test_a_model_that_it_cannot_train_is_refused(build, said, tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(UserError, match=said):
        Trainer(build(), args, optimizer_cls_and_kwargs=muon_for_trainer(args)).create_optimizer()


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "muon_for_trainer" in block]
    names = {"model": (model := MODELS["llama"]()), "data": DATA}
    before = loss(model)
    exec(example, names)
    assert loss(model) < before - 0.3


PROGRAM = """
import gc, sys
sys.path[:0] = sys.argv[3:]
from sharded import shard
if sys.argv[1] == "fsdp2":
    shard()
import torch, torch.distributed as dist
from test_trainer import Seen, arguments, difference, trained, weights
from hfgolf.optim.shards import is_sharded
folder, seen = sys.argv[2], Seen()
args = arguments(folder, per_device_train_batch_size=2, save_strategy="steps", save_steps=2, weight_decay=0.1)
trainer = trained("llama", args, newton_schulz_dtype="fp32")
assert all(is_sharded(p) == (sys.argv[1] == "fsdp2") for p in trainer.model.parameters())
found = weights(trainer)
if sys.argv[1] == "fsdp2":  # under DDP, Trainer 5.17 does not load an optimizer on CPUs
    again = weights(trained("llama", args, seen, folder + "/checkpoint-2", newton_schulz_dtype="fp32"))
    assert difference(found, again) == 0 and len(seen.rates) == 2
if dist.get_rank() == 0:
    torch.save({name.removeprefix("module."): weight for name, weight in found.items()}, folder + "/weights.pt")
del trainer  # a DDP model that outlives its group ends one run in four with "terminate called", in torch 2.13
gc.collect()
dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=needs_fsdp2)])
def test_two_processes_are_one(kind, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    program = [tmp_path / "program.py", kind, tmp_path, ROOT / "tests", ROOT / "tests" / "optim"]
    subprocess.run([*command, *program], check=True, timeout=300)
    args = arguments(tmp_path, weight_decay=0.1)
    alone = weights(trained("llama", args, newton_schulz_dtype="fp32"))
    assert difference(alone, torch.load(tmp_path / "weights.pt")) < 1e-5
