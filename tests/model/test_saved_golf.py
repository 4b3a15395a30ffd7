"""A saved model, loaded by a new process that has torch and transformers but cannot import hfgolf."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from hfgolf.model.modeling_golf import GolfForCausalLM

LOAD_ALL = """
import sys
from pathlib import Path

sys.modules["hfgolf"] = None  # makes importing it fail, even if it is installed
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

root = Path(sys.argv[1])
token_ids = load_file(root / "token_ids.safetensors")["token_ids"]
logits, said = {}, {}
for folder in sorted(root.glob("model-*")):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert not model.training and "hfgolf" not in type(model).__module__.split(".")[0], type(model)
    with torch.no_grad():
        logits[folder.name] = model(token_ids).logits
    said[folder.name] = model.generate(token_ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
model.save_pretrained(root / "again")
save_file(logits, root / "logits.safetensors")
save_file(said, root / "said.safetensors")
"""


@pytest.mark.slow
def test_models_load_without_hfgolf_with_equal_logits(build_golf, all_options, token_ids, tmp_path):
    expected_logits, expected_words = {}, {}
    for name in ("modern", "gpt2", "embedding_size_untied", "bigram", "value_embedding", "golf_record"):
        golf = build_golf(**all_options[name])
        golf.save_pretrained(tmp_path / f"model-{name}")
        with torch.no_grad():
            expected_logits[f"model-{name}"] = golf(token_ids).logits
        expected_words[f"model-{name}"] = golf.generate(token_ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    save_file({"token_ids": token_ids}, tmp_path / "token_ids.safetensors")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", LOAD_ALL, str(tmp_path)]
    outcome = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    logits, words = load_file(tmp_path / "logits.safetensors"), load_file(tmp_path / "said.safetensors")
    assert logits.keys() == expected_logits.keys()
    for name, expected in expected_logits.items():
        torch.testing.assert_close(logits[name], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(words[name], expected_words[name]), name
    # what that process saved can be loaded again, because the code was saved too
    saved = {path.name for path in (tmp_path / "again").glob("*.py")}
    assert saved == {"configuration_golf.py", "layers_golf.py", "modeling_golf.py"}


def test_tied_head_is_stored_once_and_tied_on_loading(build_golf, tmp_path):
    build_golf().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = GolfForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_model_has_no_buffers_that_loading_could_miss(build_golf, option):
    assert not list(build_golf(**option).buffers())
