"""peft, trl and `transformers serve` on exported models, as their users call them: `make test-ecosystem`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_export import build_tiny, card_of
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import hfgolf
from hfgolf.config.sections import RunConfig
from hfgolf.optim.groups import parameter_kinds
from hfgolf.publish.convert import convert_folder
from hfgolf.publish.export import export_model

peft = pytest.importorskip("peft", reason="peft is not installed; run make test-ecosystem")
trl = pytest.importorskip("trl", reason="trl is not installed; run make test-ecosystem")
pytestmark = [pytest.mark.ecosystem, pytest.mark.slow]

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


@pytest.fixture(params=["golf", "native"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An exported model with its card, in either format."""
    export_model(*build_tiny(), tmp_path / "golf", card_of(RunConfig().replace(run__name="tiny"), {"step": 1}))
    if request.param == "native":
        convert_folder(str(tmp_path / "golf"), tmp_path / "native", "native")
    return tmp_path / request.param


def load(folder: Path) -> tuple[Any, Any]:
    """Load a model by the card's own example."""
    trust = "trust_remote_code=True" in (folder / "README.md").read_text()
    assert trust == (folder.name == "golf")
    options = {"trust_remote_code": True} if trust else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model, AutoTokenizer.from_pretrained(folder, **options)


def test_lora_on_the_targets_of_the_card_trains_and_merges(folder):
    model, tokenizer = load(folder)
    targets = json.loads(re.search(r"target_modules=(\[.*?\])", (folder / "README.md").read_text())[1])
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    ids = tokenizer("one two three", return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 0.05)
    losses = []
    for _ in range(30):
        loss = adapted(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.5
    adapted.eval()
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_sft_learns_to_stop(folder, tmp_path):
    model, tokenizer = load(folder)
    rows = Dataset.from_list([{"prompt": f"{letter}:", "completion": "yes"} for letter in "abcdefgh"])
    arguments = trl.SFTConfig(str(tmp_path / "sft"), max_steps=60, max_length=16, **COMMON)
    trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer).train()
    prompt = tokenizer("c:", return_tensors="pt").input_ids
    written = model.eval().generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert written.tolist() == [*b"yes", tokenizer.eos_token_id]


def test_sft_of_lora_under_muon(folder, tmp_path):
    model, tokenizer = load(folder)
    rows = Dataset.from_list([{"prompt": f"{letter}:", "completion": "yes"} for letter in "abcdefgh"])
    arguments = trl.SFTConfig(str(tmp_path / "sft"), max_steps=40, max_length=16, logging_steps=1, **COMMON)
    trainer = trl.SFTTrainer(
        model,
        arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
        optimizer_cls_and_kwargs=hfgolf.muon_for_trainer(arguments),
    )
    trainer.train()
    names = {group["rule"]: group["param_names"] for group in trainer.optimizer.param_groups}
    assert all(".lora_A." in name or ".lora_B." in name for name in names["muon"])
    assert names["adamw"] == ["base_model.model.lm_head.modules_to_save.default.weight"]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.5 * losses[0]


def test_kinds_see_through_the_wrapper_of_peft():
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(**shape))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    kinds = {name: kind for name, kind in parameter_kinds(adapted).items() if name in trained}
    assert kinds.pop("base_model.model.score.modules_to_save.default.weight") == "head"
    assert set(kinds.values()) == {"matrix"}


def test_dpo_prefers_what_was_chosen(tmp_path):
    """On the native form: without a reference model, trl loads the model by name again, and does not pass trust on."""
    export_model(*build_tiny(), tmp_path / "golf", "# A card")
    convert_folder(str(tmp_path / "golf"), tmp_path / "native", "native")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "native")
    rows = Dataset.from_list([{"prompt": f"{x}:", "chosen": "yes", "rejected": "no"} for x in "abcdefgh"])
    arguments = trl.DPOConfig(str(tmp_path / "dpo"), max_steps=20, max_length=16, logging_steps=1, **COMMON)
    trainer = trl.DPOTrainer(str(tmp_path / "native"), args=arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    rewards = [row["rewards/accuracies"] for row in trainer.state.log_history if "rewards/accuracies" in row]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[0] == pytest.approx(0.693, abs=1e-3), "ln 2: policy and reference are equal at first"
    assert losses[-1] < 0.3 and rewards[-1] == 1.0


def test_transformers_serve_continues_a_text(tmp_path):
    """On the native form: serve looks for the class by its name in transformers."""
    pytest.importorskip("fastapi", reason="transformers[serving] is not installed; run make test-ecosystem")
    model, tokenizer = build_tiny()
    export_model(model, tokenizer, tmp_path / "golf", "# A card")
    convert_folder(str(tmp_path / "golf"), tmp_path / "native", "native")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, env=environment, stderr=log) as server:
        try:
            _ask(f"http://127.0.0.1:{port}/health", None, server)
            body = {"model": str(tmp_path / "native"), "prompt": "ab", "max_tokens": 5, "temperature": 0}
            said = _ask(f"http://127.0.0.1:{port}/v1/completions", body, server)
        finally:
            server.terminate()
    prompt = tokenizer("ab", return_tensors="pt").input_ids
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)[0, 2:]
    assert said["choices"][0]["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def _ask(url: str, body: dict[str, Any] | None, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the answer of a server that may still be starting."""
    data = None if body is None else json.dumps(body).encode()
    while server.poll() is None:  # pytest's own limit ends a wait in vain
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            time.sleep(0.5)
    raise AssertionError("transformers serve ended")
